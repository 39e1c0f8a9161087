"""A backward pass is recorded as torch runs it, bit for bit, with the op each node belongs to."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from bendtrace.debug.backward import BackwardNode, BackwardPass, _PassHooks
from bendtrace.python.compare import same_bits


class Reader(nn.Module):
    """A loop whose passes branch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 4)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            if c.norm() > 0.5:
                c = torch.tanh(c)
        return self.head(h)


class Writer(nn.Module):
    """Views and in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w
        y[0].mul_(2)
        view = y.view(-1)
        view[3:5] = view[0:2] * 3
        y.relu_()
        return (view + 1).sum() + y.t()[1].sum()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.second = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(x + self.norm(self.second(x)), inplace=True)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Experts(nn.Module):
    """A mixture of experts: each row goes through the expert that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Tied(nn.Module):
    """A language model whose embedding is its head, with dropout and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.dropout = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Dropout()
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.embedding(tokens)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(checkpoint(self.layers, x, use_reentrant=self.reentrant))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Custom(nn.Module):
    """A function of the user's, an output in parts, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = Cube.apply(self.layer(x)).chunk(2, -1)
        return a * b.sigmoid()


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 0.3:
            x = x * self.scale
        return x.cumsum(0)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(3, 5, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(x)
        return out[:, -1]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    config._attn_implementation = "eager"

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens, use_cache=False).logits

    return Logits().train()


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
CASES: dict[str, Case] = {
    "reader": (Reader, lambda: torch.randn(2, 4, 4)),
    "writer": (Writer, lambda: torch.randn(4, 4)),
    "residual": (Residual, lambda: torch.randn(2, 3, 6, 6)),
    "experts": (Experts, lambda: torch.randn(6, 4)),
    "tied": (Tied, lambda: torch.randint(9, (2, 3))),
    "checkpointed": (Checkpointed, lambda: torch.randn(2, 4)),
    "reentrant": (lambda: Checkpointed(True), lambda: torch.randn(2, 4)),
    "custom": (Custom, lambda: torch.randn(2, 4)),
    "halving": (Halving, lambda: torch.ones(3, dtype=torch.float64)),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(2, 4, 3)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(2, 4, 3)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: torch.randn(2, 3, 8),
    ),
    "gpt2": (gpt2, lambda: torch.randint(20, (2, 6))),
}


class Torch:
    """What torch itself does: gradients, and what goes through each node, from the loss on."""

    def __init__(self, case: str) -> None:
        model, self.x = made(case)
        torch.manual_seed(1)
        loss = loss_of(model(self.x))
        self.nodes: list[Any] = []
        self.seen: dict[Any, list[Any]] = {}
        waiting = [loss.grad_fn]
        while waiting:
            node: Any = waiting.pop(0)
            if node not in self.seen:
                self.nodes.append(node)
                self.seen[node] = its = []
                node.register_hook(
                    lambda out, into, its=its: its.append((copied(into), copied(out)))
                )
                waiting += [below for below, _ in node.next_functions if below is not None]
        loss.backward()
        self.loss, self.model = loss, model


def copied(gradients: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else one.detach().clone() for one in gradients)


