"""Activation patching, against loops with native hooks and a model written out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.debug.calls import Call
from bendtrace.errors import InputError, SiteError
from bendtrace.research.patching import activation_patching
from tests.causal_models import (
    CLEAN,
    CORRUPTED,
    HEADS,
    LENGTH,
    WIDTH,
    gpt2,
    halving,
    halving_by_hand,
    hooked,
    inputs_of_halving,
    kept,
    logit_difference,
    pre_hooked,
    transformer,
    with_part,
)
from tests.shares import some


def _by_hand(
    model: nn.Module, source: Tensor, target: Tensor, modules: list[nn.Module], index: Any,
    inputs: bool = False,
) -> float:  # fmt: skip
    """Patch a part of what modules give by native hooks."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        for module in modules:
            given = kept(model, module, source, inputs=inputs)
            hook = pre_hooked if inputs else hooked
            stack.enter_context(hook(module, lambda v, g=given: with_part(v, index, g)))
        return logit_difference(model(target)).item()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_a_grid_over_sites_and_positions_is_that_of_native_hooks_bit_by_bit(direction: str) -> None:
    model = transformer()
    names = ["embed", "blocks.0", "blocks.1.attn", "blocks.1.mlp.1", "norm"]
    found = activation_patching(
        model, CLEAN, CORRUPTED, names, logit_difference, positions="each", direction=direction
    )
    source, target = (CLEAN, CORRUPTED) if direction == "denoise" else (CORRUPTED, CLEAN)
    expected = [
        [
            _by_hand(model, source, target, [model.get_submodule(name)], (slice(None), position))
            for position in range(LENGTH)
        ]
        for name in names
    ]
    assert found.values.tolist() == expected
    assert found.sites == tuple(names)
    assert found.positions == tuple(range(LENGTH))
    assert (found.clean, found.corrupted) == (
        logit_difference(model(CLEAN)).item(), logit_difference(model(CORRUPTED)).item(),
    )  # fmt: skip
    assert len(set(found.values.flatten().tolist())) > 5


@pytest.mark.more
def test_the_effect_goes_from_nothing_to_all() -> None:
    model = transformer()
    for direction in ("denoise", "noise"):
        found = activation_patching(
            model, CLEAN, CORRUPTED, ["embed", "head"], logit_difference, direction=direction
        )
        assert found.values.shape == (2, 1)
        assert found.positions == (None,)
        assert found.effect[:, 0].tolist() == [1.0, 1.0]
    same = activation_patching(model, CLEAN, CLEAN, "embed", logit_difference)
    assert same.effect.isnan().all()


def test_ops_between_modules_are_sites() -> None:
    model = transformer()
    block = model.blocks[0]
    # What the first addition of a block gives is what its second norm is given.
    index = (slice(None), slice(1, 3))
    found = activation_patching(
        bt.BendedModule(model), CLEAN, CORRUPTED, "blocks_0.add", logit_difference,
        positions=[slice(1, 3)],
    )  # fmt: skip
    given = kept(model, block.ln_2, CLEAN, inputs=True)
    own = with_part(kept(model, block.ln_2, CORRUPTED, inputs=True), index, given)
    expected = own + block.mlp(block.ln_2(own))
    with hooked(block, lambda _: expected):
        assert found.values.item() == logit_difference(model(CORRUPTED)).item()


@pytest.mark.more
@pytest.mark.parametrize("cached", some([False, True], 2, start=1))
def test_gpt2_is_patched_as_by_native_hooks(cached: bool) -> None:
    model = gpt2(use_cache=cached)
    names = ["transformer.wte", "transformer.h.0", "transformer.h.0.attn", "transformer.h.1.mlp"]
    found = activation_patching(
        model, {"input_ids": CLEAN}, {"input_ids": CORRUPTED}, names, logit_difference,
        positions=[0, 1, [1, 3], -1],
    )  # fmt: skip
    expected = [
        [
            _by_hand(model, CLEAN, CORRUPTED, [model.get_submodule(name)], (slice(None), index))
            for index in (0, 1, [1, 3], -1)
        ]
        for name in names
    ]
    assert found.values.tolist() == expected
    assert found.positions == (0, 1, (1, 3), -1)


