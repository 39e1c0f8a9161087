"""Ablation, against native hooks and means over a data set taken at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bendtrace as bt
from bendtrace.debug.calls import Call
from bendtrace.errors import InputError, SiteError
from bendtrace.research.ablation import ablate, ablation_study
from bendtrace.research.steering import steering_vector
from tests.causal_models import (
    CLEAN,
    HEADS,
    LENGTH,
    WIDTH,
    WORDS,
    gpt2,
    halving,
    halving_by_hand,
    hooked,
    inputs_of_halving,
    kept,
    logit_difference,
    pre_hooked,
    transformer,
)


def _tokens(count: int, seed: int, words: int = WORDS, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, words, (count, length), generator=generator)


class Pictures(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers for each picture."""
        return self.head(torch.relu_(self.norm(self.conv(x))).mean((2, 3)))


def _pictures() -> Pictures:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Pictures().eval()


def test_modules_and_ops_give_zeros_numbers_tensors_or_what_a_function_says() -> None:
    model = transformer()
    bended = bt.BendedModule(model)
    row = torch.arange(WIDTH, dtype=torch.float32)
    for how, change in (
        ("zero", torch.zeros_like),
        (0.1, lambda value: torch.full_like(value, 0.1)),
        (row, lambda value: row.expand_as(value)),
        (torch.neg, torch.neg),
    ):
        with hooked(model.blocks[0].attn, change):
            expected = model(CLEAN)
        with ablate(bended, "blocks.0.attn", how) as handle:
            assert torch.equal(bended(CLEAN), expected)
            assert torch.equal(bended(CLEAN), expected)
        assert not handle.active
        assert bended.insertions == ()
        with pre_hooked(model.blocks[0].ln_2, lambda v, change=change: change(v)):
            given = kept(model, model.blocks[0].mlp, CLEAN)
        with ablate(bended, "blocks_0.add", how):
            found = bended.get_activations("blocks.0.mlp", args=(CLEAN,))
        assert torch.equal(found["blocks.0.mlp"], given)
    assert torch.equal(bended(CLEAN), model(CLEAN))


@pytest.mark.more
def test_heads_of_gpt2_are_slices_of_what_the_output_projection_is_given() -> None:
    model, tokens = gpt2(), CLEAN
    bended = bt.BendedModule(model)
    for head, columns in ((1, [4, 5, 6, 7]), ([0, 3], [0, 1, 2, 3, 12, 13, 14, 15])):

        def without(value: Tensor, columns: Any = columns) -> Tensor:
            value = value.clone()
            value[..., columns] = 0
            return value

        with pre_hooked(model.transformer.h[0].attn.c_proj, without):
            expected = model(tokens).logits
        with ablate(bended, "transformer.h.0.attn.c_proj", heads=4, head=head, at="input"):
            assert torch.equal(bended(tokens).logits, expected)
    with torch.no_grad(), pre_hooked(model.transformer.h[0].attn.c_proj, without):
        generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with ablate(bended, "transformer.h.0.attn.c_proj", heads=4, head=[0, 3], at="input"):
        own = bended.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(own, generated)


def test_channels_of_a_convolution() -> None:
    model, x = _pictures(), torch.randn(3, 1, 6, 6)
    bended = bt.BendedModule(model)
    for channels, index in ((2, [2]), ([0, -1], [0, 3]), (slice(1, 3), [1, 2])):

        def without(value: Tensor, index: Any = index) -> Tensor:
            value = value.clone()
            value[:, index] = 0
            return value

        with hooked(model.conv, without):
            expected = model(x)
        with ablate(bended, model.conv, channels=channels):
            assert torch.equal(bended(x), expected)


def test_an_op_in_place_is_ablated_for_all_who_hold_the_tensor() -> None:
    def net(x: Tensor) -> Tensor:
        h = x * 2
        other = h.view(-1)
        torch.relu_(h)
        return other + 1

    bended = bt.BendedModule(net)
    with ablate(bended, "relu_", channels=0):
        assert bended(torch.ones(1, 2)).tolist() == [1.0, 3.0]


