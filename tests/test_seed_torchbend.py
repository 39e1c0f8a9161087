"""torchbend's notebook on extended tracing: its cells run as they stand there, but for the import.

Then each of its examples by itself, as a `bendtrace.BendedModule`. Where the notebook shows a
failure of its own, a call that takes another path for one, it is said what is right here.
"""

# ruff: noqa: B007, E501, RUF059

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import bendtrace as tb
from tests import seeds
from tests.promise import assert_promise, bits


def test_the_notebook_runs_with_one_line_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # which its first cell adds to
    code = "\n".join(seeds.cells("torchbend"))
    assert code.count("import torchbend as tb") == 1
    code = code.replace("import torchbend as tb", "from bendtrace.compat import torchbend as tb")
    names = seeds.run(code, {}, tmp_path / "notebook.py")
    printed = capsys.readouterr().out
    assert printed.count("torch.fx error :") == 2  # nothing stops fx at `x * x.shape[0]`
    assert "raised error" not in printed
    assert printed.count("graph():\n") == 3
    assert re.search(r"^\(0,\) \[LogicalFlowStep\(name=\w+, value=False, file=", printed, re.M)
    assert "\n(tensor([4., 4., 4., 4.]),) []\n" in printed
    assert "\nok case :  tensor([6., 6., 6., 6., 6., 6.])\n" in printed
    out, _, rest = printed.partition("-- Original out\n")[2].partition("\n\n-- Bias\n")
    assert out == str(names["out"][0]) == str(names["module"](names["x"]))
    assert rest.startswith(f"{names['module'](names['x']) + 1.0}\n")
    assert "Error with different shape :  Mask at 'conv_module' drew its numbers for" in rest


class Doug(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_module = nn.Conv1d(1, 16, 3)
        self.batch_norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor):
        if x.shape[1] > 1:
            return torch.cat([self.forward(x[:, [i]]) for i in range(x.shape[1])], -1)
        else:
            outs = []
            for i in range(x.shape[0]):
                out_tmp = self.conv_module(x[[i]])
                out_tmp = self.batch_norm(out_tmp)
                outs.append(out_tmp)
            return sum(outs)


class LoopFoo(nn.Module):
    def forward(self, x, n: int):
        for i in range(n):
            x = x * x
        return x


class LogicalFoo(nn.Module):
    def forward(self, x):
        if x.all():
            return 1
        else:
            return 0


class ShapeFoo(nn.Module):
    def forward(self, x):
        return x * x.shape[0]


LINE = Doug.forward.__code__.co_firstlineno


def test_fx_itself_rejects_the_model() -> None:
    with pytest.raises(torch.fx.proxy.TraceError, match="cannot be used as inputs to control flow"):
        torch.fx.symbolic_trace(Doug())


def test_a_module_with_control_flow_is_traced_by_an_example() -> None:
    module = Doug()
    bended = tb.BendedModule(module)
    bended.trace(x=torch.randn(1, 1, 16))
    printed = str(bended.latest_trace.graph)
    assert printed.startswith(
        "graph():\n    %x : Tensor(1, 1, 16) [num_users=3] = placeholder[target=x]"
    )
    for line in (
        "%getitem : int [num_users=1] = call_function[target=operator.getitem](args = (%shape, 1), kwargs = {})",
        "%gt : bool [num_users=0] = call_function[target=operator.gt](args = (%getitem, 1), kwargs = {})",
        "%getitem_1 : int [num_users=0] = call_function[target=operator.getitem](args = (%shape_1, 0), kwargs = {})",
        "%getitem_2 : Tensor(1, 1, 16) [num_users=1] = call_function[target=operator.getitem](args = (%x, [0]), kwargs = {})",
    ):
        assert f"    {line}\n" in printed


