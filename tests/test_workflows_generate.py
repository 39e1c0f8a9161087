"""What the library inserts by itself costs no replay while text is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt

pytest.importorskip("transformers", reason="needs the test extra")

from tests.hf_models import MODELS, VOCAB

LONG = 9
BLOCK, PART = "transformer.h_0", "transformer.h_1.mlp"


class Autoencoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))

    def decode(self, latents: Tensor) -> Tensor:
        return self.second(latents)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def _spliced_and_edited(bended: bt.BendedModule) -> Any:
    spliced = bt.workflows.splice_autoencoder(bended, PART, Autoencoder(_width(bended)))
    spliced.edit(lambda latents: latents * 2)
    return spliced


def _width(bended: bt.BendedModule) -> int:
    return int(bended.config.n_embd)


def _vector(bended: bt.BendedModule) -> Tensor:
    return torch.linspace(-1, 1, _width(bended))


WAYS: dict[str, Callable[[bt.BendedModule], Any]] = {
    "steer": lambda b: bt.workflows.steer(b, _vector(b), PART),
    "steer a block": lambda b: bt.workflows.steer(b, _vector(b), BLOCK),
    "steer the prompt": lambda b: bt.workflows.steer(b, _vector(b), PART, steps="prompt"),
    "steer new tokens": lambda b: bt.workflows.steer(b, _vector(b), PART, steps="new"),
    "steer a position": lambda b: bt.workflows.steer(b, _vector(b), PART, positions=-1),
    "steer to a length": lambda b: bt.workflows.steer(b, _vector(b), PART, normalise="value"),
    "splice an autoencoder": lambda b: bt.workflows.splice_autoencoder(
        b, PART, Autoencoder(_width(b)), error_term=True
    ),
    "change latents": _spliced_and_edited,
    "ablate": lambda b: bt.workflows.ablate(b, PART),
    "ablate by a number": lambda b: bt.workflows.ablate(b, PART, 0.5),
    "ablate by a function": lambda b: bt.workflows.ablate(b, PART, lambda value: value * 0.5),
    "ablate by the mean": lambda b: bt.workflows.ablate(b, PART, "mean", over=(0, 1)),
    "bend": lambda b: b.bend(bt.bends.Scale(0.5), "transformer_h_1_mlp$"),
    "bend weights": lambda b: b.bend(bt.bends.Scale(0.5), r"transformer.h.1.mlp.c_fc.weight"),
    "interject": lambda b: b.interject(PART, lambda value: value * 0.5),
    "patch": lambda b: b.patch({f"{PART}.output": bt.patches.ZeroPatch()}),
}  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("way", WAYS)
def test_generating_with_it_is_replayed(way: str) -> None:
    (found,) = (m for m in MODELS if m.name == "gpt2")
    bended = bt.BendedModule(found.make().eval())
    prompt = torch.randint(3, VOCAB, (1, 5), generator=torch.Generator().manual_seed(0))

    def generated() -> list[int]:
        options = {"max_new_tokens": LONG, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            return bended.generate(prompt, do_sample=False, **options)[0].tolist()  # type: ignore[no-any-return]

    plain = generated()
    torch.manual_seed(0)
    with WAYS[way](bended):
        first = generated()
        assert generated() == first
        assert bended.stats.live == 0, bended.why_live
        assert bended.stats.replays > LONG
    assert generated() == plain


class Keeps(nn.Module):
    """A model whose forward changes what an autoencoder could look at."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.factor = float(x.shape[0])
        return self.fc(x) * 2


class Looks(Autoencoder):
    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__(4)
        if how == "part":
            self.model = model
        elif how == "list":
            self.held = [model]

    def decode(self, latents: Tensor) -> Tensor:
        model = self.model if hasattr(self, "model") else self.held[0]
        return super().decode(latents) * model.factor


@pytest.mark.parametrize("how", ["part", "list"])
def test_an_autoencoder_that_looks_at_the_model_makes_calls_live(how: str) -> None:
    torch.manual_seed(0)
    model = Keeps()
    looks = Looks(model, how)
    bended = bt.BendedModule(model)
    with bt.workflows.splice_autoencoder(bended, "fc", looks):
        for rows in (1, 2, 3, 2):
            x = torch.ones(rows, 4)
            model.factor = 9.0
            assert torch.equal(bended(x), looks.decode(looks.encode(model.fc(x))) * 2)
        assert bended.stats.live == 4


def test_a_change_of_latents_that_looks_at_the_model_makes_calls_live() -> None:
    torch.manual_seed(0)
    model = Keeps()
    model.factor = 2.0
    bended = bt.BendedModule(model)
    autoencoder = Autoencoder(4)
    with bt.workflows.splice_autoencoder(bended, "fc", autoencoder) as spliced:
        for _ in range(3):
            bended(torch.ones(2, 4))
        assert (bended.stats.live, bended.stats.replays) == (0, 2)
        spliced.edit(lambda latents: latents * model.factor)
        for _ in range(2):
            model.factor = 9.0
            given = bended(torch.ones(2, 4))
            latents = autoencoder.encode(model.fc(torch.ones(2, 4)))
            assert torch.equal(given, autoencoder.decode(latents * 2) * 2)
        assert bended.stats.live == 2


def test_why_calls_were_live_is_said_after_the_context_too() -> None:
    model = Keeps()
    bended = bt.BendedModule(model)
    bended(torch.ones(2, 4))
    with bended.interject("fc", lambda value: value * model.factor):
        bended(torch.ones(2, 4)), bended(torch.ones(2, 4))
        (reason,) = bended.why_live
    assert bended.stats.live == 2
    assert bended.why_live == (reason,)
    assert "factor" in reason


class AroundTheWhole(bt.Interjection):
    self_contained = True

    def before(self, at: bt.NodePass, inputs: bt.Inputs) -> None:
        pass


class Cached(nn.Module):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.last = x * 2
        return cache.last + 1


class Cache:
    last: Any = None


def test_a_reason_names_what_is_inserted_in_words() -> None:
    bended = bt.BendedModule(Cached())
    with bended.interject(lambda node: node.path == "", AroundTheWhole()):
        bended(torch.ones(2), Cache())
    (reason,) = bended.why_live
    assert reason == (
        "the insertion around the whole model (AroundTheWhole) is called as one op, and might "
        "read what the run changes: cache.last"
    )
