"""Numbers that differ between calls stay traced where Python makes others of them."""

from __future__ import annotations

import functools
import math
import operator
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python.computations import is_computation, with_item
from bendtrace.python.key_functions import parts_of_key
from bendtrace.python.results import can_exchange, exchange
from bendtrace.record import varying
from tests.modes.test_inserted import Seeing
from tests.past_joins import past_joins, resumed_anywhere
from tests.promise import bits

pytestmark = pytest.mark.skipif(
    sys.gettrace() is not None or not can_exchange(),
    reason="this Python does not let results be exchanged",
)


@torch.library.custom_op("tests_varying::padded", mutates_args=())
def padded(x: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, count))


def int_of_a_size(x: Tensor) -> Tensor:
    count = int(x.shape[0])
    return x.view(1, count, -1) * count


def int_of_a_tensor(x: Tensor) -> Any:
    count = int((x > 0).sum())
    return padded(x, count), x[:1].expand(count, -1), count


def float_of_a_tensor(x: Tensor) -> Any:
    scale = float(x.abs().max())
    return x * scale, scale + 1


def length(x: Tensor) -> Any:
    kept = x[x[:, 0] > 0]
    if len(kept) == 0:
        return x.sum()
    return kept.sum(0) / len(kept), len(kept)


def functions_of_math(x: Tensor) -> Any:
    count = x.shape[0]
    return x[: math.ceil(count / 4)] * math.sqrt(count), math.gcd(count, 6), math.log(count)


RATES = [0.5 * number for number in range(25)]


def items(x: Tensor) -> Any:
    count = len(x)
    table = {number: number * number for number in range(25)}
    below = RATES[-count]
    return x * RATES[count] + below, table[x.shape[0]], (*range(25),)[x.shape[0] - 1]


def among_others(x: Tensor) -> Any:
    """The number is one of several arguments, and an operand."""
    count = operator.index(x.shape[0])
    return x.new_full((int(count / 2) + 1, 2), 1 + float(count)), [int(x.shape[0]), 2]


def loop(x: Tensor) -> Tensor:
    h = torch.zeros(3)
    for i in range(x.shape[0]):
        h = torch.tanh(h + x[i])
    return h


def loop_that_counts(x: Tensor) -> Any:
    total, last = torch.zeros(3), -1
    for i in range(1, len(x), 2):
        total = total + x[i] * i
        last = i
    return total, last


def loop_back(x: Tensor) -> Tensor:
    h = torch.zeros(3)
    for i in range(len(x) - 1, -1, -1):
        h = torch.tanh(h * 0.5 + x[i])
        if h[0] > 0.9:
            break
    else:
        h = h + 1
    return h


def nested_loops(x: Tensor) -> Tensor:
    h = torch.zeros(())
    for i in range(len(x)):
        for j in range(x.shape[1]):
            h = torch.tanh(h + x[i, j])
    return h


def rows_that_leave(x: Tensor) -> Any:
    out, rows = torch.zeros(len(x), 3), torch.arange(len(x))
    for _ in range(5):
        x = torch.tanh(x * 1.5)
        sure = x.abs().amax(-1) > 0.9
        out[rows[sure]] = x[sure]
        x, rows = x[~sure], rows[~sure]
        if len(rows) == 0:
            break
    return out, len(rows)


