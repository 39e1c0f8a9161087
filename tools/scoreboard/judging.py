"""Whether what came out is what eager gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any
from unittest.mock import NonCallableMock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import bendtrace as bt
from tests.promise import bits
from tools.scoreboard.case import KINDS, Case, Raised, Refused, Step
from tools.scoreboard.ways import OURS, Way, quietly

__all__ = ["Result", "agree", "is_repeatable", "judge", "tensors_in"]


@dataclasses.dataclass
class Result:
    """What became of a case with one way.

    Attributes:
        suite: the suite.
        case: the name of the case.
        way: the name of the way.
        outcome: "right", "wrong" (silently), "refused" (an error that eager does not raise),
            "crashed", "hung", "invalid" (eager itself does not run it), or "skipped".
        right: for each kind of call, how many were right.
        calls: for each kind of call, how many there were.
        why: what was wrong, or the error.
        live: how many calls ran the model itself, with us.
        why_live: the first reason for that.
    """

    suite: str
    case: str
    way: str
    outcome: str = "right"
    right: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    calls: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    why: str = ""
    live: int = 0
    why_live: str = ""


def agree(given: Any, wanted: Any, *, exact: bool) -> bool:
    """Whether two results are the same.

    Args:
        given: what a way gave.
        wanted: what eager gave.
        exact: bit by bit, with strides, types and all else; else to rounding, in dtype and shape.
    """
    if exact:
        return bool(bits(_plain(given)) == bits(_plain(wanted)))
    return _close(given, wanted)


def _plain(value: Any) -> Any:
    """Return a result with the classes of errors in place of the errors."""
    if isinstance(value, Raised):
        return type(value.error).__name__
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _close(given: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        if not isinstance(given, Tensor) or given.dtype != wanted.dtype:
            return False
        if wanted.layout is not torch.strided or wanted.is_nested or wanted.is_quantized:
            return bool(bits(given.detach()) == bits(wanted.detach()))
        if given.shape != wanted.shape or wanted.is_meta:
            return given.shape == wanted.shape
        rough = 20 if wanted.dtype in (torch.float16, torch.bfloat16) else 1
        return torch.allclose(*_comparable(given, wanted), rtol=rough * 1e-3, atol=rough * 1e-4,
                              equal_nan=True)  # fmt: skip
    if isinstance(wanted, float) and isinstance(given, float):
        both_nan = math.isnan(given) and math.isnan(wanted)
        return both_nan or math.isclose(given, wanted, rel_tol=1e-3, abs_tol=1e-4)
    if isinstance(wanted, Mapping) and isinstance(given, Mapping):
        return list(map(str, given)) == list(map(str, wanted)) and all(
            _close(x, y) for x, y in zip(given.values(), wanted.values(), strict=True)
        )
    if isinstance(wanted, (list, tuple)) and isinstance(given, (list, tuple)):
        return len(given) == len(wanted) and all(map(_close, given, wanted))
    if type(given) is not type(wanted):
        return False
    if dataclasses.is_dataclass(wanted) or (hasattr(wanted, "__dict__") and vars(wanted)):
        return _close(vars(given), vars(wanted))
    try:
        return bool(given == wanted) or "object at 0x" in repr(wanted)
    except Exception:  # it does not say what it is
        return True


def _comparable(given: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    given, wanted = (t.detach().resolve_conj().resolve_neg() for t in (given, wanted))
    if wanted.is_complex():
        return given.to(torch.complex128), wanted.to(torch.complex128)
    if wanted.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        same = (given == wanted).to(torch.float64)
        return same, torch.ones_like(same)
    return given.to(torch.float64), wanted.to(torch.float64)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def truth(case: Case) -> list[Step] | Exception:
    """Run a case in eager; an error means that it is no program."""
    steps = []
    try:
        with quietly():
            torch.manual_seed(0)
            for step in case.drive(lambda model: model):
                if any(isinstance(leaf, NonCallableMock) for leaf in tree_leaves(step.value)):
                    raise TypeError("it computes with mocks of a package that is not installed")
                steps.append(Step(step.kind, _frozen(step.value)))
    except Exception as error:
        return error
    return steps


def judge(case: Case, way: Way, wanted: list[Step] | Exception) -> Result:
    """Run a case with a way, and compare each step with eager's.

    Args:
        case: the program.
        way: the way.
        wanted: what eager gave.
    """
    result = Result(case.suite, case.name, way.name)
    if isinstance(wanted, Exception):
        result.outcome, result.why = "invalid", _line(wanted)
        return result
    for step in wanted:
        result.calls[step.kind] += 1
    exact, number = way.name == OURS, 0
    made: list[Any] = []

    def wrap(model: Any) -> Any:
        made.append(way.wrap(model))
        return made[-1]

    try:
        with quietly():
            torch.manual_seed(0)
            for number, step in enumerate(case.drive(wrap)):
                _take(result, step, wanted[number], number, exact, way)
                if result.outcome != "right":
                    break
    except Exception as error:
        result.outcome = "wrong" if way.name == OURS and _is_bug(error) else "refused"
        result.why = _line(error)
    for bended in made:
        if isinstance(bended, bt.BendedModule):
            result.live += bended.stats.live
            result.why_live = result.why_live or next(iter(bended.why_live), "")[:300]
    return result


def is_repeatable(case: Case, wanted: list[Step], *, times: int = 3) -> bool:
    """Whether eager gives the same each time: not where a program reads memory that nobody set.

    Args:
        case: the program.
        wanted: what eager gave.
        times: how often to run it again.
    """
    for number in range(times):
        _litter(number + 1.5)
        again = truth(case)
        if isinstance(again, Exception) or not all(
            agree(one.value, other.value, exact=True)
            for one, other in zip(again, wanted, strict=True)
        ):
            return False
    return True


def _litter(value: float) -> None:
    """Leave a number in much of the memory that tensors are given next."""
    sizes = [*range(1, 257), *(2**power for power in range(9, 17))]
    held = [torch.full((size,), value) for size in sizes for _ in range(8)]
    held.clear()


def _take(result: Result, given: Step, wanted: Step, number: int, exact: bool, way: Way) -> None:
    value, truth_ = _frozen(given.value), wanted.value
    raised, due = _raised_in(value), _raised_in(truth_)
    if raised and not due:
        result.outcome, result.why = "refused", _line(raised[0].error)
        return
    if raised and not exact:
        result.right[given.kind] += (
            1  # an error where there is one: of which type is its own affair
        )
        return
    if way.name == "TorchLens":  # a log says nothing of containers
        value, truth_ = tensors_in(value), tensors_in(truth_)
    if agree(value, truth_, exact=exact):
        result.right[given.kind] += 1
        return
    result.outcome = "wrong"
    result.why = f"call {number} ({given.kind}): {_shown(value)}, not {_shown(truth_)}"


def _raised_in(value: Any) -> list[Raised]:
    if isinstance(value, Raised):
        return [value]
    if isinstance(value, (list, tuple)):
        return [raised for item in value for raised in _raised_in(item)]
    return []


def _is_bug(error: Exception) -> bool:
    """Whether an error of ours says nothing: one that eager does not raise and that is not ours."""
    from bendtrace.errors import BendtraceError

    return not isinstance(error, (BendtraceError, Refused))


def _frozen(value: Any) -> Any:
    """Copy tensors, which later calls might write to."""
    if type(value) in (list, tuple):
        return type(value)(_frozen(item) for item in value)
    if type(value) is dict:
        return {key: _frozen(item) for key, item in value.items()}
    if type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
        stays = value.detach().clone(memory_format=torch.preserve_format)
        return stays.requires_grad_(value.requires_grad)
    return value


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:120]
