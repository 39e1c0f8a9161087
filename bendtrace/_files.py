"""Inputs from files: tensors and plain values, read without running anything."""

from __future__ import annotations

import os
import pickle
import warnings
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

import torch

from bendtrace.errors import InputError

__all__ = ["is_tensor_file", "load"]

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"


def is_tensor_file(text: str) -> bool:
    """Whether a text is the name of a file that `load` would take."""
    return text.endswith((*_TORCH_FILES, _SAFETENSORS))


def load(path: str) -> Any:
    """Read a file of tensors onto the CPU.

    Args:
        path: a file of `torch.save`, or a safetensors file, which gives a dict of tensors.

    Raises:
        InputError: if there is no such file, or it holds more than tensors and plain values.
    """
    path = os.path.expanduser(path)
    if not is_tensor_file(path):
        kinds = ", ".join((*_TORCH_FILES, _SAFETENSORS))
        raise InputError(f"cannot load {path!r}: its name has to end in one of {kinds}")
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path!r}{_hint(path)}")
    return _load_safetensors(path) if path.endswith(_SAFETENSORS) else _load_torch(path)


def _hint(path: str) -> str:
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f": there is no folder {folder!r}"
    near = get_close_matches(name, filter(is_tensor_file, os.listdir(folder or ".")), n=3)
    return f"; did you mean {', '.join(os.path.join(folder, n) for n in near)}?" if near else ""


def _load_torch(path: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # about other versions of pickle
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path!r} was not loaded: it holds more than tensors and plain values, or is damaged,"
            " and loading it could run code; save the tensors alone, with torch.save"
        ) from None
    except Exception as error:
        reason = shorten(str(error), 200, placeholder=" ...") or type(error).__name__
        raise InputError(f"cannot load {path!r}, it may be damaged: {reason}") from None


def _load_safetensors(path: str) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise InputError(
            f"reading {path!r} takes the safetensors package: pip install bendtrace[safetensors]"
        ) from None
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise InputError(f"cannot load {path!r}, it may be damaged: {error}") from None
    return tensors
