"""Lists that a loop appends to are values of runs, where nothing but such code can see them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, stack

import bendtrace as bt
from bendtrace.python.accumulators import accumulators_at, receiver_of_list
from bendtrace.python.results import can_exchange

needs_lists = pytest.mark.skipif(
    not can_exchange(), reason="numbers cannot stay traced in this Python, so no list is followed"
)


needs_frames = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="since Python 3.12 a comprehension has no frame to read"
)


class Recurrence(nn.Module):
    """A cell whose outputs go into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(4), []
        for i in range(len(x)):
            h = torch.tanh(self.cell(h) + x[i])
            if h.sum() > 0:
                outputs.append(h * 2)
            outputs.append(h)
        return torch.stack(outputs)


def inputs(count: int) -> list[Tensor]:
    own = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (count,), generator=own)
    return [torch.randn(int(length), 4, generator=own) for length in lengths]


def made() -> tuple[Recurrence, bt.BendedModule]:
    torch.manual_seed(0)
    model = Recurrence()
    return model, bt.BendedModule(copy.deepcopy(model))


@needs_lists
def test_a_loop_closes_in_which_a_list_grows() -> None:
    model, bended = made()
    for x in inputs(120):
        assert torch.equal(bended(x), model(x))
    assert bended.stats.live == 0
    assert bended.stats.traces < 15


def test_gradients_are_those_of_eager() -> None:
    model, bended = made()
    for x in inputs(60):
        for one in (model, bended):
            one.zero_grad()
            one(x).cumsum(0).square().sum().backward()
        assert torch.equal(bended.model.cell.weight.grad, model.cell.weight.grad)


@needs_lists
def test_a_changed_node_is_spliced_into_such_a_loop() -> None:
    model, bended = made()
    bended.interject("cell", lambda value: value * 1.1)
    model.cell.register_forward_hook(lambda module, args, value: value * 1.1)
    for x in inputs(120):
        assert torch.equal(bended(x), model(x))
    assert bended.stats.live == 0
    assert bended.stats.traces < 15


class Counts(bt.Interjection):
    """Notes how many items a function was given."""

    wants_inputs = True

    def __init__(self) -> None:
        self.counts: list[int] = []

    def after(self, at: Any, inputs: bt.Inputs, value: Any) -> Any:
        self.counts.append(len(inputs[0]))
        return value


def test_an_insertion_that_sees_inputs_gets_the_items() -> None:
    model, bended = made()
    counts = Counts()
    bended.interject(torch.stack, counts)
    for number, x in enumerate(inputs(60)):
        expected = model(x)
        assert torch.equal(bended(x), expected)
        assert counts.counts[number] == len(expected)


@needs_lists
def test_people_see_the_items_of_a_list_that_is_followed() -> None:
    model, bended = made()
    for x in inputs(60):
        recorded = bended.stats.traces
        bended(x)
        if bended.stats.traces > recorded and len(x) > 3:
            latest, given = bended.latest_trace, x
    parents = [*latest.graph.predecessors("stack")]
    alone = bt.trace(copy.deepcopy(model), given)
    assert parents == [*alone.graph.predecessors("stack")]
    assert len(parents) == len(model(given))


def _loop(body: str, end: str, begin: str = "outputs = []") -> Callable[..., Any]:
    lines = [*begin.split("; "), "for i in range(3):"]
    lines += [f"    {line}" for line in body.split("; ")]
    source = "\n    ".join(["def code(x, c, given=None):", *lines, f"return {end}"])
    space: dict[str, Any] = {"torch": torch, "stack": stack}
    exec(source, space)
    code: Callable[..., Any] = space["code"]
    return code


def _names(function: Callable[..., Any]) -> set[str]:
    code = function.__code__
    offsets = range(0, len(code.co_code), 2)
    return {one.name for offset in offsets for one in accumulators_at(code, offset)}


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("outputs.append(x)", "torch.stack(outputs)"),
        ("outputs.append(c(x, 2, k=x.y))", "stack(outputs, dim=-x.ndim)"),
        ("outputs += [x, c(x)]", "torch.cat(outputs, 1) + 1"),
        ("outputs += [x]", "(stack(outputs), torch.hstack(outputs))"),
        ("outputs.extend(x); outputs.clear()", "torch.vstack(outputs)"),
        ("outputs.append(x)", "torch.stack(outputs) / len(outputs) if outputs else x"),
        ("outputs += [x]", "not outputs"),
    ],
)
def test_lists_that_only_such_code_sees_are_found(body: str, end: str) -> None:
    assert _names(_loop(body, end)) == {"outputs"}
    assert _names(_loop(body, end, "outputs, others = [], []")) == {"outputs"}


