"""Places in source files, as people read and write them."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping

# The cells of runs that were loaded: the notebook that they ran in may be gone.
_loaded: dict[str, str] = {}
_WRITTEN = re.compile(r"(.+\.\w+|(?:Cell )?In\[\d+\]|<.+>):(\d+)", re.DOTALL)


def _notebook_cell(file: str) -> str:
    """Return the cell of a notebook that IPython compiled under a file name; "" if none."""
    # IPython is not imported for this: whoever runs in it has imported it. `format_code_name` is
    # public since IPython 8.0; `test_places.py` would notice a change.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    asked = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = None if asked is None else asked(file)
    return " ".join(found) if found else _loaded.get(file, "")


def path_text(file: str) -> str:
    """Return the path of a file, or the cell of a notebook: `Cell In[3]`."""
    return _notebook_cell(file) or file


def file_text(file: str) -> str:
    """Return the name of a file without its folder, or the cell of a notebook: `Cell In[3]`."""
    return _notebook_cell(file) or os.path.basename(file)


def place_text(file: str, line: int | None) -> str:
    """Return the file name and the line: `model.py:12`, `Cell In[3]:7`."""
    return f"{file_text(file)}:{line}"


def full_place_text(file: str, line: int | None) -> str:
    """Return the path and the line: `/home/me/model.py:12`, `Cell In[3]:7`."""
    return f"{path_text(file)}:{line}"


def read_place(text: str) -> tuple[str, int] | None:
    """Return the file and the line of a place as text; None if the text is not a place.

    Example:
        >>> read_place("model.py:41"), read_place("In[3]:7"), read_place("relu_1:2")
        (('model.py', 41), ('Cell In[3]', 7), None)
    """
    found = _WRITTEN.fullmatch(text)
    if found is None:
        return None
    file = found[1]
    return f"Cell {file}" if file.startswith("In[") else file, int(found[2])


def is_file(file: str, asked: str) -> bool:
    """Return whether a file is meant by its path, the end of its path, or its cell."""
    if asked == _notebook_cell(file):
        return True
    file, asked = os.path.normpath(file), os.path.normpath(asked)
    return file == asked or file.endswith(os.sep + asked)


# Of any machine: a run that was loaded has the paths of the one that it ran on.
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package, or to Python, and not to the user."""
    return file.startswith(_STANDARD) or _INSTALLED.search(file) is not None


def cells_among(files: Iterable[str]) -> dict[str, str]:
    """Return the files among some that are cells of a notebook, with their names."""
    found = {file: _notebook_cell(file) for file in files}
    return {file: cell for file, cell in found.items() if cell}


def add_cells(cells: Mapping[str, str]) -> None:
    """Add the cells of a run that was loaded."""
    _loaded.update(cells)
