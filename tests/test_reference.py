"""The reference has a page for each class that people meet, and lists every public name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bendtrace as bt
from bendtrace import _public
from tests.documents import ROOT

pytest.importorskip("sphinx", reason="needs the docs extra")
sys.path.append(str(ROOT / "docs"))
import reference_pages

sys.path.pop()
PAGES = ROOT / "docs" / "reference"
LISTED = re.compile(r"^\.\. public:: ([\w.]+)\n((?:\n|   [\w ]+\n)*)", re.MULTILINE)


def listed() -> dict[str, set[str]]:
    """Return the names that pages list, by module; none for a module that is listed whole."""
    found: dict[str, set[str]] = {}
    for page in PAGES.glob("*.md"):
        for module, names in LISTED.findall(page.read_text("utf-8")):
            found.setdefault(module, set()).update(names.split())
    return found


def test_each_public_module_is_listed() -> None:
    assert set(listed()) == set(reference_pages.MODULES) - {"bendtrace.compat"}
    assert listed()["bendtrace"] == set(bt.__all__) - set(_public.MODULES)


@pytest.mark.more
def test_what_methods_return_has_a_page(tmp_path: Path) -> None:
    reference_pages.write_pages(tmp_path)
    pages = {path.stem for path in tmp_path.iterdir()}
    x = torch.ones(2, requires_grad=True)
    trace = bt.trace(lambda x: x * 2 if x.sum() > 0 else x, x, save="none")
    bended = bt.BendedModule(lambda x: x * 2)
    met: list[Any] = [
        trace, trace.guards, trace.guards[0], trace.ops[0], trace.tree.mul, trace.draw(),
        trace.backward(gradients=torch.ones(2)),
        bended.tree, bended.stats, bended.coverage(), bt.diff(trace, trace),
    ]  # fmt: skip
    for thing in met:
        # Each kind of guard is described as a guard.
        names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(thing).__mro__[:3]]
        found = [reference_pages.documented_as().get(name) for name in names]
        assert not pages.isdisjoint(found), names


@pytest.mark.more
def test_each_class_that_is_only_returned_is_listed() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES.glob("*.md"))
    for module, names in reference_pages.classes().items():
        public = {f"{module}.{name}" for name in reference_pages.names_of(module)}
        if names.keys() - public:
            assert f".. returned:: {module}\n" in text, module