@functools.lru_cache(64)
def split(shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...] | None, int]:
    """Compute a shape."""
    rows, columns = shape
    if rows % parts != 0:
        return None, rows
    sizes = [parts]
    sizes.append(rows // parts)
    sizes.append(columns)
    return tuple(sizes), rows * columns


def cached_shapes(x: Tensor) -> Any:
    sizes, count = split(tuple(x.shape), 2)
    return (x if sizes is None else x.reshape(sizes)), count


def greatest_and_least(x: Tensor) -> Any:
    counts = (x.abs() * 3).long()[:1].repeat(2, 2)[0].tolist()
    most, least = max(counts), min(tuple(counts))
    return x.sum() + torch.arange(most).sum(), least, max(x.shape[0], most, 5)


def in_order(x: Tensor) -> Any:
    means = x.mean(0).tolist()
    lengths = [len(x), *(x[0].abs() * 9).long().tolist()]
    first, *_, last = sorted(means)
    table = sorted(lengths)
    table.append(0)
    return x * last - first, table, sorted([last, first, -0.0, 0.0]), max([lengths[1], lengths[2]])


SCALE = 2


def best_by_keys(x: Tensor) -> Any:
    means = x.mean(0).tolist()
    best = max(range(3), key=lambda at: means[at])
    table = {2 * at: mean for at, mean in enumerate(means)}
    named = min(table, key=table.get), max(table.items(), key=operator.itemgetter(1))
    nearest = min(means, key=lambda mean, to=means[0]: abs(mean - to - 0.1))
    return x * best, named, nearest


def in_order_by_keys(x: Tensor) -> Any:
    means, lengths = x.mean(0).tolist(), (x[0].abs() * 9).long().tolist()
    order = sorted(range(3), key=means.__getitem__, reverse=True)
    by_both = sorted(lengths, key=lambda n: (n % 3, -n * SCALE))
    return x * order[0], order, by_both, sorted(means, key=math.floor)


def looked_up_by_numbers(x: Tensor) -> Any:
    """The key function asks for the number of an item itself."""
    sizes, counts = (x.abs() * 2).long().clamp(0, 4)[:1].tolist()[0], [0] * 5
    for size in sizes:
        counts[size] += 1
    weights = {at: (3 * at) % 5 for at in range(5)}
    most = max(sizes, key=lambda size: (counts[size], size))
    return x * most, sorted(sizes, key=weights.get), sorted(sizes, key=counts.__getitem__)


def rounds_in_order(x: Tensor) -> Tensor:
    means, h = x.mean(0).tolist(), x[0] * 0
    for at in sorted(range(3), key=lambda at: -means[at]):
        h = torch.tanh(h * 0.5 + x[:, at].sum() * h[at])
    return h


def counts_of_many(x: Tensor) -> Any:
    counts, sums, numbers = [0] * 300, [0.0] * 40, x.mean(0).tolist()
    for at, number in enumerate((x[0].abs() * 20).long().clamp(0, 39).tolist()):
        counts[number * 7 + 1] += 1
        sums[-number - 1] += numbers[at]
        counts[0] = number
        counts[at] = 5
    return x * counts[0], counts, sum(sums), max(sums), sorted(counts[:9])


def stores_in_rounds(x: Tensor) -> Any:
    numbers, counts = (x[:, 0].abs() * 9).long().clamp(0, 99).tolist(), [0] * 100
    for at in range(3):
        counts[numbers[at % len(numbers)]] += at
        if x[at % len(x), 1] > 0:
            x = x * 2
    return x, counts


def swaps(x: Tensor) -> Any:
    """Items are added and removed as well."""
    table, added = [*range(9)], (x[0].abs() * 4).long().clamp(0, 8).tolist()
    for number in added:
        table[number], table[0] = table[0], table[number]
        table.append(table[number])
        del table[-2:]
        table.extend((number, 1))
    return x * table[0], table


def numbers_from_before(x: Tensor) -> Any:
    """Numbers of a list are used after others were assigned."""
    counts, numbers = [1] * 20, (x[0].abs() * 4).long().clamp(0, 6).tolist()
    for number in numbers:
        counts[number] += 1
    two, before = counts[2], counts[:5]
    for number in numbers:
        counts[number] *= 3
    return x * two, before, counts


def found_in_lists(x: Tensor) -> Any:
    numbers = (x[0].abs() * 4).long().clamp(0, 6).repeat(2).tolist()
    return x * numbers.index(max(numbers)), numbers.count(numbers[4])


def several_searches(x: Tensor) -> Any:
    numbers = (x[0].abs() * 4).long().clamp(0, 6).repeat(3).tolist()
    x = x * numbers.index(max(numbers))
    counts = numbers.count(2), numbers.count(numbers[4]), numbers[1:].index(numbers[2])
    numbers.remove(numbers[5])
    return x + counts[1], counts, 3 in numbers, numbers


def removed_from_lists(x: Tensor) -> Any:
    numbers = (x[0].abs() * 4).long().clamp(0, 6).repeat(3).tolist()
    is_among = numbers[0] not in numbers[1:3]
    numbers.remove(numbers[5])
    return x * numbers[0], is_among, numbers


def bools_in_lists(x: Tensor) -> Any:
    flags, above = [bool(one > 0) for one in x[0]], (x[:1] > 0.5).flatten().tolist()
    if any(flags) or above[0]:
        x = x + 1
    return x * sum(flags) - sum(above) * flags.count(True), len(above)


def bools_of_numbers(x: Tensor) -> Any:
    numbers = x[0].repeat(2).tolist()
    below, many = [one < 0 for one in numbers], [number > 1 for number in numbers]
    found = all(below), sum(one > -1 for one in numbers), sum(many)
    return x if True in below else -x, found, any(numbers)


def not_numbers_alone(x: Tensor) -> Any:
    """What is put in order otherwise is guarded."""
    sizes = (x[0].abs() * 2).long().tolist()
    pairs = sorted((size, at) for at, size in enumerate(sizes))
    mixed = max(sizes[0], 0.5), min(sizes, key=lambda size: -size), max(sizes[:1], default=1)
    means = [float("nan"), *x.mean(0).tolist()]
    found = means[:1].count(means[0]), means.index(means[2]), sizes.count(0.5), 1.0 in sizes
    any_size = any([sizes[1] > 0, sizes[2] > 1])
    return x * mixed[0], pairs[0][1], mixed, bool(sizes[0] > 1), any_size, found


PROGRAMS: list[Callable[[Tensor], Any]] = [
    int_of_a_size, int_of_a_tensor, float_of_a_tensor, length, functions_of_math, items,
    among_others, loop, loop_that_counts, loop_back, nested_loops, rows_that_leave, cached_shapes,
    greatest_and_least, in_order, best_by_keys, in_order_by_keys, looked_up_by_numbers,
    rounds_in_order, counts_of_many, swaps, numbers_from_before, found_in_lists,
    removed_from_lists, bools_in_lists, bools_of_numbers,
]  # fmt: skip


def inputs(number: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 25, (number,), generator=generator).tolist()
    return [torch.randn(size, 3, generator=generator) for size in sizes]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_numbers_that_differ_are_computed_in_replays(program: Callable[[Tensor], Any]) -> None:
    bended = bt.BendedModule(program)
    split.cache_clear()
    for x in inputs(60):
        found = bended(x.clone())
        assert bits(found) == bits(program(x.clone()))
        assert [type(one) for one in _flat(found)] == [type(one) for one in _flat(program(x))]
    assert bended.stats.live == 0
    # Since Python 3.12, comprehensions are no functions: what they do with bools is not followed.
    is_guarded = program is bools_of_numbers and sys.version_info >= (3, 12)
    assert bended.stats.traces <= (24 if is_guarded else 16)
    before = bended.stats.traces
    for x in inputs(40, seed=1):
        assert bits(bended(x)) == bits(program(x))
    assert bended.stats.traces <= before + 1


def test_what_else_is_put_in_order_is_right() -> None:
    bended = bt.BendedModule(not_numbers_alone)
    for x in inputs(80):
        assert bits(bended(x.clone())) == bits(not_numbers_alone(x.clone()))
    torch.manual_seed(0)
    for values in (inputs(30), [torch.full((2, 3), float("nan"))], inputs(10, seed=1)):
        bended = bt.BendedModule(in_order_of_means)
        for x in values:
            x[:, 1] = x[:, 0] * -0.0
            assert bits(bended(x)) == bits(in_order_of_means(x))


def in_order_of_means(x: Tensor) -> Any:
    means = x.mean(0).tolist()
    return sorted(means), max(means), min(means)


MODES: dict[str, Callable[[], Any]] = {
    "joined": past_joins, "resumed": lambda: resumed_anywhere(3, most=4),
    "observed": nullcontext,
}  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "program", [*PROGRAMS[-11:], stores_in_rounds, several_searches], ids=lambda one: one.__name__
)
def test_lists_and_orders_are_those_of_eager(program: Callable[[Tensor], Any], mode: str) -> None:
    bended: Any = bt.BendedModule(program)
    if mode == "observed":
        bended.interject(lambda node: True, Seeing(), allow_none=True)
    with MODES[mode]():
        for x in inputs(40, seed=2):
            assert bits(bended(x.clone())) == bits(program(x.clone()))
    assert bended.stats.live == 0


