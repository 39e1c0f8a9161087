"""Steering vectors: differences of means, and adding them at positions and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bendtrace as bt
from bendtrace.debug.calls import Call
from bendtrace.errors import InputError, InterjectionError
from bendtrace.workflows import SteeringVectors, steer, steering_vector
from tests.lens_models import (
    WIDTH,
    Patient,
    Transformer,
    hooked,
    made,
    same,
    tokens,
    untouched,
)
from tests.shares import some

DIRECTION = torch.linspace(-1, 1, WIDTH)


def seen(model: nn.Module, module: nn.Module, batch: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.no_grad(), hooked(module, lambda m, args, out: found.append(out.clone())):
        model(batch)
    return found


# Vectors


@pytest.mark.parametrize("position", [-1, 0, 3, slice(1, 3), None])
def test_a_vector_is_the_difference_of_the_means_over_loaders(position: Any) -> None:
    model = made(Transformer)
    positive = [tokens(3, 5, seed) for seed in range(4)]
    negative = [tokens(2, 5, seed) for seed in range(10, 13)]

    def mean(batches: list[Tensor]) -> np.ndarray:
        rows = []
        for batch in batches:
            (out,) = seen(model, model.blocks[0], batch)
            taken = out[:, position] if position is not None else out
            taken = taken.double().numpy()
            rows.append(taken.reshape(len(out), -1, WIDTH).mean(1))
        return np.concatenate(rows).mean(0)

    with untouched(model):
        found = steering_vector(
            model, iter(positive), (b for b in negative), "blocks.0", position=position
        )
    wanted = mean(positive) - mean(negative)
    np.testing.assert_allclose(found.vector.numpy(), wanted, rtol=1e-5, atol=1e-6)
    assert found.counts == (12, 6)
    assert found.vector.dtype == torch.float32
    np.testing.assert_allclose(found.positive["blocks_0"].numpy(), mean(positive), atol=1e-6)
    assert "12 and 6 examples" in repr(found)


@pytest.mark.parametrize("position", [None, slice(1, None)])
def test_means_over_positions_in_half_precision_are_not_rounded(position: Any) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4)).bfloat16()
    rows = (torch.randn(3, 64, 4) + 3).bfloat16()
    found = steering_vector(model, rows, torch.zeros_like(rows), "0", position=position)
    wanted = rows[:, position or slice(None)].double().mean((0, 1))
    torch.testing.assert_close(found.positive["sub_0"], wanted)
    seen = []
    steering_vector(
        model, rows, rows, "0", position=position,
        reduce=lambda one, other: seen.append(one) or one.mean(0),
    )  # fmt: skip
    assert seen[0].dtype == torch.bfloat16


def test_batches_of_other_sizes_give_the_same_mean() -> None:
    model = made(Transformer)
    data = tokens(12)
    other = tokens(4, seed=1)
    one = steering_vector(model, DataLoader(data, batch_size=5), other, "blocks.1")
    all_at_once = steering_vector(model, data, {"tokens": other}, "blocks.1")
    torch.testing.assert_close(one.vector, all_at_once.vector, rtol=1e-6, atol=1e-7)


def test_several_nodes_and_passes_give_a_vector_each() -> None:
    model = made(Patient)
    by_passes: dict[int, list[Tensor]] = {}
    for seed in range(12):
        batch = tokens(2, 5, seed)
        by_passes.setdefault(len(seen(model, model.block, batch)), []).append(batch)
    one, other = next(found for count, found in by_passes.items() if count > 1 and len(found) > 1)[
        :2
    ]
    first, second = seen(model, model.block, one), seen(model, model.block, other)
    found = steering_vector(model, one, other, "block")
    assert list(found.vectors) == [f"block:{number + 1}" for number in range(len(first))]
    for number, path in enumerate(found.vectors):
        wanted = first[number][:, -1].mean(0) - second[number][:, -1].mean(0)
        torch.testing.assert_close(found[path], wanted)
    with pytest.raises(InputError, match="several vectors"):
        found.vector  # noqa: B018


def test_the_only_pass_of_a_call_is_the_first_of_others() -> None:
    once, twice = torch.ones(1, 4) * 1.5, torch.ones(1, 4) * 3

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2 if x.sum() > 8 else 1):
                x = self.act(x)
            return x

    found = steering_vector(Looped(), iter([once, twice]), twice, "act", position=None)
    first = torch.cat([once.tanh(), twice.tanh()]).mean(0) - twice.tanh()[0]
    assert list(found.vectors) == ["act:1", "act:2"]
    torch.testing.assert_close(found["act:1"], first)
    torch.testing.assert_close(found["act:2"], torch.zeros(4))
    with pytest.raises(InputError, match="paths differ"):
        steering_vector(Looped(), iter([once, twice]), once, "act", position=None)


def test_rows_can_be_chosen_by_what_the_call_was_given() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made(Transformer)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.inner(ids) * mask[..., None]

    model = Masked()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    ids = tokens()

    def last(value: Tensor, call: Call) -> Tensor:
        return value[torch.arange(len(value)), call.kwargs["mask"].sum(1) - 1]

    batch = {"ids": ids, "mask": mask}
    found = steering_vector(model, batch, batch, "inner.blocks.0", position=last)
    (out,) = seen(model.inner, model.inner.blocks[0], ids)
    wanted = torch.stack([out[0, 2], out[1, 4]]).double().mean(0)
    torch.testing.assert_close(found.positive["inner.blocks_0"], wanted)


def test_another_reduction_sees_all_rows() -> None:
    model = made(Transformer)
    one, other = [tokens(3, seed=s) for s in range(2)], [tokens(3, seed=s) for s in (5, 6)]

    def medians(mine: Tensor, theirs: Tensor) -> Tensor:
        assert mine.shape == theirs.shape == (6, WIDTH)
        return mine.median(0).values - theirs.median(0).values

    found = steering_vector(model, iter(one), iter(other), "blocks.0", reduce=medians)
    rows = [
        torch.cat([seen(model, model.blocks[0], b)[0][:, -1] for b in batches])
        for batches in (one, other)
    ]
    torch.testing.assert_close(found.vector, medians(*rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "lm_head", "position": 9}, "no position 9"),
        ({"where": "lm_head", "position": slice(7, 9)}, "selects nothing"),
        ({"where": "lm_head", "position": "last"}, "position="),
        ({"where": "lm_head", "reduce": "median"}, "reduce="),
        ({"where": "tokens"}, "floating point"),
        ({"positive": iter([])}, "no example"),
        ({"where": lambda node: False}, "no example"),
    ],
)
def test_what_makes_no_vector_is_refused(options: dict[str, Any], message: str) -> None:
    bended = bt.BendedModule(made(Transformer))
    bended(tokens())
    given: dict[str, Any] = {"positive": tokens(), "negative": tokens(), "where": "lm_head"}
    with pytest.raises(InputError, match=message):
        steering_vector(bended, **{**given, **options})
    assert bended.insertions == ()


def test_two_axes_have_no_positions() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(InputError, match="position=None"):
        steering_vector(model, torch.randn(4, 3), torch.randn(4, 3), "0")


def test_sets_that_take_different_paths_are_refused() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.tanh(x) if x.sum() > 0 else torch.sigmoid(x)

    bended = bt.BendedModule(model)
    x = torch.ones(2, 3)
    bended(x)
    bended(-x)
    with pytest.raises(InputError, match="paths differ"):
        steering_vector(bended, x, -x, ["tanh", "sigmoid"], position=None)


# Adding them


def by_hand(scale: float, vector: Tensor, positions: Any) -> Any:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if positions is None:
            return out + scale * vector
        out = out.clone()
        index = [positions] if isinstance(positions, int) else positions
        out[:, index] += scale * vector
        return out

    return hook


@pytest.mark.parametrize("positions", [None, -1, 2, [0, -2], slice(1, None), slice(0, 4, 2)])
@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_steering_is_adding_in_a_hook(positions: Any, scale: float) -> None:
    model = made(Transformer)
    x = tokens()
    plain = model(x)
    with hooked(model.blocks[0], by_hand(scale, DIRECTION, positions)):
        wanted = model(x)
    bended = bt.BendedModule(model)
    with untouched(model):
        with steer(bended, DIRECTION, "blocks.0", scale=scale, positions=positions) as steering:
            for _ in range(2):
                same(bended(x), wanted)
            assert steering.reports()[0].changed
            assert len(bended.insertions) == 1
            assert repr(steering) == "<Steering at 'blocks.0'>"
        assert bended.insertions == ()
        assert "removed" in repr(steering)
        same(bended(x), plain)


def test_what_others_hold_of_the_value_stays_as_it_was() -> None:
    x = torch.zeros(1, 3, 2)
    with steer(
        bt.BendedModule(nn.Sequential(nn.Identity())), torch.ones(2), "0", positions=1
    ) as steering:
        assert steering(x)[0, 1].tolist() == [1.0, 1.0]
    assert not x.any()


def test_a_mask_means_positions_or_examples_and_positions() -> None:
    model = made(Transformer)
    x = tokens()
    for mask in (torch.tensor([True, False, True, False, False]), tokens() > 5):

        def hook(module: nn.Module, args: Any, out: Tensor, mask: Tensor = mask) -> Tensor:
            return out + DIRECTION * mask.expand(out.shape[:2])[..., None]

        with hooked(model.blocks[0], hook):
            wanted = model(x)
        with steer(bt.BendedModule(model), DIRECTION, "blocks.0", positions=mask) as steering:
            torch.testing.assert_close(steering(x), wanted, rtol=0, atol=1e-7)


def test_a_function_of_the_value_says_which_positions() -> None:
    model = made(Transformer)
    with hooked(model.blocks[0], by_hand(1.0, DIRECTION, [-1])):
        wanted = model(tokens())
    where = {"positions": lambda value: value.shape[1] - 1}
    with steer(bt.BendedModule(model), DIRECTION, "blocks.0", **where) as steering:
        same(steering(tokens()), wanted)


def test_numbers_in_tensors_are_positions_and_truth_values_in_lists_are_refused() -> None:
    bended, vector = bt.BendedModule(nn.Sequential(nn.Identity())), torch.ones(2)
    for positions in (torch.tensor(2), torch.tensor([2]), lambda value: torch.tensor(-1)):
        with steer(bended, vector, "0", positions=positions):
            assert bended(torch.zeros(1, 3, 2))[0, :, 0].tolist() == [0, 0, 1]
    with steer(bended, vector, "0", positions=lambda value: [True, False, True]):
        with pytest.raises(InterjectionError, match="truth values, not positions"):
            bended(torch.zeros(1, 3, 2))


@pytest.mark.parametrize("normalise", ["vector", True, "value"])
def test_lengths_can_be_brought_back(normalise: Any) -> None:
    model = made(Transformer)

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if normalise == "value":
            made = out + 3.0 * DIRECTION
            return made * (out.norm(dim=-1, keepdim=True) / made.norm(dim=-1, keepdim=True))
        return out + 3.0 * (DIRECTION / DIRECTION.norm(dim=-1, keepdim=True))

    with hooked(model.blocks[0], hook):
        wanted = model(tokens())
    with steer(
        bt.BendedModule(model), DIRECTION, "blocks.0", scale=3.0, normalise=normalise
    ) as steering:
        same(steering(tokens()), wanted)


def test_vectors_that_were_found_say_where_themselves() -> None:
    model = made(Transformer)
    found = steering_vector(model, tokens(), tokens(seed=1), ["blocks.0", "blocks.1"])
    assert isinstance(found, SteeringVectors)
    one, two = (by_hand(2.0, found[f"blocks_{i}"], None) for i in range(2))
    with hooked(model.blocks[0], one), hooked(model.blocks[1], two):
        wanted = model(tokens())
    bended = bt.BendedModule(model)
    with steer(bended, found, scale=2.0):
        same(bended(tokens()), wanted)


def test_in_a_loop_each_pass_is_steered_and_the_path_may_change() -> None:
    model = made(Patient)
    x = tokens()
    vector = DIRECTION * 5
    with hooked(model.block, by_hand(1.0, vector, -1)):
        calls = seen(model, model.block, x)
        wanted = model(x)
    bended = bt.BendedModule(model)
    assert len(calls) != len(seen(model, model.block, x))
    with steer(bended, vector, "block", positions=-1) as steering:
        for _ in range(2):
            same(bended(x), wanted)
    assert steering.reports()[0].fired == 2 * len(calls)


def test_a_scale_that_is_a_parameter_can_be_changed_without_a_retrace() -> None:
    model = made(Transformer)
    amount = bt.bends.BendingParameter("amount", 0.0)
    bended = bt.BendedModule(model)
    with steer(bended, DIRECTION, "blocks.1", scale=amount):
        bended(tokens())
        traces = bended.stats.traces
        for value in (0.5, 2.0):
            amount.value = value
            with hooked(model.blocks[1], by_hand(value, DIRECTION, None)):
                wanted = model(tokens())
            same(bended(tokens()), wanted)
        assert bended.stats.traces == traces


def test_gradients_flow_into_a_vector() -> None:
    model = made(Transformer)
    vector = DIRECTION.clone().requires_grad_()
    with steer(bt.BendedModule(model), vector, "blocks.0", scale=2.0, positions=1) as steering:
        steering(tokens()).sum().backward()
    mine, vector.grad = vector.grad, None
    with hooked(model.blocks[0], by_hand(2.0, vector, [1])):
        model(tokens()).sum().backward()
    torch.testing.assert_close(mine, vector.grad)
    model.zero_grad()


def test_nothing_stays_if_the_block_raises() -> None:
    bended = bt.BendedModule(made(Transformer))
    with pytest.raises(ZeroDivisionError), steer(bended, DIRECTION, "blocks.0"):
        raise ZeroDivisionError
    assert bended.insertions == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": None}, "where="),
        ({"vectors": {}}, "no vectors"),
        ({"vectors": {"blocks.0": DIRECTION}}, "already name their nodes: do not pass where="),
        ({"vectors": 3.0}, "has to be a tensor"),
        ({"vectors": torch.tensor(3.0)}, "at least one axis"),
        ({"scale": "2"}, "scale="),
        ({"positions": "last"}, "positions="),
        ({"positions": []}, "positions="),
        ({"positions": True}, "positions="),
        ({"steps": -1}, "steps="),
        ({"steps": "last"}, "steps="),
        ({"steps": slice(-2, None)}, "steps="),
        ({"normalise": "both"}, "normalise="),
        ({"where": "blocks.7"}, "no 'blocks"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_door(options: dict[str, Any], message: str) -> None:
    bended = bt.BendedModule(made(Transformer))
    bended(tokens())
    given: dict[str, Any] = {"vectors": DIRECTION, "where": "blocks.0"}
    with pytest.raises(bt.BendtraceError, match=message):
        steer(bended, **{**given, **options})
    assert bended.insertions == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": 9}, "no position 9"),
        ({"positions": torch.ones(3, dtype=torch.bool)}, "mask of shape"),
        ({"vectors": torch.ones(3)}, "cannot be added"),
        ({"vectors": torch.ones(4, 2, 5, WIDTH)}, "cannot be added"),
    ],
)
def test_what_does_not_fit_the_value_raises_in_the_call(
    options: dict[str, Any], message: str
) -> None:
    bended = bt.BendedModule(made(Transformer))
    given: dict[str, Any] = {"vectors": DIRECTION, "where": "blocks.0", **options}
    with steer(bended, **given), pytest.raises(InterjectionError, match=message):
        bended(tokens())
    same(bended(tokens()), bended.model(tokens()))


# Steps of a generation


class Writer(nn.Module):
    """Writes on by itself, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = made(Transformer)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)

    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


