"""Keeps activations, gradients and times of a run while it is recorded."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import fnmatch
import os
import re
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.log.building import RunData
from bendtrace.log.entries import Layer, LayerEntry, ModuleEntry, Namer, nbytes_of, tensors_of
from bendtrace.log.nodes import NodePath
from bendtrace.log.path_views import Node, NodeSelector
from bendtrace.log.run import is_layer_name
from bendtrace.python.compare import same_bits
from bendtrace.python.internals import internal
from bendtrace.record.op_names import NodeRef, target_name
from bendtrace.tape.captured import gradient_function, is_leaf, requires_grad
from bendtrace.tape.tape import ModuleCall, Op, OpKind, meta_of
from bendtrace.tape.watchers import StopRun, call_silently
from bendtrace.watch.functions import is_torchs_function, name_of
from bendtrace.watch.mode_queries import unseen
from bendtrace.watch.owners import modules_in
from bendtrace.watch.writes import storage_of, version_of

Key = tuple[int, tuple[Any, ...]]
_SMALL = 10_000  # elements
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_RANDOM = re.compile(
    "rand|dropout|normal|bernoulli|multinomial|poisson|uniform|exponential|geometric|cauchy|rrelu|"
    "binomial|gumbel|dirichlet|gamma|fractional|lstm|gru|rnn|attention"
)


class EarlierTensor(NamedTuple):
    """A tensor that existed before the run, at its first use in the run."""

    tensor: weakref.ref[Tensor]  # a weak reference to the tensor
    version: int  # how often it had been written to
    copy: Tensor | None  # its content, for small tensors

    def read(self) -> Tensor | None:
        """Return its content at that point; None if it is no longer known."""
        tensor = self.tensor()
        if self.copy is not None or tensor is None:
            return self.copy
        return tensor if version_of(tensor) == self.version else None


class Store(Protocol):
    """Moves values out of memory during a run."""

    def add(self, name: str, tensor: Tensor) -> Any:
        """Write a tensor; return an object that reads it back, or a `WriteRefusal`."""


@runtime_checkable
class WriteRefusal(Protocol):
    """The reason why a tensor could not be written."""

    reason: str


class ValueCapture:
    """An observer of a run that keeps the chosen values: True for all, None for none.

    The run ends after the value or module that `stop` selects. Values are converted, and detached,
    before they are kept, in memory or in a store. For `torchlens`, see `Namer`.
    """

    def __init__(
        self,
        chosen: Selection | bool | None = True,
        *,
        stop: Selection | None = None,
        convert: Callable[[Tensor], Tensor] | None = None,
        detach: bool = True,
        gradients: bool = False,
        store: Store | None = None,
        torchlens: bool = False,
    ) -> None:
        self.saved: dict[Key, Any] = {}  # the kept values, by op and element
        # The gradients of the chosen values; None if they are not kept.
        self.gradients: LatestGradients | None = LatestGradients(convert) if gradients else None
        # The values read from tensors that were written to after their op returned them, by the
        # reading op and the op of the tensor.
        self.reread: dict[tuple[int, int], Any] = {}
        # The values that modules received or returned, of tensors that were written to after their
        # op returned them, by length of the tape and op; None if not kept.
        self.boundary_values: dict[tuple[int, int], Any] = {}
        # State of torch's generator before each op that is known to draw from it.
        self.random: dict[int, Tensor] = {}
        self.times: dict[int, int] = {}  # the time of each op in nanoseconds
        # Name of the gradient function of each value that has one.
        self.grad_fns: dict[Key, str] = {}
        self.marks: GraphMarks = GraphMarks()  # which op made which node of the autograd graph
        self.chosen = chosen or None  # as given
        self.torchlens: bool = torchlens  # as given
        self.stop = stop  # as given
        self.states: dict[int, EarlierTensor] = {}  # the tensors that existed before the run, by op
        self.ended: str = ""  # where the run was ended early; "" if it was not
        self.error: Exception | None = None  # an error raised by a user function
        self.seconds: float = 0.0  # the duration of the whole run
        # The seed of torch's generator at the start of the run.
        self.seed: int = torch.initial_seed()
        self._convert = convert
        self._detach = detach
        self._store = store
        selections = [each for each in (chosen, stop) if isinstance(each, Selection)]
        self._namer = Namer(torchlens) if selections else None
        # Whether keeping a copy is all that a value without a graph needs.
        self._is_simple = self.is_exact and self.gradients is None and not selections
        last = max((each.last for each in selections), default=0)
        self._last: collections.deque[tuple[Key, int, Tensor, Tensor]] = collections.deque(
            maxlen=last
        )
        self._keys: dict[int, tuple[weakref.ref[Tensor], Key]] | None = (
            {} if any(each.asks_for_results for each in selections) else None
        )
        # Of functions, by identity (the tape keeps them): whether they draw random numbers, and
        # whether they change sizes in place.
        self._kinds: dict[int, tuple[bool, bool]] = {}
        # Memory whose address others may know must not move.
        self._fixed: set[int] = set()
        # Everything, if only the finished run can resolve the request.
        self._waiting: dict[Key, Tensor] | None = None
        if isinstance(chosen, Selection) and chosen.deferred:
            self._waiting = {}

    @property
    def deferred(self) -> list[Any]:
        """The requests that only the finished run can resolve."""
        return self.chosen.deferred if isinstance(self.chosen, Selection) else []

    def choose(self, keys: Iterable[Key]) -> None:
        """Keep some values of the finished run, and forget the others."""
        waiting, self._waiting = self._waiting or {}, None
        for key in keys:
            if key in waiting and key not in self.saved:
                kept = waiting[key]
                self._put(key, kept if self._convert is None else self._convert(kept))
        if self.gradients is not None:
            self.gradients.wanted = self.saved.keys()

    def finish(
        self, result: Any, outputs: Callable[[], list[Key]],
        rewritten: Mapping[int, int | None], end: int,
    ) -> None:  # fmt: skip
        """Record that the run has ended, after so many ops.

        `outputs` returns the values of the tape in its result, in order. `rewritten` has for those
        that were written to later the op that gave them last; None if it gave another tensor.
        """
        for tensor in tensors_in(result):
            materialize(tensor)  # the caller receives an ordinary tensor
        if isinstance(self.chosen, Selection) and self._namer is not None:
            # Finding the outputs takes a walk along the whole run.
            left = self.chosen.last or self.chosen.unmet()
            given = outputs() if left and not self.ended else []
            self._choose_from_the_end(given, rewritten, end)
        self._last.clear()
        self._keys = None

    def _choose_from_the_end(
        self, outputs: list[Key], rewritten: Mapping[int, int | None], end: int
    ) -> None:
        """Keep the values selected by positions from the end, and by names of outputs."""
        assert isinstance(self.chosen, Selection)
        assert self._namer is not None
        count = self._namer.count + len(outputs)
        for key, position, copy, tensor in self._last:
            if self.chosen.from_the_end(position, count):
                self._put(key, copy)
                self._watch(key, tensor)
        alive = {key: tensor for tensor, key in (self._keys or {}).values()}
        for given in outputs:
            layer, _ = self._namer.name_output()
            position = self._namer.count - 1
            names = (layer.name, layer.short_name, f"{layer.name}:1", f"{layer.short_name}:1")
            met = self.chosen.layer(names, position)
            writer = rewritten.get(given[0])
            weak = alive.get(given) or (None if writer is None else alive.get((writer, ())))
            output = None if weak is None else weak()
            if (self.chosen.from_the_end(position, count) or met) and output is not None:
                if given[0] in rewritten:
                    self.reread[end, given[0]] = self._store_copy(f"{given[0]}@{end}", output)
                else:
                    self._save_output(output)

    @property
    def is_exact(self) -> bool:
        """True if every value of the run was kept in memory as it was."""
        return self.chosen is True and self._store is None and self._convert is None

    # What a run shows

    def argument(self, op: Op, tensor: Tensor) -> None:
        """Keep an argument."""
        self._fixed.add(storage_of(tensor))
        self._take(op, (), tensor)

    def state(self, op: Op, tensor: Tensor) -> None:
        """Record a tensor that existed before the run."""
        self._fixed.add(storage_of(tensor))
        copy = None
        is_plain = tensor.layout is torch.strided and not tensor.is_nested
        is_small = is_plain and tensor.numel() <= _SMALL
        if self.is_exact and not isinstance(tensor, nn.Parameter) and is_small:
            # The run may go on to change it, as batch norm does.
            copy = aligned_copy(tensor.detach())
        self.states[op.index] = EarlierTensor(weakref.ref(tensor), version_of(tensor), copy)
        self.marks.add_state(op, tensor)

    def _keep_states(self, data: Tensor) -> None:
        """Copy the states in the memory of `data`, since writes through it are not counted."""
        for index, state in list(self.states.items()) if self.is_exact else ():
            tensor = state.read() if state.copy is None else None
            if tensor is None or storage_of(tensor) != storage_of(data):
                continue
            copy: Tensor = aligned_copy(tensor.detach())
            if isinstance(tensor, nn.Parameter):  # kernels can depend on it
                copy = Tensor._make_subclass(nn.Parameter, copy, tensor.requires_grad)
            self.states[index] = state._replace(copy=copy)

    def reads(self, position: int, index: int, tensor: Tensor) -> None:
        """Keep a value that is read, if it differs from the kept value of the tensor.

        It was written to after op `index` had returned it. The reader is the op at a position of
        the tape, or the caller of the run, at its end.
        """
        if self.is_exact:
            self.reread[position, index] = self._copy(tensor)

    def heeds(self, function: Any) -> bool:
        """Return whether a function draws random numbers, changes sizes, or may not run again."""
        can_end = self.stop is not None or isinstance(self.chosen, Selection)
        return can_end or any(self._kind_of(function))

    def _kind_of(self, function: Any) -> tuple[bool, bool]:
        kind = self._kinds.get(id(function))
        if kind is None:
            name = name_of(function)
            kind = (bool(_RANDOM.search(name)), name.startswith(("resize", "set_")))
            self._kinds[id(function)] = kind
        return kind

    def begins(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the state of the generator, if an op is about to draw from it."""
        if self.ended:
            raise StopRun(self.ended)  # also if the model has caught it before
        draws, resizes = self._kind_of(op.target)
        if draws and self.chosen is True:
            self.random[op.index] = call_silently(torch.get_rng_state, (), {})
        if resizes or "out" in kwargs:
            for tensor in tensors_in((args, kwargs.get("out"))):
                materialize(tensor)

    def gave(self, op: Op, out: Any) -> None:
        """Keep the result of an op."""
        if op.target == _DATA:
            self._keep_states(out)
        if isinstance(out, Tensor):
            # Nearly all values of nearly all logs take this path, so it has to be cheap.
            if self._is_simple and type(out) is Tensor and not out.requires_grad:
                if (copy := lazily_copied_unless(out, self._fixed)) is not None:
                    self.saved[op.index, ()] = copy
                    return
            self._take(op, (), out)
        elif isinstance(out, (tuple, list)):
            for element, _ in tensors_of(op.meta):
                tensor: Any = out
                for key in element:
                    tensor = tensor[key]
                self._take(op, element, tensor)

    def wrote(self, op: Op, tensor: Tensor) -> None:
        """Keep the content of a tensor that an op has written to, and has not returned."""
        self._take(op, (), tensor)

    def module_starts(
        self, call: ModuleCall, given: Any, rewritten: Callable[[Tensor], int | None]
    ) -> None:
        """Keep the inputs of a module that differ from the results of ops.

        `rewritten` returns the op of a tensor that was written to since the op returned it.
        """
        if self.chosen is not None:
            for tensor in tensors_in(given):
                wanted = self.chosen is True or self._waiting is not None
                self._pass(call.start, tensor, rewritten(tensor), wanted)

    def module_ends(
        self, call: ModuleCall, output: Any, rewritten: Callable[[Tensor], int | None]
    ) -> None:
        """Keep the output of a module, or end the run, if requested."""
        names = (call.path, f"{call.path}:{call.number + 1}") if call.path else ()
        picked = False
        if self._keys is not None and isinstance(self.chosen, Selection):
            picked = self.chosen.module(call.module, names)
        wanted = picked or self.chosen is True or self._waiting is not None
        for tensor in tensors_in(output) if self.chosen is not None else ():
            index = rewritten(tensor)
            self._pass(call.stop, tensor, index, wanted)
            if index is None and picked:
                self._save_output(tensor)
        if self._keys is None:
            return
        if self.stop is not None and self.stop.module(call.module, names):
            self._end(f"after {call.path or 'the model'}")

    def escaped(self, value: Any) -> None:
        """Leave the memory of tensors where it is: code may keep a pointer to it."""
        for tensor in tensors_in(value):
            materialize(tensor)
            self._fixed.add(storage_of(tensor))

    # What is done about it

    def _take(self, op: Op, element: tuple[Any, ...], tensor: Tensor) -> None:
        key = (op.index, element)
        function = gradient_function(tensor)
        if function is not None:
            self.grad_fns[key] = type(function).__name__
            self.marks.add(op, element, tensor, function)
        elif op.kind is OpKind.INPUT and requires_grad(tensor):
            self.marks.leaves[op.index] = weakref.ref(tensor)
        if self.chosen is True:
            self._save(key, tensor)
        if self._namer is None:
            return
        if self._waiting is not None:
            self._waiting[key] = self._copy(tensor, converted=False)
            self._watch(key, tensor)
        layer, number = self._namer.name(op, element)
        plain = (layer.name, layer.short_name)
        names = (*plain, *(f"{name}:{number}" for name in plain))
        position = self._namer.count - 1
        about = op, element, layer, number, position, tensor
        if self._keys is not None:
            self._keys[id(tensor)] = (weakref.ref(tensor), key)
        if isinstance(self.chosen, Selection):
            if self.chosen.layer(names, position):
                self._save(key, tensor)
            elif self.chosen.needs_entries:
                entry = self._entry(*about)
                made = self._ask_functions(self.chosen, entry)
                if made is not None:
                    self._put(key, entry.saved if made is True else made)
                if made is True:
                    self._watch(key, tensor)
            if self._last.maxlen:
                self._last.append((key, position, self._copy(tensor), tensor))
        if self.stop is None or self.ended:
            return
        met = self.stop.layer(names, position)
        if not met and self.stop.needs_entries:
            met = self._ask_functions(self.stop, self._entry(*about)) is not None
        if met:
            self._end(f"after {layer.name}", is_running=op.kind is not OpKind.INPUT)

    def _ask_functions(self, selection: Selection, entry: LayerEntry) -> Any:
        """Return the results of a selection's functions for an entry; end the run if one raises."""
        try:
            return selection.apply_functions(entry)
        except Exception as error:
            self.error = error  # kept from the model's own handlers
            why = f"because a user function raised {type(error).__name__}"
            self._end(why, is_running=entry.kind != "input")
            return None

    def _pass(self, position: int, tensor: Tensor, index: int | None, wanted: bool) -> None:
        """Keep a value that a module passes on, if it was written to since op `index`."""
        if index is not None and self.boundary_values.get((position, index)) is None:
            kept = self._store_copy(f"{index}@{position}", tensor) if wanted else None
            self.boundary_values[position, index] = kept

    def _store_copy(self, name: str, tensor: Tensor) -> Any:
        value = self._copy(tensor)
        return value if self._store is None else self._store.add(name, value)

    def _save_output(self, tensor: Tensor) -> None:
        key = None if self._keys is None else self._keys.get(id(tensor))
        if key is not None and key[0]() is tensor and key[1] not in self.saved:
            self._save(key[1], tensor)

    def _end(self, where: str, *, is_running: bool = True) -> None:
        self.ended = where
        if is_running:
            raise StopRun(where)

    def _save(self, key: Key, tensor: Tensor) -> None:
        if self._store is None:
            self.saved[key] = self._copy(tensor)
        else:
            self._put(key, self._copy(tensor))
        self._watch(key, tensor)

    def _watch(self, key: Key, tensor: Tensor) -> None:
        if self.gradients is not None and key not in self.gradients.watched:
            self.gradients.watch(key, tensor)

    def _put(self, key: Key, value: Any) -> None:
        if self._store is not None and isinstance(value, Tensor):
            name = ".".join(map(str, (key[0], *key[1])))
            value = self._store.add(name, value)
        self.saved[key] = value

    def _copy(self, tensor: Tensor, converted: bool = True) -> Tensor:
        """Return a tensor with the present values of another, without copying them if possible."""
        value = tensor.detach() if self._detach else tensor
        if self._convert is not None and converted:
            moved = self._convert(value)
            if moved is not value:
                return moved
        return aligned_copy(value) if storage_of(value) in self._fixed else lazily_copied(value)

    def _entry(
        self, op: Op, element: tuple[Any, ...], layer: Layer, number: int, position: int,
        tensor: Tensor,
    ) -> LayerEntry:  # fmt: skip
        """Return an entry with the properties known during the run."""
        entry = LayerEntry(
            "input" if op.kind is OpKind.INPUT else "op",
            layer.layer_type, layer.name, layer.short_name, number, ordinal=position,
            index=op.index, element=element, module=op.scope.path, inplace=bool(op.writes),
        )  # fmt: skip
        entry.passes = number  # so far
        entry.shape, entry.dtype, entry.device = meta = meta_of(tensor)
        entry.nbytes = nbytes_of(meta)
        entry.grad_fn = self.grad_fns.get((op.index, element))
        if op.kind is OpKind.CALL:
            entry.function, entry.target = name_of(op.target), target_name(op.target)
        entry.saved = self._copy(tensor)  # the function may write to it, or give it back
        return entry

    def attach(self, log: RunData, end: int) -> None:
        """Attach the kept data to the entries of the log of the finished run."""
        labels: dict[str, LayerEntry] = {}
        for entry in log.entries:
            source, value = entry, None
            if entry.kind != "output":
                labels[entry.label] = entry
            elif entry.label not in log.given_out:
                source = labels.get(entry.parents[0], entry) if entry.parents else entry
            else:
                value = self.reread.get((end, log.given_out[entry.label]))
                writer = labels.get(entry.parents[0]) if len(entry.parents) == 1 else None
                # The entry of some writers holds a different tensor, as for `batch_norm`.
                if writer is not None and writer.inplace:
                    source = writer
            key = None if source.index is None else (source.index, source.element)
            while key in log.changed:
                key = log.changed[key]
            if value is None and key is not None:
                value = self.saved.get(key)
            entry.saved, entry.unsaved = _unkept(value)
            if key is None:
                continue
            if self.gradients is not None:
                self.gradients.attach(key, entry)
            entry.grad_fn = self.grad_fns.get(key)
            if entry is source and source.index in self.times:
                entry.time = self.times[source.index] / 1e9
        for at, value in self.boundary_values.items():
            for place, entry in log.boundary_places.get(at, ()):
                if value is None or not same_bits(entry.saved, value):
                    saved, unsaved = _unkept(value)
                    log.boundary_entries[place] = replace(
                        entry, saved=saved, unsaved=unsaved, gradient=None
                    )


