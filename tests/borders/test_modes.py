"""Modes that a model switches inside, or is called in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import bendtrace as bt
from tests.borders.border import DEFAULT, Border, Case, Mode, Stateful
from tests.promise import assert_promise, bits
from tests.torch_settings import default_dtype, deterministic

border = Border()


@border.replays
class InferenceInside(Stateful):
    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            y = self.fc(x)
        return y.clone(), y.is_inference()


@border.replays
class InferenceAsDecorator(Stateful):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


@border.replays
class InferenceLeftForAWhile(Stateful):
    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            y = self.fc(x.detach())
            with torch.inference_mode(False):
                z = self.fc(x) * 2
        return z + y.clone()


@border.replays
def inference_in_place(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x.detach() * 2
        y.add_(1)
        y[0] = 0
    return x + y.clone()


@border.replays
def inference_and_an_error(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x.detach() * 2
    try:
        return y.requires_grad_() * x
    except RuntimeError:
        return x * 3


@border.replays
class AutocastInside(Stateful):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                z = self.fc(y.float())
            w = torch.mm(z, y.t())
        return y, z, w, w.dtype == torch.bfloat16


@border.replays
class AutocastNested(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
            with torch.autocast("cpu", dtype=torch.float16):
                z = self.inner(x)
            return self.fc(y).float() + z


@border.replays
class AutocastWithoutCache(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            y = self.fc(x)
            with torch.no_grad():
                self.fc.weight.mul_(0.5)
            return self.fc(x) + y


@border.replays
class AutocastByDecorator(Stateful):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def half(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.half(x).float() * 2 if torch.is_autocast_enabled("cpu") else self.half(x)


@border.replays
def autocast_asked_for(x: Tensor) -> Tensor:
    kind = torch.get_autocast_dtype("cpu")
    return x.to(kind) if torch.is_autocast_enabled("cpu") else x @ x.t()


@border.replays
def grad_switched(x: Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    with torch.set_grad_enabled(x.shape[0] > 3):
        w = x * 5
    return x + y + z + w, torch.is_grad_enabled()


@border.replays
def grad_switched_by_a_call(x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = x.exp()
    torch.set_grad_enabled(before)
    return x * y


@border.replays
def default_dtype_inside(x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return x + torch.ones(4) * 0.1
    finally:
        torch.set_default_dtype(before)


@border.replays
def default_device_inside(x: Tensor) -> Tensor:
    with torch.device("cpu"):
        y = torch.ones(4)
    return x + y


@border.replays
def meta_device_inside(x: Tensor) -> Any:
    with torch.device("meta"):
        y = torch.ones(4, 4)
    return x * y.shape[0], y.device.type, y.is_meta


@border.live("torch.set_default_device")
def default_device_set_and_reset(x: Tensor) -> Tensor:
    torch.set_default_device("cpu")
    y = torch.ones(4)
    torch.set_default_device(None)
    return x + y


@border.replays
def deterministic_inside(x: Tensor) -> Tensor:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        y = torch.empty(3)  # filled with nan while algorithms are deterministic
    finally:
        torch.use_deterministic_algorithms(before)
    return x.sum() + y


@border.either("anomaly", at="anomaly")
def anomaly_mode(x: Tensor) -> Tensor:
    with torch.autograd.set_detect_anomaly(False):
        return x.sin() * 2


@border.live("a torch setting")
def precision_inside(x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("high")
    try:
        return x @ x.mT
    finally:
        torch.set_float32_matmul_precision("highest")


@border.live("begins under changed settings", at="checkpoint(", graph=True)
def deterministic_around_a_block(x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return checkpoint(torch.sin, x * 2, use_reentrant=False)
    finally:
        torch.use_deterministic_algorithms(False)


@border.replays
def settings_by_value(x: Tensor) -> Any:
    """The op is called under the settings again, also where a resumed run or a branch begins."""
    around = ask_settings(x)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        y = ask_settings(x)
        if x.sum() > 0:
            with torch.no_grad():
                y = y * ask_settings(x)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        y = y + ask_settings(x)
        torch.set_num_threads(threads)
        y = y + x.sum(0) * ask_settings(x)
    return y - around + ask_settings(x), around


@bt.opaque
def ask_settings(x: Tensor) -> Tensor:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    flags = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cudnn.enabled
    return x.new_tensor([*flags, torch.get_num_threads()])


@border.replays
class AttentionBackend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x[None, None].expand(1, 2, -1, -1)
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)


@border.replays
class Checkpointed(Stateful):
    """The reentrant one and the other."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.drop = nn.Dropout(0.5)

    def part(self, x: Tensor) -> Tensor:
        return self.drop(self.fc(x)).relu()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x) if torch.is_grad_enabled() else x.requires_grad_()
        return checkpoint(self.part, x * 2, use_reentrant=self.reentrant)


@border.replays
def checkpointed_reentrantly() -> nn.Module:
    return Checkpointed(True)


@border.live("saved")
def with_saved_tensors_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t + 1):
        return x.exp() * x


