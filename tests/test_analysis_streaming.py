"""Streaming statistics against numpy and scipy over all rows at once."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bendtrace.analysis import (
    Count,
    Covariance,
    Histogram,
    Mean,
    MinMax,
    Moments,
    Quantiles,
    Statistic,
    Tally,
    TopK,
    Variance,
)
from bendtrace.errors import InputError
from bendtrace.research.streaming import decode_state, encode_state, even_edges, merge_states

MAKERS: dict[str, Callable[[], Any]] = {
    "count": Count,
    "mean": Mean,
    "variance": Variance,
    "moments": lambda: Moments(4),
    "covariance": Covariance,
    "min and max": MinMax,
    "top": lambda: TopK(3),
    "histogram": lambda: Histogram([-1.0, 0.0, 0.5, 2.0]),
    "quantiles": lambda: Quantiles(8),
    "tally": Tally,
}


def batches(rows: Tensor, cuts: list[int]) -> list[Tensor]:
    edges = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    return [rows[a:b] for a, b in itertools.pairwise(edges)]


def fed(made: Any, parts: list[Tensor]) -> Any:
    for part in parts:
        made.update(part)
    return made


def rows_of(seed: int, n: int, *shape: int) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [torch.tensor(value)]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# Moments

scales = st.sampled_from([1e-12, 1e-3, 1.0, 1e6])
offsets = st.sampled_from([0.0, 1.0, -1e6, 1e9, 1e12])
cut_lists = st.lists(st.integers(0, 60), max_size=6)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(1, 50), scales, offsets, cut_lists, st.booleans())
def test_moments_are_those_of_all_rows_to_rounding(
    seed: int, n: int, scale: float, offset: float, cuts: list[int], merged: bool
) -> None:
    rows = rows_of(seed, n, 3).double() * scale + offset
    parts = batches(rows, cuts)
    if merged:
        made = Moments(4)
        for part in reversed(parts):
            made.merge(fed(Moments(4), [part]))
    else:
        made = fed(Moments(4), parts)
    # Without rounding: numbers this close to each other are subtracted exactly.
    exact = rows.numpy().astype(np.longdouble) - np.longdouble(offset)
    mean = exact.mean(0) + np.longdouble(offset)
    away = exact - exact.mean(0)
    second, third, fourth = ((away**power).mean(0) for power in (2, 3, 4))
    spacing = np.spacing(np.abs(offset) + scale)
    assert made.count == n
    np.testing.assert_allclose(made.mean, mean.astype(float), rtol=1e-15, atol=2 * spacing)
    if n > 1 and scale > 1e3 * spacing:
        variance = (second * n / (n - 1)).astype(float)
        np.testing.assert_allclose(made.variance(), variance, rtol=1e-12)
        np.testing.assert_allclose(made.variance(0), second.astype(float), rtol=1e-12)
        np.testing.assert_allclose(
            made.skewness, (third / second**1.5).astype(float), rtol=1e-10, atol=1e-10
        )
        np.testing.assert_allclose(
            made.kurtosis, (fourth / second**2 - 3).astype(float), rtol=1e-10, atol=1e-10
        )


def test_moments_agree_with_numpy_and_scipy() -> None:
    rows = rows_of(0, 1000, 4).double().exp()
    made = fed(Moments(4), list(rows.split(77)))
    data = rows.numpy()
    np.testing.assert_allclose(made.mean, data.mean(0), rtol=1e-14)
    np.testing.assert_allclose(made.variance(), data.var(0, ddof=1), rtol=1e-13)
    np.testing.assert_allclose(made.skewness, scipy.stats.skew(data), rtol=1e-12)
    np.testing.assert_allclose(made.kurtosis, scipy.stats.kurtosis(data), rtol=1e-12)
    np.testing.assert_allclose(made.total, data.sum(0), rtol=1e-14)


def test_a_large_mean_does_not_drown_a_small_variance() -> None:
    rows = (torch.arange(10000) % 2).double() * 2.0**-20 + 2.0**30  # exact in float64
    made = fed(Variance(correction=0), list(rows.split(7)))
    assert made.result().item() == pytest.approx(2.0**-42, rel=1e-14)
    parts = [fed(Variance(correction=0), [part]) for part in rows.split(1000)]
    whole = Variance(correction=0)
    for part in parts:
        whole.merge(part)
    assert whole.result().item() == pytest.approx(2.0**-42, rel=1e-14)
    naive = (rows**2).mean() - rows.mean() ** 2
    assert naive.item() != pytest.approx(2.0**-42, rel=0.1)  # so that the test means something


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e10, 1e10), min_size=2, max_size=30), cut_lists)
def test_the_variance_of_any_numbers_is_that_of_fractions(
    numbers: list[float], cuts: list[int]
) -> None:
    made = fed(Moments(2), batches(torch.tensor(numbers, dtype=torch.float64), cuts))
    exact = [Fraction(number) for number in numbers]
    mean = sum(exact) / len(exact)
    variance = sum((number - mean) ** 2 for number in exact) / (len(exact) - 1)
    largest = max(abs(number) for number in numbers) + 1e-150
    assert made.mean.item() == pytest.approx(float(mean), rel=1e-15, abs=1e-15 * largest)
    # Below 2.2e-308 a float has fewer digits: only its last ones may differ there.
    assert made.variance().item() == pytest.approx(
        float(variance), rel=1e-12, abs=(1e-15 * largest) ** 2 + 1e-318
    )


def test_constant_rows_have_no_variance_at_all() -> None:
    made = fed(Moments(2), [torch.full((n, 1), 1e8 + 0.1, dtype=torch.float64) for n in (3, 5, 7)])
    assert made.variance().item() == 0.0
    assert made.mean.item() == 1e8 + 0.1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nan_and_infinity_give_what_numpy_gives_and_stay_in_their_unit(bad: float) -> None:
    rows = rows_of(3, 9, 2).double()
    rows[4, 0] = bad
    made = fed(Moments(2), list(rows.split(2)))
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(made.mean, rows.numpy().mean(0), rtol=1e-14)
        np.testing.assert_allclose(made.variance(), rows.numpy().var(0, ddof=1), rtol=1e-13)
    merged = fed(Moments(2), [rows[:5]])
    merged.merge(fed(Moments(2), [rows[5:]]))
    np.testing.assert_allclose(merged.mean, rows.numpy().mean(0), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool])
def test_small_dtypes_are_added_up_in_float64(dtype: torch.dtype) -> None:
    rows = (rows_of(1, 5000, 2) * 3).to(dtype)
    made = fed(Variance(), list(rows.split(100)))
    data = rows.double().numpy()
    np.testing.assert_allclose(made.mean, data.mean(0), rtol=1e-13)
    np.testing.assert_allclose(made.result(), data.var(0, ddof=1), rtol=1e-13)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 999), st.integers(2, 40), offsets, cut_lists, st.booleans())
def test_the_covariance_is_numpy_s(
    seed: int, n: int, offset: float, cuts: list[int], merged: bool
) -> None:
    rows = rows_of(seed, n, 4).double() @ rows_of(5, 4, 4).double()
    rows = (rows * 4096).round() / 4096  # so that the offset changes nothing but the mean
    parts = batches(rows + offset, cuts)
    made = Covariance()
    for part in parts:
        made.merge(fed(Covariance(), [part])) if merged else made.update(part)
    expected = np.cov(rows.numpy(), rowvar=False)
    np.testing.assert_allclose(made.result(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(made.comoment, expected * (n - 1), rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(made.mean, (rows + offset).numpy().mean(0), rtol=1e-14, atol=1e-14)


# Extremes


def test_min_and_max_keep_the_dtype_and_are_exact() -> None:
    rows = torch.tensor([[2**62 + 1, -5], [2**62, 7], [2**62 + 3, 0]])
    found = fed(MinMax(), list(rows.split(1))).result()
    assert found["min"].tolist() == [2**62, -5]
    assert found["max"].tolist() == [2**62 + 3, 7]
    assert found["min"].dtype == torch.int64
    assert fed(MinMax(), [torch.tensor([[True], [False]])]).result()["max"].tolist() == [True]
    half = fed(MinMax(), [rows_of(0, 5, 2).bfloat16()]).result()
    assert half["max"].dtype == torch.bfloat16


def test_min_and_max_pass_nan_on_as_numpy_does() -> None:
    rows = torch.tensor([[1.0, 2.0], [math.nan, 3.0], [0.5, math.inf]])
    found = fed(MinMax(), list(rows.split(1))).result()
    np.testing.assert_array_equal(found["min"], rows.numpy().min(0))
    np.testing.assert_array_equal(found["max"], rows.numpy().max(0))


def top_by_hand(
    values: list[float], samples: list[int], positions: list[int], k: int, largest: bool
) -> list[tuple[float, int, int]]:
    rows = [row for row in zip(values, samples, positions, strict=True) if not math.isnan(row[0])]
    sign = -1 if largest else 1
    return sorted(rows, key=lambda row: (sign * row[0], row[1], row[2]))[:k]


number = st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 1.0, 2.0, math.inf, math.nan])


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(number, st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=25),
    cut_lists, st.integers(1, 6), st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_largest_are_exact_with_ties_whatever_the_batches_and_the_order(
    rows: list[tuple[float, int, int]], cuts: list[int], k: int, largest: bool, random: Any
) -> None:
    rows = list(
        {(sample, position): (v, sample, position) for v, sample, position in rows}.values()
    )
    expected = top_by_hand(*map(list, zip(*rows, strict=True)), k, largest)
    values, samples, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    edges = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    parts = []
    for a, b in itertools.pairwise(edges):
        parts.append(TopK(k, largest=largest))
        parts[-1].update(values[a:b, None], samples[a:b], positions[a:b])
    random.shuffle(parts)
    made = parts[0]
    for part in parts[1:]:
        made.merge(part)
    found = made.result()
    count = len(expected)
    got = [found[name][:count, 0].tolist() for name in ("values", "samples", "positions")]
    assert list(zip(*got, strict=True)) == expected
    assert found["values"][count:].isnan().all()
    assert (found["samples"][count:] == -1).all()
    assert found["values"].shape[0] == min(k, len(rows))
    assert made.count == len(rows)


def test_the_smallest_of_whole_numbers_are_exact_beyond_2_to_the_53() -> None:
    rows = torch.tensor([2**53 + 1, 2**53, 2**60, 2**53 + 1])
    found = fed(TopK(3, largest=False), list(rows.split(1))).result()
    assert found["values"].tolist() == [2**53, 2**53 + 1, 2**53 + 1]
    assert found["samples"].tolist() == [1, 0, 3]


# Histogram


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=40),
    st.lists(st.sampled_from([-3.5, -1.0, 0.0, 0.1, 0.25, 1.0, 7.0]), min_size=2, unique=True),
    cut_lists,
)
def test_counts_are_numpy_s(numbers: list[float], edges: list[float], cuts: list[int]) -> None:
    edges = sorted(edges)
    rows = torch.tensor([*numbers, *edges])  # on the edges, too
    found = fed(Histogram(edges), batches(rows, cuts)).result()
    data = rows.numpy()
    expected, _ = np.histogram(data, np.array(edges))
    assert found["counts"].tolist() == expected.tolist()
    assert found["counts"].dtype == torch.int64
    assert found["below"].item() == (data.astype(float) < edges[0]).sum()
    assert found["above"].item() == (data.astype(float) > edges[-1]).sum()
    assert found["nan"].item() == 0


def test_a_histogram_counts_each_unit_and_nan_and_infinities_apart() -> None:
    rows = torch.tensor([[0.5, math.nan], [-math.inf, 0.1], [math.inf, 1.0], [0.2, 0.0]])
    found = fed(Histogram([0.0, 0.3, 1.0]), list(rows.split(3))).result()
    assert found["counts"].tolist() == [[1, 2], [1, 1]]
    assert (found["below"].tolist(), found["above"].tolist()) == ([1, 0], [1, 0])
    assert found["nan"].tolist() == [0, 1]


def test_even_edges_are_numpy_s() -> None:
    for bins, low, high in ((10, 0.0, 1.0), (7, -0.3, 0.1), (100, 1e-3, 1e3)):
        assert even_edges(bins, low, high).tolist() == np.linspace(low, high, bins + 1).tolist()


@pytest.mark.parametrize("edges", [[1.0], [0.0, 0.0], [1.0, 0.0], [0.0, math.inf], [[0.0, 1.0]]])
def test_edges_that_are_none_are_refused(edges: Any) -> None:
    with pytest.raises(InputError, match="edges="):
        Histogram(edges)


# Quantiles


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 999), st.integers(1, 63), cut_lists)
def test_quantiles_of_few_rows_are_numpy_s_bit_by_bit(seed: int, n: int, cuts: list[int]) -> None:
    rows = rows_of(seed, n, 2).double()
    made = fed(Quantiles(32), batches(rows, cuts))
    ranks = [0.0, 0.1, 0.25, 0.5, 0.9, 1.0]
    assert made.rank_error == 0.0
    assert torch.equal(made.at(ranks), torch.from_numpy(np.quantile(rows.numpy(), ranks, axis=0)))


def assert_within_bound(made: Quantiles, data: np.ndarray[Any, Any]) -> None:
    ranks = np.linspace(0, 1, 41)
    found = made.at(ranks).numpy()
    slack = made.rank_error * len(data) + 1  # and one row, for between two values
    for rank, value in zip(ranks, found, strict=True):
        place = rank * (len(data) - 1)
        assert (data < value).sum() - slack <= place <= (data <= value).sum() + slack


KINDS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: rows_of(0, n),
    "sorted": lambda n: torch.arange(float(n)),
    "sorted down": lambda n: -torch.arange(float(n)),
    "few values": lambda n: (rows_of(1, n) * 2).round(),
    "zigzag": lambda n: torch.arange(float(n)) * (1 - 2 * (torch.arange(n) % 2)),
    "heavy tails": lambda n: rows_of(2, n) / rows_of(3, n),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 37, 5000])
def test_quantiles_of_many_rows_are_within_the_bound(kind: str, split: int) -> None:
    n = 3000 if split == 1 else 20000
    rows = KINDS[kind](n)
    made = fed(Quantiles(64), list(rows.split(split)))
    data = rows.double().numpy()
    assert 0 < made.rank_error <= math.log2(n / 64) / 128
    assert_within_bound(made, data)
    assert made.at([0.0, 1.0]).tolist() == [data.min(), data.max()]
    kept = sum(len(level) for level in made._levels)
    assert kept <= 128 * math.log2(n / 64)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_quantiles_are_within_the_bound(kind: str) -> None:
    rows = KINDS[kind](20000)
    parts = [fed(Quantiles(64), list(part.split(99))) for part in rows.split(2300)]
    for order in (parts, parts[::-1]):
        made = Quantiles(64)
        for part in order:
            made.merge(part)
        assert made.count == 20000
        assert made.rank_error * 20000 >= sum(part.rank_error * part.count for part in parts)
        assert made.rank_error <= math.log2(20000 / 64) / 128
        assert_within_bound(made, rows.double().numpy())


def test_the_error_of_quantiles_is_not_to_one_side() -> None:
    data = np.random.default_rng(0).permutation(np.arange(2.0**16))
    made = fed(Quantiles(64), list(torch.from_numpy(data).split(16)))
    ranks = np.linspace(0.05, 0.95, 50)
    errors = made.at(ranks).numpy() / len(data) - ranks
    assert abs(errors.mean()) < made.rank_error / 6
    assert np.abs(errors).max() < made.rank_error / 4


def test_quantiles_agree_with_another_library_within_both_bounds() -> None:
    datasketches = pytest.importorskip("datasketches")
    rows = rows_of(9, 50000).double()
    made = fed(Quantiles(512), list(rows.split(1000)))
    sketch = datasketches.kll_doubles_sketch(512)
    sketch.update(rows.numpy())
    bound = made.rank_error + sketch.normalized_rank_error(False) * 3
    for rank in (0.05, 0.5, 0.95):
        assert abs(sketch.get_rank(made.at([rank]).item()) - rank) <= bound


def test_quantiles_of_a_unit_with_nan_are_nan_and_infinities_are_values() -> None:
    rows = torch.tensor([[1.0, 1.0, -math.inf], [math.nan, 2.0, 0.0], [3.0, 3.0, math.inf]])
    found = fed(Quantiles(), list(rows.split(1))).at([0.0, 0.5, 1.0])
    assert found[:, 0].isnan().all()
    assert found[:, 1:].T.tolist() == [[1.0, 2.0, 3.0], [-math.inf, 0.0, math.inf]]


@pytest.mark.parametrize("ranks", [[-0.1], [1.1], [math.nan], 0.5])
def test_ranks_that_are_none_are_refused(ranks: Any) -> None:
    with pytest.raises(InputError, match="ranks have to be"):
        fed(Quantiles(), [torch.ones(3)]).at(ranks)


# What holds for all


@pytest.mark.parametrize("name", MAKERS)
def test_no_rows_change_nothing(name: str) -> None:
    rows = rows_of(0, 6, 2)
    made = MAKERS[name]()
    if name != "top":  # of which the rest is empty as well
        made.result()
    fed(made, [rows[:0], rows[:4], rows[:0], rows[4:], rows[:0]])
    assert_same(made.result(), fed(MAKERS[name](), [rows[:4], rows[4:]]).result())
    made.merge(fed(MAKERS[name](), [rows[:0]]))
    made.merge(MAKERS[name]())
    assert_same(made.result(), fed(MAKERS[name](), [rows[:4], rows[4:]]).result())
    fresh = MAKERS[name]()
    fresh.merge(made)
    assert_same(fresh.result(), made.result())


@pytest.mark.parametrize("first", [[], [torch.ones(0, 1)], [torch.tensor([[5.0]])]])
def test_a_variance_keeps_its_own_divisor_when_rows_are_merged_into_it(first: list[Tensor]) -> None:
    made = fed(Variance(correction=0), first)
    made.merge(fed(Variance(), [torch.tensor([[1.0], [3.0]])]))
    rows = torch.cat([*first, torch.tensor([[1.0], [3.0]])])
    torch.testing.assert_close(made.result(), rows.double().var(0, correction=0))


@pytest.mark.parametrize("name", MAKERS)
def test_before_any_row_the_result_is_nan_or_zero(name: str) -> None:
    made = MAKERS[name]()
    for value in leaves(made.result()):
        assert value.isnan().all() or (value == 0).all()


@pytest.mark.parametrize("name", MAKERS)
def test_one_row_is_enough(name: str) -> None:
    fed(MAKERS[name](), [rows_of(0, 1, 2)]).result()


@pytest.mark.parametrize("name", MAKERS)
def test_whole_numbers_do_not_depend_on_batches_at_all_and_others_to_rounding(name: str) -> None:
    rows = rows_of(4, 60, 3)
    whole = fed(MAKERS[name](), [rows]).result()
    for split in (1, 7, 59):
        parts = fed(MAKERS[name](), list(rows.split(split)))
        for a, b in zip(leaves(whole), leaves(parts.result()), strict=True):
            if name == "quantiles":
                break  # which have a bound, and tests of their own
            exact = not a.is_floating_point() or name in ("min and max", "top")
            torch.testing.assert_close(a, b, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-13)


@pytest.mark.parametrize("name", MAKERS)
def test_merging_leaves_the_other_as_it_is_and_keeps_nothing_of_it(name: str) -> None:
    first, second = rows_of(1, 9, 2), rows_of(2, 30, 2)
    other = fed(MAKERS[name](), [second])
    before = copy.deepcopy(other.result())
    made, empty = fed(MAKERS[name](), [first]), MAKERS[name]()
    made.merge(other)
    empty.merge(other)
    fed(made, [first])
    fed(empty, [first])
    assert_same(other.result(), before)


@pytest.mark.parametrize("name", MAKERS)
def test_copies_pickles_and_saved_states_go_on_alike(name: str) -> None:
    rows = rows_of(6, 50, 2)
    made = fed(MAKERS[name](), list(rows[:30].split(4)))
    file = io.BytesIO()
    torch.save(encode_state({"it": [made]}), file)
    file.seek(0)
    loaded = decode_state(torch.load(file, weights_only=True))["it"][0]
    others = [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), loaded]
    fed(made, [rows[30:]])
    for other in others:
        assert type(other) is type(made)
        fed(other, [rows[30:]])
        assert_same(other.result(), made.result())


@pytest.mark.parametrize("name", MAKERS)
def test_what_was_given_is_not_held_on_to_nor_changed(name: str) -> None:
    rows = rows_of(7, 12, 2).double()
    kept = rows.clone()
    made = fed(MAKERS[name](), [rows])
    assert torch.equal(rows, kept)
    before = copy.deepcopy(made.result())
    rows.fill_(1e6)
    assert_same(made.result(), before)
    for value in leaves(made.result()):
        value.zero_()
    assert_same(made.result(), before)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "count"])
def test_rows_of_another_shape_are_refused_before_anything_changes(name: str) -> None:
    made = fed(MAKERS[name](), [rows_of(0, 5, 2)])
    before = copy.deepcopy(vars(made))
    with pytest.raises(InputError, match=r"but (now|these)"):
        made.update(rows_of(0, 5, 3))
    with pytest.raises(InputError):
        made.update(torch.tensor(1.0))
    with pytest.raises(InputError, match="cannot be merged"):
        made.merge(fed(MAKERS[name](), [rows_of(0, 5, 3)]))
    assert repr(vars(made)) == repr(before)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Moments(2), Moments(4)),
        (Covariance(), Covariance(0)),
        (TopK(2), TopK(3)),
        (TopK(2), TopK(2, largest=False)),
        (Quantiles(8), Quantiles(16)),
        (Histogram([0.0, 1.0]), Histogram([0.0, 2.0])),
    ],
)
def test_others_with_other_settings_are_not_merged(one: Any, other: Any) -> None:
    with pytest.raises(InputError, match="cannot be merged"):
        one.merge(other)
    with pytest.raises(InputError, match="need the same type"):
        merge_states(one, Count())


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_held_does_not_grow_with_the_number_of_batches(name: str) -> None:
    made, sizes = MAKERS[name](), []
    for number in range(200):
        made.update(rows_of(number, 16, 3))
        sizes.append(sum(leaf.numel() for leaf in held(vars(made))))
    if name == "quantiles":  # by 2 * size values for each time that the rows are twice as many
        assert max(sizes) <= 3 * (16 * math.log2(3200 / 8)) + 9
    else:
        assert len(set(sizes[3:])) == 1


@pytest.mark.parametrize("name", MAKERS)
def test_no_graph_is_held_and_any_mode_goes_on_where_another_ended(name: str) -> None:
    rows = rows_of(0, 40, 3)
    made = MAKERS[name]()
    with torch.inference_mode():
        made.update(rows[:20].clone())
    made.update(rows[20:30].clone().requires_grad_() * 1)
    assert not any(leaf.requires_grad for leaf in held(vars(made)))
    with torch.inference_mode():
        made.update(rows[30:].clone())
    assert_same(made.result(), fed(MAKERS[name](), [rows[:20], rows[20:30], rows[30:]]).result())


def test_the_largest_are_exact_where_few_units_change() -> None:
    rows = rows_of(0, 200, 40) * (1 + torch.arange(200)[:, None] % 7)
    rows[50:, ::2] -= 100
    for largest in (True, False):
        made = fed(TopK(4, largest=largest), list(rows.reshape(200, 8, 5).split(3)))
        found = made.result()
        order = rows.sort(dim=0, descending=largest, stable=True)
        assert torch.equal(found["values"].reshape(4, 40), order.values[:4])
        assert torch.equal(found["samples"].reshape(4, 40), order.indices[:4])


def held(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in held(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in held(item)]
    return []


@pytest.mark.parametrize(
    "make",
    [lambda: Moments(3), lambda: TopK(0), lambda: TopK(True), lambda: Quantiles(1),
     lambda: even_edges(0, 0.0, 1.0), lambda: even_edges(3, 1.0, 1.0)],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InputError):
        make()


def test_moments_that_are_not_kept_are_refused() -> None:
    with pytest.raises(InputError, match="order 4, but only order 2 is kept"):
        fed(Moments(2), [torch.ones(3)]).skewness  # noqa: B018
    with pytest.raises(InputError, match="order 2, but only order 1 is kept"):
        fed(Mean(), [torch.ones(3)]).variance()


def test_states_of_unknown_statistics_say_what_to_do() -> None:
    with pytest.raises(InputError, match="import the module that defines it"):
        decode_state({"statistic": "mine.Own", "values": {}})
    with pytest.raises(InputError, match="override `merge_state`"):
        merge_states(torch.ones(2), torch.ones(2))


def test_a_tally_is_whole_numbers_and_never_negative() -> None:
    made = Tally()
    rows = rows_of(0, 300, 4) > 0
    fed(made, list(rows.split(11)))
    assert made.result().tolist() == rows.sum(0).tolist()
    assert made.result().dtype == torch.int64
    other = fed(Tally(), [rows])
    other.merge(made)
    assert (other.count, other.result().tolist()) == (600, (2 * rows.sum(0)).tolist())
    assert isinstance(made, Statistic)
