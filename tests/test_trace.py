"""Tracing anything that can be called, and what a `Trace` is good for."""

# ruff: noqa: B007, E501

from __future__ import annotations

import ast
import builtins
import functools
import json
import keyword
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import DivergenceError, NotReplayableError
from tests.promise import bits, footprint, state

ONES = torch.ones(3, 2)


def signed(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return -x


LINE = signed.__code__.co_firstlineno + 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale * x.shape[0]

    def halved(self, x: Tensor, by: float = 2.0) -> Tensor:
        return self.forward(x) / by


class Adder:
    def __init__(self) -> None:
        self.bias = torch.arange(2.0)

    def __call__(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = x + self.bias
        return x


# What can be traced


def traceable() -> dict[str, Callable[..., Any]]:
    torch.manual_seed(0)
    model, adder = Scaled(), Adder()
    bias = torch.full((2,), 0.5)
    return {
        "Scaled": model,
        "Scaled.halved": model.halved,
        "Scaled.forward": model.forward,
        "signed": signed,
        "<lambda>": lambda x: x * bias,
        "partial(signed)": functools.partial(signed),
        "partial(Scaled.halved)": functools.partial(model.halved, by=4.0),
        "partial(Scaled)": functools.partial(model),
        "Adder": adder,
        "Adder.__call__": adder.__call__,
        "_VariableFunctionsClass.relu": torch.relu,
    }


@pytest.mark.parametrize("name", traceable())
def test_anything_callable_can_be_traced_and_replayed(name: str) -> None:
    function = traceable()[name]
    trace = bt.trace(function, ONES)
    assert bits(trace.output) == bits(function(ONES))
    assert repr(trace).startswith(f"<Trace of {name}: ")
    for x in (torch.full((3, 2), 2.0), torch.full((5, 2), 0.25)):
        assert bits(trace.replay(x)) == bits(function(x))


def test_a_model_s_own_exception_comes_through_as_it_is() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine") as caught:
        bt.trace(model, ONES)
    assert type(caught.value) is KeyError


def test_arguments_can_come_by_position_or_by_name() -> None:
    def model(a: Tensor, b: Tensor, *, c: int = 1) -> Tensor:
        return a - b * c

    trace = bt.trace(model, ONES, b=ONES * 2, c=3)
    assert torch.equal(trace.replay(ONES, ONES * 3, c=3), ONES - 9)
    assert torch.equal(trace.replay(c=2, b=ONES, a=ONES * 5), ONES * 3)


def test_other_arguments_than_traced_are_a_divergence() -> None:
    def model(a: Tensor, b: Tensor | None = None) -> Tensor:
        return a if b is None else a + b

    trace = bt.trace(model, ONES)
    with pytest.raises(DivergenceError) as caught:
        trace.replay(ONES, ONES)
    assert str(caught.value) == "called with arguments ('a', 'b'), but traced with ('a',)"


# Fields


def test_a_trace_holds_what_the_run_did() -> None:
    model = Scaled()
    trace = bt.trace(model, ONES)
    assert trace.function is model
    assert trace.names == [
        "x",
        "fc_weight",
        "fc_bias",
        "linear",
        "mul",
        "shape",
        "getitem",
        "mul_1",
    ]
    assert [op.kind.value for op in trace.ops] == [
        "input", "state", "state", "call", "call", "call", "scalar", "call",
    ]  # fmt: skip
    assert [(call.path, call.module is model) for call in trace.module_calls] == [
        ("", True),
        ("fc", False),
    ]
    fc = trace.module_calls[1]
    assert (fc.start, fc.stop, fc.number, fc.parent) == (1, 4, 0, trace.module_calls[0])
    assert [step.kind for step in trace.flow_steps] == ["shape"]
    assert trace.why_live == ()
    assert trace.graph is trace.graph
    assert trace.graph.flow_steps is trace.flow_steps


def test_the_output_is_what_the_model_returned_itself() -> None:
    class Out:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    made = []

    def model(x: Tensor) -> Out:
        made.append(Out(x * 2))
        return made[-1]

    trace = bt.trace(model, ONES)
    assert trace.output is made[0]


def test_guards_are_a_table() -> None:
    trace = bt.trace(signed, ONES)
    (guard,) = trace.guards
    assert len(trace.guards) == 1
    assert (guard.use.value, guard.answer, trace.names[guard.index]) == ("bool", True, "bool")
    assert trace.guards.kind(0).value == "data"
    assert trace.guards.to_list() == [
        {
            "number": 0,
            "when": "data",
            "node": "bool",
            "test": "truth",
            "expected": "True",
            "source": "x.sum() > 0",
            "at": f"{__file__}:{LINE}",
        }
    ]
    header, _, row = repr(trace.guards).splitlines()
    assert header.split() == ["#", "when", "node", "test", "expected", "source", "at"]
    assert row.split() == [
        "0", "data", "bool", "truth", "True", "x.sum()", ">", "0", f"test_trace.py:{LINE}",
    ]  # fmt: skip


def test_guards_are_of_three_kinds() -> None:
    def model(x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            x = x * 2
        if x.dim() == 2:
            x = x + 1
        return x if x.sum() > 0 else -x

    guards = bt.trace(model, ONES).guards
    kinds = {row["source"]: row["when"] for row in guards.to_list()}
    assert kinds == {
        "x.shape": "input",
        "x.shape[0] > 2": "input",
        "x.dim()": "implied",
        "x.sum() > 0": "data",
    }


# Replay


def test_a_replay_runs_no_python_of_the_model() -> None:
    model = Scaled()
    trace = bt.trace(model, ONES)
    ran: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            ran.add(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        out = trace.replay(torch.zeros(7, 2))
    finally:
        sys.setprofile(None)
    assert bits(out) == bits(model(torch.zeros(7, 2)))
    assert "<bendtrace run>:run" in ran
    assert f"{__file__}:forward" not in ran
    assert not [name for name in ran if name.endswith("module.py:_call_impl")]


def test_other_sizes_are_served_as_long_as_nothing_consumed_them() -> None:
    def model(x: Tensor) -> Tensor:
        return (x.view(x.shape[0], -1) * x.numel()).sum(-1) / x.size(-1)

    trace = bt.trace(model, ONES)
    for shape in ((1, 2), (4, 7), (9, 1)):
        x = torch.randn(shape)
        assert bits(trace.replay(x)) == bits(model(x))


def test_sizes_made_from_sizes_are_computed_anew() -> None:
    def model(x: Tensor) -> tuple[Tensor, int]:
        n = x.shape[0] * 2 + 1
        return torch.zeros(n, x.shape[1] // 2), n

    trace = bt.trace(model, ONES)
    out, n = trace.replay(torch.ones(5, 8))
    assert (out.shape, n, type(n)) == ((11, 4), 11, int)


def test_a_loop_over_another_number_of_rows_diverges() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = x * 2
        return x

    trace = bt.trace(model, ONES)
    with pytest.raises(DivergenceError) as caught:
        trace.replay(torch.ones(4, 2))
    line = model.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"for `range(x.shape[0])` at {__file__}:{line} was 3 when traced and is 4 now"
    )
    assert isinstance(caught.value.step, bt.flow.LoopFlowStep)


def test_a_divergence_names_the_step_its_line_and_both_values() -> None:
    trace = bt.trace(signed, ONES)
    with pytest.raises(DivergenceError) as caught:
        trace.replay(-ONES)
    error = caught.value
    assert str(error) == (
        f"if `x.sum() > 0` at {__file__}:{LINE} was True when traced and is False now"
    )
    assert error.reason == str(error)
    assert error.step is trace.flow_steps[0]
    assert isinstance(error, RuntimeError)
    assert isinstance(error, bt.BendtraceError)


@pytest.mark.parametrize(
    ("source", "inputs", "other", "message"),
    [
        ("x if x.shape[0] > 2 else -x", ONES, ONES[:1],
         "conditional expression `x.shape[0] > 2` at {} was True when traced and is False now"),
        ("x * len(x)", ONES, ONES[:2], "len `len(x)` at {} was 3 when traced and is 2 now"),
        ("x * int(x.sum())", ONES, ONES * 2,
         "int `int(x.sum())` at {} was 6 when traced and is 12 now"),
        ("sum([r for r in x])", ONES, ONES[:2],
         "comprehension `x` at {} was 3 when traced and is 2 now"),
        ("x.unbind(0)[0]", ONES, ONES[:2],
         "number of results of `x.unbind(0)` at {} was 3 when traced and is 2 now"),
        ("[4, 5, 6][x.argmax()]", torch.tensor([1, 2, 0]), torch.tensor([1, 2, 3]),
         "index `[4, 5, 6][x.argmax()]` at {} was 1 when traced and is 2 now"),
        ("x if x.is_contiguous() else -x", ONES, torch.ones(2, 3).T,
         "value of `x.is_contiguous()` at {} was True when traced and is False now"),
    ],
)  # fmt: skip
def test_messages_of_divergences(
    tmp_path: Path, source: str, inputs: Tensor, other: Tensor, message: str
) -> None:
    file = tmp_path / "net.py"
    file.write_text(f"def model(x):\n    return {source}\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    trace = bt.trace(namespace["model"], inputs)
    with pytest.raises(DivergenceError) as caught:
        trace.replay(other)
    assert str(caught.value) == message.format(f"{file}:2")


def test_messages_about_arguments() -> None:
    def model(x: Tensor, flag: bool) -> Tensor:
        return x + 1 if flag else x

    trace = bt.trace(model, ONES, True)
    with pytest.raises(DivergenceError, match=r"^flag is not True: it is False now$"):
        trace.replay(ONES, False)
    with pytest.raises(DivergenceError, match=r"^x is not of dtype torch.float32"):
        trace.replay(ONES.double(), True)
    with pytest.raises(DivergenceError, match=r"^x does not have 2 dimensions"):
        trace.replay(ONES[0], True)
    with pytest.raises(
        bt.errors.DivergenceError, match=r"^x requires grad|^x does not require grad"
    ):
        trace.replay(ONES.clone().requires_grad_(), True)


def test_a_model_changed_after_the_trace_is_a_divergence() -> None:
    model = Scaled()
    trace = bt.trace(model, ONES)
    model.scale = 3.0
    with pytest.raises(DivergenceError, match=r"^self.scale is not 2.0: it is 3.0 now$"):
        trace.replay(ONES)
    model.scale = 2.0
    model.fc.weight.data.mul_(2)  # values are read anew
    assert bits(trace.replay(ONES)) == bits(model(ONES))
    model.eval()
    with pytest.raises(DivergenceError, match=r"training"):
        trace.replay(ONES)


# What cannot be replayed


def to_numpy(x: Tensor) -> Tensor:
    return x * float(x.numpy().tobytes()[0])


def with_a_text_by_chance(x: Tensor) -> Tensor:
    return x * len(np.random.choice(["a", "bc"]))


def of_unknown_origin(x: Tensor) -> Tensor:
    return x + torch.from_dlpack(np.ones(2, dtype=np.float32))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (to_numpy, "^numpy at {file}:{line} passes the content of a tensor to code that cannot"),
        (with_a_text_by_chance, r"^choice at {file}:{line} returns a str_"),
        (of_unknown_origin, r"unknown origin is used at {file}:{line}"),
    ],
)
def test_what_cannot_be_watched_is_a_reason_not_to_replay(
    function: Callable[..., Any], reason: str
) -> None:
    trace = bt.trace(function, ONES)
    line = function.__code__.co_firstlineno + 1
    (found,) = trace.why_live
    assert re.search(reason.format(file=re.escape(__file__), line=line), found)
    for use in (lambda: trace.replay(ONES), lambda: trace.code):
        with pytest.raises(NotReplayableError) as caught:
            use()
        assert caught.value.reasons == trace.why_live
        assert str(caught.value) == f"this trace cannot be replayed: {found}"
    assert repr(trace).endswith(", live only>")
    assert f"\tCannot be replayed: {found}\n" in str(trace)


# Generated code


def test_the_code_is_straight_line_python() -> None:
    def model(x: Tensor) -> Tensor:
        for i in range(2):
            x = x @ x.T
        return x[0] + x.size(1)

    lines = bt.trace(model, torch.eye(2)).code.splitlines()
    assert [line for line in lines if not line.startswith("    del ")] == [
        "def run(A, E):",
        "    p0 = A[0]",
        "    v0 = p0",
        "    v1 = v0.T",
        "    v2 = c0(v0, v1)",
        "    v3 = v2.T",
        "    v4 = c0(v2, v3)",
        "    v5 = v4[0]",
        "    v6 = c1(v4, 1)",
        "    v7 = c2(v5, v6)",
        "    return v7",
    ]


def test_a_branch_on_values_is_a_test_in_the_code() -> None:
    code = bt.trace(signed, ONES).code
    assert "if not v3:\n        E += v2, v3,\n        return leave_0_false\n" in code


ODD = "import os; abort() #"


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(ODD, nn.Linear(2, 2))
        self.register_buffer("x'\"\nabort()", torch.ones(2))
        setattr(self, "a b", 3)
        self.__dict__["abort()\n"] = None

    def forward(self, x: Tensor, **options: Tensor) -> dict[str, Any]:
        y = getattr(self, ODD)(x) + options["import os"] + self._buffers["x'\"\nabort()"]
        self.__dict__["abort()\n"] = y
        y = y * getattr(self, "a b")
        return {"__import__('os').abort()": y, "n": options["import os"].shape[0]}


def identifiers(code: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        for name in ("id", "attr", "arg", "name"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                found.add(value)
    return found


def test_names_of_the_model_do_not_become_code() -> None:
    model = Odd()
    model(ONES, **{"import os": ONES})  # the attribute that it sets is there from now on
    trace = bt.trace(model, ONES, **{"import os": ONES})
    known = r"run|check|compare|measure|number|[AEpvco]\d*"
    theirs = {name for name in identifiers(trace.code) if not re.fullmatch(known, name)}
    assert theirs == {"shape"}
    assert "abort" not in ast.unparse(_without_strings(trace.code))
    assert "abort" not in ast.unparse(_without_strings(trace._program.check_code.text))
    x = torch.randn(4, 2)
    assert bits(trace.replay(x, **{"import os": x})) == bits(model(x, **{"import os": x}))


def _without_strings(code: str) -> ast.AST:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return tree


def test_keywords_of_python_can_be_arguments_of_an_op() -> None:
    assert keyword.iskeyword("from")

    def model(x: Tensor) -> Tensor:
        return x.clone().uniform_(**{"from": 1.0, "to": 2.0})

    trace = bt.trace(model, ONES)
    torch.manual_seed(1)
    given = trace.replay(ONES)
    torch.manual_seed(1)
    assert bits(given) == bits(model(ONES))


def test_odd_names_print_on_one_line_each() -> None:
    trace = bt.trace(Odd(), ONES, **{"import os": ONES})
    lines = str(trace.graph).splitlines()
    assert len(lines) == 1 + len(trace.graph)
    assert all(line.startswith(("    %", "    return ", "graph():")) for line in lines)


# Printing


def test_a_trace_is_shown_by_its_function_and_size() -> None:
    assert repr(bt.trace(signed, ONES)) == "<Trace of signed: 5 ops, 1 flow step>"
    assert repr(bt.trace(Scaled(), ONES)) == "<Trace of Scaled: 8 ops, 1 flow step>"
    assert repr(bt.trace(lambda x: x, ONES)) == "<Trace of <lambda>: 1 op, 0 flow steps>"

    def local(x: Tensor) -> Tensor:
        return x if x.shape[0] > 1 else -x

    assert repr(bt.trace(local, ONES)) == "<Trace of local: 4 ops, 2 flow steps>"


def test_a_trace_prints_its_log_and_its_graph_prints_as_in_fx() -> None:
    trace = bt.trace(signed, ONES)
    assert str(trace).splitlines()[:5] == [
        "Log of signed forward pass:",
        "\tModel structure: purely feedforward, with branching; 0 total modules.",
        "\t5 tensors (77 B) computed in forward pass; 0 tensors (0 B) saved.",
        "\t0 parameter operations (0 params total; 0 B).",
        "\tControl flow: 1 branch.",
    ]
    assert "\t\tbool_1  if      True     x.sum() > 0  test_trace.py:" in str(trace)
    assert str(trace).endswith(
        "\tLayers:\n\t\t0: input_1_0   (3, 2)\n\t\t1: sum_1_1     ()\n"
        "\t\t2: gt_1_2      ()\n\t\t3: add_1_3     (3, 2)\n\t\t4: output_1_4  (3, 2)"
    )
    log = str(bt.trace(nn.Sequential(nn.Linear(2, 4)), ONES))
    assert "\n\t\t1: linear_1_1  (3, 4)  0\n" in log
    saved = bt.log_forward_pass(nn.Sequential(nn.Linear(2, 4)), ONES)
    assert "\n\t\t1: linear_1_1  (3, 4)  0\n" in str(saved)
    its = bt.compat.torchlens.log_forward_pass(nn.Sequential(nn.Linear(2, 4)), ONES)
    assert "\t\t1: linear_1_1 \n" in str(its)
    assert str(trace.graph) == (
        "graph():\n"
        "    %x : Tensor(3, 2) [num_users=2] = placeholder[target=x]\n"
        "    %sum : Tensor() [num_users=1] = call_method[target=sum](args = (%x,), kwargs = {})\n"
        "    %gt : Tensor() [num_users=1] = call_method[target=gt](args = (%sum, 0), kwargs = {})\n"
        "    %bool : bool [num_users=0] = call_method[target=__bool__](args = (%gt,), kwargs = {})\n"
        "    %add : Tensor(3, 2) [num_users=1] = call_method[target=add](args = (%x, 1), kwargs = {})\n"
        "    return %add"
    )  # fmt: skip


def test_json_holds_nodes_steps_and_guards() -> None:
    trace = bt.trace(signed, ONES)
    document = json.loads(trace.to_json(indent=2))
    assert document == trace.to_dict()
    assert list(document) == ["function", "nodes", "flow_steps", "guards", "why_live"]
    assert document["function"] == "signed"
    assert [node["name"] for node in document["nodes"]] == [
        "x", "sum", "gt", "bool", "add", "output",
    ]  # fmt: skip
    assert document["flow_steps"] == trace.flow_steps.to_list()
    assert document["guards"] == trace.guards.to_list()
    assert document["why_live"] == []
    json.loads(bt.trace(Odd(), ONES, **{"import os": ONES}).to_json())
    json.loads(bt.trace(to_numpy, ONES).to_json())


# Nothing stays behind


class Nested(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.fails = fails
        self.log: dict[str, Any] = {}

    def forward(self, x: Tensor, sizes: list[int], n: int) -> dict[Any, Any]:
        y = self.stack(x)
        rows = x.shape[0]
        self.log["rows"] = rows
        self.log[rows] = [rows, {"twice": rows * 2}]
        self.rows = rows + n
        sizes.append(rows)
        if self.fails:
            raise ValueError("on purpose")
        total = y.sum().item()
        return {
            "total": total, rows: (rows, {rows}), "many": [total > 0, x.shape], "y": y,
            "slice": slice(rows, n), "nested": {"deep": ([rows],)},
        }  # fmt: skip


def parts_of(model: nn.Module) -> list[Any]:
    return [
        (path, [(name, id(value)) for name, value in vars(module).items()])
        for path, module in model.named_modules()
    ]


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_nothing_stays_behind(fails: bool) -> None:
    model = Nested(fails)
    torch.manual_seed(0)
    eager = Nested(fails)
    model.load_state_dict(eager.state_dict())
    kept = {name: id(value) for name, value in vars(builtins).items()}
    modules, before = parts_of(model), footprint()
    sizes: list[int] = []
    torch.manual_seed(1)
    if fails:
        with pytest.raises(ValueError, match="on purpose"):
            bt.trace(model, ONES, sizes, 5)
        output = None
    else:
        output = bt.trace(model, ONES, sizes, 5).output
    assert footprint() == before
    # Besides what forward itself sets, every attribute is the same object as before.
    after = [(path, [item for item in vs if item[0] != "rows"]) for path, vs in parts_of(model)]
    assert after == modules
    assert {name: id(value) for name, value in vars(builtins).items()} == kept
    torch.manual_seed(1)
    wanted_sizes: list[int] = []
    wanted = None
    try:
        wanted = eager(ONES, wanted_sizes, 5)
    except ValueError:
        assert fails
    # `bits` refuses traced scalars wherever they are.
    assert bits(output) == bits(wanted)
    assert bits(sizes) == bits(wanted_sizes) == bits([3])
    assert state(model) == state(eager)
    assert type(model.rows) is int
    assert type(model.log["rows"]) is int
    assert {type(key) for key in model.log} == {str, int}


def test_a_tensor_that_the_model_keeps_is_an_ordinary_one() -> None:
    kept: list[Any] = []

    def model(x: Tensor) -> Tensor:
        kept.append(x * 2)
        kept.append(x.shape)
        return x + 1

    bt.trace(model, ONES)
    assert type(kept[0]) is Tensor
    assert bits(kept) == bits([ONES * 2, ONES.shape])


def test_a_traced_scalar_that_got_out_is_a_plain_number_to_others() -> None:
    """A generator keeps its own variables, where no one can exchange them."""
    running: list[Any] = []

    def rows(x: Tensor) -> Any:
        n = x.shape[0]
        yield n
        yield n

    def model(x: Tensor) -> Tensor:
        running.append(rows(x))
        next(running[0])
        return x + 1

    bt.trace(model, ONES)
    n = next(running[0])
    assert n == 3
    assert n + 1 == 4
    assert isinstance(n, int)
    assert torch.equal(torch.ones(2) * n, torch.full((2,), 3.0))
    assert list(range(n)) == [0, 1, 2]
    assert f"{n}" == "3"


def test_tracing_inside_of_a_traced_function_leaves_the_outer_trace_whole() -> None:
    def inner(x: Tensor) -> Tensor:
        return x * 2

    inners = []

    def outer(x: Tensor) -> Tensor:
        inners.append(bt.trace(inner, torch.ones(2)))
        return x + 1

    before = footprint()
    trace = bt.trace(outer, ONES)
    assert footprint() == before
    assert bits(trace.output) == bits(ONES + 1)
    assert bits(inners[0].output) == bits(torch.ones(2) * 2)


class Narrow(nn.Module):
    """A model whose second layer does not fit the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x).relu()
        if h.sum() > -1:
            h = h * 2
        return self.second(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("save", [None, "all", "relu_1", "second.*"])
def test_an_error_has_the_log_up_to_the_op_that_raised(save: Any) -> None:
    model, x = Narrow(), torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as expected:
        model(x)
    with pytest.raises(RuntimeError) as caught:
        bt.trace(model, x, save=save)
    assert str(caught.value) == str(expected.value)
    assert model.calls == 2
    trace = caught.value.bendtrace  # type: ignore[attr-defined]
    assert [entry.name for entry in trace if entry.kind == "op"][-1].startswith("mul_1")
    assert [step.value for step in trace.flow_steps] == [True]
    assert trace.output is None
    (reason,) = trace.why_live
    assert "raised RuntimeError in linear(float32[2, 8], float32[2, 4], float32[2])" in reason
    assert " of second at " in reason
    kept = trace["relu_1"].tensor_contents
    if save in ("all", "relu_1"):
        assert torch.equal(kept, model.first(x).relu())
    else:
        assert kept is None
    with pytest.raises(NotReplayableError, match="raised RuntimeError"):
        trace.replay(x)


def test_an_error_of_the_models_own_has_the_log_too() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if (x * 2).sum() > 0:
            raise ValueError("mine")
        return x

    with pytest.raises(ValueError, match="mine") as caught:
        bt.trace(model, torch.ones(2))
    trace = caught.value.bendtrace  # type: ignore[attr-defined]
    assert [step.text for step in trace.flow_steps] == ["(x * 2).sum() > 0"]
    assert trace.why_live == ("the run raised ValueError",)
    assert caught.value.__notes__ == [
        "the attribute `bendtrace` of this error is the trace of the run up to here"
    ]
