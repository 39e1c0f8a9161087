"""The nodes of a tree of paths: plain data that can be read without the model, and as text."""

from __future__ import annotations

import copy
import inspect
import operator
import re
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from keyword import iskeyword
from textwrap import shorten
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.python.sites import Site, path_text, place_text
from bendtrace.record.op_names import base_name_of
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import PLAIN_TYPES, Access, AttributeKey, Captured, CaptureKind
from bendtrace.tape.contexts import Context, current_context
from bendtrace.tape.scalars import TRACED
from bendtrace.tape.structure import Existing, Instance, Opaque
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, refs_in
from bendtrace.watch.functions import METADATA, SHAPES, name_of
from bendtrace.watch.owners import named_modules, states_of

# The events in each call of a module, derived from the tape.

Origin = tuple[int, tuple[Any, ...]]


class Events:
    """A tape, grouped by module call."""

    def __init__(self, recording: Recording, function: Callable[..., Any]) -> None:
        self.recording = recording
        self.function = function
        self.ops: list[Op] = recording.plain_ops
        self._counters = recording.tape.counters
        self.origins: dict[int, Origin] = {}
        self.keys: dict[int, tuple[Any, ...]] = {}  # of dicts that an op gave
        self._parameters: dict[int, list[tuple[str, Any]]] = {}  # of modules, by identity
        self._of: dict[int, list[Op | ModuleCall]] = defaultdict(list)
        calls = iter(enumerate(recording.tape.calls))
        self.numbers: dict[int, int] = {
            id(call): number for number, call in enumerate(recording.tape.calls)
        }
        waiting = next(calls, None)
        for op in self.ops:
            while waiting is not None and waiting[1].start <= op.index:
                self._of[id(waiting[1].parent)].append(waiting[1])
                waiting = next(calls, None)
            self._of[id(op.scope)].append(op)
            if op.kind is OpKind.SCALAR:
                self._note_element(op)
        while waiting is not None:
            self._of[id(waiting[1].parent)].append(waiting[1])
            waiting = next(calls, None)
        self._managers: dict[Context, str] = {}
        self._context = self.ops[0].context if self.ops else current_context()
        self.root: ModuleCall = self._find_root()

    def of(self, call: ModuleCall) -> list[Op | ModuleCall]:
        """Return the ops and calls directly inside a call, in the order in which they began."""
        return self._of.get(id(call), [])

    def origin(self, index: int) -> Origin:
        """Return the op that returned a value, and for a part of a result its keys."""
        return self.origins.get(index, (index, ()))

    def within(self, event: Op | ModuleCall) -> str:
        """Return the context managers that an event runs under, beyond those around the run."""
        if isinstance(event, Op):
            context = event.context
        else:  # the same for all that it consists of, or not to be told
            contexts = {op.context for op in self.ops[event.start : event.stop]}
            context = contexts.pop() if len(contexts) == 1 else self._context
        cached = self._managers.get(context)
        if cached is None:
            cached = self._managers[context] = ", ".join(_managers(context, self._context))
        return cached

    def meta(self, origin: Origin) -> Any:
        """Return the description of a value."""
        index, keys = origin
        meta = self.ops[index].meta
        for key in keys:
            named = self.keys.get(index)
            meta = meta[named.index(key) if named is not None and key in named else key]
        return meta

    def is_shown(self, op: Op) -> bool:
        """Return whether an op returned a tensor, or a number that is used."""
        if op.raised is not None or op.index in self.origins or op.index in self._counters:
            return False
        if op.kind is OpKind.UNKNOWN or isinstance(op.meta, TensorMeta):
            return True
        if type(op.meta) is tuple:
            return any(metas_in(op.meta))
        if type(op.meta) not in (bool, int, float) or op.target in (operator.is_, operator.is_not):
            return False
        if op.kind is OpKind.CALL and op.target in METADATA:
            return False
        return op.target not in SHAPES or op.index in self._used

    @cached_property
    def _used(self) -> set[int]:
        """The ops whose values anything used."""
        recording = self.recording
        used = {guard.index for guard in recording.tape.guards}
        for op in self.ops:
            used.update(ref.index for ref in refs_in((op.args, op.kwargs)))
        changed = [change.value for change in recording.changes]
        used.update(ref.index for ref in refs_in([recording.root.output, *changed]))
        return used

    @cached_property
    def argument_parts(self) -> dict[int, list[Captured]]:
        """The parts of each argument that contain values of the run."""
        inputs = {op.target.index for op in self.ops if op.kind is OpKind.INPUT}
        found: dict[int, dict[int, Captured]] = defaultdict(dict)
        for part in self.recording.environment.parts:
            seen = self.real(part)
            if not part.is_argument or seen.index not in inputs:
                continue
            inner = part
            while inner.parent is not None and inner.parent.is_argument:
                found[inner.parent.index][inner.index] = inner
                inner = inner.parent
        return {index: [parts[i] for i in sorted(parts)] for index, parts in found.items()}

    @cached_property
    def input_of(self) -> dict[int, int]:
        """The op of each tensor and number among the arguments, by part."""
        return {op.target.index: op.index for op in self.ops if op.kind is OpKind.INPUT}

    @staticmethod
    def real(part: Captured) -> Captured:
        """Return the original of a part that is an alias."""
        while part.kind is CaptureKind.ALIAS:
            part = part.value
        return part

    def arguments(self, call: ModuleCall) -> dict[str, Any]:
        """Return the arguments of a call, by the names in the signature of forward."""
        if call.parent is not None:
            cached = self._parameters.get(id(call.module))
            if cached is None:
                cached = self._parameters[id(call.module)] = parameters_of(call.module)
            return bound(cached, call.args, call.kwargs)
        given = [
            (part.label, Existing(part))
            for part in self.recording.environment.parts
            if part.is_argument and part.access is Access.ROOT
        ]
        parameters = parameters_of(self.function)
        rest = [name for name, kind in parameters if kind is inspect.Parameter.VAR_POSITIONAL]
        indexed = f"{rest[0] if rest else 'args'}["
        args = tuple(value for label, value in given if label.startswith(indexed))
        named = {label.lstrip("*"): v for label, v in given if not label.startswith(indexed)}
        return bound(parameters, args, named)

    def _note_element(self, op: Op) -> None:
        if not op.args or type(op.args[0]) is not Ref:
            return
        source = op.args[0].index
        if op.target is tuple:
            self.keys[source] = op.meta
            self.origins[op.index] = source, ()
        elif op.target is operator.getitem and len(op.args) == 2 and type(op.args[1]) is not Ref:
            root, keys = self.origin(source)
            self.origins[op.index] = root, (*keys, op.args[1])

    def _find_root(self) -> ModuleCall:
        """Return the outermost call: the module's own, or the call that a function ran in."""
        recording = self.recording
        calls = recording.tape.calls
        if calls and calls[0].parent is not None:
            is_module = isinstance(self.function, nn.Module)
            return calls[0] if is_module else _outermost(calls[0].parent)
        return _outermost(self.ops[0].scope) if self.ops else recording.root