def _unkept(value: Any) -> tuple[Any, str]:
    """Return a kept value, and why it could not be stored; "" if it was."""
    return (None, value.reason) if isinstance(value, WriteRefusal) else (value, "")


_WORDS = {"save": "'all' saves everything", "stop_after": "None runs to the end"}


@dataclass(frozen=True)
class SaveOptions:
    """The values to keep of a run, and their form."""

    save: Any = "all"  # "all", "none", or a spec of `Selection`
    gradients: bool = False  # whether to keep gradients as well
    stop_after: Any = None  # where to end the run; a spec of `Selection`
    # The device to keep values on; None leaves them where they are.
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None  # dtype of kept floating point values; None keeps theirs
    keep_graph: bool = False  # whether kept values stay part of the autograd graph
    # Where to stream kept values to; None to keep them in memory.
    directory: str | os.PathLike[str] | None = None
    torchlens: bool = False  # how layers are named; see `Namer`

    def __post_init__(self) -> None:
        if self.dtype is not None and not (
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        ):
            raise InputError(f"saved values need a floating point dtype, not {self.dtype!r}")
        for name, given in (("save", self.save), ("stop_after", self.stop_after)):
            if given is True:
                raise InputError(f"{name}= takes names of layers, not {given}: {_WORDS[name]}")
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
                raise InputError(f"{self.device!r} is not a device to save on: {error}") from error
        if self.keep_graph and self.directory is not None:
            raise InputError("values streamed to a directory cannot keep their graph")
        if self.gradients and self.selection() is None:
            raise InputError("gradients are kept for saved values only, and save='none' saves none")
        if self.stop_after is not None and Selection(self.stop_after).deferred:
            raise InputError(
                "stop_after takes names of layers and modules, positions, modules, and "
                "functions of an entry, which are known during the run; only the finished run "
                f"can resolve {self.stop_after!r}"
            )
        if self.stop_after is not None and Selection(self.stop_after).last:
            raise InputError(
                "stop_after does not support positions from the end, which are not known "
                f"before the run is over: {self.stop_after!r}"
            )

    def selection(self, model: Any = None) -> Selection | bool | None:
        """Return the values to keep in a run of a model: True for all, None for none."""
        if self.save is None or (isinstance(self.save, str) and self.save == "none"):
            return None
        if isinstance(self.save, str) and self.save == "all":
            return True
        if isinstance(self.save, bool):
            return self.save or None
        return Selection(self.save, model)

    def capture(self, store: Store | None, model: Any) -> ValueCapture:
        """Return an observer that keeps the requested values in a run of a model."""
        return ValueCapture(
            self.selection(model),
            stop=None if self.stop_after is None else Selection(self.stop_after),
            convert=None if self.device is None and self.dtype is None else self._convert,
            detach=not self.keep_graph,
            gradients=self.gradients,
            store=store,
            torchlens=self.torchlens,
        )

    def _convert(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        return tensor.to(device=self.device, dtype=dtype)


# Selecting values of a run during the run.

Spec = (
    str
    | int
    | re.Pattern[str]
    | type[nn.Module]
    | nn.Module
    | Callable[[LayerEntry], Any]
    | Node
    | NodeRef
    | NodeSelector
    | LayerEntry
    | ModuleEntry
    | Iterable[Any]
)

_WILD = re.compile(r"[*?\[]")
_SINGLE = (str, int, re.Pattern, nn.Module, LayerEntry, ModuleEntry)
_DEFERRED = (Node, NodePath, NodeRef, NodeSelector)


@dataclass(eq=False)
class _Want:
    """One request."""

    key: Any
    met: bool = False

    def matches(self, names: tuple[str, ...]) -> bool:
        if isinstance(self.key, re.Pattern):
            return any(map(self.key.fullmatch, names))
        if not isinstance(self.key, str):
            return False
        if _WILD.search(self.key):
            return any(fnmatch.fnmatchcase(name, self.key) for name in names)
        return self.key in names


class Selection:
    """Values selected by names, modules, positions or functions.

    Args:
        spec: one of these, or several in a list:

            - a name of a layer, with or without position and pass (`conv2d_3_7`, `relu_1:2`);
            - a name of a module, with or without pass (`features.6`): the outputs of the module;
            - a pattern for such names, with `*`, or compiled;
            - a position, also counted from the end;
            - a module, or a class of modules: their outputs;
            - a function of the entry: its result is kept; True keeps the value itself, False and
              None keep nothing;
            - a node path, a tree node or a node of a mirror, an entry of a log, a selector or a
              torch function. Only the finished run can resolve these.
        model: the model to run.

    Raises:
        InputError: the spec is none of these.
    """

    def __init__(self, spec: Spec, model: Any = None) -> None:
        single = isinstance(spec, (*_SINGLE, *_DEFERRED)) or callable(spec)
        try:
            keys = [spec] if single else list(spec)  # type: ignore[arg-type]
        except TypeError:
            keys = [spec]
        for place, key in enumerate(keys):
            if isinstance(key, LayerEntry):
                key = keys[place] = key.label
            if isinstance(key, ModuleEntry):
                key = keys[place] = key.label if key.passes > 1 else key.name
            if isinstance(key, bool) or not (
                isinstance(key, (str, int, re.Pattern, nn.Module, *_DEFERRED)) or callable(key)
            ):
                raise InputError(
                    "values to save are selected by names, positions, modules or functions, "
                    f"not by {key!r}"
                )
        modules = None if model is None else frozenset(modules_in(model))
        # The requests that only the finished run can resolve.
        self.deferred: list[_Want] = [_Want(key) for key in keys if _is_deferred(key, modules)]
        keys = [key for key in keys if all(key is not want.key for want in self.deferred)]
        self._functions = [_Want(key) for key in keys if _is_function(key)]
        self._names = [_Want(key) for key in keys if isinstance(key, (str, re.Pattern))]
        self._positions = {key: _Want(key) for key in keys if isinstance(key, int)}
        self._modules = [_Want(key) for key in keys if _is_module(key)]

    @property
    def last(self) -> int:
        """The number of last layers that positions from the end can select."""
        return -min((key for key in self._positions if key < 0), default=0)

    @property
    def asks_for_results(self) -> bool:
        """True if outputs of modules, or of the run, can be selected."""
        return bool(self._names or self._modules or self._positions)

    @property
    def needs_entries(self) -> bool:
        """True if entries are needed to decide what is selected."""
        return bool(self._functions)

    def layer(self, names: tuple[str, ...], position: int) -> bool:
        """Return whether a layer is selected by its names or its position."""
        found = [want for want in self._names if want.matches(names)]
        return _meet_requests([*found, self._positions.get(position)])

    def from_the_end(self, position: int, count: int) -> bool:
        """Return whether a layer is selected by its position from the end."""
        return _meet_requests([self._positions.get(position - count)])

    def module(self, module: nn.Module | None, names: tuple[str, ...]) -> bool:
        """Return whether the outputs of a module are selected."""
        found = [want for want in self._names if want.matches(names)]
        for want in self._modules:
            key = want.key
            if module is key or (isinstance(key, type) and isinstance(module, key)):
                found.append(want)
        return _meet_requests(found)

    def apply_functions(self, entry: LayerEntry) -> Any:
        """Return the results of the functions for an entry: True for the value, None for nothing.

        They do not advance the random numbers of the run, and are not recorded.
        """
        for want in self._functions:
            state = call_silently(torch.get_rng_state, (), {})
            made = call_silently(want.key, (entry,), {})
            call_silently(torch.set_rng_state, (state,), {})
            want.met = True
            if made is not None and made is not False:
                return made
        return None

    def unmet(self) -> list[Any]:
        """Return the requests that matched nothing."""
        wants = [*self._names, *self._modules, *self._positions.values(), *self.deferred]
        return [want.key for want in wants if not want.met]


def _meet_requests(wants: Iterable[_Want | None]) -> bool:
    """Note that requests are met; return whether there are any."""
    found = [want for want in wants if want is not None]
    for want in found:
        want.met = True
    return bool(found)


def _is_deferred(key: Any, modules: frozenset[str] | None) -> bool:
    """Return whether only the finished run can resolve a key."""
    if isinstance(key, _DEFERRED):
        return True
    if not isinstance(key, str):
        return callable(key) and not _is_module(key) and is_torchs_function(key)
    if modules is None or _WILD.search(key):
        return False
    name = re.sub(r":\d+$", "", key)
    if is_layer_name(name):  # a module can have the name of a layer, and then the name is ambiguous
        return any(name in (module, module.replace(".", "_")) for module in modules)
    return name not in modules


def _is_module(key: Any) -> bool:
    return isinstance(key, nn.Module) or (isinstance(key, type) and issubclass(key, nn.Module))


def _is_function(key: Any) -> bool:
    return callable(key) and not _is_module(key) and not is_torchs_function(key)


# Which op of a run made a node of torch's autograd graph.

_now: Callable[[], int] = internal(
    "torch._C._autograd._get_sequence_nr", lambda: 0, "the ops of nodes of the backward pass"
)


class GraphMarks:
    """Finds the op that made a node of the autograd graph, without keeping the graph alive.

    torch numbers the nodes of a thread in the order in which they are made (seen in 2.13,
    `tests/test_backward.py` notices a change). So the nodes of an op are those whose numbers were
    given out while it ran. Numbers of other threads can be the same; the marks in the metadata of
    nodes say where the graph of the run begins and ends.
    """

    def __init__(self) -> None:
        # For each value that has a node, the mark and the number of the node, and which of its
        # outputs the value is.
        self.places: dict[Key, tuple[tuple[str, int], int]] = {}
        # The arguments of the run that are leaves, by op.
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        self._last: int = _now()
        self._starts: list[int] = []
        self._spans: list[tuple[int, int]] = []  # end, op

    def add(self, op: Op, element: tuple[Any, ...], tensor: Tensor, node: Any) -> None:
        """Note that an op has returned, or received, a tensor with a node."""
        now = _now()
        is_input = op.kind is OpKind.INPUT
        mark = node.metadata.setdefault(self, "before" if is_input else "run")
        if now > self._last and not is_input:
            self._starts.append(self._last)
            self._spans.append((now, op.index))
        self._last = now
        self.places[op.index, element] = (mark, node._sequence_nr()), tensor.output_nr

    def add_state(self, op: Op, tensor: Tensor) -> None:
        """Note that the run reads a tensor that none of its ops has returned."""
        node = gradient_function(tensor)
        if node is not None:
            mark = node.metadata.setdefault(self, "before")
            self.places[op.index, ()] = (mark, node._sequence_nr()), tensor.output_nr
        self._last = _now()  # what has made it is no op of the run

    def mark_of(self, node: Any) -> Literal["run", "before", ""]:
        """Return whether a node made a value of the run, or one that the run received."""
        found: Literal["run", "before"] | None = node.metadata.get(self)
        return found or ""

    def op_of(self, number: int) -> int | None:
        """Return the op that made a node of the run, by the number of the node."""
        at = bisect.bisect_right(self._starts, number) - 1
        if at < 0 or number >= self._spans[at][0]:
            return None
        return self._spans[at][1]


# Kept values: copies that are made only when the original is written to, and gradients.

_PLAIN = frozenset({Tensor, nn.Parameter})
_LAZY = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8,
    }
)  # fmt: skip
# Where they are missing, what is done makes copies of memory that is shared until a write.
_address = internal("torch._C._data_address", lambda tensor: tensor.untyped_storage().data_ptr())
_is_shared = internal("torch._C._is_cow_tensor", lambda tensor: True)