@border.live("saved", at="save_on_cpu")
def saving_on_the_cpu(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.exp() * x


class Louder(TorchFunctionMode):
    """Changes what one function gives, and counts."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        out = func(*args, **(kwargs or {}))
        return out + 10 if getattr(func, "__name__", "") == "mul" else out


LOUDER = Louder()


class Dispatched(TorchDispatchMode):
    """Changes what one op gives, and keeps a list of the sizes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor:
            self.sizes.append(out.numel())
            return out + 10
        return out


@border.replays
def a_function_mode_inside(x: Tensor) -> Tensor:
    with Louder():
        y = x * 2
    return y * 2


@border.replays
def a_function_mode_that_is_asked(x: Tensor) -> Tensor:
    with Louder() as mode:
        y = x * 2 + 1
    return y * mode.count


@border.live("mode")
def a_dispatch_mode_inside(x: Tensor) -> Tensor:
    with Dispatched():
        y = x.detach() * 2
    return x + y * 2


@border.live("mode")
def a_dispatch_mode_that_is_asked(x: Tensor) -> Tensor:
    with Dispatched() as mode:
        y = x.detach() * 2
    return x + y * mode.sizes[0]


@border.live("mode|Flop|origin")
class CountsItsWork(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            y = self.fc(x)
        return y * counter.get_total_flops()


@border.either("record_function", at="record_function")
def a_region_for_the_profiler(x: Tensor) -> Tensor:
    with torch.profiler.record_function("here"):
        return x * 2


@border.live("unknown origin")
def without_torch_functions(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        y = x * 2
    with torch._C.DisableTorchFunction():
        z = x * 3
    return y + z


@border.live("")
def without_torch_functions_in_place(x: Tensor) -> Tensor:
    y = x.detach() * 2
    with torch._C.DisableTorchFunction():
        y.add_(1)
    return x * y


@border.live("a torch setting", at="x @ x.t()")
def matmul_precision_inside(x: Tensor) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    y = x @ x.t()
    torch.set_float32_matmul_precision(before)
    return y


@contextmanager
def both(*modes: Mode) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        yield


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


AROUND: dict[str, Mode] = {
    "nothing": nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": autocast,
    "autocast without grad": lambda: both(autocast, torch.no_grad),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("cpu"),
    "math attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "deterministic": deterministic,
    "a function mode": lambda: LOUDER,
    "a dispatch mode": Dispatched,
    "saved tensors hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    ),
}


class Around(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        x = x.to(self.fc.weight.dtype)
        y = self.norm(self.fc(x)) + torch.ones(4) * 0.1
        q = y[None, None].float()
        return y, torch.nn.functional.scaled_dot_product_attention(q, q, q), y.requires_grad


@pytest.mark.parametrize("around", AROUND)
def test_modes_around(around: str) -> None:
    live = "function mode around" if around == "a function mode" else None
    Case(Around, Around, modes=[AROUND[around]], gradients=False, live=live, at=None).check()


@pytest.mark.parametrize("around", AROUND)
def test_modes_around_every_other_call(around: str) -> None:
    modes = itertools.cycle([nullcontext, AROUND[around]])
    bended = assert_promise(Around, [DEFAULT[0]] * 6, mode=lambda: next(modes)())
    assert bended.stats.replays >= 2 or bended.stats.live >= 2


def leaves_grad_off(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return x * 2


def leaves_another_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return x * torch.ones(4)


@pytest.mark.parametrize("model", [leaves_grad_off, leaves_another_dtype])
def test_a_mode_that_is_left_changed_is_left_changed(model: Any) -> None:
    bended = bt.BendedModule(model)
    for _ in range(4):
        with default_dtype(torch.float32), torch.enable_grad():
            wanted = bits(model(torch.ones(4, requires_grad=True)))
            left = torch.is_grad_enabled(), torch.get_default_dtype()
        with default_dtype(torch.float32), torch.enable_grad():
            assert bits(bended(torch.ones(4, requires_grad=True))) == wanted
            assert (torch.is_grad_enabled(), torch.get_default_dtype()) == left
    assert bended.stats.live == 4
    Case(lambda: model, model, live="changed|dtype").check_served(bended)


FLAGS: dict[str, Any] = {
    "flush": lambda on: torch.set_flush_denormal(on),
    "precision": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "mkldnn": lambda on: torch._C._set_mkldnn_enabled(not on),
    "anomaly": lambda on: torch.autograd.set_detect_anomaly(on, check_nan=True),
    "deterministic": torch.use_deterministic_algorithms,
}


def reads_flags(x: Tensor) -> Any:
    return x * 1e-30 * 1e-10, [
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    ]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_flags_that_are_switched_between_calls(flag: str) -> None:
    bended = bt.BendedModule(reads_flags)
    x = torch.rand(4)
    try:
        for on in (False, False, True, True, False, True):
            FLAGS[flag](on)
            assert bits(bended(x)) == bits(reads_flags(x)), on
    finally:
        FLAGS[flag](False)
