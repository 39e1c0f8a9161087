"""A program as source text, the calls to make of it, and how it is compared with eager."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bendtrace as bt
from bendtrace.errors import NondeterminismError
from bendtrace.watch.draws import generator_state, global_generators, is_host_generator
from tests.past_joins import past_joins, resumed_anywhere
from tests.promise import bits, footprint, state

from .inserted import Inserted, insert

__all__ = ["Call", "Program", "Unlike", "called_in_turn", "check"]

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Call:
    """One call of a program.

    Attributes:
        arguments: what stands between the parentheses of the call, in terms of `values`.
        train: whether the model is in training mode.
        grad: whether gradients are on.
        step: what is done to the model before, as a statement about `model`, the module `here` of
            the program, and the module `world` that it imports.
        write: whether the caller then writes to the tensors and lists that it gets.
    """

    arguments: str
    train: bool = True
    grad: bool = True
    step: str = ""
    write: bool = False


@dataclass(frozen=True)
class Program:
    """The source of a module with a class `Model`, and calls of it.

    Attributes:
        source: the source.
        calls: the calls.
        world: the source of a module that it imports, as `random_world`.
        told: expressions of what is compared after each call, about what steps are about.
        inserted: what is inserted at some of its nodes, if anything is.
    """

    source: str
    calls: tuple[Call, ...]
    world: str = ""
    told: tuple[str, ...] = ()
    inserted: Inserted | None = None

    def __str__(self) -> str:
        lines = [self.source, *(f"# {call}" for call in self.calls)]
        return "\n".join(lines + [f"# inserted: {self.inserted}"] * (self.inserted is not None))

    @contextmanager
    def modules(self, copies: int) -> Iterator[list[types.ModuleType]]:
        """Run the source, several times over, as modules that `inspect` can read."""
        name = f"random_program_{next(_numbers)}"
        made = []
        try:
            for _ in range(copies):
                _module("random_world", self.world)
                made.append(_module(name, self.source))
            yield made
        finally:
            for one in (name, "random_world"):
                del linecache.cache[f"{one}.py"], sys.modules[one]


def _module(name: str, source: str) -> types.ModuleType:
    file = f"{name}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = file
    exec(compile(source, file, "exec"), vars(module))
    return module


class Unlike(AssertionError):
    """A `BendedModule` that is not like its model."""


@dataclass
class Counts(bt.Stats):
    """How the calls of a program were served.

    Attributes:
        raised: calls that raise in eager.
        why_live: what the `BendedModule` says.
        inserted: calls with something inserted.
        inserted_replays: those of them that were replayed.
        inserted_live: those of them that were live.
    """

    raised: int = 0
    why_live: tuple[str, ...] = ()
    inserted: int = 0
    inserted_replays: int = 0
    inserted_live: int = 0


def normal(
    seed: int, *dims: int, plus: float = 0.0, grad: bool = False, turned: bool = False
) -> Any:
    made = torch.randn(dims, generator=torch.Generator().manual_seed(seed)) + plus
    return _laid_out(made, turned).requires_grad_(grad)


def integers(seed: int, *dims: int) -> Tensor:
    return torch.randint(0, 4, dims, generator=torch.Generator().manual_seed(seed))


def truths(seed: int, *dims: int) -> Tensor:
    return integers(seed, *dims) > 1


def _laid_out(tensor: Tensor, turned: bool) -> Tensor:
    return tensor.mT.contiguous().mT if turned and tensor.dim() > 1 else tensor


_VALUES = {"normal": normal, "integers": integers, "truths": truths, "torch": torch}


def _taken(text: str, model: nn.Module) -> Any:
    return eval(f"take({text})", {**_VALUES, "model": model, "take": lambda *a, **k: (a, k)})


def check(program: Program) -> Counts:
    """Make all the calls of a program with eager and a `BendedModule`, and compare.

    If something is inserted, calls are compared with first calls of other `BendedModule`s as well.

    Returns:
        How the calls went.

    Raises:
        Unlike: naming the first thing that differs.
    """
    # Of torch's warnings some come only once in a process.
    with warnings.catch_warnings(action="ignore"), program.modules(9) as modules:
        made = []
        for module in modules:
            _seed(0)
            made.append(module.Model())
        eager, model, recorded, led = made[:4]
        bended, compared = bt.BendedModule(model), bt.BendedModule(recorded)
        scripted = bt.BendedModule(led)
        inserted = None if program.inserted is None else _Inserted(program, made[4:], modules[4:])
        kept: list[tuple[Any, Any]] = []
        for seed, call in enumerate(program.calls):
            where = f"call {seed}"
            wanted = _one(eager, eager, call, seed, modules[0])
            before = footprint()
            with past_joins():
                same = _one(compared, recorded, call, seed, modules[2])
            if isinstance(same.error, NondeterminismError):
                raise Unlike(f"{where}: past a join, {same.error}") from same.error
            with resumed_anywhere(seed):
                given = _one(scripted, led, call, seed, modules[3])
            _alike(given, wanted, f"{where}, resumed")
            given = _one(bended, model, call, seed, modules[1])
            _same(footprint() == before, where, "something left behind")
            _alike(given, wanted, where)
            _same(_globals(modules[0]) == _globals(modules[1]), where, "other globals")
            for text in program.told:
                told = [_read(_told, _about(text, module)) for module in modules[:2]]
                _same(told[0] == told[1], where, f"other {text}")
            kept.append((given.output, wanted.output))
            for of_given, of_wanted in kept:
                _same(
                    _read(bits, of_given) == _read(bits, of_wanted),
                    where,
                    "earlier outputs changed",
                )
            shared = [_shared(list(outputs)) for outputs in zip(*kept, strict=True)]
            _same(shared[0] == shared[1], where, "something shared with earlier outputs")
            if inserted is not None:
                inserted.check(call, seed)
        raised = sum(1 for _, output in kept if output is _RAISED)
        counts = Counts(raised=raised, why_live=bended.why_live, **vars(bended.stats))
        if inserted is not None:
            stats = inserted.stats
            counts.inserted = len(program.calls)
            counts.inserted_replays, counts.inserted_live = stats.replays, stats.live
        return counts


def _alike(given: _Outcome, wanted: _Outcome, where: str) -> None:
    if type(given.error) is not type(wanted.error) or str(given.error) != str(wanted.error):
        raise Unlike(f"{where}: {given.error!r}, not {wanted.error!r}") from given.error
    for name in _Outcome.compared:
        _same(getattr(given, name) == getattr(wanted, name), where, f"other {name}")


class _Inserted:
    """A program with something inserted: replayed, resumed, and each call recorded from its start.

    What a first call does is compared with eager elsewhere, with changes made by hand.
    """

    def __init__(
        self, program: Program, models: list[Any], modules: list[types.ModuleType]
    ) -> None:
        self._program, self._models, self._modules = program, models, modules
        self._seen: list[list[Any]] = [[], [], [], [], []]
        self._subjects = [self._bended(number) for number in range(3)]
        self._spliced = bt.BendedModule(models[4])

    @property
    def stats(self) -> bt.Stats:
        """How the calls were served that nobody has led astray."""
        return self._subjects[1].stats

    def _bended(self, number: int) -> bt.BendedModule:
        bended = bt.BendedModule(self._models[number])
        assert self._program.inserted is not None
        insert(bended, self._program.inserted, self._seen[number])
        return bended

    def check(self, call: Call, seed: int) -> None:
        """Make a call, and compare."""
        where = f"call {seed}, inserted"
        self._subjects[0] = self._bended(0)
        outcomes = []
        for number, subject in enumerate(self._subjects):
            self._seen[number].clear()
            with resumed_anywhere(seed) if number == 2 else nullcontext():
                outcomes.append(
                    _one(subject, self._models[number], call, seed, self._modules[number])
                )
        for number, how in ((1, where), (2, f"{where}, resumed")):
            _alike(outcomes[number], outcomes[0], how)
            _same(self._seen[number] == self._seen[0], how, "other calls of what is inserted")
        self._check_spliced(call, seed)

    def _check_spliced(self, call: Call, seed: int) -> None:
        """Make a call after one without what is inserted, which leaves its path behind."""
        outcomes = []
        for number in (3, 4):
            model, module = self._models[number], self._modules[number]
            plain = model if number == 3 else self._spliced
            _one(plain, model, call, seed, module)
            model.zero_grad()
            self._seen[number].clear()
            if number == 3:
                outcomes.append(_one(self._bended(3), model, call, seed, module))
                continue
            assert self._program.inserted is not None
            with insert(plain, self._program.inserted, self._seen[number]):
                outcomes.append(_one(plain, model, call, seed, module))
        how = f"call {seed}, spliced"
        _alike(outcomes[1], outcomes[0], how)
        _same(self._seen[4] == self._seen[3], how, "other calls of what is inserted")


_RAISED = ("raised",)


@dataclass
class _Outcome:
    error: Exception | None
    output: Any
    result: Any
    arguments: Any
    rng: Any
    state: Any
    layout: Any
    backward: Any
    gradients: Any

    compared = ("result", "arguments", "rng", "state", "layout", "backward", "gradients")


def called_in_turn(
    program: Program, module: types.ModuleType, wrap: Callable[[Any], Any]
) -> Iterator[tuple[Call, Any]]:
    """Make all the calls of a program, and yield what each gave, wrote to, or raised.

    Args:
        program: the program.
        module: its source, run (see `Program.modules`).
        wrap: makes of the model what is called in its place.
    """
    _seed(0)
    model = module.Model()
    subject = wrap(model)
    for seed, call in enumerate(program.calls):
        args, kwargs = _taken(call.arguments, model)
        model.train(call.train)
        if call.step:
            _take_step(call.step, model, module)
        with (
            warnings.catch_warnings(action="ignore"),
            nullcontext() if call.grad else torch.no_grad(),
        ):
            _seed(seed)
            try:
                output = subject(*args, **kwargs)
            except Exception as error:
                output = error
        told = [_read(_told, _about(text, module)) for text in program.told]
        yield call, (output, args, kwargs, dict(model.named_buffers()), told)


def _about(text: str, module: types.ModuleType) -> Any:
    return eval(text, {"here": module, "world": getattr(module, "world", None)})


def _told(value: Any) -> Any:
    return bits(value) if isinstance(value, (Tensor, dict, list, tuple)) else repr(value)


def _one(
    subject: Callable[..., Any], model: nn.Module, call: Call, seed: int, module: types.ModuleType
) -> _Outcome:
    args, kwargs = _taken(call.arguments, model)
    subject.train(call.train)  # type: ignore[attr-defined]
    if call.step:
        _take_step(call.step, model, module)
    output: Any = _RAISED
    with nullcontext() if call.grad else torch.no_grad():
        _seed(seed)
        error = None
        try:
            output = subject(*args, **kwargs)
        except Exception as raised:
            error = raised
    drawn = filter(is_host_generator, vars(model).values())
    hosts = [*map(generator_state, (*global_generators(), *drawn))]
    rng = [torch.get_rng_state().tolist(), hosts]
    result = _read(bits, output)
    arguments = _read(bits, [args, kwargs])
    own = _read(state, model)
    held = [vars(m) for m in model.modules()]
    layout = _read(_layout, [output, args, kwargs, held])
    backward = None
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    try:
        losses = [leaf.sum() for leaf in leaves if leaf.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
    except RuntimeError as error_there:
        backward = str(error_there)
    inputs = [a for a in tree_leaves([args, kwargs]) if isinstance(a, Tensor) and _is_leaf(a)]
    gradients = _read(bits, [[a.grad for a in inputs], [p.grad for p in model.parameters()]])
    if call.write:
        _write(output)
    return _Outcome(error, output, result, arguments, rng, own, layout, backward, gradients)


def _take_step(step: str, model: nn.Module, module: types.ModuleType) -> None:
    around = {"here": module, "world": getattr(module, "world", None), "types": types}
    with torch.no_grad(), contextlib.suppress(Exception):  # what is there may be another by now
        exec(step, {"model": model, "torch": torch, "nn": nn, **around})


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view whose base was changed: torch refuses to say
        return False


def _write(output: Any) -> None:
    if isinstance(output, list):
        output.append(0)
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            with contextlib.suppress(RuntimeError), torch.no_grad():
                leaf.add_(1)


def _seed(seed: int) -> None:
    # What `torch.manual_seed` does on a CPU, without the formatted stacks that it piles up.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _read(how: Callable[[Any], Any], value: Any) -> Any:
    try:
        return how(value)
    except RuntimeError as error:  # of a view whose base has changed in a way autograd forbids
        return str(error)


def _layout(values: Any) -> Any:
    """How the tensors lie in memory, which share it, and where autograd has them from."""
    tensors: dict[int, Tensor] = {}
    _collect(values, tensors, set())
    storages: dict[int, int] = {}
    found = []
    for tensor in tensors.values():
        pointer = tensor.untyped_storage()._cdata
        shared = storages.setdefault(pointer, len(storages))
        origin = type(tensor.grad_fn).__name__
        found.append(
            (tuple(tensor.stride()), tensor.storage_offset(), shared, tensor.is_leaf, origin)
        )
    return found


def _shared(values: list[Any]) -> list[int]:
    """For each tensor, list and dict in some values which of them it is."""
    found: dict[int, int] = {}
    parts = []
    while values:
        value = values.pop()
        if isinstance(value, (Tensor, list, dict)):
            parts.append(found.setdefault(id(value), len(found)))
        if isinstance(value, (tuple, list)):
            values += value
        elif isinstance(value, dict):
            values += value.values()
    return parts


def _collect(value: Any, found: dict[int, Tensor], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[id(value)] = value
    elif isinstance(value, dict):
        for key in value:
            _collect(value[key], found, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found, seen)


def _globals(module: types.ModuleType) -> Any:
    return bits([value for name, value in vars(module).items() if name.isupper() and name != "F"])


def _same(equal: bool, where: str, what: str) -> None:
    if not equal:
        raise Unlike(f"{where}: {what}")
