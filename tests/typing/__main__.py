"""What type checkers say: of examples that are right and wrong, of pages, and of all public names.

Run by `python -m tests.typing`; the checkers are in the extra `dev`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.documents import ROOT, code_of

# How much of what is public has a type that is known, as `pyright --verifytypes` counts it.
FLOOR = 0.97
PAGES = ("README.md", "docs/tutorial.md")
HERE = Path(__file__).parent


def main() -> int:
    """Run all checks, and return how many of them failed."""
    with tempfile.TemporaryDirectory() as folder:
        pages = []
        for number, page in enumerate(PAGES):
            pages.append(str(Path(folder, f"page_{number}_{Path(page).stem.lower()}.py")))
            Path(pages[-1]).write_text(code_of(ROOT / page), "utf-8")
        examples = sorted(map(str, HERE.glob("*.py")))
        failed = [
            name
            for name, command in (
                ("mypy on the examples", ["mypy", *examples]),
                # Their models have no annotations, as those of most people.
                (
                    "mypy on README and tutorial",
                    ["mypy", "--allow-untyped-defs", "--allow-incomplete-defs", *pages],
                ),
                ("pyright on the examples", ["pyright", *examples]),
            )
            if not passes(name, command)
        ]
    return len(failed) + (not is_typed())


def passes(name: str, command: list[str]) -> bool:
    """Run a checker on this code, and return whether it finds nothing."""
    print(f"-- {name}", flush=True)
    return not run(*command).returncode


def is_typed() -> bool:
    """Return whether enough of what is public has a known type; print the rest if not."""
    options = ("--verifytypes", "bendtrace", "--ignoreexternal", "--outputjson")
    found = json.loads(run("pyright", *options, pipe=True).stdout)["typeCompleteness"]
    share = found["completenessScore"]
    print(f"-- pyright --verifytypes bendtrace: {share:.1%}, at least {FLOOR:.0%} is needed")
    if share >= FLOOR:
        return True
    for symbol in found["symbols"]:
        if symbol["isExported"] and symbol["diagnostics"]:
            said = " ".join(symbol["diagnostics"][0]["message"].split())
            print(f"{symbol['name']}: {said}")
    return False


def run(checker: str, *arguments: str, pipe: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a checker that is installed beside this Python, on this checkout's package."""
    # pyright asks the first `python` of the path what is installed; with `--verifytypes`, it heeds
    # no option for that.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        [sys.executable, "-m", checker, *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        text=True,
        check=False,
        stdout=subprocess.PIPE if pipe else None,
    )


if __name__ == "__main__":
    sys.exit(main())