STEPS: dict[str, tuple[Any, list[int]]] = {
    "all": ("all", [0, 1, 2, 3]), "prompt": ("prompt", [0]), "new": ("new", [1, 2, 3]),
    "one": (2, [2]), "some": ([0, 3], [0, 3]), "from": (slice(2, None), [2, 3]),
    "every": (slice(None, None, 2), [0, 2]), "asked": (lambda step: step % 2 == 1, [1, 3]),
}  # fmt: skip


@pytest.mark.parametrize("steps", STEPS)
def test_steps_are_calls_within_a_method_counted_anew_each_time(steps: str) -> None:
    said, numbers = STEPS[steps]
    eager = Writer()
    count = -1

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        nonlocal count
        count += 1
        return out + 9 * DIRECTION if count % 4 in numbers else None

    ids = tokens(2, 3)
    with hooked(eager.inner.blocks[0], hook):
        wanted = [eager.generate(ids, 4) for _ in range(2)]
    model = Writer()
    bended = bt.BendedModule(model)
    with steer(bended, DIRECTION, "inner.blocks.0", scale=9, steps=said):
        for one in wanted:
            same(bended.generate(ids, 4), one)
        # A call by itself is a prompt.
        with hooked(model.inner.blocks[0], lambda m, a, o: o + 9 * DIRECTION * (0 in numbers)):
            alone = model(ids)
        same(bended(ids), alone)


