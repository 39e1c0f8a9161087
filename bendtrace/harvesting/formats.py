"""The formats of files that a harvest can be written in."""

from __future__ import annotations

from bendtrace.errors import InputError
from bendtrace.harvesting.shards import Form
from bendtrace.harvesting.tensor_files import SafetensorsForm
from bendtrace.harvesting.zarr_files import ZarrForm

__all__ = ["form_of"]


def form_of(name: str) -> Form:
    """Return the format of a name.

    Raises:
        InputError: there is none, or it needs something that is not installed.
    """
    if name == "safetensors":
        return SafetensorsForm()
    if name == "zarr":
        return ZarrForm()
    raise InputError(f"format= is 'safetensors' or 'zarr', not {name!r}")
