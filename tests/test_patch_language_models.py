"""Patches in language models: at attention, in the MLP, in the residual stream; and generating."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bendtrace.compat.graphpatch import PatchableGraph
from bendtrace.insert.patch_kinds import (
    AddPatch,
    CustomPatch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from tests.promise import bits, footprint, state
from tests.shares import some

pytest.importorskip("transformers", reason="needs the test extra")

from tests.hf_models import MODELS, VOCAB

Edit = Callable[[Tensor], Tensor]
WIDTH = 32


class ByHand(TorchFunctionMode):
    """Changes what the n-th call of a torch function in a forward gives.

    Additions count if they give something of the width of the residual stream.
    """

    def __init__(self, model: Any, edits: dict[tuple[str, int], Edit]) -> None:
        super().__init__()
        self.edits = edits
        self.counts: Counter[str] = Counter()
        self.hook = model.register_forward_pre_hook(lambda *_: self.counts.clear())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name != "add" or (isinstance(out, Tensor) and out.dim() == 3 and out.shape[-1] == WIDTH):
            edit = self.edits.get((name, self.counts[name]))
            self.counts[name] += 1
            return out if edit is None else edit(out)
        return out


@contextmanager
def by_hand(model: Any, edits: dict[tuple[str, int], Edit]) -> Iterator[None]:
    mode = ByHand(model, edits)
    try:
        with mode:
            yield
    finally:
        mode.hook.remove()


def make(name: str) -> Any:
    (model,) = (m for m in MODELS if m.name == name)
    made = model.make()
    made.set_attn_implementation("eager")
    return made


def set_to(index: Any, new: Any) -> Edit:
    def edit(value: Tensor) -> Tensor:
        made = value.clone()
        made[index] = new
        return made

    return edit


HEAD = (slice(None), 2)
LAST = (slice(None), -1)
STEER = torch.linspace(-1, 1, WIDTH)
# For each model: path, patch, and the call that is the same by hand.
PLACES: dict[str, dict[str, tuple[str, Any, tuple[str, int], Edit]]] = {
    "gpt2": {
        "attention": ("transformer.h_1.attn.softmax", ZeroPatch(slice=HEAD), ("softmax", 1),
                      set_to(HEAD, 0)),
        "mlp": ("transformer.h_0.mlp.act.tanh", AddPatch(value=0.5), ("tanh", 0),
                lambda x: x + 0.5),
        "residual": ("transformer.h_0.add", AddPatch(value=STEER), ("add", 1),
                     lambda x: x + STEER),
        "residual after the mlp": ("transformer.h_0.add_1", ReplacePatch(value=STEER, slice=LAST),
                                   ("add", 2), set_to(LAST, STEER)),
    },
    "llama": {
        "attention": ("model.layers_1.self_attn.softmax", ZeroPatch(slice=HEAD), ("softmax", 1),
                      set_to(HEAD, 0)),
        "mlp": ("model.layers_0.mlp.act_fn.silu", AddPatch(value=0.5), ("silu", 0),
                lambda x: x + 0.5),
        "residual": ("model.layers_0.add", AddPatch(value=STEER), ("add", 0),
                     lambda x: x + STEER),
        "residual after the mlp": ("model.layers_0.add_1", ReplacePatch(value=STEER, slice=LAST),
                                   ("add", 1), set_to(LAST, STEER)),
    },
}  # fmt: skip
CASES = [(name, place) for name in PLACES for place in PLACES[name]]


def prompt(batch: int = 1, length: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def logits_and_gradients(call: Any, model: Any, ids: Tensor) -> Any:
    model.zero_grad()
    out = call(ids, use_cache=False).logits
    out.log_softmax(-1)[..., 3].sum().backward()
    return bits([out, [parameter.grad for parameter in model.parameters()]])


@pytest.mark.more
@pytest.mark.parametrize(("name", "place"), some(CASES, 3))
def test_logits_and_gradients_are_those_of_a_change_by_hand(name: str, place: str) -> None:
    path, patch, call, edit = PLACES[name][place]
    eager, model = make(name), make(name)
    pg = PatchableGraph(model, prompt(), use_cache=False)
    batches = [prompt(), prompt(seed=1), prompt(2, 7)]
    plain = [logits_and_gradients(eager, eager, ids) for ids in batches]
    with by_hand(eager, {call: edit}):
        wanted = [logits_and_gradients(eager, eager, ids) for ids in batches]
    assert wanted != plain
    with pg.patch({path: patch}):
        for _ in range(3):
            replays = pg.stats.replays
            assert [logits_and_gradients(pg, model, ids) for ids in batches] == wanted
    assert pg.stats.replays == replays + len(batches)
    assert [logits_and_gradients(pg, model, ids) for ids in batches] == plain
    model.zero_grad()
    assert state(model) == state(make(name))


def generated(model: Any, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    out = model.generate(
        input_ids=prompt(), max_new_tokens=8, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return bits([out.sequences, out.logits, torch.get_rng_state()])


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 30},
    "without a cache": {"do_sample": False, "use_cache": False},
    "beams": {"do_sample": False, "num_beams": 2},
}


@pytest.mark.more
@pytest.mark.parametrize("way", some(WAYS, 3))
@pytest.mark.parametrize("name", PLACES)
def test_generating_under_a_patch_is_generating_with_a_change_by_hand(name: str, way: str) -> None:
    eager, model = make(name), make(name)
    pg = PatchableGraph(model, prompt())
    plain = [generated(eager, seed, **WAYS[way]) for seed in range(2)]
    for place in ("attention", "residual after the mlp"):
        path, patch, call, edit = PLACES[name][place]
        with by_hand(eager, {call: edit}):
            wanted = [generated(eager, seed, **WAYS[way]) for seed in range(2)]
        assert wanted != plain
        before = footprint()
        record = RecordPatch()
        with pg.patch({path: [patch, record]}):
            assert [generated(pg, seed, **WAYS[way]) for seed in range(2)] == wanted
        assert len(record.activations) == 16  # each step of both
        assert footprint() == before
    assert [generated(pg, seed, **WAYS[way]) for seed in range(2)] == plain
    assert state(model) == state(make(name))


@pytest.mark.more
@pytest.mark.parametrize("name", PLACES)
def test_a_token_can_be_forced_and_forbidden(name: str) -> None:
    pg = PatchableGraph(make(name), prompt())
    token = (slice(None), slice(None), 42)
    with pg.patch({"output|logits": [ZeroPatch(), ReplacePatch(value=1, slice=token)]}):
        forced = pg.generate(input_ids=prompt(), max_new_tokens=6, pad_token_id=0, do_sample=False)
    assert (forced[:, 5:] == 42).all()
    free = pg.generate(input_ids=prompt(), max_new_tokens=6, pad_token_id=0, do_sample=False)
    first = free[0, 5].item()
    never = ReplacePatch(value=-float("inf"), slice=(slice(None), slice(None), first))
    with pg.patch({"lm_head.output": never}):
        other = pg.generate(input_ids=prompt(), max_new_tokens=6, pad_token_id=0, do_sample=False)
    assert first not in other[0, 5:].tolist()


@pytest.mark.more
@pytest.mark.parametrize("name", some(PLACES, 2))
def test_the_cache_holds_patched_keys_as_by_hand(name: str) -> None:
    """A patch of the prompt's step alone is felt in later steps through the cache."""
    layer = "transformer.h_0" if name == "gpt2" else "model.layers_0"
    eager, model = make(name), make(name)
    pg = PatchableGraph(model, prompt())

    def first_only(x: Tensor) -> Tensor | None:
        return x + STEER if x.shape[1] > 1 else None

    eager_block = eager.get_submodule(layer.replace("_", "."))
    hook = eager_block.register_forward_hook(
        lambda module, args, out: out + STEER if out.shape[1] > 1 else out
    )
    wanted = generated(eager, 0, do_sample=False)
    hook.remove()
    with pg.patch({f"{layer}.output": CustomPatch(custom_op=first_only)}):
        for _ in range(2):
            assert generated(pg, 0, do_sample=False) == wanted
    assert generated(pg, 0, do_sample=False) == generated(eager, 0, do_sample=False) != wanted


@pytest.mark.parametrize("name", PLACES)
def test_the_residual_stream_of_one_prompt_is_patched_into_another(name: str) -> None:
    path = PLACES[name]["residual"][0]
    model = make(name)
    pg = PatchableGraph(model, prompt(), use_cache=False)
    clean = ProbePatch()
    with pg.patch({path: clean}):
        pg(prompt(seed=1), use_cache=False)
    position = (slice(None), 3)
    call = PLACES[name]["residual"][2]
    with by_hand(model, {call: set_to(position, clean.activation[position])}):
        wanted = model(prompt(seed=2), use_cache=False).logits
    restore = ReplacePatch(value=clean.activation[position], slice=position)
    with pg.patch({path: restore}):
        for _ in range(2):
            assert bits(pg(prompt(seed=2), use_cache=False).logits) == bits(wanted)
