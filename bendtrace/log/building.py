"""Builds the log of a recorded run."""

from __future__ import annotations

import itertools
import linecache
import operator
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bendtrace.flow import FlowSteps, control_of, steps_of
from bendtrace.log.entries import (
    Layer,
    LayerEntry,
    ModuleEntry,
    Namer,
    ParameterUse,
    Source,
    nbytes_of,
    number_type,
    tensors_of,
)
from bendtrace.log.nodes import Text
from bendtrace.log.path_views import Tree
from bendtrace.python.sites import Site
from bendtrace.record.iterations import user_code
from bendtrace.record.op_names import target_name
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Captured
from bendtrace.tape.structure import Existing, Opaque
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, map_refs, refs_in
from bendtrace.watch.functions import is_inserted, name_of
from bendtrace.watch.writes import works_in_place

Key = tuple[int, tuple[Any, ...]]
BoundaryKey = tuple[str, str, str]


@dataclass
class RunData:
    """A run as plain data."""

    name: str  # name of the model
    # One entry per value, in the order of the run.
    entries: list[LayerEntry] = field(default_factory=list)
    # One entry per module call, in the order in which the calls began.
    modules: list[ModuleEntry] = field(default_factory=list)
    # Where the model's Python depended on the inputs.
    flow_steps: FlowSteps = field(default_factory=lambda: FlowSteps([]))
    # For each step, the label of the entry with the value that it used.
    step_labels: list[str] = field(default_factory=list)
    parameters: int = 0  # the number of elements of the parameters used in the run
    parameter_bytes: int = 0  # their size
    # The entries of the values on the tape, by op and element.
    places: dict[Key, LayerEntry] = field(default_factory=dict)
    # For values that an insertion changed, the value that it returned; only if layers are counted
    # as TorchLens counts them.
    changed: dict[Key, Key] = field(default_factory=dict)
    # The op of each output that was written to after its op returned it.
    given_out: dict[str, int] = field(default_factory=dict)
    # The entries that modules received or returned in the place of others, because these had been
    # written to: by label of the module call, "input" or "output", and label of the other entry.
    boundary_entries: dict[BoundaryKey, LayerEntry] = field(default_factory=dict)
    # Where modules received or returned each value, by length of the tape and op: the key in
    # `boundary_entries`, and the entry.
    boundary_places: dict[tuple[int, int], list[tuple[BoundaryKey, LayerEntry]]] = field(
        default_factory=dict
    )


def build_log(recording: Recording, name: str, tree: Tree, torchlens: bool = False) -> RunData:
    """Return the log of a run, without the data that only a capture has."""
    builder = _Builder(recording, name, tree, torchlens)
    builder.build()
    return builder.log


def writes_in_place(op: Op) -> bool:
    """Return whether the entry of an op is the tensor that it wrote to."""
    return works_in_place(op) or (op.meta is None and bool(op.writes))


