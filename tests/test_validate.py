"""Validating a log: each op is carried out again, and what is not true is found; and flops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.tape.tape import Ref
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.hf_models import MODELS, TinyModel
from tests.promise import bits, state
from tests.shares import some


def logged(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bt.Trace:
    return bt.trace(function, *args, save="all", **kwargs)


# What is true


@pytest.mark.parametrize("case", some(CASES, 6, start=4), ids=lambda case: case.name)
def test_the_log_of_every_corpus_model_is_true(case: Case) -> None:
    for inputs in case.paths.values():
        torch.manual_seed(1)
        model = case.make()
        args, kwargs = inputs()
        try:
            log = logged(model, *args, **kwargs)
        except Exception:
            continue  # a path on which the model raises: it has no log
        before = state(model), torch.get_rng_state().tolist(), bits([args, kwargs])
        found = log.validate()
        assert found, str(found)
        assert (state(model), torch.get_rng_state().tolist(), bits([args, kwargs])) == before


@pytest.mark.more
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("model", some(MODELS, 4), ids=lambda model: model.name)
def test_the_log_of_every_hugging_face_model_is_true(model: TinyModel, mode: Any) -> None:
    made = model.make()
    with mode():
        log = logged(made, **model.inputs())
    found = log.validate()
    assert found, str(found)
    assert found.ops >= 0.9 * sum(entry.kind == "op" for entry in log.layers)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.more
def test_the_log_of_a_training_step_is_true(name: str) -> None:
    made = next(model for model in MODELS if model.name == name)
    model = made.make().train()
    log = logged(model, **made.inputs())
    found = log.validate()
    assert found, str(found)
    assert not [label for label in found.skipped if "dropout" in label]


class Residual(nn.Module):
    """Convolutions, batch norm, an in-place relu and a sum, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        x = functional.relu_(self.bn2(self.conv2(y)).add_(x))
        x = functional.dropout(x.mean((2, 3)), 0.3, self.training)
        return self.fc(x)


@pytest.mark.parametrize("training", [True, False])
def test_the_log_of_a_resnet_is_true(training: bool) -> None:
    model = Residual().train(training)
    log = logged(model, torch.randn(2, 3, 16, 16))
    before = state(model)
    found = log.validate()
    assert found, str(found)
    assert found.skipped == {}
    assert found.ops == sum(entry.kind == "op" for entry in log.layers)
    assert state(model) == before


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, dropout=0.4, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(12, 5), nn.RNN(5, 3)
        self.lstm_cell, self.gru_cell = nn.LSTMCell(3, 4), nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        y, _ = self.gru(y)
        y, _ = self.rnn(y)
        h2, c2 = self.lstm_cell(y[0])
        for row in y.unbind(0):
            h2, c2 = self.lstm_cell(row, (h2, c2))
        return self.gru_cell(h2), h, c, c2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_the_log_of_recurrent_models_is_true(training: bool, mode: Any) -> None:
    model = Cells().train(training)
    with mode():
        log = logged(model, torch.randn(3, 7, 4))
    found = log.validate()
    assert found, str(found)
    assert found.skipped == {}


def in_place(x: Tensor) -> Tensor:
    y = (x * 2).relu_().add_(1)
    y.mul_(y)
    y[0] = y[1]
    y[:, 1:] += 1
    y[y > 3] = 0
    y[1, 0].fill_(7)
    y.t()[0].zero_()
    view = y.view(-1)
    y.sub_(1)
    torch.add(view, 1, out=view)
    return y + view.sum()


def shared_views(x: Tensor) -> Tensor:
    a = x * 1
    b, c = a.split(1)
    b.add_(1)
    d = a.view(-1)
    c.mul_(d[:1])
    a.data.add_(1)
    return a @ d[: a.shape[1]] + b.sum()


def draws(x: Tensor) -> Tensor:
    y = functional.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(3)
    y = functional.dropout(y, 0.5, inplace=True)
    y = y + torch.bernoulli(torch.sigmoid(y)) + x.new_empty(2, 3).uniform_().normal_()
    order = torch.randperm(2)
    noise = torch.distributions.Normal(0.0, 1.0).sample((2, 3))
    pick = torch.multinomial(y[order].softmax(-1), 1)
    return functional.gumbel_softmax(y) + noise + pick + functional.rrelu(y, training=True)


def uninitialised(x: Tensor) -> Tensor:
    y, z = torch.empty(2000), x.new_empty(2000)
    w = torch.empty_like(y)
    v = torch.empty_strided((10, 10), (1, 10))
    for each in (y, z, w, v):
        each.fill_(3)
    return y + z + w + v.sum() + x.sum()