def test_the_folded_graph_has_the_nodes_of_the_notebook() -> None:
    bended = tb.BendedModule(Doug())
    trace = bended.trace(x=torch.randn(1, 1, 16))
    module = trace.to_fx(fold=True, guards=False)
    wanted = [
        "x", "shape", "getitem", "gt", "shape_1", "getitem_1", "getitem_2", "conv_module",
        "batch_norm", "add", "output",
    ]  # fmt: skip
    assert [node.name for node in module.graph.nodes] == wanted
    assert [node.target for node in module.graph.nodes if node.op == "call_module"] == [
        "conv_module",
        "batch_norm",
    ]


def test_different_inputs_lead_to_different_graphs() -> None:
    bended = tb.BendedModule(Doug())
    bended.trace(x=torch.randn(1, 1, 16))
    one = bended.latest_trace.graph
    bended.trace(x=torch.randn(1, 2, 16))
    two = bended.latest_trace.graph
    assert "cat" not in one
    assert "cat" in two
    assert [n for n in two if n.startswith("conv1d")] == ["conv1d", "conv1d_1"]


def test_a_call_that_takes_another_path_is_right_where_torchbend_raised() -> None:
    for first, second in [((1, 1, 16), (1, 2, 16)), ((1, 2, 16), (1, 1, 16))]:
        torch.manual_seed(0)
        module = Doug()
        eager = copy.deepcopy(module)
        bended = tb.BendedModule(module)
        bended.trace(x=torch.randn(first))
        x, y = torch.randn(first), torch.randn(second)
        eager(torch.randn(first))  # as many updates of the batch norm
        torch.testing.assert_close(bended(x), eager(x), rtol=0, atol=0)
        torch.testing.assert_close(bended(y), eager(y), rtol=0, atol=0)


def test_the_flow_steps_of_two_channels_are_those_of_the_notebook() -> None:
    bended = tb.BendedModule(Doug())
    bended.trace(x=torch.randn(1, 2, 16))
    steps = bended.latest_trace.graph.flow_steps.of(tb.flow.LogicalFlowStep)
    assert [(step.name, step.value) for step in steps] == [
        ("gt", True),
        ("gt_1", False),
        ("gt_2", False),
    ]
    assert repr(steps) == (
        f"[LogicalFlowStep(name=gt, value=True, file={__file__}:forward.{LINE + 1}), "
        f"LogicalFlowStep(name=gt_1, value=False, file={__file__}:forward.{LINE + 1}), "
        f"LogicalFlowStep(name=gt_2, value=False, file={__file__}:forward.{LINE + 1})]"
    )


def test_its_other_flow_steps_are_there_as_well() -> None:
    trace = tb.BendedModule(Doug()).trace(x=torch.randn(1, 2, 16))
    found = [(s.kind, s.value, s.text, s.line - LINE) for s in trace.flow_steps]
    channel = [
        ("shape", 1, "x.shape[1]", 1),
        ("if", False, "x.shape[1] > 1", 1),
        ("shape", 1, "x.shape[0]", 5),
        ("for", 1, "range(x.shape[0])", 5),
    ]
    assert found == [
        ("shape", 2, "x.shape[1]", 1),
        ("if", True, "x.shape[1] > 1", 1),
        ("shape", 2, "x.shape[1]", 2),
        ("comprehension", 2, "range(x.shape[1])", 2),
        *channel,
        *channel,
    ]
    loops = [step for step in trace.flow_steps if isinstance(step, tb.flow.LoopFlowStep)]
    assert [(loop.bound, loop.iterations) for loop in loops] == [(2, 2), (1, 1), (1, 1)]


def test_doug_keeps_the_promise_for_all_sizes() -> None:
    sizes = [(1, 1, 16), (1, 2, 16), (1, 1, 16), (1, 1, 20), (3, 1, 16), (1, 3, 16), (1, 2, 18)]
    inputs = [torch.randn(size) for size in sizes]
    calls: list[Any] = [lambda x=x: ((x.clone(),), {}) for x in inputs]
    bended = assert_promise(Doug, calls)
    # One recording each for (1, 1), (1, 2), (3, 1) and (1, 3) examples and channels.
    assert (bended.stats.traces, bended.stats.replays) == (4, 3)


