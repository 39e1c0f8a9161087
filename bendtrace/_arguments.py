"""The arguments of a call: whether the model takes them, and what they are, in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from bendtrace.errors import InputError
from bendtrace.recording.run import Signature

__all__ = ["check", "describe"]


def check(model: Callable[..., Any], args: Any, kwargs: Any, target: str) -> None:
    """Raise if a call does not fit the signature.

    Args:
        model: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        target: what to call the model.

    Raises:
        InputError: there are too many arguments, too few, or others.
    """
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # builtins
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise InputError(f"{target} takes ({takes}): {error}") from None


def describe(model: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, str]:
    """Return what each argument is, by name."""
    bound = Signature(model).bind(args, kwargs)
    return {name: _described(value) for name, value in bound.items()}


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value:
        inner = ", ".join(map(_described, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_described(item)}" for key, item in value.items()) + "}"
    return shorten(repr(value), 40, placeholder="...")
