"""Reading what frames hold: nothing that was freed is read, whatever Python is in the middle of."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from bendtrace.python import stacks

pytestmark = pytest.mark.skipif(
    stacks.frame_layout() is None, reason="the frames of this Python cannot be read, so nothing is"
)


class Held:
    """Can be referred to weakly."""

    def __matmul__(self, other: object) -> object:
        return other


def read_all(stop: FrameType) -> list[stacks.Stack | None]:
    """Read the frames from the caller's to `stop`."""
    places = stacks.frame_layout()
    assert places is not None
    found, callee = [], sys._getframe()
    frame = callee.f_back
    while frame is not None:
        found.append(stacks.read_frame(frame, callee, places))
        if frame is stop:
            break
        callee, frame = frame, frame.f_back
    return found


def by_reference(look: Callable[[], None], given: list[Any]) -> None:
    held = Held()
    given.append(weakref.ref(held, lambda _: look()))
    (lambda value: None)(held if len(given) > 1 else [held].pop())
    held = None  # type: ignore[assignment]
    given.clear()


def by_subclass(look: Callable[[], None], given: list[Any]) -> None:
    class Reference(weakref.ref[Held]):
        pass

    held = Held()
    given.append(Reference(held, lambda *everything: look()))
    len([held]), id(held)
    del held


def by_finalizer(look: Callable[[], None], given: list[Any]) -> None:
    held = Held()
    weakref.finalize(held, look)
    held @ held
    del held


def by_destructor(look: Callable[[], None], given: list[Any]) -> None:
    class Closing:
        def __del__(self) -> None:
            look()

    len((Closing(), Closing()))
    print(Closing(), file=Sink())


class Sink:
    """A file that keeps nothing."""

    def write(self, text: str) -> None:
        pass


@pytest.mark.parametrize("ask", [by_reference, by_subclass, by_finalizer, by_destructor])
def test_nothing_is_read_of_frames_that_free_something(ask: Callable[..., None]) -> None:
    seen: list[stacks.Stack | None] = []
    here = sys._getframe()

    def look() -> None:
        seen.extend(
            stack for stack in read_all(here) if stack is None or stack.code is ask.__code__
        )

    ask(look, [])
    assert seen
    assert all(stack is None for stack in seen)


STRESS = """
    import faulthandler, functools, gc, sys, weakref
    faulthandler.enable()
    from bendtrace.python import stacks

    places, reads = stacks.frame_layout(), 0

    def look():
        global reads
        callee, frame = sys._getframe(), sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "<module>":
            if stacks.read_frame(frame, callee, places) is not None:
                reads += 1
            callee, frame = frame, frame.f_back

    class Asks:
        def __init__(self, value=0): self.value = value
        def __bool__(self): look(); return True
        def __len__(self): look(); return 2
        def __add__(self, other): look(); return Asks(self.value + 1)
        __radd__ = __iadd__ = __add__
        def __eq__(self, other): look(); return True
        def __hash__(self): look(); return 1
        def __lt__(self, other): look(); return self.value < other.value
        def __getitem__(self, key):
            look()
            if type(key) is int and key > 2: raise IndexError
            return Asks(key)
        def __setitem__(self, key, value): look()
        def __contains__(self, item): look(); return True
        def __getattr__(self, name): look(); return Asks()
        def __call__(self, *args, **kwargs): look(); return Asks()
        def __enter__(self): look(); return self
        def __exit__(self, *error): look(); return True
        def __iter__(self): look(); return iter([Asks(1), Asks(2)])
        def __index__(self): look(); return 1
        def __format__(self, spec): look(); return "x"
        def __del__(self): look()

    def generator(a):
        try:
            for one in a:
                got = yield one + a
                look()
        finally:
            look()

    def keeps(a, *more, key=None, **others):
        def inner(b): return a + b if more or key else b
        return inner(a)

    def work(a):
        total = [x + y for x in a for y in a if x]
        for one, other in zip(a, map(lambda v: v + a, a)):
            with a as b, Asks() as c:
                total.append(keeps(one + b, *[other, c], key=a, **{"more": a}))
                raise ValueError
        first, second = a
        for number, one in enumerate(generator(a)):
            if number: break
        used = generator(a); next(used); used.send(a); del used
        try:
            try: a[9]
            finally: look()
        except IndexError: look()
        text = f"{a}{a:>3}" + str(len(a)) + repr(a.some.thing == a)
        made = {a: a, **{k: a for k in "ab"}}, {a}, sorted([Asks(2), Asks(1)]), a in [a]
        weak = weakref.ref(Asks(), lambda _: look())
        keeps(*[a, a]); a(*[a, a]); keeps(*iter((a, a)), **{"key": a}); max(*[a, a])
        a[1:2]; a[a] = a; a.x(a, *a, **{"k": a})
        functools.reduce(lambda p, q: p + q, a); max(a); sum(a, a); all(a); [0, 1][a]
        while a:
            a += 1
            break
        match a:
            case Asks(value=0): look()
            case _: look()
        return a if a else None

    watched = Asks()
    before = sys.getrefcount(watched)
    turns = int(sys.argv[1])
    while reads < turns:
        work(watched)
    gc.collect()
    assert sys.getrefcount(watched) == before, "references are lost or left"
    print(reads)
"""