def _outermost(call: ModuleCall) -> ModuleCall:
    while call.parent is not None:
        call = call.parent
    return call


def _managers(context: Context, around: Context) -> Iterator[str]:
    """Yield what leads from one context into another."""
    if context.inference and not around.inference:
        yield "torch.inference_mode()"
    elif context.grad is not around.grad:
        yield "torch.enable_grad()" if context.grad else "torch.no_grad()"
    if context.settings:
        yield f"settings({', '.join(f'{name}={value}' for name, value in context.settings)})"
    before = {cast.device_type: cast for cast in around.autocast}
    for cast in context.autocast:
        if cast.enabled and cast != before.pop(cast.device_type, None):
            yield f"torch.autocast({cast.device_type!r}, dtype={cast.dtype})"
    for cast in before.values():
        if cast.enabled:
            yield f"torch.autocast({cast.device_type!r}, enabled=False)"


def metas_in(meta: Any) -> Iterator[TensorMeta]:
    """Yield the descriptions of tensors in the description of a result."""
    if isinstance(meta, TensorMeta):
        yield meta
    elif isinstance(meta, (tuple, list)):
        for item in meta:
            yield from metas_in(item)


def parameters_of(function: Callable[..., Any] | None) -> list[tuple[str, Any]]:
    """Return the name and kind of each parameter of a function, or of a module's forward."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        found = inspect.signature(called).parameters.values() if called is not None else ()
    except (TypeError, ValueError):  # a builtin: positions have no names
        return []
    return [(parameter.name, parameter.kind) for parameter in found]


def bound(
    parameters: list[tuple[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Bind arguments to a signature; the remaining ones go into containers."""
    kwargs = dict(kwargs)
    given: dict[str, Any] = {}
    positions = iter(args)
    rest, more = "args", "kwargs"
    for name, kind in parameters:
        if kind is inspect.Parameter.VAR_POSITIONAL:
            rest = name
        elif kind is inspect.Parameter.VAR_KEYWORD:
            more = name
        elif name in kwargs and kind is not inspect.Parameter.POSITIONAL_ONLY:
            given[name] = kwargs.pop(name)
        elif kind is not inspect.Parameter.KEYWORD_ONLY:
            for value in positions:
                given[name] = value
                break
    left = tuple(positions)
    if left:
        given[rest] = left
    if kwargs:
        given[more if more not in given else f"{more}_"] = kwargs
    return given