def lazily_copied(value: Tensor) -> Tensor:
    """Return a tensor with the present values of another; nothing is copied before a write.

    Tensors that torch cannot copy lazily are copied right away.
    """
    # Not for quantised values, whose copy would have no quantizer, nor for tensors that are only
    # marked as conjugated or negated: the copy would lose the mark, and with it the values.
    if (
        value.dtype in _LAZY
        and type(value) in _PLAIN
        and value.layout is torch.strided
        and not value.is_neg()
    ):
        try:
            # Private to torch (seen in 2.13 to 2.15). tests/test_capture.py notices if later writes
            # reach kept values, or if anything is copied without a write.
            return value._lazy_clone()
        except RuntimeError:  # memory of others, such as numpy's, or none at all
            pass
    return aligned_copy(value)


def lazily_copied_unless(value: Tensor, fixed: Container[int]) -> Tensor | None:
    """Copy an exact `Tensor` lazily; return None if it needs a closer look."""
    if value.layout is not torch.strided or value.dtype not in _LAZY or value.is_neg():
        return None
    try:
        if value.untyped_storage()._cdata in fixed:
            return None
        return value._lazy_clone()
    except RuntimeError:  # see `lazily_copied`
        return None


def aligned_copy(value: Tensor) -> Tensor:
    """Return a copy with the same alignment and strides, even if they overlap or leave gaps."""
    if (
        type(value) not in _PLAIN
        or value.layout is not torch.strided
        or value.is_nested
        or value.is_quantized
        or value.is_meta
        or not value.numel()
    ):
        return value.clone()
    shift = _shift(value)
    if not shift:
        copy = value.clone()
        if copy.stride() == value.stride():
            return copy
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    flat = value.new_empty(extent + shift)
    flat[shift:].copy_(value.as_strided((extent,), (1,)))
    return flat.as_strided(value.shape, value.stride(), shift)


