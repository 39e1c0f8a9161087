"""Conversion between the mirror of a trace and `torch.fx`.

The fx graph is one path: it does what the model did for the traced inputs. So that it is never
silently wrong for other inputs, it contains the guards, and raises `DivergenceError` if one does
not hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from bendtrace.errors import ConversionError, DivergenceError, InputError
from bendtrace.flow import steps_of
from bendtrace.log.mirror import Graph
from bendtrace.python.checks import required_kind
from bendtrace.record.iterations import user_code
from bendtrace.record.numbers import error_of
from bendtrace.record.op_names import NodeRef, map_items
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import (
    COPIED,
    Access,
    Captured,
    CaptureKind,
    Keys,
    Length,
    Size,
    identical,
    is_as_copied,
)
from bendtrace.tape.contexts import Context
from bendtrace.tape.guards import KINDS, ErrorGuard
from bendtrace.tape.structure import (
    Construction,
    Existing,
    FixedObject,
    Instance,
    Opaque,
    build_instance,
)
from bendtrace.tape.tape import Guard, ModuleCall, Op, OpKind, Ref, Tape, map_refs, refs_in
from bendtrace.watch.intercepts import is_function_apply
from bendtrace.watch.owners import is_leaf_module


def to_fx(
    graph: Graph, *, fold: bool | Callable[[nn.Module], bool] = False, guards: bool = True
) -> fx.GraphModule:
    """Convert the mirror of a trace to a runnable `torch.fx.GraphModule`.

    Args:
        graph: the mirror from `Trace.graph`, or a result of `from_fx`.
        fold: whether calls of leaf modules become one `call_module` node each, as in torch.fx; or a
            predicate that selects the modules to fold.
        guards: whether the graph tests the guards of the trace and raises `DivergenceError` if one
            does not hold. Without them it is right for the traced path only.

    Returns:
        A module that takes the arguments of the traced call. Parameters, buffers and folded
        submodules are the model's own.

    Raises:
        ConversionError: the trace does something that an fx graph cannot express, such as setting
            an attribute of the model; or the graph comes from elsewhere.
        InputError: `graph` is not a mirror, or `fold` is neither a bool nor a predicate.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(torch.nn.Linear(2, 3), torch.ones(1, 2))
        >>> [node.op for node in bt.graph.to_fx(trace.graph).graph.nodes]
        ['placeholder', 'get_attr', 'get_attr', 'call_function', 'output']
    """
    if not isinstance(fold, bool) and not callable(fold):
        raise InputError(f"fold= takes a bool, or a predicate of modules, not {fold!r}")
    required_kind("a mirror is a graph such as bt.trace(model, x).graph", graph, Graph)
    recording: Recording | None = graph.graph.get("recording")
    if recording is None:
        return _back_to_fx(graph)
    if recording.changes:
        raise ConversionError(
            f"the run sets {recording.changes[0].label}, which an fx graph cannot express"
        )
    if recording.tape.blockers:
        raise ConversionError(f"the run cannot be repeated: {recording.tape.blockers[0]}")
    leaf = fold if callable(fold) else is_leaf_module
    folded = folding(recording, leaf) if fold else Folding()
    return _GraphWriter(graph, recording, folded, guards).write()


_ENTERS = "enters or leaves autocast or inference mode"


class _GraphWriter:
    def __init__(self, graph: Graph, recording: Recording, folded: Folding, guards: bool) -> None:
        self.mirror = graph
        self.tape = recording.tape
        self.folded = folded
        self.fx = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        indices = {data.get("index"): name for name, data in graph.nodes(data=True)}
        self.names = [indices.get(op.index, "") for op in self.tape.ops]
        self.guards = guards
        steps = steps_of(recording) if guards else ()
        self.steps = {step.guard: step for step in steps}
        self.waiting = self._guards() if guards else []
        self.arguments: list[fx.Node] = []
        self.context = self.entry = self._entry()
        root = graph.graph["root"]
        self.root: Any = root if isinstance(root, nn.Module) else nn.Module()
        self.holder = nn.Module()

    def write(self) -> fx.GraphModule:
        nodes = list(self.mirror.nodes(data=True))
        for name, data in nodes:
            if data["op"] == "placeholder":
                label = str(data["target"]).replace("[", "_").replace("]", "")
                # In code that fx generates, these mean something else.
                label += "_" * (label in ("device", "torch", "inf", "nan"))
                node = self.fx.placeholder(label)
                self.arguments.append(node)
                self._keep(name, data, node)
        if self.guards:
            self._check_arguments()
        for name, data in nodes:
            index = data.get("index")
            if data["op"] == "placeholder":
                continue
            if data["op"] == "output":
                self._check(len(self.tape.ops))
                self._switch(self.entry)
                self.fx.output(self._value(data["args"][0]))
            elif index is None:
                self._call(name, data)
            else:
                self._op(self.tape.ops[index], name, data)
        self.fx.lint()
        module = fx.GraphModule(self.holder, self.fx, class_name="BendedGraph")
        module.training = getattr(self.root, "training", True)
        return module

    def _check_arguments(self) -> None:
        """Test the values besides tensors and traced numbers that the path can depend on."""
        parts = [
            part for part in self.mirror.graph["recording"].environment.parts if part.is_argument
        ]
        kinds = (CaptureKind.TENSOR, CaptureKind.NUMBER)
        if all(part.kind in kinds and part.access is Access.ROOT for part in parts):
            return

        def check_arguments(*arguments: Any) -> None:
            for part in parts:
                _check_part(part, arguments)

        check_arguments.__module__ = __name__
        self.fx.call_function(check_arguments, tuple(self.arguments))

    def _entry(self) -> Context:
        inputs = [op.context for op in self.tape.ops if op.kind is OpKind.INPUT]
        return inputs[0] if inputs else Context(torch.is_grad_enabled(), False)

    def _op(self, op: Op, name: str, data: dict[str, Any]) -> None:
        self._check(op.index)
        call = self.folded.call_of.get(op.index)
        if call is not None:
            if self.folded.first[id(call)] == op.index:
                self._switch(op.context)
                assert call.module is not None
                _put_state(self.holder, call.path, call.module)
                args, kwargs = map_refs(
                    (call.args, call.kwargs), lambda r: NodeRef(self.names[r.index])
                )
                node = self.fx.call_module(call.path, self._value(args), self._value(kwargs))
                for index, path in _results(call.output):
                    taken = node
                    for key in path:
                        taken = self.fx.call_function(operator.getitem, (taken, key))
                    self.nodes[self.names[index]] = taken
            return
        if op.raised is not None:
            raise ConversionError(
                f"the run catches {op.raised.type.__name__} at {data['site']}, which an fx graph "
                "cannot express"
            )
        if op.kind is OpKind.STATE:
            target = str(data["target"])
            tensor = op.target.read(())
            if not _is_at(self.root, target, tensor):
                target = f"_{name}"  # from a closure, a global or a container
            _put_state(self.holder, target, tensor)
            self._keep(name, data, self.fx.create_node("get_attr", target, (), {}, name))
            return
        if op.kind is OpKind.CALL:
            self._switch(op.context)
        if op.target is not error_of:
            self._call(name, data)

    def _call(self, name: str, data: dict[str, Any]) -> None:
        args, kwargs = self._value(data["args"]), self._value(data["kwargs"])
        target = data["target"]
        if is_function_apply(target):  # which fx cannot call by its name
            apply = target

            def target(*args: Any, **kwargs: Any) -> Any:
                return apply(*args, **kwargs)

            target.__name__ = f"apply_{apply.__self__.__name__}"
            target.__module__ = __name__
        node = self.fx.create_node(data["op"], target, args, kwargs, name)
        self._keep(name, data, node)

    def _keep(self, name: str, data: dict[str, Any], node: fx.Node) -> None:
        node.meta.update({key: data[key] for key in ("shape", "dtype", "site") if key in data})
        self.nodes[name] = node

    def _value(self, value: Any) -> Any:
        return map_items(value, self._item)

    def _item(self, value: Any) -> Any:
        if isinstance(value, NodeRef):
            return self.nodes[value.name]
        if isinstance(value, Instance):
            return self._built(value)
        if isinstance(value, (Existing, FixedObject, Construction, Opaque)):
            raise ConversionError(f"{value} is an object of the model, not a value of the graph")
        return value

    def _built(self, instance: Instance) -> fx.Node:
        cls, names = instance.cls, tuple(instance.attributes)

        def make(items: Any, *values: Any) -> Any:
            return build_instance(cls, items, dict(zip(names, values, strict=True)))

        make.__name__ = f"make_{cls.__name__}"
        make.__module__ = __name__
        values = tuple(self._value(value) for value in instance.attributes.values())
        return self.fx.call_function(make, (self._value(instance.items), *values))

    # Contexts and guards

    def _switch(self, wanted: Context) -> None:
        if wanted._replace(grad=self.context.grad) != self.context:
            changes = "changes a setting of torch" if wanted.settings else _ENTERS
            raise ConversionError(f"the run {changes} on its way")
        if wanted != self.context:
            self.fx.call_function(torch._C._set_grad_enabled, (wanted.grad,))
            self.context = wanted

    def _guards(self) -> list[tuple[int, int]]:
        """Return (position, number) of the guards to test, the last first."""
        listed = [
            (guard.position, number)
            for number, guard in enumerate(self.tape.guards)
            if guard.index not in self.folded.call_of
        ]
        return sorted(listed, reverse=True)

    def _check(self, position: int) -> None:
        while self.waiting and self.waiting[-1][0] <= position:
            number = self.waiting.pop()[1]
            guard = self.tape.guards[number]
            if guard.index in self.tape.counters:
                continue  # a number here
            if isinstance(guard, ErrorGuard):
                continue  # an error of an fx graph is raised as it is
            if self.tape.ops[guard.index].target is error_of:
                self._check_error(guard, self._guard_text(number))
                continue
            node, *others = (self.nodes[self.names[index]] for index in guard.operands)
            wanted = others[0] if others else guard.answer
            what = self._guard_text(number)
            self.fx.call_function(check_guard, (node, guard.name, wanted, what))

    def _check_error(self, guard: Guard, what: str) -> None:
        """Test what arithmetic raises, if it raised something: else that is raised as it is."""
        function, *operands = self.tape.ops[guard.index].args

        def check_error(*operands: Any) -> None:
            check_guard(error_of(function, *operands), guard.name, guard.answer, what)

        check_error.__module__ = __name__
        if guard.answer is not None:
            refs = map_refs(tuple(operands), lambda ref: NodeRef(self.names[ref.index]))
            self.fx.call_function(check_error, self._value(refs))

    def _guard_text(self, number: int) -> str:
        """Say what a guard is about, and where."""
        step = self.steps.get(number)
        if step is not None:
            return f"{step.kind} `{step.text}` at {step.place}"
        guard = self.tape.guards[number]
        place = None if guard.site is None else user_code(guard.scope, guard.site)[0]
        return f"{guard.subject} at {place or 'an unknown place'}"


def _is_at(root: nn.Module, target: str, tensor: Any) -> bool:
    try:
        return operator.attrgetter(target)(root) is tensor
    except AttributeError:
        return False


def _put_state(holder: nn.Module, target: str, value: Any) -> None:
    """Give a module an attribute of the model, under its name."""
    *path, last = target.split(".")
    for step in path:
        if not hasattr(holder, step):
            holder.add_module(step, nn.Module())
        holder = getattr(holder, step)
    if isinstance(value, nn.Module):
        holder.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(last, value)
    elif last not in holder._buffers:
        holder.register_buffer(last, value)


def _check_part(part: Captured, arguments: tuple[Any, ...]) -> None:
    """Raise `DivergenceError` if a part of the arguments has changed."""
    if part.kind in (CaptureKind.NUMBER, CaptureKind.ALIAS):
        return
    try:
        now = part.read(arguments)
    except (LookupError, AttributeError, TypeError):
        raise DivergenceError(
            f"argument {part.label} was passed when traced and is missing now"
        ) from None
    if part.kind is CaptureKind.TENSOR:
        if not isinstance(now, torch.Tensor):
            raise DivergenceError(
                f"argument {part.label} was a tensor when traced and is not a tensor now"
            )
    elif part.kind is CaptureKind.PLAIN:
        if not identical(now, part.value):
            was = f"{part.value!r} when traced and is {now!r} now"
            raise DivergenceError(f"argument {part.label} was {was}")
    elif part.kind in (CaptureKind.MODULE, CaptureKind.IDENTITY):
        if now is not part.value:
            raise DivergenceError(f"argument {part.label} is not the same object as when traced")
    elif type(now) is not part.type:
        was, is_now = part.type.__name__, type(now).__name__
        raise DivergenceError(
            f"argument {part.label} was a {was} when traced and is a {is_now} now"
        )
    elif not (is_as_copied(part, now) if part.kind in COPIED else _content(part, now) == part.size):
        raise DivergenceError(f"argument {part.label} has different content than when traced")


def _content(part: Captured, now: Any) -> Size | None:
    """Return the `part.size` of the container that is there now."""
    if isinstance(part.size, Keys) and part.kind is not CaptureKind.OBJECT:
        keys = dict.keys(now) if part.kind is CaptureKind.DICT else range(len(now))
        return Keys((*keys, *part.size.attributes))
    if isinstance(part.size, Length) and part.kind in (CaptureKind.LIST, CaptureKind.TUPLE):
        return Length(len(now), part.size.most)
    return part.size if part.kind is CaptureKind.OBJECT else None


def check_guard(value: Any, test: str, wanted: Any, what: str) -> None:
    """Raise `DivergenceError` if a value of a converted graph differs from the recording."""
    kind = KINDS[test]
    if not kind.meets(value, wanted):
        raise DivergenceError(f"{what}{kind.difference(value, wanted)}")


def _back_to_fx(graph: Graph) -> fx.GraphModule:
    """Undo `from_fx`, with what was changed in the graph since."""
    root = graph.graph.get("root")
    if not isinstance(root, fx.GraphModule):
        raise ConversionError("the graph is neither the mirror of a trace nor one from `from_fx`")
    written = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def with_nodes(value: Any) -> Any:
        if isinstance(value, NodeRef):
            if value.name not in nodes:
                raise ConversionError(f"{value} is used before it is defined, or does not exist")
            return nodes[value.name]
        return value

    for name, data in graph.nodes(data=True):
        args, kwargs = map_items((data["args"], data["kwargs"]), with_nodes)
        nodes[name] = written.create_node(data["op"], data["target"], args, kwargs, name)
    written.lint()
    return fx.GraphModule(root, written)


def from_fx(module: fx.GraphModule) -> Graph:
    """Convert a `torch.fx.GraphModule` to a networkx graph of the same form as a mirror.

    Args:
        module: the graph module.

    Returns:
        A graph with the nodes, targets and arguments of the fx graph. It has no flow steps, because
        fx does not record them.

    Example:
        >>> import torch, bendtrace as bt
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
        >>> list(bt.graph.from_fx(traced))
        ['input_1', '_0', 'output']
    """
    graph = Graph()
    graph.graph["root"] = module
    for index, node in enumerate(module.graph.nodes):
        args, kwargs = map_items(
            (node.args, node.kwargs), lambda one: NodeRef(one.name) if type(one) is fx.Node else one
        )
        graph.add_op(
            node.name, op=node.op, target=node.target, args=args, kwargs=kwargs,
            module_path="", pass_=1, index=index, site=node.meta.get("site"), text="",
        )  # fmt: skip
    return graph


@dataclass
class Folding:
    """Calls that replace the ops inside them."""

    # For each op inside a folded call, the call.
    call_of: dict[int, ModuleCall] = field(default_factory=dict)
    # For each folded call, by identity, its first op.
    first: dict[int, int] = field(default_factory=dict)

    def calls(self) -> Iterator[ModuleCall]:
        """Yield the folded calls."""
        yield from {id(call): call for call in self.call_of.values()}.values()


def _results(value: Any, *path: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield each op in the output of a call, with the keys that lead to it."""
    if isinstance(value, Ref):
        yield value.index, path
    elif isinstance(value, (tuple, list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _results(item, *path, key)


def folding(recording: Recording, is_leaf: Callable[[nn.Module], bool]) -> Folding:
    """Choose the outermost calls of leaf modules that one node can represent.

    A call is not folded if an op outside uses a value from inside that the call does not return, or
    if an input of the call is not on the tape.
    """
    found = Folding()
    tape = recording.tape
    users = _last_users(recording)
    done = -1
    for call in tape.calls:
        if call.start < done or call.parent is None or call.module is None:
            continue
        if not call.path or call.path.startswith("<") or not is_leaf(call.module):
            continue
        inside = _ops_of_call(tape, call, users)
        if inside and _is_closed(tape, call, inside, users):
            found.call_of.update(dict.fromkeys(inside, call))
            found.first[id(call)] = min(inside)
            done = call.stop
    _take_in_shared_state(recording, found)
    return found


def _take_in_shared_state(recording: Recording, found: Folding) -> None:
    """Fold the state that several calls of a module use, if nothing else does."""
    tape = recording.tape
    elsewhere: set[int] = set()
    outside: list[Any] = [(op.args, op.kwargs) for op in tape.ops if op.index not in found.call_of]
    outside += [(call.args, call.kwargs, call.output) for call in found.calls()]
    outside += [recording.root.output, [change.value for change in recording.changes]]
    for value in outside:
        elsewhere.update(ref.index for ref in refs_in(value))
    users = {
        ref.index: found.call_of[op.index]
        for op in tape.ops
        if op.index in found.call_of
        for ref in refs_in((op.args, op.kwargs))
    }
    guarded = {guard.index for guard in tape.guards if guard.index not in found.call_of}
    for op in tape.ops:
        if op.kind is OpKind.STATE and op.index in users and op.index not in elsewhere | guarded:
            found.call_of.setdefault(op.index, users[op.index])


def _ops_of_call(tape: Tape, call: ModuleCall, users: dict[int, int]) -> set[int]:
    """The ops of a call; not the state in it that is used elsewhere too."""
    inside = set()
    for op in tape.ops[call.start : call.stop]:
        scope: ModuleCall | None = op.scope
        while scope is not None and scope is not call:
            scope = scope.parent
        shared = op.kind is OpKind.STATE and users.get(op.index, -1) >= call.stop
        if scope is call and op.kind is not OpKind.INPUT and not shared:
            inside.add(op.index)
    return inside


def _is_closed(tape: Tape, call: ModuleCall, inside: set[int], users: dict[int, int]) -> bool:
    if _has_opaque((call.args, call.kwargs, call.output)):
        return False
    if any(ref.index in inside for ref in refs_in((call.args, call.kwargs))):
        return False
    if any(tape.ops[index].raised is not None for index in inside):
        return False
    given = {index for index, _ in _results(call.output)}
    return all(index in given or users.get(index, -1) < call.stop for index in inside)


def _last_users(recording: Recording) -> dict[int, int]:
    """For each op, the position of the last thing that uses its value."""
    tape, last = recording.tape, dict[int, int]()
    for op in tape.ops:
        for ref in refs_in((op.args, op.kwargs)):
            last[ref.index] = op.index
    for ref in refs_in((recording.root.output, [change.value for change in recording.changes])):
        last[ref.index] = len(tape.ops)
    return last


def _has_opaque(value: Any) -> bool:
    if isinstance(value, (Opaque, Instance, Construction)):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_opaque, value))
    return isinstance(value, dict) and any(map(_has_opaque, value.values()))
