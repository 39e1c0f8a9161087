"""The effects of users' functions that only compute a new tensor.

A function qualifies if everything that it can read is known - tensors and plain values in closures,
defaults and globals, modules, functions of torch, and other such functions - and if it writes to
none of these. Its bytecode shows this whenever its effect is requested, and a recording confirms it
before the effect is compiled. The tensors in its closure become inputs: a function with the same
code, and other tensors in the same places, has an effect with the same key.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import math
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import contains, getitem, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.engine.compile_probing import CompileRefusal, why_not_op
from bendtrace.insert.interjection import NO_INPUTS, Effect, Interjection, NodePass, reads_of
from bendtrace.record.recorded_call import Signature, record
from bendtrace.tape.contexts import current_context
from bendtrace.tape.guards import IdentityGuard, LengthGuard
from bendtrace.tape.tape import Use
from bendtrace.watch.functions import is_torchs_function
from bendtrace.watch.owners import module_tree, states_of


class _Impure(Exception):
    """The reason why something may not be a function of tensors."""


class LiftedCallable(NamedTuple):
    """A callable, separated into its tensors and the rest."""

    spec: Any  # `build_callable` rebuilds it from this and its tensors, or other ones
    tensors: tuple[Tensor, ...]
    key: Hashable  # everything else that it depends on


def effect_of_function(function: Callable[..., Any]) -> Effect | str:
    """Return the effect of a function of a tensor, or why it may have none."""
    found = lift_tensors(function)
    if isinstance(found, str):
        return found
    return Effect(
        _caller(found.spec), found.tensors, found.key,
        check=lambda value, tensors: why_not_pure(function, value),
    )  # fmt: skip


def effect_of_pure(what: Interjection, at: NodePass) -> Effect | str:
    """Return the effect of an interjection that promises to have one."""
    if not what.pure and type(what).__module__.startswith("bendtrace."):
        return "it may do more than compute one tensor from another"
    if not what.pure:
        return (
            "it is not known whether it only computes a tensor from the one there is; mark its "
            "class with pure = True if so"
        )
    lifting = _Lifting(trusted=True)
    try:
        cls, own, lifted = lifting.of_pure(what)
    except _Impure as reason:
        return str(reason)
    key = cls, at.path, at.number, lifted

    def after(value: Tensor, *tensors: Tensor) -> Any:
        self: Any = object.__new__(cls)
        for name, spec in own:
            setattr(self, name, build_callable(spec, tensors))
        return self.after(at, NO_INPUTS, value)

    return Effect(after, tuple(lifting.tensors), key)


def facts_on(whats: Iterable[Interjection]) -> IdentityFacts | None:
    """Return the facts that the effects of some interjections depend on; None if they are unknown.

    As long as they hold, each of them has the effect that it has now, but for the content of its
    tensors.
    """
    facts = IdentityFacts()
    try:
        for what in whats:
            _follow(what, facts)
    except _Impure:
        return None
    return facts


def _follow(thing: Any, facts: IdentityFacts) -> None:
    """Add the facts on everything in a thing that can change.

    Raise `_Impure` if it may change without changing its attributes.
    """
    kind = type(thing)
    if kind in _PLAIN or kind in (Tensor, nn.Parameter):
        return
    if kind is slice:
        thing = thing.start, thing.stop, thing.step
    if isinstance(thing, tuple):
        for item in thing:
            _follow(item, facts)
    elif kind is dict:
        facts.content(thing)
        for value in thing.values():
            _follow(value, facts)
    elif (reads := reads_of(kind)) is not None:
        for name in reads:
            _follow(facts.attribute(thing, name), facts)
    elif isinstance(thing, Interjection):
        if not facts.attribute(thing, "pure"):
            raise _Impure("its effect may depend on more than its attributes")
        _Lifting(trusted=True, facts=facts).of_pure(thing)
    else:
        _Lifting(trusted=False, facts=facts).of(thing)


def lift_tensors(function: Any, trusted: bool = False) -> LiftedCallable | str:
    """Separate a callable into its tensors and the rest, or return why that is impossible.

    It is trusted if its author promises that it only computes new tensors.
    """
    lifting = _Lifting(trusted)
    try:
        spec, key = lifting.of(function)
    except _Impure as reason:
        return str(reason)
    return LiftedCallable(spec, tuple(lifting.tensors), key)


def build_callable(spec: Any, tensors: Sequence[Tensor]) -> Any:
    """Rebuild a callable with other tensors."""
    kind = spec[0]
    if kind == "tensor":
        return tensors[spec[1]]
    if kind == "tuple":
        return tuple([build_callable(item, tensors) for item in spec[1]])
    if kind == "list":
        return [build_callable(item, tensors) for item in spec[1]]
    if kind == "dict":
        return {name: build_callable(item, tensors) for name, item in spec[1]}
    if kind == "function":
        return spec[1](*[build_callable(item, tensors) for item in spec[2]])
    if kind == "partial":
        given = [build_callable(item, tensors) for item in spec[1]]
        named = {name: build_callable(item, tensors) for name, item in spec[2]}
        return functools.partial(given[0], *given[1:], **named)
    return spec[1]


def _caller(spec: Any) -> Callable[..., Any]:
    if spec[0] == "constant":
        function = spec[1]
        return lambda value, *tensors: function(value)
    return lambda value, *tensors: build_callable(spec, tensors)(value)


class _Lifting:
    """Separates callables into tensors and the rest. The code of trusted ones is not inspected.

    The facts receive everything that is read.
    """

    def __init__(self, trusted: bool, facts: IdentityFacts | None = None) -> None:
        self.tensors: list[Tensor] = []
        self._trusted = trusted
        self._facts = IdentityFacts() if facts is None else facts
        self._inside: list[Any] = []
        self._objects = 0  # that were looked into

    def of(self, thing: Any) -> tuple[Any, Hashable]:
        """Return the spec of a thing, and its key.

        Raise `_Impure` if it may read or write something unknown.
        """
        kind = type(thing)
        if kind in _PLAIN:
            return ("constant", thing), (kind, repr(thing) if kind in _INEXACT else thing)
        if isinstance(thing, Tensor):
            if kind not in (Tensor, nn.Parameter) or thing.layout is not torch.strided:
                raise _Impure("it reads a tensor other than a plain dense one")
            self.tensors.append(thing)
            return ("tensor", len(self.tensors) - 1), "tensor"
        if kind is tuple:
            items = [self.of(item) for item in thing]
            return ("tuple", tuple(s for s, _ in items)), ("tuple", tuple(k for _, k in items))
        if any(thing is outer for outer in self._inside):
            return ("constant", thing), "itself"
        self._inside.append(thing)
        try:
            return self._of_object(thing, kind)
        finally:
            self._inside.pop()

    def _of_object(self, thing: Any, kind: type) -> tuple[Any, Hashable]:
        if _is_trusted(thing):
            return ("constant", thing), thing
        if kind is types.FunctionType:
            return self._of_function(thing)
        if isinstance(thing, nn.Module):
            return ("constant", thing), self._of_module(thing)
        if kind is types.MethodType and (self._trusted or isinstance(thing.__self__, nn.Module)):
            own = self.of(thing.__self__)[1]
            return ("constant", thing), (own, self.of(thing.__func__)[1])
        if kind is functools.partial:
            for name in ("func", "args", "keywords"):
                self._facts.attribute(thing, name)
            self._facts.content(thing.keywords)
            given = [self.of(item) for item in (thing.func, *thing.args)]
            named = [(name, *self.of(item)) for name, item in thing.keywords.items()]
            spec = "partial", tuple(s for s, _ in given), tuple((n, s) for n, s, _ in named)
            return spec, ("partial", tuple(k for _, k in given), tuple((n, k) for n, _, k in named))
        if kind in (list, dict) and self._trusted:
            self._facts.content(thing)
        if kind is list and self._trusted:
            items = [self.of(item) for item in thing]
            return ("list", tuple(s for s, _ in items)), (kind, tuple(k for _, k in items))
        if kind is dict and self._trusted and all(map(_is_plain_value, thing)):
            lifted = [(name, *self.of(item)) for name, item in thing.items()]
            keys = tuple((self.of(name)[1], k) for name, _, k in lifted)
            return ("dict", tuple((name, s) for name, s, _ in lifted)), (kind, keys)
        if self._trusted and isinstance(thing, _SEALED):
            return ("constant", thing), _ById(thing)
        if self._trusted and type(getattr(thing, "__dict__", None)) is dict:
            self._objects += 1
            if self._objects > _MOST_OBJECTS:
                raise _Impure("it holds more objects than can be compared in each call")
            self._facts.attribute(thing, "__class__")
            own = _ById(thing), self._of_trusted_class(kind), self._of_attributes(thing)
            return ("constant", thing), own
        raise _Impure(f"it reads a {kind.__name__}, which may change")

    def _of_function(self, function: types.FunctionType) -> tuple[Any, Hashable]:
        before, facts = len(self.tensors), self._facts
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            facts.attribute(function, name)
        if function.__kwdefaults__:
            facts.content(function.__kwdefaults__)
        cells = [self.of(self._content(cell)) for cell in function.__closure__ or ()]
        inside = len(self.tensors) > before
        defaults = [self.of(value) for value in function.__defaults__ or ()]
        named = [(n, *self.of(value)) for n, value in (function.__kwdefaults__ or {}).items()]
        key: Hashable = (
            self._of_code(function), tuple(k for _, k in cells), tuple(k for _, k in defaults),
            tuple((n, k) for n, _, k in named),
        )  # fmt: skip
        own = self._of_attributes(function)
        if own:
            key = key, own, _ById(function)
        if len(self.tensors) == before or (not inside and not (defaults or named)):
            return ("constant", function), key
        make = _maker(function.__code__, len(defaults), tuple(n for n, _, _ in named))
        made = types.FunctionType(make, function.__globals__)
        given = (*(s for s, _ in cells), *(s for s, _ in defaults), *(s for _, s, _ in named))
        return ("function", made, given), key

    def _content(self, cell: types.CellType) -> Any:
        try:
            return self._facts.attribute(cell, "cell_contents")
        except ValueError:
            raise _Impure("it reads a name that is assigned only later") from None

    def _of_attributes(self, thing: Any) -> tuple[Hashable, ...]:
        """Return the key of the attributes that were set on a function or an object."""
        self._facts.content(self._facts.attribute(thing, "__dict__"))
        return tuple((name, self.of(value)[1]) for name, value in vars(thing).items())

    def _of_code(self, function: types.FunctionType) -> Hashable:
        """Return the key of the code of a function, and of what it reads outside of its closure."""
        code, space = function.__code__, function.__globals__
        if self._trusted:
            return code, _ById(space)
        reads = _reads(code)
        if isinstance(reads, str):
            raise _Impure(reads)
        keys: list[Hashable] = []
        before = len(self.tensors)
        for name in reads:
            if name in space:
                keys.append((name, self.of(self._facts.entry(space, name))[1]))
            elif name not in _BUILTINS:
                raise _Impure(f"it uses {name}, which may do more than it returns")
            else:
                self._facts.absence(space, name)
        # Compiled code refers to tensors by these names.
        return code, tuple(keys), None if len(self.tensors) == before else _ById(space)

    def _of_module(self, module: nn.Module) -> Hashable:
        """Return the key of a module, whose tensors become inputs."""
        keys: list[Hashable] = []
        found = {id(t): t for t in [tensor for _, tensor in states_of(module)]}
        numbers = {key: number for number, key in enumerate(found)}
        for inner in module_tree(module):
            if any(getattr(inner, table) for table in _HOOKS):
                raise _Impure(f"it calls a {type(inner).__name__} with hooks")
            is_torchs = type(inner).__module__.startswith("torch.nn.")
            self._facts.attribute(inner, "__class__")
            self._facts.content(self._facts.attribute(inner, "__dict__"))
            for table in ("_parameters", "_buffers", "_modules", *_HOOKS):
                self._facts.content(getattr(inner, table))
            plain: list[Hashable] = []
            for name, value in vars(inner).items():
                if name in _TABLES:
                    continue
                if type(value) in _PLAIN or (
                    type(value) is tuple and all(map(_is_plain_value, value))
                ):
                    plain.append((name, repr(value)))
                elif (self._trusted or is_torchs) and _is_plain_list(value):
                    self._facts.content(value)
                    plain.append((name, repr(value)))
                elif isinstance(value, (types.FunctionType, types.MethodType)):
                    plain.append((name, self.of(value)[1]))
                elif not self._trusted and not is_torchs:
                    raise _Impure(f"{type(inner).__name__}.{name} is a {type(value).__name__}")
                else:
                    plain.append((name, _ById(value)))
            tensors = tuple(
                (name, None if tensor is None else numbers.get(id(tensor)))
                for table in (inner._parameters, inner._buffers)
                for name, tensor in table.items()
            )
            parts = tuple((name, _ById(part)) for name, part in inner._modules.items())
            own: Hashable = None
            if self._trusted:
                own = self._of_trusted_class(type(inner))
            elif not is_torchs:
                own = self._of_class(type(inner))
            keys.append((_ById(inner), type(inner), tuple(plain), tensors, parts, own))
        for tensor in found.values():
            self.of(tensor)
        return tuple(keys)

    def _of_class(self, cls: type) -> Hashable:
        """Inspect the methods of a user's module, and return the key of what they read."""
        keys: list[Hashable] = []
        for base in self._bases(cls):
            for name, member in vars(base).items():
                if name in _UNCALLED:
                    continue
                function = getattr(member, "__func__", member)
                if isinstance(function, types.FunctionType):
                    keys.append((name, self._of_function(function)[1]))
                elif _is_plain_value(member) or _is_trusted(member):
                    keys.append((name, self.of(member)[1]))
                else:
                    raise _Impure(f"{base.__name__}.{name} is a {type(member).__name__}")
        return tuple(keys)

    def _of_trusted_class(self, cls: type) -> Hashable:
        """Return the key of a class whose methods are not inspected."""
        return tuple(
            (name, self.of(member)[1] if _is_plain_value(member) else _ById(member))
            for base in self._bases(cls)
            for name, member in vars(base).items()
            if name not in _UNCALLED
        )

    def _bases(self, cls: type) -> list[type]:
        """Return a class and those of its bases that are not torch's or Python's."""
        bases: tuple[type, ...] = self._facts.attribute(cls, "__mro__")
        found = [base for base in bases if base.__module__.split(".")[0] not in _KNOWN]
        for base in found:
            self._facts.namespace(base)
        return found

    def of_pure(self, what: Interjection) -> tuple[type, list[tuple[str, Any]], Hashable]:
        """Return the class of an interjection, the specs of its attributes, and its key."""
        cls = self._facts.attribute(what, "__class__")
        attributes = self._facts.attribute(what, "__dict__")
        self._facts.content(attributes)
        found = [(name, *self.of(value)) for name, value in attributes.items()]
        keys = tuple((name, key) for name, _, key in found)
        return cls, [(name, spec) for name, spec, _ in found], (self._of_trusted_class(cls), keys)


