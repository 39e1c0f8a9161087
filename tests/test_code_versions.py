"""What code can reach is looked for anew when what it names stands for other code."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python.versions import CodeVersion, Depends
from bendtrace.watch import reachability
from bendtrace.watch.reachability import reachable_from

FIRST, OTHER = 2.0, 3.0
HERE = sys.modules[__name__]


def by_first(x: Tensor) -> Tensor:
    return x * FIRST


def by_other(x: Tensor) -> Tensor:
    return x * OTHER


helper: Callable[[Tensor], Tensor] = by_first
late: Callable[[Tensor], Tensor] | None
tools = types.ModuleType("some_tools")
vars(tools).update(helper=by_first)
sys.modules["some_tools"] = tools


class Uses:
    """A helper object."""

    def apply(self, x: Tensor) -> Tensor:
        return by_first(x)

    @property
    def factor(self) -> float:
        return FIRST


class UsesOther(Uses):
    def apply(self, x: Tensor) -> Tensor:
        return by_other(x)


class Deriving(Uses):
    pass


made_of: type[Uses] = Uses


def through_global(x: Tensor) -> Tensor:
    return helper(x)


def through_module(x: Tensor) -> Tensor:
    return tools.helper(x)


def through_import(x: Tensor) -> Tensor:
    from some_tools import helper as imported

    return imported(x)


def through_class(x: Tensor) -> Tensor:
    return made_of().apply(x)


def through_import_of_more(x: Tensor) -> Tensor:
    import more_tools  # type: ignore[import-not-found]

    return more_tools.helper(x)


def through_name_that_comes_late(x: Tensor) -> Tensor:
    try:
        return late(x)  # type: ignore[misc]
    except NameError:
        return by_first(x)


def through_what_a_builtin_was(x: Tensor) -> Tensor:
    return by_first(abs(x))


def closing(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def close(x: Tensor) -> Tensor:
        return inner(x)

    return close


close = closing(by_first)


def through_cell(x: Tensor) -> Tensor:
    return close(x)


class Module(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        return by_first(x)


CHANGES: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "a global function": (through_global, lambda patch: patch.setattr(HERE, "helper", by_other)),
    "a module's": (through_module, lambda patch: patch.setattr(tools, "helper", by_other)),
    "an imported one": (through_import, lambda patch: patch.setattr(tools, "helper", by_other)),
    "a class": (through_class, lambda patch: patch.setattr(HERE, "made_of", UsesOther)),
    "a method": (through_class, lambda patch: patch.setattr(Uses, "apply", UsesOther.apply)),
    "a cell": (
        through_cell,
        lambda patch: patch.setattr(close.__closure__[0], "cell_contents", by_other),  # type: ignore[index]
    ),
    "a module's method": (
        Module(), lambda patch: patch.setattr(Module, "inside", lambda self, x: by_other(x))
    ),
    "code": (
        through_global, lambda patch: patch.setattr(by_first, "__code__", by_other.__code__)
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_only_the_new_code_reads_is_guarded(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, exchange = CHANGES[change]
    bended, x = bt.BendedModule(function), torch.ones(2)
    for _ in range(2):
        assert torch.equal(bended(x), function(x))
    exchange(monkeypatch)
    for _ in range(2):
        assert torch.equal(bended(x), function(x))
    before = function(x)
    monkeypatch.setattr(HERE, "OTHER", 5.0)
    assert not torch.equal(function(x), before), "the new code reads it"
    for _ in range(2):
        assert torch.equal(bended(x), function(x))


LATER: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "a property": (
        Uses,
        lambda patch: patch.setattr(Uses, "factor", property(lambda self: OTHER)),
    ),
    "a name that comes late": (
        through_name_that_comes_late,
        lambda patch: patch.setattr(HERE, "late", by_other, raising=False),
    ),
    "a builtin": (
        through_what_a_builtin_was,
        lambda patch: patch.setattr(HERE, "abs", by_other, raising=False),
    ),
    "a module that is imported": (
        through_import_of_more,
        lambda patch: patch.setitem(sys.modules, "more_tools", tools),
    ),
}


@pytest.mark.parametrize("change", LATER)
def test_what_comes_later_is_found(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, exchange = LATER[change]
    named = frozenset({"factor", "forward"})
    before = reachable_from(subject, named)
    assert reachable_from(subject, named) is before
    assert "OTHER" not in before.names
    exchange(monkeypatch)
    assert "OTHER" in reachable_from(subject, named).names or change == "a module that is imported"
    assert reachable_from(subject, named) is not before


def test_classes_with_other_bases_are_searched_anew() -> None:
    before = reachable_from(Deriving, frozenset({"apply"}))
    assert "OTHER" not in before.names
    Deriving.__bases__ = (UsesOther,)
    try:
        assert "OTHER" in reachable_from(Deriving, frozenset({"apply"})).names
    finally:
        Deriving.__bases__ = (Uses,)
    assert "OTHER" not in reachable_from(Deriving, frozenset({"apply"})).names


def test_what_code_reaches_is_kept_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reachable_from(through_global)
    assert reachable_from(through_global) is found
    monkeypatch.setattr(HERE, "FIRST", 7.0)  # data, not code
    assert reachable_from(through_global) is found
    monkeypatch.setattr(HERE, "FIRST", by_other)
    anew = reachable_from(through_global)
    assert anew is not found
    assert by_other in anew.functions


def test_a_stamp_of_several_searches_holds_as_long_as_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depends = Depends()
    for function in (through_global, through_module, through_class):
        depends.add(reachable_from(function).depends)
    stamp = CodeVersion(depends)
    assert stamp.holds()
    with monkeypatch.context() as patch:
        patch.setattr(tools, "helper", by_other)
        assert not stamp.holds()
    assert stamp.holds()
    with monkeypatch.context() as patch:
        patch.delattr(HERE, "helper")
        assert not stamp.holds()
    assert stamp.holds()


def test_functions_that_are_made_anew_are_not_kept() -> None:
    known = len(reachability._kept)
    reachable_from(closing(by_first))
    reachable_from(functools.partial(closing, by_first)())
    assert len(reachability._kept) == known


class Describing(nn.Module):
    @property
    def by_property(self) -> float:
        return 2.0

    @staticmethod
    def by_static(x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def by_class(cls, x: Tensor) -> Tensor:
        return x * 2

    class Nested:
        factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.by_static(x) * self.by_property * self.Nested.factor + self.by_class(x)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("by_property", property(lambda self: 3.0)),
        ("by_static", staticmethod(lambda x: x * 3)),
        ("by_class", classmethod(lambda cls, x: x * 3)),
        ("Nested", type("Nested", (), {"factor": 3.0})),
    ],
)
def test_exchanged_descriptors_are_seen(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Describing(), torch.ones(2)
    bended = bt.BendedModule(model)
    for _ in range(2):
        assert torch.equal(bended(x), model(x))
    monkeypatch.setattr(Describing, name, value)
    for _ in range(2):
        assert torch.equal(bended(x), model(x))