def test_the_loop_that_did_not_work_there() -> None:
    foo = LoopFoo()
    with pytest.raises(TypeError):
        torch.fx.symbolic_trace(foo)
    bended = tb.BendedModule(foo)
    graph, out = bended.trace(x=torch.tensor(2), n=4, _return_out=True)
    assert bits(out) == bits(torch.tensor(65536))
    (step,) = graph.flow_steps
    assert isinstance(step, tb.flow.LoopFlowStep)
    assert (step.name, step.value, step.bound, step.iterations) == ("n", 4, 4, 4)
    assert step.text == "range(n)"
    for n in (4, 2, 0, 4, 2):
        assert bits(bended(torch.tensor(3), n)) == bits(foo(torch.tensor(3), n))
    assert (bended.stats.traces, bended.stats.replays) == (3, 3)


def test_the_logical_example() -> None:
    foo = LogicalFoo()
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(foo)
    bended = tb.BendedModule(foo)
    graph, out = bended.trace(x=torch.tensor(0), _return_out=True)
    assert out == 0
    (step,) = graph.flow_steps
    assert isinstance(step, tb.flow.LogicalFlowStep)
    assert (step.kind, step.value, step.text) == ("if", False, "x.all()")
    for value in (0, 1, 5, 0):
        assert bended(torch.tensor(value)) == foo(torch.tensor(value))
    assert bended(torch.ones(3, 2)) == 1


def test_the_shape_example() -> None:
    foo = ShapeFoo()
    bended = tb.BendedModule(foo)
    graph, out = bended.trace(x=torch.ones(4), _return_out=True)
    assert bits(out) == bits(torch.full((4,), 4.0))
    assert len(graph.flow_steps.of(tb.flow.LogicalFlowStep)) == 0
    assert [(step.kind, step.value, step.guard) for step in graph.flow_steps] == [
        ("shape", 4, None)
    ]
    # example critical case
    out_ok = bended(torch.ones(6))
    assert bits(out_ok) == bits(torch.full((6,), 6.0))
    assert bended.stats.replays == 1