class _ById:
    """A thing in a key: compared by identity, and kept alive."""

    __slots__ = ("_thing",)

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)


def _is_plain_list(value: Any) -> bool:
    return type(value) is list and all(map(_is_plain_value, value))


def _is_plain_value(value: Any) -> bool:
    return type(value) in _PLAIN


def _is_trusted(thing: Any) -> bool:
    """Return whether something belongs to torch or Python, and only computes."""
    if isinstance(thing, types.ModuleType):
        return thing in _MODULES
    if isinstance(thing, type):
        return thing in _TYPES
    if isinstance(thing, (types.FunctionType, types.BuiltinFunctionType)):
        if thing.__module__ in ("math", "_operator"):
            return True
        return is_torchs_function(thing) and thing.__name__ not in _EFFECTS
    return False


@functools.lru_cache(1024)
def _reads(code: types.CodeType) -> tuple[str, ...] | str:
    """Return the globals that code reads, or why it may do more than compute."""
    found: dict[str, None] = {}
    for step in dis.get_instructions(code):
        name = step.argval if isinstance(step.argval, str) else ""
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found[name] = None
        elif step.opname in _WRITING:
            return f"it assigns or imports {name or 'something'}"
        elif step.opname == "STORE_DEREF" and name in code.co_freevars:
            return f"it assigns {name}"
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in _EFFECTS:
            return f"it uses {name}"
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            inner = _reads(value)
            if isinstance(inner, str):
                return inner
            found.update(dict.fromkeys(inner))
    return tuple(found)


