"""The ambient state of an op: grad mode, inference mode, autocast, settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from bendtrace.python.internals import internal


class Autocast(NamedTuple):
    """Autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


class Context(NamedTuple):
    """The state that affects an op besides its arguments."""

    grad: bool  # whether gradients are recorded
    inference: bool  # whether inference mode is on
    autocast: tuple[Autocast, ...] = ()  # the state of autocast, if it is on
    # The settings that differ from those at the beginning of the run, by name. An op that none of
    # these influences need not have them.
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def is_usual(self) -> bool:
        """Return whether neither autocast, nor inference mode, nor a setting is in force."""
        return not (self.autocast or self.inference or self.settings)

    @property
    def modes(self) -> tuple[Any, ...]:
        """All but the settings."""
        return self[:3]


_PLAIN = {
    (grad, inference): Context(grad, inference)
    for grad in (False, True)
    for inference in (False, True)
}
any_autocast: Callable[[], bool] = internal(
    "torch._C._is_any_autocast_enabled",
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
)
# How many modes are entered.
function_modes: Callable[[], int] = internal(
    "torch._C._len_torch_function_stack", lambda: 0, "function modes", ""
)
dispatch_modes: Callable[[], int] = internal(
    "torch._C._len_torch_dispatch_stack", lambda: 0, "dispatch modes", ""
)


def current_context() -> Context:
    """Return the state for an op called now."""
    context = _PLAIN[torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    if not any_autocast():
        return context
    device_types = ["cpu"]
    if torch.cuda.is_available():
        device_types.append("cuda")
    cache = torch.is_autocast_cache_enabled()
    return context._replace(
        autocast=tuple(
            Autocast(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name), cache)
            for name in device_types
        )
    )


forget_casts: Callable[[], None] = torch.clear_autocast_cache


# Each op asks for all of them, which takes several times as long by the public functions. Seen in
# torch 2.13 to 2.15; test_guarded.py would notice a change.
_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
_deterministic = internal(
    "torch._C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
_set_deterministic: Any = internal(
    "torch._C._set_deterministic_algorithms", torch.use_deterministic_algorithms
)
_only_warns = internal(
    "torch._C._get_deterministic_algorithms_warn_only",
    torch.is_deterministic_algorithms_warn_only_enabled,
)
precision: Any = internal(
    "torch._C._get_float32_matmul_precision", torch.get_float32_matmul_precision
)
mkldnn: Any = internal("torch._C._get_mkldnn_enabled", lambda: torch.backends.mkldnn.enabled)
_flash = internal("torch._C._get_flash_sdp_enabled", _cuda.flash_sdp_enabled)
_efficient = internal("torch._C._get_mem_efficient_sdp_enabled", _cuda.mem_efficient_sdp_enabled)
_math = internal("torch._C._get_math_sdp_enabled", _cuda.math_sdp_enabled)
_anomaly = torch.is_anomaly_enabled
_threads = torch.get_num_threads
cudnn: Any = internal("torch._C._get_cudnn_enabled", lambda: _cudnn.enabled)
_benchmark = internal("torch._C._get_cudnn_benchmark", lambda: _cudnn.benchmark)
_cudnn_deterministic = internal("torch._C._get_cudnn_deterministic", lambda: _cudnn.deterministic)
_cudnn_tf32 = internal("torch._C._get_cudnn_allow_tf32", lambda: _cudnn.allow_tf32)
_cublas_tf32 = internal("torch._C._get_cublas_allow_tf32", lambda: _cuda.matmul.allow_tf32)
_Distribution = torch.distributions.Distribution
_sparse = internal(
    "torch._C._check_sparse_tensor_invariants",
    torch.sparse.check_sparse_tensor_invariants.is_enabled,
)


def current_settings() -> tuple[Any, ...]:
    """Return torch's settings that ops, or torch's own Python, read.

    Deterministic algorithms (on, and only warning), precision of float32 products, MKLDNN, kinds
    of attention, anomaly detection, threads, cuDNN, cuBLAS, cached parametrizations, checks of
    distributions and of sparse tensors.
    """
    return (
        _deterministic(), _only_warns(), precision(), mkldnn(), _flash(), _efficient(), _math(),
        _anomaly(), _threads(), cudnn(), _benchmark(), _cudnn_deterministic(), _cudnn_tf32(),
        _cublas_tf32(), parametrize._cache_enabled, _Distribution._validate_args, _sparse(),
    )  # fmt: skip


# The settings that forward may change for some of its ops: how each is read, and how it is set. To
# set one changes no other.
_CHANGEABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (
        lambda: (_deterministic(), _only_warns()),
        lambda value: _set_deterministic(value[0], warn_only=value[1]),
    ),
    "threads": (_threads, torch.set_num_threads),
    "checks of distributions": (
        lambda: _Distribution._validate_args, _Distribution.set_default_validate_args,
    ),
}  # fmt: skip
_lasting: list[Callable[[], Any]] = []  # those that cannot be set
for _name, _ask, _set in (
    ("MKLDNN", mkldnn, internal("torch._C._set_mkldnn_enabled", None)),
    ("flash attention", _flash, internal("torch._C._set_sdp_use_flash", None)),
    ("efficient attention", _efficient, internal("torch._C._set_sdp_use_mem_efficient", None)),
    ("attention by products", _math, internal("torch._C._set_sdp_use_math", None)),
    (
        "attention of cuDNN",
        internal("torch._C._get_cudnn_sdp_enabled", _cuda.cudnn_sdp_enabled),
        internal("torch._C._set_sdp_use_cudnn", None),
    ),
    (
        "attention of others",
        internal("torch._C._get_overrideable_sdp_enabled", lambda: None),
        internal("torch._C._set_sdp_use_overrideable", None),
    ),
    ("cuDNN", cudnn, internal("torch._C._set_cudnn_enabled", None)),
    ("benchmarks of cuDNN", _benchmark, internal("torch._C._set_cudnn_benchmark", None)),
    (
        "deterministic cuDNN",
        _cudnn_deterministic,
        internal("torch._C._set_cudnn_deterministic", None),
    ),
):
    if _set is None or _ask() is None:
        _lasting.append(_ask)
    else:
        _CHANGEABLE[_name] = _ask, _set