class Greg(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_module = nn.Conv1d(1, 4, 3)

    def forward(self, x):
        return self.conv_module(x)


def test_the_model_without_flow_is_traced_to_one_op() -> None:
    module = Greg()
    bended = tb.BendedModule(module)
    x = torch.randn(1, 1, 16)
    graph, out = bended.trace(x=x, _return_out=True)
    assert bits(out) == bits(module(x))
    assert list(graph.graph) == ["x", "conv_module_weight", "conv_module_bias", "conv1d", "output"]
    assert bits(bended(torch.ones(4, 1, 32))) == bits(module(torch.ones(4, 1, 32)))


def test_the_bending_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    module = Greg()
    bended = tb.BendedModule(module)
    x = torch.randn(1, 1, 16)
    graph, out = bended.trace(x=x, _return_out=True)
    bended.print_activations()
    print("\n-- Original out")
    print(out[0])

    # bending with Scale
    # TODO wtf
    print("\n-- Bias")
    bended.bend(tb.bends.Bias(1.0), "conv_module$")
    print(bended(x))
    bended(torch.randn(4, 1, 32))  # -> OK

    print("\n-- Mask")
    bended.reset()
    bended.bend(tb.bends.Mask(0.3), "conv_module$")
    print(bended(x))
    try:
        bended(torch.randn(4, 1, 32))  # -> not OK
    except Exception as e:
        print("Error with different shape : ", e)

    print("\n-- Channeled mask")
    bended.reset()
    bended.bend(tb.bends.Mask(prob=0.3, dim=-2), "conv_module$")
    print(bended(x))
    bended(torch.randn(4, 1, 32))  # -> OK

    printed = capsys.readouterr().out
    table, original, bias, mask, channels = re.split(r"\n\n-- .*\n", printed)
    assert table == (
        "-----------  -----------  ----------------------\n"
        "x            placeholder  torch.Size([1, 1, 16])\n"
        "conv_module  call_module  torch.Size([1, 4, 14])\n"
        "-----------  -----------  ----------------------"
    )
    assert original == str(out[0])
    assert bias == str(module(x) + 1.0)
    assert "Error with different shape :  Mask at 'conv_module' drew its numbers for shape" in mask
    assert "pass Mask dim=-2 (size 4 in both)" in mask
    assert channels.startswith("tensor(")


def bent_greg() -> tuple[Greg, tb.BendedModule, torch.Tensor]:
    module = Greg()
    bended = tb.BendedModule(module)
    x = torch.randn(1, 1, 16)
    bended.trace(x=x)
    return module, bended, x


def test_a_bias_takes_every_shape_and_leaves_weights_and_bias_alone() -> None:
    module, bended, x = bent_greg()
    weights = bits(dict(module.named_parameters()))
    bended.bend(tb.bends.Bias(1.0), "conv_module$")
    assert bended.bended_keys() == ["conv_module"]
    for y in (x, torch.randn(4, 1, 32), x, torch.randn(2, 1, 7)):
        assert bits(bended(y)) == bits(module(y) + 1.0)
    bended.reset()
    bended.bend(
        tb.bends.Bias(1.0), "conv_module"
    )  # the pattern also begins the names of the weights
    assert bended.bended_keys() == ["conv_module"]
    assert bits(bended(x)) == bits(module(x) + 1.0)
    bended.reset()
    assert bits(bended(x)) == bits(module(x))
    assert bits(dict(module.named_parameters())) == weights


def test_a_mask_for_one_shape_says_on_another_which_dimension_to_give() -> None:
    module, bended, x = bent_greg()
    bended.bend(tb.bends.Mask(0.3), "conv_module$")
    masked = bended(x)
    assert bits(bended(x)) == bits(masked)
    assert torch.equal(masked[masked != 0], module(x)[masked != 0])
    with pytest.raises(
        tb.errors.BendShapeError, match=r"\(1, 4, 14\), and now received shape \(4, 4, 30\)"
    ) as caught:
        bended(torch.randn(4, 1, 32))
    assert isinstance(caught.value, RuntimeError), "as a tensor of another shape is for torchbend"
    assert bits(bended(x)) == bits(masked)


def test_a_channeled_mask_takes_every_shape() -> None:
    module, bended, x = bent_greg()
    bended.bend(tb.bends.Mask(prob=0.3, dim=-2, seed=1), "conv_module$")
    kept = tb.bends.Mask(prob=0.3, dim=-2, seed=1)(torch.ones(1, 4, 1)) != 0
    for y in (x, torch.randn(4, 1, 32), torch.randn(2, 1, 7), x):
        assert torch.equal(bended(y), torch.where(kept, module(y), 0))
    assert bended.stats.replays >= 2


def test_what_is_bent_is_bent_on_every_path_of_a_model_with_control_flow() -> None:
    torch.manual_seed(0)
    module = Doug().eval()
    eager = copy.deepcopy(module)
    eager.conv_module.register_forward_hook(lambda module, args, output: output * 2.0)
    bended = tb.BendedModule(module)
    bended.trace(x=torch.randn(1, 1, 16))
    bended.bend(tb.bends.Scale(2.0), "conv_module$")
    for size in [(1, 1, 16), (1, 2, 16), (3, 1, 16), (1, 3, 16), (1, 2, 16), (3, 1, 16)]:
        x = torch.randn(size)
        assert bits(bended(x)) == bits(eager(x)), size
    # It is called in two places: in the loop itself, and where forward calls itself.
    assert bended.bended_keys() == ["conv_module", "conv_module_1"]