def test_ties_and_nan_are_put_in_order_as_in_eager() -> None:
    def program(x: Tensor) -> Any:
        numbers = x.tolist()
        return [choose(range(6), key=numbers.__getitem__) for choose in (max, min, sorted)], sorted(
            range(6), key=lambda at: numbers[at], reverse=True
        )

    bended, generator = bt.BendedModule(program), torch.Generator().manual_seed(0)
    for number in range(80):
        x = torch.randn(6, generator=generator).round()
        x[number % 6] = (float("nan"), 0.0, -0.0, float("inf"))[number % 4]
        assert bended(x) == program(x)
    assert bended.stats.traces < 12


def test_key_functions_that_do_more_are_called_as_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(at: int) -> float:
        seen.append(at)
        return -at

    def program(x: Tensor) -> Any:
        numbers, layers = x.tolist(), [torch.relu, torch.tanh]
        pairs = [(number, at) for at, number in enumerate(numbers)]
        found = max(numbers, key=lambda n: n if n > 0 else -n), max(pairs, key=lambda p: p[0])
        by_scale = min(range(3), key=lambda at: numbers[at] ** SCALE)
        return x * found[0], found[1] in pairs, min(layers[:2], key=lambda f: numbers[0]), by_scale

    bended, generator = bt.BendedModule(program), torch.Generator().manual_seed(0)
    for number in range(60):
        if number == 40:
            monkeypatch.setitem(globals(), "SCALE", 1)
        x = torch.randn(3, generator=generator)
        assert torch.equal(bended(x)[0], program(x)[0])
        assert bended(x)[1:] == program(x)[1:]
    calls = bt.BendedModule(lambda x: x * max(x.tolist(), key=noted))
    x = torch.randn(3)
    assert torch.equal(calls(x), x * min(x.tolist()))
    assert parts_of_key(noted) is None
    assert len(seen) == 3


