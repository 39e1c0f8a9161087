"""Arrays of numpy in the state of a model: what is followed, and what is not.

Programs with such arrays are in `tests/registry/state_arrays.py`.
"""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine import program
from bendtrace.python.results import can_exchange_operands
from bendtrace.record.array_functions import ArrayFunction
from bendtrace.record.arrays import Arrays
from bendtrace.watch.open_arrays import is_tied, is_unshared
from tests.promise import bits

pytestmark = pytest.mark.skipif(
    not can_exchange_operands(), reason="this Python does not show operands"
)


class Part:
    def __init__(self) -> None:
        self.row = np.zeros(3)

    def add(self, x: Tensor) -> float:
        self.row += x.detach().double().numpy()
        return float(self.row.sum())


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = np.zeros(3)
        self.rows = [np.zeros(3)]
        self.part = Part()
        self.total: Any = self.row.sum
        self.filled: Any = functools.partial(np.sum, self.row)
        self.put: Any = functools.partial(np.put, self.row, 1)
        self.polynomial = np.poly1d([1.0, 2.0])
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


def stream(
    forward: Callable[[Any, Tensor], Any],
    change: Callable[[Any, int], object] = lambda model, number: None,
    calls: int = 24,
) -> bt.BendedModule:
    """Compare calls with the model's own, and what they leave; return what has served them."""
    kind = type("Model", (Holds,), {"forward": forward})
    models = kind(), kind()
    bended = bt.BendedModule(models[1])
    for number, x in enumerate(torch.randn(calls, 3, generator=torch.Generator().manual_seed(0))):
        found = []
        for model, call in zip(models, (models[0], bended), strict=True):
            change(model, number)
            with torch.no_grad():
                out = call(x.clone())
            arrays = (model.row, model.rows[0], model.part.row)
            found.append(bits([out, [torch.tensor(one.copy()) for one in arrays]]))
        assert found[0] == found[1], number
    return bended


def counts(self: Holds, x: Tensor) -> Tensor:
    self.row[0] += 1
    return x * float(self.row[0])


def in_a_list(self: Holds, x: Tensor) -> Tensor:
    self.rows[0][:] = x.numpy()
    return x * float(sum(self.rows)[1])


def in_an_object(self: Holds, x: Tensor) -> Tensor:
    return x * self.part.add(x)


def replaced(self: Holds, x: Tensor) -> Tensor:
    before = self.row
    self.row = self.row * 0.5 + x.numpy()
    return x * float(before[0]) if x[0] > 0 else x * float(self.row[0])


def counts_sides(self: Holds, x: Tensor) -> Tensor:
    side = 1 if x.sum() > 0 else 2
    self.row[side] += 1
    self.rows[0][side] = x.mean().item()
    return x * side


def keeps_the_greatest(self: Holds, x: Tensor) -> Tensor:
    most = np.max(x.numpy())
    self.row[0] = most
    x = x * 2 if x[0] > 0 else x * 3  # with the greatest one at hand
    self.row[1], self.rows[0][:2] = most, (most, 0.5)
    return x + torch.from_numpy(self.row.copy())


def keeps_a_sorted_one(self: Holds, x: Tensor) -> Tensor:
    order = np.sort(x.numpy() * 2)
    self.row[:] = order
    self.row[1:] += order[:2]
    return x * torch.from_numpy(order)


@pytest.mark.parametrize(
    "forward",
    [
        counts, in_a_list, in_an_object, replaced, counts_sides, keeps_the_greatest,
        keeps_a_sorted_one,
    ],
)  # fmt: skip
def test_it_is_replayed(forward: Any) -> None:
    bended = stream(forward)
    assert bended.stats.live <= 1, bended.why_live
    assert bended.stats.replays > 15, bended.stats


def opened_for(bended: bt.BendedModule) -> set[str]:
    """Return the functions for which the code of replays takes arrays out of tensors."""
    codes = [
        exit.code.function
        for program in bended._trees.plain.programs()
        if program.graph is not None
        for exit in program.graph.exits()
    ]
    called = (one for code in codes for one in code.__globals__.values())
    found = (getattr(one, "__self__", one) for one in called)
    return {one.__name__ for one in found if type(one) is ArrayFunction}


def test_functions_that_only_get_numbers_and_arrays_are_called_themselves() -> None:
    assert not opened_for(stream(counts_sides))
    # A tensor stands for the greatest one, where a question is asked.
    assert opened_for(stream(keeps_the_greatest)) == {"max", "setitem_", "from_numpy"}


