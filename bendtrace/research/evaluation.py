"""Analysers during training: on a data set at intervals, or on the training batches."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bendtrace.debug.calls import Call
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.errors import InputError, NeverFiredWarning
from bendtrace.insert.leaves import take_apart
from bendtrace.insert.native import AttachedInterjection, Counts
from bendtrace.insert.where import Where
from bendtrace.module import BendedModule
from bendtrace.python.checks import several
from bendtrace.python.lazy import required
from bendtrace.research.analyser import Analyser
from bendtrace.research.streaming import data_frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Evaluated:
    """The results of an analyser at one point of the training.

    Attributes:
        step: the number of steps of training so far.
        epoch: the number of finished epochs so far.
        results: `analyser.results` at that point.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU())
        >>> dead = bt.analysis.DeadReLU()
        >>> evaluation = bt.analysis.AnalyserEvaluation("1", dead, loader=[torch.eye(2)])
        >>> found = evaluation.evaluate(model)
        >>> found.step, found.epoch, found.results["sub_1"]["count"]
        (0, 0, 2)
    """

    step: int
    epoch: int
    results: Mapping[str, Mapping[Any, Any]]

    def __repr__(self) -> str:
        return f"<after step {self.step}, epoch {self.epoch}: {', '.join(map(repr, self.results))}>"


class AnalyserEvaluation:
    """Runs an analyser on a model during training, and keeps the results of each time.

    With a `loader`, the model runs over it every few steps or epochs, in eval mode. Afterwards
    training modes, buffers and random generators (including the loader's) are restored. Without a
    loader, the analyser uses the batches that the model is trained on, as they run; its results
    cover the steps since the last time. Either way, training is bit for bit the same as without it.

    Use `attached`, `step` and `end_epoch` in a loop of your own, the callback `lightning()` in
    Lightning, the callback `hugging_face()` in a Hugging Face `Trainer`, and `evaluate(model)`
    anywhere.

    Args:
        where: the nodes, as for `BendedModule.interject`.
        analyser: the analyser; for several, an `AnalyserList`. It is reset each time.
        loader: the batches to use; None uses the training batches.
        every: the interval in steps or epochs.
        unit: `"epoch"` or `"step"`.
        of: a function from the trained model to the part to analyse, such as `lambda module:
            module.net`; None for the model itself.
        inputs: a function from the batch to the inputs of the model, in one of the forms that
            `Call.of` accepts. None uses the first item of a pair, all of a mapping as keyword
            arguments, or else the batch itself.
        targets: a function from the batch to the targets. None uses the second item of a pair,
            `labels` of a mapping, or else no targets.
        loss: a function of the output and the batch whose gradients are taken, for analysers of
            gradients with a loader; `.grad` of the parameters is not changed.
        max_batches: the number of batches of the loader to use.
        allow_none: whether `where` may match no node.

    Attributes:
        history: the results, an `Evaluated` for each time.
        steps: the number of steps of training so far.
        epochs: the number of finished epochs.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU())
        >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> evaluation = bt.analysis.AnalyserEvaluation("1", bt.analysis.DeadReLU(), loader=data)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with evaluation.attached(model):
        ...     for epoch in range(2):
        ...         for x, y in data:
        ...             with evaluation.step((x, y)):
        ...                 torch.nn.functional.cross_entropy(model(x), y).backward()
        ...                 optimizer.step()
        ...         evaluation.end_epoch()
        >>> evaluation.history
        [<after step 1, epoch 1: 'sub_1'>, <after step 2, epoch 2: 'sub_1'>]
    """

    epochs: int
    steps: int

    def __init__(
        self,
        where: Where,
        analyser: Analyser,
        *,
        loader: Iterable[Any] | None = None,
        every: int = 1,
        unit: Literal["epoch", "step"] = "epoch",
        of: Callable[[Any], Callable[..., Any]] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        targets: Callable[[Any], Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        max_batches: int | None = None,
        allow_none: bool = False,
    ) -> None:
        if not isinstance(analyser, Analyser):
            raise InputError(f"an analyser is needed, or a list of analysers, not {analyser!r}")
        if type(every) is not int or every < 1 or unit not in ("epoch", "step"):
            raise InputError(
                f'every={every!r} with unit={unit!r}: pass a positive number as every=, and "step" '
                'or "epoch" as unit='
            )
        if isinstance(loader, Iterator):  # `iter(loader)` would draw a random number
            raise InputError(
                "loader= is iterated repeatedly, but this is an iterator, which can be used "
                "only once: pass a list or a DataLoader"
            )
        if loader is None and (inputs or loss or max_batches):
            raise InputError("inputs=, loss= and max_batches= are only for use with loader=")
        self.where = where
        self.analyser = analyser
        self.loader = loader
        self.every = every
        self.unit = unit
        self.history: list[Evaluated] = []
        self.steps = self.epochs = 0
        self._of = of
        self._inputs = inputs or _inputs_in
        self._targets = targets or _targets_in
        self._loss = loss
        self._max_batches = max_batches
        self._allow_none = allow_none
        self._bended: BendedModule | None = None
        self._model: Any = None
        self._attached: ExitStack | None = None
        self._passes = Counts()  # of plain modules, in the step at hand

    # Over a loader

    def evaluate(self, model: Callable[..., Any] | None = None) -> Evaluated:
        """Run over the loader now, and record the results.

        Args:
            model: the model; None for the attached model.

        Raises:
            InputError: there is no loader, or no model.
        """
        model = self._model if model is None else model
        if self.loader is None or model is None:
            what = "loader=" if self.loader is None else "model"
            raise InputError(f"there is no {what} to evaluate")
        if self._of is not None:
            model = self._of(model)
        bended = self._as_bended(model)
        analyser = self.analyser
        with ExitStack() as kept:
            kept.enter_context(PreservedState(bended, modes=True, loader=self.loader, buffers=True))
            kept.enter_context(_ready(analyser))
            bended.eval()
            analyser.reset()
            analyser.enabled = True
            kept.enter_context(bended.interject(self.where, analyser, allow_none=self._allow_none))
            seen = 0
            for batch in itertools.islice(self.loader, self._max_batches):
                seen += self._run(bended, batch, seen)
            return self._note()

    def _run(self, model: BendedModule, batch: Any, seen: int) -> int:
        """Run the model on a batch, and return how many samples are in it."""
        devices = {value.device for value in model.parameters()}
        batch = _move_to_device(batch, devices.pop() if len(devices) == 1 else None)
        call = Call.of(self._inputs(batch))
        count = _count_samples(call)
        targets = self._targets(batch)
        samples = None if count is None else torch.arange(seen, seen + count)
        with self.analyser.batch(targets, samples), torch.set_grad_enabled(self._loss is not None):
            output = call.to(model)
            if self._loss is not None:
                wanted = [value for value in model.parameters() if value.requires_grad]
                torch.autograd.grad(self._loss(output, batch), wanted, allow_unused=True)
        return count or 0

    def _as_bended(self, model: Callable[..., Any]) -> BendedModule:
        if isinstance(model, BendedModule):
            return model
        if self._bended is None or self._bended.model is not model:
            self._bended = BendedModule(model)  # kept, so that its paths are known next time
        return self._bended

    # Alongside training

    @contextmanager
    def attached(self, model: Callable[..., Any]) -> Iterator[AnalyserEvaluation]:
        """Analyse a model while it is trained.

        Args:
            model: the model to train. Without a loader the analyser can be used at any node of a
                `BendedModule`; in another module, at the calls of its submodules, with hooks, and
                under their qualified names.

        Raises:
            InputError: a model is attached already, or `where` matches nothing in this model.
        """
        self.begin(model)
        try:
            yield self
        finally:
            self.end()

    def begin(self, model: Callable[..., Any]) -> None:
        """Start what `attached` does on entry; for callbacks."""
        if self._attached is not None:
            raise InputError("a model is attached already: call end() first")
        with ExitStack() as stack:
            if self.loader is None:
                stack.enter_context(_ready(self.analyser, is_training=True))
                self._insert(self._of(model) if self._of else model, stack)
                self.analyser.reset()
                self.analyser.enabled = False  # but in `step`
            self._attached = stack.pop_all()
        self._model = model

    def _insert(self, model: Callable[..., Any], stack: ExitStack) -> None:
        if isinstance(model, BendedModule):
            made = model.interject(self.where, self.analyser, allow_none=self._allow_none)
            stack.callback(made.remove)
        elif isinstance(model, nn.Module):
            watched = _watch_natively(model, self.where, self.analyser, self._allow_none)
            self._passes = stack.enter_context(watched)
        else:
            raise InputError(f"{model!r} is not a module: wrap it, BendedModule(model)")

    def at_end(self, callback: Callable[[], Any]) -> None:
        """Make `end` call a function; for callbacks."""
        if self._attached is None:
            raise InputError("no model is attached")
        self._attached.callback(callback)

    def end(self) -> None:
        """Do what `attached` does on exit; for callbacks. A second call does nothing."""
        stack, self._attached, self._model = self._attached, None, None
        self._bended = None
        if stack is not None:
            stack.close()

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[None]:
        """Surround one step of training: forward, backward, optimizer.

        Args:
            batch: the batch that contains the targets.
        """
        self.begin_step(batch)
        try:
            yield
        except BaseException:
            if self.loader is None:
                self.analyser.enabled = False
            raise
        self.end_step()

    def begin_step(self, batch: Any = None) -> None:
        """Do what `step` does on entry; for callbacks."""
        if self._attached is None:
            raise InputError("no model is attached: use `with evaluation.attached(model):`")
        self._passes.begin()
        if self.loader is None:
            self.analyser.targets = None if batch is None else self._targets(batch)
            self.analyser.enabled = True

    def came_by(self, batch: Any) -> None:
        """Take the targets from the next training batch; for callbacks."""
        if self.loader is None and self.analyser.enabled:
            self.analyser.targets = self._targets(batch)

    def end_step(self) -> None:
        """Do what `step` does on exit; for callbacks."""
        if self.loader is None:
            self.analyser.enabled = False
        self.steps += 1
        if self.unit == "step" and self.steps % self.every == 0:
            self._due()

    def end_epoch(self) -> None:
        """Record that an epoch of training is over."""
        self.epochs += 1
        if self.unit == "epoch" and self.epochs % self.every == 0:
            self._due()

    def _due(self) -> None:
        if self.loader is not None:
            self.evaluate()
        else:
            self._note()
            self.analyser.reset()

    def _note(self) -> Evaluated:
        if self.loader is None and not self.analyser.calls and not self._allow_none:
            warnings.warn(
                f"{self.analyser.label} at {self.where!r} was not called since the last time: "
                "steps have to be inside `evaluation.step(batch)`, and reach that node",
                NeverFiredWarning,
                stacklevel=4,
            )
        found = Evaluated(self.steps, self.epochs, self.analyser.results)
        self.history.append(found)
        return found

    # In other programs

    def lightning(self) -> Any:
        """Return this as a callback for `lightning.pytorch.Trainer(callbacks=[...])`.

        The model is the `LightningModule`, unless there is an `of=`. Batches of validation and of
        the sanity check are ignored. A step is one training batch.

        Raises:
            ImportError: Lightning is not installed.
        """
        hooks: dict[str, Callable[..., None]] = {
            "on_train_start": lambda _, trainer, module: self.begin(module),
            "on_train_batch_start": lambda _, trainer, module, batch, *more: self.begin_step(batch),
            "on_train_batch_end": lambda *_: self.end_step(),
            "on_train_epoch_end": lambda *_: self.end_epoch(),
            "on_train_end": lambda *_: self.end(),
            "on_exception": lambda *_: self.end(),
        }
        return self._callback(required("lightning.pytorch", "this callback").Callback, hooks)

    def hugging_face(self) -> Any:
        """Return this as a callback for `transformers.Trainer(callbacks=[...])`.

        Batches of evaluation are ignored. A step is one optimizer step, also with gradient
        accumulation. These callbacks do not receive batches: without a loader, the targets come
        from the keyword arguments of the model. Nor are they notified of errors: after an error,
        call `end()` to remove all insertions; otherwise the next training removes them.

        Raises:
            ImportError: transformers is not installed.
        """

        def begin(*_: Any, model: nn.Module, **__: Any) -> None:
            self.end()  # of a training that ended by an error
            self.begin(model)
            if self.loader is None:
                hook = model.register_forward_pre_hook(
                    lambda module, args, kwargs: self.came_by(kwargs), with_kwargs=True
                )
                self.at_end(hook.remove)

        hooks: dict[str, Callable[..., None]] = {
            "on_train_begin": begin,
            "on_step_begin": lambda *_, **__: self.begin_step(),
            "on_step_end": lambda *_, **__: self.end_step(),
            "on_epoch_end": lambda *_, **__: self.end_epoch(),
            "on_train_end": lambda *_, **__: self.end(),
        }
        return self._callback(required("transformers", "this callback").TrainerCallback, hooks)

    def _callback(self, base: type, hooks: dict[str, Callable[..., None]]) -> Any:
        return type("AnalyserCallback", (base,), {"evaluation": self, **hooks})()

    # What was found

    def to_pandas(self, *, per_unit: bool = False) -> pandas.DataFrame:
        """Return the history as a table, with a row for each time and node (and class, ...).

        Each time has a number, counted from 0, an epoch and a step.

        Args:
            per_unit: see `Analyser.to_pandas`.

        Raises:
            InputError: see `Analyser.to_pandas`.
            ImportError: pandas is not installed.
        """
        nested = {
            number: {found.epoch: {found.step: found.results}}
            for number, found in enumerate(self.history)
        }
        levels = ("number", "epoch", "step", *self.analyser.levels)
        return data_frame(nested, levels, per_unit=per_unit)

    def __repr__(self) -> str:
        over = "the training batches" if self.loader is None else "a loader"
        return (
            f"<AnalyserEvaluation of {self.analyser.label} at {self.where!r} over {over}, every "
            f"{self.every} {self.unit}: {len(self.history)} times>"
        )


@contextmanager
def _watch_natively(
    model: nn.Module, where: Any, analyser: Analyser, allow_none: bool
) -> Iterator[Counts]:
    """Have an analyser look at the calls of a plain module's submodules, without any tracing.

    Its paths are the qualified names of these, which compiled expressions match in part. What is
    yielded counts the calls: reset it where a new call of the model begins.
    """
    if "backward" in analyser._forms():
        raise InputError(
            f"{analyser.label} uses gradients, which module hooks cannot separate by call: "
            "train the model as a BendedModule"
        )
    found: dict[str, nn.Module] = {}
    for item in several(where):
        matching = dict(_modules_matching(model, item))
        if not matching and not allow_none:
            raise InputError(
                f"the model has no module {item!r}. In a plain module only calls of modules "
                "can be analysed; for other nodes train it as a BendedModule"
            )
        found.update(matching)
    counts = Counts()
    with ExitStack() as stack:
        begun = model.register_forward_pre_hook(counts.begin, prepend=True)
        stack.callback(begun.remove)
        for name, module in found.items():
            attached = AttachedInterjection(module, analyser, name, counts)
            attached.install()
            stack.callback(attached.remove)
        yield counts


def _modules_matching(model: nn.Module, item: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(item, str):
            matches = item in (name, name.replace(".", "_"))
        elif isinstance(item, re.Pattern):
            matches = item.search(name) is not None
        else:
            matches = isinstance(module, item) if isinstance(item, type) else module is item
        if matches:
            yield name, module


@contextmanager
def _ready(analyser: Analyser, is_training: bool = False) -> Iterator[None]:
    """Restore the settings of an analyser at the end; until then it is in eval mode."""
    before = analyser.enabled, analyser.targets, analyser.samples
    modes = [
        (item, item.training) for item in _nested_analysers(analyser) if hasattr(item, "training")
    ]
    try:
        for item, _ in modes:
            if not is_training:
                item.eval()
        yield
    finally:
        analyser.enabled, analyser.targets, analyser.samples = before
        for item, mode in modes:
            item.train(mode)


def _nested_analysers(analyser: Any) -> Iterator[Any]:
    yield analyser
    if hasattr(analyser, "analyser"):
        yield from _nested_analysers(analyser.analyser)
    for item in getattr(analyser, "analysers", {}).values():
        yield from _nested_analysers(item)


def _inputs_in(batch: Any) -> Any:
    if type(batch) in (tuple, list):
        if len(batch) > 2 or not batch:
            raise InputError(
                f"a batch is a {type(batch).__name__} of {len(batch)}: pass a function from "
                "the batch to the inputs of the model as inputs="
            )
        return batch[0]
    return batch


def _targets_in(batch: Any) -> Tensor | None:
    found = None
    if type(batch) in (tuple, list) and len(batch) == 2:
        found = batch[1]
    elif isinstance(batch, Mapping):
        found = batch.get("labels")
    return found if isinstance(found, Tensor) and found.dim() > 0 else None


def _move_to_device(value: Any, device: torch.device | None) -> Any:
    if device is None or isinstance(value, (str, bytes)):
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _move_to_device(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_move_to_device(item, device) for item in value)
    return value.to(device) if callable(getattr(value, "to", None)) else value


def _count_samples(call: Call) -> int | None:
    for value in take_apart(tuple(call))[1]:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    return None
