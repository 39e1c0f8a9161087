"""The values of a model that can be bent, and which of them a pattern selects."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bendtrace.errors import InputError, NeverFiredWarning
from bendtrace.insert.bend import Bend
from bendtrace.insert.insertion import Insertion, Report
from bendtrace.insert.resolver import Knowledge, describe_where, resolve_meaning
from bendtrace.insert.where import near_misses
from bendtrace.log.nodes import NodePath, Registry, Text, identifier
from bendtrace.log.path_views import Candidate, Node, NodeSelector, Tree
from bendtrace.log.run import is_layer_name, near_names
from bendtrace.python.checks import is_inside
from bendtrace.python.lazy import tabulate
from bendtrace.record.recorder import Recording
from bendtrace.tape.tape import OpKind, TensorMeta
from bendtrace.watch.owners import is_leaf_module, modules_in, states_of

Level = Literal["whole", "around", "inside"]
# What patterns never select by name.
_NAMELESS = "\0"
# They belong to torch.nn, but users want to bend what is inside.
_OPEN = (
    nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


@dataclass(frozen=True)
class NamedActivations(NodeSelector):
    r"""The activations that patterns select.

    A pattern selects an activation if it matches one of its names from the start: its node path
    (`blocks.sub_0.relu`), its qualified name (`blocks.0.relu`), or the latter with underscores
    (`blocks_0_relu`). Activations are the outputs of leaf modules, and of functions outside leaf
    modules. A module that contains others is selected only by a pattern that ends with its name
    (`blocks\.0$`), and a node inside a leaf module only by its own path. A node that outputs no
    floating-point or complex tensor is not an activation.
    """

    needs_output = True

    patterns: tuple[re.Pattern[str], ...]
    leaves: frozenset[str]  # qualified names of the leaf modules
    without: frozenset[str] = frozenset()  # node paths to leave out

    def matches(self, node: Candidate) -> bool:
        """Return whether a node is meant."""
        if not node.path or not is_bendable_dtype(node.dtype) or node.path in self.without:
            return False
        return self.means(bend_level(node, self.leaves), names_of(node))

    def means(self, level: Level, names: Iterable[str]) -> bool:
        """Return whether the patterns select something that has some names."""
        return any(means(pattern, level, name) for pattern in self.patterns for name in names)

    def __repr__(self) -> str:
        return " or ".join(f"/{pattern.pattern}/" for pattern in self.patterns)


def means(pattern: re.Pattern[str], level: Level, name: str) -> bool:
    """Return whether a pattern selects something that has a name.

    The level is "whole" for activations, "around" for modules that contain some, "inside" for nodes
    inside an activation.
    """
    if level == "whole":
        return pattern.match(name) is not None
    if level == "inside":
        return pattern.pattern == name
    ends = pattern.fullmatch(name) is not None
    return ends and not any(pattern.match(name + sign + _NAMELESS) for sign in "._")


def names_of(node: Candidate) -> tuple[str, ...]:
    """Return the names of a node: path, qualified name, and the latter with underscores."""
    qualified = node.qualified_name
    return tuple(dict.fromkeys((node.path, qualified, qualified.replace(".", "_"))))


def bend_level(node: Candidate, leaves: frozenset[str]) -> Level:
    """Return whether a node is an activation, contains activations or is inside one."""
    around = node.scope_path
    if node.is_module:
        if node.module_path in leaves:
            return "whole"
        around = node.module_path
    if is_inside(around, leaves):
        return "inside"
    return "around" if node.is_module else "whole"


def leaves_of(model: Callable[..., Any]) -> frozenset[str]:
    """Return the qualified names of the modules that count as one activation each.

    They are the leaf modules of torch.fx: the modules of torch.nn, except containers, and here also
    except transformers and their layers.
    """
    return frozenset(
        path
        for path, module in modules_in(model).items()
        if path and is_leaf_module(module) and not isinstance(module, _OPEN)
    )


def weights_named(
    model: Callable[..., Any], patterns: Iterable[re.Pattern[str]], weights: bool | None
) -> list[str]:
    """Return the parameters and buffers that patterns select, by their names in the state dict.

    With None, `weights` selects those that a pattern names: it matches the full name, and would not
    match with another last part. True selects these, and the parameters that a pattern matches from
    the start; False none.
    """
    if weights is False:
        return []
    found = {
        name: None
        for name, tensor in states_of(model)
        if is_bendable_dtype(tensor.dtype)
        and any(
            _names_weight(p, name)
            or (weights is True and isinstance(tensor, nn.Parameter) and p.match(name))
            for p in patterns
        )
    }
    return list(found)


def _names_weight(pattern: re.Pattern[str], name: str) -> bool:
    if pattern.fullmatch(name) is None:
        return False
    around, dot, _ = name.rpartition(".")
    return pattern.fullmatch(around + dot + _NAMELESS) is None


def is_bendable_dtype(dtype: torch.dtype | None) -> bool:
    """Return whether tensors of a dtype can be bent."""
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


Filter: TypeAlias = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | None

_KINDS = (FunctionType, MethodDescriptorType, WrapperDescriptorType, BuiltinFunctionType)
_METHODS = frozenset(
    member
    for cls in Tensor.__mro__
    for name, member in vars(cls).items()
    if isinstance(member, _KINDS) and not name.startswith("__")  # not what others inserted
)


class Activation(NamedTuple):
    """A value of a run that can be bent, or a module that may return one.

    Attributes:
        name: its node path; for an input of the model its name.
        op: "placeholder", "call_module", "call_method" or "call_function".
        shape: its shape when it was first seen.
        dtype: its dtype then.
        level: "whole" for what tables list.
        names: all names that patterns are matched against.
    """

    name: str
    op: str
    shape: torch.Size | None
    dtype: torch.dtype | None
    level: Level
    names: tuple[str, ...]


def of_candidate(node: Candidate, leaves: frozenset[str]) -> Activation | None:
    """Return the activation of a node; None if its output cannot be bent."""
    if not node.path or node.shape is None or not is_bendable_dtype(node.dtype):
        return None
    op = "call_function"
    if node.is_module:
        op = "call_module"
    elif node.function in _METHODS:
        op = "call_method"
    shape, level = torch.Size(node.shape), bend_level(node, leaves)
    return Activation(node.path, op, shape, node.dtype, level, names_of(node))


def inputs_in(recording: Recording, registry: Registry) -> Iterator[Activation]:
    """Yield the inputs of the model that are tensors and can be bent."""
    for op in recording.tape.ops:
        if op.kind is not OpKind.INPUT or not str(op.target).isidentifier():
            continue
        if isinstance(op.meta, TensorMeta) and is_bendable_dtype(op.meta.dtype):
            label, shape = str(op.target), torch.Size(op.meta.shape)
            with registry.lock:
                name = registry.reserve("", ("input", label), identifier(label))
            names = tuple(dict.fromkeys((name, label)))
            yield Activation(name, "placeholder", shape, op.meta.dtype, "whole", names)


def modules_of(model: Callable[..., Any], leaves: frozenset[str]) -> Iterator[Activation]:
    """Yield the modules of a model that no run has reached yet."""
    for path in modules_in(model):
        around = path.rpartition(".")[0]
        if path and not is_inside(around, leaves):
            level: Level = "whole" if path in leaves else "around"
            names = (path, path.replace(".", "_"))
            yield Activation(path, "call_module", None, None, level, names)


def passes_filter(names: Iterable[str], flt: Filter, exclude: Filter) -> bool:
    """Return whether something that has some names passes a filter.

    Each pattern of `flt` has to match one of them from the start, none of `exclude` may match.
    """
    names = list(names)

    def matched(pattern: re.Pattern[str]) -> bool:
        return any(pattern.match(name) for name in names)

    return all(map(matched, _patterns(flt))) and not any(map(matched, _patterns(exclude)))


def _patterns(given: Filter) -> list[re.Pattern[str]]:
    if given is None:
        return []
    listed = [given] if isinstance(given, (str, re.Pattern)) else given
    return [compile_pattern(pattern) for pattern in listed]


def activation_table(activations: Iterable[Activation]) -> Text:
    """Return a table of activations: name, kind of node, shape."""
    return Text(tabulate.tabulate([(found.name, found.op, found.shape) for found in activations]))


def weight_table(weights: Iterable[tuple[str, Tensor]]) -> Text:
    """Return a table of weights: name, shape, dtype, and the range of their values."""
    headers = ["name", "shape", "dtype", "min", "max", "mean", "stddev"]
    rows = [
        (name, tensor.shape, tensor.dtype, *_output_statistics(tensor)) for name, tensor in weights
    ]
    return Text(tabulate.tabulate(rows, headers=headers))


def _output_statistics(tensor: Tensor) -> tuple[float | None, ...]:
    if (
        isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
        or not tensor.numel()
        or tensor.is_complex()
    ):
        return None, None, None, None
    values = tensor.detach().double()
    spread = values.std().item() if values.numel() > 1 else None
    return values.min().item(), values.max().item(), values.mean().item(), spread


_NOTHING = frozenset[str]()


class Catalogue:
    """The activations and weights of a model that can be bent."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    @property
    def model(self) -> Callable[..., Any]:
        """The model."""
        return self._knowledge.model

    @property
    def is_traced(self) -> bool:
        """Return whether any run is known."""
        return bool(self._knowledge.recordings())

    def states(self) -> dict[str, Tensor]:
        """Return the parameters and buffers, by all their names."""
        return dict(states_of(self.model))

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters, by all their names."""
        return {k: v for k, v in states_of(self.model) if isinstance(v, nn.Parameter)}

    def activations(self) -> list[Activation]:
        """Return the inputs and nodes of all runs, and the modules that no run has reached."""
        leaves = leaves_of(self.model)
        nodes: dict[str, Candidate] = {}
        inputs: dict[str, Activation] = {}
        for recording in self._knowledge.recordings():
            for node in self._knowledge.run(recording).candidates:
                nodes.setdefault(node.path, node)
            for given in inputs_in(recording, self._knowledge.registry):
                inputs.setdefault(given.name, given)
        found = list(inputs.values())
        found += [a for node in nodes.values() if (a := of_candidate(node, leaves)) is not None]
        called = {node.module_path for node in nodes.values() if node.is_module}
        return found + [a for a in modules_of(self.model, leaves) if a.name not in called]

    def selector(self, spec: BendSpec, without: frozenset[str]) -> NamedActivations | None:
        """Return a selector for the selected activations; None if only weights are selected.

        Patterns without a match so far may select activations of later runs.
        """
        if not spec.activations:
            return None
        seen = self.activations()
        named = tuple(
            pattern
            for pattern in spec.patterns
            if _means(pattern, seen) or not weights_named(self.model, (pattern,), spec.weights)
        )
        return NamedActivations(named, leaves_of(self.model), without) if named else None

    def inputs(self, spec: BendSpec, without: frozenset[str] = _NOTHING) -> list[NodePath]:
        """Return the selected inputs."""
        return [NodePath(a.name) for a in self._select(spec, without) if a.op == "placeholder"]

    def weights(self, spec: BendSpec, without: frozenset[str] = _NOTHING) -> list[str]:
        """Return the selected parameters and buffers."""
        found = weights_named(self.model, spec.patterns, spec.weights)
        return [name for name in found if name not in without]

    def keys(self, spec: BendSpec, without: frozenset[str] = _NOTHING) -> list[str]:
        """Return the names of everything selected."""
        found = [a.name for a in self._select(spec, without)]
        found += [name for name in map(describe_where, spec.others) if name not in without]
        return found + self.weights(spec, without)

    def _select(self, spec: BendSpec, without: frozenset[str]) -> list[Activation]:
        selector = self.selector(spec, without)
        return [
            found
            for found in self.activations()
            if selector is not None
            and found.name not in without
            and selector.means(found.level, found.names)
        ]

    def named(self, spec: BendSpec) -> BendSpec:
        """Return a bend with nodes instead of names of layers, which patterns never match.

        Raise `NodePathError` if a name is ambiguous.
        """
        if not spec.activations:
            return spec
        seen = self.activations()
        where: list[Any] = []
        for item in spec.where:
            is_match = not isinstance(item, str) or _means(compile_pattern(item), seen)
            if not is_match and not weights_named(
                self.model, (compile_pattern(item),), spec.weights
            ):
                resolution = resolve_meaning(item, self._knowledge)
                if resolution is not None and resolution.kind == "layer":
                    where += [
                        Node(Tree(root), node, chosen) for root, node, chosen in resolution.places
                    ]
                    continue
            where.append(item)
        return replace(spec, where=tuple(where))

    def require_meaning(self, spec: BendSpec) -> None:
        """Raise an `InputError` with similar names if a pattern selects nothing."""
        seen = self.activations()
        for pattern in spec.patterns:
            if spec.activations and _means(pattern, seen):
                continue
            if weights_named(self.model, (pattern,), spec.weights):
                continue
            names = [a.name for a in seen if a.level != "inside"] if spec.activations else []
            names += [] if spec.weights is False else list(self.states())
            if spec.activations and (
                is_layer_name(pattern.pattern) or not near_names(pattern.pattern, names)
            ):
                others = [name for run in self._knowledge.names() for name in run.listed()]
                names = others if near_names(pattern.pattern, others) else names
            text = (
                f"nothing that can be bent matches {pattern.pattern!r}; "
                f"{near_misses(pattern.pattern, names)}"
            )
            if not self.is_traced:
                text += " (nothing has been traced yet, so only modules and weights are known)"
            raise InputError(f"{text} (allow_none=True waits for a match in later runs)")


def _means(pattern: re.Pattern[str], seen: list[Activation]) -> bool:
    selector = NamedActivations((pattern,), frozenset())
    return any(selector.means(found.level, found.names) for found in seen)


# Active bends, and the handles that remove them.


class CallbackInsertions:
    """One callback, and its current insertions in the model."""

    def __init__(self, spec: BendSpec, allow_none: bool) -> None:
        self.spec = spec  # the callback, and what it bends
        self.allow_none = allow_none  # whether that may be nothing
        self.without: frozenset[str] = frozenset()  # names that it bends no longer
        self.insertions: tuple[Insertion, ...] = ()
        self.former: list[Insertion] = []  # its earlier insertions, for the reports

    def lift(self) -> None:
        """Remove its insertions."""
        for insertion in self.insertions:
            insertion.remove()
        self.former += [i for i in self.insertions if i.report().rows]
        self.insertions = ()

    def report(self) -> Report:
        """Return a report of what it has bent so far."""
        every = [insertion.report() for insertion in (*self.former, *self.insertions)]
        rows = tuple(row for report in every for row in report.rows)
        notes = () if rows else tuple(dict.fromkeys(n for r in every for n in r.notes))
        where = ", ".join(map(repr, self.spec.where))
        return Report(self.spec.callback.label, where, rows, notes)


class BendHandle:
    """A bend that is active until removed: one callback, or all of a configuration.

    It is also a context manager that removes the bend at its end. A `NeverFiredWarning` is issued
    if no run reached anything that it bends.
    """

    def __init__(
        self, sources: Sequence[CallbackInsertions], remove: Callable[[CallbackInsertions], None]
    ) -> None:
        self._sources = tuple(sources)
        self._remove = remove

    @property
    def active(self) -> bool:
        """Return whether any part of it is active."""
        return any(source.insertions for source in self._sources)

    def remove(self) -> None:
        """Stop bending. Further calls have no effect."""
        for source in self._sources:
            self._remove(source)

    def reports(self) -> tuple[Report, ...]:
        """Return for each callback where it was called, and whether it changed anything."""
        return tuple(source.report() for source in self._sources)

    def report(self) -> Report:
        """Return the nodes where the callbacks were called, and whether they changed anything."""
        every = self.reports()
        if len(every) == 1:
            return every[0]
        return Report(
            ", ".join(report.label for report in every),
            "; ".join(report.where for report in every),
            tuple(row for report in every for row in report.rows),
            tuple(dict.fromkeys(note for report in every for note in report.notes)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        reports = self.reports()
        self.remove()
        if kind is not None:
            return
        for source, report in zip(self._sources, reports, strict=True):
            if not report.rows and not source.allow_none:
                why = "; ".join(report.notes)
                warnings.warn(
                    NeverFiredWarning(
                        f"{report.label} at {report.where} was never called"
                        f"{f': {why}' if why else ''}"
                    ),
                    stacklevel=2,
                )

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{source.spec.callback!r} at {', '.join(map(repr, source.spec.where))}"
            for source in self._sources
        )
        return f"<bend {shown}, {'active' if self.active else 'removed'}>"


class Restoring:
    """A setting that stays; as a context manager, it restores the earlier setting at the end."""

    def __init__(self, restore: Callable[[], Any]) -> None:
        self._restore = restore

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()


# One bend, as requested by the user.


@dataclass(frozen=True)
class BendSpec:
    """A callback, and what it bends.

    Attributes:
        callback: the callback.
        where: patterns, and other locations of insertions.
        weights: whether the patterns apply to weights: None for weights with a matching full name.
        activations: whether the patterns apply to activations.
    """

    callback: Bend
    where: tuple[Any, ...]
    weights: bool | None = None
    activations: bool = True

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """The patterns."""
        return [compile_pattern(item) for item in self.where if isinstance(item, (str, re.Pattern))]

    @property
    def others(self) -> list[Any]:
        """The locations that are not patterns."""
        return [item for item in self.where if not isinstance(item, (str, re.Pattern))]


def compile_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern that can be matched.

    Raise `InputError` if it is not a regular expression, or is empty.
    """
    try:
        made = re.compile(pattern)
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}") from None
    if not made.pattern:
        raise InputError("the empty pattern matches every name: write '.*' for all of them")
    return made
