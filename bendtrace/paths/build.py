"""Builds the tree of nodes of a recorded run."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Hashable
from typing import Any

from torch import nn

from bendtrace.flow import FlowStep, LoopFlowStep, steps_of
from bendtrace.paths.body import Body
from bendtrace.paths.code import call_text, module_expression, value_text
from bendtrace.paths.events import Events, items_of, result_type, type_name
from bendtrace.paths.naming import Holders, Registry, identifier
from bendtrace.paths.nodes import Kind, Pass, Place, Role, Step, TreeNode, Variant
from bendtrace.recording import numbers, recorder, scopes, texts
from bendtrace.recording.names import base_name
from bendtrace.source.sites import Site
from bendtrace.tape.structure import Existing, Made
from bendtrace.tape.tape import (
    ModuleCall,
    Op,
    OpKind,
    Ref,
    TensorMeta,
    refs_in,
)
from bendtrace.torch_rules.functions import is_gate

__all__ = ["Builder", "StepSource", "Visit"]


# The code of the tracer itself that runs a function.
_TRACERS = frozenset(module.__file__ for module in (recorder, scopes, numbers, texts))


class Builder:
    """Creates the nodes of the tree of one run, or reuses existing ones.

    Args:
        events: the events of the run.
        registry: the registry of node names.

    Attributes:
        root: the root of the tree.
        where: for each module call, by identity, its node and the number of its pass.
        marks: for each call, by identity, the tape position and name of each child.
    """

    def __init__(self, events: Events, registry: Registry) -> None:
        self.events = events
        self.where: dict[int, tuple[TreeNode, int]] = {}
        self.marks: dict[int, list[tuple[int, str]]] = {}
        self.paths: dict[int, str] = {}  # of the node that gave each value first
        self._registry = registry
        function = events.function
        root = function if isinstance(function, nn.Module) else events.root.module
        self._holders = Holders(root)
        self._places: dict[int, tuple[Place, ...]] = {}
        self._sites: dict[int, tuple[int, Site]] = {}
        self._codes: dict[int, dict[str, list[int]]] = {}
        self._inserted: dict[int, tuple[TreeNode, list[tuple[str, str]]]] = {}
        call = events.root
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
        known = self._sites.get(id(site))
        if known is None:
            known = self._sites[id(site)] = self._registry.site(site), site
        return known[0]

    def places(self, site: Site | None) -> tuple[Place, ...]:
        """Return the lines that led to a site, starting in the code of the module."""
        if site is None:
            return ()
        known = self._places.get(id(site))
        if known is None:
            known = self._places[id(site)] = tuple(
                Place(
                    place.file, place.line, place.function,
                    linecache.getline(place.file, place.line).strip(),
                )
                for place in reversed(site.places[site.level :])
                if place.file not in _TRACERS
            )  # fmt: skip
        return known

    def node(
        self,
        parent: TreeNode,
        key: Hashable,
        label: str,
        kind: Kind,
        type_: str,
        role: Role,
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
        """Add a value, and its contents, to pass `number` of a node.

        Args:
            parent: the enclosing node.
            number: the pass of the parent.
            key: the key that identifies the node.
            label: its preferred name.
            value: the value, as recorded.
            role: its relation to the graph.
            places: its places in the source.
        """
        value = self.plain(value)
        items = items_of(value, self.events)
        if items is not None:
            kind: Kind = "container"
            type_, made = type_name(value), Pass(number)
        elif isinstance(value, Ref):
            index, element = self.events.origin(value.index)
            kind, type_, shape = _described(self.events, index, element)
            made = Pass(number, index, element, shape)
        else:
            kind, type_, made = "other", type_name(value), Pass(number)
        group = type_ if kind in ("container", "other") else kind
        child = self.node(parent, (key, group), label, kind, type_, role)
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
        if isinstance(value, Made):
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

    def keep_code(self, node: TreeNode, number: int, text: str) -> None:
        """Record the code that a pass of a graph ran."""
        self._codes.setdefault(id(node), {}).setdefault(text, []).append(number)

    def relative(self, call: ModuleCall) -> str:
        """Return the name of a module in the code around a call: `layers.8`."""
        return self._holders.module(call)

    def state(self, op: Op, call: ModuleCall) -> str:
        """Return the name of a parameter or buffer in the code of a call: `weight`."""
        return self._holders.state(str(op.target), call)


def _described(
    events: Events, index: int, element: tuple[Any, ...]
) -> tuple[Kind, str, tuple[int, ...] | None]:
    if events.ops[index].kind is OpKind.UNKNOWN:
        meta = events.ops[index].meta
    else:
        try:
            meta = events.meta((index, element))
        except (LookupError, TypeError):
            meta = None
    if isinstance(meta, TensorMeta):
        return "tensor", "Tensor", meta.shape
    return "number", type(meta).__name__, None


class Visit:
    """One module call, while it is added to the tree.

    Args:
        builder: the builder of the tree.
        call: the call.
        node: its node.
    """

    def __init__(self, builder: Builder, call: ModuleCall, node: TreeNode) -> None:
        self.builder = builder
        self.events: Events = builder.events
        self.call = call
        self.node = node
        self.number: int = len(node.passes)
        self.header: list[str] = []
        self.given: set[int] = set()
        self.marks: list[tuple[int, str]] = []
        self.body: Body = Body(builder)
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
        self.node.passes.append(Pass(parent, number))
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
        self.builder.keep_code(self.node, self.number, self._code())

    # Steps

    def _argument(self, name: str, value: Any) -> None:
        if not self.builder.has_values(value):
            return
        child = self.builder.value(self.node, self.number, ("input", name), name, value, "input")
        self.header.append(f"{child.name} : {_annotation(child)}")
        self._stand(child)
        self.body.arguments.append(child.name)
        self.body.call_argument(child)
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
        """What is inserted is no node, so that the names of the others stay as they are."""
        text = call_text(op, self.body.name)
        name = identifier(base_name(op))
        replaces = getattr(op.target, "role", "") != "before"  # else only for the call that follows
        if replaces and isinstance(op.meta, TensorMeta) and op.args and type(op.args[0]) is Ref:
            known = self.body.name(op.args[0])
            name = known if known.isidentifier() else name
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
        """A size, or another number out of a list of them: a node of its own, where it is used."""
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
        relative = builder.relative(call)
        label = relative or "forward"
        key = "call", builder.site(call.site), relative
        child = builder.node(self.node, key, label, "graph", "Graph", "call")
        child.key, child.module = relative, call.path
        child.class_name = type(call.module).__name__
        child.places = child.places or builder.places(call.site)
        self._place(child, call.start)
        given = [value_text(value, self.body.name) for value in args]
        given += [f"{name}={value_text(value, self.body.name)}" for name, value in kwargs.items()]
        Visit(builder, call, child).run()
        called = module_expression(relative, self.call.module)
        if call.path.startswith("<"):  # of no module around it
            called = f"<{type(call.module).__name__}>"
        self.body.assign(child.name, f"{called}({', '.join(given)})", used)
        self.body.call_results(call.output, child.name)

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
            label = self.builder.state(op, self.call)
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


def _annotation(child: TreeNode) -> str:
    return "torch.Tensor" if child.kind == "tensor" else child.type


_Counts = dict[tuple[int, str], int]


class StepSource:
    """Finds the place of each flow step in a tree, on demand.

    Args:
        builder: the builder of the tree.
    """

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
