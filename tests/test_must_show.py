"""What interventions are for: each one on a model that it is hard on, against the same by hand.

The models by hand take the edits in their own Python, between one line and the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import bendtrace as bt
from bendtrace.insert.activations import get_activations
from bendtrace.insert.interjection import Interjection, NodePass
from bendtrace.insert.resume_point import from_activations
from tests.hf_models import MODELS as LANGUAGE_MODELS
from tests.hf_models import VOCAB
from tests.promise import bits, footprint, state
from tests.shares import some

# Which of its sums is `add` depends on how sure an early exit is; all its runs go on first.
pytestmark = pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")

Edit = Callable[[Tensor], Tensor]
Edits = dict[str, Edit]
WIDTH = 4


class Experts(nn.Module):
    """A mixture of experts, each called in a loop on the rows that are routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.router(x), dim=-1)
        top, route = weights.max(-1)
        out = x
        for e, expert in enumerate(self.experts):
            idx = (route == e).nonzero().squeeze(-1)
            if idx.numel() == 0:
                continue
            y = expert(x[idx]) * top[idx].unsqueeze(-1)
            out = out.index_add(0, idx, y)
        return self.head(F.silu(out))

    def by_hand(self, x: Tensor, edits: Edits) -> Tensor:
        router = changed(edits, "router", self.router(x))
        weights = changed(edits, "softmax", F.softmax(router, dim=-1))
        top, route = weights.max(-1)
        out = x
        for e, expert in enumerate(self.experts):
            idx = (route == e).nonzero().squeeze(-1)
            if idx.numel() == 0:
                continue
            hidden = changed(edits, f"experts_{e}.sub_1", expert[1](expert[0](x[idx])))
            out = out.index_add(0, idx, expert[2](hidden) * top[idx].unsqueeze(-1))
        return self.head(changed(edits, "silu", F.silu(out)))


