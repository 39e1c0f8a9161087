"""Trying what is compiled, as paths and segments do: states, errors, times."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

__all__ = ["Failed", "Quiet", "State", "now", "unmark"]

_LONGEST = 500  # letters of a reason


class State(Enum):
    """What becomes of what was compiled."""

    MEASURED = "being measured"
    USED = "used"
    DEMOTED = "demoted"
    SLOWER = "slower"
    REFUSED = "not compiled"


class Failed:
    """An error of compiled code, or of its compiler.

    Attributes:
        reason: what it says, in a line.
        is_final: whether the compiler raised it, which would do so again.
        is_of_backend: whether it was the backend itself that failed.
    """

    def __init__(self, error: Exception) -> None:
        kind = type(error)
        inner = getattr(error, "inner_exception", None) or error
        lines = str(inner).strip().splitlines()
        why = [line.rpartition(": got ")[2].strip() for line in lines if "Explanation:" in line]
        said = "; ".join([*lines[:1], *why[:1]])[:_LONGEST]
        self.reason = f"{type(inner).__name__}: {said}"
        self.is_final = kind.__module__.startswith(_COMPILERS)
        # A size that depends on values is the model's doing, wherever it is found in the way.
        is_of_model = type(inner).__module__.startswith("torch.fx.experimental")
        self.is_of_backend = kind.__name__ in _OF_BACKENDS and self.is_final and not is_of_model
        if self.is_final and kind.__name__ == "FailOnRecompileLimitHit":
            self.reason = (
                "torch.compile compiles a function for so many sets of sizes only "
                "(torch._dynamo.config.recompile_limit), and these were more"
            )


class Quiet:
    """Within it, torch does not log why it could not compile something: the report says it.

    Unless somebody wants to see torch's logs.
    """

    def __init__(self) -> None:
        names = () if "TORCH_LOGS" in os.environ else _LOGGERS
        self._loggers = [logging.getLogger(name) for name in names]

    def __enter__(self) -> None:
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.setLevel(level)


def unmark(values: Iterable[Any]) -> None:
    """Take off what torch.compile notes on tensors: which of their sizes are dynamic."""
    for value in values:
        if isinstance(value, Tensor) and value.__dict__:
            value.__dict__.pop(_MARK, None)


def now(arguments: Iterable[Any]) -> float:
    """Return the time, after what runs on a GPU has come to its end if arguments are on one."""
    if any(isinstance(value, Tensor) and value.is_cuda for value in arguments):
        torch.cuda.synchronize()
    return time.perf_counter()


# Set on results, seen in torch 2.13 to 2.15; test_compiled_corpus.py would notice another name.
_MARK = "_dynamo_propagated_dynamic_indices"
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
_LOGGERS = (
    "torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip
_OF_BACKENDS = ("BackendCompilerFailed", "InductorError", "InvalidCxxCompiler")