@pytest.mark.more
@pytest.mark.parametrize("catches", [False, True])
def test_items_outside_of_a_list_that_forward_makes(catches: bool) -> None:
    def program(x: Tensor) -> Any:
        counts, missed = [0] * 12, 0
        for number in (x[0].abs() * 9).long().tolist():
            try:
                counts[number] += 1
            except IndexError as error:
                if not catches:
                    raise
                missed += len(str(error))
        return x * missed, counts, max(range(12), key=lambda at: counts[at] / (counts[0] - 1))

    bended = bt.BendedModule(program)
    for x in inputs(60):
        assert outcome(bended, x) == outcome(program, x)


@pytest.mark.more
def test_a_run_stores_as_often_as_it_can_record_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varying, "_MOST_STORED", 700)
    bended = bt.BendedModule(counts_of_many)
    for x in inputs(30):
        assert bits(bended(x.clone())) == bits(counts_of_many(x.clone()))


def test_a_store_in_a_long_list_is_one_op() -> None:
    bended = bt.BendedModule(counts_of_many)
    for x in inputs(20):
        bended(x)
    tape = bended._trees.latest.find(("x",), (x,)).recording.tape  # type: ignore[union-attr]
    assert sum(op.target is with_item for op in tape.ops) == 6
    assert len(tape.ops) < 100 + sum(op.target is operator.getitem for op in tape.ops)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [inner for item in value for inner in _flat(item)]
    return [value]


class Layered(nn.Module):
    """A model that computes with sizes, writes to a buffer and draws random numbers."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += int(x.shape[0])
        for i in range(len(x)):
            x = x + self.layer(x[i]) * torch.rand(()) / len(x)
        return x[: int((x > 0).sum()) + 1]


@pytest.mark.parametrize("changed", [False, True])
def test_state_random_numbers_and_insertions_are_those_of_eager(changed: bool) -> None:
    torch.manual_seed(0)
    model, own = Layered(), Layered()
    own.load_state_dict(model.state_dict())
    bended = bt.BendedModule(own)
    if changed:
        model.layer.register_forward_hook(lambda module, args, output: output * 1.1)
        bended.interject(own.layer, lambda value: value * 1.1)
    for number, x in enumerate(inputs(40)):
        torch.manual_seed(number)
        wanted = model(x)
        wanted.sum().backward()
        after = torch.get_rng_state()
        torch.manual_seed(number)
        found = bended(x)
        found.sum().backward()
        assert bits(found) == bits(wanted)
        assert torch.equal(after, torch.get_rng_state())
        assert bits(own.state_dict()) == bits(model.state_dict())
        assert bits([p.grad for p in own.parameters()]) == bits(
            [p.grad for p in model.parameters()]
        )
    assert bended.stats.live == 0
    assert bended.stats.traces < 20


class Chooses(nn.Module):
    """Python needs the number in the end: it is better guarded where it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            chosen = int(x.abs().sum() * 7) % 6
            x = torch.tanh(self.layers[chosen](x))
        return x