_fp32: Any = internal("torch._C._get_fp32_precision_getter", lambda *_: None)
_order = internal("torch._C._get_sdp_priority_order", list)


def changeable_settings() -> dict[str, Any]:
    """Return the settings that forward may change for some of its ops, by name."""
    return {name: ask() for name, (ask, _) in _CHANGEABLE.items()}


def lasting_settings() -> tuple[Any, ...]:
    """Return the settings that a replay changes for none of its ops.

    Torch sets the precision of products in several ways, which depend on each other.
    """
    precisions = [_fp32(*pair) for pair in itertools.product(("cuda", "mkldnn"), _PRODUCTS)]
    return (
        _anomaly(), parametrize._cache_enabled, _sparse(), precision(), _cudnn_tf32(),
        _cublas_tf32(), *precisions, *_order(), *(ask() for ask in _lasting),
    )  # fmt: skip


_PRODUCTS = ("all", "conv", "rnn", "matmul")


class Hold:
    """The state that lasts from one part of a call to the next, whichever code carries them out.

    It keeps autocast's cache of cast weights until the point where the recorded run cleared it.
    Autocast clears its cache when the outermost block is left. A replay enters and leaves blocks
    where the mode of its ops changes, which is not exactly where the model does; and when it
    continues as another replay, or as a resumed run, it leaves a block in the middle and enters it
    again. Weights must not be cast twice, because their gradients would be summed in another
    precision.
    """

    # Of the class until they are set: most calls of a small model need neither.
    _is_active = False
    block: Any = None  # the checkpointed block that the call is in (see `checkpoints.py`)

    def take(self) -> None:
        """Keep the cache until `release`."""
        if not self._is_active:
            self._is_active = True
            torch.autocast_increment_nesting()

    def release(self) -> None:
        """Let go of all."""
        if (block := self.block) is not None:
            self.block = None
            block.give_up()
        if self._is_active:
            self.release_casts()

    def release_casts(self) -> bool:
        """Return the cache to the blocks around; if there are none, clear it and return True."""
        if not self._is_active:
            return False
        self._is_active = False
        outermost = torch.autocast_decrement_nesting() == 0
        if outermost:
            forget_casts()
        return outermost


class _Cast:
    """Has autocast in a mode for one type of device, as `torch.autocast` does.

    Each segment of a replay enters it. A `torch.autocast` looks at devices and modes each time,
    which takes several times as long.
    """

    __slots__ = ("_before", "_name")

    def __init__(self, name: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
        self._name = name
        self._before = (
            torch.is_autocast_enabled(name),
            torch.get_autocast_dtype(name),
            torch.is_autocast_cache_enabled(),
        )
        self._set(enabled, dtype, cache)
        torch.autocast_increment_nesting()

    def leave(self) -> None:
        """Restore the mode before."""
        if torch.autocast_decrement_nesting() == 0:
            forget_casts()
        self._set(*self._before)

    def _set(self, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
        torch.set_autocast_enabled(self._name, enabled)
        torch.set_autocast_dtype(self._name, dtype)
        torch.set_autocast_cache_enabled(cache)


class ContextSwitch:
    """Applies recorded contexts during a replay, and restores the original one at its end.

    Autocast is left alone while only the grad mode changes, so that autocast's cache of cast
    weights lives exactly as long as in eager.
    """

    __slots__ = ("_before", "_casts", "_current", "_entry", "_inference")

    def __init__(self) -> None:
        self._entry = self._current = current_context()
        self._casts: list[_Cast] = []
        self._inference: torch.inference_mode | None = None
        self._before: dict[str, Any] = {}

    def to(self, context: Context) -> None:
        """Run the following ops under `context`."""
        current, entry = self._current, self._entry
        if context.settings != current.settings:
            self._set(context.settings)
        if (context.inference, context.autocast) != (current.inference, current.autocast):
            self._leave()
            if context.inference != entry.inference:
                self._inference = torch.inference_mode(context.inference)
                self._inference.__enter__()
            states = context.autocast
            if entry.autocast:
                recorded = {state.device_type for state in states}
                others = (one for one in entry.autocast if one.device_type not in recorded)
                states = (*states, *(one._replace(enabled=False) for one in others))
            for name, enabled, dtype, cache in states:
                now = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
                if (enabled, dtype) != now and (enabled or now[0]):
                    self._casts.append(_Cast(name, enabled, dtype, cache))
        if torch.is_grad_enabled() != context.grad:
            torch._C._set_grad_enabled(context.grad)
        self._current = context

    def _set(self, settings: tuple[tuple[str, Any], ...]) -> None:
        before = self._before or changeable_settings()
        changed, wanted = dict(self._current.settings), dict(settings)
        for name in before:
            if name in wanted or name in changed:
                _CHANGEABLE[name][1](wanted.get(name, before[name]))
        self._before = before

    def restore(self) -> None:
        """Restore the state at the beginning of the replay."""
        if self._current.settings:
            self._set(())
        self._leave()
        if torch.is_grad_enabled() != self._entry.grad:
            torch._C._set_grad_enabled(self._entry.grad)

    def _leave(self) -> None:
        while self._casts:
            self._casts.pop().leave()
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference = None
