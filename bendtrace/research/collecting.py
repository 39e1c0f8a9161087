"""Collecting the outputs of nodes in the calls of a model, batch by batch."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import itertools
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bendtrace.errors import InputError
from bendtrace.insert.gates import of_this_run
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass, Passes
from bendtrace.insert.registry import InsertionGroup
from bendtrace.insert.resolver import describe_where
from bendtrace.log.capture import aligned_copy
from bendtrace.log.saved_tensors import crc32
from bendtrace.module import BendedModule
from bendtrace.python.checks import required_int
from bendtrace.python.sites import is_users_file
from bendtrace.record.recorder import Recording
from bendtrace.research.filling import Filling, Path, PathNames, require_place
from bendtrace.watch.code_facts import codes_in

_OUTPUT = "output"  # the node of the whole model, as in the trees of paths


class _Watch(Interjection):
    """Hands over the output of a node."""

    observes = True
    late = True
    label = "harvest"
    # The functions that it calls work on the value alone.
    self_contained = True
    deferrable = True
    needs_paths = True

    def __init__(self, collector: Collector, rule: _Rule | None) -> None:
        self._collector = collector
        self._rule = rule
        self._thread = threading.get_ident()

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        if self._rule is not None and threading.get_ident() == self._thread:
            self._collector.take(at, self._rule, output)


class _Watched(Insertion):
    """An insertion that reports the path of each call."""

    on_run: Callable[[Recording], None] | None = None
    last: Recording | None = None
    has_met = False  # only the first time counts, and this is called for each batch

    def ran(self, recording: Recording) -> None:
        if recording is not self.last:
            super().ran(recording)
            self.last = recording
        if self.on_run is not None:
            kept = of_this_run()
            if self not in kept:
                kept[self] = True
                self.on_run(recording)

    def fired(self, at: NodePass, changed: bool, times: int = 1) -> None:
        if not self.has_met:
            self.has_met = True
            super().fired(at, changed)


class _Rule:
    """The rule by which the values of a node become rows."""

    def __init__(self, settings: HarvestSettings, where: Any) -> None:
        # The text that the node was requested by, if it was text.
        self.asked: str = where if isinstance(where, str) else ""
        # The axis that counts the samples, None if there is none.
        self.axis: int | None = _for_node(settings.batch_axis, where, 0)
        rule = _for_node(settings.reduce, where, None)
        self.takes_all: bool = rule is None and self.axis == 0  # whether a value is stored as it is
        # Reduces the value; None to store it as it is.
        self.change: Callable[..., Any] | None = rule
        # True if `change` is one of ours, which reduce tensors only.
        self.is_named: bool = isinstance(rule, str)
        self.made_axis = self.axis  # that axis of the result of `change`
        # True if `change` takes the batch as well.
        self.wants_batch: bool = callable(rule) and _takes_two(rule)
        if self.is_named:
            self.change = functools.partial(_reduce_axes, rule, self.axis, settings.feature_axis)
            self.made_axis = None if self.axis is None else 0


def _for_node(rules: Any, where: Any, otherwise: Any) -> Any:
    if not isinstance(rules, Mapping):
        return rules
    try:
        return rules.get(where, otherwise)
    except TypeError:  # a selector that cannot be a key
        return otherwise


def _takes_two(function: Callable[..., Any]) -> bool:
    if isinstance(function, nn.Module):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.kind in positional and p.default is p.empty]) == 2


def _reduce_axes(name: str, axis: int | None, feature_axis: int | None, value: Tensor) -> Tensor:
    dims, shape = value.dim(), tuple(value.shape)
    if not dims:
        return value
    features = -1 if feature_axis is None else feature_axis
    if feature_axis is None and dims > 3:  # of images, the last axis is the width
        raise InputError(
            f"reduce={name!r} keeps the axis of the features, which a value of shape {shape} "
            "does not show: pass feature_axis=1 if channels come first, or feature_axis=-1"
        )
    axes = {"feature_axis": features} | ({} if axis is None else {"batch_axis": axis})
    for option, number in axes.items():
        if not -dims <= number < dims:
            raise InputError(f"a value of shape {shape} has no axis {option}={number}")
    kept = {number % dims for number in axes.values()}
    others = [d for d in range(dims) if d not in kept]
    if any(not shape[d] for d in others):
        raise InputError(f"a value of shape {shape} has no {name}: an axis is empty")
    made = value
    if name == "mean" and others:
        if not value.is_floating_point() and not value.is_complex():
            raise InputError(
                f"the mean of {value.dtype} cannot be computed without rounding: pass a "
                "function, such as lambda value: value.double().mean(1)"
            )
        made = value.mean(others, keepdim=True)
    elif name == "max" and others:
        made = value.amax(others, keepdim=True)
    else:
        for d in others:
            made = made.narrow(d, shape[d] - 1, 1)
    order = list(range(dims))
    if axis is not None:  # the samples come first, wherever they were
        order.insert(0, order.pop(axis))
    return made.permute(order).squeeze([n for n, d in enumerate(order) if d in others])


class Collector:
    """Insertions that copy the outputs of nodes to the current shard."""

    def __init__(
        self, bended: BendedModule, settings: HarvestSettings, several: bool = True
    ) -> None:
        self.filling: Filling = Filling(settings.shard_samples, settings.shard_bytes)  # the shard
        self.places: dict[str, str] = {}  # the source locations of the reached nodes, by path
        self._bended = bended
        self._settings = settings
        self._several = several
        self._is_stacked = isinstance(settings.passes, str)
        self._passes = Passes(None if self._is_stacked else settings.passes)
        # One pass keeps the name of the node.
        self._is_single = type(settings.passes) is int
        self._waits = self._is_stacked or self._passes.needs_total
        # Whether the first pass of a node can be taken as it is.
        self._takes_all = settings.passes is None and settings.dtype is None and not several
        self._names = PathNames()
        self._runs: list[Recording] = []
        self._before: dict[str, int] = {}  # passes in earlier calls of the same batch
        self._most: dict[str, int] = {}
        self._kept: dict[str, dict[int, tuple[_Rule, Tensor]]] = {}  # by path and pass
        self._batch: Any = None
        self._size = 0
        self._group = self._insert()

    def _insert(self) -> InsertionGroup:
        group = InsertionGroup(self._bended)
        for where in self._settings.where or (_OUTPUT,):
            rule = _Rule(self._settings, where) if self._settings.where else None
            made = group.make(
                where, _Watch(self, rule), allow_none=self._settings.allow_none, kind=_Watched
            )
            if self._settings.passes is not None and any(target.passes for target in made.targets):
                raise InputError(f"{where!r} names passes: give them either there or with passes=")
        first = group.insertions[0]
        assert isinstance(first, _Watched)
        first.on_run = self._ran
        return group

    def __enter__(self) -> Collector:
        self._group.insert_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._group.remove()

    def warn_of_unmet(self) -> None:
        """Warn of the nodes that no batch reached."""
        if self._settings.where:
            for insertion in self._group.insertions:
                insertion.warn_if_never_fired(2)

    # Batches

    def begin(self, batch: Any, size: int) -> None:
        """Begin a batch with some number of samples."""
        self._batch, self._size = batch, size
        self._runs = []
        if self._most:
            self._before, self._most = {}, {}

    def end(self) -> Path:
        """End the batch, and return its path."""
        if self._waits:
            self._finish_passes()
        self._batch = None
        return self._names.of(self._runs)

    def drop(self) -> None:
        """Drop the batch."""
        self._kept = {}
        self._batch = None
        self.filling.drop_batch()

    def _ran(self, recording: Recording) -> None:
        self._runs.append(recording)
        # The passes of the next call of the same batch continue the count.
        if self._several:
            self._before.update(self._most)

    def take(self, at: NodePass, rule: _Rule, value: Any) -> None:
        """Store the output of a node in a pass."""
        if self._takes_all and rule.takes_all and not at.number and type(value) is Tensor:
            column = self.filling.columns.get(at.path)
            if column is not None and self.places.get(at.path) == at.place:
                if column.put_alike(value, self._size):
                    return
        path, number = at.path or _OUTPUT, at.number
        require_place(path, self.places.setdefault(path, at.place), at.place)
        if self._before:
            number += self._before.get(path, 0)
        self._most[path] = number + 1
        if not self._waits and not self._passes.admits(number, None):
            return
        rows = self._rows_from(at, rule, value)
        if self._waits:
            with torch.no_grad():
                self._kept.setdefault(path, {})[number] = rule, aligned_copy(rows.detach())
            return
        self._store(path, number, rule, rows)

    def _finish_passes(self) -> None:
        kept, self._kept = self._kept, {}
        for path, passes in kept.items():
            rule, values = next(iter(passes.values()))[0], [rows for _, rows in passes.values()]
            shapes = {tuple(rows.shape) for rows in values}
            if not self._is_stacked:
                for number, (_, rows) in passes.items():
                    if self._passes.admits(number, max(passes) + 1):
                        self._store(path, number, rule, rows)
            elif len(shapes) > 1:
                raise InputError(
                    f"the passes of {path!r} differ in shape ({sorted(shapes)}), and cannot be "
                    "stacked: do not pass passes=, and each pass has a separate name"
                )
            else:
                self._store(path, 0, rule, torch.stack(values, 0 if rule.axis is None else 1))

    def _rows_from(self, at: NodePass, rule: _Rule, value: Any) -> Tensor:
        """Return the rows, along the first dimension; without samples the value."""
        change = rule.change if isinstance(value, Tensor) or not rule.is_named else None
        if change is not None:
            with torch.no_grad():
                given = (value, self._batch) if rule.wants_batch else (value,)
                value = change(*given)
        if not isinstance(value, Tensor):
            if type(value) in (bool, int, float) and rule.axis is None:
                return torch.tensor(value)
            raise InputError(_no_tensor(at, value, change is not None))
        axis, size = rule.made_axis, self._size
        if axis is None:
            return value
        if not -value.dim() <= axis < value.dim() or value.shape[axis] != size:
            raise InputError(
                f"{(at.path or _OUTPUT)!r} returned a tensor of shape {tuple(value.shape)} for "
                f"a batch of {size} samples, which are not its axis {axis}: pass their axis as "
                "batch_axis=, or None to store the tensor once for each batch, or make rows "
                "of it with reduce="
            )
        return value if axis == 0 else value.movedim(axis, 0)

    def _store(self, path: str, number: int, rule: _Rule, rows: Tensor) -> None:
        key = path if self._is_single or not number else f"{path}:{number + 1}"
        dtype = self._settings.dtype
        if dtype is None or not rows.is_floating_point():
            dtype = rows.dtype
        if rule.axis is None:
            rows = rows.unsqueeze(0)
        if rows.requires_grad:  # a model can switch gradients on
            rows = rows.detach()
        self.filling.add(key, rule.asked, rows, rule.axis is not None, dtype)


def _no_tensor(at: NodePass, value: Any, is_reduced: bool) -> str:
    path = at.path or _OUTPUT
    inside = f"{path}.output" if at.path and at.module is not None else path
    made = ", reduced," if is_reduced else ""
    what = f"{path!r}{made} gave {type(value).__name__}"
    if isinstance(value, (tuple, list, Mapping)) and not is_reduced:
        part = next(iter(value), "key") if isinstance(value, Mapping) else "sub_0"
        return (
            f"{what}, but only tensors can be stored: name a part, such as '{inside}|{part}', "
            "or select one with reduce="
        )
    if type(value) in (bool, int, float):
        return f"{what}, one for the whole batch: pass batch_axis=None"
    return f"{what}, but only tensors can be stored: convert it with reduce="


# The checked settings of a harvest, and descriptions to compare settings and models.

STACK = "stack"
_REDUCTIONS = ("mean", "max", "last")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class HarvestSettings:
    """The checked options of `harvest` that determine the content of the files."""

    where: tuple[Any, ...]
    reduce: Any
    feature_axis: int | None
    passes: Any
    batch_axis: Any
    dtype: torch.dtype | None
    ids: Any
    keep: Mapping[str, Any]
    allow_none: bool
    seed: int | None
    shard_samples: int
    shard_bytes: int
    form: str
    is_dealt: bool

    def __post_init__(self) -> None:
        named = {item for item in self.where if isinstance(item, str)}
        only_named = len(named) == len(self.where)
        for option, value in (("reduce", self.reduce), ("batch_axis", self.batch_axis)):
            if isinstance(value, Mapping) and only_named and not named >= value.keys():
                wrong = next(key for key in value if key not in named)
                raise InputError(f"{option}= has an entry for {wrong!r}, which is not in where=")
        for rule in self.reduce.values() if isinstance(self.reduce, Mapping) else (self.reduce,):
            if rule is not None and rule not in _REDUCTIONS and not callable(rule):
                raise InputError(
                    f"reduce= takes {', '.join(map(repr, _REDUCTIONS))}, a function of the value, "
                    f"a dict of these for each node, or None; not {rule!r}"
                )
        axes = self.batch_axis
        for axis in axes.values() if isinstance(axes, Mapping) else (axes,):
            if axis is not None and type(axis) is not int:
                raise InputError(
                    "batch_axis= takes the number of an axis, None for values without "
                    f"samples, or a dict of these for each node, not {axis!r}"
                )
        required_int("feature_axis", self.feature_axis, or_none=True)
        if not (isinstance(self.passes, str) and self.passes == STACK):
            if isinstance(self.passes, str):
                raise InputError(
                    f"the only string that passes= accepts is {STACK!r}, not {self.passes!r}"
                )
            Passes(self.passes)
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise InputError(
                f"dtype= has to be torch.float64, float32, float16 or bfloat16, not {self.dtype!r}"
            )
        for option in ("shard_samples", "shard_bytes"):
            required_int(option, getattr(self, option), 1)
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise InputError(
                f"seed= has to be an int of at least 0 and below 2^63, not {self.seed!r}"
            )
        for name in self.keep:
            if not isinstance(name, str) or not name or "#" in name or not name.isprintable():
                raise InputError(f"keep= contains the name {name!r}, which cannot be stored")

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain values, for comparison with those of a later call."""
        apart = ("allow_none", "dtype", "where")
        plain = {
            name: description_of(value) for name, value in vars(self).items() if name not in apart
        }
        plain["where"] = [describe_where(item) for item in self.where]
        plain["dtype"] = None if self.dtype is None else str(self.dtype)
        plain["format"] = plain.pop("form")
        plain["sharded"] = plain.pop("is_dealt")
        return plain