class Item(NamedTuple):
    """An item of a container."""

    key: str | int  # its index, key or attribute name
    label: str  # its preferred name
    value: Any  # the recorded item
    access: str  # the code after the container that accesses it


def items_of(value: Any, events: Events) -> list[Item] | None:
    """Return the items of a recorded container; None for other objects."""
    if isinstance(value, (tuple, list)):
        return [_index_item(i, item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [_key_item(key, item) for key, item in value.items()]
    if isinstance(value, Instance):
        return _items_of_instance(value)
    if isinstance(value, Existing):
        parts = events.argument_parts.get(value.part.index)
        if parts is None or value.part.kind is CaptureKind.TENSOR:
            return None
        return [
            _item_of_part(value.part, part)
            for part in parts
            # What is an item as well is shown as that.
            if not (isinstance(part.key, AttributeKey) and part.key != part.key.name)
        ]
    return None


def _item_of_part(whole: Captured, part: Captured) -> Item:
    value = Existing(part)
    if isinstance(part.key, AttributeKey):
        return _attribute_item(part.key.name, value)
    if part.access is not Access.ITEM:
        return _attribute_item(str(part.key), value)
    if type(part.key) is not int or issubclass(whole.type, dict):
        return _key_item(part.key, value)
    names = _fields(whole.type)
    if part.key < len(names):
        return _attribute_item(names[part.key], value, part.key)
    return _index_item(part.key, value)


def type_name(value: Any) -> str:
    """Return the name for the type of a recorded object."""
    if isinstance(value, Instance):
        return value.cls.__name__
    if isinstance(value, Existing):
        return value.part.type.__name__
    if isinstance(value, Opaque):
        return value.type.__name__
    return "None" if value is None else type(value).__name__


def _items_of_instance(value: Instance) -> list[Item]:
    found: list[Item] = []
    names: tuple[str, ...] = ()
    if isinstance(value.items, dict):
        found = [_key_item(key, item) for key, item in value.items.items()]
        names = tuple(map(str, value.items))
    elif value.items is not None:
        names = _fields(value.cls)
        items: Iterable[Any] = value.items
        found = [
            _attribute_item(names[i], item, i) if i < len(names) else _index_item(i, item)
            for i, item in enumerate(items)
        ]
    for name, item in value.attributes.items():
        if str(name) not in names and any(refs_in(item)):
            found.append(_attribute_item(str(name), item))
    return found


def _fields(cls: type) -> tuple[str, ...]:
    """The names of the items of a named tuple."""
    fields = getattr(cls, "_fields", None)
    if fields is None and hasattr(cls, "n_sequence_fields"):
        fields = getattr(cls, "__match_args__", ())
    return tuple(fields or ()) if issubclass(cls, tuple) else ()


def _index_item(key: int, value: Any) -> Item:
    return Item(key, f"sub_{key}", value, f"[{key}]")


def _key_item(key: Any, value: Any) -> Item:
    name = key if isinstance(key, (str, int)) else repr(key)
    return Item(name, str(name), value, f"[{key!r}]")


def _attribute_item(name: str, value: Any, key: int | None = None) -> Item:
    return Item(name if key is None else key, name, value, f".{name}")


def result_type(op: Op, keys: tuple[Any, ...] | None) -> tuple[str, list[tuple[Any, str]]]:
    """Return the type of a result with several tensors, and the keys and names of its parts."""
    if keys is not None:
        return "dict", [(key, str(key)) for key in keys]
    named = getattr(torch.return_types, name_of(op.target), None)
    fields = tuple(getattr(named, "__match_args__", ()))
    if fields and len(fields) == len(op.meta):
        return name_of(op.target), list(enumerate(fields))
    return "tuple", [(i, f"sub_{i}") for i in range(len(op.meta))]


TIMES = "\N{MULTIPLICATION SIGN}"
LIMIT = 200  # lines of a tree that are printed without being asked


class Text(str):
    """Text that is displayed as it is, even where Python would display a quoted form."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(str(self))  # type: ignore[attr-defined]


Chosen = Sequence[int] | None


def describe_node(node: TreeNode, chosen: Chosen = None) -> str:
    """Return a short description of a node: `Graph(5)`, `Tensor(3, 2)`, `tuple(2)`, `float`."""
    passes = node.passes if chosen is None else [node.passes[i] for i in chosen]
    text = node.type
    if node.kind in ("graph", "container"):
        text = f"{text}({sum(1 for _ in children_of(node, chosen))})"
    elif node.kind == "tensor":
        text = f"{text}{_shapes(passes)}"
    return f"{text} {TIMES}{len(passes)}" if len(passes) > 1 else text


def children_of(node: TreeNode, chosen: Chosen) -> Iterator[tuple[TreeNode, Chosen]]:
    """Yield the children that occurred in some passes of a node, with their own passes then."""
    for child in node.children.values():
        passes = passes_in(child, chosen)
        if passes is None or passes:
            yield child, passes


def passes_in(child: TreeNode, chosen: Chosen) -> Chosen:
    """Return the passes of a child that were in some passes of its parent; None for all."""
    if chosen is None:
        return None
    within = set(chosen)
    return [i for i, made in enumerate(child.passes) if made.parent in within]


def draw_tree(
    node: TreeNode, title: str, chosen: Chosen = None, *, flow: bool = False,
    depth: int | None = None, limit: int | None = LIMIT,
) -> str:  # fmt: skip
    """Return a node and all nodes below, to some depth, as text.

    Only the chosen passes are shown. Above the limit of lines, graphs that are like the one before
    them are reduced to one line, and then the deepest levels are left out.
    """
    picture = _Picture(flow, folds=False)
    sizes = picture.level_sizes(node, chosen)[:depth]
    total = 1 + sum(sizes)
    shown = depth
    if limit is not None and total > limit:
        picture = _Picture(flow, folds=True)
        shown, lines = 0, 1
        for size in picture.level_sizes(node, chosen)[:depth]:
            if shown and lines + size > limit:
                break
            shown, lines = shown + 1, lines + size
    drawn = [f"{title}: {describe_node(node, chosen)}", *picture.lines(node, chosen, "", shown)]
    if limit is not None and total > limit:
        drawn = drawn[:limit]
        left = total - len(drawn)
        drawn.append(f"... {left} lines left out: look at a part, or use ._show(limit=None)")
    return "\n".join(drawn)


class _Row(NamedTuple):
    """A line right below a node."""

    text: str
    node: TreeNode | None = None
    chosen: Chosen = None


class _Picture:
    """The settings by which a tree is drawn."""

    def __init__(self, flow: bool, folds: bool) -> None:
        self._flow = flow
        self._folds = folds
        self._forms: dict[tuple[object, ...], int] = {}

    def level_sizes(self, node: TreeNode, chosen: Chosen) -> list[int]:
        """Return how many lines there are on each level below a node."""
        sizes: list[int] = []
        level: list[tuple[TreeNode, Chosen]] = [(node, chosen)]
        while level:
            rows = [row for inner, passes in level for row in self._rows(inner, passes)]
            if rows:
                sizes.append(len(rows))
            level = [(row.node, row.chosen) for row in rows if row.node is not None]
        return sizes

    def lines(
        self, node: TreeNode, chosen: Chosen, indent: str, depth: int | None
    ) -> Iterator[str]:
        if depth == 0:
            return
        rows = self._rows(node, chosen)
        for position, row in enumerate(rows, 1):
            last = position == len(rows)
            yield f"{indent}{'└─' if last else '├─'}{row.text}"
            if row.node is not None:
                below = f"{indent}{'  ' if last else '│ '}"
                left = None if depth is None else depth - 1
                yield from self.lines(row.node, row.chosen, below, left)

    def _rows(self, node: TreeNode, chosen: Chosen) -> list[_Row]:
        children = list(children_of(node, chosen))
        steps = node.steps if self._flow else ()
        names = {child.name for child, _ in children}
        rows = _step_rows([step for step in steps if step.after not in names], chosen)
        like: list[tuple[TreeNode, Chosen]] = []

        def tell_alike() -> None:
            if len(like) > 1:
                others = [like[1][0].name, like[-1][0].name][: len(like) - 1]
                shown = (", ..., " if len(like) > 3 else ", ").join(others)
                each = " each" if len(like) > 2 else ""
                text = f"{shown}: {describe_node(*like[0])}{each}, as {like[0][0].name}"
                rows.append(_Row(text))
            like.clear()

        for child, passes in children:
            after = _step_rows([step for step in steps if step.after == child.name], chosen)
            folds = self._folds and child.kind == "graph" and not after
            if folds and like and self._form(child, passes) == self._form(*like[0]):
                like.append((child, passes))
                continue
            tell_alike()
            rows.append(_Row(f"{child.name}: {describe_node(child, passes)}", child, passes))
            rows += after
            if folds:
                like.append((child, passes))
        tell_alike()
        return rows

    def _form(self, node: TreeNode, chosen: Chosen) -> int:
        """Return a number that is the same for nodes that look the same."""
        below = tuple((c.name, self._form(c, passes)) for c, passes in children_of(node, chosen))
        return self._forms.setdefault((describe_node(node, chosen), below), len(self._forms))


def _step_rows(steps: Sequence[Step], chosen: Chosen) -> list[_Row]:
    texts = (step_line(step, chosen) for step in steps)
    return [_Row(text) for text in texts if text]


def step_line(step: Step, chosen: Chosen = None) -> str:
    """Return a flow step as one line: `if x.sum() > 3: True  (model.py:41)`."""
    counts: dict[str, int] = {}
    for made, text, count in step.outcomes:
        if chosen is None or made in chosen:
            counts[text] = counts.get(text, 0) + count
    if not counts:
        return ""
    once = list(counts.values()) == [1]
    outcomes = ", ".join(
        text if once else f"{text} {TIMES}{count}" for text, count in counts.items()
    )
    source = shorten(step.text, 60, placeholder=" ...")
    return f"{step.kind} {source}: {outcomes}  ({place_text(step.file, step.line)})"


def _shapes(passes: Sequence[Pass]) -> str:
    """The shape of a tensor; of several, how far each dimension reaches."""
    shapes = list(dict.fromkeys(made.shape for made in passes if made.shape is not None))
    if len({len(shape) for shape in shapes}) > 1:
        return "(...)"
    sizes = []
    for dimension in zip(*shapes, strict=True):
        low, high = min(dimension), max(dimension)
        sizes.append(str(low) if low == high else f"{low}..{high}")
    return f"({', '.join(sizes)})"


# The nodes of a tree of paths: plain data that can be stored and read without the model.

Kind = Literal["graph", "container", "tensor", "number", "other"]
Role = Literal["call", "input", "state", "op", "output"]


class NodePath(str):
    """The path of a node, created by the library: it always names exactly that node."""

    __slots__ = ()


# So that `torch.load` reads what is saved by paths, such as activations.
torch.serialization.add_safe_globals([NodePath])


@dataclass(slots=True)
class Pass:
    """One execution of a node."""

    parent: int  # the pass of the parent that it was in, counted from 0
    # For values, the op on the tape that returned it; for module calls, the number of the call;
    # None for nodes that are not on the tape.
    index: int | None = None
    # For an op with several result tensors, the keys that lead to this one.
    element: tuple[Any, ...] = ()
    shape: tuple[int, ...] | None = None  # the shape of the tensor
    called: str = ""  # see `ModuleCall.called`


class Place(NamedTuple):
    """A line of source code."""

    file: str  # path of the source file
    line: int  # its line, counted from 1
    function: str  # name of the function that it is in
    text: str  # the line itself, without indentation; "" if it cannot be read

    def __str__(self) -> str:
        path = path_text(self.file)
        file = f'File "{path}"' if path == self.file else path
        where = f"{file}, line {self.line}, in {self.function}"
        return f"{where}\n    {self.text}" if self.text else where


class Step(NamedTuple):
    """A flow step, or several at one place of a graph."""

    number: int  # position of the first of them among the flow steps of the trace
    after: str  # name of the last child computed before it; "" for none
    kind: str  # "if", "while", "for", ..
    text: str  # source of the deciding expression
    # The pass of the graph, the outcome, and how often it occurred: `(0, "True", 3)`.
    outcomes: tuple[tuple[int, str, int], ...]
    file: str  # path of the source file
    line: int  # its line, counted from 1


class Variant(NamedTuple):
    """The code of a graph, for the passes that ran the same code."""

    text: str
    passes: tuple[int, ...]


def plain_keys(keys: tuple[Any, ...]) -> list[Any]:
    """Return keys into a result in a form that JSON can hold."""
    return [key if type(key) in (str, int, bool, float) else repr(key) for key in keys]


@dataclass(eq=False)
class TreeNode:
    """One node: a call of a module, a value, or a container of values."""

    name: str  # its name in the parent; an identifier
    # "graph" for module calls, "container" for tuples, dicts and the like, "tensor", "number", or
    # "other" for objects that cannot contain values of the run.
    kind: Kind
    type: str  # name of its type: "Graph", "Tensor", "tuple", "float"
    role: Role  # its relation to the enclosing graph
    # For parts of containers the index, key or attribute name; for calls the name of the module in
    # the enclosing module (`layers.8`).
    key: str | int | None = None
    label: str = ""  # its preferred name, before names were made unique; "" if equal to `name`
    module: str = ""  # for graphs, the qualified name of the module
    class_name: str = ""  # for graphs, the class of the module
    # The nodes below, in the order in which they first occurred.
    children: dict[str, TreeNode] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)  # its executions
    # Its places in the source, starting in the code of the enclosing graph.
    places: tuple[Place, ...] = ()
    code: list[Variant] = field(default_factory=list)  # for graphs, the code that ran
    steps: list[Step] = field(default_factory=list)  # for graphs, their flow steps
    path: str = NodePath()  # dotted path from the root; "" for the root
    # The names of children that strings can use, cached on first use.
    spellings: dict[str, list[TreeNode]] | None = None

    def walk(self) -> Iterator[TreeNode]:
        """Yield the node and all nodes below, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children.values()))

    def child_path(self, name: str) -> NodePath:
        """Return the path of a child."""
        return NodePath(f"{self.path}.{name}" if self.path else name)

    def to_rows(self) -> list[list[Any]]:
        """Return the node and all nodes below as plain values, each with its parent's number.

        A model that calls itself can have a tree deeper than JSON can be nested.
        """
        rows: list[list[Any]] = []
        waiting: list[tuple[int | None, TreeNode]] = [(None, self)]
        while waiting:
            holder, node = waiting.pop()
            waiting.extend((len(rows), child) for child in reversed(node.children.values()))
            row: dict[str, Any] = {name: getattr(node, name) for name in _ALWAYS}
            if node.key not in ("", None):
                row["key"] = node.key
            row |= {name: getattr(node, name) for name in _TEXTS if getattr(node, name)}
            row["passes"] = [
                [p.parent, p.index, plain_keys(p.element), None if p.shape is None else [*p.shape]]
                + [p.called] * bool(p.called)
                for p in node.passes
            ]
            for name in ("places", "code", "steps"):
                if getattr(node, name):
                    row[name] = [list(item) for item in getattr(node, name)]
            rows.append([holder, row])
        return rows

    @classmethod
    def from_rows(cls, rows: Iterable[list[Any]]) -> TreeNode:
        """Read what `to_rows` wrote."""
        nodes: list[TreeNode] = []
        for holder, row in rows:
            texts = {name: row.get(name, "") for name in _TEXTS}
            node = cls(row["name"], row["kind"], row["type"], row["role"], row.get("key"), **texts)
            if holder is not None:
                node.path = nodes[holder].child_path(node.name)
                nodes[holder].children[node.name] = node
            for parent, index, element, shape, *called in row["passes"]:
                sizes = None if shape is None else tuple(shape)
                node.passes.append(Pass(parent, index, tuple(element), sizes, *called))
            node.places = tuple(Place(*place) for place in row.get("places", ()))
            node.code = [Variant(text, tuple(passes)) for text, passes in row.get("code", ())]
            for number, after, kind, text, outcomes, file, line in row.get("steps", ()):
                counted = tuple((at, outcome, count) for at, outcome, count in outcomes)
                node.steps.append(Step(number, after, kind, text, counted, file, line))
            nodes.append(node)
        return nodes[0]


