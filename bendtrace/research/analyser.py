"""The base of analysers: interjections that summarise the outputs of nodes over many batches."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.leaves import write_count
from bendtrace.research.streaming import (
    data_frame,
    decode_state,
    encode_state,
    merge_states,
    parts_of,
    plain_results,
)

if TYPE_CHECKING:
    import pandas

# One for all, so that an analyser can be copied and pickled. It is entered again by wrappers.
_lock = threading.RLock()


@dataclass(frozen=True)
class Batch:
    """The targets and sample numbers of a value.

    Attributes:
        targets: (batch, ...), the labels; None if not given.
        samples: (batch,), their numbers in the data set; None if not given.

    Example:
        >>> import torch, bendtrace as bt
        >>> targets, samples = torch.tensor([0, 1, 1]), torch.tensor([7, 8, 9])
        >>> batch = bt.analysis.Batch(targets=targets, samples=samples)
        >>> batch.select(batch.targets == 1).samples
        tensor([8, 9])
    """

    targets: Tensor | None = None
    samples: Tensor | None = None

    def select(self, chosen: Tensor) -> Batch:
        """Return the same for some of the samples.

        Args:
            chosen: (batch,) of bool, or their positions.
        """
        return Batch(
            None if self.targets is None else self.targets[chosen.to(self.targets.device)],
            None if self.samples is None else self.samples[chosen.to(self.samples.device)],
        )


class Analyser(Interjection):
    """Summarises the outputs of nodes, over any number of batches.

    One analyser may be inserted at any number of nodes, and keeps their results separate by path.
    It also works without a model: `analyser.update("anything", value)`. The size of its state does
    not grow with the number of batches, and the states of two analysers can be merged.

    Subclasses define three methods: `start` returns the state for a node, `update_state` adds a
    value, `result` returns the results. A state is a `Statistic`, or a dict or list of statistics;
    then merging, copying, pickling and saving work without further code. The arguments of the
    constructor are kept in attributes of the same names: two analysers can be merged only if these
    agree.

    Each tensor of an output that is a tuple, a mapping or a dataclass has separate results under
    its path: `max|values`, `lstm.output|sub_0`. The first dimension of a tensor counts samples.

    Args:
        per_pass: whether to keep separate results for each pass of a node that runs several times
            in a call, `relu:1`, `relu:2`; otherwise they are combined.

    Attributes:
        enabled: while False, values are ignored and the state does not change.
        needs_targets: whether a value without targets is an error.
        levels: the kinds of keys of nested results, from the outside.

    Example:
        >>> import re, torch, bendtrace as bt
        >>> class Rows(bt.analysis.Analyser):
        ...     def start(self, key):
        ...         return bt.analysis.Count()
        ...     def update_state(self, state, value, batch):
        ...         state.update(value)
        ...     def result(self, state):
        ...         return {"rows": state.result()}
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) if x.sum() > 0 else x.abs())
        >>> rows = Rows()
        >>> with bended.interject(re.compile("relu|abs"), rows):
        ...     for value in (1.0, 2.0, -1.0):
        ...         _ = bended(torch.full((3, 2), value))
        >>> rows.to_dict()["relu"], rows.calls["abs"]
        ({'rows': 6}, 1)
    """

    observes = True
    self_contained: bool = True
    deferrable = True
    needs_targets: ClassVar[bool] = False

    def __init__(self, *, per_pass: bool = False) -> None:
        self.per_pass = per_pass
        self.enabled = True
        self._targets: Tensor | None = None
        self._samples: Tensor | None = None
        self._states: dict[str, Any] = {}
        self._calls: dict[str, int] = {}

    _name: ClassVar[str] = "Analyser"  # the name of the class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_name" not in vars(cls) and not cls.__name__.startswith("_"):
            cls._name = cls.__name__
        is_explicit = "self_contained" in vars(cls)
        super().__init_subclass__(**kwargs)
        if not is_explicit and cls.__module__.startswith(_OURS):
            cls.self_contained = True

    # Defined by subclasses

    @property
    def levels(self) -> tuple[str, ...]:
        """The kinds of keys of the results, from the outside: the nodes, and others."""
        return ("node",)

    def start(self, key: str) -> Any:
        """Return the state of a node without values.

        Args:
            key: path of the node.
        """
        raise NotImplementedError

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Add a value to the state.

        It is called without gradients, without autocast, and outside of inference mode. If it
        raises an `InputError`, the path of the node is put before its message.

        Args:
            state: the state that `start` returned; it is changed in place.
            value: (batch, ...), or without dimensions; it is not a copy, so it must be neither
                changed nor kept.
            batch: its targets and sample numbers.
        """
        raise NotImplementedError

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the results at a node: numbers and tensors by name. The state does not change."""
        raise NotImplementedError

    def merge_state(self, state: Any, other: Any) -> None:
        """Add the state of another analyser to a state, in place."""
        merge_states(state, other)

    # The present batch

    @property
    def targets(self) -> Tensor | None:
        """The labels of the next batch, (batch, ...). They stay until they are replaced."""
        return self._targets

    @targets.setter
    def targets(self, targets: Any) -> None:
        self._set_batch("_targets", _per_sample(targets, "targets"))

    @property
    def samples(self) -> Tensor | None:
        """The numbers of the next batch's samples in the data set, (batch,)."""
        return self._samples

    @samples.setter
    def samples(self, samples: Any) -> None:
        found = _per_sample(samples, "samples")
        if found is not None and (found.dim() != 1 or found.is_floating_point()):
            raise InputError(
                f"samples= has to be integers, (batch,); got {found.dtype}, {tuple(found.shape)}"
            )
        self._set_batch("_samples", found)

    def _set_batch(self, name: str, found: Tensor | None) -> None:
        setattr(self, name, found)

    @contextmanager
    def batch(self, targets: Any = None, samples: Any = None) -> Iterator[Self]:
        """Set targets and sample numbers for the calls within, and restore the old ones after.

        Args:
            targets: (batch, ...), labels.
            samples: (batch,), their numbers in the data set.

        Example:
            >>> import torch, bendtrace as bt
            >>> with bt.analysis.Analyser().batch(targets=[0, 1]) as analyser:
            ...     analyser.targets
            tensor([0, 1])
            >>> analyser.targets is None
            True
        """
        before = self.targets, self.samples
        self.targets, self.samples = targets, samples
        try:
            yield self
        finally:
            self.targets, self.samples = before

    # Seeing

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Add the output of a node."""
        if not self.enabled:
            return
        path = at.path or "output"
        if at.path and at.module is not None and not isinstance(output, Tensor):
            path = f"{path}.output"  # the prefix of the parts of a module's output
        self.update(path, output, number=at.number)

    def _backward_of_call(self) -> Callable[..., Any]:
        given = self._targets
        if not self.needs_targets or given is None:
            return self.backward
        version = write_count(given)

        def backward(at: NodePass, *gradients: Any) -> Any:
            now = self._targets
            same = now is given or (now is not None and torch.equal(now, given))
            if self.enabled and (not same or write_count(given) != version):
                raise InputError(
                    f"{self.label} at {at.path!r}: the targets are not those that were set when "
                    "the model was called: go backward before you set others"
                )
            return self.backward(at, *gradients)

        return backward

    def update(
        self, key: str, value: Any, targets: Any = None, samples: Any = None, *, number: int = 0
    ) -> None:
        """Add a value. Does nothing while not `enabled`.

        Args:
            key: the name to keep its results under, such as a node path.
            value: a tensor, or a container of tensors.
            targets: (batch, ...), its labels; None uses those that are set.
            samples: (batch,), their numbers in the data set; None uses those that are set.
            number: the number of the pass, from 0. With `per_pass` the key contains it, counted
                from 1.

        Raises:
            InputError: it does not fit the earlier values under this key, or lacks targets.
        """
        if not self.enabled:
            return
        batch = Batch(
            self.targets if targets is None else _per_sample(targets, "targets"),
            self.samples if samples is None else _per_sample(samples, "samples"),
        )
        with _lock, torch.inference_mode(False), torch.no_grad():
            for path, tensor in parts_of(key, value):
                path = f"{path}:{number + 1}" if self.per_pass else path
                try:
                    with _full_precision(tensor.device.type):
                        if self.needs_targets:
                            _check_targets(tensor, batch.targets)
                        state = self._states.get(path)
                        if state is None:
                            state = self.start(path)
                        self.update_state(state, tensor, batch)
                        self._states[path] = state  # not before it worked out
                        self._calls[path] = self._calls.get(path, 0) + 1
                except InputError as error:
                    raise InputError(f"{self.label} at {path!r}: {error}") from error

    def reset(self) -> None:
        """Forget all values. Settings, targets and `enabled` stay."""
        self._states.clear()
        self._calls.clear()

    # Results

    @property
    def calls(self) -> dict[str, int]:
        """The number of values under each key: fewer than batches if some skipped the node."""
        return dict(self._calls)

    @property
    def results(self) -> dict[str, dict[Any, Any]]:
        """The results, by node path and name: numbers and tensors."""
        with torch.no_grad():
            return _ByPath({path: self.result(state) for path, state in self._states.items()})

    def to_dict(self) -> dict[str, dict[Any, Any]]:
        """Return the results as numbers and lists of numbers instead of tensors."""
        return {path: plain_results(found) for path, found in self.results.items()}

    def to_pandas(self, *, per_unit: bool = False) -> pandas.DataFrame:
        """Return the results as a table, with a row for each node (and class, ...).

        Args:
            per_unit: whether each unit gets its own row, instead of arrays in the cells.

        Raises:
            InputError: `per_unit` is set, and the tensors at a node have different shapes.
            ImportError: pandas is not installed.
        """
        return data_frame(self.results, self.levels, per_unit=per_unit)

    # Copies, and other analysers

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and name not in _NO_SETTINGS
        }

    def merge(self, other: Self) -> None:
        """Add the values of another analyser, as if this one had received them.

        Args:
            other: an analyser of the same class with the same settings; it is not changed.

        Raises:
            InputError: it has another class, or other settings. Nothing has changed then.
        """
        self._check_alike(other)
        states = copy.deepcopy(self._states)
        for path, state in other._states.items():
            if path not in states:
                states[path] = copy.deepcopy(state)
                continue
            try:
                self.merge_state(states[path], state)
            except InputError as error:
                raise InputError(f"{self.label} at {path!r}: {error}") from error
        self._states = states
        for path, calls in other._calls.items():
            self._calls[path] = self._calls.get(path, 0) + calls

    def _check_alike(self, other: Any) -> None:
        if type(other) is not type(self):
            raise InputError(f"a {type(other).__name__} cannot be merged into a {self.label}")
        self._check_settings(
            self.settings,
            other.settings,
            "the other",
            "only analysers with the same settings can be merged",
        )

    def _check_settings(self, mine: Any, theirs: Any, whose: str, why: str) -> None:
        for name in mine.keys() | theirs.keys():
            if not _same_settings(mine.get(name), theirs.get(name)):
                raise InputError(
                    f"this {self.label} has {name}={mine.get(name)!r}, {whose} has "
                    f"{theirs.get(name)!r}: {why}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as containers of tensors and numbers.

        `torch.save` writes it, and `torch.load` reads it without `weights_only=False`.
        """
        return {
            "analyser": self._name,
            "settings": {name: _setting_of(value) for name, value in self.settings.items()},
            "states": [(path, encode_state(state)) for path, state in self._states.items()],
            "calls": dict(self._calls),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget all values, and load the state of another analyser.

        Args:
            state: a result of its `state_dict`.

        Raises:
            InputError: it belongs to another class, or to other settings. Nothing has changed then.
        """
        if state.get("analyser") != self._name:
            raise InputError(f"this is the state of a {state.get('analyser')}, not {self.label}")
        settings = {name: _setting_of(value) for name, value in self.settings.items()}
        why = "create an analyser with the same settings"
        self._check_settings(settings, state["settings"], "the state", why)
        states = {path: decode_state(plain) for path, plain in state["states"]}
        self._states, self._calls = states, dict(state["calls"])

    @property
    def nbytes(self) -> int:
        """The size of its tensors in bytes."""
        return sum(_bytes_in(encode_state(state)) for state in self._states.values())

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        given = ", ".join(
            f"{name}={value!r}"
            for name, value in self.settings.items()
            if name not in defaults or not _same_settings(value, defaults[name].default)
        )
        seen = [f"{path!r} {calls}x" for path, calls in self._calls.items()]
        more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
        state = "" if self.enabled else "disabled; "
        return (
            f"<{self._name}({given}): {state}"
            f"{'seen ' + ', '.join(seen[:_SHOWN]) + more if seen else 'nothing seen'}>"
        )


class _ByPath(dict[str, dict[Any, Any]]):
    """Results by node path, with the known paths in the error for another one."""

    def __missing__(self, key: object) -> Any:
        listed = ", ".join(map(repr, list(self)[:_SHOWN])) or "nothing yet"
        raise KeyError(f"no results under {key!r}; node paths with results: {listed}")


_OURS = f"{__name__.rpartition('.')[0]}."
_SHOWN = 6
_NO_SETTINGS = frozenset({"enabled", "late", "observes", "self_contained", "wants_inputs"})


def _full_precision(device: str) -> Any:
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _per_sample(given: Any, name: str) -> Tensor | None:
    if given is None:
        return None
    try:
        found = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}= has to be a tensor, (batch, ...), not {given!r}: {error}"
        ) from error
    if found.dim() == 0:
        raise InputError(f"{name}= needs an entry for each sample, (batch, ...); got one number")
    return found


def _check_targets(value: Tensor, targets: Tensor | None) -> None:
    if targets is None:
        raise InputError(
            "targets are needed: set `analyser.targets` to the labels of the batch, (batch,), "
            "before the model is called, or pass them to `update(key, value, targets)`"
        )
    if value.dim() == 0 or value.shape[0] != targets.shape[0]:
        raise InputError(
            f"there are {targets.shape[0]} targets, but the value has shape "
            f"{tuple(value.shape)}, whose first dimension should count the same samples; set "
            "the targets again for each batch"
        )


def _same_settings(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dtype == other.dtype
            and torch.equal(one.cpu(), other.cpu())
        )
    if isinstance(one, Analyser) and type(one) is type(other):
        return _same_settings(one.settings, other.settings)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same_settings, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _same_settings(one[key], other[key]) for key in one
        )
    return bool(one == other)


def _setting_of(value: Any) -> Any:
    """Return a setting in a form that can be saved: itself, or its name."""
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    if isinstance(value, (list, tuple)):
        return [_setting_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _setting_of(item) for key, item in value.items()}
    if isinstance(value, Analyser):
        return [value._name, _setting_of(value.settings)]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _bytes_in(plain: Any) -> int:
    if isinstance(plain, Tensor):
        return plain.numel() * plain.element_size()
    if isinstance(plain, dict):
        return sum(map(_bytes_in, plain.values()))
    if isinstance(plain, (list, tuple)):
        return sum(map(_bytes_in, plain))
    return 0