_LARGEST = 1 << 24  # bytes of a parameter that a fingerprint looks at in full
_DEEPEST = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def description_of(value: Any, *, whole: bool = True) -> Any:
    """Return a description in plain values, which is equal for objects that do the same.

    Functions are described by their code, defaults and closures; partial functions and bound
    methods by their parts; tensors and modules by checksums of their values; everything in
    installed packages by its name. The lists, dicts, objects and globals that functions use are
    left out unless it is whole: they may count calls.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): description_of(item, whole=whole) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [description_of(item, whole=whole) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((description_of(item, whole=whole) for item in value), key=repr)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, functools.partial):
        name = f"partial of {getattr(value.func, '__qualname__', type(value.func).__qualname__)}"
    return f"{name} {_Words(whole).digest(value)}"


def describe_insertion(insertion: Insertion) -> str:
    """Describe an insertion."""
    digest = _Words(True).digest((insertion.what, insertion.passes))
    return f"{insertion.what.label} at {describe_where(insertion.where)} {digest}"


class _Words:
    """Writes down all parts of an object; `whole` has the meaning that it has in `described`."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no identity is used twice

    def digest(self, value: Any) -> str:
        text = "\n".join(self._of(value, 0))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _of(self, value: Any, depth: int) -> Iterator[str]:
        kind = type(value)
        if kind in _PLAIN or kind in _NAMED:
            yield repr(value)
            return
        if id(value) in self._seen:
            yield f"again {self._seen[id(value)]}"
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        yield f"{kind.__module__}.{kind.__qualname__}"
        if depth > _DEEPEST:
            return
        if isinstance(value, enum.Enum):
            yield value.name
        elif isinstance(value, Tensor):
            yield f"{tuple(value.shape)} {value.dtype} {sum_of(value):08x}"
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                yield f"{name} {type(module).__qualname__} {module.training}"
            for name, tensor in state_of(value):
                yield f"{name} {sum_of(tensor):08x}"
        elif isinstance(value, (types.ModuleType, type)):
            yield getattr(value, "__qualname__", value.__name__)
        elif isinstance(value, types.CodeType):
            yield from self._code(value, depth)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, depth)
        elif isinstance(value, types.MethodType):
            yield from self._of(value.__func__, depth + 1)
            yield from self._of(value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            yield from self._of((value.func, value.args, value.keywords), depth + 1)
        elif callable(value) and hasattr(value, "__qualname__"):
            yield str(value.__qualname__)
        elif not (self._whole or kind in (tuple, frozenset)):
            return
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from self._of(key, depth + 1)
                yield from self._of(item, depth + 1)
        elif isinstance(value, (set, frozenset)):
            yield from sorted("\n".join(_Words(self._whole)._of(item, depth + 1)) for item in value)
        elif isinstance(value, Sequence):
            for item in value:
                yield from self._of(item, depth + 1)
        else:
            yield from self._object(value, depth)

    def _code(self, code: types.CodeType, depth: int) -> Iterator[str]:
        yield code.co_code.hex()
        yield repr(code.co_names)
        for constant in code.co_consts:
            yield from self._of(constant, depth)

    def _function(self, function: types.FunctionType, depth: int) -> Iterator[str]:
        code = function.__code__
        yield function.__qualname__
        if not is_users_file(code.co_filename):
            return
        yield from self._code(code, depth)
        yield from self._of(function.__defaults__, depth + 1)
        yield from self._of(function.__kwdefaults__, depth + 1)
        for cell in function.__closure__ or ():
            try:
                yield from self._of(cell.cell_contents, depth + 1)
            except ValueError:  # not set yet
                yield "unset"
        if not self._whole:
            return
        names = sorted({name for inner in codes_in(code) for name in inner.co_names})
        for name in names:
            if name in function.__globals__:
                yield name
                yield from self._of(function.__globals__[name], depth + 1)

    def _object(self, value: Any, depth: int) -> Iterator[str]:
        for cls in type(value).__mro__:
            for name, member in sorted(vars(cls).items()):
                if isinstance(member, types.FunctionType):
                    yield name
                    yield from self._of(member, depth + 1)
        for name, item in sorted(getattr(value, "__dict__", {}).items()):
            yield name
            yield from self._of(item, depth + 1)


def state_of(model: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model by name."""
    if isinstance(model, nn.Module):
        yield from itertools.chain(model.named_parameters(), model.named_buffers())


def fingerprint(model: Callable[..., Any]) -> dict[str, str]:
    """Return a fingerprint of a model: of its structure, and of the values of its weights.

    The structure consists of its modules with their plain attributes, and the code of their classes
    outside installed packages. Of parameters above 16 MiB only about 4 million evenly spaced
    elements count.
    """
    structure = hashlib.sha256()
    weights = 0
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            structure.update(f"{name} {type(module).__qualname__} {module.training}\n".encode())
            structure.update(_Words(False).digest(tuple(_attributes_of(module))).encode())
    else:
        structure.update(str(description_of(model, whole=False)).encode())
    for name, tensor in state_of(model):
        if is_lazy(tensor):
            structure.update(f"{name} lazy\n".encode())
            continue
        structure.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights = sum_of(tensor, weights)
    return {
        "class": type(model).__qualname__,
        "structure": structure.hexdigest()[:16],
        "weights": f"{weights:08x}",
    }


def _attributes_of(module: nn.Module) -> Iterator[Any]:
    """Yield the code of a module's class, and its attributes that are plain or functions."""
    for cls in type(module).__mro__:
        for name, member in sorted(vars(cls).items()):
            if isinstance(member, types.FunctionType) and is_users_file(
                member.__code__.co_filename
            ):
                yield name, member
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "training":
            continue
        if _is_plain_setting(value):
            yield name, repr(description_of(value))
        elif isinstance(value, (types.FunctionType, functools.partial)):
            yield name, value


def _is_plain_setting(value: Any, depth: int = 0) -> bool:
    if type(value) in _PLAIN or type(value) in _NAMED or isinstance(value, enum.Enum):
        return True
    if depth > _DEEPEST:
        return False
    if isinstance(value, Mapping):
        return all(_is_plain_setting(v, depth + 1) for pair in value.items() for v in pair)
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_plain_setting(item, depth + 1) for item in value)
    return False


def sum_of(tensor: Tensor, before: int = 0) -> int:
    """Return a checksum of a tensor, added to another one."""
    if is_lazy(tensor):
        return before
    plain = tensor.detach()
    plain = plain.to_local() if hasattr(plain, "to_local") else plain
    if plain.layout is not torch.strided or plain.is_meta or plain.is_quantized:
        return before
    if plain.numel() * plain.element_size() > _LARGEST:
        step = -(-plain.numel() * plain.element_size() // _LARGEST)
        plain = plain.reshape(-1)[::step]
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return zlib.crc32(b"%d" % crc32(plain.view(torch.uint8)), before)
