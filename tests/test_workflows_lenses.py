"""The logit lens and the tuned lens against the model's own end, applied by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.workflows import TunedLens, logit_lens
from tests.lens_models import (
    VOCAB,
    WIDTH,
    Patient,
    Transformer,
    hooked,
    made,
    same,
    tokens,
    untouched,
)
from tests.promise import state

SITES = ["embed", "blocks.0", "blocks.1"]


def by_hand(model: nn.Module, sites: list[str], batch: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(site).register_forward_hook(
            lambda m, a, out, site=site: found.__setitem__(site, out.clone())
        )
        for site in sites
    ]
    with torch.no_grad():
        model(batch)
        for handle in handles:
            handle.remove()
        return {site: model.lm_head(model.ln_f(value)) for site, value in found.items()}


def test_each_site_is_what_the_end_of_the_model_makes_of_it() -> None:
    model = made(Transformer)
    x = tokens()
    with untouched(model):
        found = logit_lens(model, x, SITES, ["ln_f", "lm_head"])
    wanted = by_hand(model, SITES, x)
    assert found.sites == ("embed", "blocks_0", "blocks_1")
    for site, value in zip(found.sites, wanted.values(), strict=True):
        same(found[site], value)
    same(found.final, model(x).detach())
    same(found["blocks_1"], found.final)  # the same computation, so the same bits


def test_entropy_divergence_ranks_and_tops_are_those_of_numpy() -> None:
    model = made(Transformer)
    found = logit_lens(model, tokens(), SITES)
    final = log_softmax(found.final.double().numpy(), -1)
    for site in found.sites:
        logs = log_softmax(found[site].double().numpy(), -1)
        entropy = -(np.exp(logs) * logs).sum(-1)
        np.testing.assert_allclose(found.entropy()[site].numpy(), entropy, rtol=1e-4, atol=1e-5)
        kl = (np.exp(final) * (final - logs)).sum(-1)
        np.testing.assert_allclose(found.kl()[site].numpy(), kl, rtol=1e-4, atol=1e-5)
        order = np.argsort(-logs, -1, kind="stable")
        np.testing.assert_array_equal(found.top(3)[site].numpy(), order[..., :3])
        target = found.final.argmax(-1)
        rank = (order == target.numpy()[..., None]).argmax(-1)
        np.testing.assert_array_equal(found.rank(target)[site].numpy(), rank)
    assert torch.equal(found.kl()["blocks_1"], torch.zeros(2, 5))
    assert (found.kl()["embed"] > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entropy_and_divergence_of_half_precision_are_computed_in_single(dtype: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1000)).to(dtype)
    found = logit_lens(model, torch.randn(4, 8, dtype=dtype), ["0", "1"], unembed=["2"])
    ours, theirs = (v.double().log_softmax(-1) for v in (found.final, found["sub_0"]))
    wanted = (ours.exp() * (ours - theirs)).sum(-1)
    torch.testing.assert_close(found.kl()["sub_0"].double(), wanted, rtol=1e-4, atol=1e-6)
    wanted = -(theirs.exp() * theirs).sum(-1)
    torch.testing.assert_close(found.entropy()["sub_0"].double(), wanted, rtol=1e-5, atol=0)


def test_classes_without_a_chance_are_no_nan() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])

    class Sure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

    found = logit_lens(Sure(), logits, "act", unembed=[lambda value: value])
    assert found.kl()["act"].tolist() == [0.0]
    assert found.entropy()["act"].isfinite().all()


def test_a_table_has_a_row_for_each_site_example_and_position() -> None:
    model = made(Transformer)
    found = logit_lens(model, tokens(), SITES, decode=lambda number: f"<{number}>")
    table = found.to_pandas()
    assert list(table.columns) == [
        "site", "example", "position", "top", "probability", "entropy", "kl"
    ]  # fmt: skip
    assert len(table) == 3 * 2 * 5
    row = table[(table.site == "blocks_0") & (table.example == 1) & (table.position == 3)].iloc[0]
    logits = found["blocks_0"][1, 3]
    assert row.top == f"<{logits.argmax()}>"
    assert row.probability == pytest.approx(logits.softmax(-1).max().item())
    assert row.kl == pytest.approx(found.kl()["blocks_0"][1, 3].item())
    several = found.to_pandas(k=2).iloc[0]
    assert len(several.top) == len(several.probability) == 2
    shown = repr(found)
    assert "3 sites" in shown
    assert f"<{found['blocks_0'][0, 0].argmax()}>" in shown


def test_a_looped_block_has_a_site_for_each_pass() -> None:
    model = made(Patient)
    calls: list[Tensor] = []
    x = next(
        batch for batch in (tokens(seed=s) for s in range(20))
        if _passes(model, batch) not in (0, 1)
    )  # fmt: skip
    with torch.no_grad(), hooked(model.block, lambda m, a, out: calls.append(out.clone())):
        model(x)
    found = logit_lens(model, x, "block")
    assert found.sites == tuple(f"block:{number + 1}" for number in range(len(calls)))
    for site, value in zip(found.sites, calls, strict=True):
        same(found[site], model.lm_head(model.ln_f(value)).detach())


def _passes(model: nn.Module, batch: Tensor) -> int:
    calls: list[None] = []
    with torch.no_grad(), hooked(model.block, lambda m, a, out: calls.append(None)):
        model(batch)
    return len(calls)


def test_a_site_under_a_branch_not_taken_is_left_out() -> None:
    model = made(Patient)
    bended = bt.BendedModule(model)
    taken: dict[bool, Tensor] = {}
    for seed in range(30):
        hits: list[None] = []
        with hooked(model.rare, lambda m, a, out, hits=hits: hits.append(None)):
            model(tokens(seed=seed))
        taken.setdefault(bool(hits), tokens(seed=seed))
    sites = [lambda node: node.path == "rare", "block:1"]
    assert "rare" in logit_lens(bended, taken[True], sites).sites
    assert "rare" not in logit_lens(bended, taken[False], sites).sites


def test_two_axes_are_examples_and_classes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6))
    x = torch.randn(5, 3)
    found = logit_lens(model, x, ["0", "1"], unembed="2")
    same(found["sub_1"], model(x).detach())
    assert found.entropy()["sub_0"].shape == (5,)
    assert list(found.to_pandas().columns)[:3] == ["site", "example", "top"]


def test_the_end_may_draw_and_count_but_the_model_and_the_generator_stay() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.end = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.body(x))

    eager, model = Noisy(), Noisy()
    eager.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    torch.manual_seed(1)
    eager(x)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    logit_lens(model, x, "body", unembed="end")
    assert torch.equal(torch.get_rng_state(), after)
    assert state(model) == state(eager)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unembed": ["norm", "lm_head"]}, "no module 'norm'"),
        ({"unembed": []}, "is empty"),
        ({"unembed": 3}, "takes names of modules"),
        ({"unembed": [3]}, "takes names of modules"),
        ({"unembed": ["ln_f"]}, "returns \\(2, 5, 8\\)"),
        ({"sites": "blocks.0.up"}, "cannot take the output"),
        ({"sites": "tokens"}, "floating-point"),
        ({"output": lambda out: out.shape}, "logits are needed"),
        ({"sites": lambda node: False}, "none of the sites"),
    ],
)
def test_what_is_no_lens_is_refused(options: dict[str, Any], message: str) -> None:
    bended = bt.BendedModule(made(Transformer))
    bended(tokens())
    with pytest.raises(InputError, match=message):
        logit_lens(bended, tokens(), **{"sites": SITES, **options})
    assert bended.insertions == ()


@pytest.mark.more
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_language_model_of_hugging_face(name: str) -> None:
    pytest.importorskip("transformers", reason="needs the test extra")
    from tests.hf_models import MODELS

    (found,) = (m for m in MODELS if m.name == name)
    model = found.make()
    batch = found.inputs()
    layers = "transformer.h" if name == "gpt2" else "model.layers"
    end = ["transformer.ln_f" if name == "gpt2" else "model.norm", "lm_head"]
    sites = [f"{layers}.0", f"{layers}.1"]
    seen: dict[str, Tensor] = {}
    with hooked(model.get_submodule(sites[0]), lambda m, a, o: seen.__setitem__("0", o)):
        output = model(**batch)
    with untouched(model):
        lens = logit_lens(model, batch, sites, end)
    first, last = lens.sites
    norm = model.get_submodule(end[0])
    same(lens[first], model.lm_head(norm(seen["0"])).detach())
    same(lens[last], output.logits.detach())
    same(lens.final, output.logits.detach())


# Tuned


def lens_of(model: nn.Module, **options: Any) -> TunedLens:
    return TunedLens(model, SITES[:2], ["ln_f", "lm_head"], tokens(), **options)


def batches(count: int = 6) -> list[Tensor]:
    return [tokens(4, 6, seed) for seed in range(count)]


def test_an_untrained_one_is_the_logit_lens() -> None:
    model = made(Transformer)
    with untouched(model):
        lens = lens_of(model)
        found = lens.apply_to(tokens())
    plain = logit_lens(model, tokens(), SITES[:2])
    for site in found.sites:
        assert torch.equal(found[site], plain[site])
    assert lens.sites == ("embed", "blocks_0")


@pytest.mark.more
def test_its_logits_are_an_affine_map_away() -> None:
    model = made(Transformer)
    lens = lens_of(model)
    with torch.no_grad():
        for parameter in lens.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    values: dict[str, Tensor] = {}
    with hooked(model.blocks[0], lambda m, a, o: values.__setitem__("x", o)):
        model(tokens())
    weight, bias = lens.translators[1].weight, lens.translators[1].bias
    moved = values["x"] + values["x"] @ weight.T + bias
    wanted = model.lm_head(model.ln_f(moved))
    torch.testing.assert_close(lens.apply_to(tokens())["blocks_0"], wanted.detach())


def test_training_is_that_by_hand_and_brings_the_loss_down() -> None:
    model = made(Transformer)
    data = batches()
    with untouched(model):
        lens = lens_of(model)
        before = lens.losses(data[0])
        history = lens.fit(data, epochs=8, lr=0.02, seed=3)
    assert len(history) == 48
    after = lens.losses(data[0])
    assert all(after[site] < before[site] for site in before)
    assert lens.steps == 48

    # The same by hand: one optimiser over all translators, KL(model || lens).
    own = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    for layer in own:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam([p for layer in own for p in layer.parameters()], lr=0.02)
    frozen = copy.deepcopy(model).requires_grad_(False)
    losses = []
    for epoch in range(8):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3 + epoch))
        for number in order.tolist():
            x = frozen.embed(data[number])
            seen = [x, frozen.blocks[0](x)]
            final = frozen(data[number]).log_softmax(-1)
            total = torch.zeros(())
            for layer, value in zip(own, seen, strict=True):
                mine = frozen.lm_head(frozen.ln_f(value + layer(value))).log_softmax(-1)
                total = total + (final.exp() * (final - mine)).sum(-1).mean()
            losses.append(total.item())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
    torch.testing.assert_close([sum(row.values()) for row in history], losses, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(lens.translators, own, strict=True):
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-3, atol=1e-4)


def test_gradients_of_the_model_stay_as_they_were() -> None:
    model = made(Transformer)
    model(tokens()).sum().backward()
    before = state(model)
    lens = lens_of(model)
    lens.fit(batches(2))
    assert state(model) == before
    assert not any("lm_head" in name for name, _ in lens.named_parameters())
    assert len(lens.state_dict()) == 4


def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model, data, path = made(Transformer), batches(), tmp_path / "lens.pt"

    class Killed(Exception):
        pass

    def interrupted(count: int) -> Any:
        for number, batch in enumerate(data):
            if number == count:
                raise Killed
            yield batch

    whole = lens_of(model)
    history = whole.fit(iter(data), lr=0.05)
    first = lens_of(model)
    with pytest.raises(Killed):
        first.fit(interrupted(4), lr=0.05, checkpoint=path, every=3)
    second = lens_of(model)
    again = second.fit(iter(data), lr=0.05, checkpoint=path, every=3)
    assert again == history
    same(dict(second.state_dict()), dict(whole.state_dict()))
    assert second.steps == whole.steps == len(data)
    # Once more, all has been seen.
    third = lens_of(model)
    assert third.fit(iter(data), lr=0.05, checkpoint=path) == history
    same(dict(third.state_dict()), dict(whole.state_dict()))
    with pytest.raises(InputError, match="not to this one"):
        lens_of(model).fit(data, seed=9, checkpoint=path)
    other = TunedLens(model, "blocks.1", ["ln_f", "lm_head"], tokens())
    with pytest.raises(InputError, match="not to this one"):
        other.fit(data, checkpoint=path)


def test_the_same_seed_gives_the_same_lens() -> None:
    model = made(Transformer)
    found = []
    for seed in (1, 1, 2):
        lens = lens_of(model)
        torch.manual_seed(len(found))
        lens.fit(batches(), seed=seed)
        found.append({k: v.clone() for k, v in lens.state_dict().items()})
    same(found[0], found[1])
    assert not all(torch.equal(found[0][k], found[2][k]) for k in found[0])


def test_what_cannot_be_trained_with_is_refused() -> None:
    model = made(Transformer)
    lens = lens_of(model)
    for options in ({"epochs": 0}, {"lr": 0.0}, {"every": 0}):
        with pytest.raises(InputError, match="at least 1"):
            lens.fit(batches(1), **options)
    with pytest.raises(InputError, match="only once"):
        lens.fit(iter(batches()), epochs=2)
    with pytest.raises(InputError, match="no batches"):
        lens.fit([])
    with pytest.raises(InputError, match=r"returns \(2, 5, 8\)"):
        TunedLens(model, SITES, "ln_f", tokens())
    assert VOCAB == lens.apply_to(tokens()).final.shape[-1]


def test_a_tuned_lens_of_a_data_dependent_model_needs_its_sites() -> None:
    model = made(Patient)
    by_count: dict[int, Tensor] = {}
    for seed in range(30):
        by_count.setdefault(_passes(model, tokens(seed=seed)), tokens(seed=seed))
    most, least = by_count[max(by_count)], by_count[min(by_count)]
    assert max(by_count) > min(by_count) > 1
    lens = TunedLens(model, "block", ["ln_f", "lm_head"], most)
    lens.fit([most, least], lr=0.01)
    with pytest.raises(InputError, match="no translator"):
        TunedLens(model, "block", ["ln_f", "lm_head"], least).fit([most])
