"""Training through replays: after every step, everything is what eager training gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from tests.promise import bits, state
from tests.shares import some

STEPS = 20


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc(self.drop(y.flatten(1)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int = 2) -> None:
        super().__init__()
        self.rnn = kind(5, 6, num_layers=layers, dropout=0.2, bidirectional=True)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.fc(y[-1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 8), nn.Parameter(torch.zeros(6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.embed(ids) + self.position[: ids.shape[1]]
        y = self.encoder(y, src_key_padding_mask=ids == 0)
        return self.fc(y[:, 0])


class Halting(nn.Module):
    """Takes as many steps as its data ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.fc = nn.GRUCell(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, n = torch.zeros(x.shape[0], 6), 0
        while n < 3 and (n == 0 or x[0, 0] > 0):
            h = self.norm(F.dropout(self.cell(x, h), 0.2))
            n += 1
        return self.fc(h)


class Bag(nn.Module):
    """Its layers change their own weights and buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5, max_norm=1.0, padding_idx=0)
        self.bag = nn.EmbeddingBag(11, 5, mode="mean")
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
        self.norm = nn.InstanceNorm1d(5, track_running_stats=True)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.norm(self.embed(ids).transpose(1, 2)).mean(2) + self.bag(ids)
        return self.weight(F.alpha_dropout(self.spectral(y), 0.1, self.training))


class Skipping(nn.Module):
    """Leaves out some of its layers at random, so that some parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.7 or not self.training:
                x = x + F.rrelu(layer(x), training=self.training)
        return self.fc(x)


Data = Callable[[int], Tensor]


def _floats(*shape: int) -> Data:
    return lambda seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 11, (4, 6), generator=generator)
    ids[:, 4:] = 0
    return ids


MODELS: dict[str, tuple[Callable[[], nn.Module], Data]] = {
    "cnn": (Cnn, _floats(4, 1, 6, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), _floats(7, 4, 5)),
    "gru": (lambda: Recurrent(nn.GRU), _floats(7, 4, 5)),
    "transformer": (Transformer, _ids),
    "halting": (Halting, _floats(4, 5)),
    "bag": (Bag, _ids),
    "skipping": (Skipping, _floats(4, 5)),
}

Parameters = Any
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


def train(
    make: Callable[[], nn.Module],
    data: Data,
    optimize: Callable[[Parameters], torch.optim.Optimizer] = OPTIMIZERS["sgd"],
    *,
    bent: Callable[[nn.Module], nn.Module] | None = None,
    clip: float | None = None,
    every: int = 1,
    to_none: bool = True,
    schedule: bool = False,
    autocast: bool = False,
    scaled: bool = False,
    watch: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> tuple[list[Any], nn.Module]:
    """Train for some steps and return the bits of everything after each, and what was called.

    Args:
        make: builds the model.
        data: gives the inputs of a step.
        optimize: makes the optimizer.
        bent: wraps the model in what is called in its place.
        clip: the largest norm of the gradients.
        every: steps over which gradients are accumulated.
        to_none: how gradients are reset.
        schedule: whether the learning rate changes.
        autocast: whether the model is called under autocast.
        scaled: whether the loss is scaled.
        watch: is called before each step.
    """
    torch.manual_seed(0)
    model = make()
    called = model if bent is None else bent(model)
    optimizer = optimize(called.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4, enabled=scaled)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if schedule else None
    log = []
    for step in range(STEPS):
        watch(step, called)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = called(data(step))
            target = torch.arange(out.shape[0]) % out.shape[1]
            loss = F.cross_entropy(out, target)
        scaler.scale(loss / every).backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if (step + 1) % every == 0:
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(called.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad(set_to_none=to_none)
        held = optimizer.state_dict()
        log.append((bits([out, loss, gradients, held, torch.get_rng_state()]), state(model)))
    return log, called


def same_training(make: Callable[[], nn.Module], data: Data, **options: Any) -> bt.BendedModule:
    """Train in eager and through a `BendedModule`; all steps but three have to be replays."""
    wanted, _ = train(make, data, **options)
    given, bended = train(make, data, bent=bt.BendedModule, **options)
    for step, (here, there) in enumerate(zip(given, wanted, strict=True)):
        assert here[0] == there[0], f"step {step}: other output, gradients, optimizer or RNG"
        assert here[1] == there[1], f"step {step}: other parameters, buffers or attributes"
    assert bended.stats.live == 0, bended.why_live
    assert bended.stats.traces <= 4, bended.last_mismatch
    assert bended.stats.replays >= STEPS - 4 + (bended.stats.traces < 4), bended.stats
    return bended


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", some(MODELS, 3))
def test_twenty_steps_are_those_of_eager(name: str, optimizer: str) -> None:
    make, data = MODELS[name]
    same_training(make, data, optimize=OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.1}, {"every": 4}, {"to_none": False}, {"schedule": True},
        {"clip": 0.5, "every": 2, "to_none": False, "schedule": True},
        {"autocast": True}, {"autocast": True, "scaled": True, "clip": 1.0},
    ],
    ids=lambda options: " ".join(options),
)  # fmt: skip
@pytest.mark.parametrize("name", ["cnn", "halting"])
def test_clipping_accumulation_and_schedules(name: str, options: dict[str, Any]) -> None:
    make, data = MODELS[name]
    same_training(make, data, **options)