_ALWAYS, _TEXTS = ("name", "kind", "type", "role"), ("label", "module", "class_name")


# Names of nodes: identifiers that are stable from run to run.

OUTPUT = "output"  # no other node of a graph may take this name


def identifier(text: str) -> str:
    """Return a name for `text` that can be typed after a dot.

    Leading underscores are removed: the views of nodes reserve such names, and completion hides
    them. A name that would begin with a digit gets the prefix `sub_`, as parts of tuples do.

    Example:
        >>> [identifier(text) for text in ("layers.8", "0", "_conv", "class", "my key")]
        ['layers_8', 'sub_0', 'conv', 'class_', 'my_key']
    """
    text = unicodedata.normalize("NFKC", text)  # as Python does to names in source
    name = re.sub(r"\W+", "_", text).lstrip("_")
    if text.rstrip("])'\"") != text:
        name = name.rstrip("_")
    if not name:
        return "op"
    if not name.isidentifier():
        name = f"sub_{name}"
    if not name.isidentifier():
        name = "sub_" + re.sub(r"[^0-9A-Za-z_]", "_", name)
    return f"{name}_" if iskeyword(name) else name


@dataclass
class _NamesBelow:
    """The names below one node."""

    by_key: dict[Hashable, str] = field(default_factory=dict)
    first: dict[Hashable, str] = field(default_factory=dict)  # by the first part of a key
    reserved: dict[Hashable, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: {OUTPUT})
    counts: dict[str, int] = field(default_factory=dict)
    has_output: bool = False


