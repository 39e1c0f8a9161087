"""Ranks and spectra of features and weights, against numpy, scipy and computation by hand."""

from __future__ import annotations

import copy
import io
import itertools
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.research.composed import PerClassAnalyser
from bendtrace.research.spectra import CovarianceSpectrum, Rank, power_law, spectrum
from bendtrace.research.weights import LayerWeightRank, weight_ranks
from tests.promise import state

MODES = ("aTa", "aaT", "a")


class Refined(nn.Module):
    """A layer of rank 3, then steps as long as the values are large, then maybe one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 3)
        self.up = nn.Linear(3, 8)
        self.drop = nn.Dropout(0.5)
        self.more = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.down(x))
        while x.norm() > 20:
            x = torch.tanh(x)
        if x.sum() > 0:
            x = self.more(self.drop(x))
        return x


def refined() -> Refined:
    torch.manual_seed(0)
    return Refined()


def batches(number: int = 9, size: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    scales = (0.1, 1.0, 100.0)
    return [torch.randn(size, 6, generator=generator) * scales[i % 3] + 0.3 for i in range(number)]


def seen_by_hooks(model: nn.Module, module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Return all that a module gives, in the order of its calls."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
    for x in inputs:
        model(x)
    handle.remove()
    return seen


def of_rank(rank: int, samples: int, features: int, seed: int = 0) -> NDArray[np.float64]:
    """Return a matrix whose singular values are 1 to 2, and else zero."""
    rng = np.random.default_rng(seed)
    left = scipy.linalg.orth(rng.standard_normal((samples, rank)))
    right = scipy.linalg.orth(rng.standard_normal((features, rank)))
    return np.asarray(left @ np.diag(np.linspace(2, 1, rank)) @ right.T)


def eager_state(model: nn.Module) -> Any:
    return state(model), torch.get_rng_state()


# Rank of features


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("where", ["up", "more"])
def test_the_rank_at_a_node_is_that_of_all_samples_together(
    mode: str, centred: bool, where: str
) -> None:
    model, twin = refined(), refined()
    bended, rank = bt.BendedModule(model), Rank(mode, centred=centred)
    with bended.interject(where, rank):
        torch.manual_seed(3)
        for x in batches():
            bended(x)
    torch.manual_seed(3)
    features = torch.cat(seen_by_hooks(twin, getattr(twin, where), batches())).double().numpy()
    if centred:
        features = features - features.mean(0)
    (found,) = rank.to_dict().values()
    assert found["rank"] == np.linalg.matrix_rank(features, tol=1e-4 * np.linalg.norm(features, 2))
    assert found["samples"] == len(features)
    assert found["features"] == 8
    assert where == "more" or found["rank"] == 4 - centred  # three directions and the bias
    values = scipy.linalg.svdvals(features)
    values = values[: int(found["rank"])]
    parts = values / values.sum()
    assert found["effective_rank"] == pytest.approx(math.exp(scipy.stats.entropy(parts)), 1e-6)
    assert found["stable_rank"] == pytest.approx((values**2).sum() / values[0] ** 2)
    ratio = (values**2).sum() ** 2 / (values**4).sum()
    assert found["participation_ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize("mode", MODES)
def test_looking_at_ranks_leaves_model_and_random_numbers_as_they_are(mode: str) -> None:
    model, twin = refined(), refined()
    bended = bt.BendedModule(model)
    analysers = [Rank(mode, subset=3), CovarianceSpectrum(subset=3), LayerWeightRank()]
    torch.manual_seed(3)
    expected = [twin(x) for x in batches()]
    after = eager_state(twin)
    torch.manual_seed(3)
    handles = [bended.interject(nn.Linear, analyser) for analyser in analysers]
    found = [bended(x) for x in batches()]
    for handle in handles:
        handle.remove()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    model_state, numbers = eager_state(model)
    assert model_state == after[0]
    assert torch.equal(numbers, after[1])
    assert bended.insertions == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(40, 12), (9, 30), (500, 5), (6, 6)])
@pytest.mark.parametrize("centred", [False, True])
def test_all_modes_agree_and_numpy_with_them(
    dtype: torch.dtype, size: tuple[int, int], centred: bool
) -> None:
    samples, features = size
    for true in {1, 2, min(size) - 1, min(size)}:
        if dtype.itemsize == 2 and true < min(size):
            continue  # rounding to half precision makes the rank full
        matrix = torch.from_numpy(of_rank(true, samples, features, true)).to(dtype)
        found = {}
        for mode in MODES:
            rank = Rank(mode, centred=centred)
            for rows in matrix.split(4):
                rank.update("x", rows)
            found[mode] = rank.to_dict()["x"]["rank"]
        dense = matrix.double().numpy()
        dense = dense - dense.mean(0) if centred else dense
        tol = 1e-5 * np.linalg.norm(dense, 2)
        assert found == dict.fromkeys(MODES, np.linalg.matrix_rank(dense, tol=tol))
        if dtype.itemsize == 4 and not centred:
            assert found["a"] == np.linalg.matrix_rank(matrix.numpy()) == true


@given(
    st.integers(0, 2**16),
    st.integers(1, 12),
    st.integers(1, 8),
    st.lists(st.integers(0, 12), max_size=3),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 1e4]),
)
@settings(max_examples=20, deadline=None)
def test_batches_and_merging_make_no_difference(
    seed: int, samples: int, features: int, cuts: list[int], centred: bool, mean: float
) -> None:
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, min(samples, features) + 1))
    rows = torch.from_numpy(of_rank(rank, samples, features, seed) + mean)
    ends = sorted({0, samples, *(cut for cut in cuts if cut < samples)})
    for mode in MODES:
        whole, parts = Rank(mode, centred=centred), []
        whole.update("x", rows)
        for first, last in itertools.pairwise(ends):
            parts.append(Rank(mode, centred=centred))
            parts[-1].update("x", rows[first:last])
        merged = Rank(mode, centred=centred)
        for part in parts:
            before = copy.deepcopy(part.to_dict())
            merged.merge(part)
            assert part.to_dict() == before
        assert merged.to_dict()["x"]["rank"] == whole.to_dict()["x"]["rank"]
        close = {"rel": 1e-5, "abs": 1e-12}
        assert merged.to_dict()["x"] == pytest.approx(whole.to_dict()["x"], **close)
        assert merged.calls == {"x": len(parts)}
    spectra = []
    for pieces in ([rows], list(rows.tensor_split(ends[1:-1]))):
        spectra.append(CovarianceSpectrum(correction=0))
        for piece in pieces:
            spectra[-1].update("x", piece)
    one, other = (item.results["x"]["eigenvalues"] for item in spectra)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9 * (1 + mean))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_less_exact_says_what_counts_as_zero(mode: str) -> None:
    rows = torch.diag(torch.tensor([1.0, 2e-7, 0.0, 0.0], dtype=torch.float64))
    ranks = []
    for first, second in ((torch.float64, torch.float64), (torch.float64, torch.float32)):
        for types in ((first, second), (second, first)):
            one, other = Rank(mode), Rank(mode)
            one.update("x", rows.to(types[0]))
            other.update("x", rows.to(types[1]))
            one.merge(other)
            ranks.append(one.to_dict()["x"]["rank"])
    assert ranks == [2, 2, 1, 1]  # 4 features times the epsilon of float32 are 5e-7


def test_features_that_never_change_have_no_rank_once_centred() -> None:
    for mode in MODES:
        for value in (0.1, 1e6 + 0.1):
            rank = Rank(mode, centred=True)
            for _ in range(7):
                rank.update("x", torch.full((3, 4), value, dtype=torch.float64))
            assert rank.to_dict()["x"]["rank"] == 0
    rank = Rank()
    rank.update("x", torch.zeros(5, 4))
    assert rank.to_dict()["x"] == {
        "rank": 0, "normalized_rank": 0, "effective_rank": 0, "stable_rank": 0,
        "participation_ratio": 0, "samples": 5, "features": 4,
    }  # fmt: skip


@pytest.mark.parametrize("keep", ["units", 1, -1, (1, 2)])
def test_keep_says_which_dimensions_are_features(keep: Any) -> None:
    value = torch.randn(5, 3, 4, 6)
    rows = {
        "units": value.flatten(1),
        1: value.permute(0, 2, 3, 1).reshape(-1, 3),
        -1: value.reshape(-1, 6),
        (1, 2): value.permute(0, 3, 1, 2).reshape(-1, 12),
    }[keep].numpy()
    rank, covariance = Rank(keep=keep, centred=True), CovarianceSpectrum(keep=keep)
    rank.update("x", value)
    covariance.update("x", value)
    expected = scipy.linalg.svdvals(rows - rows.mean(0))
    np.testing.assert_allclose(rank.spectra["x"].singular_values, expected, rtol=1e-4, atol=1e-4)
    assert rank.to_dict()["x"]["samples"] == covariance.to_dict()["x"]["samples"] == len(rows)


@pytest.mark.parametrize("mode", MODES)
def test_a_value_that_is_not_finite_makes_all_of_it_nan(mode: str) -> None:
    for bad in (math.nan, math.inf):
        rank, covariance = Rank(mode), CovarianceSpectrum(fit=True)
        for analyser in (rank, covariance):
            analyser.update("x", torch.randn(4, 3))
            analyser.update("x", torch.tensor([[1.0, bad, 2.0]]))
            analyser.update("y", torch.eye(3))
        found = rank.to_dict()
        assert math.isnan(found["x"]["rank"])
        assert math.isnan(found["x"]["effective_rank"])
        assert math.isnan(found["x"]["stable_rank"])
        assert math.isnan(found["x"]["participation_ratio"])
        assert found["y"]["rank"] == 3
        assert bool(covariance.results["x"]["eigenvalues"].isnan().all())
        assert math.isnan(covariance.results["x"]["exponent"])


def test_tolerances_that_a_gram_matrix_cannot_keep_are_refused() -> None:
    matrix = torch.diag(torch.tensor([1, 0.5, 1e-8], dtype=torch.float64))
    for mode in ("aTa", "aaT"):
        for tolerance in ({"rtol": 1e-9}, {"atol": 1e-9}, {"rtol": 0.0}):
            rank = Rank(mode, **tolerance)
            rank.update("x", matrix)
            with pytest.raises(InputError, match=r"cannot distinguish .* mode='a'"):
                rank.to_dict()
    rank = Rank("a", rtol=1e-9)
    rank.update("x", matrix)
    assert rank.to_dict()["x"]["rank"] == 3
    close = torch.diag(torch.tensor([1.0, 1e-7]))
    for tolerance, expected in (({}, 1), ({"atol": 1e-8}, 2), ({"rtol": 1e-8}, 2)):
        rank = Rank("a", **tolerance)
        rank.update("x", close)
        assert rank.to_dict()["x"]["rank"] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (1, 1), (1, 5), (5,), ()])
def test_values_of_any_size_have_a_rank(mode: str, shape: tuple[int, ...]) -> None:
    rank, covariance = Rank(mode), CovarianceSpectrum(fit=True)
    for analyser in (rank, covariance):
        analyser.update("x", torch.ones(shape))
    rows = np.ones(shape if len(shape) == 2 else (math.prod(shape), 1))
    found = rank.to_dict()["x"]
    assert (found["samples"], found["features"]) == rows.shape
    assert found["rank"] == (1 if rows.size else 0)
    assert covariance.results["x"]["eigenvalues"].shape == (rows.shape[1],)
    assert covariance.to_dict()["x"]["rank"] == 0


def test_whole_numbers_and_truth_values_are_exact_features() -> None:
    bytes_ = torch.randint(256, (9, 4), dtype=torch.uint8)
    for value in (bytes_, torch.eye(4) > 0, torch.eye(3).int()):
        for mode in MODES:
            rank = Rank(mode)
            rank.update("x", value)
            assert rank.to_dict()["x"]["rank"] == np.linalg.matrix_rank(value.double().numpy())


def test_each_class_can_have_a_rank_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    bases = [torch.randn(rank, 6, generator=generator) for rank in (1, 2, 3)]
    bended = bt.BendedModule(lambda x: torch.tanh(x * 0) + x)
    ranks = PerClassAnalyser(Rank())
    with bended.interject("add", ranks):
        for _ in range(6):
            labels = torch.randint(3, (20,), generator=generator)
            rows = [torch.randn(len(bases[n]), generator=generator) @ bases[n] for n in labels]
            ranks.targets = labels
            bended(torch.stack(rows))
    found = ranks.to_pandas()["rank"]
    assert list(found) == [1, 2, 3]


@pytest.mark.parametrize("mode", MODES)
def test_tolerances_are_those_of_singular_values_in_all_modes(mode: str) -> None:
    matrix = torch.diag(torch.tensor([10.0, 1.0, 0.1, 0.01]))
    for tolerance, expected in (
        ({"rtol": 0.05}, 2), ({"atol": 0.05}, 3), ({"rtol": 0.05, "atol": 2.0}, 1), ({}, 4),
    ):  # fmt: skip
        rank = Rank(mode, **tolerance)  # type: ignore[arg-type]
        rank.update("x", matrix)
        assert rank.to_dict()["x"]["rank"] == expected
        assert spectrum(matrix, **tolerance).rank == expected  # type: ignore[arg-type]


def test_only_the_modes_that_keep_samples_are_bounded() -> None:
    for mode in ("a", "aaT"):
        rank = Rank(mode, max_samples=10)
        rank.update("x", torch.randn(8, 3))
        with pytest.raises(
            bt.errors.InputError, match=r"at 'x': there are 11 samples so far.*max_samples=10"
        ):
            rank.update("x", torch.randn(3, 3))
        assert rank.to_dict()["x"]["samples"] == 8
        rank.update("x", torch.randn(2, 3))
        other = copy.deepcopy(rank)
        with pytest.raises(InputError, match="20 samples"):
            rank.merge(other)
        assert rank.to_dict()["x"]["samples"] == 10
    rank = Rank(max_samples=10)
    sizes = set()
    for _ in range(20):
        rank.update("x", torch.randn(8, 3))
        sizes.add(rank.nbytes)
    assert len(sizes) == 1


def test_kept_samples_are_copies() -> None:
    rank, rows = Rank("a"), torch.eye(3)
    rank.update("x", rows)
    rows.zero_()
    assert rank.to_dict()["x"]["rank"] == 3


def test_too_many_features_are_refused_before_anything_is_allocated() -> None:
    for analyser in (Rank(max_features=100), CovarianceSpectrum(max_features=100)):
        with pytest.raises(InputError, match="101 features need a matrix of"):
            analyser.update("x", torch.zeros(1, 101))
        assert analyser.results == {}
        analyser.update("x", torch.zeros(1, 100))
    Rank("aaT", max_features=1).update("x", torch.zeros(1, 101))


def test_a_subset_is_one_of_the_features_and_the_same_for_the_same_seed() -> None:
    value = torch.arange(20.0) * torch.randn(30, 20)
    found = {}
    for seed in (0, 0, 1):
        spectra = CovarianceSpectrum(subset=5, seed=seed, keep="units")
        spectra.update("x", value[:10])
        spectra.update("x", value[10:])
        chosen = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:5]
        expected = np.linalg.eigvalsh(np.cov(value[:, chosen].T.numpy()))[::-1]
        np.testing.assert_allclose(spectra.results["x"]["eigenvalues"], expected, rtol=1e-5)
        found.setdefault(seed, spectra.results["x"]["eigenvalues"])
        assert torch.equal(found[seed], spectra.results["x"]["eigenvalues"])
    assert not torch.equal(found[0], found[1])
    assert Rank(subset=50).settings["subset"] == 50


def test_another_number_of_features_is_refused_and_changes_nothing() -> None:
    for analyser in (Rank("aTa"), Rank("a"), CovarianceSpectrum()):
        analyser.update("x", torch.randn(4, 3))
        before = analyser.to_dict()
        with pytest.raises(InputError, match=r"5 features, but 3 before.*keep="):
            analyser.update("x", torch.randn(4, 5))
        assert analyser.to_dict() == before
        assert analyser.calls == {"x": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "ata"}, {"rtol": -1.0}, {"atol": math.nan}, {"atol": "1"}, {"max_samples": 0},
        {"max_features": 2.5}, {"subset": 0}, {"keep": 0}, {"keep": "all"}, {"rtol": True},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=re.escape(next(iter(wrong)))):
        Rank(**wrong)


def test_ranks_are_saved_and_loaded() -> None:
    for analyser in (Rank(), Rank("aaT"), CovarianceSpectrum(fit=(1, 3))):
        analyser.update("x", torch.randn(6, 3))
        file = io.BytesIO()
        torch.save(analyser.state_dict(), file)
        file.seek(0)
        loaded = type(analyser)(**analyser.settings)
        loaded.load_state_dict(torch.load(file))
        assert loaded.to_dict() == analyser.to_dict()
        more = torch.randn(6, 3)
        for one in (analyser, loaded):
            one.update("x", more)
        assert loaded.to_dict() == analyser.to_dict()
    with pytest.raises(InputError, match="mode"):
        Rank("a").merge(Rank("aTa"))


def test_a_table_has_a_row_for_each_node() -> None:
    model = refined()
    bended, rank = bt.BendedModule(model), Rank()
    with bended.interject(nn.Linear, rank):
        for x in batches():
            bended(x)
    table = rank.to_pandas()
    assert list(table.index) == ["down", "up", "more"]
    assert list(table["features"]) == [3, 8, 8]


def test_passes_can_have_ranks_of_their_own() -> None:
    model = refined()
    bended, rank = bt.BendedModule(model), Rank(per_pass=True)
    big = torch.full((4, 6), 1e4)
    model.up.weight.data[:] *= 10
    with bended.interject("tanh", rank):
        bended(big)
    assert set(rank.results) == {"tanh:1"}
    assert rank.to_dict()["tanh:1"]["rank"] == 1


# The spectrum of the covariance


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_eigenvalues_are_those_of_numpy_s_covariance(correction: int, offset: float) -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((300, 7)) @ rng.standard_normal((7, 7)) + offset
    covariance = CovarianceSpectrum(correction=correction)
    for rows in np.array_split(data, 13):
        covariance.update("x", torch.from_numpy(rows))
    found = covariance.results["x"]
    expected = scipy.linalg.eigvalsh(np.cov(data.T, ddof=correction))[::-1]
    np.testing.assert_allclose(found["eigenvalues"], expected, rtol=1e-8)
    np.testing.assert_allclose(found["explained"], expected / expected.sum(), rtol=1e-8)
    assert found["total_variance"] == pytest.approx(expected.sum())
    assert found["eigenvalues"].dtype == torch.float64
    assert found["participation_ratio"] == pytest.approx(expected.sum() ** 2 / (expected**2).sum())
    assert found["rank"] == 7


def test_the_spectrum_at_a_node_is_that_of_all_samples_together() -> None:
    model, twin = refined().eval(), refined().eval()
    bended, covariance = bt.BendedModule(model), CovarianceSpectrum(fit=True)
    with bended.interject("more", covariance), torch.no_grad():
        for x in batches():
            bended(x)
    features = torch.cat(seen_by_hooks(twin, twin.more, batches())).double().numpy()
    found = covariance.results["more"]
    expected = np.linalg.eigvalsh(np.cov(features.T))[::-1]
    np.testing.assert_allclose(found["eigenvalues"], expected, rtol=1e-6, atol=1e-12)
    rank = np.linalg.matrix_rank(features - features.mean(0), tol=1e-5 * 20)
    assert found["rank"] == rank
    line = scipy.stats.linregress(np.log(np.arange(1, rank + 1)), np.log(expected[:rank]))
    assert found["exponent"] == pytest.approx(-line.slope, rel=1e-4)
    assert found["r_squared"] == pytest.approx(line.rvalue**2, rel=1e-4)


def test_a_power_law_is_fitted_to_what_does_not_count_as_zero() -> None:
    rng = np.random.default_rng(0)
    centred = rng.standard_normal((101, 5))
    left = scipy.linalg.orth(centred - centred.mean(0))
    values = np.array([10.0, 4.0, 1.0, 0.2, 0.05])
    covariance = CovarianceSpectrum(fit=True, atol=0.1)
    covariance.update("x", torch.from_numpy(left * values))
    line = scipy.stats.linregress(np.log(np.arange(1, 5)), np.log(values[:4] ** 2 / 100))
    assert covariance.results["x"]["exponent"] == pytest.approx(-line.slope)
    assert covariance.results["x"]["rank"] == 4


def test_too_few_samples_have_no_covariance() -> None:
    covariance = CovarianceSpectrum()
    covariance.update("x", torch.randn(1, 3))
    found = covariance.results["x"]
    assert found["eigenvalues"].shape == (3,)
    assert bool(found["eigenvalues"].isnan().all())
    covariance.update("x", torch.randn(1, 3))
    found = covariance.results["x"]
    assert found["rank"] == 1
    assert bool((found["eigenvalues"] >= 0).all())
    constant = CovarianceSpectrum(fit=True)
    constant.update("x", torch.ones(4, 3))
    assert constant.results["x"]["explained"].tolist() == [0.0, 0.0, 0.0]
    assert math.isnan(constant.results["x"]["exponent"])


@given(st.floats(0.1, 4), st.floats(0.01, 100), st.integers(1, 5), st.integers(2, 30))
@settings(max_examples=50, deadline=None)
def test_a_power_law_is_found(exponent: float, scale: float, first: int, more: int) -> None:
    values = scale * torch.arange(1, 50, dtype=torch.float64) ** -exponent
    values[: first - 1] = 1e6
    values[first + more :] = 1e-30
    fit = power_law(values, first, first + more)
    assert fit.exponent == pytest.approx(exponent, rel=1e-6)
    assert fit.scale == pytest.approx(scale, rel=1e-6)
    assert fit.r_squared == pytest.approx(1)
    assert (fit.first, fit.last) == (first, first + more)


def test_a_power_law_through_noise_is_the_line_of_scipy() -> None:
    rng = np.random.default_rng(0)
    values = np.sort(np.exp(rng.standard_normal(40)))[::-1].copy()
    fit = power_law(torch.from_numpy(values), 3, 30)
    line = scipy.stats.linregress(np.log(np.arange(3, 31)), np.log(values[2:30]))
    assert fit.exponent == pytest.approx(-line.slope)
    assert fit.r_squared == pytest.approx(line.rvalue**2)
    assert fit.scale == pytest.approx(math.exp(line.intercept))
    assert math.isnan(power_law(torch.zeros(5)).exponent)
    with pytest.raises(InputError, match="are not a valid range"):
        power_law(torch.ones(5), 3, 3)
    with pytest.raises(InputError, match="fit="):
        CovarianceSpectrum(fit=(0, 5))


# Weights


def numpy_rank(weight: Tensor) -> int:
    return int(np.linalg.matrix_rank(weight.detach().flatten(1).numpy()))


def low_rank(tensor: Tensor, rank: int) -> None:
    """Make a weight one of low rank."""
    with torch.no_grad():
        flat = tensor.flatten(1)
        tensor.copy_(
            (torch.randn(flat.shape[0], rank) @ torch.randn(rank, flat.shape[1])).view_as(tensor)
        )


def test_weights_have_the_rank_and_the_singular_values_that_numpy_finds() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(9, 6),
            "conv1": nn.Conv1d(4, 6, 3),
            "conv2": nn.Conv2d(3, 5, (2, 3)),
            "conv3": nn.Conv3d(2, 4, 2),
            "back1": nn.ConvTranspose1d(4, 3, 2),
            "back2": nn.ConvTranspose2d(4, 3, 2),
            "embedding": nn.Embedding(11, 4),
            "lstm": nn.LSTM(3, 2, 2),
            "attention": nn.MultiheadAttention(4, 2),
            "norm": nn.LayerNorm(3),
        }
    )
    low_rank(model["linear"].weight, 2)
    low_rank(model["conv2"].weight, 3)
    found = weight_ranks(model)
    expected = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    assert list(found) == list(expected)
    for name, weight in expected.items():
        flat = weight.detach().flatten(1).numpy()
        assert found[name].rank == np.linalg.matrix_rank(flat)
        assert found[name].shape == tuple(weight.shape)
        values = scipy.linalg.svdvals(flat.astype(np.float64))
        np.testing.assert_allclose(found[name].spectrum.singular_values, values, atol=1e-12)
        assert found[name].to_dict()["spectral_norm"] == pytest.approx(np.linalg.norm(flat, 2))
        assert found[name].to_dict()["frobenius_norm"] == pytest.approx(np.linalg.norm(flat))
    assert found["linear.weight"].rank == 2
    assert found["conv2.weight"].rank == 3


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_convolutions_of_several_groups_are_block_diagonal(
    dims: int, is_transposed: bool, groups: int
) -> None:
    torch.manual_seed(0)
    cls = getattr(nn, f"Conv{'Transpose' if is_transposed else ''}{dims}d")
    layer = cls(6, 12, 2, groups=groups)
    if groups < 6:
        low_rank(layer.weight[:3], 1)
    blocks = layer.weight.detach().double().flatten(1).chunk(groups)
    dense = scipy.linalg.block_diag(*(block.numpy() for block in blocks))
    found = weight_ranks(layer)["weight"]
    assert found.groups == groups
    assert (found.spectrum.samples, found.spectrum.features) == dense.shape
    assert found.rank == np.linalg.matrix_rank(dense, tol=1e-5)
    np.testing.assert_allclose(
        found.spectrum.singular_values, scipy.linalg.svdvals(dense), atol=1e-12
    )
    # The matrix is the one that the layer multiplies with: checked by its largest stretch.
    if not is_transposed:
        x = torch.randn(1, 6, *(2,) * dims)
        by_matrix = dense @ x.double().flatten().numpy()
        np.testing.assert_allclose(
            (layer(x).flatten() - layer.bias).detach().numpy(), by_matrix, atol=1e-5
        )


def parametrized() -> nn.ModuleDict:
    torch.manual_seed(0)

    class Noisy(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return F.dropout(weight, 0.5)

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 5))

        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0 + self.left @ self.right

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(nn.Linear(5, 6))
    model = nn.ModuleDict(
        {
            "weight_norm": parametrizations.weight_norm(nn.Linear(5, 6)),
            "spectral_norm": parametrizations.spectral_norm(nn.Conv2d(2, 6, 2)),
            "orthogonal": parametrizations.orthogonal(nn.Linear(5, 6)),
            "lora": nn.Linear(5, 6),
            "noisy": nn.Linear(5, 6),
            "old_weight_norm": old,
            "old_spectral_norm": nn.utils.spectral_norm(nn.Linear(5, 6)),
            "pruned": prune.ln_structured(nn.Linear(5, 6), "weight", amount=3, n=2, dim=0),
        }
    )
    parametrize.register_parametrization(model["lora"], "weight", LowRank())
    parametrize.register_parametrization(model["noisy"], "weight", Noisy())
    return model


@pytest.mark.parametrize("training", [True, False])
def test_weights_that_are_computed_are_what_the_next_call_multiplies_with(training: bool) -> None:
    model, twin = parametrized().train(training), parametrized().train(training)
    with torch.no_grad():  # a step since the last call: attributes of old hooks are behind
        for one in (model, twin):
            for name, parameter in one.named_parameters():
                if name.endswith("weight_v"):
                    parameter.mul_(torch.linspace(0, 1, 5))
                if "lora" not in name:
                    parameter.add_(0.25)
    before, numbers = state(model), torch.get_rng_state()
    versions = {name: tensor._version for name, tensor in model.state_dict().items()}
    found = weight_ranks(model)
    assert state(model) == before
    assert versions == {name: tensor._version for name, tensor in model.state_dict().items()}
    assert torch.equal(torch.get_rng_state(), numbers)
    assert list(found) == [f"{name}.weight" for name in model]
    for name, module in twin.items():
        torch.set_rng_state(numbers)
        shape = (1, 2, 2, 2) if name == "spectral_norm" else (1, 5)
        module(torch.zeros(shape))  # computes it
        torch.set_rng_state(numbers)
        if name != "spectral_norm" or not training:
            weight = module.weight.detach()
        else:
            weight = parametrized().train()[name].weight  # the first access: one power iteration
            fresh = parametrized().train()
            with torch.no_grad():
                fresh[name].parametrizations.weight.original.add_(0.25)
            weight = fresh[name].weight.detach()
        values = scipy.linalg.svdvals(weight.flatten(1).double().numpy())
        np.testing.assert_allclose(
            found[f"{name}.weight"].spectrum.singular_values, values, rtol=1e-6, atol=1e-7
        )
    assert found["lora.weight"].rank == 2
    assert found["pruned.weight"].rank == 3


def test_what_a_weight_is_computed_from_is_there_by_name() -> None:
    model = parametrized()
    name = "lora.parametrizations.weight.0.left"
    assert weight_ranks(model, name)[name].rank == 2
    assert weight_ranks(model, "old_weight_norm.weight_v")["old_weight_norm.weight_v"].rank == 5


def test_one_parameter_with_several_names_is_there_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    model["again"] = model["embed"]
    found = weight_ranks(model)
    assert list(found) == ["embed.weight"]
    assert found["embed.weight"].shared_with == ("head.weight", "again.weight")
    assert list(weight_ranks(model, "head")) == ["head.weight"]


def test_where_says_which_weights() -> None:
    model = nn.ModuleDict({
        "layers": nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Conv1d(2, 2, 1)) for _ in "ab"),
        "head": nn.Linear(3, 2),
    })  # fmt: skip
    linear = ["layers.0.0.weight", "layers.1.0.weight", "head.weight"]
    conv = ["layers.0.1.weight", "layers.1.1.weight"]
    for where, expected in (
        (None, [linear[0], conv[0], linear[1], conv[1], linear[2]]),
        ("head", [linear[2]]),
        ("head.weight", [linear[2]]),
        ("layers.1", [linear[1], conv[1]]),
        (nn.Linear, linear),
        (model["layers"][0], [linear[0], conv[0]]),
        (re.compile(r"\.1\.weight"), conv),
        (["head", nn.Conv1d], [*conv, linear[2]]),
        (lambda node: node.module_path.endswith(".0"), [linear[0], conv[0], linear[1]]),
        (bt.node_selector.matches_qualified_name("layers.0.0"), [linear[0]]),
    ):
        assert list(weight_ranks(model, where)) == expected
        assert list(weight_ranks(bt.BendedModule(model), where)) == expected
    with pytest.raises(InputError, match=r"'layer.1' matches no weight; did you mean"):
        weight_ranks(model, "layer.1")
    with pytest.raises(InputError, match="matches no weight"):
        weight_ranks(model, nn.Conv2d)
    with pytest.raises(InputError, match="needs a run, and weights have no run"):
        weight_ranks(model, bt.node_selector.Activations.ReLU.last())
    with pytest.raises(InputError, match="and is not a matrix"):
        weight_ranks(model, "head.bias")


def test_a_state_dict_has_ranks_too() -> None:
    model = nn.Linear(4, 3)
    found = weight_ranks(model.state_dict())
    assert list(found) == ["weight"]
    assert found["weight"].rank == weight_ranks(model)["weight"].rank == 3
    delta = {"delta": torch.randn(8, 2) @ torch.randn(2, 8)}
    assert weight_ranks(delta)["delta"].rank == 2


def test_weights_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(
        bt.errors.InputError, match="'weight' is not initialized: call the model once"
    ):
        weight_ranks(nn.LazyLinear(3))
    with pytest.raises(InputError, match="'weight' is on the device 'meta'"):
        weight_ranks(nn.Linear(2, 3, device="meta"))
    with pytest.raises(InputError, match="from modules"):
        weight_ranks(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"'a' is a .*, not a tensor"):
        weight_ranks({"a": 3})  # type: ignore[dict-item]
    broken = nn.Linear(2, 3)
    with torch.no_grad():
        broken.weight[0, 0] = math.nan
    assert math.isnan(weight_ranks(broken)["weight"].rank)


def test_low_rank_adapters_of_peft_have_ranks_of_what_they_add() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4))
    config = peft.LoraConfig(r=3, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    found = weight_ranks(model)
    name = "base_model.model.0"
    assert found[f"{name}.delta.default"].rank == 3
    assert found[f"{name}.base_layer.weight"].rank == 10
    assert found[f"{name}.lora_A.default.weight"].rank == 3
    layer = model.base_model.model[0]
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    delta = delta.detach().double() * layer.scaling["default"]
    np.testing.assert_allclose(
        found[f"{name}.delta.default"].spectrum.singular_values,
        scipy.linalg.svdvals(delta.numpy()), atol=1e-6,
    )  # fmt: skip


def test_ranks_of_weights_are_taken_down_over_a_training() -> None:
    torch.manual_seed(0)
    model, ranks = nn.Linear(4, 4), LayerWeightRank()
    expected = {}
    for step in (1, 5, 7):
        low_rank(model.weight, step % 4)
        ranks.measure(model, step=step)
        expected[step] = numpy_rank(model.weight)
    assert {s: row["rank"] for s, row in ranks.to_dict()["weight"].items()} == expected
    table = ranks.to_pandas()
    assert table.index.names == ["weight", "training_step"]
    assert list(table["rank"]) == list(expected.values())
    ranks.enabled = False
    ranks.measure(model, step=9)
    assert len(ranks.to_dict()["weight"]) == 3
    other = LayerWeightRank()
    other.measure(model, step=8)
    ranks.merge(other)
    assert list(ranks.to_dict()["weight"]) == [1, 5, 7, 8]
    low_rank(model.weight, 1)
    other.measure(model, step=8)
    with pytest.raises(InputError, match="different in step 8"):
        ranks.merge(other)
    file = io.BytesIO()
    torch.save(ranks.state_dict(), file)
    file.seek(0)
    loaded = LayerWeightRank()
    loaded.load_state_dict(torch.load(file))
    assert loaded.to_dict() == ranks.to_dict()


def test_an_insertion_takes_weights_down_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        times.append(1)
        return weight_ranks(*args, **kwargs)

    monkeypatch.setattr("bendtrace.research.weights.weight_ranks", counted)
    model = refined()
    bended, ranks = bt.BendedModule(model), LayerWeightRank()
    with bended.interject(nn.Linear, ranks):
        for step in (0, 1):
            ranks.step = step
            for x in batches():
                bended(x)
    assert list(ranks.to_dict()) == ["down.weight", "up.weight", "more.weight"]
    assert len(times) == 6
    direct = weight_ranks(model)
    for name, steps in ranks.results.items():
        assert list(steps) == [0, 1]
        assert steps[0]["rank"] == direct[name].rank == numpy_rank(getattr(model, name[:-7]).weight)
    assert set(ranks.calls.values()) == {2}
    ranks.reset()
    assert ranks.to_dict() == {}


def test_weights_without_elements_and_those_that_are_not_finite_are_merged_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.ModuleDict({"empty": nn.Linear(0, 3), "broken": nn.Linear(2, 2)})
    with torch.no_grad():
        model["broken"].weight.fill_(math.nan)
    one, other = LayerWeightRank(), LayerWeightRank()
    for ranks in (one, other):
        ranks.measure(model)
    one.merge(other)
    assert one.to_dict()["empty.weight"][0]["rank"] == 0
    assert math.isnan(one.to_dict()["broken.weight"][0]["rank"])


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1e160])
def test_values_whose_squares_are_no_numbers_are_refused(scale: float) -> None:
    rows = torch.randn(20, 4, dtype=torch.float64) * scale
    for analyser in (Rank("aTa"), Rank("aaT"), CovarianceSpectrum()):
        with pytest.raises(InputError, match="squares"):
            analyser.update("x", rows)
        assert not analyser.results
    exact = Rank("a")
    exact.update("x", rows)
    assert exact.results["x"]["rank"] == 4
    with pytest.raises(KeyError, match="no results under 'y'; node paths with results: 'x'"):
        exact.results["y"]
