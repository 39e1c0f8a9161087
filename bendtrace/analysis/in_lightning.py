"""Analysers as a callback of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bendtrace.analysis.evaluation import AnalyserEvaluation

__all__ = ["lightning_callback"]


def lightning_callback(evaluation: AnalyserEvaluation) -> Any:
    """Return a `lightning.pytorch.Callback` for `AnalyserEvaluation`.

    The model is the `LightningModule`, unless the evaluation says otherwise by `of=`. Batches of
    validation and of the sanity check are not seen. A step is a batch of training.

    Raises:
        ImportError: Lightning is not installed.
    """
    try:
        from lightning.pytorch import Callback  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(
            "this callback needs Lightning: pip install 'bendtrace[lightning]'"
        ) from error

    class AnalyserCallback(Callback):  # type: ignore[misc, unused-ignore]
        """Tells an `AnalyserEvaluation` of the course of training."""

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