@pytest.mark.more
def test_heads_are_slices_of_what_the_output_projection_is_given() -> None:
    for model, name, heads, width in (
        (gpt2(), "transformer.h.1.attn.c_proj", 4, 4),
        (transformer(), "blocks.1.attn.out", HEADS, WIDTH // HEADS),
    ):
        found = activation_patching(
            model, CLEAN, CORRUPTED, name, logit_difference, heads=heads, at="input",
            positions=[-1, 1],
        )  # fmt: skip
        module = model.get_submodule(name)
        expected = [
            [
                _by_hand(
                    model, CLEAN, CORRUPTED, [module],
                    (slice(None), position, slice(head * width, (head + 1) * width)), inputs=True,
                )
                for head in range(heads)
            ]
            for position in (-1, 1)
        ]  # fmt: skip
        assert found.values.tolist() == [expected]
        assert found.values.shape == (1, 2, heads)
        one = activation_patching(
            model, CLEAN, CORRUPTED, name, logit_difference, heads=heads, head=-1, at="input",
            positions=[-1, 1],
        )  # fmt: skip
        assert one.values.tolist() == found.values[..., -1:].tolist()
        assert one.heads == (heads - 1,)


def test_heads_can_be_an_axis_of_their_own() -> None:
    model = transformer()
    found = activation_patching(
        bt.BendedModule(model), CLEAN, CORRUPTED, "blocks_1.attn.softmax", logit_difference,
        heads=HEADS, head_axis=1,
    )  # fmt: skip
    assert found.values.shape == (1, 1, HEADS)
    attn, expected = model.blocks[1].attn, []
    for head in range(HEADS):
        seen = {}
        for name, tokens in (("clean", CLEAN), ("corrupted", CORRUPTED)):
            x = kept(model, model.blocks[1].ln_1, tokens)
            q, k, v = (
                part.view(1, LENGTH, HEADS, -1).transpose(1, 2) for part in attn.qkv(x).chunk(3, -1)
            )
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            scores = q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5
            seen[name] = scores.masked_fill(mask, float("-inf")).softmax(-1), v
        weights = with_part(seen["corrupted"][0], (slice(None), head), seen["clean"][0])
        given = (weights @ seen["corrupted"][1]).transpose(1, 2).reshape(1, LENGTH, -1)
        with pre_hooked(attn.out, lambda _, given=given: given):
            expected.append(logit_difference(model(CORRUPTED)).item())
    assert found.values[0, 0].tolist() == expected


def _total(output: Tensor) -> Tensor:
    return output[0, 0] - output[0, 1]


def test_a_model_that_depends_on_its_data_goes_the_way_of_what_is_put_in() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    assert {("up", 0), ("down", 0), ("up", 1), ("down", 1)} <= inputs.keys()
    bended = bt.BendedModule(model)
    branches = set()
    for clean_key, corrupted_key in ((("up", 1), ("down", 1)), (("down", 0), ("up", 0))):
        clean, corrupted = inputs[clean_key], inputs[corrupted_key]
        values: dict[tuple[str, int], Tensor] = {}

        def keep(name: str, number: int, value: Tensor, values: Any = values) -> Tensor:
            values[name, number] = value
            return value

        halving_by_hand(model, clean, keep)
        found = activation_patching(bended, clean, corrupted, "start", _total, positions=[0, 3])
        for column, position in enumerate((0, 3)):
            index = (slice(None), position)
            names: list[str] = []

            def put(name: str, number: int, value: Tensor, index: Any = index, names: Any = names,
                    values: Any = values) -> Tensor:  # fmt: skip
                names.append(name)
                return with_part(value, index, values[name, 0]) if name == "start" else value

            expected = _total(halving_by_hand(model, corrupted, put))
            branches.add(names[-1])
            assert found.values[0, column].item() == expected.item()
        whole = activation_patching(bended, clean, corrupted, "start", _total)
        assert whole.values.item() == whole.clean
    assert branches == {"up", "down"}


def test_all_passes_of_a_node_are_patched_or_the_one_that_is_named() -> None:
    def model(x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(x) * 2
        return x

    def by_hand(patched: tuple[int, ...]) -> float:
        clean, corrupted = torch.ones(1, 2), torch.zeros(1, 2) + 0.1
        for number in range(3):
            clean, corrupted = torch.tanh(clean), torch.tanh(corrupted)
            corrupted = clean if number in patched else corrupted
            clean, corrupted = clean * 2, corrupted * 2
        return corrupted.sum().item()

    found = activation_patching(
        model, (torch.ones(1, 2), 3), (torch.zeros(1, 2) + 0.1, 3), ["tanh", "tanh:2", "mul:3"],
        torch.sum,
    )  # fmt: skip
    assert found.values.flatten().tolist() == [by_hand((0, 1, 2)), by_hand((1,)), by_hand((2,))]


def test_what_one_of_the_runs_does_not_come_by_raises_or_is_nan() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    bended = bt.BendedModule(model)
    clean, corrupted = inputs["up", 0], inputs["down", 0]
    with pytest.raises(SiteError, match=r"'up'.*the corrupted run did not reach it") as raised:
        activation_patching(bended, clean, corrupted, ["start", "up"], _total)
    assert raised.value.site == "up"
    with pytest.raises(SiteError, match=r"'sigmoid'.*the clean run did not reach it"):
        activation_patching(bended, clean, corrupted, "sigmoid", _total)
    with pytest.raises(SiteError, match="no run reached 'step'"):
        activation_patching(bended, clean, corrupted, "step", _total)
    found = activation_patching(
        bended, clean, corrupted, ["up", "start", "sigmoid"], _total, missing="nan"
    )
    assert found.values.isnan().flatten().tolist() == [True, False, True]
    assert sorted(found.missing) == ["sigmoid", "up"]
    assert bended.insertions == ()


def test_passes_that_differ_in_number_are_told_of() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    once, never = inputs["up", 1], inputs["up", 0]

    def looped(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = torch.tanh(x) / 2
        return x * 2

    with pytest.raises(SiteError, match="ran 2 times in the clean run and 1 times"):
        activation_patching(
            looped, torch.full((1, 9), 9.0), torch.full((1, 2), 0.8), "tanh", torch.sum
        )
    with pytest.raises(SiteError, match="'step'"):
        activation_patching(model, once, never, "step", _total)


def test_a_pass_that_comes_up_only_when_patched_is_told_of() -> None:
    def model(x: Tensor) -> Tensor:
        while x.sum() > 1:
            x = torch.relu(x) - 1
        return x

    clean, corrupted = torch.tensor([3.0, -1.0]), torch.tensor([0.0, 3.0])
    with pytest.raises(SiteError, match=r"shape \(3,\), and \(2,\)"):
        activation_patching(model, torch.ones(3), corrupted, "relu", torch.sum)
    found = activation_patching(
        model, clean, corrupted, "relu", torch.sum, positions=[0, 1], axis=0, missing="nan"
    )
    assert found.values.isnan().tolist() == [[True, False]]
    assert "again, in pass" in found.missing["relu"]


@pytest.mark.more
def test_a_grid_needs_no_trace_for_each_cell() -> None:
    counts = []
    for positions in ([0], "each", [0, 1, 2, 3, 4, [0, 1], [2, 3], slice(None)]):
        bended = bt.BendedModule(transformer())
        names = [f"blocks.{i}.{part}" for i in range(2) for part in ("attn", "mlp")]
        activation_patching(bended, CLEAN, CORRUPTED, names, logit_difference, positions=positions)
        counts.append(bended.stats.traces)
    assert len(set(counts)) == 1
    assert counts[0] <= len(names) + 1
    before = bended.stats.traces
    activation_patching(bended, CORRUPTED, CLEAN, names, logit_difference, positions="each")
    assert bended.stats.traces == before


@pytest.mark.more
def test_what_means_several_nodes_is_a_row_for_each_and_a_list_is_one() -> None:
    model = transformer()
    found = activation_patching(model, CLEAN, CORRUPTED, [nn.LayerNorm], logit_difference)
    assert found.sites == (
        "blocks_0.ln_1",
        "blocks_0.ln_2",
        "blocks_1.ln_1",
        "blocks_1.ln_2",
        "norm",
    )
    expected = [
        _by_hand(model, CLEAN, CORRUPTED, [module], ...)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
    ]
    assert sorted(found.values.flatten().tolist()) == sorted(expected)
    pair = activation_patching(
        model, CLEAN, CORRUPTED, [["blocks.0.attn", "blocks.1.mlp"], model.head], logit_difference,
        positions=[1],
    )  # fmt: skip
    together = [model.blocks[0].attn, model.blocks[1].mlp]
    assert pair.sites == ("blocks_0.attn + blocks_1.mlp", "head")
    assert pair.values[0].item() == _by_hand(model, CLEAN, CORRUPTED, together, (slice(None), 1))


def test_selectors_that_look_ahead_are_rows_too() -> None:
    model = transformer()
    bended = bt.BendedModule(model)
    selector = bt.node_selector.last(nn.LayerNorm)
    found = activation_patching(bended, CLEAN, CORRUPTED, selector, logit_difference)
    assert found.sites == ("norm",)
    assert found.values.item() == _by_hand(model, CLEAN, CORRUPTED, [model.norm], ...)
    assert bended.insertions == ()


def test_sites_with_fewer_positions_have_nan_where_there_are_none() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x).sum() + torch.tanh(x[:, :1]).sum()

    found = activation_patching(
        model, torch.ones(1, 3), torch.zeros(1, 3), ["relu", "tanh"], lambda out: out,
        positions="each",
    )  # fmt: skip
    assert found.values.isnan().tolist() == [[False] * 3, [False, True, True]]
    assert found.missing == {}
    with pytest.raises(SiteError, match=r"'tanh'.*axis 1 has size 1, and no position 2"):
        activation_patching(
            model, torch.ones(1, 3), torch.zeros(1, 3), ["relu", "tanh"], lambda out: out,
            positions=[2],
        )  # fmt: skip


class _Stateful(nn.Module):
    """Draws random numbers, changes buffers, and writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return something."""
        self.count += 1
        x += 1
        return nn.functional.dropout(self.norm(self.linear(x)), 0.5) * random.choice([1, 2])


def _state(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_a_slice_without_positions_is_missing_and_not_without_effect() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x).sum(1)

    runs: Any = (model, torch.ones(1, 5, 2), torch.zeros(1, 5, 2), ["relu"], torch.sum)
    options: Any = {"positions": [slice(7, 9), slice(-2, None)]}
    with pytest.raises(SiteError, match="axis 1 has size 5, and no positions 7:9"):
        activation_patching(*runs, **options)
    found = activation_patching(*runs, **options, missing="nan")
    assert found.values[0].isnan().tolist() == [True, False]
    assert found.values[0, 1] == 4


def test_all_runs_begin_alike_and_leave_nothing_behind() -> None:
    torch.manual_seed(0)
    model = _Stateful().train()
    clean, corrupted = torch.randn(4, 3), torch.randn(4, 3)
    given = clean.clone(), corrupted.clone()
    before, generators = _state(model), (torch.get_rng_state(), random.getstate())

    def alike(x: Tensor) -> Tensor:
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        output = model(x.clone())
        model.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        return output

    by_hand = [alike(x).sum().item() for x in (clean, corrupted)]
    bended = bt.BendedModule(model)
    found = activation_patching(
        bended, clean, corrupted, ["linear", "norm"], lambda out: out.sum(), positions="each"
    )
    assert [found.clean, found.corrupted] == by_hand
    assert activation_patching(bended, clean, corrupted, "norm", torch.sum).effect.item() == 1.0

    value = kept(alike, model.linear, clean)
    with hooked(model.linear, lambda v: with_part(v, (slice(None), 1), value)):
        assert found.values[0, 1].item() == alike(corrupted).sum().item()
    assert all(map(torch.equal, _state(model), before))
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert torch.equal(clean, given[0])
    assert torch.equal(corrupted, given[1])
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert bended.insertions == ()


def test_what_raises_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = _Stateful().train()
    bended = bt.BendedModule(model)
    before, generator = _state(model), torch.get_rng_state()
    calls = 0

    def raising(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ZeroDivisionError
        return output.sum()

    with pytest.raises(ZeroDivisionError):
        activation_patching(
            bended, torch.ones(4, 3), torch.zeros(4, 3), "linear", raising, positions="each"
        )
    assert calls == 4
    assert bended.insertions == ()
    assert all(map(torch.equal, _state(model), before))
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_the_user_has_inserted_stays_and_counts() -> None:
    model = transformer()
    bended = bt.BendedModule(model)
    own = bended.interject("blocks.0.mlp", lambda value: value * 2)
    found = activation_patching(bended, CLEAN, CORRUPTED, ["blocks.0.mlp"], logit_difference)
    assert bended.insertions == (own,)
    with hooked(model.blocks[0].mlp, lambda value: value * 2):
        assert found.clean == logit_difference(model(CLEAN)).item()
        given = kept(model, model.blocks[0].mlp, CLEAN)
    with hooked(model.blocks[0].mlp, lambda _: given):
        assert found.values.item() == logit_difference(model(CORRUPTED)).item()


def test_ops_in_place_are_sites() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        seen = h.view(-1)
        torch.relu_(h)
        return seen.sum() + h[0, 0]

    found = activation_patching(
        model, torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, 5.0]]), ["relu_", "mul"],
        lambda out: out, positions="each",
    )  # fmt: skip
    assert found.values.tolist()[0] == [14.0, 4.0]
    assert (found.clean, found.corrupted) == (8.0, 10.0)


