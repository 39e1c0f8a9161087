"""Each error and warning has a page, which says what its fields are and shows what it says."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest

import bendtrace as bt
from bendtrace.watch import code_facts, intercepts
from tests.documents import ROOT, shown_in

PAGES = ROOT / "docs" / "errors"
CLASSES = bt.errors.__all__
# What makes calls live is not an error; it has pages all the same.
LIVE = sorted(path.name for path in PAGES.glob("live*.md"))
INDEX = PAGES / "index.md"
# A row of the table of messages: how it begins, and the page.
_MESSAGE = re.compile(r"^\| `(.+?)` \| \[.*\]\((\w+\.md)\) \|$", re.MULTILINE)


def page_of(name: str) -> str:
    """Return the name of the page of a class."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() + ".md"


def fields_of(cls: type) -> set[str]:
    """Return the attributes that a class and its bases among the errors give their objects."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__ == bt.errors.__name__ and "__init__" in vars(base):
            code = textwrap.dedent(inspect.getsource(base.__init__))  # type: ignore[misc]
            found |= {
                node.attr
                for node in ast.walk(ast.parse(code))
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_a_page_with_its_fields(name: str) -> None:
    text = (PAGES / page_of(name)).read_text("utf-8")
    assert text.startswith(f"# `{name}`\n")
    assert "**What to do.**" in text or "## What to catch" in text
    section = text.split("\n## Fields\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == fields_of(
        getattr(bt.errors, name)
    )


def test_the_fields_are_those_of_the_docstrings() -> None:
    for name in CLASSES:
        cls = getattr(bt.errors, name)
        told: set[str] = set()
        for base in cls.__mro__:
            if base.__module__ == bt.errors.__name__:
                listed = (inspect.getdoc(base) or "").partition("Attributes:\n")[2]
                told |= set(re.findall(r"^ {4}(\w+):", listed, re.MULTILINE))
        assert told == fields_of(cls), name


def test_there_are_no_other_pages() -> None:
    assert {path.name for path in PAGES.iterdir()} == {
        "index.md", *LIVE, *map(page_of, CLASSES)
    }  # fmt: skip


def test_the_index_lists_all_classes_and_all_pages() -> None:
    text = INDEX.read_text("utf-8")
    assert re.findall(r"^\| \[`(\w+)`\]\((\w+\.md)\) \|", text, re.MULTILINE) == [
        (name, page_of(name)) for name in CLASSES
    ]
    tree = text.split("```{toctree}\n")[1].split("```")[0].split("\n")
    assert {f"{line}.md" for line in tree if line and not line.startswith(":")} == {
        "live.md", *map(page_of, CLASSES)
    }  # fmt: skip


@pytest.mark.parametrize(("beginning", "page"), _MESSAGE.findall(INDEX.read_text("utf-8")))
def test_the_page_shows_a_message_that_begins_so(beginning: str, page: str) -> None:
    parts = map(re.escape, beginning.split("…"))
    pattern = re.compile(".+".join(parts))
    assert any(map(pattern.match, shown_in(PAGES / page))), beginning


def test_each_page_is_among_those_of_the_messages() -> None:
    named = {page for _, page in _MESSAGE.findall(INDEX.read_text("utf-8"))}
    others = {"index.md", "live.md", "bendtrace_error.md"}
    assert named == {path.name for path in PAGES.iterdir()} - others


def reasons() -> Iterator[tuple[str, str]]:
    """Yield a piece of each reason to run live that stands in the source, and where."""
    for path in sorted((ROOT / "bendtrace").rglob("*.py")):
        text = path.read_text("utf-8")
        if ".block(" not in text and ".unseen(" not in text:
            continue  # parsing all of it takes seconds
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("block", "unseen")
                and node.args
            ):
                pieces = [
                    part.value
                    for part in ast.walk(node.args[0])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                if pieces:
                    yield max(pieces, key=len).strip(" ,({"), f"{path.name}:{node.lineno}"
    for text in {
        *code_facts.UNDETECTABLE.values(),
        *(what for _, _, what in intercepts._UNFOLLOWED),
    }:
        yield text, "a table"


def test_the_pages_on_live_runs_are_listed() -> None:
    text = (PAGES / "live.md").read_text("utf-8")
    assert {"live.md", *re.findall(r"\]\((live_\w+\.md)\) \|", text)} == set(LIVE)


def test_the_pages_on_live_runs_have_every_reason() -> None:
    text = "".join((PAGES / name).read_text("utf-8") for name in LIVE)
    found = list(reasons())
    assert len(found) > 30
    assert [(piece, place) for piece, place in found if piece not in text] == []
