"""The global state around a call: what counts as the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from bendtrace.engine.global_state import GlobalState
from bendtrace.tape.contexts import Context
from bendtrace.watch.monkeypatches import Monkeypatch


@contextmanager
def _set(put: Callable[[Any], object], value: Any, before: Any) -> Any:
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def _hooked() -> Any:
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


def _put(holder: Any, name: str) -> AbstractContextManager[Any]:
    before = getattr(holder, name)
    return _set(lambda value: setattr(holder, name, value), not before, before)


class Quiet(TorchFunctionMode):
    """Does nothing."""


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without its cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "the default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "a device": lambda: torch.device("meta"),
    "a function mode": Quiet,
    "hooks of all modules": _hooked,
    "the fast path": lambda: _set(torch.backends.mha.set_fastpath_enabled, False, True),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "precision": lambda: _set(torch.set_float32_matmul_precision, "high", "highest"),
    "anomalies": torch.autograd.detect_anomaly,
    "threads": lambda: _set(torch.set_num_threads, 1, torch.get_num_threads()),
    "cudnn": lambda: _put(torch.backends.cudnn, "enabled"),
    "cudnn's choice": lambda: _put(torch.backends.cudnn, "benchmark"),
    "mkldnn": lambda: _set(torch._C._set_mkldnn_enabled, False, True),
    "attention": lambda: _set(torch.backends.cuda.enable_math_sdp, False, True),
}


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("enter", STATES.values(), ids=STATES)
def test_each_state_is_told_from_the_usual_one_and_is_the_same_as_itself(enter):
    usual = GlobalState.current()
    assert usual.is_current()
    with ExitStack() as stack:
        stack.enter_context(enter())
        assert not usual.is_current()
        assert usual.difference()
        there = GlobalState.current()
        assert there.is_current()
        assert there.difference() is None
    assert usual.is_current()
    assert not there.is_current()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("enter", STATES.values(), ids=STATES)
def test_the_quick_way_to_compare_agrees_with_the_long_one(enter):
    with enter():
        state = GlobalState.current()
    for name, other in STATES.items():
        with other():
            assert state.is_current() == (state == GlobalState.current()), name


def test_each_part_of_the_state_is_asked_for_by_itself():
    # Some of torch's settings change two parts: either of them would tell.
    others = {
        "context": Context(False, False),
        "dtype": torch.float64,
        "modes": (Quiet(),),
        "hooked": True,
        "fast_attention": False,
        "settings": (),
        "monkeypatches": (Monkeypatch("torch.relu", None, torch.relu),),
    }
    usual = GlobalState.current()
    assert usual.is_current()
    assert others.keys() == set(GlobalState._fields)
    for name, other in others.items():
        assert not usual._replace(**{name: other}).is_current(), name
    with _set(torch.set_default_dtype, torch.float64, torch.float32):
        assert usual.difference() == (
            "the default dtype was torch.float32 when traced and is torch.float64 now"
        )


def test_what_is_asked_for_shows_in_what_ops_give():
    def model(x: Tensor) -> Tensor:
        return x @ x

    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
        assert GlobalState.current().context.autocast