@pytest.mark.more
def test_a_great_many_reads_in_the_middle_of_everything_do_no_harm(
    request: pytest.FixtureRequest,
) -> None:
    turns = 1_000_000 if request.config.getoption("--slow") else 50_000
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STRESS), str(turns)],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= turns


def test_what_was_compared_may_be_gone() -> None:
    """CPython 3.13 frees it before it asks for the truth, and leaves the pointers."""
    places = stacks.frame_layout()
    assert places is not None
    found: list[stacks.Stack | None] = []

    class Truth:
        def __bool__(self) -> bool:
            found.append(stacks.read_frame(sys._getframe(1), sys._getframe(), places))
            return True

    class Temporary:
        def __gt__(self, other: object) -> Truth:
            return Truth()

    for _ in range(100):
        assert 1 if Temporary() > Temporary() else 0
    for seen in found:
        kinds = {type(value) for value in (seen.operands or () if seen is not None else ())}
        assert kinds <= {Truth, type(stacks.EMPTY)}
    assert len(found) == 100


# Where the arguments of a call are a tuple that the code has made, and where C makes one.
UNPACKED: dict[str, tuple[Any, bool]] = {
    "a generator that closes over something": (lambda x: f(*(x * k for k in (1, 2))), True),
    "a list": (lambda x: f(*[x, x]), True),
    "either": (lambda x: f(*((x, x) if x else [x])), True),
    "a variable": (lambda x: f(*x), True),
    "more than one": (lambda x: f(x, *x), False),
    "with a condition": (lambda x, y: f(*x, 1 if y else 2, **y), False),
    "with a condition in front of others": (lambda x, y: f(x, a=1 if y else 2, **y), False),
    "with `or` in front of others": (lambda x, y: f(x, a=y or x, **y), False),
    "either, and a condition": (lambda x, y: f(*((x,) if x else [x]), a=1 if y else 2), True),
    "or, and a condition": (lambda x, y: f(*([x] if x else (x,)), a=1 if y else 2), True),
    "a variable, and a condition": (lambda x, y: f(*x, a=1 if y else 2, **y), True),
    "with a function among the named": (lambda x, y: f(x, *x, key=lambda: x, **y), False),
}


@pytest.mark.parametrize("name", UNPACKED)
def test_what_a_call_unpacks_is_a_tuple_only_if_the_code_has_made_one(name: str) -> None:
    function, converts = UNPACKED[name]
    found = stacks._instructions(function.__code__).values()
    calls = [one.converts for one in found if one.name == "CALL_FUNCTION_EX"]
    # From 3.12 on, each branch may have a call of its own.
    assert calls
    assert any(calls) is converts


def f(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs
