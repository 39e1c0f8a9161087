"""Loops over the rows of tensors close, where nothing but such a loop can see the rows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python.results import can_exchange
from bendtrace.python.row_loops import RowLoop, row_loop_at

needs_rows = pytest.mark.skipif(
    not can_exchange(), reason="numbers cannot stay traced in this Python, so no rows are followed"
)

LOOPS = {
    "a tensor": ("for row in x:", "row"),
    "unbind": ("for row in x.unbind(0):", "row"),
    "torch.unbind": ("for row in torch.unbind(x, dim=0):", "row"),
    "split": ("for part in x.split(1, dim=0):", "part[0]"),
    "torch.split": ("for part in torch.split(x, 1):", "part[0]"),
    "chunk": ("for part in x.chunk(len(x)):", "part[0]"),
    "enumerate": ("for i, row in enumerate(x):", "row * (1 + 0.1 * i)"),
    "enumerate from 1": ("for i, row in enumerate(x.unbind(0), 1):", "row / i"),
    "zip": ("for row, other in zip(x, x * 2):", "row + other"),
    "strict zip": (
        "for i, (row, other) in enumerate(zip(x.unbind(0), x.cos(), strict=True)):",
        "row + other * i",
    ),
    "reversed": ("for row in reversed(x):", "row"),
    "reversed unbind": ("for row in reversed(x.unbind(0)):", "row"),
    "range": ("for i in range(len(x) - 1, -1, -1):", "x[i]"),
    "reversed range": ("for i in reversed(range(x.size(0))):", "x[i]"),
}


def made(loop: str, row: str, **space: Any) -> nn.Module:
    """Return a module with a loop that has a branch in it."""
    source = (
        "class Reading(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.cell = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        h = x.new_zeros(4)\n"
        f"        {loop}\n"
        f"            h = torch.tanh(self.cell(h) + {row})\n"
        "            if h.sum() > 0:\n                h = h * 0.5\n"
        "        return h\n"
    )
    space = {"torch": torch, "nn": nn, **space}
    exec(source, space)
    torch.manual_seed(0)
    module: nn.Module = space["Reading"]()
    return module


def inputs(count: int) -> Iterator[Tensor]:
    own = torch.Generator().manual_seed(0)
    for length in torch.randint(1, 20, (count,), generator=own):
        yield torch.randn(int(length), 4, generator=own)


def test_loops_close() -> None:
    for loop, row in LOOPS.values():
        model = made(loop, row)
        bended = bt.BendedModule(copy.deepcopy(model))
        for x in inputs(60):
            assert torch.equal(bended(x), model(x)), loop
        assert bended.stats.live == 0, loop
        assert bended.stats.traces < 15 or not can_exchange(), (loop, bended.stats)


@needs_rows
@pytest.mark.parametrize("name", ["unbind", "enumerate", "strict zip", "reversed range"])
def test_a_changed_node_is_spliced_into_such_a_loop(name: str) -> None:
    model = made(*LOOPS[name])
    bended = bt.BendedModule(copy.deepcopy(model))
    bended.interject("cell", lambda value: value * 1.1)
    model.cell.register_forward_hook(lambda module, args, value: value * 1.1)
    for x in inputs(80):
        assert torch.equal(bended(x), model(x))
    assert bended.stats.live == 0
    assert bended.stats.traces < 15


def test_gradients_are_those_of_eager() -> None:
    for name in ("a tensor", "split", "zip", "range"):
        model = made(*LOOPS[name])
        bended = bt.BendedModule(copy.deepcopy(model))
        for x in inputs(40):
            given = [x.clone().requires_grad_(), x.clone().requires_grad_()]
            for one, own in zip((model, bended), given, strict=True):
                one.zero_grad()
                one(own).square().sum().backward()
            assert torch.equal(given[0].grad, given[1].grad)
            assert torch.equal(bended.model.cell.weight.grad, model.cell.weight.grad)


@needs_rows
def test_rows_are_views_that_torch_knows_to_be_several() -> None:
    def write(x: Tensor) -> Tensor:
        x = x * 1
        for row in x:
            if row[0] > 2:
                row.mul_(2)  # which torch refuses, unlike a write to `x[i]`
        return x

    bended = bt.BendedModule(write)
    refused = 0
    for x in inputs(80):
        outcomes: list[Any] = []
        for function in (write, bended):
            try:
                outcomes.append(function(x.clone().requires_grad_()).detach().tolist())
            except RuntimeError as error:
                refused += "returns multiple views" in str(error)
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
    assert refused > 4


class SeesRows(bt.Interjection):
    """Notes how many tensors the node gives."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def after(self, at: Any, inputs: Any, value: Any) -> Any:
        self.counts.append(len(value))
        return value


def test_what_is_inserted_where_the_rows_are_made_gets_them() -> None:
    model = made(*LOOPS["unbind"])
    bended, sees = bt.BendedModule(copy.deepcopy(model)), SeesRows()
    for number, x in enumerate(inputs(60)):
        if number == 20:
            bended.interject(Tensor.unbind, sees)
        assert torch.equal(bended(x), model(x))
        if number >= 20:
            assert sees.counts[-1] == len(x)
    assert len(sees.counts) == 40


@needs_rows
def test_a_row_has_its_parent_in_the_log() -> None:
    model = made(*LOOPS["unbind"])
    bended, given = bt.BendedModule(copy.deepcopy(model)), None
    for x in inputs(60):
        recorded, resumed = bended.stats.traces, bended.stats.resumes
        bended(x)
        if bended.stats.traces > recorded and bended.stats.resumes == resumed and len(x) > 3:
            latest, given = bended.latest_trace, x
    assert latest._recording.tape.counters
    alone = bt.trace(copy.deepcopy(model), given)
    assert [entry.parents for entry in latest] == [entry.parents for entry in alone]
    assert set(latest.graph.predecessors("add")) == set(alone.graph.predecessors("add"))


def test_a_generator_goes_on_after_the_run() -> None:
    def doubled(x: Tensor) -> Iterator[Any]:
        for i, row in enumerate(x):
            if i > 1 or row[0] > 0:
                yield i, row * 2

    def begun(x: Tensor) -> Any:
        found = doubled(x)
        return next(found, None), found

    bended = bt.BendedModule(begun)
    for x in inputs(30):
        (first, rest), (expected, others) = bended(x), begun(x)
        assert str([first, *rest]) == str([expected, *others])


def test_functions_of_the_users_are_no_builtins() -> None:
    def skipping(*given: Any) -> Any:
        return [*given[0]][1:] if len(given) == 1 else [*map(list, zip(*given, strict=False))][1:]

    for name in ("zip", "enumerate", "reversed"):
        model = made(*LOOPS[name], **{name: skipping if name != "enumerate" else _from_five})
        bended = bt.BendedModule(copy.deepcopy(model))
        for x in inputs(30):
            assert torch.equal(bended(x), model(x))


def _from_five(rows: Any) -> Any:
    return enumerate(rows, 5)


needs_frames = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="since Python 3.12 a comprehension has no frame to read"
)


def _loops(source: str) -> list[RowLoop]:
    space: dict[str, Any] = {"torch": torch}
    body = source if source.startswith("[") else f"{source}\n        pass"
    exec(f"def code(x, y, c):\n    {body}", space)
    code = space["code"].__code__
    found = (row_loop_at(code, at) for at in range(0, len(code.co_code), 2))
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("source", "ways"),
    [
        ("for a in x:", {((), True)}),
        ("for a in x.unbind(c):", {((), True), ((), False)}),
        ("for i, a in enumerate(x, start=1):", {((), True), (("enumerate",), True)}),
        (
            "for a, b in zip(x, y.split(c, dim=1), strict=True):",
            {((), True), (("zip",), True), (("zip",), False)},
        ),
        (
            "for i, (a, b) in enumerate(zip(torch.unbind(x), y)):",
            {
                ((), True), (("enumerate",), True), (("zip", "enumerate"), True),
                (("zip", "enumerate"), False),
            },
        ),
        ("for a in reversed(x.unbind(0)):", {((), True), (("reversed",), False)}),
        ("for a in x.unbind(0)[1:]:", {((), True)}),
        ("for a in x.unbind(0) if c else y:", {((), True)}),
        ("for a in zip(*x.unbind(0)):", {((), True)}),
        ("for a in enumerate(x.unbind(0), c=1):", {((), True)}),
        pytest.param("[a for a in x]", {((), True)}, marks=needs_frames),
        pytest.param(
            "[a for a, b in zip(x, y.unbind(0))]",
            {((), True), (("zip",), True), (("zip",), False)},
            marks=needs_frames,
        ),
        pytest.param(
            "[[a for a in x.unbind(0)], {a for a in y}]",
            {((), True), ((), False)},
            marks=needs_frames,
        ),
        ("if x.unbind(0):", set()),
    ],
)  # fmt: skip
def test_loops_are_found(source: str, ways: set[tuple[tuple[str, ...], bool]]) -> None:
    assert {(one.way, one.iterates) for one in _loops(source)} == ways


@pytest.mark.parametrize(
    "body",
    [
        "rows = x.unbind(0)\n    for row in rows:\n        h = h + row * len(rows)",
        "for row in list(x):\n        h = h + row",
        "for row in iter(x):\n        h = h + row",
        "for row in x.unbind(0)[::2]:\n        h = h + row",
        "for row in map(torch.sin, x):\n        h = h + row",
        "for row, i in zip(x, range(9)):\n        h = h + row * i",
        "rows = iter(x.unbind(0))\n    for row in rows:\n        h = h + row * sum(next(rows, h))",
        "h = torch.stack([row * 2 for row in x]).sum(0)",
        "for row in x:\n        h = h + row if row is not h else row",
    ],
)
def test_rows_that_other_code_sees_are_as_in_eager(body: str) -> None:
    source = f"def code(x):\n    h = torch.zeros(4)\n    {body}\n    return h"
    space: dict[str, Any] = {"torch": torch}
    exec(source, space)
    code: Callable[[Tensor], Tensor] = space["code"]
    bended = bt.BendedModule(code)
    for x in inputs(40):
        assert torch.equal(bended(x), code(x))


def test_rows_of_other_numbers_end_a_zip_as_in_eager() -> None:
    def both(x: Tensor) -> Any:
        h = torch.zeros(4)
        for row, other in zip(x, x[x[:, 1] > -0.5], strict=True):
            h = torch.tanh(h + row - other)
        return h

    bended = bt.BendedModule(both)
    texts = set()
    for x in inputs(60):
        for given in (x, x.abs()):
            outcomes = []
            for function in (both, bended):
                try:
                    outcomes.append(function(given).tolist())
                except ValueError as error:
                    texts.add(str(error))
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]
    assert texts == {"zip() argument 2 is shorter than argument 1"}
