"""Gradients are edited as by torch's hooks; passes go through passes, are compared and drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.debug.backward import AutogradGraph
from bendtrace.errors import InputError, LayerKeyError, NeverFiredWarning
from bendtrace.python.compare import same_bits
from tests.test_backward import CASES, Torch, gradients, loss_of, made, one, recorded

Edit = Callable[[Tensor], Tensor]


def noisy(gradient: Tensor) -> Tensor:
    return gradient * 3 + torch.arange(gradient.numel(), dtype=gradient.dtype).view_as(gradient)


# A module whose output has one node; by case.
MODULES = {
    "reader": "head", "residual": "norm", "tied": "dropout", "checkpointed": "layers.1",
    "custom": "layer", "encoder": "linear1", "gpt2": "model.transformer.h.0.mlp.act",
}  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("case", MODULES)
def test_an_edit_of_a_value_is_a_hook_on_its_tensor(case: str) -> None:
    name = MODULES[case]
    model, x = made(case)
    handle = model.get_submodule(name).register_forward_hook(
        lambda module, args, out: out.register_hook(noisy) and None
    )
    torch.manual_seed(1)
    loss_of(model(x)).backward()
    handle.remove()
    expected = gradients(model, x)
    record, ours, given = recorded(case, edits={name: noisy})
    assert same_bits(gradients(ours, given), expected)
    plain = Torch(case)
    assert not same_bits(expected, gradients(plain.model, plain.x))
    edited = [entry for entry in record if entry.is_edited]
    assert edited
    assert {entry.module for entry in edited} == {name}


def test_an_edit_of_one_pass_leaves_the_others() -> None:
    model, x = made("reader")
    seen: list[Tensor] = []
    model.cell.register_forward_hook(lambda m, args, out: seen.append(out[1]))  # type: ignore[operator, union-attr]
    loss = loss_of(model(x))
    seen[1].register_hook(noisy)
    loss.backward()
    trace = bt.trace(made("reader")[0], x.detach().requires_grad_(), save="none")
    record = trace.backward(loss_of(trace.output), edits={"lstmcell_2:2": noisy})
    assert [entry.label for entry in record if entry.is_edited] == ["lstmcell_1_6.AddBackward0:2"]
    ours: Any = trace.function
    assert same_bits([p.grad for p in ours.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("case", ["reader", "writer", "residual", "experts", "lstm", "encoder"])
def test_an_edit_of_a_node_is_a_hook_on_it(case: str) -> None:
    def all_of_them(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else noisy(gradient) for gradient in given)

    first, _, _ = recorded(case)
    for label in [first[at].label for at in (1, len(first) // 2, len(first) - 4)]:  # type: ignore[union-attr]
        at = [entry.label for entry in first.all_nodes].index(label)
        if first.all_nodes[at].where == "leaf":
            continue
        model, x = made(case)
        torch.manual_seed(1)
        trace = bt.trace(model, x, save="none")
        loss = loss_of(trace.output)
        graph = AutogradGraph(trace, trace._capture, [loss], ())  # type: ignore[arg-type]
        graph.nodes[at].register_prehook(all_of_them)
        loss.backward()
        record, ours, given = recorded(case, edits={label: all_of_them})
        assert one(record, label).is_edited
        assert same_bits(gradients(ours, given), gradients(model, x))


def test_edits_of_parameters_and_arguments_are_hooks_on_them() -> None:
    model, x = made("reader")
    model.cell.weight_hh.register_hook(noisy)  # type: ignore[union-attr, operator]
    x.register_hook(torch.sign)
    loss_of(model(x)).backward()
    edits = {"cell.weight_hh": noisy, "input_1": torch.sign}
    record, ours, given = recorded("reader", edits=edits, save="all")
    assert same_bits(gradients(ours, given), gradients(model, x))
    kept = one(record, "input_1").gradients_in
    assert kept is not None
    assert torch.equal(kept[0], x.grad)  # type: ignore[arg-type]


def test_a_tensor_takes_the_place_of_a_gradient_and_none_leaves_it() -> None:
    seen: list[Tensor] = []
    record, model, _ = recorded(
        "residual", edits={"head": torch.zeros(2, 5), "norm": seen.append}, save=["head"]
    )
    assert not any(p.grad.any() for p in model.parameters())  # type: ignore[union-attr]
    assert not seen[0].any()
    assert [e.label for e in record if e.is_edited] == [one(record, "AddmmBackward0").label]
    gradient = one(record, "AddmmBackward0").gradients_in
    assert gradient is not None
    assert not gradient[0].any()  # type: ignore[union-attr]


def test_a_gradient_of_another_shape_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="changed the size of value"):
        recorded("residual", edits={"head": torch.zeros(2, 4)})


def test_an_edit_that_no_gradient_reaches_says_so() -> None:
    model, x = made("residual")
    trace = bt.trace(model, x, save="none")
    with pytest.warns(NeverFiredWarning, match="the edit at 'second' was never called"):
        trace.backward(trace.output.sum(), inputs=[model.head.weight],  # type: ignore[list-item, union-attr]
                       edits={"second": torch.zeros_like})  # fmt: skip


# Second order


@pytest.mark.parametrize("case", ["reader", "writer", "residual", "experts", "custom", "halving"])
def test_the_second_pass_computes_the_bits_of_torch(case: str) -> None:
    def penalty(grads: Any) -> Tensor:
        total: Tensor = sum(g.square().sum() for g in grads)  # type: ignore[assignment]
        return total

    model, x = made(case)
    torch.manual_seed(1)
    wanted = [p for p in model.parameters() if p is not getattr(model, "unused", None)]
    wanted = wanted[:2]
    grads = torch.autograd.grad(loss_of(model(x)), wanted, create_graph=True)
    penalty(grads).backward()
    ours, given = made(case)
    torch.manual_seed(1)
    trace = bt.trace(ours, given, save="none")
    first = trace.backward(loss_of(trace.output), inputs=list(ours.parameters())[:2],
                           accumulate=False, create_graph=True, save="all")  # fmt: skip
    assert same_bits(first.gradients, grads)
    second = first.backward(penalty(first.gradients), save="all")
    assert same_bits(gradients(ours, given), gradients(model, x))
    assert len({entry.label for entry in second.all_nodes}) == len(second.all_nodes)
    made_in = {entry.made_in for entry in second if entry.made_in}
    assert made_in <= {entry.label for entry in first}
    both = [entry for entry in second if entry.where == "run" and not entry.made_in]
    assert {entry.label for entry in both} <= {entry.label for entry in first.all_nodes}
    for entry in second:  # all that is no leaf and not of the penalty is known
        assert entry.where in ("leaf", "after") or entry.forward


def test_nodes_of_the_second_pass_are_found_by_what_made_them() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    trace = bt.trace(lambda x: (x.pow(3) * x.exp()).sum(), x, save="none")
    options: dict[str, Any] = {"inputs": x, "accumulate": False}
    first = trace.backward(create_graph=True, **options)
    second = first.backward(first.gradients[0].sum(), create_graph=True, **options)  # type: ignore[index]
    assert [(entry.label, entry.made_in, entry.forward) for entry in second][1:5] == [
        ("input_1_0.grad.AddBackward0", "input_1_0.grad", "input_1_0"),
        ("pow_1_1.PowBackward0.MulBackward0", "pow_1_1.PowBackward0", "pow_1_1"),
        ("pow_1_1.PowBackward0.MulBackward1", "pow_1_1.PowBackward0", "pow_1_1"),
        ("pow_1_1.PowBackward0.PowBackward0", "pow_1_1.PowBackward0", "pow_1_1"),
    ]
    third = second.backward(second.gradients[0].sum(), **options)  # type: ignore[index]
    e = math.exp(2)
    assert third.gradients[0].item() == pytest.approx((6 + 18 * 2 + 9 * 4 + 8) * e)  # type: ignore[index]
    assert any(entry.made_in.startswith("pow_1_1.PowBackward0.") for entry in third)
    assert all(entry.forward for entry in third if entry.where == "run")


# Tables, logs, pictures


def test_two_passes_are_compared_bit_for_bit() -> None:
    records = [recorded("reader", save="all")[0] for _ in range(2)]
    difference = bt.diff(*records)
    assert not difference
    assert "compared bit for bit" in str(difference)
    other = recorded("reader", save="all", edits={"lstmcell_2:2": torch.zeros_like})[0]
    difference = bt.diff(records[0], other)
    assert difference
    changed = [change.a.label for change in difference.changed if change.a is not None]
    assert "cell.weight_ih.grad" in changed
    assert "head.weight.grad" not in changed
    assert not any(label.endswith(":4") for label in changed)


def test_the_table_says_what_arrives_and_where_it_goes() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    trace = bt.trace(model, torch.ones(4, 2), save="none")
    record = trace.backward(trace.output.sum())
    lines = [line.split() for line in str(record).splitlines()]
    assert lines[0] == "backward pass of Sequential: 6 nodes".split()
    assert lines[1] == ["order", "node", "module", "arrives", "returns", "to"]
    assert [" ".join(line) for line in lines[3:]] == [
        "0 SumBackward0 () (4, 3) relu_1_2.ReluBackward0",
        "1 relu_1_2.ReluBackward0 1 (4, 3) (4, 3) linear_1_1.AddmmBackward0",
        "2 linear_1_1.AddmmBackward0 0 (4, 3) (3,), none, (2, 3) 0.bias.grad, "
        "linear_1_1.TBackward0",
        "3 0.bias.grad 0 (3,)",
        "4 linear_1_1.TBackward0 0 (2, 3) (3, 2) 0.weight.grad",
        "5 0.weight.grad 0 (3, 2)",
    ]
    assert repr(record) == "<BackwardPass of Sequential: 6 nodes>"
    assert str(record.log).startswith("Log of backward pass of Sequential:")
    pandas = pytest.importorskip("pandas")
    frame = record.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc["relu_1_2.ReluBackward0", "forward"] == "relu_1_2"
    assert frame.loc["0.weight.grad", "parameter"] == "0.weight"
    assert list(frame["order"]) == list(range(6))


@pytest.mark.parametrize("case", CASES)
def test_every_pass_is_drawn(case: str) -> None:
    record, _, _ = recorded(case)
    picture = record.draw(collapse=False, max_nodes=10_000)
    drawn = {entry.node for node in picture.scene.nodes() for entry in node.entries}
    assert drawn == {entry.label for entry in record} | {"loss_1.grad"}
    edges = {(e.source.entries[0].node, e.target.entries[0].node) for e in picture.scene.edges}
    assert edges == {
        (entry.label, to[0])
        for entry in record
        for to, meta in zip(entry.next, entry.made, strict=True)
        if to is not None and meta is not None and record[to[0]]
    } | {("loss_1.grad", record[0].label)}  # type: ignore[union-attr]


def test_a_pass_is_saved_as_a_log(tmp_path: Path) -> None:
    record, _, _ = recorded("residual", save="all")
    record.log.save(tmp_path / "pass")
    loaded = bt.load(tmp_path / "pass")
    assert [entry.label for entry in loaded] == [entry.label for entry in record.log]
    assert same_bits(
        [entry.tensor_contents for entry in loaded], [e.tensor_contents for e in record.log]
    )


# At the door


def test_what_cannot_be_recorded_is_refused_before_anything_runs() -> None:
    model, x = made("custom")
    trace = bt.trace(model, x, save="none")
    loss = trace.output.sum()
    before = gradients(model, x)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (trace.output, {}, r"a loss of shape \(2, 2\) has no single gradient: pass gradients="),
        (trace.output.detach().sum(), {}, r"shape \(\) requires no grad"),
        ([], {}, "no loss"),
        ("loss", {}, "tensors has to be a tensor or several, not str"),
        (torch.ones(1, requires_grad=True) * 2, {}, "does not depend on this run of Custom"),
        (loss, {"gradients": torch.ones(3)}, r"gradients have the shapes \[\(3,\)\]"),
        (loss, {"accumulate": False}, "inputs=, which is missing"),
        (loss, {"inputs": torch.ones(2)}, r"an input of shape \(2,\) requires no grad"),
        (loss, {"edits": {"layer": 3}}, "has to be a function or a tensor, not int"),
        (loss, {"edits": ["layer"]}, "edits has to be a dict"),
    ]
    for tensors, options, message in refused:
        with pytest.raises(InputError, match=message):
            trace.backward(tensors, **options)
    for keys in ({"edits": {"nothing": noisy}}, {"save": "nothing"},
                    {"edits": {"unused.weight": noisy}}):  # fmt: skip
        with pytest.raises(LayerKeyError):
            trace.backward(loss, **keys)
    assert same_bits(gradients(model, x), before)
    with pytest.raises(InputError, match=r"trace it with save=\"none\""):
        bt.trace(model, x).backward()
    with pytest.raises(InputError, match="a tuple, not a tensor"):
        bt.trace(lambda x: (x * 2, x), x, save="none").backward()
    record = trace.backward(loss)
    with pytest.raises(InputError, match="has created no graph"):
        record.backward(loss)


def test_torchlens_has_its_names_for_it() -> None:
    model, x = made("residual")
    log: Any = bt.compat.torchlens.trace(model, x)
    assert log.grad_fns == []
    assert log.log_backward(log.output.sum(), retain_graph=True) is log
    log.log_backward(log.output, gradient=torch.ones_like(log.output))
    assert len(log.backward_passes) == 2
    assert log.grad_fns[0].type == "AddmmBackward0"
    assert log.grad_fns[0].gradients_in[0].equal(torch.ones_like(log.output))