@functools.lru_cache(1024)
def _maker(code: types.CodeType, defaults: int, named: tuple[str, ...]) -> types.CodeType:
    """Return the code of a function that takes the content of a closure, and returns the function.

    Its inner function is the given one: torch.compile can follow functions made like this.
    """
    names = [*code.co_freevars]
    given = [*(f"_given_{i}" for i in range(defaults)), *(f"_named_{i}" for i in range(len(named)))]
    heads = [f"_own_{i}=_given_{i}" for i in range(defaults)]
    if named:
        heads += ["*", *(f"{name}=_named_{i}" for i, name in enumerate(named))]
    text = (
        f"def make({', '.join([*names, *given])}):\n"
        f"    def made({', '.join(heads)}): return ({''.join(f'{n}, ' for n in names)})\n"
        "    return made\n"
    )
    outer = next(c for c in compile(text, "<effect>", "exec").co_consts if type(c) is type(code))
    inner = next(c for c in outer.co_consts if type(c) is type(code))
    if inner.co_freevars != code.co_freevars:
        raise _Impure("its closure is laid out in another way")
    consts = tuple(code if c is inner else c for c in outer.co_consts)
    return outer.replace(co_consts=consts)


# What a dtype, a device or a layout tells, which a compiled function is compiled for.
_STATIC_GUARDS = (LengthGuard, IdentityGuard)