def numbers(x: Tensor) -> Any:
    n = x.shape[0] * 2 + x.size(1)
    total = x.sum().item() / n
    values = x.flatten().tolist()
    return x * n + total + values[0] if total < max(values) else x


def cast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.T
        with torch.autocast("cpu", enabled=False):
            z = x @ x.T
        return (y + z).exp()


def several(x: Tensor) -> Tensor:
    values, where = x.sort(-1)
    low, high = x.aminmax()
    first, *rest = x.unbind(0)
    parts = torch.meshgrid(first, rest[0], indexing="ij")
    u, s, v = torch.linalg.svd(x)
    return values + where + low * high + parts[0].sum() + u.sum() + s[0] * v.sum()


MODELS_BY_HAND = {
    function.__name__: function
    for function in (in_place, shared_views, draws, uninitialised, numbers, cast, several)
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", MODELS_BY_HAND)
def test_a_log_is_true_however_values_come_about(name: str, graph: bool) -> None:
    x = torch.randn(2, 3).add_(1).requires_grad_(graph and name != "uninitialised")
    with torch.set_grad_enabled(graph and name not in ("in_place", "shared_views")):
        log = logged(MODELS_BY_HAND[name], x)
    before = torch.get_rng_state().tolist()
    found = log.validate()
    assert found, str(found)
    assert all("empty" in label for label in found.skipped), found.skipped
    assert torch.get_rng_state().tolist() == before


TEXTS: dict[str, Callable[[Tensor], str]] = {
    "f-string": lambda y: f"{y}",
    "str of a mean": lambda y: str(y.mean()),
    "repr": repr,
    "a wide one": lambda y: str(y[0].expand(12, 3)),
    "a long line": lambda y: repr(y.flatten().double()),
    "a leaf": lambda y: str(y.detach().requires_grad_()),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_what_requires_grad_are_true(name: str) -> None:
    lin, text = nn.Linear(3, 3), TEXTS[name]
    log = logged(lambda x: lin(x) + len(text(lin(x))), torch.randn(2, 3))
    found = log.validate()
    assert found, str(found)
    assert not found.skipped


def test_another_text_of_what_requires_grad_is_found() -> None:
    lin = nn.Linear(3, 3)
    log = logged(lambda x: lin(x) + len(str(lin(x))), torch.randn(2, 3))
    op = next(op for op in log.ops if type(op.meta) is str)
    assert "grad_fn" in op.meta
    op.meta = op.meta.replace(".", ",", 1)
    assert not log.validate()


class Data(nn.Module):
    """Writes through `.data`, of which torch does not tell."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(size))
        self.weight = nn.Parameter(torch.ones(size))
        self.alias = self.buffer.data


def copies_to_a_buffer(self: Any, x: Tensor) -> Tensor:
    before = self.buffer * x
    self.buffer.data.copy_(x)
    return before + self.buffer.exp()


def scales_a_weight(self: Any, x: Tensor) -> Tensor:
    before = self.weight * x
    self.weight.data.mul_(3).add_(x)
    return before + self.weight.exp()


def writes_an_index(self: Any, x: Tensor) -> Tensor:
    self.buffer.data[0] = x[0]
    return x + self.buffer.exp()


def replaces_a_weight(self: Any, x: Tensor) -> Tensor:
    self.weight.data = x * 2
    return x + self.weight.exp()


def writes_to_what_replaced_a_weight(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    self.weight.data = y
    y.add_(1)
    return x + self.weight.exp()


def writes_to_a_result(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.data.add_(x)
    return x + y.exp()


def reads_data_after_a_write(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    data = y.data
    y.add_(1)
    return x + data.exp()


def writes_through_an_alias_made_before(self: Any, x: Tensor) -> Tensor:
    before = self.buffer * x
    self.alias.add_(x)
    return before + self.buffer.exp()


def sets_a_source(self: Any, x: Tensor) -> Tensor:
    y, z = x * 2, torch.zeros(1)
    z.set_(y)
    y.add_(1)
    return x + z.exp()


DATA = (
    copies_to_a_buffer, scales_a_weight, writes_an_index, replaces_a_weight,
    writes_to_what_replaced_a_weight, writes_to_a_result, reads_data_after_a_write,
    writes_through_an_alias_made_before, sets_a_source,
)  # fmt: skip


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("how", DATA, ids=lambda how: how.__name__)
def test_writes_through_data_are_edges_and_true(how: Any, size: int) -> None:
    if how is writes_through_an_alias_made_before and size > 3:
        pytest.skip("of large buffers no copy is kept")
    model = type("Model", (Data,), {"forward": how})(size)
    with torch.no_grad():
        log = logged(model, torch.randn(size))
    found = log.validate()
    assert found, str(found)
    assert all("memory of another" in why for why in found.skipped.values()), found.skipped
    writer = [op for op in log.ops if op.writes][-1]
    assert (log.names[writer.index], "exp") in {(a, b) for a, b, *_ in log.graph.edges}
    assert next(e.label for e in log.entries if e.index == writer.index) in log["exp_1"].parents
    assert log["exp_1"].shape == log["output_1"].shape


def test_writes_to_an_argument_reach_another_one_in_the_same_memory() -> None:
    def model(x: Tensor, alias: Tensor) -> Tensor:
        alias.add_(1)
        return x.exp()

    x = torch.zeros(3)
    log = logged(model, x, x.data)
    assert log.validate(), str(log.validate())
    assert "add_1_2" in log["exp_1"].parents


def test_what_data_is_set_to_gives_its_shape() -> None:
    def model(x: Tensor) -> Tensor:
        z = torch.zeros(7)
        z.data = x * 2
        return z.exp()

    assert logged(model, torch.ones(3))["data_1"].shape == (3,)


def test_values_are_found_after_the_caller_and_the_optimizer_wrote_over_theirs() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3)
    log = logged(model, x)
    log.output.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    x.zero_()
    log.output.data.zero_()
    found = log.validate()
    assert found, str(found)
    assert found.skipped == {"linear_1_1": "it reads state that has changed since"}
    assert found.ops == 1


def test_the_log_of_a_model_that_was_made_in_inference_mode_is_true() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
        log = logged(model, torch.tensor([1, 2]))
    found = log.validate()
    assert found, str(found)


# Products of matrices give other bits where their operands lie otherwise in memory.
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("size", [17, 32, 100])
def test_values_are_carried_out_again_at_the_alignment_they_had(offset: int, size: int) -> None:
    memory = np.random.default_rng(0).normal(size=4 * size + 80).astype(np.float32)
    lin = nn.Linear(size, 9)
    flat = torch.randn(offset + 2 * size)
    weight = nn.Parameter(flat[offset:].view(2, size))

    def model(x: Tensor, given: Tensor) -> Any:
        y = (x * 2)[offset : offset + size].view(1, size)
        return lin(y), y @ y.T, y @ weight.T, given @ given.T, functional.linear(given, weight)

    given = torch.from_numpy(memory[offset : offset + 3 * size]).view(3, size)
    with torch.no_grad():
        log = logged(model, torch.randn(offset + size), given)
    found = log.validate()
    assert found, str(found)


def test_validating_twice_finds_the_same() -> None:
    log = logged(draws, torch.randn(2, 3))
    assert str(log.validate()) == str(log.validate())
    assert log.validate(seed=1).edges == log.validate().edges


# What is not true


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.lin(x))
        z = functional.dropout(y * 2, 0.5, training=True)
        return torch.tanh(z) + y


@pytest.fixture
def log() -> bt.Trace:
    torch.manual_seed(0)
    made = logged(Small(), torch.randn(8, 3))
    assert made.validate()
    names = "input_1_0 linear_1_1 sigmoid_1_2 mul_1_3 dropout_1_4 tanh_1_5 add_1_6 output_1_7"
    assert [entry.label for entry in made.layers] == names.split()
    return made


def op_of(log: bt.Trace, label: str) -> Any:
    index = log[label].index
    assert index is not None
    return log.ops[index]


def test_a_changed_activation_is_found(log: bt.Trace) -> None:
    log["mul_1"].tensor_contents[0, 0] += 1e-6
    found = log.validate()
    assert not found
    assert found.wrong == ["mul_1_3", "dropout_1_4"] or found.wrong == ["mul_1_3"]
    assert str(found).startswith("6 ops recomputed: wrong: mul_1_3")


def test_the_least_bit_of_an_activation_counts(log: bt.Trace) -> None:
    saved = log["tanh_1"].tensor_contents
    saved.view(torch.int32)[3, 1] ^= 1
    found = log.validate()
    assert found.wrong[0] == "tanh_1_5"


def test_an_activation_of_another_shape_is_found(log: bt.Trace) -> None:
    log["sigmoid_1"].tensor_contents.resize_(4, 3)
    found = log.validate()
    assert "sigmoid_1_2" in found.wrong
    assert "add_1_6" in found.wrong  # which cannot even be carried out


def test_an_edge_from_another_op_is_found(log: bt.Trace) -> None:
    op = op_of(log, "tanh_1")
    op.args = (Ref(op_of(log, "mul_1").index),)
    assert log.validate().wrong == ["tanh_1_5"]


def test_a_changed_argument_is_found(log: bt.Trace) -> None:
    op = op_of(log, "mul_1")
    op.args = (op.args[0], 3)
    assert log.validate().wrong == ["mul_1_3"]


def test_another_function_is_found(log: bt.Trace) -> None:
    op_of(log, "sigmoid_1").target = torch.tanh
    assert log.validate().wrong == ["sigmoid_1_2"]


def test_another_state_of_the_generator_is_found(log: bt.Trace) -> None:
    capture: Any = log._capture
    index = op_of(log, "dropout_1").index
    capture.random[index] = torch.Generator().manual_seed(99).get_state()
    assert log.validate().wrong == ["dropout_1_4"]


def test_draws_without_a_known_state_are_told(log: bt.Trace) -> None:
    capture: Any = log._capture
    del capture.random[op_of(log, "dropout_1").index]
    found = log.validate()
    assert found.skipped == {"dropout_1_4": "it draws random numbers in an unexpected way"}


def test_another_context_is_found() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    made = logged(model, torch.randn(3, 3))
    assert made.validate()
    plain = logged(lambda x: x @ x, torch.randn(3, 3))
    made_op, plain_op = op_of(made, "matmul_1"), op_of(plain, "matmul_1")
    made_op.context, plain_op.context = plain_op.context, made_op.context
    assert made.validate().wrong == ["matmul_1_1"]
    assert plain.validate().wrong == ["matmul_1_1"]


def test_a_changed_number_is_found() -> None:
    made = logged(lambda x: x * x.sum().item() * (x.shape[0] + 1), torch.ones(3))
    assert made.validate()
    op = next(op for op in made.ops if type(op.meta) is float)
    op.meta = 4.0
    assert made.validate().wrong[0] == "item_1"


def test_a_write_that_is_not_on_the_tape_is_found() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        y.view(-1).add_(1)
        return y.relu()

    made = logged(model, torch.ones(2, 3))
    assert made.validate()
    capture: Any = made._capture
    capture.reread.clear()
    assert made.validate().wrong == ["relu_1_4"]


# Edges


def idle(function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    found = logged(function, *args).validate()
    assert found, str(found)
    return found.idle


def test_edges_that_make_no_difference_are_told() -> None:
    x = torch.tensor([1.0, 2.0])
    assert idle(lambda x: torch.zeros_like(x * 2), x) == [("mul_1_1", "zeroslike_1_2")]
    assert idle(lambda x: torch.where(x > 0, x * 2, x * 3), x) == [("mul_2_3", "where_1_4")]
    assert idle(lambda x: (x * 2).fill_(3), x) == [("mul_1_1", "fill_1_2")]
    assert idle(lambda x: functional.dropout(x * 2, 1.0), x) == []  # 0.0 keeps the sign of a value
    assert idle(lambda x, y: (x * 2).expand_as(y * 1), x, x) == [("mul_2_2", "expandas_1_3")]


def test_edges_that_matter_are_not_told() -> None:
    x = torch.tensor([-1.0, -2.0])
    for model in (
        lambda x: x.relu(), lambda x: x.max(), lambda x: x.clamp(-1, 1), lambda x: x > 0,
        lambda x: x.argmax(), lambda x: x.round(), lambda x: ~(x > 0), lambda x: x.sort().indices,
    ):  # fmt: skip
        assert idle(model, x) == []


def test_an_edge_that_is_none_is_told() -> None:
    made = logged(lambda x: torch.where(x > 0, x, x * 3), torch.ones(3))
    assert made.validate().idle == [("mul_1_2", "where_1_3")]
    assert made.validate().edges == 5


# How it is told


def test_what_was_found_is_printed(log: bt.Trace) -> None:
    assert str(log.validate()) == "6 ops recomputed: bitwise equal\n7 edges tried"
    log["add_1"].tensor_contents.zero_()
    assert str(log.validate()) == "6 ops recomputed: wrong: add_1_6\n5 edges tried"


def test_idle_edges_and_what_was_left_out_are_printed() -> None:
    def model(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.zeros_like(x) + torch.rand(2, generator=generator)

    assert str(logged(model, torch.ones(2)).validate()) == (
        "2 ops recomputed: bitwise equal\n"
        "3 edges tried, 1 without effect: input_1_0 -> zeroslike_1_1\n"
        "not recomputed: rand_1_2 (it received an object)"
    )


def test_one_op_is_not_called_ops() -> None:
    assert str(logged(lambda x: x * 2, torch.ones(2)).validate()) == (
        "1 op recomputed: bitwise equal\n1 edge tried"
    )


@pytest.mark.parametrize(
    "options",
    [
        {}, {"save": "none"}, {"save": "mul_1"}, {"save": "all", "save_dtype": torch.float64},
        {"save": lambda entry: True}, {"save": "all", "save_device": "meta"},
    ],
)  # fmt: skip
def test_a_log_without_all_values_is_refused(options: dict[str, Any]) -> None:
    made = bt.trace(lambda x: x * 2, torch.ones(2), **options)
    with pytest.raises(InputError, match="needs all activations in memory, unchanged"):
        made.validate()


# Floating point operations


def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return int(counter.get_total_flops())


def total(log: bt.Trace) -> int:
    return sum(entry.flops or 0 for entry in log.layers)


def test_flops_by_hand() -> None:
    x = torch.ones(4, 3)
    log = bt.trace(nn.Linear(3, 5), x)
    assert log["linear_1"].flops == 2 * 4 * 3 * 5
    assert log["linear_1"].macs == 4 * 3 * 5
    assert log["input_1"].flops == log["output_1"].flops == 0
    image = torch.ones(2, 3, 8, 8)
    log = bt.trace(nn.Conv2d(3, 6, 3, padding=1, groups=3), image)
    assert log["conv2d_1"].flops == 2 * (2 * 8 * 8) * 6 * (3 // 3) * 3 * 3
    heads = [torch.ones(2, 4, 7, 8) for _ in range(3)]
    log = bt.trace(functional.scaled_dot_product_attention, *heads)
    assert log.layers[3].flops == 2 * 2 * (2 * 4 * 7 * 7 * 8)
    log = bt.trace(lambda x: (x * 2).relu() + torch.rand(4, 3), x)
    assert [entry.flops for entry in log.layers] == [0] * len(log.layers)
    log = bt.trace(lambda x: x.T @ x, x)
    assert log["matmul_1"].flops == 2 * 3 * 4 * 3


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() < 10:
            x = x + self.lin(x).abs() + 1
        return x


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Residual, (2, 3, 16, 16)), (Loop, (4, 3)), (lambda: nn.MultiheadAttention(8, 2), (5, 2, 8)),
     (lambda: nn.TransformerEncoderLayer(8, 2, 16), (5, 2, 8)),
     (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5))],
    ids=["residual", "loop", "attention", "encoder", "transposed"],
)  # fmt: skip
def test_flops_of_all_layers_are_those_of_the_model(make: Any, shape: tuple[int, ...]) -> None:
    model = make().train()
    x = torch.randn(shape)
    given = [x] * (3 if isinstance(model, nn.MultiheadAttention) else 1)
    log = bt.trace(model, *given)
    assert total(log) == counted(model, *given) > 0
    assert sum((entry.macs or 0) * 2 for entry in log.layers) == total(log)


def counts_attention() -> bool:
    """Whether torch's counter sees what fused attention computes on a CPU (since torch 2.15)."""
    x = torch.ones(1, 1, 2, 4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        nn.functional.scaled_dot_product_attention(x, x, x)
    return counter.get_total_flops() > 0


@pytest.mark.more
@pytest.mark.parametrize("model", some(MODELS, 4), ids=lambda model: model.name)
def test_flops_of_hugging_face_models_are_those_of_the_model(model: TinyModel) -> None:
    made = model.make()
    with torch.no_grad():
        log = bt.trace(made, **model.inputs())
        wanted = counted(made, **model.inputs())
    attention = [e for e in log.layers if e.layer_type == "scaleddotproductattention"]
    unseen = 0 if counts_attention() else sum(entry.flops or 0 for entry in attention)
    assert total(log) - unseen == wanted > 0
    for entry in attention:
        query, key, value = (log[label].shape for label in entry.parents[:3])
        count = 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])
        assert entry.flops == count


def test_flops_that_nobody_can_count_are_none() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    log = bt.trace(lambda x: Own.apply(x) + 1, torch.ones(2, 2))
    assert log["own_1"].flops is None
    assert log["own_1"].macs is None
    assert log["add_1"].flops == 0


def test_counting_runs_nothing_and_draws_nothing() -> None:
    model = Small()
    log = bt.trace(model, torch.randn(8, 3))
    before = torch.get_rng_state().tolist(), state(model)
    assert total(log) == 2 * 8 * 3 * 3
    assert (torch.get_rng_state().tolist(), state(model)) == before
