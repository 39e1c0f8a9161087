"""The documents of five other libraries, and the code in them, to be run as it stands there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["cells", "fenced", "indented", "prompted", "run", "text"]


def text(name: str) -> str:
    """Return a document."""
    return (Path(__file__).parent / f"{name}.txt").read_text("utf-8")


def fenced(name: str) -> list[str]:
    """Return what is in the fences of a Markdown page that are marked `python`."""
    return re.findall(r"^```python\n(.*?)(?:^```|\Z)", text(name), re.DOTALL | re.MULTILINE)


def indented(name: str) -> list[str]:
    """Return the indented blocks of a Markdown page that define something."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", text(name), re.MULTILINE)
    return [re.sub(r"^ {4}", "", one, flags=re.MULTILINE) for one in blocks if "    class " in one]


def cells(name: str) -> list[str]:
    """Return the code of a notebook's cells: each is followed by what it printed."""
    found = []
    for cell in re.split(r"^In \[\d+\]:\n", text(name), flags=re.MULTILINE)[1:]:
        lines = cell.splitlines()
        found.append(next(code for n in range(len(lines), 0, -1) if is_code(code := _of(lines, n))))
    return found


def _of(lines: list[str], count: int) -> str:
    return "\n".join(lines[:count]) + "\n"


def is_code(code: str) -> bool:
    """Whether something can be read as Python."""
    try:
        compile(code, "", "exec")
    except SyntaxError:
        return False
    return True


def prompted(name: str) -> Iterator[tuple[str, str]]:
    """Yield what was typed at the prompts of IPython sessions, and what was shown."""
    for part in re.split(r"^    In \[\d+\]: ", text(name), flags=re.MULTILINE)[1:]:
        typed, _, rest = part.partition("\n")
        session = re.split(r"^\S", rest, flags=re.MULTILINE)[0]  # up to the text that goes on
        yield typed, _shown(session)


def _shown(session: str) -> str:
    return re.sub(r"^Out\[\d+\]:\s", "", inspect.cleandoc(session)).strip()


def run(code: str, names: dict[str, Any], path: Path) -> dict[str, Any]:
    """Run a script from a file, since what is traced is read from its source."""
    path.write_text(code, "utf-8")
    exec(compile(code, str(path), "exec"), names)
    return names
