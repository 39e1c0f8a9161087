"""A plugin for pytest that makes kernels differ where on another processor they might.

`python -m pytest -p tests.nudged` multiplies what each kernel that multiplies matrices gives by a
number near 1, a few steps of rounding off, that depends on the kernel and on the shape of the
result. So a fused kernel and its parts, one product and the same in pieces, or a batch and its
rows one by one have other bits, as they have with some libraries of some processors. A test that
is red with it compares runs that do not take the same kernels.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import pytest
import torch

LIBRARY = pytest.StashKey[torch.library.Library]()
KERNELS = (
    "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_addmm_activation",
    "_scaled_dot_product_flash_attention_for_cpu", "addmm", "baddbmm", "bmm", "mm",
    "mkldnn_convolution", "_slow_conv2d_forward",
)  # fmt: skip


def _nudge(number: int, name: str, library: torch.library.Library) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def nudged(keys: Any, *args: Any, **kwargs: Any) -> Any:
        out = kernel.call_boxed(keys, *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if first.is_floating_point() and first.numel():
            with torch.no_grad():
                steps = 2 * ((math.prod(first.shape) + number) % 7)
                first.mul_(1 + steps * torch.finfo(first.dtype).eps)
        return out

    library.impl(name, nudged, "CPU", with_keyset=True, allow_override=True)


def pytest_configure(config: pytest.Config) -> None:
    """Exchange the kernels; an import alone, as doctests need it, changes nothing."""
    library = config.stash[LIBRARY] = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):
        for number, name in enumerate(KERNELS):
            if name in os.environ.get("NUDGED", name).split(","):
                _nudge(number, name, library)
