"""Checks once, at the first trace, that Python and torch behave as the tracer expects.

Snippets are compiled, and the results of reading their instructions are compared with the expected
ones. Tiny models are recorded, one for each part of torch that the tracer intercepts. Version
numbers are not checked: if a probe passes with a new version, bendtrace needs no release.
"""

from __future__ import annotations

import functools
import gc
import linecache
import os
import platform
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bendtrace.python import internals
from bendtrace.python.bytecode import (
    code_compares_identity,
    global_uses,
    only_tests,
    stores_outside,
)
from bendtrace.python.lazy import LazyModule, errors
from bendtrace.python.sites import is_covered, users_level
from bendtrace.record.recorder import Recorder
from bendtrace.tape.contexts import dispatch_modes, function_modes
from bendtrace.tape.guards import TruthGuard
from bendtrace.tape.plain_numbers import needs_plain_numbers
from bendtrace.tape.tape import OpKind, Tape
from bendtrace.watch.environment import Environment
from bendtrace.watch.functions import name_of

if TYPE_CHECKING:
    from bendtrace.record import iterations
else:
    iterations = LazyModule("bendtrace.record.iterations")


def look_once() -> None:
    """Run the probes that a trace needs, once; warn of features that are switched off."""
    warn_of(internals.missing_features())
    if "python" not in _looked:
        _looked.add("python")
        warn_of(probe_python())
    # A mode entered by the user would see the tiny models.
    if "torch" not in _looked and not _is_inside_a_mode():
        _looked.add("torch")
        warn_of(_run_in_thread(probe_torch))


def look_at_flow_once() -> None:
    """Run the probe that flow steps need, once."""
    if "flow" not in _looked and not _is_inside_a_mode():
        _looked.add("flow")
        warn_of(_run_in_thread(probe_flow))


def _run_in_thread(probe: Callable[[], list[str]]) -> list[str]:
    """Run a probe in its own thread, where no mode of the user's is active."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(probe()))
    thread.start()
    thread.join()
    return found


_looked: set[str] = set()


def _is_inside_a_mode() -> bool:
    return bool(function_modes() or dispatch_modes())


def warn_of(failed: list[str]) -> None:
    """Warn of features that are switched off, at the user's line."""
    if failed:
        versions = f"Python {platform.python_version()} and torch {torch.__version__}"
        warnings.warn(
            errors.IncompatibleVersionWarning(
                f"parts of bendtrace are switched off: {'; '.join(failed)} (with {versions})"
            ),
            stacklevel=users_level(),
        )


# The instructions of Python


def probe_python() -> list[str]:
    """Compare the reading of snippets with expectations; return what was switched off."""
    return _probe_python(*_PYTHON_PROBES)


def probe_flow() -> list[str]:
    """Compare the flow steps of tiny models with expectations; return what was switched off."""
    return _probe_python(_PythonProbe("iterations", _UNKNOWN, _reads_iterations))


_UNKNOWN = "iterations of flow steps are unknown"


def _probe_python(*probes: _PythonProbe) -> list[str]:
    failed = []
    for feature, reason, holds in probes:
        try:
            is_so = holds()
        except Exception:  # a reader that fails does not count
            is_so = False
        if not is_so:
            internals.switch_off(feature, reason, frozenset({""} if feature == "names" else ()))
            failed.append(reason)
    return failed


def _compiled_function(source: str) -> FunctionType:
    """Compile the body of a function of `x`, `y` and `z`."""
    body = "\n".join(f"  {line}" for line in source.splitlines())
    scope: dict[str, Any] = {}
    exec(compile(f"def f(x, y, z):\n{body}\n", "<bendtrace probe>", "exec"), scope)
    return scope["f"]  # type: ignore[no-any-return]


def _code(source: str) -> CodeType:
    return _compiled_function(source).__code__