@pytest.mark.more
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_evaluation_between_the_steps(name: str) -> None:
    make, data = MODELS[name]
    results: dict[bool, list[Any]] = {False: [], True: []}

    def watch(step: int, called: nn.Module) -> None:
        if step % 4 == 3:
            called.eval()
            with torch.no_grad():
                results[isinstance(called, bt.BendedModule)].append(bits(called(data(-step))))
            called.train()

    wanted, _ = train(make, data, watch=watch)
    given, bended = train(make, data, bent=bt.BendedModule, watch=watch)
    assert given == wanted
    assert results[False] == results[True] != []
    assert bended.stats.replays >= STEPS + 5 - 4, bended.last_mismatch


def test_a_batch_of_another_size_at_the_end_of_each_epoch() -> None:
    def data(seed: int) -> Tensor:
        return _floats(2 if seed % 5 == 4 else 4, 1, 6, 6)(seed)

    bended = same_training(Cnn, data)
    assert bended.stats.traces == 1


def test_layers_frozen_and_released_on_the_way() -> None:
    def watch(step: int, called: nn.Module) -> None:
        if step % 5 == 0:
            called.conv.requires_grad_(step % 10 == 0)

    wanted, _ = train(Cnn, MODELS["cnn"][1], watch=watch)
    given, bended = train(Cnn, MODELS["cnn"][1], bent=bt.BendedModule, watch=watch)
    assert given == wanted
    assert bended.stats.replays >= STEPS - 3


def test_a_bended_layer_inside_a_model_that_is_trained() -> None:
    make, data = MODELS["cnn"]

    def bend_a_layer(model: nn.Module) -> nn.Module:
        model.norm = bt.BendedModule(model.norm)
        return model

    torch.manual_seed(0)
    wanted, _ = train(make, data)
    given, model = train(make, data, bent=bend_a_layer)
    assert [entry[0] for entry in given] == [entry[0] for entry in wanted]
    assert model.norm.stats.replays >= STEPS - 3


def test_an_optimizer_that_calls_the_model_itself() -> None:
    """LBFGS evaluates a closure several times in one step."""
    make, data = MODELS["halting"]
    results = []
    for bend in (lambda model: model, bt.BendedModule):
        torch.manual_seed(0)
        model = make()
        called = bend(model)
        optimizer = torch.optim.LBFGS(called.parameters(), 0.1, max_iter=4, history_size=3)
        x = data(0)

        def closure(called: Any = called, optimizer: Any = optimizer, x: Any = x) -> Tensor:
            optimizer.zero_grad()
            loss = called(x).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(5)]
        results.append((bits(losses), state(model), bits(optimizer.state_dict())))
    assert results[0] == results[1]
    assert called.stats.replays >= 15


def test_averaged_and_copied_models() -> None:
    make, data = MODELS["cnn"]
    results: list[Any] = []
    for bend in (lambda model: model, bt.BendedModule):
        averaged: list[Any] = []

        def watch(step: int, called: nn.Module, averaged: list[Any] = averaged) -> None:
            if not averaged:
                averaged.append(torch.optim.swa_utils.AveragedModel(called))
            averaged[0].update_parameters(called)

        train(make, data, bent=bend, watch=watch)
        torch.optim.swa_utils.update_bn([data(k) for k in range(3)], averaged[0])
        results.append(bits(list(averaged[0].parameters()) + list(averaged[0].buffers())))
        results.append(bits(averaged[0].eval()(data(0))))
    assert results[:2] == results[2:]


def test_gradients_that_are_used_as_soon_as_they_are_there() -> None:
    make, data = MODELS["cnn"]
    results = []
    for bend in (lambda model: model, bt.BendedModule):
        torch.manual_seed(0)
        model = make()
        called = bend(model)
        seen: list[Any] = []
        for parameter in called.parameters():

            def step(parameter: Tensor, seen: list[Any] = seen) -> None:
                seen.append(parameter.shape)
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        for k in range(6):
            called(data(k)).square().mean().backward()
        results.append((bits(seen), state(model)))
    assert results[0] == results[1]
    assert called.stats.replays == 5