class Registry:
    """The names of nodes, in all traces that share the registry.

    A node is identified by where it happens: the enclosing node, and the chain of instructions that
    led to it. The first node with a name gets the plain name, the next `linear_1`, and so on. Nodes
    that a second path shares with the first keep their names, whatever else is on that path.
    """

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()  # to be held while names are assigned
        self._names: dict[str, _NamesBelow] = defaultdict(_NamesBelow)
        self._sites: dict[tuple[int, ...], int] = {}
        self._contents: dict[tuple[Any, ...], int] = {}
        # Code objects go by identity because hashing one is slow; they are kept alive, so that
        # an identity is never used twice.
        self._codes: dict[int, tuple[CodeType, int]] = {}
        self._site_numbers: dict[tuple[int, ...], int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What a code object says stays the same in other processes, its identity does not.
        kept = ("_names", "_sites", "_contents")
        return {name: copy.deepcopy(getattr(self, name)) for name in kept}

    def __deepcopy__(self, memo: dict[int, Any]) -> Registry:
        made = Registry()
        vars(made).update(self.__getstate__())
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    def site(self, site: Site | None) -> int:
        """Return the number of a site: the same in every trace; 0 for none."""
        if site is None:
            return 0
        cached = self._site_numbers.get(site.identity)
        if cached is None:
            codes = [self._number(code) for code, _ in site.chain]
            key = tuple(n for pair in zip(codes, site.identity[1::2], strict=True) for n in pair)
            cached = self._sites.setdefault(key, len(self._sites) + 1)
            self._site_numbers[site.identity] = cached
        return cached

    def _number(self, code: CodeType) -> int:
        cached = self._codes.get(id(code))
        if cached is None:
            content = (
                code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code,
                code.co_linetable,
            )  # fmt: skip
            number = self._contents.setdefault(content, len(self._contents) + 1)
            cached = self._codes[id(code)] = code, number
        return cached[1]

    def name(self, parent: str, key: Hashable, base: str) -> str:
        """Return the name of a node."""
        names = self._names[parent]
        name = names.by_key.get(key)
        if name is not None:
            return name
        first = key[0] if type(key) is tuple and type(key[0]) is tuple else None
        name = names.reserved.pop(first, None) or self._give(names, base)
        names.by_key[key] = name
        if first is not None:
            names.first.setdefault(first, name)
        return name

    def reserve(self, parent: str, key: Hashable, base: str) -> str:
        """Return the name that a node will have whose output is not known yet.

        Nodes of values are identified by a key and a kind: `key` is the former.
        """
        names = self._names[parent]
        name = names.reserved.get(key) or names.first.get(key)
        if name is None:
            name = names.reserved[key] = names.first[key] = self._give(names, base)
        return name

    @staticmethod
    def _give(names: _NamesBelow, base: str) -> str:
        name = base
        while name in names.taken:
            names.counts[base] = names.counts.get(base, 0) + 1
            name = f"{base}_{names.counts[base]}"
        names.taken.add(name)
        return name

    def output(self, parent: str, key: Hashable) -> str:
        """Return the name of a graph's output: `output`, unless its structure differs."""
        names = self._names[parent]
        if not names.has_output:
            names.has_output = True
            names.by_key[key] = OUTPUT
        return self.name(parent, key, OUTPUT)


class Holders:
    """Finds names relative to the module whose code is running."""

    def __init__(self, root: nn.Module | None) -> None:
        self._modules: dict[int, dict[int, str]] = {}
        self._tensors: dict[int, dict[int, str]] = {}
        self._nameless: dict[tuple[int, str], list[nn.Module]] = {}
        self._by_path = dict(states_of(root)) if root is not None else {}

    def module(self, call: ModuleCall) -> str:
        """Return the name of the called module in the code around a call: `layers.8`."""
        outer = call.parent.module if call.parent is not None else None
        if outer is not None and call.module is not None:
            cached = self._modules.get(id(outer))
            if cached is None:
                cached = self._modules[id(outer)] = {
                    id(module): name for name, module in named_modules(outer)
                }
            if id(call.module) in cached:
                return cached[id(call.module)]
        if call.path.startswith("<"):
            return self._unknown(call)
        return _relative(call.path, call.parent.path if call.parent is not None else "")

    def state(self, label: str, call: ModuleCall) -> str:
        """Return the name of a tensor in the code of a call: `weight`."""
        label = label.removeprefix("self.")
        tensor = self._by_path.get(label)
        if tensor is not None and call.module is not None:
            cached = self._tensors.get(id(call.module))
            if cached is None:
                cached = self._tensors[id(call.module)] = {
                    id(own): name for name, own in reversed(list(states_of(call.module)))
                }
            if id(tensor) in cached:
                return cached[id(tensor)]
        return _relative(label, call.path)

    def _unknown(self, call: ModuleCall) -> str:
        """Return a name for a module that the model does not hold.

        Such modules without state share a name; others have a name each.
        """
        module, kind = call.module, type(call.module)
        name = (getattr(kind, "cls_to_become", None) or kind).__name__  # a lazy module becomes it
        if module is None or not states_of(module):
            return name
        seen = self._nameless.setdefault((id(call.parent), name), [])
        for position, other in enumerate(seen):
            if other is module:
                return f"{name}.{position}"
        seen.append(module)
        return f"{name}.{len(seen) - 1}"


def dotted(label: str) -> str:
    """Return a label with dots before all parts of it: `layers[0].weight` is `layers.0.weight`."""
    return ".".join(_split_path(label))


def _relative(path: str, base: str) -> str:
    """Return a path as seen from another, as far as the two have a beginning in common."""
    parts = _split_path(path)
    for part in _split_path(base):
        if len(parts) < 2 or parts[0] != part:
            break
        parts.pop(0)
    return ".".join(parts)


def _split_path(path: str) -> list[str]:
    return [part.strip("'\"") for part in re.split(r"\.|\[|\]", path) if part]


# Names of nodes during a run: the same names that the tree of paths will use.


class LiveNames:
    """Names nodes as the run reaches them, with a registry that other runs share.

    For a method of a model, `path_of` gives the paths of the modules that it calls, from their
    qualified names: those that they have in runs of the model.
    """

    def __init__(
        self,
        registry: Registry,
        function: Callable[..., Any],
        root: ModuleCall,
        prefix: str = "",
        path_of: Callable[[str], str] | None = None,
    ) -> None:
        self._registry = registry
        self._function = function
        self._root = root
        self._holders = Holders(function if isinstance(function, nn.Module) else None)
        # By identity; all of these are kept by the tape.
        self._prefix = prefix
        self._path_of = path_of
        self._paths: dict[int, str] = {id(root): prefix}
        self._parameters: dict[int, list[tuple[str, Any]]] = {}
        self._numbers: dict[int, tuple[Site, int]] = {}
        self._named: dict[tuple[str, int, Any], str] = {}

    def path(self, scope: ModuleCall) -> str:
        """Return the path of a named call."""
        return self._paths[id(scope)]

    def call(self, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Name a call of a module, and its arguments."""
        outer = scope.parent
        if outer is None or (outer is self._root and isinstance(self._function, nn.Module)):
            path = self._prefix
        elif outer is self._root and self._path_of is not None and scope.path:
            path = self._path_of(scope.path)
        else:
            path = self._below(self._paths[id(outer)], scope)
        self._paths[id(scope)] = path
        self._inputs(path, bound(self._parameters_of(scope.module), args, kwargs))
        return path

    def _parameters_of(self, owner: Any) -> list[tuple[str, Any]]:
        cached = self._parameters.get(id(owner))
        if cached is None:
            cached = self._parameters[id(owner)] = parameters_of(owner)
        return cached

    def rename(self, scope: ModuleCall, path: str) -> None:
        """Give a call the path that it has in other runs."""
        self._paths[id(scope)] = path

    def function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Name the arguments of a function that is not a module."""
        self._inputs("", bound(self._parameters_of(self._function), args, kwargs))

    def arguments(
        self, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a call, by the names of the inputs in the tree."""
        owner = self._function if scope is self._root else scope.module
        given = bound(self._parameters_of(owner), args, kwargs)
        return self._inputs(self._paths[id(scope)], given)

    def op(
        self, scope: ModuleCall, site: Site | None, function: Any, states: Iterable[str]
    ) -> tuple[str, str]:
        """Name a call of a function."""
        base = base_name_of(function)
        path, number = self._paths[id(scope)], self._number(site)
        name = self._named.get((path, number, base))
        if name is None:
            with self._registry.lock:
                for state in states:
                    label = self._holders.state(state, scope)
                    self._registry.reserve(path, ("state", label), identifier(label))
                name = self._registry.reserve(path, ("op", number, base), identifier(base))
            self._named[path, number, base] = name
        return (f"{path}.{name}" if path else name), base

    def knows(self, scope: ModuleCall, site: Site | None, function: Any) -> bool:
        """Return whether `op` has already named such a call."""
        key = self._paths[id(scope)], self._number(site), base_name_of(function)
        return key in self._named

    def relative(self, scope: ModuleCall) -> str:
        """Return the name of the module in the code around a call."""
        return self._holders.module(scope)

    def _below(self, outer: str, scope: ModuleCall) -> str:
        relative = self._holders.module(scope)
        key = "call", self._number(scope.site), relative
        with self._registry.lock:
            name = self._registry.name(outer, key, identifier(relative or "forward"))
        return f"{outer}.{name}" if outer else name

    def _inputs(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        with self._registry.lock:
            return {
                self._registry.reserve(path, ("input", name), identifier(name)): value
                for name, value in given.items()
                if not isinstance(value, _NO_NODES) and _may_hold_values(value)
            }

    def _number(self, site: Site | None) -> int:
        if site is None:
            return 0
        cached = self._numbers.get(id(site))
        if cached is None:
            with self._registry.lock:
                cached = self._numbers[id(site)] = site, self._registry.site(site)
        return cached[1]


def _may_hold_values(value: Any) -> bool:
    kind = type(value)
    if kind in TRACED or isinstance(value, Tensor):
        return True
    if kind in PLAIN_TYPES:
        return False
    if isinstance(value, (tuple, list)):
        return any(map(_may_hold_values, value))
    if isinstance(value, dict):
        return any(map(_may_hold_values, value.values()))
    return True


_NO_NODES = (type(None), str, bytes, type, nn.Module)