def test_loops_by_hand_are_counted_where_that_is_said() -> None:
    model = made(Transformer)
    bended = bt.BendedModule(model)
    x = tokens()
    plain = model(x)
    with hooked(model.blocks[0], by_hand(1.0, DIRECTION, None)):
        steered = model(x)
    with steer(bended, DIRECTION, "blocks.0", steps="new") as steering:
        for _ in range(2):
            same(bended(x), plain)
        for _ in range(2):
            with steering.generation():
                same(bended(x), plain)
                same(bended(x), steered)
                with (
                    pytest.raises(InputError, match="counted already"),
                    steering.generation(),
                ):
                    pass
        same(bended(x), plain)


def test_a_part_that_a_method_calls_first_is_in_step_0() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x))

        def generate(self, x: Tensor) -> Tensor:
            x = self.encoder(x)
            for _ in range(3):
                x = self(x)
            return x

    eager, model = made(Both), made(Both)
    x = torch.ones(2, WIDTH)
    calls = 0

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        return out + DIRECTION if calls in (1, 2) else None

    with hooked(eager.encoder, hook):
        wanted = eager.generate(x)
    bended = bt.BendedModule(model)
    with steer(bended, DIRECTION, "encoder", steps="prompt"):
        for _ in range(2):
            same(bended.generate(x), wanted)


