"""Convolutional networks and vision transformers as torchvision and timm write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import assert_promise, bits, outcome, randn_inputs
from tests.shares import some
from tools.hub.convolutions import NETWORKS, EfficientNet, GoogLeNet, Outputs, Swin
from tools.hub.steps import (
    assert_changed_as_by_a_hook,
    assert_logged_and_drawn,
    assert_looked_at,
    assert_trains_alike,
)

# Each case takes seconds: the README's command leaves them out.
pytestmark = pytest.mark.more

every = pytest.mark.parametrize("network", some(NETWORKS, 2), ids=lambda network: network.__name__)

# Batches and sizes; those of Swin and ViT are padded, and resize positions, at some of them.
SIZES = [(2, 32, 32), (2, 32, 32), (3, 32, 32), (1, 40, 32), (2, 56, 48), (2, 32, 32), (2, 32, 32)]
CALLS = [
    randn_inputs(batch, 3, height, width, seed=number)
    for number, (batch, height, width) in enumerate(SIZES)
]
# A module in the middle of each network.
PLACES = {
    "ResNet": "layer2.0.conv1", "DenseNet": "block.layer1", "MobileNet": "features.2.se",
    "EfficientNet": "features.3.depthwise", "GoogLeNet": "b", "ConvNeXt": "stages.1.dwconv",
    "Swin": "blocks.1.qkv", "ViT": "layers.0.linear1",
}  # fmt: skip


def pair(network: type[nn.Module], training: bool = False) -> tuple[nn.Module, bt.BendedModule]:
    torch.manual_seed(0)
    eager = network().train(training)
    torch.manual_seed(0)
    return eager, bt.BendedModule(network().train(training))


@pytest.mark.more
@every
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_network_is_itself_at_all_sizes(network: type[nn.Module], training: bool) -> None:
    bended = assert_promise(lambda: network().train(training), CALLS)
    assert bended.stats.replays >= 2
    assert bended.stats.live == 0


@every
def test_training_gives_eagers_weights_buffers_and_gradients(network: type[nn.Module]) -> None:
    bended = assert_trains_alike(network, CALLS)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 2


@pytest.mark.more
@every
def test_the_log_has_what_native_hooks_see(network: type[nn.Module]) -> None:
    assert_logged_and_drawn(lambda: network().eval(), CALLS[4])
    assert_logged_and_drawn(lambda: network().train(), CALLS[0])


@pytest.mark.more
@every
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_looking_and_changing(network: type[nn.Module], training: bool) -> None:
    eager, bended = pair(network, training)
    assert_looked_at(bended, eager, CALLS[1:5])
    # Evaluated, so that what is called for each of both is the same in number.
    eager, bended = pair(network, training=False)
    assert_changed_as_by_a_hook(
        bended, eager, PLACES[network.__name__], lambda value: value * 0, CALLS
    )


@pytest.mark.more
def test_heads_that_are_there_in_training_only() -> None:
    _, bended = pair(GoogLeNet, training=True)
    x = CALLS[0]()[0][0]
    for _ in range(2):
        given = bended(x)
        assert type(given) is Outputs
        assert given.aux_logits1.shape == (2, 5)
    bended.eval()
    assert type(bended(x)) is Tensor
    with bended.interject("c", lambda value: value + 1):
        changed = bended(x)
    wanted = bended.model.fc.weight.sum(-1) + bended(x)
    torch.testing.assert_close(changed, wanted)
    with bended.interject("aux1", lambda value: value * 0, allow_none=True) as handle:
        bended(x)
        assert not handle.report().fired
        bended.train()
        torch.manual_seed(0)
        assert not bended(x).aux_logits1.any()
        assert handle.report().fired == 1
        bended.eval()


@pytest.mark.more
def test_rows_that_stochastic_depth_leaves_out_can_be_kept() -> None:
    """The draws are nodes: with ones in their place all rows are kept, and scaled."""
    eager, bended = pair(EfficientNet, training=True)
    draws = [f"features_{index}.stochastic_depth.bernoulli_" for index in (1, 3)]
    hooks = [
        eager.features[index].stochastic_depth.register_forward_hook(
            lambda module, args, out: args[0] * 2  # the rate is one half
        )
        for index in (1, 3)
    ]
    with bended.interject(draws, torch.ones_like) as kept:
        for seed in range(3):
            wanted = outcome(eager, CALLS[0](), seed)
            assert outcome(bended, CALLS[0](), seed) == wanted
    assert kept.report().fired == 6
    for hook in hooks:
        hook.remove()
    assert outcome(eager, CALLS[0](), 3) == outcome(bended, CALLS[0](), 3) != wanted


@pytest.mark.more
def test_a_head_of_window_attention_is_cut_as_by_hand() -> None:
    eager, bended = pair(Swin)

    def attend(block: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        """The block's own attention, with its second head giving the same to all."""
        count, tokens, width = x.shape
        q, k, v = block.qkv(x).reshape(count, tokens, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // block.heads) ** 0.5
        bias = block.table[block.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)
        scores = scores + bias.unsqueeze(0)
        if mask is not None:
            of = mask.shape[0]
            scores = scores.view(count // of, of, block.heads, tokens, tokens)
            scores = (scores + mask.unsqueeze(1).unsqueeze(0)).view(-1, 2, tokens, tokens)
        weights = even(scores.softmax(-1))
        return block.proj((weights @ v).transpose(1, 2).reshape(count, tokens, width))

    def even(weights: Tensor) -> Tensor:
        weights = weights.clone()
        weights[:, 1] = 1 / weights.shape[-1]
        return weights

    plain = [outcome(eager, call(), 0)[0] for call in CALLS]
    for block in eager.blocks:
        block.attend = attend.__get__(block)
    wanted = [outcome(eager, call(), 0)[0] for call in CALLS]
    assert all(one != other for one, other in zip(plain, wanted, strict=True))
    bended(*CALLS[0]()[0])
    with bended.interject(["blocks_0.softmax", "blocks_1.softmax"], even):
        for _ in range(2):
            assert [bits(bended(*call()[0])) for call in CALLS] == wanted
    assert [bits(bended(*call()[0])) for call in CALLS] == plain