class EarlyExit(nn.Module):
    """Thinks until it is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = 0
        while True:
            p = F.softmax(self.head(x), dim=-1)
            if p.max() > 0.75 or steps == 5:
                return p.log() / (steps + 1) + x[:, 1:]
            x = x + torch.tanh(self.step(x))
            steps += 1

    def by_hand(self, x: Tensor, edits: Edits) -> Tensor:
        steps = 0
        while True:
            p = changed(edits, "softmax", F.softmax(changed(edits, "head", self.head(x)), dim=-1))
            if p.max() > 0.75 or steps == 5:
                return p.log() / (steps + 1) + x[:, 1:]
            tanh = changed(edits, "tanh", torch.tanh(changed(edits, "step", self.step(x))))
            x = changed(edits, "add", x + tanh)
            steps += 1


def changed(edits: Edits, place: str, value: Tensor) -> Tensor:
    return edits[place](value) if place in edits else value


MODELS: dict[str, Any] = {"experts": Experts, "early exit": EarlyExit}
# The nodes of each model that are worked on, functions of torch among them.
PLACES = {
    "experts": ["softmax", "router", "silu", "experts_1.sub_1"],
    "early exit": ["softmax", "head", "step", "tanh", "add"],
}
EVERYWHERE = [(name, place) for name, places in PLACES.items() for place in places]


def pair(name: str) -> tuple[Any, bt.BendedModule]:
    """Return two models that are the same, the second one wrapped and called once."""
    torch.manual_seed(0)
    eager = MODELS[name]()
    torch.manual_seed(0)
    bended = bt.BendedModule(MODELS[name]())
    bended(rows().requires_grad_())
    return eager, bended


def rows(seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def with_gradients(
    call: Callable[..., Tensor], model: nn.Module, x: Tensor, *args: Any, backward: bool = False
) -> Any:
    """Return the bits of the output, and of the gradients to the input and all parameters."""
    x = x.clone().requires_grad_()
    output = call(x, *args)
    wanted = [x, *model.parameters()]
    if not backward:
        found = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        return bits([output, found])
    output.square().sum().backward()
    gradients = [tensor.grad for tensor in wanted]
    model.zero_grad()
    return bits([output, gradients])


def agree(eager: Any, bended: bt.BendedModule, x: Tensor, edits: Edits) -> None:
    """The wrapped model with what is inserted does what the one changed by hand does."""
    wanted = with_gradients(eager.by_hand, eager, x, edits)
    assert with_gradients(bended, bended.model, x) == wanted
    assert state(bended.model) == state(eager)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_by_hand_are_the_models(name: str) -> None:
    eager, bended = pair(name)
    for seed in range(6):
        agree(eager, bended, rows(seed), {})
        assert with_gradients(eager, eager, rows(seed)) == with_gradients(
            eager.by_hand, eager, rows(seed), {}
        )
    assert bended.stats.traces > 2  # different inputs take different paths


@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_ablation(name: str, place: str) -> None:
    eager, bended = pair(name)
    plain = [with_gradients(eager, eager, rows(seed)) for seed in range(6)]
    ablated: Edits = {place: lambda value: value * 0}
    with bended.interject(place, ablated[place]) as handle:
        for _ in range(2):
            for seed in range(6):
                agree(eager, bended, rows(seed), ablated)
        replays = bended.stats.replays
        for seed in range(6):
            agree(eager, bended, rows(seed), ablated)
        assert bended.stats.replays == replays + 6
        assert handle.report().changed
    assert [with_gradients(bended, bended.model, rows(seed)) for seed in range(6)] == plain
    assert bended.stats.live == 0


# How much of the steering leaves each model on its path, and how much does not.
STEERED = [
    ("experts", "router", 0.01, 30.0),
    ("experts", "softmax", 0.001, 5.0),
    ("early exit", "head", 0.001, 30.0),
    ("early exit", "add", 0.001, 50.0),
]


@pytest.mark.parametrize(("name", "place", "little", "much"), STEERED)
def test_steering_with_and_without_a_retrace(
    name: str, place: str, little: float, much: float
) -> None:
    eager, bended = pair(name)
    x, strength = rows(), 0.0

    def steer(value: Tensor) -> Tensor:
        return value + strength * (torch.arange(value.shape[-1]) == 0)

    with bended.interject(place, steer):
        agree(eager, bended, x, {place: steer})
        before = Counter(vars(bended.stats))
        strength = little
        agree(eager, bended, x, {place: steer})
        assert Counter(vars(bended.stats)) - before == {"replays": 1}
        strength = much  # leads elsewhere: from there on it is traced, with the steering
        agree(eager, bended, x, {place: steer})
        new = {"replays": 1, "traces": 1, "retraces": 1, "resumes": 1}
        assert Counter(vars(bended.stats)) - before == new
        for amount in (much, little, 0.0, much):  # both paths are known by now
            strength = amount
            agree(eager, bended, x, {place: steer})
        assert Counter(vars(bended.stats)) - before == {**new, "replays": 5}
    agree(eager, bended, x, {})  # without it, on the path that was known before
    assert Counter(vars(bended.stats)) - before == {**new, "replays": 6}


@pytest.mark.parametrize(
    ("name", "place", "diverges"),
    [
        ("experts", "silu", False), ("experts", "softmax", True), ("experts", "router", True),
        ("early exit", "tanh", True), ("early exit", "softmax", True), ("early exit", "head", True),
    ],
)  # fmt: skip
def test_activation_patching(name: str, place: str, diverges: bool) -> None:
    """What nodes gave for one input takes the place of what they give for another one."""
    eager, bended = pair(name)
    clean, corrupted = rows(7), rows()
    patch: dict[int, Tensor] = {}
    found = get_activations(bended, place, (clean,))
    patch.update(enumerate(found.passes(place)))

    def restored(value: Tensor, at: NodePass) -> Tensor | None:
        return patch.get(at.number)

    def restored_by_hand() -> Edits:
        numbers = iter(range(9))
        return {place: lambda value: patch.get(next(numbers), value)}

    with bended.interject(place, restored):
        own = get_activations(bended, place, (corrupted,), bended=False)
        kept, patch = patch, dict(enumerate(own.passes(place)))
        agree(eager, bended, corrupted, restored_by_hand())  # with its own values, on its own path
        before, patch = Counter(vars(bended.stats)), kept
        agree(eager, bended, corrupted, restored_by_hand())
        new = {"traces": 1, "retraces": 1, "resumes": 1} if diverges else {"replays": 1}
        assert Counter(vars(bended.stats)) - before == new
        agree(eager, bended, corrupted, restored_by_hand())
        assert bended.stats.replays == before["replays"] + 2 - diverges
    agree(eager, bended, corrupted, {})


class Gradients(Interjection):
    """Keeps the gradients that went through each pass of a node."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.kept: dict[int, Any] = {}

    def backward(
        self, at: NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        self.kept[at.number] = grad_input, grad_output
        return None if self.scale == 1 else tuple(g * self.scale for g in grad_input)


class ByHand:
    """The gradients at a softmax, kept by a model that is changed by hand."""

    def __init__(self, before: str, steer: Edit, scale: float) -> None:
        self.edits: Edits = {before: self.given, "softmax": self.gave}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.steer = steer
        self.scale = scale

    def given(self, value: Tensor) -> Tensor:
        # An alias, for what goes through the softmax alone, apart from other uses of the tensor.
        alias = self.steer(value).view(value.shape)
        if self.scale != 1:
            alias.register_hook(lambda gradient: gradient * self.scale)
        alias.retain_grad()
        self.inputs.append(alias)
        return alias

    def gave(self, value: Tensor) -> Tensor:
        value.retain_grad()
        self.outputs.append(value)
        return value


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_capture_at_a_function_of_torch(name: str, scale: float) -> None:
    eager, bended = pair(name)
    before = {"experts": "router", "early exit": "head"}[name]
    strengths = iter([(0.0, 0), (0.001, 0), (30.0, 1), (30.0, 1)])
    strength, resumes = 0.0, 0

    def steer(value: Tensor) -> Tensor:
        return value + strength * (torch.arange(3) == 0)

    capture = Gradients(scale)
    with bended.interject(before, steer), bended.interject("softmax", capture):
        while (following := next(strengths, None)) is not None:
            strength, resumes = following
            hand = ByHand(before, steer, scale)
            capture.kept.clear()
            wanted = with_gradients(eager.by_hand, eager, rows(), hand.edits, backward=True)
            assert with_gradients(bended, bended.model, rows(), backward=True) == wanted
            # Where nothing but a branch used what the softmax gave, no gradient came by.
            came_by = [i for i, output in enumerate(hand.outputs) if output.grad is not None]
            assert sorted(capture.kept) == came_by
            for number, (grad_input, grad_output) in capture.kept.items():
                assert bits(grad_output) == bits((hand.outputs[number].grad,))
                scaled = tuple(gradient * scale for gradient in grad_input)
                assert bits(scaled) == bits((hand.inputs[number].grad,))
            assert bended.stats.resumes == resumes


@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_the_rest_from_a_patched_activation(name: str, place: str) -> None:
    eager, bended = pair(name)
    for seed in range(4):
        found = get_activations(bended, place, (rows(seed),))
        for path, own in found.items():
            number = int(path.partition(":")[2] or 1) - 1
            for scale in (1.0, 0.9, 20.0):
                value = (own * scale).requires_grad_()
                passes: list[Tensor] = []

                def given(
                    own: Tensor, passes: Any = passes, n: int = number, value: Tensor = value
                ) -> Tensor:
                    passes.append(own)
                    return value if len(passes) == n + 1 else own

                wanted = eager.by_hand(rows(seed), {place: given})
                for _ in range(2):
                    output = from_activations(bended, {path: value}, (rows(seed),))
                    assert bits(output) == bits(wanted)
                    gradients = [
                        torch.autograd.grad(o.sum(), value, retain_graph=True, allow_unused=True)
                        for o in (output, wanted)
                    ]
                    assert bits(gradients[0]) == bits(gradients[1])
    assert bended.stats.live == 0


# Language models


class Calls(TorchFunctionMode):
    """Hands what some functions of torch give to an edit: by hand, in a model one has not written.

    Args:
        edits: by the name of the function, and the number of its call in a forward. Of additions
            those count that give something of the width of the residual stream.
    """

    def __init__(self, edits: dict[tuple[str, int], Edit]) -> None:
        super().__init__()
        self.edits = edits
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "add" and not (isinstance(out, Tensor) and out.shape[-1:] == (32,)):
            return out
        edit = self.edits.get((name, self.counts[name]))
        self.counts[name] += 1
        return out if edit is None else edit(out)


@contextmanager
def by_hand(model: nn.Module, edits: dict[tuple[str, int], Edit]) -> Iterator[None]:
    calls = Calls(edits)
    hook = model.register_forward_pre_hook(lambda *_: calls.counts.clear())
    try:
        with calls:
            yield
    finally:
        hook.remove()


# By model and place: the node, and the function and call of it that are the same by hand.
NODES: dict[str, dict[str, tuple[str, tuple[str, int]]]] = {
    "gpt2": {
        "attention": ("transformer.h_1.attn.softmax", ("softmax", 1)),
        "mlp": ("transformer.h_0.mlp.act.tanh", ("tanh", 0)),
        "residual": ("transformer.h_0.add", ("add", 1)),
        "block": ("transformer.h_0.add_1", ("add", 2)),
    },
    "llama": {
        "attention": ("model.layers_1.self_attn.softmax", ("softmax", 1)),
        "mlp": ("model.layers_0.mlp.act_fn.silu", ("silu", 0)),
        "residual": ("model.layers_0.add", ("add", 0)),
        "block": ("model.layers_0.add_1", ("add", 1)),
    },
}
LANGUAGE = [(name, place) for name, places in NODES.items() for place in places]


def language_model(name: str) -> Any:
    pytest.importorskip("transformers", reason="needs the test extra")
    (found,) = (model for model in LANGUAGE_MODELS if model.name == name)
    model = found.make()
    model.set_attn_implementation("eager")
    return model


def tokens(batch: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def logits(call: Any, model: nn.Module, ids: Tensor) -> Any:
    """Return the bits of the logits, and of the gradients to all parameters."""
    out = call(ids, use_cache=False).logits
    out.log_softmax(-1)[..., 3].sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return bits([out, gradients])


def interventions(shape: torch.Size) -> dict[str, Edit]:
    """Return what can be done to a value of a shape."""
    other = torch.rand(shape, generator=torch.Generator().manual_seed(5))
    direction = torch.linspace(-1, 1, shape[-1])

    def ablated(value: Tensor) -> Tensor:  # a head, a position
        kept = torch.ones_like(value)
        kept[:, 1] = 0
        return value * kept

    return {
        "patching": lambda value: other,
        "ablation": ablated,
        "steering": lambda value: value + 3 * direction,
    }


@pytest.mark.more
@pytest.mark.parametrize("what", ["patching", "ablation", "steering"])
@pytest.mark.parametrize(("name", "place"), some(LANGUAGE, 3))
def test_interventions_in_language_models(name: str, place: str, what: str) -> None:
    eager, model = language_model(name), language_model(name)
    bended, ids = bt.BendedModule(model), tokens()
    node, call = NODES[name][place]
    plain = logits(bended, model, ids)
    assert plain == logits(eager, eager, ids)
    found = get_activations(bended, node, (ids,), {"use_cache": False})
    edit = interventions(found[node].shape)[what]
    with by_hand(eager, {call: edit}):
        wanted = logits(eager, eager, ids)
    assert wanted != plain
    with bended.interject(node, edit):
        is_alike = what != "patching"  # with a tensor that does not require grad
        for again in range(2):
            before = bended.stats.replays
            assert logits(bended, model, ids) == wanted
            assert bended.stats.replays == before + (again or is_alike)
    assert logits(bended, model, ids) == plain
    assert bended.stats.traces == 2 - is_alike
    # The same, but for what comes before.
    out = from_activations(bended, {node: edit(found[node])}, (ids,), {"use_cache": False})
    with by_hand(eager, {call: edit}):
        assert bits(out.logits) == bits(eager(ids, use_cache=False).logits)
    assert state(model) == state(eager)


@pytest.mark.parametrize(("name", "place"), some(LANGUAGE, 3, start=1))
def test_gradient_capture_in_language_models(name: str, place: str) -> None:
    eager, model = language_model(name), language_model(name)
    bended, ids = bt.BendedModule(model), tokens()
    node, call = NODES[name][place]
    gave: list[Tensor] = []

    def noted(value: Tensor) -> Tensor:
        gave.append(value)
        value.retain_grad()
        return value

    with by_hand(eager, {call: noted}):
        wanted = logits(eager, eager, ids)
    capture = Gradients()
    with bended.interject(node, capture):
        for _ in range(2):
            capture.kept.clear()
            assert logits(bended, model, ids) == wanted
            (_, grad_output) = capture.kept[0]
            assert bits(grad_output) == bits((gave[0].grad,))


def generated(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    out = model.generate(
        input_ids=tokens(1), max_new_tokens=6, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return bits([out.sequences, out.logits, torch.get_rng_state()])


@pytest.mark.all
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 20}])
@pytest.mark.parametrize(("name", "place"), some(LANGUAGE, 4))
def test_generating_with_steering_is_generating_with_a_change_by_hand(
    name: str, place: str, options: dict[str, Any]
) -> None:
    eager, model = language_model(name), language_model(name)
    bended = bt.BendedModule(model)
    node, call = NODES[name][place]

    def steer(value: Tensor) -> Tensor:
        return value * torch.linspace(0, 2, value.shape[-1])

    plain = generated(bended, **options)
    assert plain == generated(eager, **options)
    with by_hand(eager, {call: steer}):
        wanted = generated(eager, **options)
    assert wanted != plain
    before = footprint()
    with bended.interject(node, steer) as handle:
        for _ in range(2):
            replays = bended.stats.replays
            assert generated(bended, **options) == wanted
        assert handle.report().fired == 12
    assert bended.stats.replays == replays + 6
    assert footprint() == before
    assert generated(bended, **options) == plain
    assert state(model) == state(eager)


@pytest.mark.parametrize("name", NODES)
def test_the_rest_of_a_language_model_is_its_remaining_blocks(name: str) -> None:
    model = language_model(name)
    bended, ids = bt.BendedModule(model), tokens()
    bended(ids, use_cache=False)
    first, body, blocks = {
        "gpt2": ("transformer.h_0", "transformer", "h"),
        "llama": ("model.layers_0", "model", "layers"),
    }[name]
    residual = torch.randn(2, 6, 32, requires_grad=True)

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return residual

    block = getattr(model.get_submodule(body), blocks)[0]
    hook = block.register_forward_hook(cut)
    wanted = model(ids, use_cache=False).logits
    hook.remove()
    given = from_activations(bended, {first: residual}, (ids,), {"use_cache": False}).logits
    assert bits(given) == bits(wanted)
    gradients = [torch.autograd.grad(out.sum(), residual) for out in (given, wanted)]
    assert bits(gradients[0]) == bits(gradients[1])
    # Nothing of the first block is carried out: its weights get no gradient.
    used = torch.autograd.grad(
        from_activations(bended, {first: residual}, (ids,), {"use_cache": False}).logits.sum(),
        list(block.parameters()), allow_unused=True,
    )  # fmt: skip
    assert used == (None,) * len(used)
    assert (bended.stats.traces, bended.stats.live) == (1, 0)
