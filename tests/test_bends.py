"""Bends: callbacks by themselves, and in models, where eager with hooks is what has to come out."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import BaseModelOutput

import bendtrace as bt
from bendtrace.errors import BendError, BendShapeError, InputError, NeverFiredWarning
from bendtrace.insert.bend import Bend, BendingParameter, CallbackChain, Expression
from bendtrace.insert.bend_callbacks import (
    Affine,
    Bias,
    Capture,
    InterpolateActivation,
    InterpolationFromCapture,
    Lambda,
    Mask,
    Normal,
    OrderedMask,
    Permute,
    Scale,
    ThresholdActivation,
    ThresholdPermute,
)
from bendtrace.insert.bending import Bending, BendingConfig
from bendtrace.insert.interjection import Inputs, NodePass
from tests.promise import bits, footprint, state


class Stanley(nn.Module):
    """The model of torchbend's notebook on bended modules."""

    def __init__(self, n_channels: int = 4) -> None:
        super().__init__()
        self.conv_modules = nn.Sequential(nn.Conv1d(1, n_channels, 3), nn.Conv1d(n_channels, 8, 3))
        self.batch_norm = nn.BatchNorm1d(8)
        self.nnlin = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.nnlin(self.batch_norm(self.conv_modules(x)))
        return out