def why_not_pure(function: Callable[..., Any], value: Tensor) -> str | None:
    """Return what a function does in one run other than computing a tensor; None for nothing."""
    given = value.detach().clone()
    try:
        recording = record(function, (given,), {}, Signature(function))
    except CompileRefusal as refusal:  # of what watches the check
        return f"in what is inserted, {refusal}"
    except Exception as error:
        return f"what is inserted raised {type(error).__name__}"
    if recording.tape.blockers:
        return f"what is inserted can only be run live: {recording.tape.blockers[0]}"
    if recording.changes:
        return f"what is inserted sets {recording.changes[0].label}"
    entry = current_context()
    guards = recording.tape.guards  # on how many things an op gives, or what the path tells
    if any(
        guard.use is not Use.METADATA and not isinstance(guard, _STATIC_GUARDS) for guard in guards
    ):
        return "what is inserted is branching: it takes other ways for other sizes or values"
    for op in recording.tape.ops:
        reason = why_not_op(op, entry)
        if reason is None and any(recording.tape.ops[i].is_given for i in op.writes):
            reason = "it writes to what it is given"
        if reason is not None:
            return f"in what is inserted, {reason}"
    return None


_INEXACT = (float, complex)  # of which some are equal that are not the same
_PLAIN = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device,
        torch.Size, torch.memory_format, torch.layout,
    }
)  # fmt: skip
_KNOWN = frozenset({"torch", "builtins"})
_MODULES = (torch, torch.nn, torch.nn.functional, torch.linalg, torch.fft, torch.special, math)
_TYPES = (Tensor, bool, int, float, tuple, list, dict, slice, type(None))
_BUILTINS = frozenset(
    {
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance",
        "len", "list", "max", "min", "pow", "range", "reversed", "round", "slice", "sorted", "sum",
        "super", "tuple", "zip",
    }
) & frozenset(vars(builtins))  # fmt: skip
_WRITING = frozenset(
    {
        "DELETE_ATTR", "DELETE_GLOBAL", "IMPORT_NAME", "STORE_ATTR", "STORE_GLOBAL", "YIELD_VALUE",
        "SEND", "LOAD_CLASSDEREF", "LOAD_BUILD_CLASS",
    }
)  # fmt: skip
# Functions with side effects, or that depend on more than their arguments.
_EFFECTS = frozenset(
    {
        "apply_", "backward", "compile", "compiled", "data_ptr", "grad", "grad_fn", "load",
        "manual_seed", "map_", "numpy", "pin_memory", "register_hook", "requires_grad_",
        "retain_grad", "save", "seed", "set_default_device", "set_default_dtype",
        "set_grad_enabled", "set_num_threads", "set_rng_state", "share_memory_", "untyped_storage",
        "use_deterministic_algorithms", "_version",
    }
)  # fmt: skip
_TABLES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
# What cannot change, or nobody changes, though it has attributes.
_SEALED = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, torch.Generator)
_MOST_OBJECTS = 256
_UNCALLED = frozenset(
    {
        "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
        "__static_attributes__", "__weakref__", "__annotate_func__", "__annotations_cache__",
    }
)  # fmt: skip