@pytest.mark.parametrize(
    ("body", "end", "begin"),
    [
        ("outputs.append(x)", "outputs", "outputs = []"),
        ("outputs.append(x)", "len(outputs) if c else outputs or c", "outputs = []"),
        ("outputs = outputs + [x]", "torch.stack(outputs)", "outputs = []"),
        ("outputs.append(x)", "torch.stack(outputs[1:])", "outputs = []"),
        ("outputs.append(x)", "torch.stack(outputs + [x])", "outputs = []"),
        ("outputs.append(x)", "torch.stack([*outputs, x])", "outputs = []"),
        ("outputs.append(x)", "torch.stack((outputs, x))", "outputs = []"),
        ("outputs.append(x)", "x.where(c, outputs)", "outputs = []"),
        ("outputs.append(x)", "(c if x else torch.stack)(outputs)", "outputs = []"),
        ("outputs.append(x)", "torch.cat(outputs, dim=1 if c else 0)", "outputs = []"),
        ("outputs.append(x)", "torch.stack([y for y in outputs])", "outputs = []"),
        ("outputs.append(x); f = outputs.append", "torch.stack(outputs)", "outputs = []"),
        ("outputs.append(x)", "(torch.stack(outputs), lambda: outputs)", "outputs = []"),
        ("outputs.append(x)", "torch.stack(outputs)", "outputs = others = []"),
        ("outputs.append(x)", "torch.stack(outputs)", "others = outputs = []"),
        ("outputs.append(x)", "torch.stack(outputs)", "n, others = outputs, m = 1, []"),
        ("outputs.append(x)", "torch.stack(outputs)", "outputs, n = given, []"),
        ("outputs.append(x)", "torch.stack(outputs)", "n, outputs = [], given"),
        ("outputs.append(x)", "torch.stack(outputs)", "outputs, n = given if c else [], 1"),
        ("outputs.append(x)", "torch.stack(outputs)", "outputs, n = [] if c else given, 1"),
        ("outputs.append(x)", "torch.stack(outputs)", "outputs = given"),
        ("outputs.append(x)", "torch.stack(outputs)", "outputs = given if c else []"),
        ("outputs.append(x)", "torch.stack(outputs)", "outputs = [] if c else given"),
        ("given.append(x)", "torch.stack(given)", "outputs = []"),
        ("outputs.append(x); y = locals()", "torch.stack(outputs)", "outputs = []"),
        ("outputs.append(x); y = outputs[-1]", "torch.stack(outputs)", "outputs = []"),
        ("outputs.append(x); outputs = outputs + c", "torch.stack(outputs)", "outputs = []"),
        ("x.append(x)", "torch.stack(outputs)", "outputs = []"),
    ],
)
def test_lists_that_other_code_may_see_are_not_followed(body: str, end: str, begin: str) -> None:
    assert _names(_loop(body, end, begin)) == set()


def _receivers(body: str) -> set[str]:
    space: dict[str, Any] = {"torch": torch, "stack": stack}
    exec("def code(x, y, n, c):\n    " + "\n    ".join(body.split("; ")), space)
    code = space["code"].__code__
    found = (receiver_of_list(code, at) for at in range(0, len(code.co_code), 2))
    return {
        f"{one.name}({'.'.join(one.consumers[0]) if one.consumers else ''})" for one in found if one
    }


@needs_frames
@pytest.mark.parametrize(
    ("body", "receivers"),
    [
        ("torch.stack([y * n for y in x], dim=1)", {"(torch.stack)"}),
        ("rows = [y for y in x]; c(n); return stack(rows)", {"rows(stack)"}),
        ("torch.tensor([0] * n)", {"(torch.tensor)"}),
        ("torch.tensor(c + [0] * (n - 1) + [1])", {"(torch.tensor)"}),
        ("rows = [0] * n + [1, 2] * c; torch.tensor(rows, dtype=c)", {"rows(torch.tensor)"}),
        ("torch.tensor([[0] * y for y in x])", {"(torch.tensor)"}),
    ],
)
def test_lists_that_expressions_make_are_found(body: str, receivers: set[str]) -> None:
    assert _receivers(body) == receivers


