"""Builds the tree of nodes of a recorded run."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Collection, Hashable
from enum import Enum
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.flow import FlowStep, LoopFlowStep, steps_of
from bendtrace.log.nodes import (
    Events,
    Holders,
    Kind,
    Pass,
    Place,
    Registry,
    Role,
    Step,
    TreeNode,
    Variant,
    identifier,
    items_of,
    result_type,
    type_name,
)
from bendtrace.python.sites import Site
from bendtrace.record import numbers, recorder, scopes, texts
from bendtrace.record.op_names import base_name, target_name
from bendtrace.tape.captured import Captured
from bendtrace.tape.structure import Construction, Existing, Instance, existing_in
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, refs_in
from bendtrace.watch.functions import is_gate, name_of

# The code of the tracer itself that runs a function.
_TRACERS = frozenset(module.__file__ for module in (recorder, scopes, numbers, texts))


class Builder:
    """Creates the nodes of the tree of one run, or reuses existing ones."""

    def __init__(self, events: Events, registry: Registry) -> None:
        self.events: Events = events
        # For each module call, by identity, its node and the number of its pass.
        self.where: dict[int, tuple[TreeNode, int]] = {}
        # For each call, by identity, the tape position and name of each child.
        self.marks: dict[int, list[tuple[int, str]]] = {}
        self.paths: dict[int, str] = {}  # of the node that gave each value first
        self._registry = registry
        function = events.function
        root = function if isinstance(function, nn.Module) else events.root.module
        self.holders: Holders = Holders(root)
        self._places: dict[int, tuple[Place, ...]] = {}
        self._sites: dict[int, tuple[int, Site]] = {}
        self._codes: dict[int, dict[str, list[int]]] = {}
        self._inserted: dict[int, tuple[TreeNode, list[tuple[str, str]]]] = {}
        call = events.root
        # The root of the tree.
        self.root: TreeNode = TreeNode("", "graph", "Graph", "call", module=call.path)
        self.root.class_name = type(call.module or events.function).__name__

    def finish(self) -> None:
        """Move outputs to the end, and store the code that ran in the graphs."""
        for node, inserted in self._inserted.values():
            order = list(node.children)
            for name, after in inserted:
                if name == after:  # a module that calls itself
                    continue
                order.remove(name)
                order.insert(order.index(after), name)
            node.children = {name: node.children[name] for name in order}
        for node in self.root.walk():
            outputs = [child for child in node.children.values() if child.role == "output"]
            if node.kind == "graph":
                for child in outputs:
                    node.children[child.name] = node.children.pop(child.name)
                texts = self._codes.get(id(node), {})
                node.code = [Variant(text, tuple(passes)) for text, passes in texts.items()]

    def site(self, site: Site | None) -> int:
        """Return the number of a site."""
        if site is None:
            return 0
        cached = self._sites.get(id(site))
        if cached is None:
            cached = self._sites[id(site)] = self._registry.site(site), site
        return cached[0]

    def places(self, site: Site | None) -> tuple[Place, ...]:
        """Return the lines that led to a site, starting in the code of the module."""
        if site is None:
            return ()
        cached = self._places.get(id(site))
        if cached is None:
            cached = self._places[id(site)] = tuple(
                Place(
                    place.file, place.line, place.function,
                    linecache.getline(place.file, place.line).strip(),
                )
                for place in reversed(site.places[site.level :])
                if place.file not in _TRACERS
            )  # fmt: skip
        return cached

    def node(
        self, parent: TreeNode, key: Hashable, label: str, kind: Kind, type_: str, role: Role
    ) -> TreeNode:
        """Return the child of a node for a key; create it if it is new."""
        if role == "output" and parent.kind == "graph":
            name = self._registry.output(parent.path, key)
        else:
            name = self._registry.name(parent.path, key, identifier(label))
        child = parent.children.get(name)
        if child is None:
            child = TreeNode(name, kind, type_, role, path=parent.child_path(name))
            child.label = label if label != name else ""
            parent.children[name] = child
        return child

    def value(
        self,
        parent: TreeNode,
        number: int,
        key: Hashable,
        label: str,
        value: Any,
        role: Role,
        places: tuple[Place, ...] = (),
    ) -> TreeNode:
        """Add a value, and its contents, to pass `number` of a node."""
        value = self.plain(value)
        items = items_of(value, self.events)
        if items is not None:
            kind: Kind = "container"
            type_, made = type_name(value), Pass(number)
        elif isinstance(value, Ref):
            index, element = self.events.origin(value.index)
            if self.events.ops[index].kind is OpKind.UNKNOWN:
                meta = self.events.ops[index].meta
            else:
                try:
                    meta = self.events.meta((index, element))
                except (LookupError, TypeError):
                    meta = None
            kind, type_ = "number", type(meta).__name__
            if isinstance(meta, TensorMeta):
                kind, type_ = "tensor", "Tensor"
            made = Pass(number, index, element, getattr(meta, "shape", None))
        else:
            kind, type_, made = "other", type_name(value), Pass(number)
        group = type_ if kind in ("container", "other") else kind
        if role == "op" and kind == "number":
            group = "tensor"  # an op on arrays may give either, and insertions know it by one name
        child = self.node(parent, (key, group), label, kind, type_, role)
        if child.kind == "number" and kind == "tensor":
            child.kind, child.type = kind, type_
        child.passes.append(made)
        if made.index is not None:
            self.paths.setdefault(made.index, child.path)
        child.places = child.places or places
        if kind == "number" and child.type != type_:
            child.type = "number"
        for item in items or ():
            inner = self.value(
                child, len(child.passes) - 1, ("item", repr(item.key)), item.label, item.value, role
            )
            inner.key = item.key
        return child

    def plain(self, value: Any) -> Any:
        """Return the value behind aliases."""
        if isinstance(value, Existing):
            part = self.events.real(value.part)
            index = self.events.input_of.get(part.index)
            return Existing(part) if index is None else Ref(index)
        if isinstance(value, Construction):
            refs = list(refs_in(value))
            return refs[0] if value.maker.__name__ == "tagged" and refs else value
        return value

    def has_values(self, value: Any) -> bool:
        """Return whether a value contains values of the run."""
        value = self.plain(value)
        if isinstance(value, Ref):
            return True
        items = items_of(value, self.events)
        return items is not None and any(self.has_values(item.value) for item in items)

    def insert(self, node: TreeNode, names: list[str], after: str) -> None:
        """Record that some children precede another."""
        _, inserted = self._inserted.setdefault(id(node), (node, []))
        inserted += [(name, after) for name in names]


class ModuleVisit:
    """One module call, while it is added to the tree."""

    def __init__(self, builder: Builder, call: ModuleCall, node: TreeNode) -> None:
        self.builder = builder
        self.events: Events = builder.events
        self.call = call
        self.node = node
        self.number: int = len(node.passes)
        self.header: list[str] = []
        self.given: set[int] = set()
        self.marks: list[tuple[int, str]] = []
        self.body: FunctionBody = FunctionBody(builder)
        self._earlier = set(node.children) if self.number else set()
        self._new: list[str] = []
        builder.where[id(call)] = node, self.number
        builder.marks[id(call)] = self.marks

    def run(self) -> None:
        """Add everything that happened in the call."""
        number = self.events.numbers.get(id(self.call))
        parent = 0
        if self.call.parent is not None and id(self.call.parent) in self.builder.where:
            parent = self.builder.where[id(self.call.parent)][1]
        self.node.passes.append(Pass(parent, number, called=self.call.called))
        for name, value in self.events.arguments(self.call).items():
            self._argument(name, value)
        for event in self.events.of(self.call):
            self.body.within = self.events.within(event)
            if isinstance(event, ModuleCall):
                self._module(event)
            elif event.kind not in (OpKind.INPUT, OpKind.STATE):
                self._op(event)
        self.body.within = ""
        self._output()
        self.builder._codes.setdefault(id(self.node), {}).setdefault(self._code(), []).append(
            self.number
        )

    # Steps

    def _argument(self, name: str, value: Any) -> None:
        if not self.builder.has_values(value):
            return
        child = self.builder.value(self.node, self.number, ("input", name), name, value, "input")
        annotation = "torch.Tensor" if child.kind == "tensor" else child.type
        self.header.append(f"{child.name} : {annotation}")
        self._stand(child)
        self.body.arguments.append(child.name)
        self.body.call_parts(child)
        self.given.update(ref.index for ref in refs_in(value))

    def _op(self, op: Op) -> None:
        events, builder = self.events, self.builder
        used = self._take_state((op.args, op.kwargs))
        if is_gate(op):
            self._gate(op, used)
            return
        if op.index in events.origins:
            self._element(op)
            return
        if not events.is_shown(op):
            if op.meta is None and op.kind is OpKind.CALL:
                text = call_text(op, self.body.name)
                if op.raised is not None:
                    text += f"  # raised {op.raised.type.__name__}"
                self.body.statement(text, used)
            return
        base = base_name(op)
        key = "op", builder.site(op.site), base
        child = self._result(op, key, base)
        self._place(child, op.index)
        self.body.assign(child.name, call_text(op, self.body.name), used)
        self.body.call_it(op.index, (), child.name)

    def _gate(self, op: Op, used: tuple[str, ...]) -> None:
        """Note a gate, which is not a node, so that the names of the nodes stay as they are."""
        text = call_text(op, self.body.name)
        name = identifier(base_name(op))
        replaces = not getattr(op.target, "is_ahead", False)  # else only for the call that follows
        if replaces and isinstance(op.meta, TensorMeta) and op.args and type(op.args[0]) is Ref:
            target_name = self.body.name(op.args[0])
            name = target_name if target_name.isidentifier() else name
            path = self.builder.paths.get(self.events.origin(op.args[0].index)[0])
            if path is not None:
                self.builder.paths.setdefault(op.index, path)
        self.body.assign(name, text, used)
        self.body.call_it(op.index, (), name)

    def _result(self, op: Op, key: Hashable, base: str) -> TreeNode:
        builder = self.builder
        if isinstance(op.meta, TensorMeta) or not isinstance(op.meta, tuple):
            return builder.value(
                self.node, self.number, key, base, Ref(op.index), "op", builder.places(op.site)
            )
        type_, labels = result_type(op, self.events.keys.get(op.index))
        child = builder.node(self.node, (key, type_), base, "container", type_, "op")
        child.passes.append(Pass(self.number, op.index))
        builder.paths.setdefault(op.index, child.path)
        child.places = child.places or builder.places(op.site)
        self._parts(child, op.index, (), op.meta, labels)
        return child

    def _parts(
        self,
        holder: TreeNode,
        index: int,
        keys: tuple[Any, ...],
        metas: Any,
        labels: list[tuple[Any, str]],
    ) -> None:
        number = len(holder.passes) - 1
        for (key, label), meta in zip(labels, metas, strict=False):
            element = (*keys, key)
            kind: Kind = "tensor" if isinstance(meta, TensorMeta) else "other"
            type_ = "Tensor" if kind == "tensor" else type_name(meta)
            if isinstance(meta, (tuple, list)) and kind != "tensor":
                kind = "container"
            elif type(meta) in (bool, int, float):
                kind = "number"
            group = kind if kind in ("tensor", "number") else type_
            part_key = ("item", repr(key)), group
            child = self.builder.node(holder, part_key, label, kind, type_, holder.role)
            child.key = key if isinstance(key, (str, int)) else repr(key)
            on_tape = kind != "other"
            shape = meta.shape if isinstance(meta, TensorMeta) else None
            child.passes.append(
                Pass(number, index if on_tape else None, element if on_tape else (), shape)
            )
            if kind == "container":
                inner = [(i, f"sub_{i}") for i in range(len(meta))]
                self._parts(child, index, element, meta, inner)

    def _element(self, op: Op) -> None:
        """Note a size, or another number of a list, which is a separate node where it is used."""
        root, keys = self.events.origin(op.index)
        if not keys or type(op.meta) not in (bool, int, float):
            return
        whole = self.events.ops[root]
        if is_gate(whole) or self.events.is_shown(
            whole
        ):  # among tensors: part of what is shown as a container
            return
        base = "_".join([base_name(whole), *map(str, keys)])
        key = "op", self.builder.site(whole.site), base
        places = self.builder.places(whole.site)
        child = self.builder.value(
            self.node, self.number, key, base, Ref(op.index), "op", places
        )  # fmt: skip
        self._place(child, op.index)
        text = call_text(whole, self.body.name) + "".join(f"[{key!r}]" for key in keys)
        used = self.body.used((whole.args, whole.kwargs))
        self.body.assign(child.name, text, used)
        self.body.call_it(root, keys, child.name)

    def _module(self, call: ModuleCall) -> None:
        builder = self.builder
        args, kwargs = self.events.recording.plain((call.args, call.kwargs))
        used = self._take_state((args, kwargs))
        relative = builder.holders.module(call)
        label = relative or "forward"
        key = "call", builder.site(call.site), relative
        child = builder.node(self.node, key, label, "graph", "Graph", "call")
        child.key, child.module = relative, call.path
        child.class_name = type(call.module).__name__
        child.places = child.places or builder.places(call.site)
        self._place(child, call.start)
        given = [value_text(value, self.body.name) for value in args]
        given += [f"{name}={value_text(value, self.body.name)}" for name, value in kwargs.items()]
        ModuleVisit(builder, call, child).run()
        called = module_expression(relative, self.call.module)
        if call.path.startswith("<"):  # of no module around it
            called = f"<{type(call.module).__name__}>"
        self.body.assign(child.name, f"{called}({', '.join(given)})", used)
        self.body.call_items(call.output, child.name)

    def _output(self) -> None:
        value = self.call.output
        if self.call is self.events.root:
            value = self.events.recording.root.output
        value = self.events.recording.plain(value)
        used = self._take_state(value)
        self.builder.value(self.node, self.number, "output", "output", value, "output")
        text = f"return {value_text(self.builder.plain(value), self.body.name)}"
        self.body.statement(text, used, leaves=True)

    def _take_state(self, value: Any) -> tuple[str, ...]:
        """Add the parameters and buffers that something uses; return the names it uses."""
        for ref in refs_in(value):
            op = self.events.ops[ref.index]
            if op.kind is not OpKind.STATE or self.body.knows(op.index):
                continue
            if op.index in self.given:
                continue
            label = self.builder.holders.state(str(op.target), self.call)
            child = self.builder.value(
                self.node, self.number, ("state", label), label, ref, "state"
            )
            child.key = label
            self._place(child, op.index)
            text = (
                module_expression(label, self.call.module)
                if self.call.module is not None
                else op.target.label
            )
            self.body.assign(child.name, text)
            self.body.call_it(op.index, (), child.name)
        return self.body.used(value)

    def _place(self, child: TreeNode, position: int) -> None:
        """Note that a child came up when the tape had so many ops."""
        self.marks.append((position, child.name))
        self._stand(child)

    def _stand(self, child: TreeNode) -> None:
        """Have children that earlier passes did not have stand before what they had next."""
        if child.name in self._earlier:
            self.builder.insert(self.node, self._new, child.name)
            self._new = []
        elif self._earlier:
            self._earlier.add(child.name)
            self._new.append(child.name)

    def _code(self) -> str:
        arguments = self.header
        name = "forward"
        function = self.events.function
        if self.call is self.events.root and not isinstance(function, nn.Module):
            own = getattr(function, "__name__", "")
            name = own if own.isidentifier() else name
        if self.call.module is not None or inspect.ismethod(function):
            arguments = ["self", *arguments]
        head = f"def {name}({', '.join(arguments)}):"
        return "\n".join([head, *(f"    {line}" for line in self.body.text())])


_Counts = dict[tuple[int, str], int]


class StepSource:
    """Finds the place of each flow step in a tree, on demand."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def place(self) -> None:
        """Add the steps to the nodes of their graphs."""
        builder, recording = self._builder, self._builder.events.recording
        index_of = {name: index for index, name in enumerate(recording.names)}
        found: dict[tuple[object, ...], tuple[TreeNode, str, int, FlowStep, _Counts]] = {}
        for number, step in enumerate(steps_of(recording)):
            position, call = self._position(step, index_of)
            place = builder.where.get(id(call))
            if place is None:
                continue
            node, made = place
            key = id(node), step.file, step.place.span, step.kind, step.text, type(step)
            if key not in found:
                found[key] = node, self._after(call, position), number, step, {}
            counts = found[key][4]
            outcome = made, _outcome(step)
            counts[outcome] = counts.get(outcome, 0) + 1
        for node, after, number, step, counts in found.values():
            outcomes = tuple((made, text, count) for (made, text), count in counts.items())
            node.steps.append(
                Step(number, after, step.kind, step.text, outcomes, step.file, step.line)
            )

    def _position(self, step: FlowStep, index_of: dict[str, int]) -> tuple[int, ModuleCall]:
        """Return up to where the tape had come, and the call whose code decided."""
        tape = self._builder.events.recording.tape
        if step.guard is not None:
            guard = tape.guards[step.guard]
            position, call = guard.position, guard.scope
        else:
            op = tape.ops[index_of[step.name]]
            position, call = op.index + (not isinstance(step, LoopFlowStep)), op.scope
        while call.path != step.module_path and call.parent is not None:
            call = call.parent
        return position, call

    def _after(self, call: ModuleCall, position: int) -> str:
        before = [name for at, name in self._builder.marks[id(call)] if at < position]
        return before[-1] if before else ""


