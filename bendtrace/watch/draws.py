"""Random numbers of Python and numpy: each draw is an op, which each replay carries out again.

The functions of `random` and `numpy.random` are exchanged while a run is recorded, and so are the
methods of `random.Random`, which Python's own functions come down to (`choice` asks for
`_randbelow`). Classes of numpy are written in C and cannot be changed: a generator of numpy that
the model holds is replaced by one of a subclass for the time of the run (`Environment.place`),
which passes each draw on. Code that draws past all of these leaves a state that no draw has left,
and `record/finish.py` notices it.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bendtrace.tape.watchers import current_watcher

# Methods of `random.Random` that return numbers, or nothing, and what the others draw by.
_OF_PYTHON = (
    "seed", "random", "getrandbits", "_randbelow", "randrange", "randint", "uniform", "triangular",
    "normalvariate", "gauss", "lognormvariate", "expovariate", "vonmisesvariate", "gammavariate",
    "betavariate", "paretovariate", "weibullvariate", "binomialvariate",
)  # fmt: skip
# Names by which code reads or sets the state of a generator.
CHANGING = frozenset(
    {
        "getstate", "setstate", "get_state", "set_state", "seed", "bit_generator", "_bit_generator",
        "spawn", "__getstate__", "__setstate__", "__reduce__", "_legacy_seeding",
        "_poisson_lam_max", "shuffle", "gauss_next", "set_bit_generator", "get_bit_generator",
    }
)  # fmt: skip
_python: Any = getattr(random, "_inst")  # noqa: B009 - private


def numpys_random() -> Any:
    """Return numpy's module of random numbers; None as long as nobody has imported numpy."""
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.random  # imported when it is first asked for


def global_generators() -> list[Any]:
    """Return the generators behind the functions of `random` and `numpy.random`."""
    numpy = numpys_random()
    return [_python] if numpy is None else [_python, numpy.mtrand._rand]


def is_host_generator(value: Any) -> bool:
    """Return whether draws from a generator of Python or numpy can be followed."""
    kind = type(value)
    if kind is random.Random:
        return True
    numpy = numpys_random()
    return numpy is not None and (kind is numpy.Generator or kind is numpy.RandomState)


def generator_name(generator: Any) -> str:
    """Return the name in messages of a generator that the model does not hold."""
    if generator is _python:
        return "Python's random generator"
    return "numpy's random generator" if generator in global_generators() else "a generator"


def generator_state(generator: Any) -> Any:
    """Return the state of a generator, as something that can be compared."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if not hasattr(generator, "get_state"):
        return comparable_state(generator.bit_generator.state)
    if hasattr(generator, "_bit_generator"):
        return comparable_state(generator.get_state(legacy=False))
    with torch._C.DisableTorchFunction():
        state = generator.get_state()
        # Read in memory: no mode of the caller's is to see this.
        return ctypes.string_at(state.data_ptr(), state.nbytes)


def torchs_generators() -> list[torch.Generator]:
    """Return the generators that torch draws from where none is given."""
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *on_gpus]


def seed_all(number: int) -> None:
    """Seed the generators of torch, Python and, if it is in use, numpy."""
    torch.manual_seed(number)
    random.seed(number)
    numpy = numpys_random()
    if numpy is not None:
        numpy.seed(number % 2**32)


class RandomStates:
    """The present states of the global generators of torch, Python and numpy, and of others.

    Also a context manager, which restores them at its end.
    """

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self._others = tuple(others)
        found = self._generators()
        self.states: list[Any] = [*map(generator_state, found)]  # in comparable form
        self._restorers = [*map(restorer_of, found)]

    def _generators(self) -> list[Any]:
        return [*torchs_generators(), *global_generators(), *self._others]

    def differ(self) -> bool:
        """Return whether something has been drawn since, or a generator has been seeded."""
        return self.states != [*map(generator_state, self._generators())]

    def restore(self) -> None:
        """Have the same numbers drawn again."""
        for restore in self._restorers:
            restore()

    def __enter__(self) -> RandomStates:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def restorer_of(generator: Any) -> Callable[[], object]:
    """Return a function that puts a generator back into the state that it has now."""
    if isinstance(generator, random.Random):
        return functools.partial(random.Random.setstate, generator, generator.getstate())
    if hasattr(generator, "get_state"):
        legacy = {"legacy": False} if hasattr(generator, "_bit_generator") else {}
        state = generator.get_state(**legacy)
        return lambda: generator.set_state(state)
    bits = getattr(generator, "bit_generator", generator)
    return functools.partial(setattr, bits, "state", bits.state)


def comparable_state(state: Any) -> Any:
    """Return a state of numpy's in a form that can be compared."""
    if isinstance(state, dict):
        return [(key, comparable_state(item)) for key, item in state.items()]
    return state.tobytes() if hasattr(state, "tobytes") else state