def test_means_over_a_loader_are_those_over_all_samples_at_once() -> None:
    model = transformer().double()
    bended = bt.BendedModule(model)
    tokens = _tokens(10, 0)
    loader = DataLoader(TensorDataset(tokens), batch_size=4)
    value = kept(model, model.blocks[1].mlp, tokens)
    for over, mean in (
        (0, value.mean(0, keepdim=True)),
        ((0, 1), value.mean((0, 1), keepdim=True)),
    ):
        with hooked(model.blocks[1].mlp, lambda v, mean=mean: mean.expand_as(v)):
            expected = model(CLEAN)
        references: list[Any] = [
            loader, tokens, (tokens,), {"tokens": tokens}, Call((tokens,)),
            (batch for (batch,) in loader),
        ]  # fmt: skip
        for reference in references:
            with ablate(bended, "blocks.1.mlp", "mean", reference=reference, over=over):
                torch.testing.assert_close(bended(CLEAN), expected, rtol=1e-12, atol=1e-12)


def test_means_are_sums_in_double_precision_in_the_order_of_the_batches() -> None:
    model = transformer()
    bended = bt.BendedModule(model)
    batches = [_tokens(3, seed) for seed in range(4)]
    total = sum(kept(model, model.blocks[0].attn, batch).double().sum(0) for batch in batches)
    mean = (total / 12).float()
    with hooked(model.blocks[0].attn, lambda value: mean.expand_as(value)):
        expected = model(CLEAN)
    with ablate(bended, "blocks.0.attn", "mean", reference=iter(batches)):
        assert torch.equal(bended(CLEAN), expected)


def test_means_of_complex_numbers_have_both_parts() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.fft.fft(x).abs()

    bended = bt.BendedModule(model)
    reference, x = torch.randn(5, 4), torch.randn(2, 4)
    bended(x)
    with ablate(bended, "fft_fft", "mean", reference=[reference[:2], reference[2:]]):
        found = bended(x)
    wanted = torch.fft.fft(reference).to(torch.complex128).mean(0, keepdim=True).expand(2, 4)
    torch.testing.assert_close(found, wanted.to(torch.complex64).abs())


def test_samples_that_differ_in_length_have_a_mean_over_positions_too() -> None:
    model = transformer()
    bended = bt.BendedModule(model)
    batches = [_tokens(2, 0, length=3), _tokens(3, 1, length=4)]
    with pytest.raises(SiteError, match=r"different shapes for different batches.*over=\(0, 1\)"):
        ablate(bended, "norm", "mean", reference=iter(batches))
    every = torch.cat([kept(model, model.norm, batch).flatten(0, 1) for batch in batches])
    with ablate(bended, "norm", "mean", reference=iter(batches), over=(0, 1)):
        found = bended(CLEAN)
    expected = model.head(every.double().mean(0).float()).expand_as(found)
    torch.testing.assert_close(found, expected)
    with (
        ablate(bended, "norm", "mean", reference=batches[0]),
        pytest.raises(SiteError, match=r"has shape \(1, 3, 8\), and the value \(1, 5, 8\)"),
    ):
        bended(CLEAN)
    assert bended.insertions == ()


def test_without_a_reference_the_mean_is_that_of_the_batch() -> None:
    model, tokens = transformer(), _tokens(4, 0)
    bended = bt.BendedModule(model)
    mean = kept(model, model.blocks[0], tokens).mean(0, keepdim=True)
    with hooked(model.blocks[0], lambda value: mean.expand_as(value)):
        expected = model(tokens)
    with ablate(bended, "blocks.0", "mean"):
        assert torch.equal(bended(tokens), expected)