def _reads_identity() -> bool:
    expected = {
        "return x is y": (True, False),
        "return x is not y": (True, False),
        "return [i is y for i in x]": (True, False),
        "return x is None": (False, False),
        "return x is 1.5": (False, False),
        "return x is True": (False, True),
        "return [i is not False for i in x]": (False, True),
        "return type(x)": (False, True),
        "return x == y": (False, False),
        "return any(i > 1 for i in x)": (False, False),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        codes = {source: _code(source) for source in expected}
    return all(
        (code_compares_identity(code), needs_plain_numbers(code)) == expected[source]
        for source, code in codes.items()
    )


def _reads_names() -> bool:
    code = _code("import os.path\nglobal g\ng = h\nx.attribute = y\nreturn g")
    stores = _code("def inner():\n  nonlocal x\n  x = y\nreturn inner")
    expected = [("IMPORT_NAME", "os.path"), ("LOAD_GLOBAL", "h"), ("STORE_GLOBAL", "g")]
    expected += [("STORE_ATTR", "attribute"), ("LOAD_GLOBAL", "g")]
    return (
        list(global_uses(code)) == expected and stores_outside(stores) and not stores_outside(code)
    )


def _reads_truth_tests() -> bool:
    expected = {
        "if x():\n  return 1": True,
        "while not x():\n  break": True,
        "return 1 if x() else 2": True,
        "a = x()\nif a and y:\n  return 1": True,
        "a = x()\nif a:\n  return a is None\nreturn [a]": False,
        "y(x())": False,
        "return x()": True,  # the probe drops it
        "a = x()\ny.b = a": False,
    }
    lists = {
        "for a in x():\n  if a:\n    break": True,
        "for a in x():\n  y(a)": False,
        "a, b = x()\nif a:\n  return 1\nif b:\n  return 2": True,
        "return [x()[0]]": False,
    }
    answers: list[bool] = []

    def truth() -> bool:
        answers.append(only_tests(sys._getframe(1)))
        return False

    def truths() -> list[bool]:
        answers.append(only_tests(sys._getframe(1), 1))
        return [False, False]

    for source in expected:
        _compiled_function(source)(truth, lambda _: None, None)
    for source in lists:
        _compiled_function(source)(truths, lambda _: None, None)
    return answers == [*expected.values(), *lists.values()]


def _reads_handlers() -> bool:
    answers: list[bool] = []

    def asks() -> None:
        frame = sys._getframe(1)
        answers.append(is_covered(frame.f_code, frame.f_lasti))

    _compiled_function("x()\ntry:\n  x()\nexcept ValueError:\n  y()\nx()")(asks, None, None)
    return answers == [False, True, False]


def _reads_places() -> bool:
    code = _code("return x.first(y) + z[2]")
    spans = {(start, end) for line, _, start, end in code.co_positions() if line == 2}
    return {(9, 19), (22, 26), (9, 26)} <= spans


# Models, their inputs, and the kind and iteration of each truth value that they ask for.
_ITERATIONS = {
    "shrinks": ([2.0, 2.0, 2.0, 2.0], [("while", (0,)), ("while", (1,)), ("while", (2,))]),
    "walks": ([1.0, 2.0, 3.0], [("if", (0,)), ("if", (1,)), ("if", (2,))]),
    "grows": ([2.0, 3.0, 4.0], [("and", (0,)), ("while", (0,)), ("and", (1,)), *[("any", ())] * 6]),
}


def _reads_iterations() -> bool:
    is_plain = internals.is_off("identity") or internals.is_off("truth")
    if not _models():  # without sources, no kind of statement is known anyway
        return True
    for name, (values, expected) in _ITERATIONS.items():
        if is_plain and name != "shrinks":  # the others test numbers
            continue
        with _as_it_was():
            marks = list(iterations.marks_of(_tape(name, torch.tensor(values))))
        order = iterations.Iterations(marks)
        found = [
            (mark.role.kind, order.at(mark.order)) for mark in marks
            if isinstance(mark.record, TruthGuard)
        ]  # fmt: skip
        if found != expected:
            return False
    return True


class _PythonProbe(NamedTuple):
    feature: str
    reason: str
    holds: Callable[[], bool]


_PYTHON_PROBES = (
    _PythonProbe("identity", "numbers taken from tensors are plain, and guarded", _reads_identity),
    _PythonProbe("truth", "truth values of tensors are plain, and guarded", _reads_truth_tests),
    _PythonProbe("names", "all calls run live: code cannot be read", _reads_names),
    _PythonProbe("handlers", "each error is assumed to be handled", _reads_handlers),
    _PythonProbe("places", "flow steps have no kind, only a line", _reads_places),
)


# The parts of torch that the tracer steps in at


def probe_torch() -> list[str]:
    """Record tiny models that use all parts of torch; return what was switched off."""
    if "" in internals.names_off():  # all calls run live anyway
        return []
    models = {"Followed": [], "seeds": [], "live": []}  # type: dict[str, list[_TorchProbe]]
    for probe in TORCH_PROBES:
        together = "live" if probe.reason else "Followed"
        models[probe.model if probe.model in models else together].append(probe)
    if not _models() or all(_hold(model, probes) for model, probes in models.items()):
        return []
    failed = []
    for probe in TORCH_PROBES:  # each part by itself
        if not internals.is_off(probe.part) and not _hold(probe.model, [probe]):
            reason = f"{probe.part} cannot be followed: " + (
                "all calls run live" if "" in probe.names else "code that uses it runs live"
            )
            internals.switch_off(probe.part, reason, probe.names)
            failed.append(reason)
    return failed


def _hold(model: str, probes: list[_TorchProbe]) -> bool:
    try:
        with _as_it_was():
            tape = _tape(model, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    except Exception:  # if anything is raised, the tracer cannot follow this part
        return False
    return all(probe.holds(tape) for probe in probes)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Give a probe a plain environment, and restore the generators."""
    kept, is_collecting = random.getstate(), gc.isenabled()
    gc.disable()  # it would go through all of torch's objects
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            yield
        finally:
            random.setstate(kept)
            if is_collecting:
                gc.enable()


@functools.cache
def _models() -> dict[str, Any]:
    """Return the content of `self_test_models.py`, compiled under another name; {} without it."""
    file = os.path.join(os.path.dirname(__file__), "self_test_models.py")
    lines = linecache.getlines(file)
    source = "".join(lines)
    if not source:
        return {}
    linecache.cache[_NAME] = len(source), None, lines, _NAME
    scope: dict[str, Any] = {"__name__": "self_test_models"}
    exec(compile(source, _NAME, "exec"), scope)
    return scope


_NAME = "<models that bendtrace tries itself on>"


def _tape(name: str, x: Tensor) -> Tape:
    """Record a probe like any run, but without communication between processes."""
    model = _models()[name]
    function = model() if isinstance(model, type) else model
    environment = Environment(function, {"x": x})
    recorder = Recorder(function, environment)
    try:
        part = next(p for p in environment.arguments if p.value is x)
        return recorder.run((recorder.argument(part, x),), {}).tape
    finally:
        environment.release()


class _TorchProbe(NamedTuple):
    """A part of torch, a model that uses it, and the expected content of its tape."""

    part: str  # its name in words
    model: str  # its name in `self_test_models.py`
    ops: tuple[str, ...]  # names of ops, for what can be followed
    reason: str  # the start of the reason why a call runs live, for parts that cannot be followed
    names: frozenset[str]  # code that uses one cannot be followed if the probe fails; "" is all

    def holds(self, tape: Tape) -> bool:
        if self.reason:
            return any(blocker.startswith(self.reason) for blocker in tape.blockers)
        names = {name_of(op.target) for op in tape.ops}
        is_named = all(op.kind is not OpKind.UNKNOWN for op in tape.ops)
        called = len(tape.calls) > 1 or self.ops
        return is_named and not tape.blockers and bool(called) and names.issuperset(self.ops)


def _follows(part: str, model: str, ops: str, *names: str) -> _TorchProbe:
    return _TorchProbe(part, model, tuple(ops.split()), "", frozenset(names))


def _blocks(part: str, model: str, reason: str, *names: str) -> _TorchProbe:
    return _TorchProbe(part, model, (), reason, frozenset(names))


TORCH_PROBES = (
    _follows("calls of modules", "Outer", "", ""),
    _follows("sizes and numbers", "sizes", "shape mul reshape sum gt __bool__", ""),
    _follows("autograd.Function", "applies", "Twice", "apply", "Function"),
    _follows("torch.manual_seed", "seeds", "manual_seed rand", "manual_seed"),
    _follows("torch.func", "maps", "vmap_impl", "vmap", "grad", "func"),
    _follows("clocks", "reads_clock", "time", "time", "monotonic", "perf_counter"),
    _follows("the environment", "reads_environment", "environ", "environ", "getenv"),
    _blocks("saved tensors", "saves", "a block under saved", "saved_tensors_hooks", "checkpoint"),
    _blocks("dispatch modes", "dispatches", "a block under a dispatch", "TorchDispatchMode"),
    _blocks("forward-mode differentiation", "is_dual", "forward-mode", "forward_ad", "jvp"),
    _blocks("threads", "starts_thread", "a thread", "Thread", "threading", "ThreadPoolExecutor"),
    _blocks("files", "opens", "open", "open"),
    _follows("random numbers of Python", "draws", "seed random mul", "seed", "random"),
)
