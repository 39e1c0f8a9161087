"""Causal tracing, against loops with native hooks and a model written out by hand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import SiteError
from bendtrace.research.patching import causal_tracing
from tests.causal_models import (
    CLEAN,
    LENGTH,
    gpt2,
    halving,
    halving_by_hand,
    hooked,
    inputs_of_halving,
    kept,
    transformer,
    with_part,
)
from tests.shares import some

ROOT = Path(__file__).parent.parent


def _probability(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return logits[0, -1].softmax(-1)[3]


def _by_hand(
    model: nn.Module, embedding: nn.Module, modules: list[nn.Module], subject: Any, samples: int,
    seed: int, level: float, window: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the metric of the corrupted runs, and that of each cell, by native hooks."""
    clean = [kept(model, module, CLEAN) for module in modules]
    generator = torch.Generator().manual_seed(seed)
    shape = kept(model, embedding, CLEAN)[:, subject].shape
    corrupted, cells = [], []
    for _ in range(samples):
        noise = torch.randn(shape, generator=generator) * level

        def corrupt(value: Tensor, noise: Tensor = noise) -> Tensor:
            value = value.clone()
            value[:, subject] = value[:, subject] + noise
            return value

        with hooked(embedding, corrupt):
            corrupted.append(_probability(model(CLEAN)).item())
            rows = []
            for number in range(len(modules)):
                first = max(0, number - window // 2)
                last = min(len(modules), number - (-window // 2))
                row = []
                for position in range(LENGTH):
                    with ExitStack() as stack:
                        for i in range(first, last):
                            stack.enter_context(
                                hooked(
                                    modules[i],
                                    lambda v, i=i, p=position: with_part(
                                        v, (slice(None), p), clean[i]
                                    ),
                                )
                            )
                        row.append(_probability(model(CLEAN)).item())
                rows.append(row)
        cells.append(rows)
    return torch.tensor(corrupted, dtype=torch.float64), torch.tensor(cells, dtype=torch.float64)


@pytest.mark.parametrize("window", some([1, 2, 3], 3, start=1))
def test_cells_are_those_of_a_loop_with_native_hooks_bit_by_bit(window: int) -> None:
    model = transformer()
    names = ["blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "norm"]
    modules = [model.get_submodule(name) for name in names]
    found = causal_tracing(
        model, CLEAN, [1, 2], names, _probability, where="embed", samples=3, seed=5, window=window
    )
    level = 3.0 * kept(model, model.embed, CLEAN).std().item()
    corrupted, cells = _by_hand(model, model.embed, modules, [1, 2], 3, 5, level, window)
    assert torch.equal(found.corrupted_samples, corrupted)
    assert torch.equal(found.samples, cells)
    assert torch.equal(found.values, cells.mean(0))
    assert found.values.shape == (4, LENGTH)
    assert found.clean == _probability(model(CLEAN)).item()
    assert found.noise == level
    assert torch.equal(
        found.effect, (cells.mean(0) - corrupted.mean()) / (found.clean - corrupted.mean())
    )
    assert torch.equal(found.indirect_effect, cells.mean(0) - corrupted.mean())
    assert found.total_effect == found.clean - corrupted.mean().item()
    assert len(set(corrupted.tolist())) == 3


@pytest.mark.all
def test_gpt2_is_traced_as_by_native_hooks() -> None:
    model = gpt2()
    names = ["transformer.h.0", "transformer.h.1.attn"]
    modules = [model.get_submodule(name) for name in names]
    found = causal_tracing(
        bt.BendedModule(model), {"input_ids": CLEAN}, slice(0, 2), names, _probability,
        where="transformer.wte", samples=2, noise=0.5, std=1.0,
    )  # fmt: skip
    corrupted, cells = _by_hand(model, model.transformer.wte, modules, slice(0, 2), 2, 0, 0.5)
    assert torch.equal(found.corrupted_samples, corrupted)
    assert torch.equal(found.samples, cells)


def _total(output: Tensor) -> Tensor:
    return output[0, 0] - output[0, 1]


def test_a_model_that_depends_on_its_data_may_take_other_ways_with_the_noise() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    x = inputs["up", 0]
    values: dict[tuple[str, int], Tensor] = {}
    halving_by_hand(model, x, lambda name, n, v: values.setdefault((name, n), v))
    generator = torch.Generator().manual_seed(1)
    expected: list[float] = []
    corrupted: list[float] = []
    ways = set()
    for _ in range(6):
        noise = torch.randn((1, 2), generator=generator) * 2.0
        for restore in (False, True):
            names: list[str] = []

            def put(name: str, number: int, value: Tensor, noise: Tensor = noise,
                    restore: bool = restore, names: list[str] = names) -> Tensor:  # fmt: skip
                names.append(name)
                if name == "start":
                    value = value.clone()
                    value[:, :2] += noise
                    if restore:
                        value[:, 1] = values["start", 0][:, 1]
                return value

            (expected if restore else corrupted).append(
                _total(halving_by_hand(model, x, put)).item()
            )
            ways.add((names[-1], len(names)))
    found = causal_tracing(
        model, x, [0, 1], "start", _total, where="start", noise=2.0, std=1.0, samples=6, seed=1,
        positions=[1],
    )  # fmt: skip
    assert found.corrupted_samples.tolist() == corrupted
    assert found.samples.flatten().tolist() == expected
    assert len(ways) > 2


def test_what_a_noisy_run_does_not_come_by_raises_or_is_nan() -> None:
    model = halving()
    x = inputs_of_halving(model)["up", 1]
    options: dict[str, Any] = {"where": "start", "noise": 2.0, "std": 1.0, "samples": 6}
    with pytest.raises(SiteError, match=r"'up'.*corrupted run did not reach it"):
        causal_tracing(model, x, [0, 1], "up", _total, positions=[0], **options)
    found = causal_tracing(
        model, x, [0, 1], ["start", "up"], _total, positions=[0], missing="nan", **options
    )
    assert found.values.isnan().flatten().tolist() == [False, True]
    assert 0 < found.samples[:, 1].isnan().sum() < 6
    assert "up" in found.missing


def test_the_same_seed_gives_the_same_bits_and_nothing_else_is_drawn() -> None:
    bended = bt.BendedModule(transformer())
    before = torch.get_rng_state()
    made = [
        causal_tracing(
            bended, CLEAN, 1, ["blocks.0"], _probability, where="embed", samples=2, seed=seed
        )
        for seed in (3, 3, 4)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made[0].samples, made[1].samples)
    assert not torch.equal(made[0].samples, made[2].samples)
    more = causal_tracing(
        bended, CLEAN, 1, ["blocks.0"], _probability, where="embed", samples=3, seed=3
    )
    assert torch.equal(more.samples[:2], made[0].samples)
    assert bended.insertions == ()


def test_a_model_that_draws_random_numbers_draws_the_same_in_each_run() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.drop(self.embed(tokens)).tanh()

    torch.manual_seed(2)
    model = Noisy().train()
    before = torch.get_rng_state()
    found = causal_tracing(
        model, CLEAN, [1], ["drop", "embed"], torch.sum, where="embed", samples=4,
        positions=[1, slice(None)],
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), before)
    assert found.samples.flatten().tolist() == [found.clean] * 16
    assert found.corrupted != found.clean


def test_half_precision_gets_noise_of_its_own_kind() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens).sum(-1)

    torch.manual_seed(2)
    for dtype in (torch.bfloat16, torch.float64):
        model = Small().to(dtype)
        found = causal_tracing(
            model, CLEAN, 2, "embed", lambda out: out[0, 2], where="embed", samples=1, seed=1,
            positions=[2],
        )  # fmt: skip
        value = model.embed(CLEAN).detach()
        wide = torch.float32 if dtype is torch.bfloat16 else dtype
        level = 3.0 * value.to(wide).std().item()
        generator = torch.Generator().manual_seed(1)
        noise = (torch.randn(1, 1, 4, generator=generator, dtype=wide) * level).to(dtype)
        assert found.corrupted == (value[:, 2:3] + noise).sum(-1).item()
        assert found.values.item() == found.clean


def test_a_grid_needs_no_trace_for_each_cell_and_sample() -> None:
    counts = []
    for samples, positions in ((1, [0]), (4, "each")):
        bended = bt.BendedModule(transformer())
        causal_tracing(
            bended, CLEAN, 1, ["blocks.0", "blocks.1"], _probability, where="embed",
            samples=samples, positions=positions,
        )  # fmt: skip
        counts.append(bended.stats.traces)
    assert counts[0] == counts[1] <= 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": -1}, "noise="),
        ({"noise": "3"}, "noise="),
        ({"std": float("nan")}, "std="),
        ({"samples": 0}, "samples="),
        ({"window": 1.5}, "window="),
        ({"where": "blocks"}, "blocks"),
        ({"where": nn.Embedding}, "one node"),
        ({"where": "arange"}, "noise cannot be added to 'arange'"),
        ({"subject_positions": 7}, "subject_positions: axis 1 has size 5, and no position 7"),
        ({"subject_positions": "1"}, "subject_positions="),
        ({"subject_positions": []}, "subject_positions="),
        ({"sites": []}, "sites="),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    bended = bt.BendedModule(transformer())
    given: dict[str, Any] = {
        "subject_positions": 1, "sites": ["blocks.0"], "metric": _probability, "where": "embed",
        "samples": 1,
    }  # fmt: skip
    with pytest.raises(bt.BendtraceError, match=said):
        causal_tracing(bended, CLEAN, **(given | options))
    assert bended.insertions == ()


def test_what_raises_leaves_nothing_inserted() -> None:
    bended = bt.BendedModule(transformer())
    calls: list[int] = []

    def raising(output: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError
        return output.sum()

    with pytest.raises(ZeroDivisionError):
        causal_tracing(bended, CLEAN, 1, ["blocks.0"], raising, where="embed", samples=2)
    assert bended.insertions == ()


def test_results_are_tables() -> None:
    found = causal_tracing(
        transformer(), CLEAN, 1, ["blocks.0", "blocks.1"], _probability, where="embed", samples=2,
        window=2,
    )  # fmt: skip
    assert repr(found).startswith("CausalTrace (2 samples of noise ")
    assert "windows of 2 sites" in repr(found)
    assert len(found.to_pandas()) == 2 * LENGTH
