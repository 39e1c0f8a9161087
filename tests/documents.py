"""Running the examples of a Markdown page.

The blocks of a page that are marked `python` are one script, named after the page. What it prints
is in the blocks without a mark, in order. Whatever else is in a fence has another mark. A page that
needs other packages than bendtrace names them below its title, as `needs` reads it.

`python -m tests.documents PAGE ...` runs pages in the environment as it is.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = [
    "PAGES", "ROOT", "blocks", "code_of", "is_run", "name_of", "needs", "printed", "run_forked",
    "shown_in",
]  # fmt: skip

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
_BLOCK = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1$", flags=re.DOTALL | re.MULTILINE)
# Which kernels torch takes.
_KERNELS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
_NEEDS = re.compile(r"\A# [^\n]*\n\nThe code on this page also needs `pip install ([^`\n]+)`\.\n")
_SCRIPTS = {"README.md": "refine.py", "diff.md": "refine.py"}  # as their tables call it


def name_of(page: Path) -> str:
    """Return how a page is called in tests."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the mark and the text of each block."""
    return [(mark.strip(), body) for _, mark, body in _BLOCK.findall(page.read_text("utf-8"))]


def is_run(page: Path) -> bool:
    """Whether there is anything to run."""
    return any(mark == "python" for mark, _ in blocks(page))


def code_of(page: Path) -> str:
    """Return the script that a page is."""
    return "".join(body for mark, body in blocks(page) if mark == "python")


def shown_in(page: Path) -> list[str]:
    """Return the lines that a page says are printed."""
    return "".join(body for mark, body in blocks(page) if mark == "").splitlines()


def needs(text: str) -> list[str]:
    """Return the packages that a page with this text says it needs besides bendtrace."""
    found = _NEEDS.match(text)
    return found[1].split() if found else []


def _script(page: Path, folder: Path) -> str:
    """Write the script that a page is to a folder; return its name."""
    name = _SCRIPTS.get(page.name, f"{page.stem}.py")
    (folder / name).write_text(code_of(page), "utf-8")
    return name


def _lines(folder: Path) -> list[str]:
    text = (folder / "stdout").read_text("utf-8")
    return [line.rstrip() for line in text.replace(f"{folder}/", "").splitlines()]


def printed(page: Path, folder: Path, hidden: Iterable[str] = ()) -> list[str]:
    """Run the script that a page is in a folder, and return the lines that it prints.

    The modules that it imported are in the file `modules` of the folder.

    Args:
        page: the page.
        folder: the folder.
        hidden: modules that it cannot import.

    Raises:
        AssertionError: if it fails.
    """
    name = _script(page, folder)
    modules = "torch", *re.findall(r"^(?:import|from) (transformers)\b", code_of(page), re.M)[:1]
    assert not run_forked(folder, name, modules, hidden), (folder / "stderr").read_text("utf-8")
    return _lines(folder)


def run_forked(
    folder: Path, name: str, modules: Iterable[str] = ("torch",), hidden: Iterable[str] = ()
) -> int:
    """Run a script that is in a folder, where some modules are imported; return its exit status.

    What it prints is in the files `stdout` and `stderr` of the folder.
    """
    return _server(tuple(modules), frozenset(hidden))(folder, name)


# Importing torch takes longer than most pages do. So one process imports it, and each page is run
# in a fork of that, which is else as `python -P page.py` in a folder of its own.
_SERVING = """
import importlib, multiprocessing.process, os, runpy, sys, traceback
from importlib.machinery import PathFinder
hidden = set(sys.argv[1].split())
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
for name in sys.argv[2:]:
    importlib.import_module(name)
for line in sys.stdin:
    folder, name = line.rstrip("\\n").split("\\t")
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.environ["HOME"] = multiprocessing.process.ORIGINAL_DIR = folder
    sys.argv, sys.stdin = [name], open(os.devnull)
    runpy.run_path(name, run_name="__main__")
    open("modules", "w").write("\\n".join(sys.modules))
    break
"""


@functools.cache
def _server(modules: tuple[str, ...], hidden: frozenset[str]) -> Callable[[Path, str], int]:
    """Return what runs a script in a folder, in a process where some modules are imported."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVING, " ".join(sorted(hidden)), *modules],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
        env={
            "PYTHONPATH": str(ROOT), "PATH": "", "PYTHONIOENCODING": "utf-8",
            **{name: os.environ[name] for name in _KERNELS if name in os.environ},
        },
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def run(folder: Path, name: str) -> int:
        requests.write(f"{folder}\t{name}\n")
        requests.flush()
        return int(answers.readline())

    atexit.register(process.wait)
    atexit.register(requests.close)  # after which it ends; called first
    return run


def main(names: Iterable[str]) -> None:
    """Run pages with what is installed, which has to print what they show, and no warnings.

    Raises:
        AssertionError: if one does not.
    """
    for name in names:
        page = ROOT / name
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as errors:
                command = [sys.executable, "-P", _script(page, folder)]
                subprocess.run(command, cwd=folder, stdout=out, stderr=errors, check=False)
            assert not (said := (folder / "stderr").read_text("utf-8")), said
            assert _lines(folder) == shown_in(page), _lines(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
