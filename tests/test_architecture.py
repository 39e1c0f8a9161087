"""Dependencies run one way, as the map of the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bendtrace.insert.live_runner import AS_ONE
from bendtrace.python.sites import MACHINERY
from tests.documents import ROOT

PACKAGE = ROOT / "bendtrace"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def rows() -> list[list[str]]:
    """Return the units of each row of the map, from the bottom up."""
    table = PAGE.split("## The map")[1].split("\n## ")[0]
    firsts = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    return [re.findall(r"`([\w./]+)`", first) for first in reversed(firsts)]


PLACE = {unit.strip("/"): number for number, row in enumerate(rows()) for unit in row}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node that are run, and not those for types alone."""
    is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    for part in ("orelse", "finalbody", "handlers", "cases", *([] if is_for_types else ["body"])):
        for inner in getattr(node, part, ()):
            yield inner
            yield from statements(inner)


def imports(path: Path) -> Iterator[str]:
    """Yield the units that a file imports when it runs."""
    for node in statements(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        package, _, rest = node.module.partition(".")
        if package == "bendtrace":
            for name in [rest.partition(".")[0]] if rest else [alias.name for alias in node.names]:
                yield name if (PACKAGE / name).is_dir() else f"{name}.py"


FILES = sorted(PACKAGE.rglob("*.py"))


def test_files_import_only_what_stands_below_them_on_the_map() -> None:
    wrong = [
        f"{path} imports {other}"
        for path in FILES
        if (unit := unit_of(path)) != "__init__.py"  # has the names only
        for other in imports(path)
        if other != unit and PLACE[other] >= PLACE[unit]
    ]
    assert not wrong


def test_the_map_has_every_unit_once() -> None:
    units = [unit for row in rows() for unit in row]
    there = {unit_of(path) for path in FILES} - {"__init__.py"}
    assert sorted(unit.strip("/") for unit in units) == sorted(there)
    assert all((PACKAGE / unit).is_dir() == unit.endswith("/") for unit in units)


ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("room", [PACKAGE, *ROOMS], ids=lambda room: room.name)
def test_the_files_that_a_description_names_are_there(room: Path) -> None:
    text = PAGE if room == PACKAGE else (room / "__init__.py").read_text("utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert named or room.name == "compat"  # has names of other libraries
    places = [room, PACKAGE, ROOT]
    if room == PACKAGE:
        places += ROOMS  # a row of the map names the files of its room
    assert [name for name in sorted(named) if not any((p / name).exists() for p in places)] == []


NAMED_IN_FILE = re.compile(r"`([A-Z_]\w+)`\s+\(`([\w/]+\.py)`\)")


@pytest.mark.each
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_the_classes_that_a_description_names_are_in_their_files(room: Path) -> None:
    """It writes `Floor` (`floor.py`), or with the folder for a file in another room."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
    wrong = []
    for name, file in NAMED_IN_FILE.findall(text):
        files = [path for path in (room / file, PACKAGE / file) if path.exists()]
        defines = re.compile(rf"^(class {name}\b|def {name}\b|{name}\b)", re.MULTILINE)
        if not any(defines.search(path.read_text("utf-8")) for path in files):
            wrong.append(f"{name} in {file}")
    assert wrong == []


def test_there_are_twelve_rooms() -> None:
    assert len(ROOMS) <= 12


def test_the_places_by_which_frames_are_told_apart_are_there() -> None:
    assert [place for place in (*MACHINERY, *AS_ONE) if not Path(place).exists()] == []