class IdentityFacts:
    """Facts about attributes and entries, by the identity of the values.

    What an insertion does is found by reading its attributes, closures and tables, which takes
    longer than a small compiled model. Each of these reads is also a fact: this attribute is this
    object, this table has this entry. As long as all of them hold, which a few loops of C compare
    in each call, what was found holds as well.

    All objects in it are kept alive. Values are compared by identity only: whoever adds a fact
    about a value that can change itself adds facts about its content, too.
    """

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._attributes: list[Any] = []
        self._tables: list[Any] = []
        self._keys: list[Any] = []
        self._entries: list[Any] = []
        self._counted: list[Collection[Any]] = []
        self._counts: list[int] = []
        self._ordered: list[dict[Any, Any]] = []
        self._orders: list[list[Any]] = []
        self._spaces: list[Mapping[str, Any]] = []
        self._absent: list[str] = []
        self._alive: list[type] = []
        self._seen: set[tuple[int, Any]] = set()

    def attribute(self, owner: Any, name: str) -> Any:
        """Add which object an attribute is; return it."""
        value = getattr(owner, name)
        if self._is_new(owner, name):
            self._owners.append(owner)
            self._names.append(name)
            self._attributes.append(value)
        return value

    def entry(self, table: Any, key: Any) -> Any:
        """Add which object a table, a list or a namespace has at a key; return it."""
        value = table[key]
        if self._is_new(table, (key,)):
            self._tables.append(table)
            self._keys.append(key)
            self._entries.append(value)
        return value

    def absence(self, space: Mapping[str, Any], name: str) -> None:
        """Add that a namespace does not have a name."""
        if self._is_new(space, (name,)):
            self._spaces.append(space)
            self._absent.append(name)

    def size(self, items: Collection[Any]) -> None:
        """Add how many items something has."""
        if self._is_new(items, len):
            self._counted.append(items)
            self._counts.append(len(items))

    def content(self, items: Any) -> None:
        """Add all entries of a table or list, their order, and that there are no more."""
        if isinstance(items, dict) and self._is_new(items, list):
            self._ordered.append(items)
            self._orders.append([*items])
        self.size(items)
        for key in items if isinstance(items, Mapping) else range(len(items)):
            self.entry(items, key)

    def namespace(self, cls: type) -> None:
        """Add everything that a class itself has."""
        if self._is_new(cls, vars):
            self._alive.append(cls)
            self.content(vars(cls))

    def hold(self) -> bool:
        """Return whether all of them hold now."""
        try:
            return (
                all(map(is_, map(getattr, self._owners, self._names), self._attributes))
                and all(map(is_, map(getitem, self._tables, self._keys), self._entries))
                and [*map(len, self._counted)] == self._counts
                and [*map(list, self._ordered)] == self._orders
                and not any(map(contains, self._spaces, self._absent))
            )
        except Exception:  # something is gone
            return False

    def _is_new(self, owner: Any, key: Any) -> bool:
        before = len(self._seen)
        self._seen.add((id(owner), key))
        return len(self._seen) > before