class _Builder:
    def __init__(self, recording: Recording, name: str, tree: Tree, torchlens: bool) -> None:
        self.log = RunData(name, flow_steps=steps_of(recording))
        self._recording = recording
        self._tape = recording.tape
        self._ops = recording.plain_ops
        self._nodes = recording.names
        self._tree = tree
        self._namer = Namer(torchlens)
        # The number of passes of layers and calls is known only at the end.
        self._layers: list[tuple[LayerEntry, Layer]] = []
        self._scopes: dict[int, tuple[str, ...]] = {}
        self._uses: dict[int, ParameterUse] = {}
        self._states: dict[int, LayerEntry] = {}
        self._parents: list[tuple[LayerEntry, list[Key]]] = []
        # For tensors that were written to under their own name, the last op that wrote.
        self._written: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}  # all of them
        self._sources: dict[tuple[int, Site], Source] = {}

    def build(self) -> None:
        control = control_of(self._recording)
        modules: list[tuple[ModuleCall, ModuleEntry]] = []
        for call, flow in zip(self._tape.calls, control.calls, strict=True):
            self._begin(call, flow, modules)
        for op, flow in zip(self._ops, control.ops, strict=True):
            for entry in self._entries(op):
                entry.flow = flow
            self._written.update(dict.fromkeys(op.writes, op.index))
            for index in op.writes:
                self._writers.setdefault(index, []).append(op.index)
        self._outputs()
        ordinals = itertools.count()
        for entry, layer in self._layers:
            entry.passes = layer.passes
            if layer.position is not None:
                entry.ordinal = next(ordinals)
        self._settle_parents()
        self._settle_modules(modules)
        self._settle_steps()

    # Values

    def _entries(self, op: Op) -> Iterator[LayerEntry]:
        if op.kind is OpKind.STATE:
            yield self._state(op)
            return
        if op.kind is OpKind.SCALAR and op.index in self._tape.counters:
            return
        kind = number_type(op, self._tape.ops)
        if kind is not None:
            layer, number = self._namer.name_number(op, kind)
            entry = self._entry(op, (), layer, number, "number")
            entry.value = op.meta
            yield entry
            return
        if op.kind is OpKind.SCALAR:
            return
        tensors = tensors_of(op.meta)
        if self._namer.torchlens and is_inserted(op):
            keys = [key for ref in refs_in((op.args, op.kwargs)) for key in self._values(ref)]
            if len(keys) == len(tensors):
                for key, (element, meta) in zip(keys, tensors, strict=True):
                    named = self.log.places[op.index, element] = self.log.places[key]
                    self.log.changed[key] = op.index, element
                    self._describe(named, meta)
                return
        if op.meta is None and op.writes:
            # `a.data = b` gives the tensor the shape of another one.
            shaped = op.args[1] if getattr(op.target, "__name__", "") == "__set__" else None
            index = shaped.index if isinstance(shaped, Ref) else op.writes[0]
            tensors = [((), meta) for meta in [self._tape.ops[index].meta]
                       if isinstance(meta, TensorMeta)]  # fmt: skip
        for element, meta in tensors:
            layer, number = self._namer.name(op, element)
            entry = self._entry(op, element, layer, number,
                                "input" if op.kind is OpKind.INPUT else "op")  # fmt: skip
            self._describe(entry, meta)
            yield entry

    def _entry(
        self, op: Op, element: tuple[Any, ...], layer: Layer, number: int, kind: Any
    ) -> LayerEntry:
        entry = LayerEntry(kind, layer.layer_type, layer.name, layer.short_name, number)
        entry.index, entry.element = op.index, element
        entry.node = self._nodes[op.index]
        entry.node_path = self._tree.path_of(op.index, element)
        entry.module, entry.scopes = op.scope.path, self._scopes_of(op.scope)
        if op.kind in (OpKind.CALL, OpKind.SCALAR):
            entry.function = name_of(op.target)
            entry.target = target_name(op.target)
            entry.inplace = writes_in_place(op)
            entry.source = self._source(op.scope, op.site)
            self._parents.append((entry, list(self._read(op))))
        self._add(entry, layer, (op.index, element))
        return entry

    def _add(self, entry: LayerEntry, layer: Layer | None, key: Key | None) -> None:
        if key is not None:
            self.log.places[key] = entry
        if layer is not None:
            self._layers.append((entry, layer))
        self.log.entries.append(entry)

    @staticmethod
    def _describe(entry: LayerEntry, meta: TensorMeta) -> None:
        entry.shape, entry.dtype, entry.device = meta
        entry.nbytes = nbytes_of(meta)

    def _state(self, op: Op) -> LayerEntry:
        name = str(op.target).removeprefix("self.")
        entry = LayerEntry("state", "state", name, name)
        entry.index, entry.node = op.index, self._nodes[op.index]
        entry.node_path = self._tree.path_of(op.index)
        if isinstance(op.meta, TensorMeta):
            self._describe(entry, op.meta)
            use = _use(name, op.target, entry, op.index in self._tape.trainable)
            self._uses[op.index] = use
            if use.is_parameter:
                self.log.parameters += use.numel
                self.log.parameter_bytes += use.nbytes
        self._states[op.index] = entry
        self._add(entry, None, (op.index, ()))
        return entry

    def _read(self, op: Op) -> Iterator[Key]:
        """Yield the values that an op computes with, including those of writers."""
        for ref in refs_in((op.args, op.kwargs)):
            writer = op.reads.get(ref.index)
            if writer is not None:
                yield writer, ()
                if ref.index in self._tape.ops[writer].writes:
                    continue  # the writer had it, and knows where it came from
                writer = self._written.get(ref.index)
                if writer is not None:
                    yield writer, ()
                    continue
            yield from self._values(ref)

    def _values(self, ref: Ref) -> list[Key]:
        """Return the values that a reference represents; several for a whole result."""
        op = self._ops[ref.index]
        element: tuple[Any, ...] = ()
        while (
            op.kind is OpKind.SCALAR
            and op.target is operator.getitem
            and (op.index, ()) not in self.log.places
        ):
            element = (op.args[1], *element)
            op = self._ops[op.args[0].index]
        if (op.index, element) in self.log.places:
            return [(op.index, element)]
        inside = [(op.index, found) for found, _ in tensors_of(op.meta)]
        exact = [key for key in inside if key[1][: len(element)] == element]
        found = [key for key in exact or inside if key in self.log.places]
        if found or op.kind is not OpKind.CALL:
            return found
        # A read without an entry, of a shape for instance: return the values that it reads.
        return [key for ref in refs_in((op.args, op.kwargs)) for key in self._values(ref)]

    def _outputs(self) -> None:
        for path, index, element in self._tree.outputs:
            if index is None:
                continue
            source = self._source_of(index, element)
            if source is None or source.shape is None:
                continue
            layer, number = self._namer.name_output()
            entry = LayerEntry("output", "output", layer.name, layer.short_name, number)
            entry.node, entry.node_path = "output", path
            entry.shape, entry.dtype, entry.device = source.shape, source.dtype, source.device
            entry.nbytes = source.nbytes
            assert source.index is not None
            self._parents.append((entry, list(self._output_keys(index, source))))
            if index in self._recording.output_reads:
                self.log.given_out[entry.label] = index
            self._add(entry, layer, None)

    def _output_keys(self, index: int, source: LayerEntry) -> Iterator[Key]:
        """Yield the values of an output, including those of writers."""
        writer = self._recording.output_reads.get(index)
        if writer is not None:
            yield writer, ()
            if index in self._tape.ops[writer].writes:
                return
        assert source.index is not None
        direct = self._written.get(index) if writer is not None else None
        yield (source.index, source.element) if direct is None else (direct, ())

    def _source_of(self, index: int, element: tuple[Any, ...]) -> LayerEntry | None:
        """Return the entry of an output value."""
        found = self.log.places.get((index, element))
        if found is not None or element:
            return found
        keys = self._values(Ref(index))
        return self.log.places[keys[0]] if keys else None

    # Modules

    def _begin(
        self, call: ModuleCall, flow: tuple[int, ...], into: list[tuple[ModuleCall, ModuleEntry]]
    ) -> None:
        if call.parent is None or call.path == "":
            return  # of the traced module itself
        owner, module = call.parent, call.module
        class_name, own = "", 0
        if module is not None:
            class_name = type(module).__name__
            own = sum(p.numel() for p in module._parameters.values() if p is not None)
        entry = ModuleEntry(
            call.path, call.number + 1, 1, class_name, (self._scopes_of(owner) or ("",))[-1], own,
            call.training, source=self._source(owner, call.site), flow=flow,
        )  # fmt: skip
        into.append((call, entry))
        self.log.modules.append(entry)

    def _scopes_of(self, call: ModuleCall) -> tuple[str, ...]:
        found = self._scopes.get(id(call))
        if found is None:
            if call.parent is None or call.path == "":
                found = () if call.parent is None else self._scopes_of(call.parent)
            else:
                found = (*self._scopes_of(call.parent), f"{call.path}:{call.number + 1}")
            self._scopes[id(call)] = found
        return found

    def _settle_modules(self, modules: list[tuple[ModuleCall, ModuleEntry]]) -> None:
        passes: dict[str, int] = {}
        for _, entry in modules:
            passes[entry.name] = passes.get(entry.name, 0) + 1
        # Inner calls end first.
        for call, entry in reversed(modules):
            entry.passes = passes[entry.name]
            received = self._entries_in(
                (call.args, call.kwargs), call.start, (entry.label, "input")
            )
            entry.inputs += [given.label for given in received]
            for given in self._entries_in(call.output, call.stop, (entry.label, "output")):
                entry.outputs.append(given.label)
                if entry.label not in given.output_of:
                    given.output_of = (*given.output_of, entry.label)

    def _entries_in(self, value: Any, position: int, way: tuple[str, str]) -> Iterator[LayerEntry]:
        """Yield the entries in a module's arguments or output, as they were at that position."""
        for ref in refs_in(value):
            writer = self._writer(ref.index, position)
            for key in self._values(ref):
                named = entry = self.log.places[key]
                if writer is not None:
                    entry = self.log.boundary_entries[*way, named.label] = writer
                for label in dict.fromkeys((named.label, entry.label)):
                    places = self.log.boundary_places.setdefault((position, ref.index), [])
                    places.append(((*way, label), entry))
                yield entry

    def _writer(self, index: int, position: int) -> LayerEntry | None:
        """Return the entry of the last op before a position that wrote to a tensor by its name.

        None if there is none, or its entry holds a different tensor, as for `batch_norm`.
        """
        writers = self._writers.get(index, [])
        before = bisect_left(writers, position)
        entry = self.log.places.get((writers[before - 1], ())) if before else None
        return entry if entry is not None and entry.inplace else None

    # What is known at the end

    def _settle_parents(self) -> None:
        for entry, keys in self._parents:
            for key in keys:
                source = self.log.places[key]
                if source.kind == "state":
                    use = self._uses.get(key[0])
                    if use is not None and use not in entry.state:
                        entry.state.append(use)
                elif source.label not in entry.parents and source is not entry:
                    entry.parents.append(source.label)
                    source.children.append(entry.label)
            entry.state.sort(key=lambda use: (not use.is_parameter, use.shape))
            if entry.index is not None:
                entry.arguments = self._arguments(self._recording.plain_ops[entry.index])

    def _settle_steps(self) -> None:
        by_node: dict[str, str] = {}
        for entry in self.log.entries:
            by_node.setdefault(entry.node, entry.label)
        index = {node: position for position, node in enumerate(self._nodes)}
        for step in self.log.flow_steps:
            label = by_node.get(step.name, "")
            if not label and step.name in index:
                keys = self._values(Ref(index[step.name]))
                label = self.log.places[keys[0]].label if keys else ""
            self.log.step_labels.append(label)

    def _arguments(self, op: Op) -> str:
        def word_of(ref: Ref) -> Text:
            keys = self._values(ref)
            names = [self.log.places[key].label for key in keys]
            return Text(names[0] if len(names) == 1 else f"({', '.join(names)})")

        args, kwargs = map_refs((op.args, op.kwargs), word_of)
        parts = [_argument_repr(value) for value in args]
        parts += [f"{name}={_argument_repr(value)}" for name, value in kwargs.items()]
        return f"({', '.join(parts)})"

    def _source(self, scope: ModuleCall, site: Site | None) -> Source | None:
        if site is None:
            return None
        cached = self._sources.get((id(scope), site))
        if cached is None:
            place, _, _ = user_code(scope, site)
            statement = linecache.getline(place.file, place.line).strip()
            cached = Source(place.file, place.line, place.function, place.text, statement)
            self._sources[id(scope), site] = cached
        return cached


_LONGEST = 200


def _argument_repr(value: Any) -> str:
    if isinstance(value, (Existing, Opaque)):
        return str(value).removeprefix("self.")
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _use(name: str, part: Captured, entry: LayerEntry, trainable: bool) -> ParameterUse:
    assert entry.shape is not None
    itemsize = entry.dtype.itemsize if entry.dtype is not None else 1
    return ParameterUse(
        name, entry.shape, entry.nbytes // itemsize, entry.nbytes,
        issubclass(part.type, nn.Parameter), trainable,
    )  # fmt: skip
