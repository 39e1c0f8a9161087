"""One call of a module, added to the tree step by step."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

from torch import nn

from bendtrace.paths.build import Builder
from bendtrace.paths.code import call_text, module_expression, value_text
from bendtrace.paths.locals import Body
from bendtrace.paths.naming import identifier
from bendtrace.paths.nodes import Kind, Pass, TreeNode
from bendtrace.paths.structure import result_type, type_name
from bendtrace.recording.functions import is_gate
from bendtrace.recording.names import base_name
from bendtrace.recording.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, refs_in

__all__ = ["Visit"]


class Visit:
    """One call of a module, as it is added to the tree.

    Args:
        builder: builds the tree.
        call: the call.
        node: its node.
    """

    def __init__(self, builder: Builder, call: ModuleCall, node: TreeNode) -> None:
        self.builder = builder
        self.events = builder.events
        self.call = call
        self.node = node
        self.number = len(node.passes)
        self.header: list[str] = []
        self.given: set[int] = set()
        self.marks: list[tuple[int, str]] = []
        self.body = Body(builder)
        self._earlier = set(node.children) if self.number else set()
        self._new: list[str] = []
        builder.where[id(call)] = node, self.number
        builder.marks[id(call)] = self.marks

    def run(self) -> None:
        """Add what happened in the call."""
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
        """Add the parts of a result."""
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
        used = self._take_state((call.args, call.kwargs))
        relative = builder.relative(call)
        label = relative or "forward"
        key = "call", builder.site(call.site), relative
        child = builder.node(self.node, key, label, "graph", "Graph", "call")
        child.key, child.module = relative, call.path
        child.class_name = type(call.module).__name__
        child.places = child.places or builder.places(call.site)
        self._place(child, call.start)
        given = [value_text(value, self.body.name) for value in call.args]
        given += [
            f"{name}={value_text(value, self.body.name)}" for name, value in call.kwargs.items()
        ]
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
