"""Content that goes through numpy, and comes back as a tensor, a number or an answer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import bendtrace as bt
from bendtrace.python.results import can_exchange_operands
from tests.registry.calls import Call, args, case


def some(*shape: int, seed: int = 0) -> Call:
    """Random numbers that depend on nothing but the seed."""

    def make() -> tuple[Any, ...]:
        own = torch.Generator().manual_seed(seed)
        return (torch.randn(*shape, generator=own),)

    return args(make)


STREAM = [some(4, seed=seed) for seed in range(6)]
SQUARES = [some(3, 3, seed=seed) for seed in range(6)]
VARIOUS = [some(2 + seed % 3, 4, seed=seed) for seed in range(16)]
LONG = [some(4, seed=seed) for seed in range(40)]


def never_live(bended: bt.BendedModule) -> None:
    if not can_exchange_operands():
        return
    assert bended.stats.live == 0, (bended.stats, bended.why_live)


def always_live(bended: bt.BendedModule) -> None:
    assert bended.stats.replays == 0, bended.stats


followed = functools.partial(case, served=never_live)
refused = functools.partial(case, served=always_live)


# Arrays that come back


@followed(*STREAM)
def numbers_that_are_sorted(x: torch.Tensor) -> Any:
    return x + torch.from_numpy(np.sort(x.detach().numpy()))


@followed(*STREAM)
def an_order_that_indexes(x: torch.Tensor) -> Any:
    order = np.argsort(x.detach().numpy())
    return x[torch.from_numpy(order)] * 2


@followed(*STREAM)
def an_array_that_indexes_an_array(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    return x + torch.from_numpy(array[np.argsort(array)])


@followed(*STREAM)
def sums_so_far(x: torch.Tensor) -> Any:
    return x * torch.as_tensor(np.cumsum(x.detach().numpy(), axis=0))


@followed(*STREAM)
def counts_in_bins(x: torch.Tensor) -> Any:
    counts, edges = np.histogram(x.detach().numpy(), bins=5, range=(-3, 3))
    return x.sum() + torch.from_numpy(counts) * torch.from_numpy(edges[:-1]).float()


@followed(*STREAM)
def percentiles(x: torch.Tensor) -> Any:
    found = np.percentile(x.detach().numpy(), [25, 50, 75])
    return x.mean() * torch.tensor(found, dtype=torch.float32)


@followed(*STREAM)
def a_choice_by_a_mask(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    return x + torch.from_numpy(np.where(array > 0, array, -0.5 * array))


@followed(*SQUARES)
def parts_of_a_matrix(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    left, values, _ = np.linalg.svd(array @ array.T)
    return x @ torch.from_numpy(left) + torch.from_numpy(values)


@followed(*STREAM)
def a_copy_that_is_written_to(x: torch.Tensor) -> Any:
    array = x.detach().numpy().copy()
    array += 1
    array[0] = 3
    array[1:] *= array[1]
    array.sort()
    return x * torch.from_numpy(array)


@followed(*STREAM)
def views_of_what_is_written_to(x: torch.Tensor) -> Any:
    array = x.detach().numpy().copy()
    view = array[1:]
    array *= 2
    view[0] = 7
    return x * torch.from_numpy(array.copy()) + float(view.sum())


def reversed_and_scaled(array: Any, factor: float) -> Any:
    flat = array.reshape(-1)
    return flat[::-1] * factor


@followed(*STREAM)
def a_function_of_ones_own(x: torch.Tensor) -> Any:
    return x + torch.tensor(reversed_and_scaled(x.detach().numpy(), 2.0).copy())


@followed(*STREAM)
def results_put_into_an_array(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    found = np.zeros(len(array) + 1, dtype=np.float32)
    for k in range(len(array)):
        found[k + 1] = found[k] + array[k]
    return x.sum() + torch.from_numpy(found)


@followed(*SQUARES)
def rows_in_a_list(x: torch.Tensor) -> Any:
    rows = []
    for row in x.detach().numpy():
        rows.append(np.sort(row))
    return x + torch.from_numpy(np.stack(rows))


@followed(*STREAM)
def errors_of_numpys_that_are_ignored(x: torch.Tensor) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        array = np.log(x.detach().numpy())
    array[np.isnan(array)] = 0
    return x + torch.from_numpy(array)


@followed(*STREAM)
def an_array_for_a_result(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    found = np.empty(4, dtype=np.float32)
    np.multiply(array, 2, out=found)
    np.clip(found, 0, 1, out=found)
    return x + torch.from_numpy(found)


@followed(*STREAM)
def memory_that_is_shared_with_a_tensor(x: torch.Tensor) -> Any:
    array = np.sort(x.detach().numpy())
    tensor = torch.from_numpy(array)
    tensor.mul_(2)
    return x + tensor + float(array[1])


@followed(*STREAM)
def a_tensor_that_is_written_to_after_it_was_handed_over(x: torch.Tensor) -> Any:
    copied = x.detach() * 1
    array = copied.numpy()
    same = torch.from_numpy(array)
    copied.add_(1)
    return x + same + float(array.sum())


# Numbers and answers


@followed(*LONG)
def a_largest_number_that_decides(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    if array.max() > 1:
        return x * float(array.max())
    return x - torch.from_numpy(array).mean()


@followed(*LONG)
def gates_by_turns(x: torch.Tensor) -> Any:
    for _ in range(4):
        if x.sum() > 0:
            x = x + torch.from_numpy(np.tanh(x.detach().numpy())) - 0.5
        else:
            x = x - torch.from_numpy(np.sort(x.detach().numpy())) + 0.2
    return x


@followed(*LONG)
def an_array_that_is_kept_past_a_question(x: torch.Tensor) -> Any:
    array = np.sort(x.detach().numpy())
    kept = [array[1:], array.mean()]
    x = x * 2 if x[0] > 0 else x * 3
    x = x + torch.from_numpy(kept[0]).sum()
    if array[1] > 0:
        x = x + float(kept[1])
    return x * torch.from_numpy(array)


@followed(*LONG)
def an_array_that_is_filled_past_a_question(x: torch.Tensor) -> Any:
    found = np.zeros(4, dtype=np.float32)
    found[0] = x.detach().numpy()[1]
    x = x * 2 if x[0] > 0 else x * 3
    np.multiply(found, 2, out=found)
    found[1] = found[0]
    return x + torch.from_numpy(found)


@case(*LONG)
def an_array_that_is_printed_past_a_question(x: torch.Tensor) -> Any:
    found = np.zeros(4, dtype=np.float32)
    found[:2] = x.detach().numpy()[1:3]
    if x[0] > 0:
        x = x + float(str(found[0])) + float(sum(found.flat))
    return x + torch.from_numpy(found)


@followed(*STREAM)
def numbers_one_by_one(x: torch.Tensor) -> Any:
    total = 0.0
    for number in x.detach().numpy().tolist():
        total = total + number
    return x * total


@followed(*STREAM)
def a_place_that_indexes(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    place = array.argmax()
    return x[int(place)] * array[place] + x[place]


@followed(*STREAM)
def sizes_of_an_array(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    return x * len(array) + array.shape[0] + array.ndim + array.size


@followed(*STREAM)
def classes_of_arrays(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    is_usual = isinstance(array, np.ndarray) and isinstance(array[0], np.floating)
    return x * (2 if is_usual and array.dtype == np.float32 else 3)


@followed(*STREAM)
def numbers_of_numpys_times_tensors(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    return x * array.max() + array[0]


@followed(*[case_ for n in range(12) for case_ in [some(2 + n % 4, 3, seed=n)]])
def sizes_that_vary(x: torch.Tensor) -> Any:
    return x + torch.from_numpy(np.sort(x.detach().numpy(), axis=-1))


@followed(*[some(3, 3, seed=0) if n % 3 else args(lambda: (torch.zeros(3, 3),)) for n in range(9)])
def an_error_of_numpys_that_is_caught(x: torch.Tensor) -> Any:
    try:
        return x + torch.from_numpy(np.linalg.inv(x.detach().numpy()))
    except np.linalg.LinAlgError:
        return x - 1


class KeepsUnread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [None]

    def forward(self, x: torch.Tensor) -> Any:
        found = np.sort(x.detach().numpy())
        self.seen[0] = found
        return x + torch.from_numpy(found.copy())


case(*STREAM)(KeepsUnread)


# What cannot be followed


@refused(*STREAM)
def a_write_to_a_tensors_own_memory(x: torch.Tensor) -> Any:
    copied = x.detach() * 1
    array = copied.numpy()
    array += 1
    return x + copied + torch.from_numpy(array)


# Several arrays, or answers, in one instruction


@followed(*LONG)
def pairs_in_a_dict(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    ranked = {int(place): number for place, number in zip(np.argsort(array), array, strict=True)}
    return x * float(ranked[0])


@followed(*LONG)
def numbers_two_apart(x: torch.Tensor) -> Any:
    array, total = x.detach().numpy(), 0.0
    for before, after in zip(array, array[2:], strict=False):
        if before < after:
            total += float(after)
    return x * total


@followed(*LONG)
def rows_beside_columns(x: torch.Tensor) -> Any:
    array, total = x.detach().reshape(2, 2).numpy(), 0.0
    for row, column in zip(array, array.T, strict=True):
        if row[0] > column[1]:
            total += float(row.sum())
    return x * total


@followed(*LONG)
def as_many_as_the_fewer(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    for high, low in zip(array[array > 0], array[array < 0], strict=False):
        x = x + float(high) * float(low)
    return x


@followed(*LONG)
def truths_in_a_list(x: torch.Tensor) -> Any:
    y = x
    for is_high in list(x.detach().numpy() > 0):
        y = y * 2 if is_high else y + 1
    return y


@followed(*LONG)
def truths_beside_numbers(x: torch.Tensor) -> Any:
    array, y = x.detach().numpy(), x
    for number, is_high in zip(array, array > 0, strict=True):
        y = y * 2 if is_high else y + float(number)
    return y


@followed(*LONG)
def truths_that_are_numbered_by_chance(x: torch.Tensor) -> Any:
    for place, is_low in enumerate(np.random.rand(4) < 0.5):
        x = x + place if is_low else x * 2
    return x


@followed(*LONG)
def a_range_between_two(x: torch.Tensor) -> Any:
    low, more = (x.detach().abs() * 2).to(torch.int64).numpy()[:2]
    for number in range(low, low + 1 + more):
        x = x + number
    return x


@followed(*LONG)
def a_slice_between_two(x: torch.Tensor) -> Any:
    ends = (x.detach().abs() * 2).to(torch.int64).numpy()
    return x * sum([1.0, 2.0, 3.0, 4.0, 5.0, 6.0][ends[0] : ends[1]])


@followed(*LONG)
def dimensions_that_are_squeezed_out(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    found = np.squeeze(array[array > 0.5])
    return x * float(np.sum(found > 1)) + found.reshape(-1).sum() + found.ndim


@followed(*LONG)
def a_length_that_not_all_have(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    try:
        return x * len(np.squeeze(array[array > 0.5]))
    except TypeError:
        return x * 3


@followed(*LONG)
def an_array_of_one_number_before_questions(x: torch.Tensor) -> Any:
    most = x.detach().max().numpy()
    copied = most.copy().astype("float64")
    is_high = (x.detach().max() > 1).numpy()
    x = x + 1 if x[0] > 0 else x
    x = x + 1 if x[1] > 0 else x
    return (x * 2 if is_high else x) * copied.item()


@followed(*LONG)
def a_number_and_how_often_it_is_halved(x: torch.Tensor) -> Any:
    part, times = np.frexp(x.detach().max().numpy())
    flat = np.asarray(part).ravel()
    x = x + 1 if x[0] > 0 else x
    return x * float(flat[0]) + int(times)


@followed(*LONG)
def numbers_in_order_among_plain_ones(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    ordered = sorted([array[0], 0.0, array[1], 1])
    x = x + 1 if x[2] > 0 else x
    return x * float(ordered[1])


@followed(*LONG)
def some_and_all(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    x = x * 2 if any(array > 1) else x
    return x + 1 if all(array < 1.5) else x


@followed(*LONG)
def the_first_and_the_rest(x: torch.Tensor) -> Any:
    first, *rest = x.detach().numpy()
    return x * float(first) + sum([float(number) for number in rest if number > first])


@followed(*LONG)
def numbers_in_a_chain(x: torch.Tensor) -> Any:
    array, total = x.detach().numpy(), 0.0
    few = itertools.islice(array, 1 + array.argmin())
    for number in itertools.chain(array[array > 0], [1.0], few):
        if number > total:
            total += float(number)
    return x * total


# Content that C code needs when it moves things around


@followed(*LONG)
def a_place_that_a_list_loses(x: torch.Tensor) -> Any:
    numbers = [1.0, 2.0, 3.0, 4.0]
    lost = numbers.pop(x.detach().numpy().argmin())
    numbers.insert(x.detach().numpy().argmax(), 5.0)
    return x * lost + numbers[1]


@followed(*LONG)
def numbers_that_a_list_gains(x: torch.Tensor) -> Any:
    gained: list[Any] = []
    gained.extend(x.detach().numpy())
    return x * float(gained[0]) + float(gained[3])


@followed(*LONG)
def numbers_that_are_counted_from_a_place(x: torch.Tensor) -> Any:
    array, total = x.detach().numpy(), 0.0
    for place, number in enumerate(array, start=array.argmin()):
        total += place * float(number)
    for place, number in enumerate(array, array.argmax()):
        total += place * float(number)
    return x * total


@followed(*LONG)
def a_number_where_nothing_comes(x: torch.Tensor) -> Any:
    array = x.detach().numpy()
    return x * float(next(iter(array[array > 1]), array[0]))


@refused(*STREAM)
def places_that_are_keys(x: torch.Tensor) -> Any:
    array, ranked = x.detach().numpy(), {}
    ranked.update(zip(np.argsort(array), array, strict=True))
    return x * float(ranked[0])


@refused(*STREAM)
def pairs_that_are_keys(x: torch.Tensor) -> Any:
    return x * len({(number, 1): 1 for number in x.detach().round().numpy()})


@refused(*STREAM)
def a_part_of_a_list_that_is_deleted(x: torch.Tensor) -> Any:
    numbers = [1.0, 2.0, 3.0, 4.0, 5.0]
    del numbers[: x.detach().numpy().argmin()]
    return x * numbers[0]


@refused(*STREAM)
def a_part_of_a_list_that_is_exchanged(x: torch.Tensor) -> Any:
    numbers: list[Any] = [1.0, 2.0, 3.0, 4.0]
    numbers[1:3] = x.detach().numpy()[:2]
    return x * float(numbers[1])


# Random numbers, and what numpy makes of numbers


@followed(*STREAM)
def an_array_in_random_order(x: torch.Tensor) -> Any:
    return x + torch.from_numpy(np.random.permutation(x.detach().numpy()))


@followed(*STREAM)
def a_choice_by_probabilities(x: torch.Tensor) -> Any:
    likely = torch.softmax(x.detach().double(), 0).numpy()
    return x * np.random.choice(4, p=likely / likely.sum())


@followed(*VARIOUS)
def a_random_mask(x: torch.Tensor) -> Any:
    return x.masked_fill(torch.from_numpy(np.random.rand(*x.shape) < 0.3), 0.0)


@followed(*VARIOUS)
def noise_of_a_shape(x: torch.Tensor) -> Any:
    return x + torch.tensor(np.random.normal(0, 1, size=x.shape), dtype=x.dtype)


@followed(*VARIOUS)
def rows_by_chance(x: torch.Tensor) -> Any:
    rows = np.random.choice(len(x), max(1, len(x) // 2), replace=False)
    return x[torch.as_tensor(rows)].sum(0)


@followed(*VARIOUS)
def a_choice_that_fails_at_times(x: torch.Tensor) -> Any:
    try:
        columns = np.random.choice(3, size=len(x), replace=False)
    except ValueError as error:
        return x * len(str(error))
    return x[:, torch.from_numpy(columns)].sum()


@followed(*VARIOUS)
def a_side_by_the_greatest(x: torch.Tensor) -> Any:
    drawn = np.random.uniform(size=3)
    return x * drawn.mean() if drawn.max() > 0.8 else x * 2


@followed(*VARIOUS)
def a_box_that_is_cut(x: torch.Tensor) -> Any:
    share, width = np.random.rand(), x.shape[1]
    half = int(width * np.sqrt(1 - share)) // 2
    middle = np.random.randint(width)
    low, high = int(np.clip(middle - half, 0, width)), int(np.clip(middle + half, 0, width))
    y = x.clone()
    y[:, low:high] = x.flip(0)[:, low:high]
    return y


@followed(*VARIOUS)
def spans_that_are_masked(x: torch.Tensor) -> Any:
    count = int(0.4 * len(x) + np.random.rand(1).item())
    mask = np.zeros(x.shape, dtype=bool)
    starts = np.random.choice(np.arange(len(x)), count, replace=False)
    for start in np.concatenate([starts, np.array([0])]):
        mask[start : start + 1] = True
    return x.masked_fill(torch.from_numpy(mask), 0.0)


@followed(*VARIOUS)
def a_mixture(x: torch.Tensor) -> Any:
    weights = np.float32(np.random.dirichlet([1.0, 1.0, 1.0]))
    share = np.float32(np.random.beta(1.0, 1.0))
    mixed = torch.zeros_like(x)
    for k in range(3):
        mixed = mixed + weights[k] * (x * (k + 1))
    return share * x + (1 - share) * mixed


class HoldsGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(self.source.integers(3)):
            x = x * 1.5
        return x + torch.from_numpy(self.source.normal(size=x.shape[1])).float()


case(*VARIOUS, served=never_live)(HoldsGenerator)


@followed(*VARIOUS)
def a_generator_by_a_number(x: torch.Tensor) -> Any:
    source = np.random.default_rng(len(x))
    return x * source.normal()


@followed(*VARIOUS)
def functions_of_a_number(x: torch.Tensor) -> Any:
    mean = x.mean().item()
    return x * np.exp(-mean) + np.clip(mean, -0.1, 0.1) * np.float32(mean)


@case(*VARIOUS)
def types_that_numpy_finds(x: torch.Tensor) -> Any:
    rows, mean = len(x), x.mean().item()
    found = [
        np.array([rows, 1]), np.array([rows], dtype="U"), np.array([(rows, 1)], dtype="i4,i4"),
        np.array([mean, rows]), np.asarray([rows], dtype="M8[D]"), np.asarray(rows, dtype="S3"),
    ]  # fmt: skip
    return x * 2, [(array.dtype.str, array.tobytes()) for array in found]


@refused(*STREAM)
def a_write_after_a_tensor_was_made(x: torch.Tensor) -> Any:
    array = np.sort(x.detach().numpy())
    tensor = torch.from_numpy(array)
    array[0] = 5
    return x * tensor


@refused(*STREAM)
def a_view_from_before(x: torch.Tensor) -> Any:
    found = np.zeros(4, dtype=np.float32)
    view = found[:2]
    found[:] = x.detach().numpy()
    return x + torch.from_numpy(found.copy()) + float((view * 2).sum())


@refused(*STREAM)
def a_view_from_the_end(x: torch.Tensor) -> Any:
    array = x.detach().numpy().copy()
    view = array[::-1]
    array *= 2
    return x + torch.from_numpy(view.copy())


@refused(*STREAM)
def an_array_that_is_shuffled(x: torch.Tensor) -> Any:
    array = x.detach().numpy().copy()
    np.random.shuffle(array)
    return x + torch.from_numpy(array)


class Special(np.ndarray[Any, Any]):
    pass


@refused(*STREAM)
def a_subclass_of_arrays(x: torch.Tensor) -> Any:
    return x + torch.from_numpy(np.asarray(x.detach().numpy().view(Special) * 2))


def calls_from_c(name: str, function: Callable[[Any], Any]) -> None:
    def program(x: torch.Tensor) -> Any:
        return x + torch.tensor(function(x.detach().numpy()))

    program.__name__ = name
    refused(*STREAM)(program)


calls_from_c("a_function_by_map", lambda array: [*map(np.sum, [array, array * 2])][1])
calls_from_c("a_key_of_sorted", lambda array: sorted([array, array * 2], key=np.sum)[0])
calls_from_c("a_sum_of_a_generator", lambda array: sum(part for part in [array, array * 2]))
calls_from_c("a_reduction", lambda array: functools.reduce(np.add, [array, array * 2]))
calls_from_c("ones_own_code_for_each", lambda array: np.vectorize(lambda n: n + 1)(array))
calls_from_c("ones_own_code_along", lambda array: np.apply_along_axis(lambda r: r * 2, 0, array))
calls_from_c("a_text", lambda array: float(f"{array.max():.3f}"))
calls_from_c("bytes_of_memory", lambda array: float(bytes(memoryview(array))[0]))
calls_from_c("a_key_of_a_dict", lambda array: {1: 2.0}.get(array.argmax(), 3.0))
calls_from_c("an_attribute", lambda array: vars(type("O", (), {"a": array}))["a"] * 2)


# What Python asks of arrays within one instruction


@followed(*LONG)
def one_item_between_two_bounds(x: torch.Tensor) -> Any:
    first = x.detach().numpy()[:1]
    return x + 1 if -0.5 < first < 0.5 else x - 1


@followed(*LONG)
def items_that_are_compared(x: torch.Tensor) -> Any:
    first, second = x.detach().numpy()[:1], x.detach().numpy()[1:2]
    if first < second and not first > 1.5:
        return x * 2
    return x * 3 if np.sign(first) == 1 else x


@followed(*LONG)
def a_list_of_those_that_are_positive(x: torch.Tensor) -> Any:
    return x.sum() + torch.tensor([float(one) for one in x.detach().numpy() if one > 0] or [0.0])


@followed(*STREAM)
def parts_by_computed_bounds(x: torch.Tensor) -> Any:
    array = x.detach().numpy().copy()
    array[int(np.argmax(array)) :] = 0.5
    array[1:3] += array.mean()
    return x * torch.from_numpy(array[: array.shape[0]])


@followed(*SQUARES)
def arguments_by_name(x: torch.Tensor) -> Any:
    array, given, named = x.detach().numpy(), (0,), {"keepdims": True}
    total = np.sum(array, axis=1, keepdims=True) + array.sum(axis=1, keepdims=True)
    return x * torch.from_numpy(total + np.sum(array, *given, **named))


@followed(*LONG)
def an_error_where_there_is_no_item(x: torch.Tensor) -> Any:
    try:
        value = [0.5, 1.5][int(x.detach().numpy().argmax())]
    except IndexError:
        value = -1.0
    return x * value


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        out = x if self.last is None else x + torch.from_numpy(self.last)
        self.last = np.sort(x.detach().numpy())
        return out


case(*STREAM, served=never_live)(Keeps)


class KeepsInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        out = x * 1
        for array in self.kept:
            out = out + float(array.sum())
        self.kept.append(np.sort(x.detach().numpy()))
        return out


case(*STREAM, served=always_live)(KeepsInList)
