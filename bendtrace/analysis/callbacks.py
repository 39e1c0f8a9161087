"""Analysers as callbacks of Lightning and of the Hugging Face Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bendtrace._lazy import required

if TYPE_CHECKING:
    from bendtrace.analysis.evaluation import AnalyserEvaluation


def lightning_callback(evaluation: AnalyserEvaluation) -> Any:
    """Return a `lightning.pytorch.Callback` for `AnalyserEvaluation`.

    The model is the `LightningModule`, unless the evaluation has an `of=`. Batches of validation
    and of the sanity check are ignored. A step is one training batch.

    Raises:
        ImportError: Lightning is not installed.
    """
    base = required("lightning.pytorch", "this callback").Callback

    class AnalyserCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.evaluation = evaluation

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            evaluation.begin(pl_module)

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            evaluation.begin_step(batch)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            evaluation.end_step()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            evaluation.end_epoch()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            evaluation.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            evaluation.end()

    return AnalyserCallback()


def trainer_callback(evaluation: AnalyserEvaluation) -> Any:
    """Return a `transformers.TrainerCallback` for `AnalyserEvaluation`.

    Batches of evaluation are ignored. A step is one optimizer step, also with gradient
    accumulation. These callbacks do not receive batches: without a loader, the targets come from
    the keyword arguments of the model. Nor are they notified of errors: after an error, call
    `evaluation.end()` to remove all insertions; otherwise the next training removes them.

    Raises:
        ImportError: transformers is not installed.
    """
    base = required("transformers", "this callback").TrainerCallback

    class AnalyserCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.evaluation = evaluation

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            evaluation.end()  # of a training that ended by an error
            evaluation.begin(model)
            if evaluation.loader is None:
                hook = model.register_forward_pre_hook(
                    lambda module, args, kwargs: evaluation.came_by(kwargs), with_kwargs=True
                )
                evaluation.at_end(hook.remove)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evaluation.begin_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evaluation.end_step()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evaluation.end_epoch()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evaluation.end()

    return AnalyserCallback()
