"""What interactive shells complete."""

from __future__ import annotations

import itertools
import operator
import rlcompleter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace import _public


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    bended = bt.BendedModule(model)
    bended(torch.ones(1, 2))
    return {"bended": bended, "trace": bt.trace(model, torch.ones(1, 2))}


def by_python(text: str, names: dict[str, Any]) -> list[str]:
    completer = rlcompleter.Completer(names)
    found = itertools.takewhile(bool, (completer.complete(text, n) for n in itertools.count()))
    return [str(name).rpartition(".")[2] for name in found]


def by_ipython(text: str, names: dict[str, Any], use_jedi: bool) -> list[str]:
    completer = pytest.importorskip("IPython.core.completer", reason="IPython completes")
    made = completer.IPCompleter(namespace=names, global_namespace={})
    made.use_jedi = use_jedi
    with completer.provisionalcompleter():
        return [c.text.lstrip(".") for c in made.completions(text, len(text))]


TREE = ["input", "output", "sub_0", "sub_1"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("trace.tree.", TREE),
        ("trace.tree.s", ["sub_0", "sub_1"]),
        ("trace.tree.sub_1.", ["input", "output", "relu"]),
        ("bended.traces[0].tree.", TREE),
    ],
)
def test_a_tree_completes_its_nodes(text: str, wanted: list[str], names: dict[str, Any]) -> None:
    if "[" not in text:  # which Python does not evaluate
        assert sorted(by_python(text, names)) == wanted
    assert sorted(by_ipython(text, names, use_jedi=True)) == wanted


def test_a_tree_completes_where_nothing_is_inferred(names: dict[str, Any]) -> None:
    assert sorted(by_ipython("trace.tree.", names, use_jedi=False)) == TREE
    found = by_ipython('trace.tree["', names, use_jedi=False)
    assert {"sub_1", "sub_1.relu"} <= set(found)


@pytest.mark.more
def test_a_loaded_log_completes_its_tree(names: dict[str, Any], tmp_path: Path) -> None:
    names["trace"].save(tmp_path / "run")
    loaded = {"log": bt.load(tmp_path / "run")}
    assert sorted(by_python("log.tree.", loaded)) == TREE
    assert sorted(by_ipython("log.tree.", loaded, use_jedi=True)) == TREE


@pytest.mark.parametrize(
    "name",
    [*_public.MODULES, *(f"compat.{name}" for name in _public.COMPAT)],
)
def test_public_modules_complete_public_names_only(name: str) -> None:
    module = operator.attrgetter(name)(bt)
    wanted = sorted(_public.COMPAT if name == "compat" else module.__all__)
    assert sorted(n.rstrip("()") for n in by_python(f"bt.{name}.", {"bt": bt})) == wanted


def test_a_tree_is_made_when_it_is_looked_at(names: dict[str, Any]) -> None:
    trace = bt.trace(nn.ReLU(), torch.ones(1))
    assert "tree" not in vars(trace._run)
    assert list(trace.tree) == ["input", "relu", "output"]
    assert trace.tree == trace.tree.relu._tree.root