@pytest.mark.parametrize(
    "body",
    [
        "return [y for y in x]",
        "c([y for y in x])",
        "x.new_tensor([0] * n)",
        "torch.stack(c([y for y in x]))",
        "torch.stack([y for y in x] + [n])",
        "torch.stack([y for y in x] if c else [0] * n)",
        "torch.stack({y for y in x})",
        "rows = [y for y in x]; rows[0] = n; torch.stack(rows)",
        "rows = [0] * n; others = rows; torch.tensor(rows)",
        "rows = c; rows = [0] * n; torch.tensor(rows)",
        "rows = [0] * n; torch.tensor(rows); rows.pop()",
        "x * n + torch.tensor(n * c)",
        "rows = [0] * n; torch.tensor(rows); locals()",
    ],
)
def test_lists_of_expressions_that_other_code_may_see_are_not_followed(body: str) -> None:
    assert not any("torch" in one or "stack" in one for one in _receivers(body))


class Padded(nn.Module):
    """Masks of two lengths, and a list of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, k = len(x), int(x.abs().sum()) % 5
        mask = torch.tensor([1] * k + [0] * (n - k))
        rows = torch.stack([self.cell(row) if row.sum() > 0 else row for row in x])
        ones = [1.0] * n + [True] * (k - 1)
        if rows.sum() > 0:
            ones.append(5)
        return rows, mask, torch.tensor(ones)


@needs_frames
@needs_lists
@pytest.mark.parametrize("changes", [False, True])
def test_lists_whose_length_numbers_decide_are_values(changes: bool) -> None:
    torch.manual_seed(0)
    model = Padded()
    bended = bt.BendedModule(copy.deepcopy(model))
    if changes:
        bended.interject("cell", lambda value: value * 1.1)
        model.cell.register_forward_hook(lambda module, args, value: value * 1.1)
    for x in inputs(200):
        for one, other in zip(bended(x), model(x), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert bended.stats.live == 0
    assert bended.stats.traces < 30


@needs_lists
def test_the_length_of_a_list_is_a_traced_scalar() -> None:
    def code(x: Tensor) -> Any:
        kept = []
        for row in x:
            if row[0] > 0:
                kept.append(row)
        if not kept:
            return x.sum(0), -1
        kept.append(x[0])
        count = len(kept)
        return torch.stack(kept).sum(0) / count, count if count > 3 else 0

    bended = bt.BendedModule(code)
    for x in inputs(200):
        (found, number), (expected, count) = bended(x), code(x)
        assert torch.equal(found, expected)
        assert (type(number), number) == (int, count)
    assert bended.stats.live == 0
    assert bended.stats.traces < 15


def test_a_sum_of_lists_of_two_kinds_has_the_kind_of_those_that_have_items() -> None:
    def code(x: Tensor, n: int) -> Tensor:
        return torch.tensor([1.5] * (n - 2) + [True] * n + [0] * (3 - n))

    bended = bt.BendedModule(code)
    x = torch.ones(1)
    for n in [5, 2, 4, 1, 3, 0, 6, -1, 9, 2, 0, 7, 1, 5, 3] * 2:
        found, expected = bended(x, n), code(x, n)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


@needs_frames
@needs_lists
def test_people_see_the_items_of_lists_that_are_made_at_once() -> None:
    torch.manual_seed(0)
    bended = bt.BendedModule(Padded())
    for x in inputs(60):
        recorded = bended.stats.traces
        bended(x)
        if bended.stats.traces > recorded and len(x) > 3:
            latest, given = bended.latest_trace, x
    assert len([*latest.graph.predecessors("stack")]) == len(given)
    node = next(name for name in latest.graph if name.startswith("tensor"))
    assert f"[{', '.join(['1'] * (int(given.abs().sum()) % 5))}" in str(latest.graph.nodes[node])


def test_a_function_of_the_users_is_no_function_of_torch() -> None:
    calls: list[int] = []

    def stack(items: list[Tensor]) -> Tensor:
        calls.append(len(items))
        return items[len(items) // 2]

    space: dict[str, Any] = {"stack": stack, "torch": torch}
    source = (
        "def code(x):\n    outputs = []\n    for i in range(len(x)):\n"
        "        outputs.append(x[i] * 2)\n    return stack(outputs) + torch.ones(4)\n"
    )
    exec(source, space)
    bended = bt.BendedModule(space["code"])
    for x in inputs(60):
        assert torch.equal(bended(x), space["code"](x))
