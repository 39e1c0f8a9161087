"""The log as a data frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bendtrace._later import required_pandas
from bendtrace.history.entries import LayerEntry

if TYPE_CHECKING:
    import pandas

__all__ = ["data_frame"]


def data_frame(entries: Sequence[LayerEntry]) -> pandas.DataFrame:
    """Return a row for each entry, indexed by label.

    Raises:
        ImportError: pandas is not installed.
    """
    rows = {
        entry.label: {
            "layer_type": entry.layer_type,
            "kind": entry.kind,
            "pass": entry.pass_number,
            "passes": entry.passes,
            "shape": entry.shape,
            "dtype": str(entry.dtype),
            "device": str(entry.device),
            "bytes": entry.nbytes,
            "function": entry.function,
            "grad_fn": entry.grad_fn,
            "module": entry.module,
            "parents": entry.parents,
            "children": entry.children,
            "parameters": sum(use.numel for use in entry.state if use.is_parameter),
            "seconds": entry.time,
            "flops": entry.flops,
            "node_path": entry.node_path,
            "source": None if entry.source is None else str(entry.source),
            "saved": entry.has_contents,
        }
        for entry in entries
    }
    frame = required_pandas().DataFrame.from_dict(rows, orient="index")
    return frame.rename_axis("label")  # type: ignore[no-any-return]