@functools.cache
def _replayed_draw(name: str) -> Callable[..., Any]:
    """Return the function that replays call to draw from a generator that they are given."""

    def draw(generator: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(generator, name)(*args, **kwargs)

    draw.__name__ = draw.__qualname__ = name
    draw.is_draw = True  # type: ignore[attr-defined]
    draw.of_numpy = None  # type: ignore[attr-defined]
    return draw


@functools.cache
def _draw_globally(of_numpy: bool, name: str, by_module: bool) -> Callable[..., Any]:
    """Return the function that replays call to draw from the generator of a module.

    Code that names the module calls what stands there by then. Other code has a method of the
    generator, whatever stands in the module.
    """

    def draw(*args: Any, **kwargs: Any) -> Any:
        if by_module:
            module: Any = numpys_random() if of_numpy else random
            return vars(module)[name](*args, **kwargs)
        return getattr(global_generators()[of_numpy], name)(*args, **kwargs)

    draw.__name__ = draw.__qualname__ = name
    draw.is_draw = True  # type: ignore[attr-defined]
    draw.of_numpy = of_numpy  # type: ignore[attr-defined]
    return draw


def numpys_generator(function: Any, args: tuple[Any, ...]) -> Any:
    """Return the generator of numpy's that a draw is from; None for one of Python's.

    Replays call the function with these arguments to draw.
    """
    found = args[0] if function.of_numpy is None else global_generators()[function.of_numpy]
    return None if isinstance(found, random.Random) else found


def entries_of_pythons_draws() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    for name in _OF_PYTHON:
        if hasattr(random.Random, name):
            yield random.Random, name, _method(name)
        if name in vars(random):
            yield random, name, _reporting_function(random, name, False)


def entries_of_numpys_draws(numpy: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements in numpy's module, once it has been imported."""
    for name in _methods_of(numpy.RandomState):
        if getattr(vars(numpy).get(name), "__self__", None) is numpy.mtrand._rand:
            yield numpy, name, _reporting_function(numpy, name, True)
    yield numpy, "seed", _reporting_function(numpy, "seed", True)


@functools.cache
def _method(name: str) -> Callable[..., Any]:
    original = getattr(random.Random, name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = current_watcher()
        if watcher is None or type(self) is not random.Random:
            return call.__wrapped__(self, *args, **kwargs)
        if self is _python:
            function = _draw_globally(False, name, by_module=False)
            return watcher.draw(function, args, kwargs, sys._getframe(1))
        if not watcher.holds(self):  # one of the run's own, which begins as it began
            return call.__wrapped__(self, *args, **kwargs)
        return watcher.draw(_replayed_draw(name), (self, *args), kwargs, sys._getframe(1))

    return call


@functools.cache
def _reporting_function(module: Any, name: str, of_numpy: bool) -> Callable[..., Any]:
    original = vars(module)[name]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return call.__wrapped__(*args, **kwargs)
        function = _draw_globally(of_numpy, name, by_module=True)
        return watcher.draw(function, args, kwargs, sys._getframe(1))

    call.is_draw = of_numpy  # type: ignore[attr-defined]
    return call


@functools.cache
def _method_in_place(name: str) -> Callable[..., Any]:
    """Return the replacement of a method of numpy's own generator."""

    def call(*args: Any, **kwargs: Any) -> Any:
        function, watcher = _draw_globally(True, name, by_module=False), current_watcher()
        if watcher is None:
            return function(*args, **kwargs)
        return watcher.draw(function, args, kwargs, sys._getframe(1))

    call.is_draw = True  # type: ignore[attr-defined]
    return call


# What the model holds, of which no method can be exchanged


def is_drawn_from(value: Any) -> bool:
    """Return whether a value that the model holds has to be replaced.

    That is a generator of numpy, and a method of a generator that is written in C.
    """
    kind = type(value)
    if kind is types.BuiltinFunctionType:
        return type(value.__self__) is random.Random and value.__name__ in _OF_PYTHON
    if kind is types.MethodType:  # of the generator's own, not a function that is bound to it
        return is_drawn_from(value.__self__) and (
            value.__name__ in _methods_of(type(value.__self__))
            and value == getattr(value.__self__, value.__name__)
        )
    return kind is not random.Random and is_host_generator(value)


def is_module_of_draws(namespace: Any) -> bool:
    """Return whether something is `random`, `numpy.random`, or the dict of one of them."""
    modules = (random, numpys_random())
    return any(namespace is one or namespace is getattr(one, "__dict__", None) for one in modules)


def stand_in_for(value: Any) -> Any:
    """Return the replacement of such an object while a run is recorded."""
    if isinstance(value, types.BuiltinFunctionType):
        return types.MethodType(_method(value.__name__), value.__self__)
    if isinstance(value, types.MethodType):
        if value.__self__ is global_generators()[-1]:
            return _method_in_place(value.__name__)
        return getattr(stand_in_for(value.__self__), value.__name__)
    numpys: Any = type(value)
    kind: Any = _generator_class(numpys)
    watched = kind(getattr(value, "_bit_generator", None) or value.bit_generator)
    watched.original = value
    return watched


def _methods_of(kind: type) -> list[str]:
    return [
        name for name in dir(kind)
        if name[0] != "_" and name not in CHANGING and callable(getattr(kind, name))
    ]  # fmt: skip


@functools.cache
def _generator_class(kind: type) -> type:
    space: dict[str, Any] = {name: _watching_method(name) for name in _methods_of(kind)}
    space |= {name: _reporting_property(name) for name in CHANGING if hasattr(kind, name)}
    return type(kind.__name__, (kind,), space)


def _watching_method(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        generator, watcher = self.original, current_watcher()
        if watcher is None:
            return getattr(generator, name)(*args, **kwargs)
        return watcher.draw(_replayed_draw(name), (generator, *args), kwargs, sys._getframe(1))

    call.is_draw = True  # type: ignore[attr-defined]
    return call


def _reporting_property(name: str) -> property:
    def get(self: Any) -> Any:
        watcher = current_watcher()
        if watcher is not None:
            watcher.unseen(name)
        return getattr(self.original, name)

    return property(get)