pytest.importorskip("transformers", reason="needs the test extra")


def language_model(name: str) -> Any:
    from tests.hf_models import MODELS

    (model,) = (m for m in MODELS if m.name == name)
    return model.make()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 30},
    "without a cache": {"do_sample": False, "use_cache": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}
LAYERS = {"gpt2": "transformer.h.1", "llama": "model.layers.0"}
KINDS: dict[str, tuple[Any, Any]] = {
    "everywhere": ("all", None), "the prompt": ("prompt", None), "the prompt's end": ("prompt", -1),
    "new tokens": ("new", -1), "from step 2": (slice(2, None), -1),
}  # fmt: skip


def generated(model: Any, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    ids = torch.randint(3, 99, (2, 5), generator=torch.Generator().manual_seed(0))
    out = model.generate(
        input_ids=ids, max_new_tokens=5, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return [out.sequences, list(out.logits), torch.get_rng_state()]


@pytest.fixture(params=LAYERS)
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    return request.param, language_model(request.param), language_model(request.param)


@pytest.mark.more
@pytest.mark.parametrize("way", some(WAYS, 3))
def test_generating_is_that_of_a_hook_on_the_model(family: Any, way: str) -> None:
    name, eager, model = family
    bended = bt.BendedModule(model)
    vector = torch.linspace(-1, 1, 32)
    plain = generated(eager, 0, **WAYS[way])
    for steps, positions in KINDS.values():
        numbers = {"all": range(9), "prompt": [0], "new": range(1, 9)}
        wanted_in = numbers.get(steps, range(2, 9)) if isinstance(steps, str) else range(2, 9)
        count = -1

        def hook(
            module: Any,
            args: Any,
            out: Tensor,
            wanted_in: Any = wanted_in,
            positions: Any = positions,
        ) -> Tensor | None:
            nonlocal count
            count += 1
            if count not in wanted_in:
                return None
            out = out.clone()
            out[:, slice(None) if positions is None else [positions]] += 4.0 * vector
            return out

        with hooked(eager.get_submodule(LAYERS[name]), hook):
            wanted = generated(eager, 0, **WAYS[way])
        options = {"scale": 4.0, "steps": steps, "positions": positions}
        with steer(bended, vector, LAYERS[name], **options):
            same(generated(bended, 0, **WAYS[way]), wanted)
        assert not torch.equal(wanted[1][-1], plain[1][-1])
    assert bended.insertions == ()
    same(generated(bended, 0, **WAYS[way]), plain)


@pytest.mark.more
def test_a_position_of_the_prompt_is_not_taken_for_another_in_later_steps(family: Any) -> None:
    name, _, model = family
    bended = bt.BendedModule(model)
    vector = torch.ones(32)
    with (
        steer(bended, vector, LAYERS[name], positions=3),
        pytest.raises(InterjectionError, match="steps='prompt'"),
    ):
        generated(bended, 0)
    with steer(bended, vector, LAYERS[name], positions=3, steps="prompt"):
        generated(bended, 0)


def test_a_direction_is_found_in_a_language_model(family: Any) -> None:
    name, _, model = family
    batches = [{"input_ids": torch.randint(3, 99, (2, 6))} for _ in range(3)]
    others = [{"input_ids": torch.randint(3, 99, (2, 4))} for _ in range(2)]
    found = steering_vector(model, iter(batches), iter(others), LAYERS[name])
    rows = []
    layer = model.get_submodule(LAYERS[name])
    for given in (batches, others):
        kept: list[Tensor] = []
        with torch.no_grad(), hooked(layer, lambda m, a, o, kept=kept: kept.append(o[:, -1])):
            for batch in given:
                model(**batch)
        rows.append(torch.cat(kept).double().mean(0))
    torch.testing.assert_close(found.vector, (rows[0] - rows[1]).float())


def test_both_sets_begin_with_the_inputs_as_they_were_given() -> None:
    def model(x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x)
        return torch.relu(torch.stack(cache).sum(0))

    cache = [torch.ones(1, 2)]
    calls = [(torch.full((1, 2), value), cache) for value in (1.0, 3.0)]
    found = steering_vector(bt.BendedModule(model), *calls, "relu", position=None)
    assert found.vector.tolist() == [-2, -2]
    assert len(cache) == 1