def test_numbers_that_python_needs_are_guarded_where_they_are_made() -> None:
    model = Chooses()
    bended = bt.BendedModule(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        x = torch.randn(3, generator=generator)
        assert bits(bended(x)) == bits(model(x))
    assert not bended._trees.latest.varying
    assert bended.stats.live == 0


def test_loops_that_do_not_close_are_guarded_by_their_length() -> None:
    def collects(x: Tensor) -> Tensor:
        found = []
        for i in range(len(x)):
            found.append(x[i].tanh())
        return torch.stack(found)

    bended = bt.BendedModule(collects)
    for x in [*inputs(60), *inputs(20, seed=1)]:
        assert bits(bended(x)) == bits(collects(x))
    assert all(place[0] is not collects.__code__ for place in bended._trees.latest.varying) or (
        bended.stats.traces < 40
    )


class Scans(nn.Module):
    """Reads sequences with a counter, and keeps what it has read."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(3, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        h, i = x.new_zeros(4), 0
        while i < x.size(0):
            h = self.cell(x[i], h)
            i += 1
        h = h * torch.rand(())
        self.seen += h.detach()
        return h


class ScansBack(Scans):
    def forward(self, x: Tensor) -> Any:
        h, i, hidden = x.new_zeros(4), len(x) - 1, []
        while i >= 0:
            h = self.cell(x[i], h)
            hidden.append(h)
            i -= 1
        self.seen += h.detach()
        return torch.stack(hidden), i


class ScansPairs(Scans):
    def forward(self, x: Tensor) -> Any:
        h, i, n = x.new_zeros(4), 0, x.shape[0]
        while i + 1 < n:
            j = i
            while True:
                if j > i + 1:
                    break
                h = self.cell(x[j], h)
                j += 1
            i += 1
        self.seen += h.detach()
        return h, i * 2


def lengths(number: int) -> list[Tensor]:
    """Sequences of 2 to 39 steps."""
    sizes = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sizes.randint(2, 39), 3, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("model", [Scans, ScansBack, ScansPairs])
def test_while_loops_that_inputs_end_close(model: type[nn.Module]) -> None:
    wanted, served = model(), model()
    bended = bt.BendedModule(served)
    for number, x in enumerate(lengths(300)):
        found = []
        for called in (bended, wanted):
            torch.manual_seed(number)
            output = called(x)
            _flat(output)[0].sum().backward()
            found.append(bits((output, torch.get_rng_state())))
        assert found[0] == found[1]
    assert bits(served.state_dict()) == bits(wanted.state_dict())
    gradients = ([one.grad for one in each.parameters()] for each in (served, wanted))
    assert bits(next(gradients)) == bits(next(gradients))
    assert bended.stats.live == 0
    assert bended.stats.traces <= 10


def test_while_loops_close_beside_insertions() -> None:
    wanted, served = Scans(), Scans()
    noted: list[Tensor] = []
    known: list[Tensor] = []
    bended = bt.BendedModule(served)
    bended.interject(served.cell, lambda value: value * 0.5)
    bended.interject(served.cell, lambda value: noted.append(value.clone()))
    wanted.cell.register_forward_hook(lambda module, given, output: output * 0.5)
    wanted.cell.register_forward_hook(lambda module, given, output: known.append(output.clone()))
    for number, x in enumerate(lengths(60)):
        torch.manual_seed(number)
        found = bits(bended(x))
        torch.manual_seed(number)
        assert found == bits(wanted(x))
    assert bits(noted) == bits(known)
    assert bits(served.state_dict()) == bits(wanted.state_dict())
    assert (bended.stats.live, bended.stats.traces <= 12) == (0, True)


BLOCKS = nn.ModuleList(nn.Linear(3, 3) for _ in range(40))


def needs_the_number(x: Tensor) -> Tensor:
    h, i = torch.zeros(3), 0
    while i < len(x):
        h = torch.tanh(BLOCKS[i](h) + x[i])
        i += 1
    return h


def fills_a_list(x: Tensor) -> Any:
    found, i = [], 0
    while i < len(x):
        found.append((i, x[i] * i))
        i += 1
    return found


@pytest.mark.parametrize("program", [needs_the_number, fills_a_list])
def test_while_loops_that_do_not_close_are_as_before(program: Callable[[Tensor], Any]) -> None:
    bended, streams = bt.BendedModule(program), lengths(200)
    for x in streams:
        assert bits(bended(x)) == bits(program(x))
    assert not any(map(varying.is_loop, bended._trees.latest.varying))
    # There is a run for each length, and one that finds out. (`len` costs some, too.)
    assert bended.stats.traces <= len({len(x) for x in streams}) + 6
    assert bended.stats.live == 0


@pytest.mark.parametrize(
    "error",
    [
        lambda x: math.sqrt(3 - x.shape[0]),
        lambda x: 1 / int(x.shape[0] - 5),
        lambda x: int(x.sum() / 0 * 0),
        lambda x: range(len(x), 3, 0),
    ],
)
def test_errors_are_those_of_eager(error: Callable[[Tensor], Any]) -> None:
    def model(x: Tensor) -> Tensor:
        return x * error(x)  # type: ignore[no-any-return]

    def caught(x: Tensor) -> Any:
        try:
            return x, error(x)
        except (ValueError, ZeroDivisionError) as raised:
            return x, str(raised)

    for program in (model, caught):
        bended = bt.BendedModule(program)
        for x in inputs(30):
            assert outcome(bended, x) == outcome(program, x)


def outcome(called: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return bits(called(x))
    except Exception as error:
        return type(error), str(error)


def test_caches_of_installed_code_may_keep_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """As einops does: the shapes that it computes are in lists."""
    monkeypatch.setattr(varying, "is_finished_function", callable)  # True for every function

    @functools.lru_cache(64)
    def shapes(shape: tuple[int, ...]) -> tuple[list[int], dict[str, int]]:
        if shape[0] % 2 != 0:
            raise ValueError(f"{shape[0]} is odd")
        return [shape[0] // 2, 2, shape[1]], {"rows": shape[0]}

    def model(x: Tensor) -> Tensor:
        x = torch.cat((x, x))
        sizes, named = shapes(tuple(x.shape))
        return x.reshape(sizes) * named["rows"]

    bended = bt.BendedModule(model)
    for x in inputs(40):
        found = bended(x)
        before = bended.stats.traces
        assert bits(found) == bits(model(x))
        assert before == 1
    assert bended.stats.live == 0


@pytest.mark.parametrize("installed", [False, True])
def test_what_a_cache_returned_may_be_changed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        monkeypatch.setattr(varying, "is_finished_function", callable)  # True for every function

    def make() -> Callable[[Tensor], Tensor]:
        @functools.lru_cache(64)
        def sizes(shape: tuple[int, ...]) -> list[int]:
            return [*shape, 1]

        def changes(x: Tensor) -> Tensor:
            found = sizes(tuple(x.shape))
            found[2] += 1
            return x.unsqueeze(2).expand(found) * found[2]

        return changes

    model, bended = make(), bt.BendedModule(make())
    for x in [*inputs(30), *inputs(30)]:
        assert bits(bended(x)) == bits(model(x))


def test_a_cache_of_other_code_is_asked_as_in_eager() -> None:
    calls: list[int] = []

    @functools.lru_cache(64)
    def noted(count: int) -> int:
        calls.append(count)
        return count + 1

    assert not is_computation(noted.__wrapped__)
    bended = bt.BendedModule(lambda x: x * noted(x.shape[0]))
    some = inputs(20)
    for x in [*some, *some]:
        assert bits(bended(x)) == bits(x * (x.shape[0] + 1))
    assert sorted({*calls}) == sorted({len(x) for x in some})


def test_a_result_is_exchanged_in_the_frame_alone() -> None:
    class Number:
        def __int__(self) -> int:
            assert exchange(sys._getframe(1), other, ended.append)
            return 4

    other, number, ended = object(), Number(), list[bool]()
    before = sys.getrefcount(other)
    found: list[Any] = [int(number), (1, int(number))[1], {"a": int(number)}["a"], 3]
    assert found == [other, other, other, 3]
    del found
    assert sys.getrefcount(other) == before
    assert ended == [True] * 3


def test_nothing_is_exchanged_while_somebody_traces() -> None:
    bended, old = bt.BendedModule(int_of_a_size), sys.gettrace()
    sys.settrace(lambda frame, event, arg: None)
    try:
        for x in inputs(20):
            assert bits(bended(x)) == bits(int_of_a_size(x))
    finally:
        sys.settrace(old)
    for x in inputs(40, seed=1):
        assert bits(bended(x)) == bits(int_of_a_size(x))
    assert sys.gettrace() is old


@pytest.mark.more
@pytest.mark.parametrize("seed", [0, 200])
def test_programs_side_by_side_ask_each_in_their_own_way(seed: int) -> None:
    """What is read is followed in some runs and guarded in others; a call takes over neither."""
    items: list[list[Any]] = [[1, 2, 3, 4], ["a", "bb", "ccc", "dddd"]]

    def model(x: Tensor) -> Any:
        total = 0
        for turn, column in enumerate(x.argmax(1).tolist()):
            item = items[turn % 2][column]
            total = total * 3 + (len(item) if turn % 2 else item)
        return x * total

    bended = bt.BendedModule(model)
    for number in range(30):
        torch.manual_seed(number + seed)
        x = torch.randn(random.Random(number).randint(2, 6), 4)
        assert torch.equal(bended(x), model(x))


@pytest.mark.more
def test_items_that_are_not_there_and_items_that_change() -> None:
    """An item that is missing is an error of the model, which may catch it."""
    rates = [*RATES[:12]]

    def model(x: Tensor) -> Tensor:
        try:
            return x * rates[x.shape[0]]
        except IndexError as error:
            return x - len(str(error))

    def fails(x: Tensor) -> Tensor:
        return x * rates[x.shape[0]]

    bended, failing = bt.BendedModule(model), bt.BendedModule(fails)
    for number, x in enumerate(inputs(40)):
        if number == 25:
            rates[3:6] = [7.0, 8.0, 9.0]
        assert bits(bended(x)) == bits(model(x))
        if len(x) < 12:
            assert bits(failing(x)) == bits(fails(x))
        else:
            with pytest.raises(IndexError, match="list index out of range"):
                failing(x)
    assert bended.stats.live == failing.stats.live == 0
    assert bended.stats.traces <= 20


def outgrows(x: Tensor) -> Any:
    """A number outgrows what torch can hold."""
    size, h = 1, torch.zeros(3)
    for i in range(len(x)):
        size = size * 50 + i
        h = h * 0.5 + x[i]
        if h.sum() > 0:
            h = h * (1.0 / size)
    return h, size


def outgrows_alone(x: Tensor) -> Any:
    size, h = 1, torch.zeros(3)
    for i in range(len(x)):
        size *= 50
        h = h * 0.5 + x[i]
    return h, size


def outgrows_floats(x: Tensor) -> Any:
    """A number that no float is as large as, of which C takes a logarithm."""
    size, h = 1, torch.zeros(3)
    for i in range(len(x)):
        size *= 1 << 300
        h = h * 0.5 + x[i] * (size % 1000)
        if h.sum() > 0:
            h = h + math.log2(size)
    return h, size, math.log(size), math.log(size, 10)


@pytest.mark.parametrize("program", [outgrows, outgrows_alone, outgrows_floats])
def test_loops_close_in_which_numbers_outgrow_others(program: Callable[[Tensor], Any]) -> None:
    bended = bt.BendedModule(program)
    for x in lengths(100):
        assert bits(bended(x)) == bits(program(x))
    assert bended.stats.live == 0
    assert bended.stats.traces < 25


def test_numbers_that_loops_compute_are_carried() -> None:
    def loop(x: Tensor) -> Any:
        count, size, weight, other = 0, 1, 1.0, 2
        for i in range(len(x)):
            count += 1
            size *= 2
            weight = weight * 0.5
            other = len(x) - i
        return count, size, weight, other

    code = loop.__code__
    offsets = range(0, len(code.co_code), 2)
    places = {(id(code), begin) for at in offsets if (begin := varying.loop_beginning(code, at))}
    assert len(places) == 1
    found = {name for at in offsets for name in varying.carried_at(code, at, places)}
    assert found == {"count", "size", "weight"}
    assert not any(varying.carried_at(code, at, set()) for at in offsets)
