"""Settings of Python, of packages and of torch that influence code that names them.

What a setting is set to is no global of the code that asks for it. It is watched where the code of
the user names what reads it, or a package that has it.
"""

from __future__ import annotations

import calendar
import copyreg
import csv
import decimal
import logging
import random
import reprlib
import sys
import time
import warnings
from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch


def _filters(module: Any) -> Any:
    return (*module.filters,)


def _precision(module: Any) -> Any:
    now = module.getcontext()
    return [now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, now.traps.copy()]


def _of_numpy(loaded: Any) -> Any:
    numpy = loaded.modules.get("numpy")
    if numpy is None:
        return []
    printing = numpy.get_printoptions().values()
    return [*numpy.geterr().values(), numpy.geterrcall(), numpy.getbufsize(), *printing]


def _of_pandas(loaded: Any) -> Any:
    config = loaded.modules.get("pandas._config.config")
    found: list[Any] = []
    waiting = [] if config is None else [config._global_config]
    while waiting:
        for value in waiting.pop().values():
            (waiting if isinstance(value, dict) else found).append(value)
    return found


def _numpys_random_state(loaded: Any) -> Any:
    numpy = loaded.modules.get("numpy")
    if numpy is None:
        return []
    kind, words, *others = numpy.random.get_state()
    return [kind, words.tobytes(), *others]


def _of_cuda(module: Any) -> Any:
    products = module.matmul
    return [
        module.cudnn_sdp_enabled(), module.fp16_bf16_reduction_math_sdp_allowed(),
        module.preferred_blas_library(), module.preferred_linalg_library(),
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction, products.allow_fp16_accumulation,
    ]  # fmt: skip


def _used_of_cuda(module: Any) -> Any:
    if not module.is_initialized():
        return [None]
    return [module.current_device(), module.is_current_stream_capturing()]


# What code names, what has the setting, what reads it, and what it is called in messages.
SETTINGS: tuple[tuple[frozenset[str], Any, Callable[[Any], Any], str], ...] = (
    (frozenset({"warn", "warn_explicit"}), warnings, _filters, "warnings.filters"),
    (frozenset({"Decimal", "decimal"}), decimal, _precision, "decimal.getcontext()"),
    (frozenset({"numpy"}), sys, _of_numpy, "a setting of numpy's"),
    (frozenset({"getstate"}), random, lambda module: [module.getstate()], "random.getstate()"),
    (frozenset({"get_state"}), sys, _numpys_random_state, "numpy.random.get_state()"),
    (frozenset({"reprlib"}), reprlib, lambda module: [*vars(module.aRepr).values()],
     "reprlib.aRepr"),
    (frozenset({"calendar"}), calendar, lambda module: [module.firstweekday()],
     "calendar.firstweekday()"),
    (frozenset({"csv", "_csv"}), csv, lambda module: [module.field_size_limit()],
     "csv.field_size_limit()"),
    (frozenset({"time", "datetime"}), time, attrgetter("tzname", "timezone", "altzone", "daylight"),
     "the time zone"),
    (frozenset({"get_verbosity"}), logging,
     lambda module: [module.getLogger("transformers").getEffectiveLevel()], "get_verbosity()"),
    (frozenset({"pandas"}), sys, _of_pandas, "a setting of pandas"),
    (frozenset({"copy", "deepcopy", "pickle"}), copyreg,
     lambda module: [*chain.from_iterable(module.dispatch_table.items())], "copyreg"),
    (frozenset({"opt_einsum"}), torch.backends.opt_einsum,
     lambda module: [module.enabled, module.strategy], "torch.backends.opt_einsum"),
    (frozenset({"get_overwrite_module_params_on_conversion",
                "get_swap_module_params_on_conversion"}), torch.__future__,
     lambda module: [*vars(module).values()], "torch.__future__"),
    (frozenset({"fill_uninitialized_memory"}), torch.utils.deterministic,
     lambda module: [module.fill_uninitialized_memory], "fill_uninitialized_memory"),
    (frozenset({"hub"}), torch.hub, lambda module: [module._hub_dir], "torch.hub.get_dir()"),
    (frozenset({"autocast", "get_autocast_dtype", "get_autocast_cpu_dtype",
                "get_autocast_gpu_dtype"}), torch,
     lambda module: [*map(module.get_autocast_dtype, ("cpu", "cuda"))], "get_autocast_dtype()"),
    (frozenset({"is_warn_always_enabled", "is_anomaly_check_nan_enabled"}), torch,
     lambda module: [module.is_warn_always_enabled(), module.is_anomaly_check_nan_enabled()],
     "is_warn_always_enabled()"),
    (frozenset({"is_multithreading_enabled", "is_view_replay_enabled"}), torch.autograd,
     lambda module: [module.is_multithreading_enabled(), module.is_view_replay_enabled()],
     "a setting of torch.autograd"),
    (frozenset({"engine"}), torch.backends.quantized, lambda module: [module.engine],
     "torch.backends.quantized.engine"),
    (frozenset({
        "cudnn_sdp_enabled", "fp16_bf16_reduction_math_sdp_allowed", "preferred_blas_library",
        "preferred_linalg_library", "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
    }), torch.backends.cuda, _of_cuda, "a setting of torch.backends.cuda"),
    (frozenset({"current_device", "is_current_stream_capturing", "is_initialized"}), torch.cuda,
     _used_of_cuda, "the current device of torch.cuda"),
    (frozenset({"get_sharing_strategy"}), torch.multiprocessing,
     lambda module: [module.get_sharing_strategy()], "get_sharing_strategy()"),
)  # fmt: skip
