"""Running the examples of a Markdown page.

The blocks of a page that are marked `python` are one script, named after the page. What it prints
is in the blocks without a mark, in order. Whatever else is in a fence has another mark.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["PAGES", "ROOT", "code_of", "is_run", "name_of", "printed", "shown_in"]

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
_BLOCK = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1$", flags=re.DOTALL | re.MULTILINE)
_SCRIPTS = {"README.md": "refine.py", "diff.md": "refine.py"}  # as their tables call it


def name_of(page: Path) -> str:
    """Return how a page is called in tests."""
    return page.relative_to(ROOT).as_posix()


def _blocks(page: Path) -> list[tuple[str, str]]:
    return [(mark.strip(), body) for _, mark, body in _BLOCK.findall(page.read_text("utf-8"))]


def is_run(page: Path) -> bool:
    """Whether there is anything to run."""
    return any(mark == "python" for mark, _ in _blocks(page))


def code_of(page: Path) -> str:
    """Return the script that a page is."""
    return "".join(body for mark, body in _blocks(page) if mark == "python")


def shown_in(page: Path) -> list[str]:
    """Return the lines that a page says are printed."""
    return "".join(body for mark, body in _blocks(page) if mark == "").splitlines()


def printed(page: Path, folder: Path) -> list[str]:
    """Run the script that a page is in a folder, and return the lines that it prints.

    Raises:
        AssertionError: if it fails.
    """
    name = _SCRIPTS.get(page.name, f"{page.stem}.py")
    (folder / name).write_text(code_of(page), "utf-8")
    done = subprocess.run(
        [sys.executable, "-P", name],
        cwd=folder, capture_output=True, encoding="utf-8", check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONIOENCODING": "utf-8", "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.rstrip() for line in done.stdout.replace(f"{folder}/", "").splitlines()]
