"""Questions of code about function modes, which are answered as if there were no recorder.

The recorder is a function mode. Code that asks torch whether there is one (`has_torch_function`)
has to receive the answer of eager: modules choose their fused path by it. Code that asks in order
to hand a call to the modes is not asking for itself: the recorder is one of these.

The profiler of a run (`watch/executed.py`) sees the call of a question before torch answers
it, under whatever name the code holds the function. Until the call returns, the recorder is not on
torch's stack of modes. Seen in torch 2.13 to 2.15; test_questions.py would notice a change.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bendtrace.python.internals import Never, internal
from bendtrace.python.sites import PACKAGE, TORCH
from bendtrace.tape.contexts import function_modes


class RecordingMode(TorchFunctionMode):
    """A mode that the code which runs under it does not see."""

    around: tuple[Any, ...] = ()  # those around the run that only see what the model does


_NAMES = (
    "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic",
    "_has_torch_function", "_has_torch_function_unary", "_has_torch_function_variadic",
    "_len_torch_function_stack", "_get_current_function_mode", "_get_current_function_mode_stack",
)  # fmt: skip
_pop: Any = internal("torch._C._pop_torch_function_stack", None, "function modes", *_NAMES)
_push: Any = internal("torch._C._push_on_torch_function_stack", None, "function modes", *_NAMES)
_mode_at: Any = internal("torch._C._get_function_stack_at", None, "function modes", *_NAMES)
# Without one of them, modes around a call see what the library itself reads.
_CAN_EXCHANGE = None not in (_pop, _push, _mode_at)
_is_enabled: Any = internal("torch._C._is_torch_function_mode_enabled", None)
_WHETHER = frozenset(
    {
        torch.overrides.has_torch_function, torch.overrides.has_torch_function_unary,
        torch.overrides.has_torch_function_variadic,
    }
)  # fmt: skip
_DeviceContext: Any = internal("torch.utils._device.DeviceContext", Never)
QUESTIONS: frozenset[Any] = _WHETHER | {function_modes, _mode_at, _is_enabled}
# Functions of torch that ask for their callers.
_FOR_OTHERS = frozenset({"_get_current_function_mode", "_get_current_function_mode_stack"})


def is_answered_without(
    frame: types.FrameType, question: Any, wants_inside: Callable[[], bool]
) -> bool:
    """Return whether the recorder has to be hidden from one of `QUESTIONS`, which the frame calls.

    `wants_inside` says whether something is inserted inside the running module.
    """
    asker: types.FrameType | None = frame
    while (
        asker is not None and asker.f_code.co_name in _FOR_OTHERS and _is_torch_code(asker.f_code)
    ):
        asker = asker.f_back
    if asker is None or _hands_calls_on(asker.f_code):
        return False
    if question not in _WHETHER:
        return not _is_torch_code(asker.f_code)
    # A module that keeps to its parts where there are hooks does so for insertions.
    return not (_looks_at_hooks(asker.f_code) and wants_inside())


def _is_torch_code(code: types.CodeType) -> bool:
    return code.co_filename.startswith(TORCH)


@functools.lru_cache(maxsize=4096)
def _hands_calls_on(code: types.CodeType) -> bool:
    """Return whether code asks in order to hand a call to the modes."""
    if code.co_name.startswith("sym_"):  # of numbers, which have operators for it
        return False
    return "handle_torch_function" in code.co_names or code.co_filename.startswith(PACKAGE)


@functools.lru_cache(maxsize=1024)
def _looks_at_hooks(code: types.CodeType) -> bool:
    """Return whether code asks if modules have hooks, as nn.TransformerEncoderLayer does."""
    return any(
        _looks_at_hooks(one)
        if isinstance(one, types.CodeType)
        else one in ("_forward_hooks", "_forward_pre_hooks")
        for one in (*code.co_consts, *code.co_names)
    )


def _function_modes() -> list[Any]:
    return [_mode_at(position) for position in range(function_modes() if _CAN_EXCHANGE else 0)]


def is_active(mode: TorchFunctionMode) -> bool:
    """Return whether a mode is on the stack of modes of the calling thread."""
    return any(one is mode for one in _function_modes())


def hide_recorder() -> list[Any]:
    """Take recorders off the stack of modes of the calling thread; return the stack."""
    stack = _function_modes()
    shown = ((one,) if not isinstance(one, RecordingMode) else one.around for one in stack)
    _push_modes(chain.from_iterable(shown))
    return stack


def put_back(stack: list[Any]) -> None:
    """Restore the stack of modes."""
    _push_modes(stack)


# Modes around a call see what the model does, and nothing of what the library itself does.


def seeing_modes() -> tuple[Any, ...]:
    """Return the modes of the calling thread that see calls, which a default device does not."""
    if not function_modes():
        return ()
    return tuple(
        one for one in _function_modes() if not isinstance(one, (RecordingMode, _DeviceContext))
    )


@contextmanager
def without(modes: tuple[Any, ...]) -> Iterator[None]:
    """Take some modes off the stack."""
    if not modes:
        yield
        return
    stack = _function_modes()
    _push_modes(one for one in stack if all(one is not other for other in modes))
    try:
        yield
    finally:
        _push_modes(stack)


def run_under_modes(
    modes: tuple[Any, ...], function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a function of the model's under modes that see it."""
    stack = _function_modes()
    _push_modes((*modes, *stack))
    try:
        return function(*args, **kwargs)
    finally:
        _push_modes(stack)


def unseen() -> AbstractContextManager[Any]:
    """Return a context in which no mode sees calls of torch functions."""
    return torch._C.DisableTorchFunction() if function_modes() else _NOTHING


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _push_modes(modes: Iterable[Any]) -> None:
    modes = list(modes)
    for _ in range(function_modes() if _CAN_EXCHANGE else 0):
        _pop()
    for mode in modes:
        _push(mode)
