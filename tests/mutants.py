"""Drops each check of a replay in turn, and says which of them no test notices.

`python -m tests.mutants` runs tests once for each check, and once for each kind of guard, with that
one dropped: what is asked of captured values, of the model and the world (`engine/check.py`), of
words of memory (`python/versions.py`), and the kinds of guards in a run (`KINDS`). A mutant
that *survives* makes no test fail. Each run stops at the first failure.

    python -m tests.mutants                     the tests of guards, which takes an hour
    python -m tests.mutants check.py            the mutants of one file
    python -m tests.mutants --brief             what the README's command draws today

The rows of docs/guarded.md need no mutants: `tests/test_guarded.py` fails where a row is missing.
It is the plugin of pytest that drops the check named by BENDTRACE_MUTANT.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from bendtrace.engine.check import GuardCode
from bendtrace.engine.source import GeneratedSource
from bendtrace.python.versions import Words
from bendtrace.record.tape_writer import TapeWriter
from bendtrace.tape.guards import KINDS
from bendtrace.tape.tape import Guard

ROOT = Path(__file__).parent.parent
MUTANT = os.environ.get("BENDTRACE_MUTANT", "")
BRIEF = bool(os.environ.get("BENDTRACE_BRIEF"))
# Where checks are written, and what writes one.
FILES = {
    "engine/check.py": re.compile(r"\b(self\.note|_questions\.note|fail_if)\("),
    "python/versions.py": re.compile(r"^ +self\.(add_\w+|_expect|_point)\("),
}
WORDS = re.compile(r"\bwords\.add_\w+\(|map\(words\.add_")
TESTS = ("guarded", "guards", "check", "memory_words", "scan_cache", "slots", "state")
# The helpers that others write checks with.
HELPERS = re.compile(r"\bdef |\bif \{condition\}:")


def mutants() -> Iterator[str]:
    """Yield the name of each: the line that writes a check, or the kind of a guard."""
    for name in KINDS:
        yield f"guard:{name}"
    for file, writes in FILES.items():
        lines = (ROOT / "bendtrace" / file).read_text("utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if not HELPERS.search(line) and (writes.search(line) or WORDS.search(line)):
                yield f"{Path(file).name}:{number}"


def _place(frame: FrameType | None) -> str:
    """Return the line that writes a check: not in a helper of that."""
    while frame is not None and frame.f_code.co_name == "fail_if":
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def drop(mutant: str) -> None:
    """Drop a check in this process."""
    if mutant.startswith("guard:"):
        dropped = KINDS[mutant.removeprefix("guard:")]
        guard = TapeWriter.guard

        def guarded(self: TapeWriter, kind: type[Guard], *rest: Any) -> None:
            if kind is not dropped:
                guard(self, kind, *rest)

        TapeWriter.guard = guarded  # type: ignore[method-assign]
        return
    places: dict[int, str] = {}  # of the checks of the latest run, by their numbers
    note, line = GuardCode.note, GeneratedSource.line

    def noted(self: GuardCode, *args: Any, **kwargs: Any) -> int:
        number = note(self, *args, **kwargs)
        places[number] = _place(sys._getframe(1))
        return number

    def written(self: GeneratedSource, text: str, op: int | None = None) -> None:
        found = re.search(r"return (\d+)$", text)
        if found and places.get(int(found[1])) == mutant:
            text = "pass"
        line(self, text, op)

    GuardCode.note, GeneratedSource.line = noted, written  # type: ignore[method-assign]
    for name in [name for name in vars(Words) if name.startswith(("add_", "_expect", "_point"))]:
        _drop_words(name, mutant)


def _drop_words(name: str, mutant: str) -> None:
    add = getattr(Words, name)

    def added(self: Words, *args: Any) -> None:
        if _place(sys._getframe(1)) != mutant:
            add(self, *args)

    setattr(Words, name, added)


def pytest_configure(config: Any) -> None:
    """Have the cases drawn as by the first command of the README."""
    config.option.brief = BRIEF


def survives(mutant: str, arguments: list[str], is_brief: bool) -> bool:
    """Return whether tests pass without a check."""
    brief = "yes" if is_brief else ""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.mutants", *arguments]
    environment = {**os.environ, "BENDTRACE_MUTANT": mutant, "BENDTRACE_BRIEF": brief}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    return done.returncode == 0


def main() -> None:
    """Try each mutant, and print what becomes of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of files, or of mutants; all of them by default")
    parser.add_argument("--brief", action="store_true", help="as the README's command draws them")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="names of the files of tests")
    options = parser.parse_args()
    tests = [f"tests/test_{name}.py" for name in options.tests]
    left = []
    for mutant in mutants():
        if not options.names or any(name in mutant for name in options.names):
            survived = survives(mutant, tests, options.brief)
            left += [mutant] * survived
            print(mutant, "SURVIVES" if survived else "is noticed", flush=True)
    sys.exit(f"{len(left)} survive: {', '.join(left)}" if left else 0)


if MUTANT:
    drop(MUTANT)
if __name__ == "__main__":
    main()