_ALIGNMENT = 64  # bytes, of memory that torch allocates


def _shift(value: Tensor) -> int:
    """Return the offset of a tensor, in elements, from an address that torch would choose.

    Kernels can round differently for other alignments.
    """
    try:
        address = _address(value) + value.storage_offset() * value.itemsize
    except RuntimeError:  # without memory, as inside torch.vmap
        return 0
    return int(address % _ALIGNMENT // value.itemsize)


def materialize(tensor: Tensor) -> None:
    """Give a tensor its own memory, if it shares memory until a write.

    torch cannot change the size of shared memory, and writes through its address go unnoticed.
    """
    with unseen():
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return
        with contextlib.suppress(RuntimeError):  # without memory, as inside torch.vmap
            if _is_shared(tensor):
                tensor.data_ptr()


def tensors_in(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield the tensors in a value and the containers and dataclasses in it."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen |= {id(value)}
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), seen)


MemoryKey = tuple[int, tuple[Any, ...]]


class LatestGradients:
    """The gradients of the latest backward pass through a run, converted before they are kept."""

    def __init__(self, convert: Callable[[Tensor], Tensor] | None) -> None:
        self.kept: dict[MemoryKey, Tensor] = {}  # the gradients, by op and element
        self._convert = convert
        self.watched: set[MemoryKey] = set()  # the values whose gradients are requested
        # Those whose gradients are kept; None for all.
        self.wanted: Container[MemoryKey] | None = None
        self._entries: dict[MemoryKey, list[LayerEntry]] = {}
        # How many values other than leaves have hooks, and in which backward pass one was called.
        self._inner, self._task = 0, -1

    def attach(self, key: MemoryKey, entry: LayerEntry) -> None:
        """Give an entry its gradient, now or when it is computed."""
        entry.gradient = self.kept.get(key)
        self._entries.setdefault(key, []).append(entry)

    def watch(self, key: MemoryKey, tensor: Tensor) -> None:
        """Keep the gradient of a tensor, as long as an owner is alive."""
        without = gradient_function(tensor) is None
        if not requires_grad(tensor) or (without and not is_leaf(tensor)):
            return
        self.watched.add(key)
        weak = weakref.ref(self)
        self._inner += not without

        def hook(gradient: Tensor | None) -> None:
            keeper = weak()
            if keeper is not None and gradient is not None:  # None: nobody has used the value
                keeper._keep(key, gradient, without)

        handle = tensor.register_hook(hook)
        if without:  # it may be the caller's, and outlive the log
            weakref.finalize(self, handle.remove)

    def _keep(self, key: MemoryKey, gradient: Tensor, is_leaf: bool) -> None:
        """Keep a gradient, unless it belongs to a leaf from outside the run."""
        # A checkpoint with `use_reentrant=True` runs another pass inside, which fires hooks of
        # leaves, too. torch tells passes apart by this id alone (2.13).
        task = torch._C._current_graph_task_id()
        if not is_leaf:
            self._task = task
        elif self._inner and task != self._task:
            return
        if self.wanted is not None and key not in self.wanted:
            return
        with torch.no_grad():
            try:
                value = gradient.detach()
            except RuntimeError:  # one of a batch of gradients is not a tensor that could be kept
                return
            if self._convert is not None:
                value = self._convert(value)
            self.kept[key] = value.clone()
        for entry in self._entries.get(key, ()):
            entry.gradient = self.kept[key]
