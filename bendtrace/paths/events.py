"""The events in each call of a module, derived from the tape."""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from bendtrace.recording.recorder import Recording
from bendtrace.tape.captured import Access, AttributeKey, Captured, CaptureKind
from bendtrace.tape.contexts import Context, current_context
from bendtrace.tape.structure import Existing, Instance, Opaque
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, refs_in
from bendtrace.torch_rules.functions import METADATA, SHAPES, name_of

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
        known = self._managers.get(context)
        if known is None:
            known = self._managers[context] = ", ".join(_managers(context, self._context))
        return known

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
            return holds_tensors(op.meta)
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
    def held(self) -> dict[int, list[Captured]]:
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
        return {index: [held[i] for i in sorted(held)] for index, held in found.items()}

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
            known = self._parameters.get(id(call.module))
            if known is None:
                known = self._parameters[id(call.module)] = parameters_of(call.module)
            return bound(known, call.args, call.kwargs)
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
        """The outermost call: the module's own, or what a function was run in."""
        recording = self.recording
        calls = recording.tape.calls
        if calls and calls[0].parent is not None:
            outer = calls[0].parent
            while outer.parent is not None:
                outer = outer.parent
            return calls[0] if isinstance(self.function, nn.Module) else outer
        if self.ops:
            outer = self.ops[0].scope
            while outer.parent is not None:
                outer = outer.parent
            return outer
        return recording.root


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


def holds_tensors(meta: Any) -> bool:
    """Return whether the description of a result contains a tensor."""
    if isinstance(meta, TensorMeta):
        return True
    return isinstance(meta, (tuple, list)) and any(map(holds_tensors, meta))


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
    """An item of a container.

    Attributes:
        key: its index, key or attribute name.
        label: its preferred name.
        value: the recorded item.
        access: the code after the container that accesses it.
    """

    key: str | int
    label: str
    value: Any
    access: str


def items_of(value: Any, events: Events) -> list[Item] | None:
    """Return the items of a recorded container; None for other objects."""
    if isinstance(value, (tuple, list)):
        return [_index_item(i, item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [_key_item(key, item) for key, item in value.items()]
    if isinstance(value, Instance):
        return _items_of_instance(value)
    if isinstance(value, Existing):
        held = events.held.get(value.part.index)
        if held is None or value.part.kind is CaptureKind.TENSOR:
            return None
        return [
            _item_of_part(value.part, part)
            for part in held
            # What is an item as well is shown as that.
            if not (isinstance(part.key, AttributeKey) and part.key != part.key.name)
        ]
    return None


def _item_of_part(whole: Captured, part: Captured) -> Item:
    value = Existing(part)
    if isinstance(part.key, AttributeKey):
        return _attribute(part.key.name, value)
    if part.access is not Access.ITEM:
        return _attribute(str(part.key), value)
    if type(part.key) is not int or issubclass(whole.type, dict):
        return _key_item(part.key, value)
    names = _fields(whole.type)
    if part.key < len(names):
        return _attribute(names[part.key], value, part.key)
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
            _attribute(names[i], item, i) if i < len(names) else _index_item(i, item)
            for i, item in enumerate(items)
        ]
    for name, item in value.attributes.items():
        if str(name) not in names and any(refs_in(item)):
            found.append(_attribute(str(name), item))
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


def _attribute(name: str, value: Any, key: int | None = None) -> Item:
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