class AcrossModules(nn.Module):
    """Has an array of numpy while its last module is called, and one before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.row = nn.Linear(3, 3), nn.Linear(3, 3), np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        order = np.sort(h.numpy())
        self.row[0] = np.max(h.numpy() * 2)
        y = self.other(x)
        self.row[1:] = order[0, :2]
        return y.double() * torch.from_numpy(order) + float(self.row.sum())


@pytest.mark.parametrize("name", ["one", "other"])
@pytest.mark.parametrize("is_odd", [False, True])
def test_arrays_are_passed_to_functions_beside_what_is_inserted(
    name: str, is_odd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    handed_on: list[Any] = []
    values_in = program.values_in

    def noted(names: dict[str, Any]) -> dict[int, Any]:
        found = values_in(names)
        handed_on.extend(found.values())
        return found

    monkeypatch.setattr(program, "values_in", noted)
    model = AcrossModules()
    own = copy.deepcopy(model)
    calls: dict[str, int] = {"model": 0, "own": 0}

    def changed(value: Tensor, key: str) -> Tensor:
        calls[key] += 1
        # Of another kind at times, so that the model's Python takes over.
        return (value * 1.5).t().contiguous().t() if is_odd and calls[key] % 7 == 6 else value * 1.5

    getattr(model, name).register_forward_hook(lambda m, args, out: changed(out, "model"))
    bended = bt.BendedModule(own)
    bended.interject(getattr(own, name), lambda value: changed(value, "own"))
    for number in range(30):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            assert bits(bended(x)) == bits(model(x))
        assert own.row.tobytes() == model.row.tobytes()
        assert calls["own"] == calls["model"]
    assert bended.stats.replays > (2 if is_odd else 20)
    assert bool(handed_on) is (is_odd and name == "other")  # else the call has begun again
    assert all(isinstance(value, Tensor) for value in handed_on)


def by_a_method_that_is_kept(self: Holds, x: Tensor) -> Tensor:
    self.row[0] += 1
    return x * float(self.total())


def by_a_partial_function(self: Holds, x: Tensor) -> Tensor:
    self.row[0] += 1
    return x * float(self.filled())


def by_a_copy_of_the_model(self: Holds, x: Tensor) -> Tensor:
    self.row[0] += 1
    return x * float(copy.deepcopy(self).row[0])


def by_a_pickle(self: Holds, x: Tensor) -> Tensor:
    self.row[0] += 1
    return x * sum(pickle.dumps(self.part))


def by_a_text(self: Holds, x: Tensor) -> Tensor:
    self.rows[0][0] += 1
    return x * len(f"{self.rows}")


def by_a_function_of_pythons(self: Holds, x: Tensor) -> Tensor:
    self.rows[0][0] += 1
    return x * float(next(map(np.sum, self.rows)))


def by_functions_in_each_other(self: Holds, x: Tensor) -> Tensor:
    self.part.row[0] += 1
    return x * sum(map(operator.attrgetter("row"), [self.part]))[0]


def by_a_property_of_numpys(self: Holds, x: Tensor) -> Tensor:
    self.polynomial.coeffs[1] += 1
    return x * float(self.polynomial.roots[0].real)


@pytest.mark.parametrize(
    "forward",
    [
        by_a_method_that_is_kept, by_a_partial_function, by_a_copy_of_the_model, by_a_pickle,
        by_a_text, by_a_function_of_pythons, by_functions_in_each_other, by_a_property_of_numpys,
    ],
)  # fmt: skip
def test_it_is_live_where_other_code_reads_the_content(forward: Any) -> None:
    assert stream(forward).stats.replays == 0


def _write(model: Any, number: int) -> None:
    model.row[1] = number


def _replace(model: Any, number: int) -> None:
    model.row = np.full(3, float(number))


def _retype(model: Any, number: int) -> None:
    model.row = model.row.astype((np.float32, np.float64)[number % 2])


def _reverse(model: Any, number: int) -> None:
    model.row = np.ones(3)[:: (-1, 1)[number % 2]]


def _freeze(model: Any, number: int) -> None:
    model.row.flags.writeable = number % 3 > 0


def _tie(model: Any, number: int) -> None:
    if number > 4:
        model.kept = torch.from_numpy(model.row)[:1]


def _view(model: Any, number: int) -> None:
    if number > 4:
        model.kept = model.row[:1]


def reads_around_a_write(self: Holds, x: Tensor) -> Any:
    first = 0.0 if self.kept is None else float(self.kept[0])
    try:
        self.row[0] += 1
    except ValueError:
        return x
    second = 0.0 if self.kept is None else float(self.kept[0])
    return x * first + second + self.row.itemsize + float(self.row.sum())


@pytest.mark.parametrize("change", [_write, _replace, _retype, _reverse, _freeze, _tie, _view])
def test_what_others_do_to_it_between_calls_is_seen(change: Any) -> None:
    stream(reads_around_a_write, change)


def test_another_array_in_its_memory_is_seen() -> None:
    def forward(self: Holds, x: Tensor) -> Tensor:
        self.row[:] = x.numpy()
        self.row[0] = 1
        found = float(self.kept[0])
        self.row[0] = 0
        return x * found

    def change(model: Holds, number: int) -> None:
        if number == 0:
            model.kept = np.zeros(2)[:1]  # whose content never changes between calls
        if number == 9:
            model.kept = model.row[:1]

    assert 4 < stream(forward, change).stats.replays < 10


def test_references_show_what_has_the_memory() -> None:
    holder: dict[str, Any] = {"array": np.zeros(3)}

    def is_alone() -> bool:
        array = holder["array"]
        return is_unshared(sys.getrefcount(array), array)

    assert is_alone()
    view = holder["array"][1:]
    assert not is_alone()
    del view
    assert is_alone()
    tensor = torch.from_numpy(holder["array"])
    assert not is_alone()
    assert is_tied(holder["array"], [tensor], [])
    del tensor
    holder["array"] = np.zeros(6)[::2]
    assert is_alone()
    holder["array"] = torch.zeros(3).numpy()
    assert not is_alone()
    array = np.zeros(4)
    assert is_tied(array, [], [array, array[1:]])
    assert not is_tied(array[:2], [torch.zeros(2)], [array[2:]])


def test_content_shows_what_no_rule_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Holds, x: Tensor) -> Tensor:
        self.row[0] += 1
        self.put(4)
        self.row[1] += 1
        return x * float(self.row[1])

    monkeypatch.setattr(Arrays, "_reaches", lambda self, values: False)
    assert stream(forward).stats.replays == 0


def test_what_writes_unseen_makes_a_run_live() -> None:
    def forward(self: Holds, x: Tensor) -> Tensor:
        self.row[0] += 1
        for fill in [self.row.fill]:
            fill(self.row[0])
        return x * float(self.row[1])

    assert stream(forward).stats.replays == 0