def test_the_optimizer_may_hold_the_parameters_of_either() -> None:
    model = Cnn()
    bended = bt.BendedModule(model)
    pairs = zip(bended.named_parameters(), model.named_parameters(), strict=True)
    assert all(name == there and p is own for (name, p), (there, own) in pairs)


# Gradients in other ways


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.fc(x))
        return self.out(F.dropout(y, 0.2)).square() if x.shape[0] < 9 else y


def _penalty(model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient.norm(dim=1) - 1).square().mean().backward()
    return gradient, x.grad


def _grad_of_the_output(model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_()
    out = model(x)
    return torch.autograd.grad(out, [x, *model.parameters()], torch.ones_like(out))


def _retained(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    return first


def _two_outputs_one_backward(model: nn.Module, x: Tensor) -> Any:
    (model(x).mean() + model(x * 2).sum()).backward()
    return x


def _third_derivative(model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_()
    value = model(x).sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        value = gradient.pow(3).sum()
    value.backward()
    return x.grad


def _hooks_on_tensors(model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_()
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    handles = [p.register_hook(lambda g: g * 2) for p in model.parameters()]
    out = model(x)
    out.register_hook(lambda g: g + 1)
    out.retain_grad()
    out.sum().backward()
    for handle in handles:
        handle.remove()
    return seen, out.grad


def _under_anomaly_detection(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        model(x).sum().backward()
    return x


def _anew_under_checkpoint(model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    return x.grad


def _anew_under_reentrant_checkpoint(model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_()
    checkpoint(model, x, use_reentrant=True).sum().backward()
    return x.grad


def _jacobian(model: nn.Module, x: Tensor) -> Any:
    return torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    "way",
    [
        _penalty, _grad_of_the_output, _retained, _two_outputs_one_backward, _third_derivative,
        _hooks_on_tensors, _under_anomaly_detection, _anew_under_checkpoint,
        _anew_under_reentrant_checkpoint, _jacobian,
    ],
    ids=lambda way: way.__name__.strip("_"),
)  # fmt: skip
def test_gradients_taken_in_other_ways(way: Callable[[nn.Module, Tensor], Any]) -> None:
    eager = Smooth()
    bended = bt.BendedModule(copy.deepcopy(eager))
    for step in range(5):
        results = []
        for model in (eager, bended):
            torch.manual_seed(step)
            value = way(model, _floats(4, 3)(step))
            results.append(bits([value, torch.get_rng_state()]))
            results[-1] = results[-1], bits([p.grad for p in model.parameters()])
        assert results[0] == results[1], f"step {step}"
    assert bended.stats.replays >= 3, (bended.stats, bended.last_mismatch, bended.why_live)
    assert bended.stats.live == 0


# Gradient checkpointing inside the model


class Checkpointed(nn.Module):
    """The way back runs the blocks again: their norms are updated twice."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm, self.fc = nn.BatchNorm1d(5), nn.Linear(5, 3)

    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.norm(block(x))), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for block in self.blocks:
            y = checkpoint(self.block, block, y, use_reentrant=self.use_reentrant)
        return self.fc(y)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing_inside_the_model(use_reentrant: bool) -> None:
    """Right whether replayed or live; and if live, it says where."""
    make, data = (lambda: Checkpointed(use_reentrant)), _floats(4, 5)
    wanted, _ = train(make, data)
    given, bended = train(make, data, bent=bt.BendedModule)
    assert given == wanted
    stats = bended.stats
    assert stats.replays + stats.live >= STEPS - 3, (stats, bended.last_mismatch)
    if stats.live:
        assert any("test_training.py" in reason for reason in bended.why_live), bended.why_live


@pytest.mark.more
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing_around_a_bended_module(use_reentrant: bool) -> None:
    class Around(nn.Module):
        def __init__(self, bend: Callable[[nn.Module], nn.Module]) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(5, 5), bend(Halting())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=use_reentrant)

    data = _floats(4, 5)
    wanted, _ = train(lambda: Around(lambda model: model), data)
    given, around = train(lambda: Around(bt.BendedModule), data)
    assert [entry[0] for entry in given] == [entry[0] for entry in wanted]
    # Each step runs the layer again on the way back, though not always to its end.
    assert around.inner.stats.replays >= (2 * STEPS - 4 if use_reentrant else STEPS - 3)
    assert around.inner.stats.live == 0