def _outcome(step: FlowStep) -> str:
    if isinstance(step, LoopFlowStep):
        return step.how_often
    return repr(step.value)


# The code that a module ran, as Python expressions with the names of its nodes.

Name = Callable[[Ref], str]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "floordiv": "//", "mod": "%",
    "matmul": "@", "pow": "**", "lshift": "<<", "rshift": ">>", "and": "&", "or": "|",
    "xor": "^", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_PREFIX = {"neg": "-", "invert": "~"}
_LONG = 60  # characters of a constant that are written out
_LONG_OBJECT = 200  # characters of what an object holds
_KEPT = re.compile(r"(\w+)_passes\[-(\d+)\](.*)")
_FEW = 3  # so many values of one variable are written out


def value_text(value: Any, name: Name) -> str:
    """Return recorded arguments as source text."""
    kind = type(value)
    if kind is Ref:
        return name(value)
    if kind is tuple:
        inner = _join_items([value_text(item, name) for item in value])
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if kind is list:
        return f"[{_join_items([value_text(item, name) for item in value])}]"
    if isinstance(value, dict):
        items = (f"{_constant_text(key)}: {value_text(item, name)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if kind is slice:
        return f"slice({', '.join(value_text(part, name) for part in _bounds(value))})"
    if kind is Instance:
        return _instance_text(value, name)
    if kind is Construction:
        refs = list(refs_in(value))
        return name(refs[0]) if len(refs) == 1 else f"<{value.maker.__name__}>"
    if kind is Existing:
        return str(value.part.label)
    return _constant_text(value)


def _join_items(texts: list[str]) -> str:
    """Join items; a run of the values of one variable becomes a slice of what is kept of it."""
    found: list[str] = []
    position = 0
    while position < len(texts):
        match = _KEPT.fullmatch(texts[position])
        end = position + 1
        if match is not None:
            name, lag, access = match[1], int(match[2]), match[3]
            while end < len(texts) and lag > 1:
                lag -= 1
                older = f"{list_name(name)}[-{lag}]{access}"
                if texts[end] != (older if lag > 1 else name + access):
                    lag += 1
                    break
                end += 1
            if end - position > _FEW:
                stop = "" if lag == 1 else str(1 - lag)
                slice_text = f"{list_name(name)}[-{match[2]}:{stop}]"
                found.append(
                    f"*[each{access} for each in {slice_text}]" if access else f"*{slice_text}"
                )
                position = end
                continue
        found.append(texts[position])
        position += 1
    return ", ".join(found)


def call_text(op: Op, name: Name) -> str:
    """Return the expression for an op."""
    target, args = op.target, op.args
    if isinstance(target, Captured) or target is None:
        return "<unknown>" if target is None else str(target.label)
    word = name_of(target)
    bare = word.strip("_") if word.startswith("__") else word
    setter = getattr(target, "__name__", "")
    if setter == "__get__" and args:
        return f"{value_text(args[0], name)}.{word}"
    if setter == "__set__" and len(args) == 2:
        return f"{value_text(args[0], name)}.{word} = {value_text(args[1], name)}"
    if bare in ("getitem", "setitem") and len(args) >= 2:
        item = f"{value_text(args[0], name)}[{_index_text(args[1], name)}]"
        return item if bare == "getitem" else f"{item} = {value_text(args[2], name)}"
    is_python = getattr(target, "__module__", "") == "_operator" or word.startswith("__")
    is_method = _is_method(target, word) and bool(args) and type(args[0]) is Ref
    if len(args) == 2 and not op.kwargs and (is_python or is_method):
        left, right = (_operand(value, name) for value in args)
        if bare in _INFIX:
            return f"{left} {_INFIX[bare]} {right}"
        if bare[0] in "ri" and bare[1:] in _INFIX and is_python | (bare[0] == "r"):
            swap = bare[0] == "r"
            first, second = (right, left) if swap else (left, right)
            return f"{first} {_INFIX[bare[1:]]}{'' if swap else '='} {second}"
    if len(args) == 1 and is_python and bare in _PREFIX:
        return f"{_PREFIX[bare]}{_operand(args[0], name)}"
    given = [value_text(value, name) for value in (args[1:] if is_method else args)]
    given += [
        f"{key}={value_text(value, name)}"
        if key.isidentifier() and not iskeyword(key)
        else f"**{{{key!r}: {value_text(value, name)}}}"
        for key, value in op.kwargs.items()
    ]
    if is_method:
        return f"{value_text(args[0], name)}.{word}({', '.join(given)})"
    return f"{target_name(target)}({', '.join(given)})"


def _operand(value: Any, name: Name) -> str:
    text = value_text(value, name)
    return f"({text})" if text.startswith("-") else text


def _is_method(target: Any, word: str) -> bool:
    return getattr(Tensor, word, None) is target or getattr(target, "__objclass__", None) in (
        Tensor, torch._C.TensorBase,
    )  # fmt: skip


def _bounds(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _index_text(value: Any, name: Name) -> str:
    if isinstance(value, slice):
        start, stop, step = (
            "" if bound is None else value_text(bound, name) for bound in _bounds(value)
        )
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
    if type(value) is tuple and value:
        inner = ", ".join(_index_text(item, name) for item in value)
        return f"{inner}," if len(value) == 1 else inner
    return "..." if value is ... else value_text(value, name)


def _instance_text(value: Instance, name: Name) -> str:
    if isinstance(value.items, dict):
        given = [f"{key}={value_text(item, name)}" for key, item in value.items.items()]
    elif value.items is not None:
        given = [value_text(item, name) for item in value.items]
    else:
        attributes = value.attributes.items()
        given = [f"{key}={value_text(item, name)}" for key, item in attributes]
        if sum(map(len, given)) > _LONG_OBJECT:
            return f"<{value.cls.__name__}>"
    return f"{value.cls.__name__}({', '.join(given)})"


def _constant_text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (type, type(_constant_text), type(len))):
        return getattr(value, "__qualname__", repr(value))
    text = " ".join(repr(value).split())
    if len(text) > _LONG or " at 0x" in text:
        return f"<{type(value).__qualname__}>"
    return text


def module_expression(relative: str, module: nn.Module | None = None) -> str:
    """Return the expression for a submodule, parameter or buffer in the code of a module.

    Example:
        >>> [module_expression(name) for name in ("linear", "layers.8", "0", "a b")]
        ['self.linear', 'self.layers[8]', 'self[0]', "getattr(self, 'a b')"]
        >>> module_expression("0", nn.ModuleDict({"0": nn.ReLU()}))
        "self['0']"
    """
    text = "self"
    for part in filter(None, relative.split(".")):
        if isinstance(module, nn.ModuleDict) and part in module:
            text += f"[{part!r}]"
        elif part.isdigit() and (module is None or hasattr(type(module), "__getitem__")):
            text += f"[{part}]"
        elif part.isidentifier() and not iskeyword(part):
            text += f".{part}"
        else:
            text = f"getattr({text}, {part!r})"
        module = getattr(module, part, None)
    return text


# The code of one module call while it is written, and its layout as lines of Python.

# Whole numbers that stand by themselves; `#` cannot be in what is written here otherwise.
_NUMBER = re.compile(r"(?<![\w.'\"#-])\d+(?![\w.'\"])")
_MAX_PERIOD = 48  # lines of the longest repeated stretch that is looked for


class StatementLine(NamedTuple):
    """One statement."""

    text: str  # the statement
    target: str  # the name it assigns; "" for none
    used: tuple[str, ...]  # the names in it, in order
    leaves: bool = False  # whether it is the last one, after which nothing needs to be freed
    within: str = ""  # the context managers that it runs under; "" for none


def list_name(name: str) -> str:
    """Return the name of the list with a variable's values, if earlier ones are needed."""
    return f"{name}_passes"


def layout(
    lines: list[StatementLine], given: Collection[str] = (), kept: Collection[str] = ()
) -> list[str]:
    """Return statements as text: variables are freed after their last use, repetitions folded."""
    lines = _keeping(lines, kept)
    taken = {line.target for line in lines}.union(given)
    freed = [[name for name in names if name in taken] for names in _free_names(lines)]
    found: list[str] = []
    start = 0
    while start < len(lines):
        within, stop = lines[start].within, start + 1
        while stop < len(lines) and lines[stop].within == within:
            stop += 1
        block = _fold(lines[start:stop], freed[start:stop], taken)
        if within:
            found.append(f"with {within}:")
            block = [f"    {text}" for text in block]
        found += block
        start = stop
    return found


def _fold(lines: list[StatementLine], freed: list[list[str]], taken: Collection[str]) -> list[str]:
    """Return lines as text, with those that repeat as loops."""
    forms = [_Form(line) for line in lines]
    numbers: dict[tuple[str, ...], int] = {}
    code = [numbers.setdefault(form.between, len(numbers)) for form in forms]
    found: list[str] = []
    position = 0
    while position < len(lines):
        period, count = _repetition(code, forms, position)
        end = position + period * count
        if count < 2:
            found.append(_with_freed(lines[position].text, freed[position]))
            position += 1
            continue
        body = _Body(forms, position, period, count, taken)
        found.append(body.header)
        after: list[str] = []
        for offset in range(period):
            each = [freed[i] for i in range(position + offset, end, period)]
            last = each[-1]
            always = [name for name in last if all(name in names for names in each)]
            after += [name for name in last if name not in always]
            found.append("    " + _with_freed(body.text(offset), always))
        if after:
            found.append(f"{' = '.join(after)} = None")
        position = end
    return found


def _keeping(lines: list[StatementLine], kept: Collection[str]) -> list[StatementLine]:
    """Add to lines what keeps the values of some variables in lists."""
    if not kept:
        return lines
    assigned = {line.target for line in lines}
    found = []
    for name in sorted(kept):
        start = "[]" if name in assigned else f"[{name}]"
        first = f"{list_name(name)} = {start}"
        found.append(StatementLine(first, list_name(name), () if start == "[]" else (name,)))
    for line in lines:
        found.append(line)
        if line.target in kept:
            text = f"{list_name(line.target)}.append({line.target})"
            used = list_name(line.target), line.target
            found.append(StatementLine(text, "", used, within=line.within))
    return found


class _Form:
    """A line apart from the whole numbers in it."""

    def __init__(self, line: StatementLine) -> None:
        self.numbers = [int(digits) for digits in _NUMBER.findall(line.text)]
        self.between: tuple[str, ...] = tuple(_NUMBER.split(line.text))


class _Body:
    """Lines that repeat, as a loop."""

    def __init__(
        self, forms: list[_Form], start: int, period: int, count: int, taken: Collection[str]
    ) -> None:
        self._forms = forms[start : start + period]
        self._deltas = [
            [b - a for a, b in zip(one.numbers, next_.numbers, strict=True)]
            for one, next_ in zip(self._forms, forms[start + period :], strict=False)
        ]
        varying = (
            (number, delta)
            for form, deltas in zip(self._forms, self._deltas, strict=True)
            for number, delta in zip(form.numbers, deltas, strict=True)
            if delta
        )
        self._first, step = next(varying, (0, 0))
        self._variable = next(n for n in ("i", "j", "k", "i_", "j_", "k_") if n not in taken)
        stop = self._first + step * count
        if not step:
            self.header = f"for _ in range({count}):"
        elif step != 1:
            self.header = f"for {self._variable} in range({self._first}, {stop}, {step}):"
        else:
            first = f"{self._first}, " if self._first else ""
            self.header = f"for {self._variable} in range({first}{stop}):"

    def text(self, offset: int) -> str:
        form, deltas = self._forms[offset], self._deltas[offset]
        before, *rest = form.between
        text = before
        for number, delta, after in zip(form.numbers, deltas, rest, strict=True):
            ahead = number - self._first
            if not delta:
                text += str(number)
            elif not ahead:
                text += self._variable
            else:
                sum_ = f"{self._variable} {'+' if ahead > 0 else '-'} {abs(ahead)}"
                is_alone = before[-1:] in ("[", "(") and after[:1] in ("]", ")")
                text += sum_ if is_alone else f"({sum_})"
            text += after
            before = after
        return text


def _repetition(code: list[int], forms: list[_Form], start: int) -> tuple[int, int]:
    """Return the length and number of the stretches from `start` on that repeat the first.

    They may differ in numbers that go up, or down, by the same amount each time.
    """
    for period in range(1, min(_MAX_PERIOD, (len(code) - start) // 2) + 1):
        if code[start] != code[start + period]:
            continue
        block, count = code[start : start + period], 1
        while code[start + count * period : start + (count + 1) * period] == block:
            count += 1
        count = min(count, _steady(forms, start, period, count))
        if count > 1:
            return period, count
    return 1, 1


def _steady(forms: list[_Form], start: int, period: int, count: int) -> int:
    """Return for how many stretches the numbers in them go on as from the first to the second."""
    if count < 2:
        return count

    def numbers(number: int) -> list[int]:
        first = start + number * period
        return [n for form in forms[first : first + period] for n in form.numbers]

    before, now = numbers(0), numbers(1)
    deltas = [b - a for a, b in zip(before, now, strict=True)]
    if len({delta for delta in deltas if delta}) > 1:
        return 1
    steady = 2
    while steady < count:
        before, now = now, numbers(steady)
        if [b - a for a, b in zip(before, now, strict=True)] != deltas:
            break
        steady += 1
    return steady if steady > 2 or not any(deltas) else 1


def _free_names(lines: list[StatementLine]) -> list[list[str]]:
    """Return, for each line, the names whose values nothing after it needs."""
    live: set[str] = set()
    freed: list[list[str]] = []
    for line in reversed(lines):
        dead = []
        if line.target and line.target not in live and not line.leaves:
            dead.append(line.target)
        live.discard(line.target)
        for name in line.used:
            if name not in live and name not in dead and name != line.target and not line.leaves:
                dead.append(name)
            live.add(name)
        freed.append(dead)
    return freed[::-1]


def _with_freed(text: str, names: list[str]) -> str:
    return f"{text};  {' = '.join(names)} = None" if names else text


class _LocalName(NamedTuple):
    """The name of a value in the code of a graph."""

    name: str  # the variable
    version: int  # how often that had been assigned when the value was
    access: str = ""  # what to write after it


class FunctionBody:
    """The body of a function that is written line by line."""

    def __init__(self, builder: Builder) -> None:
        self.arguments: list[str] = []  # names of the arguments
        self.within = ""  # the context managers that the next lines run under
        self._builder = builder
        self._lines: list[StatementLine] = []
        self._names: dict[tuple[int, tuple[Any, ...]], _LocalName] = {}
        self._versions: dict[str, int] = {}
        self._older: set[str] = set()

    def text(self) -> list[str]:
        """Return the lines."""
        return layout(self._lines, self.arguments, self._older)

    def knows(self, index: int) -> bool:
        """Return whether the result of an op has a name."""
        return (index, ()) in self._names

    def name(self, ref: Ref) -> str:
        """Return the name of a value here."""
        index, keys = self._builder.events.origin(ref.index)
        for length in range(len(keys), -1, -1):
            local = self._names.get((index, keys[:length]))
            if local is not None:
                text = local.name
                behind = self._versions.get(text, 0) - local.version
                if behind:  # the name stands for a later pass by now
                    self._older.add(text)
                    text = f"{list_name(text)}[{-1 - behind}]"
                return text + local.access + "".join(f"[{key!r}]" for key in keys[length:])
        elsewhere = self._builder.paths.get(index)
        return f"<{elsewhere or base_name(self._builder.events.ops[index])}>"

    def used(self, value: Any) -> tuple[str, ...]:
        """Return the variables used in the text of a recorded object."""
        texts = [self.name(ref) for ref in refs_in(value)]
        texts += [thing.part.label for thing in existing_in(value)]
        found = (re.match(r"\w+", text) for text in texts)
        return tuple(dict.fromkeys(match[0] for match in found if match is not None))

    def assign(self, name: str, text: str, used: tuple[str, ...] = ()) -> None:
        """Add a line that assigns a value to a variable; none if it is the same variable."""
        if text == name:
            return
        self._lines.append(StatementLine(f"{name} = {text}", name, used, within=self.within))
        self._versions[name] = self._versions.get(name, 0) + 1

    def statement(self, text: str, used: tuple[str, ...], leaves: bool = False) -> None:
        """Add a line that assigns nothing."""
        self._lines.append(StatementLine(text, "", used, leaves, self.within))

    def call_it(self, index: int, element: tuple[Any, ...], name: str) -> None:
        """Record the variable that holds a value."""
        self._names[index, element] = self._local(name)

    def _local(self, name: str) -> _LocalName:
        return _LocalName(name, self._versions.get(name, 0))

    def call_parts(self, child: TreeNode, local: _LocalName | None = None) -> None:
        """Record the names of the values in an argument, which is a variable unless given."""
        local = self._local(child.name) if local is None else local
        if child.kind in ("tensor", "number"):
            made = child.passes[-1]
            assert made.index is not None
            self._names.setdefault((made.index, made.element), local)
        for inner in child.children.values():
            if inner.passes[-1].parent == len(child.passes) - 1:
                access = f"[{inner.key!r}]"
                if child.type not in ("tuple", "list", "dict") and isinstance(inner.key, str):
                    access = f".{inner.key}" if inner.key.isidentifier() else access
                self.call_parts(inner, local._replace(access=local.access + access))

    def call_items(self, value: Any, name: str, access: str = "") -> None:
        """Record the names of the values in the output of a call, which has a variable."""
        value = self._builder.plain(value)
        if isinstance(value, Ref):
            origin = self._builder.events.origin(value.index)
            self._names[origin] = self._local(name)._replace(access=access)
            return
        for item in items_of(value, self._builder.events) or ():
            self.call_items(item.value, name, access + item.access)
