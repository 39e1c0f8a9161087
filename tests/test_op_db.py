"""Every operator that torch tests: traced, replayed, and replayed with other values.

By default every twentieth is tried, and those that are listed here by name; with `--all` every
fifth, and with `--slow` every one.
"""

from __future__ import annotations

import warnings

import pytest

from tests.past_joins import past_joins
from tests.shares import some
from tests.sweep import copied
from tests.sweep.ops import OPS, UNFILLED, dtype_of, filled_memory, samples, sweep, sweep_guarded

_GPU = "it runs on GPUs only"
EXCLUDED = {
    "jiterator_2inputs_2outputs": _GPU,
    "jiterator_4inputs_with_extra_args": _GPU,
    "jiterator_binary": _GPU,
    "jiterator_binary_return_by_ref": _GPU,
    "jiterator_unary": _GPU,
    "nn.functional.batch_norm.without_cudnn": _GPU,
    "torch.ops.aten._efficient_attention_forward": _GPU,
    "torch.ops.aten._flash_attention_forward": _GPU,
}

_OPTIONS = "options is a LinearCrossEntropyOptions, whose content cannot be guarded"
# These run live, for reasons that are given.
LIVE = {
    "nn.functional.linear_cross_entropy.chunked": _OPTIONS,
    "nn.functional.linear_cross_entropy.chunked_none": _OPTIONS,
    "torch._scaled_mm_v2": "is a _ScalingType, whose content cannot be guarded",
}

# torch itself refuses some of the samples of these in one of the forms.
RAISING = {
    "as_strided.partial_views": "in place",
    "float_power": "in place",
}

# One of each kind of thing that an op can do beyond giving a new tensor for a tensor.
KINDS = {
    "add", "allclose", "bernoulli", "cat", "chunk", "clamp", "complex", "diagonal_scatter",
    "einsum", "equal", "expand_as", "fft.fft", "histogramdd", "index_put", "item", "lerp",
    "linalg.svd", "masked.sum", "masked_scatter", "max.reduction_with_dim",
    "meshgrid.list_of_tensors", "multinomial", "nan_to_num", "nn.functional.batch_norm",
    "nn.functional.conv2d", "nn.functional.dropout", "nn.functional.embedding_bag",
    "nn.functional.interpolate.bilinear", "nn.functional.multi_head_attention_forward",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.triplet_margin_with_distance_loss", "nonzero", "normal.number_mean",
    "polygamma.polygamma_n_1", "randn", "resize_", "resolve_conj", "sparse.mm.reduce",
    "split.list_args", "squeeze", "to", "to_sparse", "uniform", "unique", "view", "where",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "op" in metafunc.fixturenames:
        names = sorted(OPS)
        listed = {*LIVE, *RAISING, *UNFILLED, *KINDS, *names[::20]}
        if not metafunc.config.getoption("--slow"):
            names = sorted({*names[::5], *listed})
        tried = [name for name in names if name not in EXCLUDED]
        metafunc.parametrize("op", some(tried, chosen=listed))


# Many ops warn when they are called; what they warn of is not the subject here.
@pytest.mark.filterwarnings("ignore")
def test_an_op_replays_bit_by_bit(op: str) -> None:
    done = dict(sweep(op))
    assert done
    wrong = {label: served.wrong for label, served in done.items() if served.wrong}
    assert not wrong
    raised = {label for label, served in done.items() if served.again == "raised"}
    assert bool(raised) == (op in RAISING)
    assert all(label.startswith(RAISING[op]) for label in raised)
    for label in done.keys() - raised:
        served = done[label]
        assert served.again == ("live" if op in LIVE else "replay"), (label, served.why)
        assert LIVE.get(op, "") in (served.why or ""), label
        assert served.twin == served.again or not served.alike, label


@pytest.mark.filterwarnings("ignore")
def test_an_op_in_front_of_a_guard_that_fails_replays_on_both_sides(op: str) -> None:
    for label, resumed, known in sweep_guarded(op):
        assert not resumed.wrong + known.wrong, label
        if op not in LIVE and resumed.again != "raised":
            assert (resumed.again, resumed.twin) == ("replay", "resume"), label
            assert (known.again, known.twin) == ("replay", "replay"), label


@pytest.mark.filterwarnings("ignore")
def test_an_op_recorded_past_joins_does_what_is_known(op: str) -> None:
    with past_joins():
        wrong = [label for label, *both in sweep_guarded(op) if any(one.wrong for one in both)]
    assert wrong == []


@pytest.mark.parametrize("name", EXCLUDED)
def test_what_is_excluded_does_not_run_here(name: str) -> None:
    op = OPS[name]
    if dtype_of(op) is None:
        return
    with warnings.catch_warnings(action="ignore"):
        sample = samples(op, 0, requires_grad=False)[0]
    with pytest.raises(AssertionError, match="only supported on CUDA"):
        op(*sample.args, **sample.kwargs)


@pytest.mark.parametrize("name", sorted(name for name in UNFILLED if "empty" in name))
def test_new_memory_is_not_the_same_twice_unless_it_is_filled(name: str) -> None:
    (*_, sample) = samples(OPS[name], 0, requires_grad=False)
    args, kwargs = copied((sample.args, sample.kwargs))
    with filled_memory():
        assert OPS[name](*args, **kwargs).isnan().all()


def test_names_in_the_lists_are_those_of_ops() -> None:
    assert {*EXCLUDED, *LIVE, *RAISING, *UNFILLED, *KINDS} <= OPS.keys()