def made(case: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, inputs = CASES[case]
    model, x = make(), inputs()
    return model, x.requires_grad_() if x.is_floating_point() else x


def loss_of(out: Tensor) -> Tensor:
    return out.square().sum() if out.dim() else out


def recorded(case: str, **options: Any) -> tuple[BackwardPass, nn.Module, Tensor]:
    model, x = made(case)
    torch.manual_seed(1)
    trace = bt.trace(model, x, save="none")
    return trace.backward(loss_of(trace.output), **options), model, x


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def one(record: BackwardPass, key: Any) -> BackwardNode:
    found = record[key]
    assert isinstance(found, BackwardNode)
    return found


@pytest.mark.parametrize("save", ["none", "all"])
@pytest.mark.parametrize("case", CASES)
def test_recording_changes_no_bit_of_a_gradient(case: str, save: str) -> None:
    plain = Torch(case)
    _, model, x = recorded(case, save=save)
    assert same_bits(gradients(model, x), gradients(plain.model, plain.x))
    assert any(gradient is not None for gradient in gradients(model, x).values())


@pytest.mark.parametrize("case", CASES)
def test_each_node_has_what_torch_gives_its_hooks(case: str) -> None:
    plain = Torch(case)
    record, _, _ = recorded(case, save="all")
    by_label = {entry.label: entry for entry in record.all_nodes}
    assert len(by_label) == len(record.all_nodes) == len(plain.nodes)
    assert [entry.order for entry in record] == list(range(len(record)))
    pairs, label_of = [(plain.nodes[0], record[0].label)], {}
    while pairs:
        node, label = pairs.pop(0)
        if node in label_of:
            assert label_of[node] == label
            continue
        label_of[node], entry = label, by_label[label]
        assert entry.type == node.name().rpartition("::")[2]
        for (below, number), to in zip(node.next_functions, entry.next, strict=True):
            assert (below is None) == (to is None)
            if to is not None:
                assert to[1] == number
                pairs.append((below, to[0]))
        if case == "reentrant" and entry.where == "leaf":
            continue  # runs in the pass inside, too
        ((into, out),) = plain.seen[node]
        assert same_bits(entry.gradients_in, into)
        assert same_bits(entry.gradients_out, out)
        for metas, its in ((entry.given, into), (entry.made, out)):
            assert [meta and tuple(meta.shape) for meta in metas] == [
                None if gradient is None else tuple(gradient.shape) for gradient in its
            ]
    assert len(label_of) == len(record)


@pytest.mark.parametrize("case", [case for case in CASES if case != "writer"])
def test_each_node_belongs_to_the_op_that_made_it(case: str) -> None:
    record, model, _ = recorded(case)
    trace = record.trace
    types: dict[int, set[str]] = {}
    for entry in record:
        if entry.where == "run":
            assert entry.op is not None
            types.setdefault(entry.op, set()).add(entry.type)
            assert trace[entry.forward].module == entry.module
            assert trace[entry.forward].pass_number == entry.pass_number
    # (Results that nothing uses have nodes that no gradient reaches.)
    values = [value for value in trace.layers if value.grad_fn and value.children]
    reached = [value for value in values if value.index in types]
    assert reached
    for value in reached:
        assert value.grad_fn in types[value.index]
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    assert names == {entry.parameter for entry in record if entry.where == "leaf"} - {"input_1_0"}


def test_nodes_of_in_place_ops_belong_to_the_op_that_wrote() -> None:
    record, _, _ = recorded("writer")
    assert [entry.label for entry in record] == [
        "add_2_14.AddBackward0", "sum_2_13.SumBackward0", "getitem_3_12.SelectBackward0",
        "t_1_11.TBackward0", "sum_1_10.SumBackward0", "add_1_9.AddBackward0",
        "add_1_9.AsStridedBackward0", "relu_1_8.ReluBackward0", "setitem_1_7.CopySlices",
        "mul_2_6.MulBackward0", "getitem_2_5.SliceBackward0", "view_1_4.ViewBackward0",
        "mul_1_3.CopySlices", "matmul_1_1.MmBackward0", "input_1_0.grad", "w.grad",
    ]  # fmt: skip


def test_the_graphs_of_the_arguments_and_of_the_loss_belong_to_no_op() -> None:
    layer = nn.Linear(3, 3)
    x = (torch.ones(2, 3, requires_grad=True) * 2).tanh()
    trace = bt.trace(layer, x, save="none")
    record = trace.backward((trace.output - x).pow(2).mean())
    assert [(entry.label, entry.where) for entry in record if entry.where != "run"] == [
        ("MeanBackward0", "after"), ("PowBackward0", "after"), ("SubBackward0", "after"),
        ("bias.grad", "leaf"), ("weight.grad", "leaf"), ("TanhBackward0", "before"),
        ("MulBackward0", "before"), ("leaf.grad", "leaf"),
    ]  # fmt: skip


def test_numbers_of_nodes_from_another_thread_name_no_op() -> None:
    made: list[Any] = []

    def run() -> None:
        made.append(bt.trace(nn.Linear(3, 3), torch.ones(2, 3), save="none"))

    def loss() -> None:  # torch counts the nodes of each thread from 0
        total = made[0].output * 1
        for _ in range(200):
            total = total * 1
        made.append(total.sum())

    for target in (run, loss):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    record = made[0].backward(made[1])
    numbers = [node._sequence_nr() for node in walked(made[1].grad_fn)]
    assert len(set(numbers)) < len(numbers) - 1  # (leaves have one number)
    assert {entry.type: entry.where for entry in record if entry.where != "leaf"} == {
        "SumBackward0": "after", "MulBackward0": "after", "AddmmBackward0": "run",
        "TBackward0": "run",
    }  # fmt: skip


def test_an_argument_from_another_thread_is_not_taken_for_a_value_of_the_run() -> None:
    made: list[Any] = []

    def argument() -> None:
        made.append(torch.ones(2, 3, requires_grad=True) * 2 * 3)

    def run() -> None:
        made.append(bt.trace(nn.Linear(3, 3), made[0], save="none"))

    for target in (argument, run):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    x, trace = made
    assert x.grad_fn._sequence_nr() == trace.output.grad_fn._sequence_nr()
    for key, label in (("input_1", "MulBackward0"), ("linear_1", "linear_1_1.AddmmBackward0")):
        record = trace.backward(trace.output.sum(), edits={key: torch.zeros_like},
                                retain_graph=True)  # fmt: skip
        assert [entry.label for entry in record if entry.is_edited] == [label]


def walked(root: Any) -> list[Any]:
    nodes, waiting = [], [root]
    while waiting:
        node = waiting.pop(0)
        if node not in nodes:
            nodes.append(node)
            waiting += [below for below, _ in node.next_functions if below is not None]
    return nodes


def test_what_a_tracer_cannot_see_is_no_op() -> None:
    def unseen(x: Tensor) -> Tensor:
        h = x * 2
        with torch._C.DisableTorchFunction():
            h = h.tanh()
        return h * 3

    trace = bt.trace(unseen, torch.ones(2, requires_grad=True), save="none")
    assert any("unknown origin" in reason for reason in trace.why_live)
    record = trace.backward(trace.output.sum())
    assert [(entry.label, entry.where) for entry in record] == [
        ("SumBackward0", "after"), ("mul_2_3.MulBackward0", "run"), ("TanhBackward0", "before"),
        ("mul_1_1.MulBackward0", "run"), ("input_1_0.grad", "leaf"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("lstm", "gru")])
def test_nodes_have_the_order_of_the_engine_before_they_run(case: str) -> None:
    record, _, _ = recorded(case)
    ran = [entry.label for entry in record.all_nodes if entry.order is not None]
    assert ran == [entry.label for entry in record]


def test_passes_of_a_layer_are_passes_of_its_nodes() -> None:
    record, _, _ = recorded("reader")
    passes = [entry for entry in record if entry.type == "UnsafeSplitBackward0"]
    assert [entry.label for entry in passes] == [
        f"lstmcell_1_6.UnsafeSplitBackward0:{number}" for number in (4, 3, 2, 1)
    ]
    assert record["UnsafeSplitBackward0"] == tuple(passes)
    assert passes[1] in record["lstmcell_1:3"]  # type: ignore[operator]


def test_lookup_takes_labels_parameters_positions_and_keys_of_the_run() -> None:
    record, model, _ = recorded("residual")
    assert isinstance(model, Residual)
    convolution = one(record, "second")
    assert convolution.type == "ConvolutionBackward0"
    for key in ("conv2d_2", convolution.label, model.second, convolution, convolution.order):
        assert record[key] is convolution
    assert one(record, "second.weight").parameter == "second.weight"
    assert record["head.weight"] is record["head.weight.grad"]
    assert record[:2] == (record[0], record[1])
    assert "head" in record
    assert "heads" not in record
    with pytest.raises(bt.errors.LayerKeyError, match=r"similar names.*head\.bias\.grad"):
        record["head.bias.gradd"]
    with pytest.raises(bt.errors.LayerKeyError, match=r"there is no node 99: \d+ ran"):
        record[99]


def test_only_the_chosen_gradients_are_kept() -> None:
    record, model, _ = recorded("residual", save=["second", "head.weight"])
    kept = [entry.label for entry in record if entry.gradients_in is not None]
    assert kept == ["head.weight.grad", one(record, "second").label]
    gradient = one(record, "head.weight").gradients_in
    assert gradient is not None
    assert torch.equal(gradient[0], model.head.weight.grad)  # type: ignore[arg-type, union-attr]
    gradient[0].zero_()  # type: ignore[union-attr]
    assert model.head.weight.grad.any()  # type: ignore[union-attr, operator]


def test_several_losses_and_passes_over_one_graph_add_up_as_in_torch() -> None:
    plain, x = made("custom")
    ours = copy.deepcopy(plain)
    out = plain(x)
    losses = [out.sum(), out.abs().max()]
    torch.autograd.backward(losses, retain_graph=True)
    losses[1].backward()
    trace = bt.trace(ours, x.detach().requires_grad_(), save="none")
    losses = [trace.output.sum(), trace.output.abs().max()]
    both = trace.backward(losses, retain_graph=True)
    second = trace.backward(losses[1], save="all")
    assert same_bits([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
    assert len(both) == len(second) + 1
    assert one(both, "layer.weight").gradients_in is None  # the later pass has not touched it


def test_gradients_of_losses_with_several_elements_are_given() -> None:
    model, x = made("reader")
    trace = bt.trace(model, x, save="none")
    start = torch.arange(4.0).view(2, 2)
    expected = torch.autograd.grad(trace.output, x, start, retain_graph=True)
    record = trace.backward(gradients=start, inputs=[x], accumulate=False, save="all")
    assert same_bits(record.gradients, expected)
    assert same_bits(one(record, "input_1_0").gradients_in, expected)
    assert x.grad is None
    assert "head.weight" not in record  # no gradient was computed for it
    assert record[0].gradients_in[0].equal(start)  # type: ignore[index, union-attr]


def hooks_left(record: BackwardPass, model: nn.Module) -> list[Any]:
    gc.collect()
    found: list[Any] = [one for one in gc.get_objects() if type(one) is _PassHooks]  # hooks hold it
    found += [p for p in model.parameters() if p._backward_hooks]
    return found + [m for m in model.modules() if m._backward_hooks or m._forward_hooks]


def test_nothing_is_left_behind() -> None:
    record, model, x = recorded("reader", retain_graph=True, edits={"head": lambda g: g * 2})
    before = [(entry.order, entry.given, entry.made) for entry in record]
    assert hooks_left(record, model) == []
    model.zero_grad()
    x.grad = None
    loss_of(record.trace.output).backward()  # without the edit
    plain = Torch("reader")
    assert same_bits(gradients(model, x), gradients(plain.model, plain.x))
    assert [(entry.order, entry.given, entry.made) for entry in record] == before
    assert record.nested == 0  # no hook was called


def test_nothing_is_left_behind_when_the_pass_raises() -> None:
    model, x = made("reader")
    trace = bt.trace(model, x, save="none")
    loss = loss_of(trace.output)

    def refuse(gradient: Tensor) -> Tensor:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no") as caught:
        trace.backward(loss, edits={"lstmcell_1:2": refuse, "head": lambda g: g * 2},
                       retain_graph=True)  # fmt: skip
    partial: BackwardPass = caught.value.bendtrace  # type: ignore[attr-defined]
    del caught  # whose traceback has the frames
    assert 0 < len(partial) < len(partial.all_nodes)
    assert hooks_left(partial, model) == []
    model.zero_grad()
    x.grad = None
    loss.backward()
    plain = Torch("reader")
    assert same_bits(gradients(model, x), gradients(plain.model, plain.x))


def test_a_second_pass_over_a_freed_graph_raises_as_torch_does() -> None:
    record, model, _ = recorded("residual")
    with pytest.raises(RuntimeError, match="second time") as caught:
        record.trace.backward(record.trace.output.sum())
    del caught
    assert hooks_left(record, model) == []


def test_a_pass_inside_the_pass_is_said_to_be_missing() -> None:
    record, _, _ = recorded("reentrant")
    assert record.nested > 0
    assert "runs of nodes in passes inside it, not recorded" in str(record).splitlines()[0]
    assert recorded("checkpointed")[0].nested == 0


def test_a_kept_graph_is_no_op_of_the_run() -> None:
    trace = bt.trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2), save="all",
                     keep_graph=True)  # fmt: skip
    record = trace.backward(trace["tanh_1"].tensor_contents.sum())
    labels = [entry.label for entry in record if entry.where == "run"]
    assert labels[0] == "tanh_1_2.TanhBackward0"
    assert "linear_1_1.TBackward0" in record