class Experts(nn.Module):
    """A mixture of experts with a Python loop, and a loop that ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.router(x), -1)
        return self.finish(self.mix(x, weights))

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        chosen, y = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                y[mask] = F.gelu(expert(x[mask])) * weights[mask][:, number : number + 1]
        return y

    def finish(self, y: Tensor) -> Tensor:
        steps = 0
        while y.norm() > 1 and steps < 10:
            y = y * 0.5
            steps += 1
        out: Tensor = self.out(y)
        return out


def made(model: nn.Module, seed: int = 0) -> bt.BendedModule:
    return bt.BendedModule(model)


def seeded(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def hooked(model: nn.Module, hooks: dict[str, Callable[[Any], Any]]) -> nn.Module:
    """A copy of a model with native forward hooks that change what modules give."""
    twin = copy.deepcopy(model)
    for name, change in hooks.items():
        twin.get_submodule(name).register_forward_hook(
            lambda module, args, output, change=change: change(output)
        )
    return twin


def at(path: str) -> NodePass:
    return NodePass(path)


# --- Callbacks by themselves

X = torch.tensor([[1.0, -2.0, 3.0, 0.5], [0.0, 7.0, -1.0, 2.0]])


@pytest.mark.parametrize(
    ("callback", "wanted"),
    [
        (Bias(1.5), X + 1.5),
        (Scale(-2.0), X * -2.0),
        (Affine(bias=1.0, scale=0.5), X * 0.5 + 1.0),
        (Bias(torch.arange(4.0)), X + torch.arange(4.0)),
        (Lambda(torch.relu), X.relu()),
        (Bias(), X),
        (Scale(), X),
        (Affine(), X),
    ],
)
def test_arithmetic_callbacks_do_what_they_say(callback: Bend, wanted: Tensor) -> None:
    assert bits(callback(X)) == bits(wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "callback",
    [
        Bias(1.0), Bias(torch.ones(4)), Scale(torch.tensor(2.0)),
        Affine(BendingParameter("p", torch.tensor(3.0)), 2),
        Mask(0.5, seed=1), OrderedMask(0.5, seed=1), ThresholdActivation(0.5, dim=-1),
        Permute(-1, seed=1), ThresholdPermute(0.5, dim=-1, seed=1), Normal(1.0, seed=1),
        Normal(1.0, seed=1, op="mul", fresh=False),
    ],
)  # fmt: skip
def test_callbacks_keep_dtype_and_shape(callback: Bend, dtype: torch.dtype) -> None:
    bent = copy.deepcopy(callback)(X.to(dtype))
    assert (bent.dtype, bent.shape) == (dtype, X.shape)


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Held:
    value: Tensor
    name: str


def test_each_floating_tensor_in_a_container_is_bent_and_nothing_else() -> None:
    ids = torch.arange(3)
    one, two = torch.ones(2), torch.zeros(3)
    value = {
        "tuple": (one, ids, "text", None),
        "pair": Pair(two, [one, 3]),
        "held": Held(one, "n"),
        "output": BaseModelOutput(last_hidden_state=two),
        "ordered": OrderedDict(a=two),
    }
    bent = Bias(1.0)(value)
    assert bits(bent) == bits(
        {
            "tuple": (one + 1, ids, "text", None),
            "pair": Pair(two + 1, [one + 1, 3]),
            "held": Held(one + 1, "n"),
            "output": BaseModelOutput(last_hidden_state=two + 1),
            "ordered": OrderedDict(a=two + 1),
        }
    )
    assert bent["tuple"][1] is ids
    assert bits(value["tuple"][0]) == bits(torch.ones(2))  # what was given is as it was
    assert value["output"].last_hidden_state is two


def test_tensors_in_containers_have_paths_of_their_own() -> None:
    seen = Capture()
    with seen.capture():
        seen((X, [X, {"k": X}]), "rnn")
        seen.after(NodePass("lstm", module=nn.Identity()), Inputs(()), (X, X))
    assert list(seen.captured) == [
        "rnn|sub_0", "rnn|sub_1.sub_0", "rnn|sub_1.sub_1.k",
        "lstm.output|sub_0", "lstm.output|sub_1",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [torch.arange(3), torch.tensor([True]), 3, None, ("a", [1])])
def test_what_cannot_be_bent_is_refused_by_node_and_kind(value: Any) -> None:
    with pytest.raises(BendError, match=r"bends .* tensors, and node 'ids' returned") as caught:
        Bias(1.0)(value, "ids")
    assert caught.value.path == "ids"
    assert isinstance(caught.value, bt.errors.InputError)


def test_a_callback_has_to_make_a_tensor() -> None:
    with pytest.raises(
        BendError, match=r"Lambda\(.*\) has to return a tensor for the value of node 'fc'.*3"
    ):
        Lambda(lambda x: 3)(X, "fc")


@pytest.mark.parametrize("argument", ["1", None, [1.0]])
def test_arguments_have_to_be_numbers(argument: Any) -> None:
    for kind in (Bias, Scale, Mask, ThresholdActivation, Normal):
        with pytest.raises(
            bt.errors.InputError, match="has to be a number, a tensor or a BendingParameter"
        ):
            kind(argument)


# --- Random numbers

DRAWING: list[Callable[..., Bend]] = [
    Mask,
    OrderedMask,
    lambda **k: Permute(-1, **k),
    lambda **k: ThresholdPermute(0.5, **k),
    Normal,
]


@pytest.mark.parametrize("kind", DRAWING)
def test_the_same_seed_and_shape_give_the_same_numbers(kind: Callable[..., Bend]) -> None:
    x = torch.randn(8, 64)
    one, two, other = kind(seed=3), kind(seed=3), kind(seed=4)
    assert bits(one(x, "a")) == bits(two(x, "a")) == bits(one(x, "b"))
    assert bits(one(x, "c")) != bits(other(x, "c"))


@pytest.mark.parametrize("kind", DRAWING)
def test_without_a_seed_nodes_and_callbacks_differ(kind: Callable[..., Bend]) -> None:
    x = torch.randn(8, 64)
    one, two = kind(), kind()
    assert bits(one(x, "a")) != bits(one(x, "b"))
    assert bits(one(x, "c")) != bits(two(x, "c"))


@pytest.mark.parametrize("kind", DRAWING)
@pytest.mark.parametrize("seed", [None, 5])
def test_the_global_generators_are_neither_read_nor_moved(
    kind: Callable[..., Bend], seed: int | None
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = kind(seed=seed)
    first = one(torch.ones(4, 16) + torch.arange(16))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    again = kind(seed=seed)(torch.ones(4, 16) + torch.arange(16))
    assert (bits(again) == bits(first)) == (seed is not None)


@pytest.mark.parametrize("kind", DRAWING[:-1])
@pytest.mark.parametrize("seed", [None, 5])
def test_numbers_are_drawn_once_for_each_node_and_again_after_reset(
    kind: Callable[..., Bend], seed: int | None
) -> None:
    x = torch.randn(8, 64)
    callback = kind(seed=seed)
    first = callback(x, "a")
    assert bits(callback(x, "a")) == bits(first)
    callback.reset()
    assert (bits(callback(x, "a")) == bits(first)) == (seed is not None)


def test_noise_is_fresh_each_time_and_comes_again_after_reset() -> None:
    noise, twin = Normal(1.0, seed=3), Normal(1.0, seed=3)
    first = [noise(torch.zeros(50), "a") for _ in range(3)]
    assert len({str(bits(value)) for value in first}) == 3
    assert bits([twin(torch.zeros(50), "b") for _ in range(3)]) == bits(first)
    noise.reset()
    assert bits([noise(torch.zeros(50), "a") for _ in range(3)]) == bits(first)


def test_noise_can_be_kept_and_multiplied() -> None:
    kept = Normal(2.0, seed=3, fresh=False)
    first = kept(torch.zeros(4, 8))
    assert bits(kept(torch.zeros(4, 8))) == bits(first)
    by = Normal(2.0, seed=3, fresh=False, op="mul")
    assert bits(by(torch.full((4, 8), 3.0))) == bits(3.0 * first)
    with pytest.raises(InputError, match="op of Normal has to be 'add' or 'mul', not 'div'"):
        Normal(op="div")  # type: ignore[arg-type]


def test_noise_has_the_standard_deviation_it_is_given() -> None:
    noise = Normal(0.5, seed=1)(torch.zeros(100_000))
    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.01)


def test_noise_per_channel_is_the_same_within_a_channel_and_for_all_other_sizes() -> None:
    noise = Normal(1.0, seed=2, dim=1)(torch.zeros(3, 4, 5))
    assert torch.equal(noise, noise[:1, :, :1].expand(3, 4, 5))
    assert len(noise[0, :, 0].unique()) == 4
    assert Normal(1.0, seed=2, dim=1)(torch.zeros(7, 4, 2)).shape == (7, 4, 2)


@given(prob=st.floats(0, 1), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_mask_keeps_or_zeroes_and_grows_with_the_probability(prob: float, seed: int) -> None:
    x = torch.randn(6, 7) + 10
    amount = BendingParameter("amount", prob)
    mask = Mask(amount, seed=seed)
    kept = mask(x) != 0
    assert torch.equal(mask(x), torch.where(kept, x, 0))
    amount.value = prob / 2
    assert not ((mask(x) != 0) & ~kept).any()
    amount.value = 0.0
    assert not mask(x).any()
    amount.value = 1.0
    assert torch.equal(mask(x), x)


def test_a_mask_keeps_about_as_many_as_it_should() -> None:
    assert Mask(0.3, seed=1)(torch.ones(100_000)).mean().item() == pytest.approx(0.3, abs=0.01)


@given(share=st.floats(0, 1), count=st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_an_ordered_mask_keeps_exactly_its_share(share: float, count: int) -> None:
    assert OrderedMask(share, seed=1)(torch.ones(count)).sum() == round(share * count)


@pytest.mark.parametrize("prob", [-0.1, 1.1, float("nan"), 1j])
def test_a_share_is_from_0_to_1(prob: Any) -> None:
    with pytest.raises(BendError, match="prob of Mask has to be a share from 0 to 1, not"):
        Mask(prob)
    amount = BendingParameter("amount", 0.5)
    mask = Mask(amount * 1)
    mask(X, "fc")
    amount.value = prob
    with pytest.raises(BendError, match="prob of Mask at 'fc' has to be a share"):
        mask(X, "fc")


def test_what_a_mask_takes_away_is_zero_whatever_it_was() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -1.0])
    for callback in (Mask(0.0), OrderedMask(0.0), ThresholdActivation(0.0)):
        assert bits(callback(odd)) == bits(torch.zeros(3))


@pytest.mark.parametrize("dim", [1, -2, (1,), [-2]])
def test_a_mask_along_a_dimension_survives_a_change_of_the_others(dim: Any) -> None:
    mask = Mask(0.5, seed=1, dim=dim)
    kept = mask(torch.ones(1, 16, 14))[0, :, 0]
    assert 0 < kept.sum() < 16
    for shape in [(4, 16, 30), (1, 16, 1), (2, 16, 14)]:
        assert torch.equal(mask(torch.ones(shape)), kept[:, None].expand(shape))


def test_a_mask_along_two_dimensions_differs_along_both() -> None:
    mask = Mask(0.5, seed=1, dim=(0, -1))
    kept = mask(torch.ones(8, 3, 8))
    assert torch.equal(kept, kept[:, :1].expand(8, 3, 8))
    assert torch.equal(mask(torch.ones(8, 5, 8)), kept[:, :1].expand(8, 5, 8))
    assert len(kept[:, 0].unique(dim=0)) > 1


def test_a_new_shape_is_refused_with_the_dimension_to_give() -> None:
    mask = Mask(0.3)
    mask(torch.ones(1, 4, 14), "conv_module")
    with pytest.raises(BendShapeError) as caught:
        mask(torch.ones(4, 4, 30), "conv_module")
    assert str(caught.value) == (
        "Mask at 'conv_module' drew its numbers for shape (1, 4, 14), and now received shape "
        "(4, 4, 30): pass Mask dim=-2 (size 4 in both), so that other sizes may change, or call "
        "reset()"
    )
    error = caught.value
    assert (error.path, error.old, error.new) == ("conv_module", (1, 4, 14), (4, 4, 30))
    assert error.candidates == (-2,)
    mask(torch.ones(9), "another")  # every node has its own
    mask.reset()
    mask(torch.ones(4, 4, 30), "conv_module")


def test_of_several_dimensions_all_are_named_and_of_none_none() -> None:
    mask = Mask(0.3)
    mask(torch.ones(2, 4, 5))
    with pytest.raises(BendShapeError, match=r"dim=-3 \(size 2 in both\) or dim=-2 \(size 4"):
        mask(torch.ones(2, 4, 6))
    with pytest.raises(BendShapeError, match=r"no size is the same in both, so only reset\(\)"):
        mask(torch.ones(3, 3, 3))
    with pytest.raises(BendShapeError, match=r"dim=-1 \(size 5 in both\)"):
        mask(torch.ones(7, 5))


def test_a_channel_that_changes_size_is_refused_too() -> None:
    for callback in (Mask(0.3, dim=1), OrderedMask(0.3, dim=1), Permute(1)):
        callback(torch.ones(2, 4))
        with pytest.raises(BendShapeError, match=r"the sizes \(4,\) along dim=1 of shape \(2, 4\)"):
            callback(torch.ones(2, 5))


def test_a_dimension_that_is_not_there_is_refused() -> None:
    for callback in (Mask(0.3, dim=2), ThresholdActivation(dim=2), Normal(dim=-3), Permute(2)):
        with pytest.raises(BendError, match=r"dim=-?\d, but .* at 'fc' has shape \(2, 4\)"):
            callback(torch.ones(2, 4), "fc")


@pytest.mark.parametrize("dim", ["1", 1.0, True, (), (1, "a")])
def test_a_dimension_is_an_int_or_several(dim: Any) -> None:
    with pytest.raises(InputError, match="dim has to be an int, several ints or None"):
        Mask(0.3, dim=dim)
    with pytest.raises(InputError, match="seed has to be an int or None"):
        Mask(0.3, seed="a")  # type: ignore[arg-type]


def test_what_was_captured_in_inference_mode_can_be_trained_with() -> None:
    weights = torch.tensor([0.5, 0.5], requires_grad=True)
    mix = InterpolationFromCapture(weights, softmax=False)
    with torch.inference_mode(), mix.capture():
        mix(torch.ones(2, 3))
    mix(torch.zeros(1)).sum().backward()
    assert bits(weights.grad) == bits(torch.full((2,), 3.0))
    assert not mix.captured[""][0].is_inference()


def test_masks_drawn_in_inference_mode_can_be_trained_with() -> None:
    for callback in (Mask(0.5), Permute(-1), Normal(fresh=False)):
        with torch.inference_mode():
            callback(torch.ones(4))
        x = torch.ones(4, requires_grad=True)
        callback(x).sum().backward()
        assert x.grad is not None


# --- Channels by rank


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 5), (3, 8, 2, 2), (8,)])
def test_a_threshold_keeps_the_channels_that_are_greatest_in_the_mean(
    shape: tuple[int, ...], invert: bool
) -> None:
    x = torch.randn(shape) + 5
    dim = 0 if len(shape) == 1 else 1
    bent = ThresholdActivation(0.5, dim=dim, invert=invert)(x)
    means = x.reshape(*shape[: dim + 1], -1).mean(-1)
    kept = means.argsort(-1, descending=not invert)[..., :4]
    for row, chosen in enumerate(kept.reshape(-1, 4)):
        one = x[row] if dim else x
        mask = torch.zeros(8, dtype=torch.bool)
        mask[chosen] = True
        wanted = torch.where(mask.reshape(8, *[1] * (one.dim() - 1)), one, 0)
        assert torch.equal(bent[row] if dim else bent, wanted)


def test_a_threshold_without_a_dimension_ranks_all_elements_and_no_shape_is_kept() -> None:
    callback = ThresholdActivation(0.25)
    for shape in [(4, 4), (2, 3, 8)]:
        x = torch.randn(shape) + 10
        bent = callback(x)
        assert (bent != 0).sum() == x.numel() // 4
        assert bent[bent != 0].min() > x[bent == 0].max()


def test_a_permutation_moves_channels_and_gradients_move_back() -> None:
    permute = Permute(1, seed=3)
    x = torch.randn(2, 6, 3, requires_grad=True)
    bent = permute(x)
    order = permute(torch.arange(6.0).expand(1, 6))[0].long()
    assert sorted(order.tolist()) == list(range(6))
    assert order.tolist() != list(range(6))
    assert torch.equal(bent, x[:, order])
    (bent * torch.arange(6.0)[:, None]).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:, order], torch.arange(6.0)[:, None].expand(2, 6, 3))


@pytest.mark.parametrize("dim", [None, 1])
def test_only_the_chosen_channels_change_places(dim: int | None) -> None:
    x = torch.rand(3, 10)
    bent = ThresholdPermute(0.5, dim=dim, seed=4)(x)
    rows = zip(x, bent, strict=True) if dim else [(x.flatten(), bent.flatten())]
    moved = 0
    for row, new in rows:
        assert torch.equal(row.sort().values, new.sort().values)
        low = row < row.sort().values[row.numel() // 2]
        assert torch.equal(row[low], new[low])
        moved += int((row != new).sum())
    assert moved > 0


def test_a_threshold_permutation_moves_whole_channels_and_follows_the_sizes() -> None:
    callback = ThresholdPermute(1.0, dim=-2, seed=4)
    for shape in [(2, 6, 3), (1, 6, 9)]:
        x = torch.rand(shape)
        bent = callback(x)
        for row, new in zip(x, bent, strict=True):
            assert sorted(map(tuple, row.tolist())) == sorted(map(tuple, new.tolist()))
        assert not torch.equal(bent, x)
    with pytest.raises(InputError, match="dim of ThresholdPermute has to be an int or None"):
        ThresholdPermute(dim=(1, 2))  # type: ignore[arg-type]


def test_who_goes_where_depends_on_who_is_chosen_and_not_on_the_ranks_among_them() -> None:
    callback = ThresholdPermute(0.5, dim=1, seed=4)
    x = torch.arange(8.0)[None]
    y = torch.tensor([[0.0, 1, 2, 3, 7, 4, 6, 5]])  # the same four are greatest
    order = callback(x)[0].long()
    assert torch.equal(callback(y), y[:, order])


def test_with_probability_0_nothing_is_kept_even_if_a_0_is_drawn() -> None:
    class Zeros(Mask):
        def kept(self, tensor: Tensor, at: NodePass, draw: Any) -> Tensor:
            return torch.zeros(tensor.shape)

    assert not Zeros(0.0)(X).any()


# --- Chains


def test_a_chain_bends_from_left_to_right() -> None:
    chain = Bias(1.0) >> Scale(3.0) >> Lambda(torch.neg)
    assert bits(chain(X)) == bits(-((X + 1) * 3))
    assert [type(c).__name__ for c in chain.callbacks] == ["Bias", "Scale", "Lambda"]
    assert repr(Bias(1.0) >> (Scale(2.0) >> Bias(3.0))) == (
        "Bias(bias=1.0) >> Scale(scale=2.0) >> Bias(bias=3.0)"
    )
    with pytest.raises(TypeError):
        Bias(1.0) >> 3
    with pytest.raises(InputError, match="a chain takes bending callbacks, not"):
        CallbackChain(Bias(1.0), torch.relu)  # type: ignore[arg-type]


def test_a_chain_resets_all_its_callbacks_and_has_their_parameters() -> None:
    gain = BendingParameter("gain", 1.0)
    noise, mask = Normal(gain, seed=1), Mask(0.5)
    chain = noise >> mask >> Scale(gain * 2)
    first = chain(torch.ones(100))
    chain.reset()
    assert chain.parameters == [gain]
    assert bits(noise(torch.ones(100))) == bits(Normal(1.0, seed=1)(torch.ones(100)))
    assert bits(chain(torch.ones(100))) != bits(first)


# --- Parameters

EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "2 * a + 1": lambda a, b: 2 * a + 1,
    "a - b - 3": lambda a, b: a - b - 3,
    "a - (b - 3)": lambda a, b: a - (b - 3),
    "-a ** 2": lambda a, b: -(a**2),
    "(-a) ** 2": lambda a, b: (-a) ** 2,
    "(a ** b) ** 2": lambda a, b: (a**b) ** 2,
    "a ** b ** 2": lambda a, b: a**b**2,
    "a / b / 2": lambda a, b: a / b / 2,
    "a / (b / 2)": lambda a, b: a / (b / 2),
    "1 / a": lambda a, b: 1 / a,
    "2 ** a": lambda a, b: 2**a,
    "3 - a": lambda a, b: 3 - a,
    "(a + b) * (a - b)": lambda a, b: (a + b) * (a - b),
    "a * -2": lambda a, b: a * (-2),
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_arithmetic_on_parameters_is_that_of_their_values(text: str) -> None:
    a, b = BendingParameter("a", 2.0), BendingParameter("b", 3.0)
    expression = EXPRESSIONS[text](a, b)
    for values in [(2.0, 3.0), (-1.5, 2.0), (torch.tensor([1.0, 2.0]), 2.0)]:
        a.value, b.value = values
        assert bits(expression.get_value()) == bits(EXPRESSIONS[text](*values))
    assert eval(repr(expression), {"a": 2.0, "b": 3.0}) == EXPRESSIONS[text](2.0, 3.0)
    assert set(expression.parameters) <= {a, b}


def test_a_tensor_may_stand_on_the_left_and_functions_get_the_value() -> None:
    a = BendingParameter("a", 2.0)
    for expression, wanted in [
        (X + a, X + 2), (X - a, X - 2), (X * a, X * 2), (X / a, X / 2), (X**a, X**2),
        (torch.add(X, a), X + 2),
    ]:  # fmt: skip
        assert isinstance(expression, Expression)
        assert bits(expression.get_value()) == bits(wanted)
    assert bits(torch.clamp(X, -a, a)) == bits(X.clamp(-2, 2))
    assert bits(torch.relu(X * a)) == bits(torch.relu(X * 2))
    y = X.clone()
    y.mul_(a)  # type: ignore[arg-type]
    assert bits(y) == bits(X * 2)
    assert bits(Lambda(lambda x: x * a)(X)) == bits(X * 2)
    assert bits(Scale(torch.ones(4) * a)(X)) == bits(X * 2)


def test_parameters_are_numbers_where_python_asks_and_cannot_be_compared() -> None:
    a = BendingParameter("a", 2.5)
    assert (float(a), int(a * 2), complex(a), bool(a), bool(a - 2.5)) == (2.5, 5, 2.5, True, False)
    for compare in (lambda: a < 1, lambda: a >= a, lambda: a + "x"):
        with pytest.raises(TypeError):
            compare()


def test_a_value_beyond_the_range_is_refused_or_clamped() -> None:
    strict = BendingParameter("amount", 0.5, range=(0, 1))
    with pytest.raises(InputError) as caught:
        strict.value = 1.5
    assert str(caught.value) == (
        "1.5 is outside the range (0, 1) of parameter 'amount'; with clamp=True it would become "
        "the nearest value inside"
    )
    assert strict.value == 0.5
    for value in (-0.1, float("nan"), torch.tensor([0.5, 2.0]), 1j):
        with pytest.raises(InputError):
            strict.set_value(value)
    clamped = BendingParameter("amount", 3.0, range=(0, None), clamp=True)
    clamped.value = -2.0
    assert clamped.value == 0
    clamped.value = torch.tensor([-1.0, 5.0])
    assert bits(clamped.value) == bits(torch.tensor([0.0, 5.0]))
    open_below = BendingParameter("x", -1e9, range=(None, 1))
    assert open_below.value == -1e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1.0), "has to be a non-empty string"),
        ((3, 1.0), "has to be a non-empty string"),
        (("a", "1"), "has to be a number or a tensor"),
        (("a", BendingParameter("b", 1.0)), "has to be a number or a tensor"),
        (("a", 1.0, (2, 1)), "a pair of the least and the greatest value"),
        (("a", 1.0, 3), "a pair of the least and the greatest value"),
        (("a", 1.0, (2, 3)), r"1.0 is outside the range \(2, 3\) of parameter"),
    ],
)
def test_parameters_are_checked_when_they_are_made(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BendingParameter(*arguments)


def test_callbacks_follow_their_parameters() -> None:
    a = BendingParameter("a", 0.5)
    x = torch.rand(4, 10) + 1
    for callback, plain in [
        (Bias(a), Bias), (Scale(a), Scale), (Affine(a, scale=0.5), lambda v: Affine(v, scale=0.5)),
        (Mask(a, seed=1), lambda v: Mask(v, seed=1)),
        (OrderedMask(a, seed=1), lambda v: OrderedMask(v, seed=1)),
        (ThresholdActivation(a, dim=1), lambda v: ThresholdActivation(v, dim=1)),
        (ThresholdPermute(a, dim=1, seed=2), lambda v: ThresholdPermute(v, dim=1, seed=2)),
        (Normal(a, seed=1, fresh=False), lambda v: Normal(v, seed=1, fresh=False)),
    ]:  # fmt: skip
        outputs = []
        for value in (0.5, 0.9, 0.1):
            a.value = value
            assert bits(callback(x)) == bits(plain(value)(x))
            outputs.append(str(bits(callback(x))))
        assert len(set(outputs)) == 3, callback
        assert callback.parameters == [a]


def test_gradients_flow_into_a_parameter_that_stands_for_a_tensor() -> None:
    direction = torch.ones(4, requires_grad=True)
    Bias(2 * BendingParameter("steering", direction))(X).sum().backward()
    assert bits(direction.grad) == bits(torch.full((4,), 4.0))


# --- Captures and mixtures


def test_a_capture_keeps_what_it_sees_while_it_is_told_to() -> None:
    seen = Capture()
    x = torch.randn(2, 3)
    assert seen(x, "a") is x
    with seen.capture() as same:
        assert same is seen
        seen(x, "a")
        seen(x + 1, "a")
        wanted = torch.cat([x, x + 1])
        x.add_(5)  # what was captured is a snapshot
    seen(x, "a")
    assert bits(seen.captures) == bits({"a": wanted})
    seen.capture()
    seen(x, "a")
    seen.stop()
    assert seen.captures["a"].shape == (6, 3)
    assert not seen.is_capturing
    seen.reset()
    assert seen.captures == {}


def test_what_cannot_be_joined_is_told_and_still_there() -> None:
    seen = Capture()
    with seen.capture():
        seen(torch.ones(1, 3), "a")
        seen(torch.ones(1, 4), "a")
        seen(torch.tensor(1.0), "number")
    with pytest.raises(BendError, match=r"at 'a' cannot be concatenated .* \(3,\) and \(4,\)"):
        _ = seen.captures
    assert [tuple(t.shape) for t in seen.captured["a"]] == [(1, 3), (1, 4)]


def test_mixtures_of_what_was_captured_take_the_place_of_values() -> None:
    weights = BendingParameter("w", torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
    mix = InterpolationFromCapture(weights, softmax=False)
    with pytest.raises(BendError, match="has captured nothing at 'a': first run the model within"):
        mix(X, "a")
    examples = torch.randn(2, 3, 4)
    with mix.capture():
        assert mix(examples, "a") is examples
    assert bits(mix(torch.zeros(9), "a")) == bits(torch.stack([examples[1], examples.mean(0)]))
    weights.value = torch.tensor([1.0, 0.0])
    assert bits(mix(torch.zeros(9), "a")) == bits(examples[:1])
    with pytest.raises(BendError, match=r"mixes 2 examples and needs weights of shape \(2,\) or"):
        InterpolationFromCapture.bend(_with(mix, weights=torch.ones(3)), X, at("a"))
    by_value = _with(mix, weights=None, softmax=True)
    logits = torch.randn(5, 2)
    assert torch.allclose(
        by_value(logits, "a"), torch.einsum("bn,n...->b...", logits.softmax(1), examples)
    )


def _with(callback: Any, **attributes: Any) -> Any:
    made = copy.copy(callback)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_examples_of_a_batch_are_mixed() -> None:
    x = torch.randn(3, 4, 5)
    assert InterpolateActivation()(x) is x
    one = InterpolateActivation(torch.tensor([0.0, 1.0, 0.0]))(x)
    assert bits(one) == bits(x[1:2])
    rows = torch.randn(7, 3)
    soft = InterpolateActivation(rows, softmax=True)(x)
    assert torch.allclose(soft, torch.einsum("bn,n...->b...", rows.softmax(-1), x))
    with pytest.raises(BendError, match=r"weights of shape \(3,\) or \(rows, 3\), not \(2,\)"):
        InterpolateActivation(torch.ones(2))(x)
    with pytest.raises(InputError, match="weights have to be a tensor"):
        InterpolateActivation([0.5])  # type: ignore[arg-type]


# --- In models

CALLBACKS: dict[str, Callable[[], Bend]] = {
    "bias": lambda: Bias(0.5),
    "scale": lambda: Scale(-2.0),
    "affine": lambda: Affine(1.0, 0.5),
    "mask": lambda: Mask(0.4, seed=1, dim=-2),
    "ordered": lambda: OrderedMask(0.4, seed=1, dim=-2),
    "threshold": lambda: ThresholdActivation(0.5, dim=-2),
    "permute": lambda: Permute(-2, seed=2),
    "threshold permute": lambda: ThresholdPermute(0.5, dim=-2, seed=2),
    "normal": lambda: Normal(0.5, seed=3),
    "lambda": lambda: Lambda(torch.tanh),
    "capture": Capture,
    "chain": lambda: Mask(0.5, seed=2, dim=1) >> Normal(0.1, seed=5) >> Bias(1.0),
    "mixture": lambda: InterpolateActivation(torch.full((2, 2), 0.5)),
}


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("training", [False, True])
def test_bent_is_what_eager_gives_with_a_hook_that_bends(name: str, training: bool) -> None:
    model = seeded(Stanley).train(training)
    eager = hooked(model, {"conv_modules.0": CALLBACKS[name]()})
    bended = made(model)
    bended.bend(CALLBACKS[name](), "conv_modules_0$")
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(2, 1, 20)
        torch.manual_seed(7)
        before = footprint()
        wanted = bits(eager(x))
        rng = torch.get_rng_state()
        torch.manual_seed(7)
        assert bits(bended(x)) == wanted, f"call {number}"
        assert footprint() == before
        assert torch.equal(torch.get_rng_state(), rng)
        assert state(model) == state(eager)  # also the statistics of the batch norm
    assert (bended.stats.traces, bended.stats.replays) == (1, 2)
    bended.bend(CALLBACKS[name](), "nnlin")  # one more place, and again
    outer = CALLBACKS[name]()
    eager.nnlin.register_forward_hook(lambda module, args, output: outer(output))
    for _ in range(2):
        assert bits(bended(x)) == bits(eager(x))


def test_channel_wise_bends_go_along_the_same_trace_for_other_sizes() -> None:
    model = seeded(Stanley).eval()
    mask = Mask(0.5, seed=1, dim=-2)
    eager = hooked(model, {"nnlin": mask})
    bended = made(model)
    bended.bend(Mask(0.5, seed=1, dim=-2), "nnlin")
    bended(torch.randn(2, 1, 20))
    for shape in [(2, 1, 20), (3, 1, 33), (5, 1, 64)]:
        x = torch.randn(shape)
        assert bits(bended(x)) == bits(eager(x))
    assert bended.stats.replays >= 2


INPUTS = [(5, 0.1), (5, 1.0), (5, 5.0), (7, 10.0), (1, 3.0), (5, 0.1), (7, 10.0)]


def inputs_of_experts() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(count, 4) * scale for count, scale in INPUTS]


def test_modules_in_a_data_dependent_model_are_bent_on_paths_never_traced_before() -> None:
    model = seeded(Experts)
    eager = hooked(model, {f"experts.{i}": lambda o: o * 3 + 1 for i in range(3)})
    bended = made(model)
    handle = bended.bend(Affine(bias=1.0, scale=3.0), r"experts\.\d$")  # before any run
    for _ in range(2):
        for x in inputs_of_experts():
            assert bits(bended(x)) == bits(eager(x))
    assert bended.stats.replays >= len(INPUTS)
    assert set(handle.report().paths) == {"experts_0", "experts_1", "experts_2"}
    assert bended.bended_keys() == sorted(bended.bended_keys(), key=bended.bended_keys().index)


@pytest.mark.parametrize("scale", [1.0, 0.0, -1.0, 5.0])
def test_a_bend_that_changes_which_way_is_taken_leads_there(scale: float) -> None:
    model = seeded(Experts)
    assert isinstance(model, Experts)
    bended = made(model)
    for x in inputs_of_experts():
        bended(x)  # all paths without the bend are known
    bended.bend(Scale(scale), "softmax$")
    for _ in range(2):
        for x in inputs_of_experts():
            weights = F.softmax(model.router(x), -1) * scale
            wanted = bits(model.finish(model.mix(x, weights)))
            assert bits(bended(x)) == wanted
    bended.reset()
    for x in inputs_of_experts():
        assert bits(bended(x)) == bits(model(x))


def test_every_pass_of_a_loop_is_bent_and_the_loop_goes_by_it() -> None:
    model = seeded(Experts)
    assert isinstance(model, Experts)
    bended = made(model)
    x = inputs_of_experts()[3]
    bended(x)
    handle = bended.bend(Scale(1.5), "mul_1$")  # y * 0.5 is 0.75 * y from now on

    def finish(y: Tensor) -> tuple[Tensor, int]:
        steps = 0
        while y.norm() > 1 and steps < 10:
            y = y * 0.5 * 1.5
            steps += 1
        return model.out(y), steps

    wanted, steps = finish(model.mix(x, F.softmax(model.router(x), -1)))
    assert steps > 1
    assert bits(bended(x)) == bits(bended(x)) == bits(wanted)
    (row,) = handle.report().rows
    assert row.passes == dict.fromkeys(range(steps), 2)


def test_noise_is_drawn_once_for_each_call_also_where_a_run_is_resumed() -> None:
    bended = made(seeded(Experts))
    noise = Normal(1.0, seed=3)
    handle = bended.bend(noise, "softmax", allow_none=True)
    for count, x in enumerate(inputs_of_experts(), 1):
        bended(x)
        assert handle.report().fired == count
    assert bended.stats.resumes > 0
    twin = Normal(1.0, seed=3)
    for _ in INPUTS:
        twin(torch.zeros(1), "softmax")
    after = torch.zeros(5, 3)
    assert bits(noise(after, "softmax")) == bits(twin(after, "softmax"))


def test_a_parameter_is_changed_while_running_without_a_trace() -> None:
    model = seeded(Stanley).eval()
    x = torch.randn(2, 1, 20)
    bended = made(model)
    gain = BendingParameter("gain", 1.0, range=(-10, 10))
    bended.bend(Scale(2.0 * gain) >> Bias(gain), "conv_modules_0$")
    bended.bend(Bias(-gain), "conv_modules.1.weight")
    bended(x)
    traces = bended.stats.traces
    for value in [-0.5, 0.0, 1.0, 2.0]:
        bended.update("gain", value)
        weight = model.conv_modules[1].weight - value  # type: ignore[index, union-attr, operator]
        hidden = model.conv_modules[0](x) * (2.0 * value) + value  # type: ignore[index, operator]
        hidden = F.conv1d(hidden, weight, model.conv_modules[1].bias)  # type: ignore[index, arg-type, union-attr]
        assert bits(bended(x)) == bits(torch.sigmoid(model.batch_norm(hidden)))  # type: ignore[operator]
    assert bended.stats.traces == traces
    assert bending(bended).controllables == {"gain": gain}
    with pytest.raises(
        bt.errors.InputError, match=r"no callback has a parameter 'gian'; did you mean"
    ):
        bended.update("gian", 1.0)
    with pytest.raises(InputError, match="outside the range"):
        bended.update("gain", 11.0)
    with pytest.raises(InputError, match="another parameter already has the name 'gain'"):
        bended.bend(Scale(BendingParameter("gain", 1.0)), "nnlin")


def bending(bended: bt.BendedModule) -> Bending:
    return bended.bending


# --- What patterns mean


@pytest.fixture
def stanley() -> bt.BendedModule:
    bended = made(seeded(Stanley).eval())
    bended(torch.zeros(2, 1, 20))
    return bended


@pytest.mark.parametrize(
    ("patterns", "keys"),
    [
        (["conv_modules_0"], ["conv_modules.sub_0"]),
        (["conv_modules.0"], ["conv_modules.sub_0"]),
        ([r"conv_modules\.sub_0"], ["conv_modules.sub_0"]),
        (["conv_modules"], ["conv_modules.sub_0", "conv_modules.sub_1"]),
        (["conv_modules$"], ["conv_modules"]),
        (["conv_modules.0$"], ["conv_modules.sub_0"]),
        (["batch_norm"], ["batch_norm"]),
        ([re.compile("BATCH", re.I)], ["batch_norm"]),
        (["conv_modules.0.weight"], ["conv_modules.0.weight"]),
        ([r"conv_modules.\d.weight"], ["conv_modules.0.weight", "conv_modules.1.weight"]),
        ([r".*bias"], ["conv_modules.0.bias", "conv_modules.1.bias", "batch_norm.bias"]),
        (["batch_norm.running_mean"], ["batch_norm.running_mean"]),
        (["nnlin", "batch_norm.weight"], ["nnlin", "batch_norm.weight"]),
        (["(nnlin|batch_norm.weight)"], ["nnlin", "batch_norm.weight"]),
        ([".*"], ["x", "conv_modules.sub_0", "conv_modules.sub_1", "batch_norm", "nnlin"]),
        (["x$"], ["x"]),
        (["conv_modules.sub_0.conv1d"], ["conv_modules.sub_0.conv1d"]),
    ],
)
def test_a_pattern_means_what_it_names_and_nothing_else(
    stanley: bt.BendedModule, patterns: list[Any], keys: list[str]
) -> None:
    handle = stanley.bend(Bias(1.0), *patterns)
    assert sorted(stanley.bended_keys()) == sorted(keys)
    stanley(torch.zeros(2, 1, 20))
    assert sorted(handle.report().paths) == sorted(keys)


def test_a_module_s_name_does_not_mean_its_weights(stanley: bt.BendedModule) -> None:
    model = stanley.model
    stanley.bend(Bias(1.0), "batch_norm")
    x = torch.randn(2, 1, 20)
    hidden = model.batch_norm(model.conv_modules(x)) + 1  # type: ignore[attr-defined]
    assert bits(stanley(x)) == bits(torch.sigmoid(hidden))


def test_weights_can_be_asked_for_and_left_out(stanley: bt.BendedModule) -> None:
    stanley.bend(Bias(1.0), "batch_norm", weights=True)
    assert stanley.bended_keys() == ["batch_norm", "batch_norm.weight", "batch_norm.bias"]
    stanley.reset()
    stanley.bend(Bias(1.0), "batch_norm", weights=True, activations=False)
    assert stanley.bended_keys() == ["batch_norm.weight", "batch_norm.bias"]
    stanley.reset()
    with pytest.raises(
        bt.errors.InputError, match=r"nothing that can be bent matches 'batch_norm\.weight'"
    ):
        stanley.bend(Bias(1.0), "batch_norm.weight", weights=False)


def test_integers_are_left_alone_by_patterns() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids + 1).argmax(-1)

    bended = made(seeded(Tokens))
    ids = torch.tensor([[1, 2]])
    bended(ids)
    bended.bend(Scale(-1.0), ".*")
    assert bended.bended_keys() == ["embed"]
    assert bits(bended(ids)) == bits((-bended.model.embed(ids + 1)).argmax(-1))  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="nothing that can be bent matches 'argmax'"):
        bended.bend(Scale(-1.0), "argmax")


def test_nothing_by_a_name_is_an_error_with_near_misses(stanley: bt.BendedModule) -> None:
    with pytest.raises(InputError) as caught:
        stanley.bend(Bias(1.0), "conv_module.0.weigth")
    assert str(caught.value) == (
        "nothing that can be bent matches 'conv_module.0.weigth'; did you mean "
        "'conv_modules.0.weight', 'conv_modules.1.weight', 'conv_modules.0.bias'? "
        "(allow_none=True waits for a match in later runs)"
    )
    with pytest.raises(InputError, match=r"there are 'x', "):
        stanley.bend(Bias(1.0), "zzz")
    with pytest.raises(InputError, match=r"'\(' is not a regular expression"):
        stanley.bend(Bias(1.0), "(")
    with pytest.raises(InputError, match="pass patterns for the names of what to bend"):
        stanley.bend(Bias(1.0))
    for wrong in ("nnlin", Bias, 3):
        with pytest.raises(InputError, match=r"bend\(\) takes a bending callback"):
            stanley.bend(wrong, "nnlin")
    assert stanley.bended_keys() == []
    assert stanley.insertions == ()


def test_before_any_run_modules_and_weights_are_known() -> None:
    bended = made(seeded(Experts))
    bended.bend(Bias(1.0), "router$")
    bended.bend(Bias(1.0), "out.bias")
    assert bended.bended_keys() == ["router", "out.bias"]
    with pytest.raises(
        bt.errors.InputError, match="nothing has been traced yet, so only modules and"
    ):
        bended.bend(Bias(1.0), "softmax")
    handle = bended.bend(Scale(2.0), "softmax", allow_none=True)
    with pytest.raises(InputError, match="nothing has been traced yet"):
        bended.print_activations()
    bended(torch.ones(2, 4))
    assert handle.report().paths == ("softmax",)
    assert bended.bended_keys() == ["router", "out.bias", "softmax"]


def test_all_else_that_says_where_works_too(stanley: bt.BendedModule) -> None:
    x = torch.randn(2, 1, 20)
    model: Any = stanley.model
    for where in (nn.Sigmoid, model.nnlin, lambda node: node.module_path == "nnlin"):
        with stanley.bend(Bias(1.0), where):
            assert bits(stanley(x)) == bits(
                torch.sigmoid(model.batch_norm(model.conv_modules(x))) + 1
            )
    stanley.bend(Bias(1.0), [nn.Conv1d, "nnlin"])
    assert stanley.bended_keys() == ["nnlin", "Conv1d"]
    with pytest.raises(bt.BendtraceError):
        stanley.bend(Bias(1.0), nn.LSTM)
    assert stanley.bended_keys() == ["nnlin", "Conv1d"]
    stanley.reset("Conv1d")
    assert stanley.bended_keys() == ["nnlin"]


def test_functions_bend_as_they_are(stanley: bt.BendedModule) -> None:
    x = torch.randn(2, 1, 20)
    before = stanley(x)
    with stanley.bend(torch.neg, "nnlin") as handle:
        assert bits(stanley(x)) == bits(-before)
    assert repr(handle) == "<bend Lambda(neg) at 'nnlin', removed>"
    again = stanley.bend(torch.neg, "nnlin")
    assert repr(again) == "<bend Lambda(neg) at 'nnlin', active>"
    again.remove()
    assert bits(stanley(x)) == bits(before)


def test_plain_functions_are_models_too() -> None:
    def model(x: Tensor, by: float) -> Tensor:
        return torch.relu(x) * by

    bended = bt.BendedModule(model)
    x = torch.randn(5)
    bended(x, 2.0)
    assert bended.activation_names() == ["x", "relu", "mul"]
    bended.bend(Bias(1.0), "relu")
    bended.bend(Bias(3.0), "x$")
    for _ in range(2):
        assert bits(bended(x, 2.0)) == bits((torch.relu(x + 3) + 1) * 2.0)


def test_inputs_are_known_by_their_names_whatever_these_are() -> None:
    def model(output: Tensor, _x: Tensor, relu: Tensor, *, n: int) -> Tensor:
        return torch.relu(relu) * n + output * _x

    bended = bt.BendedModule(model)
    one, two, three = torch.randn(3), torch.randn(3), torch.randn(3)
    bended(one, two, three, n=2)
    assert bended.activation_names() == [
        "output_1", "x", "relu", "relu_1", "mul", "mul_1", "add"
    ]  # fmt: skip
    bended.bend(Bias(1.0), "output$", "_x", "relu$")
    wanted = torch.relu(three + 1) * 2 + (one + 1) * (two + 1)
    assert bits(bended(one, two, three, n=2)) == bits(wanted)


def test_an_output_with_several_tensors_is_bent_whole() -> None:
    model = nn.Sequential(OrderedDict(rnn=nn.LSTM(3, 4, batch_first=True)))
    bended = made(model)
    x = torch.randn(2, 5, 3)
    output, (hidden, cell) = model(x)
    seen = Capture()
    bended.bend(Scale(2.0) >> seen, "rnn$")
    with bending(bended).capture():
        given = bended(x)
    assert bits(bended(x)) == bits(given)
    assert torch.equal(given[0], output * 2)
    assert torch.equal(given[1][0], hidden * 2)
    assert torch.equal(given[1][1], cell * 2)
    assert list(seen.captures) == [
        "rnn.output|sub_0", "rnn.output|sub_1.sub_0", "rnn.output|sub_1.sub_1"
    ]  # fmt: skip


def test_works_in_place_are_bent_as_by_a_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    eager = hooked(model, {"1": lambda o: o + 1})
    bended = made(model)
    bended.bend(Bias(1.0), "1$")
    x = torch.randn(4, 3)
    for _ in range(3):
        assert bits(bended(x)) == bits(eager(x))


# --- Weights


def test_bending_a_weight_never_changes_the_model_and_gradients_reach_its_own() -> None:
    model = seeded(Stanley).eval()
    x = torch.randn(2, 1, 20)
    bended = made(model)
    before = state(model)
    bended.bend(Scale(2.0) >> Mask(0.5, seed=1), r"conv_modules.\d.weight")
    bended.bend(Bias(1.0), "batch_norm.bias")
    chain = Scale(2.0) >> Mask(0.5, seed=1)
    for _ in range(3):
        bent = {
            name: chain(tensor, name) if name.startswith("conv") and name.endswith("weight")
            else tensor + 1 if name == "batch_norm.bias"
            else tensor
            for name, tensor in model.named_parameters()
        }  # fmt: skip
        wanted = torch.func.functional_call(model, bent, x)
        grads = torch.autograd.grad(wanted.square().sum(), tuple(model.parameters()))
        given = bended(x)
        assert bits(given) == bits(wanted)
        given.square().sum().backward()
        assert bits([p.grad for p in model.parameters()]) == bits(list(grads))
        model.zero_grad()
    assert state(model) == before
    assert bits(bending(bended).bended_state_dict()) == bits(
        {k: v.detach() for k, v in bent.items() if v is not model.get_parameter(k)}
    )
    assert bended.stats.replays == 2


def test_a_bend_of_weights_alone_looks_at_no_node(stanley: bt.BendedModule) -> None:
    stanley.bend(Scale(2.0), r"conv_modules.\d.weight")
    (insertion,) = stanley.insertions
    assert [type(place).__name__ for place in insertion.where] == ["StateTensor", "StateTensor"]


def test_a_weight_that_is_trained_is_bent_as_it_is() -> None:
    model = nn.Linear(2, 2)
    bended = made(model)
    bended.bend(Scale(3.0), "weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 2)
        given = bended(x)
        assert bits(given) == bits(F.linear(x, model.weight * 3, model.bias))
        given.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bended.stats.traces == 1


def test_a_weight_used_twice_is_bent_once_for_each_call() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(torch.relu(self.fc(x)))
            return out

    bended = made(seeded(Tied))
    noise = Normal(1.0, seed=1)
    handle = bended.bend(noise, "fc.weight")
    fc: Any = bended.model.fc  # type: ignore[attr-defined]
    x = torch.randn(2, 3)
    twin = Normal(1.0, seed=1)
    for count in (1, 2, 3):
        weight = twin(fc.weight, "fc.weight")
        wanted = F.linear(torch.relu(F.linear(x, weight, fc.bias)), weight, fc.bias)
        assert bits(bended(x)) == bits(wanted)
        assert handle.report().fired == count


# --- Handles, order, removal


def test_bends_at_one_node_are_called_in_the_order_in_which_they_were_made(
    stanley: bt.BendedModule,
) -> None:
    x = torch.randn(2, 1, 20)
    plain = stanley(x)
    stanley.bend(Bias(1.0), "nnlin")
    inner = stanley.bend(Scale(3.0), "nnlin")
    stanley.bend(Bias(0.5), "nnlin")
    assert bits(stanley(x)) == bits((plain + 1) * 3 + 0.5)
    stanley.update()
    assert bits(stanley(x)) == bits((plain + 1) * 3 + 0.5)
    inner.remove()
    inner.remove()
    assert not inner.active
    assert bits(stanley(x)) == bits(plain + 1 + 0.5)


def test_a_node_that_several_patterns_mean_is_bent_once(stanley: bt.BendedModule) -> None:
    x = torch.randn(2, 1, 20)
    plain = stanley(x)
    stanley.bend(Bias(1.0), "nnlin", "nn.*", ".*lin$")
    assert bits(stanley(x)) == bits(plain + 1)


def test_a_context_ends_what_it_began_and_warns_if_nothing_came_by() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x) if x.sum() > 0 else torch.tanh(x)

    bended = bt.BendedModule(model)
    up, down = torch.ones(2), -torch.ones(2)
    bended(up)
    bended(down)
    with bended.bend(Bias(1.0), "relu"):
        assert bits(bended(up)) == bits(up + 1)
    assert bits(bended(up)) == bits(up)
    with (
        pytest.warns(NeverFiredWarning, match=r"Bias\(bias=1.0\) at 'relu' was never called"),
        bended.bend(Bias(1.0), "relu"),
    ):
        bended(down)
    with bended.bend(Bias(1.0), "gelu", allow_none=True):
        bended(down)
    with pytest.raises(KeyError), bended.bend(Bias(1.0), "relu"):
        raise KeyError
    assert bended.bended_keys() == []


def test_reports_say_what_was_bent_and_outlive_what_is_inserted(stanley: bt.BendedModule) -> None:
    handle = stanley.bend(Scale(2.0), "nnlin", "batch_norm.bias")
    stanley(torch.randn(2, 1, 20))
    stanley.update()
    stanley.bend(Bias(1.0), "batch_norm$")
    report = handle.report()
    assert report.fired == 2
    assert report.changed
    assert str(report) == (
        "Scale(scale=2.0) at 'nnlin', 'batch_norm.bias': called 2 times at 2 nodes\n"
        "  batch_norm.bias: once, no change\n"
        "  nnlin: once, changed the value once"
    )


def test_some_of_what_is_bent_can_be_reset(stanley: bt.BendedModule) -> None:
    x = torch.randn(2, 1, 20)
    model: Any = stanley.model
    bias, scale = Bias(1.0), Scale(2.0)
    stanley.bend(bias, "conv_modules", "nnlin", "batch_norm.weight")
    stanley.bend(scale, "nnlin")
    stanley.reset("conv_modules_1", "batch_norm.weight")
    assert stanley.bended_keys() == ["conv_modules.sub_0", "nnlin"]
    hidden = model.conv_modules[1](model.conv_modules[0](x) + 1)
    assert bits(stanley(x)) == bits((torch.sigmoid(model.batch_norm(hidden)) + 1) * 2)
    stanley.reset(bias)
    assert bits(stanley(x)) == bits(model(x) * 2)
    with pytest.raises(
        bt.errors.InputError, match=r"'conv_modules_0' matches nothing that is bent; there"
    ):
        stanley.reset("conv_modules_0")
    with pytest.raises(InputError, match=r"takes callbacks, names and patterns, not 3"):
        stanley.reset(3)
    stanley.reset(re.compile("nn.*"))
    assert stanley.insertions == ()
    assert bits(stanley(x)) == bits(model(x))
    stanley.reset()


def test_other_insertions_are_left_alone(stanley: bt.BendedModule) -> None:
    x = torch.randn(2, 1, 20)
    plain = stanley(x)
    other = stanley.interject("nnlin", lambda value: value + 10)
    stanley.bend(Scale(2.0), "nnlin")
    assert bits(stanley(x)) == bits((plain + 10) * 2)
    stanley.reset()
    assert other.active
    assert bits(stanley(x)) == bits(plain + 10)


def test_other_insertions_at_a_weight_do_not_change_by_what_name_it_is_bent() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    bended, x = made(model), torch.randn(2, 3)
    bended(x)
    bended.interject("sub_0.weight", lambda weight: weight + 1)
    mask = Mask(0.5)
    bended.bend(mask, "0.weight")
    weight = mask(model[0].weight + 1, "0.weight")
    assert bits(bended(x)) == bits(torch.relu(F.linear(x, weight, model[0].bias)))
    other = nn.Sequential(nn.Linear(3, 3))
    bending(bended).add_version("other", other)
    with bending(bended).set_version("other"):
        assert bits(bended(x).detach()) == bits(
            torch.relu(F.linear(x, mask(other[0].weight, "0.weight"), other[0].bias)).detach()
        )


# --- Tables


def test_activations_and_weights_are_printed_as_tables(
    stanley: bt.BendedModule, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = stanley.print_activations()
    assert capsys.readouterr().out == f"{table}\n"
    assert table == (
        "------------------  -----------  ----------------------\n"
        "x                   placeholder  torch.Size([2, 1, 20])\n"
        "conv_modules.sub_0  call_module  torch.Size([2, 4, 18])\n"
        "conv_modules.sub_1  call_module  torch.Size([2, 8, 16])\n"
        "batch_norm          call_module  torch.Size([2, 8, 16])\n"
        "nnlin               call_module  torch.Size([2, 8, 16])\n"
        "------------------  -----------  ----------------------"
    )
    assert repr(table) == table
    assert stanley.activation_names(flt="conv_modules", exclude=[".*1$"]) == ["conv_modules.sub_0"]
    assert stanley.activation_names(flt=["conv", ".*0"]) == ["conv_modules.sub_0"]
    weights = stanley.print_weights(flt=".*norm", exclude=".*bias")
    assert capsys.readouterr().out == f"{weights}\n"
    assert weights == (
        "name               shape            dtype            min    max    mean    stddev\n"
        "-----------------  ---------------  -------------  -----  -----  ------  --------\n"
        "batch_norm.weight  torch.Size([8])  torch.float32      1      1       1         0"
    )
    assert stanley.weight_names == [name for name, _ in stanley.model.named_parameters()]  # type: ignore[attr-defined]
    stanley.print_weights(out=tmp_path / "weights.txt")
    stream = io.StringIO()
    stanley.print_weights(out=stream)
    assert (tmp_path / "weights.txt").read_text() == stream.getvalue() != ""
    assert capsys.readouterr().out == ""


def test_tables_take_odd_weights() -> None:
    odd = torch.ones(2, dtype=torch.complex64)
    model = nn.ParameterDict({"one": torch.ones(1), "none": torch.ones(0), "complex": odd})
    printed = made(model).print_weights(out=io.StringIO())
    assert [line.split()[0] for line in printed.splitlines()[2:]] == ["complex", "none", "one"]


def test_ops_are_told_from_methods_and_numbers_left_out() -> None:
    bended = bt.BendedModule(lambda x: torch.relu(x).view(x.shape[0], -1) + x.sum().item())
    bended(torch.ones(2, 3))
    found = {a.name: a.op for a in bending(bended).activations()}
    assert found == {
        "x": "placeholder", "relu": "call_function", "view": "call_method", "sum": "call_method",
        "add": "call_method",
    }  # fmt: skip


# --- Configurations


class Square(Bend):
    def __init__(self, times: int = 1) -> None:
        self.times = times

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        return tensor ** (2**self.times)


def test_configurations_are_saved_and_loaded(tmp_path: Path) -> None:
    gain = BendingParameter("gain", 0.5, range=(0, 2), clamp=True)
    steer = BendingParameter("steer", torch.tensor([1.0, 2.0]))
    noise = Normal(gain, seed=3)
    config = BendingConfig(
        (Scale(2 * gain + 1), "conv_modules_0", re.compile("NNLIN", re.I)),
        (noise >> Mask(gain / 2, seed=1, dim=(0, -1)), r"conv_modules.\d.weight"),
        (noise, "nnlin"),
        (Bias(steer), "x"),
        (Bias(torch.tensor(1j)), "x"),
        (Bias(2j), "x"),
        (Square(2), "x"),
        (InterpolateActivation(torch.eye(2)), "x"),
    )
    path = tmp_path / "bends.json"
    config.save(path)
    json.loads(path.read_text())
    found = BendingConfig.load(path)
    assert repr(found) == repr(config).replace("re.compile('NNLIN', re.IGNORECASE)", "'(?i:NNLIN)'")
    loaded = {p.name: p for p in found.parameters}
    assert (loaded["gain"].value, loaded["gain"].range, loaded["gain"].clamp) == (0.5, (0, 2), True)
    assert bits(loaded["steer"].value) == bits(steer.value)
    chain, again = found.bends[1].callback, found.bends[2].callback
    assert isinstance(chain, CallbackChain)
    assert chain.callbacks[0] is again
    loaded["gain"].value = 1.0
    assert bits(found.bends[0].callback(X)) == bits(X * 3.0)
    for bend in (4, 5):
        assert bits(found.bends[bend].callback(X)) == bits(config.bends[bend].callback(X))
    assert bits(found.bends[6].callback(X)) == bits(X**4)
    x = torch.ones(4, 3, 6)
    assert bits(chain.callbacks[1](x)) == bits(Mask(0.5, seed=1, dim=(0, -1))(x))
    shared = BendingConfig.load(path, parameters={"gain": gain})
    assert gain in shared.parameters


@pytest.mark.parametrize("seed", [None, 3])
def test_a_loaded_configuration_draws_the_same_numbers_and_is_equal(
    tmp_path: Path, seed: int | None
) -> None:
    config = BendingConfig(
        (Mask(0.5, seed=seed) >> Scale(2.0), "x"), (Normal(0.1, seed=seed), re.compile("x|y"))
    )
    x = torch.ones(20, 20)
    wanted = [bits(bend.callback(x, "x")) for bend in config]
    config.save(tmp_path / "bends.json")
    found = BendingConfig.load(tmp_path / "bends.json")
    config.bends[1].callback.reset()
    found.bends[1].callback.reset()
    again = BendingConfig.load(tmp_path / "bends.json")
    assert [bits(bend.callback(x, "x")) for bend in again] == wanted
    assert again == BendingConfig.load(tmp_path / "bends.json") != BendingConfig(config.bends[0])
    # Without a seed, a reset makes it another configuration, which draws other numbers.
    assert (found == config == again) is (seed is not None)


def test_functions_and_places_that_only_python_can_say_are_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "bends.json"
    for config, message in [
        (BendingConfig((Lambda(torch.relu), "x")), r"fn of Lambda is .* cannot be saved to a file"),
        (BendingConfig((Bias(1.0), nn.Linear)), "only bends with patterns can be saved to a file"),
        (
            BendingConfig(
                (Bias(BendingParameter("a", 1.0)), "x"), (Bias(BendingParameter("a", 1.0)), "x")
            ),
            "there are two parameters named 'a'",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            config.save(path)
        assert not path.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read bends"),
        ("[]", "contains no bends"),
        ('{"format": "bendtrace bends", "version": 9}', "has version 9, but only version 1"),
        (
            '{"format": "bendtrace bends", "version": 1, "configs": {"": {"callbacks": '
            '[{"class": "Nope", "arguments": {}}], "bends": [{"callback": 0, "where": ["x"]}]}}}',
            "there is no class of callbacks 'Nope'; known classes: Affine, Bias",
        ),
        (
            '{"format": "bendtrace bends", "version": 1, "configs": {"": {"bends": [{}]}}}',
            "these are not stored bends",
        ),
        ('{"format": "bendtrace bends", "version": 1, "configs": {"a": {"bends": []}}}', "named"),
    ],
)
def test_files_that_hold_something_else_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bends.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        BendingConfig.load(path)
    with pytest.raises(InputError, match="cannot read bends"):
        BendingConfig.load(tmp_path / "none.json")


def test_configurations_are_lists_that_can_be_compared_and_joined() -> None:
    mask = Mask(0.8)
    one = BendingConfig((mask, r"conv_modules.\d.weight"), (mask, "nnlin"))
    two = BendingConfig((mask, r"conv_modules.\d.weight")) + BendingConfig((mask, "nnlin"))
    assert one == two
    assert len(one) == 2
    assert one != BendingConfig((mask, "nnlin"))
    for wrong in ((mask,), mask, ("nnlin", mask)):
        with pytest.raises(InputError, match="a configuration takes tuples"):
            BendingConfig(wrong)


def test_a_model_is_bent_by_a_configuration_whole_or_not_at_all(stanley: bt.BendedModule) -> None:
    x = torch.randn(2, 1, 20)
    plain = stanley(x)
    config = BendingConfig((Bias(1.0), "nnlin"), (Scale(2.0), "nnlin"))
    handle = stanley.bend(config)
    assert stanley.bending_config() == config
    assert bits(stanley(x)) == bits((plain + 1) * 2)
    assert len(handle.reports()) == 2
    handle.remove()
    assert stanley.bending_config() == BendingConfig()
    for wrong in ("nothing", nn.LSTM):
        with pytest.raises(bt.BendtraceError):
            stanley.bend(BendingConfig((Bias(1.0), "nnlin"), (Scale(2.0), wrong)))
        assert stanley.insertions == ()
    with pytest.raises(InputError, match="already contains its patterns: pass it alone"):
        stanley.bend(config, "nnlin")


def test_configurations_have_names(stanley: bt.BendedModule, tmp_path: Path) -> None:
    x = torch.randn(2, 1, 20)
    bends = bending(stanley)
    plain = stanley(x)
    gain = BendingParameter("gain", 2.0)
    stanley.bend(Scale(gain), "nnlin")
    bends.save_config_as("loud")
    with pytest.raises(
        bt.errors.InputError, match="there is a configuration 'loud' already; force=True"
    ):
        bends.save_config_as("loud")
    stanley.reset()
    bends.save_config_as("none")
    assert len(stanley.bending_config("loud")) == 1
    with bends.set_config("loud"):
        assert bits(stanley(x)) == bits(plain * 2)
        with bends.set_config(BendingConfig((Bias(1.0), "nnlin"))):
            assert bits(stanley(x)) == bits(plain + 1)
        assert bits(stanley(x)) == bits(plain * 2)
    assert bits(stanley(x)) == bits(plain)
    with pytest.raises(InputError, match="no configuration 'laud'; did you mean 'loud'"):
        bends.set_config("laud")
    path = tmp_path / "configs.json"
    bends.save_configs(path)
    other = bending(made(stanley.model))  # type: ignore[arg-type]
    other.load_configs(path)
    assert set(other.configs) == {"loud", "none"}
    other.set_config("loud")
    other.update("gain", 4.0)
    assert gain.value == 2.0


# --- Versions of weights


def test_versions_of_weights_stand_in_for_those_of_the_model() -> None:
    model = seeded(Stanley).eval()
    other = seeded(Stanley, 1).eval()
    before = state(model)
    bended, x = made(model), torch.randn(2, 1, 20)
    bends = bending(bended)
    plain = bended(x)
    bends.add_version("other", other)
    assert bits(bended(x)) == bits(plain)
    with bends.set_version("other"):
        assert bends.version == "other"
        # Nothing of the model's is in it that gradients could flow to.
        assert bits(bended(x)) == bits(bended(x)) == bits(other(x).detach())
        with bends.set_version():
            assert bits(bended(x)) == bits(plain)
        assert bits(bended(x)) == bits(other(x).detach())
    assert bends.version == "original"
    assert bits(bended(x)) == bits(plain)
    assert state(model) == before
    assert bended.insertions == ()
    assert bends.versions.names == ("original", "other")


def test_versions_are_copies() -> None:
    other = nn.Linear(3, 2)
    bends = bending(made(nn.Linear(3, 2)))
    bends.add_version("other", other)
    kept = bits(bends.versions.weights("other"))
    with torch.no_grad():
        other.weight.add_(1)
    assert bits(bends.versions.weights("other")) == kept


def test_bent_weights_are_kept_as_a_version_and_versions_are_bent() -> None:
    model: Any = seeded(Stanley).eval()
    bended, x = made(model), torch.randn(2, 1, 20)
    bends = bending(bended)
    bended.bend(Mask(0.3, seed=1), "conv_modules.0.weight")
    bent = bended(x)
    bends.add_version("bent")
    assert list(bends.versions.weights("bent")) == ["conv_modules.0.weight"]
    bended.reset()
    with bends.set_version("bent"):
        assert bits(bended(x)) == bits(bent)
        bended.bend(Bias(1.0), "conv_modules.0.weight")  # on top of the version
        weight = bends.versions.weights("bent")["conv_modules.0.weight"] + 1
        hidden = F.conv1d(x, weight, model.conv_modules[0].bias)
        wanted = torch.sigmoid(model.batch_norm(model.conv_modules[1](hidden)))
        assert bits(bended(x)) == bits(wanted)
    wanted = torch.func.functional_call(
        model, {"conv_modules.0.weight": model.conv_modules[0].weight + 1}, x
    )
    assert bits(bended(x)) == bits(wanted)
    with bends.set_version("bent"):  # the bend was first, and is still after the version
        hidden = F.conv1d(x, weight, model.conv_modules[0].bias)
        wanted = torch.sigmoid(model.batch_norm(model.conv_modules[1](hidden)))
        assert bits(bended(x)) == bits(wanted)


def test_versions_are_mixed_and_gradients_reach_the_model_s_share() -> None:
    model = nn.Linear(3, 2)
    other = nn.Linear(3, 2)
    bended, x = made(model), torch.randn(4, 3)
    bends = bending(bended)
    bends.add_version("other", other.state_dict())
    amount = BendingParameter("amount", 0.25)
    traces = None
    with bends.interpolate_versions({"original": 1 - amount, "other": amount}):
        for value in (0.25, 0.5, 1.0, 0.0):
            amount.value = value
            weight = model.weight * (1 - value) + other.weight.detach() * value
            bias = model.bias * (1 - value) + other.bias.detach() * value
            given = bended(x)
            assert bits(given) == bits(F.linear(x, weight, bias))
            model.zero_grad()
            given.sum().backward()
            assert torch.equal(model.bias.grad, torch.full((2,), 4 * (1 - value)))  # type: ignore[arg-type]
            traces = traces or bended.stats.traces
        assert bended.stats.traces == traces
    with bends.interpolate_versions({"original": 3.0, "other": 1.0}):  # only proportions matter
        assert bits(bended(x)) == bits(
            F.linear(
                x,
                model.weight * 0.75 + other.weight.detach() * 0.25,
                model.bias * 0.75 + other.bias.detach() * 0.25,
            )
        )
        assert bends.version == "3.0 * original + 1.0 * other"


def test_a_version_in_training_has_its_own_statistics() -> None:
    model, other = seeded(Stanley), seeded(Stanley, 1)
    bended = made(model)
    twin = copy.deepcopy(other)
    bends = bending(bended)
    bends.add_version("other", other)
    with bends.set_version("other"):
        for _ in range(3):
            x = torch.randn(3, 1, 20)
            assert bits(bended(x)) == bits(twin(x).detach())
    kept = bends.versions.weights("other")
    assert bits(kept["batch_norm.running_mean"]) == bits(twin.batch_norm.running_mean)
    assert bits(model.batch_norm.running_mean) == bits(torch.zeros(8))
    assert bits(model.batch_norm.running_var) == bits(torch.ones(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v", {"weigth": torch.ones(2, 3)}), r"has no 'weigth'; did you mean 'weight'"),
        (("v", {"weight": torch.ones(3, 3)}), r"'weight' has shape \(3, 3\), but"),
        (("v", {"weight": torch.ones(2, 3)}), r"version 'v' lacks 'bias'; with strict=False"),
        (("v", nn.Conv1d(1, 1, 1)), "'weight' has shape"),
        (("original", {}), "cannot be called 'original'"),
        (("known", nn.Linear(3, 2)), "there is a version 'known' already; force=True"),
    ],
)
def test_versions_are_checked(arguments: Any, message: str) -> None:
    bends = bending(made(nn.Linear(3, 2)))
    bends.add_version("known", nn.Linear(3, 2))
    with pytest.raises(InputError, match=message):
        bends.add_version(*arguments)
    for wrong in ({"unknown": 1.0}, {}, {"known": "1"}, {"known": 1.0, "original": -1.0}):
        with pytest.raises(InputError):
            bends.interpolate_versions(wrong)
    with bends.set_version("known"), pytest.raises(InputError, match="is in use"):
        bends.remove_version("known")
    bends.remove_version("known")
    assert bends.versions.names == ("original",)


# --- Copies


def test_a_copy_of_a_bent_model_is_bent_by_callbacks_of_its_own() -> None:
    model = seeded(Stanley).eval()
    bended, x = made(model), torch.randn(2, 1, 20)
    gain = BendingParameter("gain", 2.0)
    mask = Mask(0.5)
    bended.bend(Scale(gain) >> mask, "nnlin", "conv_modules.0.weight")
    bends = bending(bended)
    bends.add_version("other", seeded(Stanley, 1))
    bends.set_version("other")
    wanted = bits(bended(x))
    twin = copy.deepcopy(bended)
    assert bits(twin(x)) == wanted  # what was drawn is the same
    assert twin.bended_keys() == bended.bended_keys()
    twin.update("gain", 7.0)
    assert gain.value == 2.0
    assert bits(bended(x)) == wanted
    assert bits(twin(x)) != wanted
    twin.reset()
    bending(twin).set_version()
    assert bits(twin(x)) == bits(model(x))
    assert bits(bended(x)) == wanted


def test_callbacks_are_copied_with_what_they_drew() -> None:
    for callback in (Mask(0.5), OrderedMask(0.5), Permute(0), Normal(fresh=False)):
        x = torch.randn(64)
        first = callback(x, "a")
        twin = copy.deepcopy(callback)
        assert bits(twin(x, "a")) == bits(first)
        twin.reset()
        assert bits(twin(x, "a")) != bits(first)
        assert bits(callback(x, "a")) == bits(first)


# --- A language model


@pytest.mark.more
def test_a_language_model_is_bent_by_patterns_and_generates() -> None:
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=50, n_positions=40, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    bended, ids = made(model), torch.arange(2, 8)[None]
    bended(ids)
    for pattern, callback, hooks in [
        (r".*mlp\.act$", Scale(3.0), [f"transformer.h.{i}.mlp.act" for i in range(2)]),
        (r"transformer\.h\.0$", Bias(1.0), ["transformer.h.0"]),
        (r".*\.mlp$", Mask(0.5, seed=1, dim=-1), [f"transformer.h.{i}.mlp" for i in range(2)]),
    ]:
        eager = hooked(model, dict.fromkeys(hooks, copy.deepcopy(callback)))
        with bended.bend(callback, pattern):
            assert len(bended.bended_keys()) == len(hooks)
            for _ in range(2):
                assert bits(bended(ids).logits) == bits(eager(ids).logits)
            assert torch.equal(
                bended.generate(ids, max_new_tokens=4, do_sample=False),
                eager.generate(ids, max_new_tokens=4, do_sample=False),
            )
    bended.bend(Scale(0.0), "lm_head.weight")  # the embedding is the same tensor, and is not bent
    assert not bended(ids).logits.any()
    assert bended.bended_keys() == ["lm_head.weight"]


# --- What else runs can be like


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_bends_go_with_the_modes_of_a_call(mode: Callable[[], Any]) -> None:
    model = seeded(Stanley).eval()
    chain = Mask(0.5, seed=1, dim=1) >> Normal(0.1, seed=2) >> Affine(1.0, 2.0)
    eager = hooked(model, {"conv_modules.0": copy.deepcopy(chain)})
    bended, x = made(model), torch.randn(2, 1, 20)
    bended.bend(chain, "conv_modules_0$")
    for _ in range(2):
        with mode():
            assert bits(bended(x)) == bits(eager(x))
        assert bits(bended(x)) == bits(eager(x))
    bended(x).sum().backward()


def test_a_model_that_was_only_ever_called_bent_has_names_too() -> None:
    bended = made(seeded(Experts))
    bended.bend(Scale(2.0), "router$")
    for x in inputs_of_experts():
        bended(x)
    assert {"x", "router", "softmax", "gelu", "experts_0", "out"} <= set(bended.activation_names())
    bended.bend(Scale(2.0), "gelu$")


def test_a_bent_model_is_pickled_with_its_bends() -> None:
    bended, x = made(seeded(Stanley).eval()), torch.randn(2, 1, 20)
    bended.bend(Mask(0.5) >> Scale(BendingParameter("gain", 2.0)), "nnlin", "batch_norm.weight")
    bending(bended).add_version("other", seeded(Stanley, 1))
    bending(bended).set_version("other")
    wanted = bended(x)
    twin = pickle.loads(pickle.dumps(bended))
    assert bits(twin(x)) == bits(wanted)
    twin.update("gain", 0.0)
    assert not twin(x).any()
    assert bits(bended(x)) == bits(wanted)


def test_gradients_through_a_bend_are_those_of_eager_in_replays_too() -> None:
    model = seeded(Experts)
    twin = copy.deepcopy(model)
    eager = hooked(twin, {f"experts.{i}": Permute(-1, seed=1) for i in range(3)})
    bended = made(model)
    bended.bend(Permute(-1, seed=1), r"experts\.\d$")
    for x in inputs_of_experts() * 2:
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        bended(one).square().sum().backward()
        eager(two).square().sum().backward()
        assert bits(one.grad) == bits(two.grad)
    assert bits([p.grad for p in model.parameters()]) == bits([p.grad for p in eager.parameters()])
    assert bended.stats.replays >= len(INPUTS)


def test_a_callback_of_ones_own_may_look_at_the_model() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            out: Tensor = self.fc(x)
            return out

    model: Any = seeded(Counting)

    class AddCalls(Bend):
        def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
            return tensor + model.calls

    bended, x = made(model), torch.randn(1, 2)
    bended.bend(AddCalls(), "fc$")
    for call in (1, 2, 3):
        assert bits(bended(x)) == bits(model.fc(x) + call)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale

    def encode(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale

    def weigh(self, x: Tensor) -> Tensor:
        return x @ self.fc.weight

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def test_a_method_that_reads_a_bent_weight_itself_is_refused() -> None:
    bended, x = bt.BendedModule(Encoder()), torch.randn(2, 3)
    bended(x)
    bended.bend(bt.bends.Scale(0.0), "scale")
    with pytest.raises(InputError, match=r"encode reads scale itself.*trace\(fn='encode'"):
        bended.encode(x)
    assert not bended.trace(fn="encode", x=x).output.any()
    assert not bended.twice(x).any()
    assert bended.weigh(x).any()
    bended.remove_all()
    assert bended.encode(x).equal(bended.model.encode(x))
    bended.bend(bt.bends.Scale(0.0), "fc.weight")
    with pytest.raises(InputError, match=r"weigh reads fc\.weight itself"):
        bended.weigh(x)
