"""Sparse autoencoders spliced into models, with single latents changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, InterjectionError, NodePathError
from bendtrace.workflows import splice_autoencoder
from tests.lens_models import WIDTH, Patient, Transformer, hooked, made, same, tokens, untouched


class Sae(nn.Module):
    def __init__(self, width: int = WIDTH, latents: int = 20) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, latents), nn.Linear(latents, width)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))

    def decode(self, z: Tensor) -> Tensor:
        return self.down(z)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        return self.decode(z), z


def autoencoder(width: int = WIDTH) -> Sae:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Sae(width)


@pytest.mark.parametrize("kind", [Transformer, Patient])
def test_the_reconstruction_takes_the_value_s_place(kind: Any) -> None:
    model, sae = made(kind), autoencoder()
    where = "blocks.0" if kind is Transformer else "block"
    x = tokens()
    plain = model(x)
    with hooked(model.get_submodule(where), lambda m, a, out: sae.decode(sae.encode(out))):
        wanted = model(x)
    bended = bt.BendedModule(model)
    with untouched(model, sae):
        with splice_autoencoder(bended, where, sae) as spliced:
            for _ in range(2):
                same(bended(x), wanted)
            assert spliced.report().changed
            assert repr(spliced) == f"<Sae spliced in at {where!r}>"
        assert bended.insertions == ()
        same(bended(x), plain)


def test_with_the_error_term_nothing_changes_bit_by_bit() -> None:
    for kind in (Transformer, Patient):
        model, sae = made(kind), autoencoder()
        where = "blocks.1" if kind is Transformer else "block"
        plain = model(tokens())
        with splice_autoencoder(bt.BendedModule(model), where, sae, error_term=True) as spliced:
            same(spliced(tokens()).detach(), plain.detach())


def test_signs_of_zero_and_what_is_no_number_stay() -> None:
    class Same(nn.Module):
        def encode(self, x: Tensor) -> Tensor:
            return x * 1.0

        def decode(self, z: Tensor) -> Tensor:
            return z / 3

    x = torch.tensor([[-0.0, 0.0, 1e30, torch.inf, -torch.inf, torch.nan, 0.1]])
    model = nn.Sequential(nn.Identity())
    with splice_autoencoder(bt.BendedModule(model), "0", Same(), error_term=True) as spliced:
        given = spliced(x)
    assert given.numpy().tobytes() == x.numpy().tobytes()


@pytest.mark.parametrize("error_term", [False, True])
def test_single_latents_can_be_set_and_ablated(error_term: bool) -> None:
    model, sae = made(Transformer), autoencoder()
    strength = bt.bends.BendingParameter("strength", 2.0)

    def hook(change: Any) -> Any:
        def inner(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            z = sae.encode(out)
            made = sae.decode(change(z.clone()))
            return made + (out - sae.decode(z)).detach() if error_term else made

        return inner

    def zeroed(z: Tensor) -> Tensor:
        z[..., [3, 7]] = 0
        return z

    def raised(z: Tensor) -> Tensor:
        z[..., -1] = 2.0
        return z

    x = tokens()
    bended = bt.BendedModule(model)
    with splice_autoencoder(bended, "blocks.0", sae, error_term=error_term) as spliced:
        bended(x)
        traces = bended.stats.traces
        ablation = spliced.ablate([3, 7])
        with hooked(model.blocks[0], hook(zeroed)):
            wanted = model(x)
        torch.testing.assert_close(bended(x), wanted)
        assert (spliced.latent[..., [3, 7]] == 0).all()
        with spliced.set(-1, strength), hooked(model.blocks[0], hook(lambda z: raised(zeroed(z)))):
            wanted = model(x)
        with spliced.set(-1, strength):
            torch.testing.assert_close(bended(x), wanted)
            strength.value = 4.0
            bended(x)
            assert (spliced.latent[..., -1] == 4.0).all()
        ablation.remove()
        assert not ablation.active
        with spliced.edit(lambda z: z.mul_(0.5)):
            bended(x)
        assert bended.stats.traces == traces
        plain = model(x)
        if error_term:
            same(bended(x).detach(), plain.detach())


def test_latents_and_errors_are_those_of_the_latest_call() -> None:
    model, sae = made(Patient), autoencoder()
    for seed in range(8):
        x = tokens(seed=seed)
        kept: list[Tensor] = []
        spliced = splice_autoencoder(bt.BendedModule(model), "block", sae, error_term=True)
        spliced(tokens(seed=seed + 1))
        with hooked(model.block, lambda m, a, out, kept=kept: kept.append(out)):
            model(x)
        spliced(x)
        keys = ["block"] if len(kept) == 1 else [f"block:{n + 1}" for n in range(len(kept))]
        assert list(spliced.latents) == list(spliced.errors) == keys
        for key, value in zip(keys, kept, strict=True):
            same(spliced.latents[key].detach(), sae.encode(value).detach())
            same(spliced.errors[key], (value - sae.decode(sae.encode(value))).detach())
        spliced.remove()
        assert spliced.latents == {}


def test_a_node_not_come_by_has_no_latents() -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else x

    x = torch.ones(2, WIDTH)
    with splice_autoencoder(bt.BendedModule(Maybe()), "layer", autoencoder()) as spliced:
        spliced(x)
        assert spliced.latent.shape == (2, 20)
        spliced(-x)
        assert spliced.latents == {}
        with pytest.raises(InputError, match="no call reached a node"):
            spliced.latent  # noqa: B018


def test_gradients_go_by_way_of_the_latents() -> None:
    for error_term in (False, True):
        model, sae = made(Transformer), autoencoder()
        twin, other = made(Transformer), autoencoder()

        def hook(
            module: nn.Module,
            args: Any,
            out: Tensor,
            error_term: Any = error_term,
            other: Any = other,
        ) -> Tensor:
            made = other.decode(other.encode(out))
            return made + (out - made).detach() if error_term else made

        with hooked(twin.blocks[0], hook):
            twin(tokens()).pow(2).sum().backward()
        with splice_autoencoder(
            bt.BendedModule(model), "blocks.0", sae, error_term=error_term
        ) as spliced:
            out = spliced(tokens())
            latent = spliced.latent
            latent.retain_grad()
            out.pow(2).sum().backward()
        assert latent.grad is not None
        assert latent.grad.abs().sum() > 0
        for mine, theirs in zip(
            [*model.parameters(), *sae.parameters()], [*twin.parameters(), *other.parameters()],
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.all
def test_it_is_trained_in_place() -> None:
    model, sae = made(Transformer), autoencoder()
    optimizer = torch.optim.Adam(sae.parameters(), lr=0.01)
    plain = model(tokens()).detach()
    losses = []
    for _ in range(60):
        with splice_autoencoder(bt.BendedModule(model), "blocks.0", sae) as spliced:
            loss = (spliced(tokens()) - plain).pow(2).mean() + 1e-3 * spliced.latent.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    model.zero_grad()


def test_functions_and_pairs_will_do_but_have_no_latents_to_change() -> None:
    model, sae = made(Transformer), autoencoder()
    with hooked(model.blocks[0], lambda m, a, out: sae(out)[0]):
        wanted = model(tokens())
    pair = nn.Module()
    pair.forward = sae.forward  # type: ignore[method-assign]
    with splice_autoencoder(bt.BendedModule(model), "blocks.0", pair) as spliced:
        same(spliced(tokens()), wanted)
        assert spliced.latent.shape == (2, 5, 20)
        with pytest.raises(InputError, match="cannot be changed"):
            spliced.ablate(0)
    with splice_autoencoder(bt.BendedModule(model), "blocks.0", torch.round) as spliced:
        spliced(tokens())
        assert spliced.latents == {}
        assert spliced.error.abs().max() <= 0.5
    own = {"encode": lambda x: x * 2, "decode": lambda z: z / 2}
    with (
        splice_autoencoder(bt.BendedModule(model), "blocks.0", sae, **own) as spliced,
        spliced.set(range(8), 0.0),
    ):
        spliced(tokens())
        assert spliced.latent.abs().sum() == 0


def test_what_is_no_autoencoder_is_refused() -> None:
    bended = bt.BendedModule(made(Transformer))
    bended(tokens())
    for what, options, message in (
        (3, {}, "has to have encode and decode"),
        (Sae, {}, "has to have encode and decode"),
        (autoencoder(), {"encode": torch.relu}, "have to be passed together"),
        (bended.model.ln_f, {}, "part of the model"),
    ):
        with pytest.raises(InputError, match=message):
            splice_autoencoder(bended, "blocks.0", what, **options)
    with pytest.raises(NodePathError):
        splice_autoencoder(bended, "nothing", autoencoder())
    assert bended.insertions == ()
    with (
        splice_autoencoder(bended, "blocks.0", lambda x: x[0]),
        pytest.raises(InterjectionError, match="same shape"),
    ):
        bended(tokens())
    with splice_autoencoder(bended, "blocks.0", autoencoder()) as spliced:
        for change, message in (
            (lambda z: z[0], "a change of latents returned"),
            (lambda z: 3, "a change of latents returned"),
        ):
            with spliced.edit(change), pytest.raises(InputError, match=message):
                bended(tokens())
        with spliced.ablate(99), pytest.raises(InputError, match="no latent 99 among 20"):
            bended(tokens())
        for latents in ("3", [], [1.5]):
            with pytest.raises((InputError, TypeError)):
                spliced.ablate(latents)
        with pytest.raises(InputError, match="a function of the latents"):
            spliced.edit(3)
    assert bended.insertions == ()


@pytest.mark.more
def test_it_works_while_a_language_model_writes() -> None:
    pytest.importorskip("transformers", reason="needs the test extra")
    from tests.hf_models import MODELS

    (found,) = (m for m in MODELS if m.name == "gpt2")
    model, sae = found.make(), autoencoder(32)
    ids = found.inputs()["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        z = sae.encode(out)
        z[..., 2] = 5.0
        return sae.decode(z)

    with hooked(model.transformer.h[0], hook):
        wanted = model.generate(ids, **options)
    bended = bt.BendedModule(model)
    with splice_autoencoder(bended, "transformer.h.0", sae) as spliced, spliced.set(2, 5.0):
        same(bended.generate(ids, **options), wanted)
        assert spliced.latent.shape == (2, 1, 20)
    with splice_autoencoder(bended, "transformer.h.0", sae, error_term=True):
        same(bended.generate(ids, **options), plain)


def test_what_stays_in_a_model_needs_one_that_it_can_stay_in() -> None:
    with pytest.raises(InputError, match="has to be a BendedModule"):
        splice_autoencoder(nn.Sequential(nn.Identity()), "0", torch.round)  # type: ignore[arg-type]