def test_samples_are_exchanged_in_one_cycle_the_same_at_all_nodes_and_calls() -> None:
    model, tokens = transformer(), _tokens(5, 0)
    bended = bt.BendedModule(model)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(7))
    chosen = torch.empty(5, dtype=torch.long)
    for i in range(5):
        chosen[order[i]] = order[(i + 1) % 5]
    assert (chosen != torch.arange(5)).all()
    before = torch.get_rng_state()
    with (
        hooked(model.blocks[0].attn, lambda v: v[chosen]),
        hooked(model.blocks[1].mlp, lambda v: v[chosen]),
    ):
        expected = model(tokens)
    with ablate(bended, ["blocks.0.attn", "blocks.1.mlp"], "resample", seed=7):
        assert torch.equal(bended(tokens), expected)
        assert torch.equal(bended(tokens), expected)
        with pytest.raises(SiteError, match=r"1 sample .*pass a reference"):
            bended(CLEAN)
    with ablate(bended, ["blocks.0.attn", "blocks.1.mlp"], "resample", seed=8):
        assert not torch.equal(bended(tokens), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_are_taken_from_a_reference() -> None:
    model, tokens, others = transformer(), _tokens(2, 0), _tokens(6, 1)
    bended = bt.BendedModule(model)
    chosen = torch.randint(6, (2,), generator=torch.Generator().manual_seed(3))
    given = kept(model, model.blocks[0].attn.out, others, inputs=True)[chosen]
    width = WIDTH // HEADS

    def resampled(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., width:] = given[..., width:]
        return value

    with pre_hooked(model.blocks[0].attn.out, resampled):
        expected = model(tokens)
    with ablate(
        bended, "blocks.0.attn.out", "resample", reference=others, seed=3, heads=HEADS, head=1,
        at="input",
    ):  # fmt: skip
        assert torch.equal(bended(tokens), expected)


def test_a_model_that_depends_on_its_data_goes_where_the_ablated_value_leads() -> None:
    model = halving()
    bended = bt.BendedModule(model)
    ways = set()
    for x in inputs_of_halving(model).values():
        for name, change in (("start", torch.zeros_like), ("tanh", lambda v: -v)):
            names: list[str] = []

            def put(node: str, _: int, value: Tensor, name: str = name, change: Any = change,
                    names: list[str] = names) -> Tensor:  # fmt: skip
                names.append(node)
                return change(value) if node == name else value

            expected = halving_by_hand(model, x, put)
            ways.add((names[-1], len(names)))
            handle = ablate(bended, name, "zero" if name == "start" else torch.neg, allow_none=True)
            with handle:
                assert torch.equal(bended(x), expected)
            called = [len(row.passes) for row in handle.report().rows]
            assert sum(called) == names.count(name)
    assert len(ways) > 3


def test_passes_have_means_of_their_own() -> None:
    def net(x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.relu(x) * 2
        return x

    bended = bt.BendedModule(net)
    with ablate(bended, "relu", "mean", reference=torch.tensor([[1.0], [3.0]]), passes=[1]):
        assert bended(torch.tensor([[5.0]])).tolist() == [[8.0]]
    looped = bt.BendedModule(_looped)
    with (
        ablate(looped, "sub", "mean", reference=torch.tensor([[2.0]])),
        pytest.raises(SiteError, match="no run on the reference reached pass 2 of 'sub'"),
    ):
        looped(torch.tensor([[2.0]]) + torch.tensor([[0.0], [9.0]]))


def _looped(x: Tensor) -> Tensor:
    for _ in range(x.shape[0]):
        x = x - 1
    return x


@pytest.mark.parametrize("at", ["output", "input"])
def test_a_study_is_a_row_of_single_ablations(at: Any) -> None:
    model, tokens = transformer(), _tokens(3, 4)
    sites = ["blocks.0.attn.out", "blocks.0.mlp.2", "blocks.1.attn.out"]
    bended = bt.BendedModule(model)
    options: dict[str, Any]
    for options in (
        {}, {"how": "mean"}, {"how": "mean", "reference": _tokens(4, 5)}, {"how": 0.5},
        {"how": "resample", "seed": 2}, {"how": "resample", "reference": _tokens(4, 5)},
    ):  # fmt: skip
        study = ablation_study(bended, tokens, sites, logit_difference, at=at, **options)
        expected = []
        for site in sites:
            with ablate(bended, site, at=at, **options):
                expected.append(logit_difference(bended(tokens)).item())
        assert study.values.flatten().tolist() == expected
        assert study.base == logit_difference(model(tokens)).item()
        assert study.effect.flatten().tolist() == [value - study.base for value in expected]
    assert bended.insertions == ()


@pytest.mark.more
def test_a_study_tells_heads_and_channels_apart() -> None:
    model = gpt2()
    names = [f"transformer.h.{i}.attn.c_proj" for i in range(2)]
    study = ablation_study(model, CLEAN, names, logit_difference, heads=4, at="input")
    assert study.values.shape == (2, 1, 4)
    for i, name in enumerate(names):
        for head in range(4):

            def without(value: Tensor, head: int = head) -> Tensor:
                value = value.clone()
                value[..., 4 * head : 4 * head + 4] = 0
                return value

            with pre_hooked(model.get_submodule(name), without):
                assert study.values[i, 0, head].item() == logit_difference(model(CLEAN)).item()

    pictures, x = _pictures(), torch.randn(2, 1, 6, 6)
    found = ablation_study(pictures, x, ["conv", "relu_"], torch.sum, channels="each")
    assert found.positions == (0, 1, 2, 3)
    for channel in range(4):

        def dark(value: Tensor, channel: int = channel) -> Tensor:
            value = value.clone()
            value[:, channel] = 0
            return value

        with hooked(pictures.conv, dark):
            assert found.values[0, channel].item() == pictures(x).sum().item()
    assert "AblationStudy (zero): base " in repr(found)
    assert list(found.to_pandas().columns) == ["site", "position", "value", "effect"]


def test_a_study_needs_no_trace_for_each_cell() -> None:
    bended = bt.BendedModule(transformer())
    ablation_study(bended, CLEAN, ["blocks.0", "blocks.1"], logit_difference, channels="each")
    before = bended.stats.traces
    assert before <= 4
    ablation_study(bended, CLEAN, ["blocks.0", "blocks.1"], logit_difference, "mean", axis=2,
                   channels="each")  # fmt: skip
    assert bended.stats.traces == before


def test_references_leave_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    bended = bt.BendedModule(model)
    reference = [torch.randn(4, 2, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    handle = ablate(bended, "2", "mean", reference=iter(reference))
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert torch.equal(torch.get_rng_state(), state)
    assert bended.insertions == (handle,)
    handle.remove()
    assert bended.insertions == ()

    def broken() -> Iterator[Tensor]:
        yield reference[0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ablate(bended, "2", "mean", reference=broken())
    assert bended.insertions == ()
    assert all(map(torch.equal, model.state_dict().values(), before))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"how": "median"}, "how="),
        ({"how": None}, "how="),
        ({"reference": CLEAN}, "reference= is for"),
        ({"how": 1.0, "reference": CLEAN}, "reference= is for"),
        ({"how": torch.ones(1), "reference": CLEAN}, "reference= is for"),
        ({"how": "mean", "reference": iter(())}, "no batches"),
        ({"how": "resample", "reference": iter([CLEAN])}, "one batch"),
        ({"how": "mean", "over": ()}, "over="),
        ({"how": "mean", "over": "batch"}, "over="),
        ({"seed": 1.5}, "seed="),
        ({"at": "inside"}, "at="),
        ({"head": 0}, "heads="),
        ({"heads": 4, "head": 4}, "no head=4; there are 4"),
        ({"channels": "1"}, "channels="),
        ({"where": "blocks.9"}, "blocks"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    bended = bt.BendedModule(transformer())
    bended(CLEAN)
    given: dict[str, Any] = {"where": "blocks.0"} | options
    with pytest.raises(bt.BendtraceError, match=said):
        ablate(bended, **given)
    assert bended.insertions == ()


@pytest.mark.more
def test_what_does_not_fit_is_told_of_in_the_call() -> None:
    bended = bt.BendedModule(transformer())
    bended(CLEAN)
    for options, said in (
        ({"channels": 9}, "axis 1 has size 5, and no position 9"),
        ({"heads": 3}, "not a multiple of 3"),
        ({"how": torch.ones(7)}, r"cannot put shape \(7,\)"),
        ({"how": lambda value: value[0]}, r"has to return a tensor of shape"),
        ({"how": "mean", "over": 4}, "has no axis 4"),
        ({"how": 1j}, "cannot put torch.complex64"),
    ):
        with ablate(bended, "blocks.0", **options), pytest.raises(SiteError, match=said):
            bended(CLEAN)
    with ablate(bended, "arange", "mean"), pytest.raises(SiteError, match="which has no mean"):
        bended(CLEAN)
    with ablate(bended, "arange", 0.5), pytest.raises(SiteError, match=r"cannot put torch.float32"):
        bended(CLEAN)
    assert bended.insertions == ()
    with pytest.raises(InputError, match="has to be a BendedModule"):
        ablate(transformer(), "blocks.0")
    found = ablation_study(
        bended, CLEAN, "blocks.0", logit_difference, channels=[0, 9], missing="nan"
    )
    assert found.values.isnan().tolist() == [[False, True]]
    with pytest.raises(SiteError, match=r"cannot ablate 'blocks.0'"):
        ablation_study(bended, CLEAN, "blocks.0", logit_difference, channels=[0, 9])


def test_a_list_is_several_batches_wherever_several_can_be_given() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    batches = [torch.randn(2, 3), torch.randn(5, 3)]
    bended = bt.BendedModule(model)
    outs = []
    for reference in (batches, iter(batches), DataLoader(batches, batch_size=None)):
        with ablate(bended, "1", "mean", reference=reference):
            outs.append(bended(batches[0]))
    wanted = torch.relu(model[0](torch.cat(batches)).double()).mean(0).float()
    torch.testing.assert_close(outs[0][0], model[2](wanted))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    with pytest.raises(InputError, match="one batch"):
        ablate(bended, "1", "resample", reference=batches)
    found = steering_vector(bended, batches, batches[:1], "0", position=None)
    whole = steering_vector(bended, torch.cat(batches), batches[0], "0", position=None)
    torch.testing.assert_close(found.vector, whole.vector)