def test_gradients_are_not_needed_nor_in_the_way() -> None:
    model = transformer()
    with torch.no_grad():
        without = activation_patching(model, CLEAN, CORRUPTED, "embed", logit_difference)
    with torch.inference_mode():
        inference = activation_patching(model, CLEAN, CORRUPTED, "embed", logit_difference)
    plain = activation_patching(model, CLEAN, CORRUPTED, "embed", logit_difference)
    assert without.values.tolist() == plain.values.tolist() == inference.values.tolist()


def test_a_call_with_containers_and_a_part_of_what_a_node_gives() -> None:
    class Pair(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return x["a"] * 2, x["a"] + x["b"]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            first, second = self.pair(x)
            return (first * second).sum()

    clean = Call(({"a": torch.ones(2), "b": torch.ones(2)},))
    corrupted = Call(({"a": torch.zeros(2), "b": torch.ones(2) * 3},))
    with pytest.raises(SiteError, match="2 tensors in it"):
        activation_patching(Outer(), clean, corrupted, "pair", lambda out: out)
    found = activation_patching(
        Outer(), clean, corrupted, ["pair.mul", "pair.output|sub_1"], lambda out: out, axis=0,
        positions=[1],
    )  # fmt: skip
    assert found.values.flatten().tolist() == [6.0, 0.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"direction": "both"}, "direction="),
        ({"missing": "skip"}, "missing="),
        ({"positions": 1.5}, "positions="),
        ({"positions": [True]}, "positions="),
        ({"positions": []}, "positions= is empty"),
        ({"positions": "all"}, "positions="),
        ({"axis": "1"}, "axis="),
        ({"heads": 0}, "heads="),
        ({"heads": 2, "head": 2}, "no head=2; there are 2"),
        ({"head": 1}, "heads="),
        ({"at": "both"}, "at="),
        ({"sites": []}, "sites= is empty"),
        ({"metric": 3}, "metric="),
        ({"metric": lambda out: out}, "without dimensions"),
        ({"metric": lambda out: "high"}, "not 'high'"),
        ({"sites": "blocks.7"}, "blocks"),
        ({"positions": [99]}, "no position 99"),
        ({"heads": 3}, "not a multiple of 3"),
        ({"axis": 5, "positions": [0]}, "no axis 5"),
        ({"heads": 2, "head_axis": 1, "positions": [0]}, "both"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    bended = bt.BendedModule(transformer())
    given: dict[str, Any] = {"sites": "blocks.0", "metric": logit_difference} | options
    with pytest.raises(bt.BendtraceError, match=said):
        activation_patching(bended, CLEAN, CORRUPTED, **given)
    assert bended.insertions == ()


def test_an_error_of_the_metric_says_what_it_was_called_with() -> None:
    with pytest.raises(AttributeError) as caught:
        activation_patching(transformer(), CLEAN, CORRUPTED, "blocks.0", lambda out: out.logits)
    (note,) = [note for note in caught.value.__notes__ if "metric=" in note]
    assert note.startswith("metric= was called with the output of the model, a tensor of shape (")


def test_results_are_tables() -> None:
    model = transformer()
    found = activation_patching(
        model, CLEAN, CORRUPTED, ["embed", "blocks.0"], logit_difference, positions=[1, [2, 3]]
    )
    frame = found.to_pandas()
    assert list(frame.columns) == ["site", "position", "value", "effect"]
    assert frame["value"].tolist() == found.values.flatten().tolist()
    assert frame["position"].tolist() == ["1", "2, 3", "1", "2, 3"]
    lines = repr(found).splitlines()
    assert lines[0].startswith("Patching (denoise): clean ")
    assert lines[1].split() == ["1", "2,", "3"]
    assert lines[2].split() == ["embed", "1.000", "0.000"]


def _plain(x: Tensor) -> Tensor:
    return torch.relu(x).sum()


@pytest.mark.parametrize("model", [_plain, transformer()])
def test_inputs_that_cannot_be_copied_are_refused(model: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="cannot be copied"):
        activation_patching(model, (i for i in range(3)), CLEAN, "relu", torch.sum)
