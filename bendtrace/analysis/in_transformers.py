"""Analysers as a callback of the Trainer of Hugging Face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bendtrace.analysis.evaluation import AnalyserEvaluation

__all__ = ["trainer_callback"]


def trainer_callback(evaluation: AnalyserEvaluation) -> Any:
    """Return a `transformers.TrainerCallback` for `AnalyserEvaluation`.

    Batches of evaluation are not seen. A step is one of the optimizer, also where gradients are
    accumulated. Callbacks are not told of batches: where the training itself is looked at, the
    targets are taken from the keyword arguments of the model. Nor are they told of errors: after
    one, `evaluation.end()` takes out what is inserted, as the next training does.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from transformers import TrainerCallback  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(
            "this callback needs transformers: pip install 'bendtrace[transformers]'"
        ) from error

    class AnalyserCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Tells an `AnalyserEvaluation` of the course of training."""

        def __init__(self) -> None:
            self.evaluation = evaluation

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            evaluation.end()  # of a training that ended by an error, which nobody tells of
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
