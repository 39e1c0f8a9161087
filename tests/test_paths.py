"""Node paths: the tree of a run, its names, strings that lead into it, and its printed forms."""

# ruff: noqa: RUF001

from __future__ import annotations

import builtins
import collections
import copy
import dataclasses
import inspect
import json
import keyword
import math
import operator
import pickle
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.compat.graphpatch import PatchableGraph
from bendtrace.errors import InputError, NodePathError
from bendtrace.log.nodes import Registry, identifier
from bendtrace.log.path_views import Node, Tree
from bendtrace.log.run import Run
from bendtrace.tape.tape import OpKind, TensorMeta
from tests.corpus import CASES, Case
from tests.promise import bits
from tests.shares import some


def grow(
    function: Callable[..., Any], *args: Any, registry: Registry | None = None, **kwargs: Any
) -> Tree:
    """Trace a function and return its tree."""
    return Run(bt.trace(function, *args, **kwargs)._recording, function, registry).tree


def line_of(function: Any, text: str) -> int:
    """Number of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if text in line)


# What holds for every tree


def assert_consistent(trace: bt.Trace, tree: Tree) -> None:
    """Names can be typed, paths lead to what they name, and everything on the tape has one."""
    ops = trace._recording.tape.ops
    for data in tree.data.walk():
        assert data.passes
        for child in data.children.values():
            assert all(0 <= made.parent < len(data.passes) for made in child.passes)
        if not data.path:
            continue
        assert data.name.isidentifier()
        assert not keyword.iskeyword(data.name)
        assert not data.name.startswith("_")
        node = tree.root
        for name in data.path.split("."):
            assert name in dir(node)
            node = getattr(node, name)
        assert node._data is data
        assert tree.resolve(data.path, leaf=False) == node
        for made in data.passes:
            if data.kind == "tensor" and made.index is not None and not made.element:
                assert ops[made.index].meta.shape == made.shape
    for op in ops:
        if isinstance(op.meta, TensorMeta) and op.raised is None:
            passes = tree.resolve(tree.path_of(op.index))._passes
            origin = tree._elements.get(op.index, (op.index, ()))
            assert origin in [(made.index, made.element) for made in passes]
            assert len(passes) == 1 or op.kind is OpKind.STATE
    for number, call in enumerate(trace.module_calls):
        path = tree.call_path(number)
        assert (path == "") is (call is trace._recording.root)
        assert tree.resolve(path, leaf=False)._passes[0].index == number


def assert_storable(tree: Tree, ops: int) -> None:
    """A tree that went through JSON is the same to look at and to look things up in."""
    again = Tree.from_dict(json.loads(json.dumps(tree.to_dict())))
    assert again.root._show(flow=True, limit=None) == tree.root._show(flow=True, limit=None)
    assert list(map(again.path_of, range(ops))) == list(map(tree.path_of, range(ops)))
    assert again.outputs == tree.outputs
    for data in tree.data.walk():
        one, other = (some.resolve(data.path, leaf=False) for some in (tree, again))
        assert (one._code, one._shape) == (other._code, other._shape)


def run_code(tree: Tree, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the code of the root as if it were the model's forward."""
    home = sys.modules[getattr(model, "__module__", None) or __name__]
    names = {
        **vars(home), "torch": torch, "builtins": builtins, "operator": operator,
        "PackedSequence": nn.utils.rnn.PackedSequence,
        "device": torch.device,
        "inf": float("inf"), "nan": float("nan"), "Size": lambda *sizes: torch.Size(sizes),
        "OrderedDict": lambda **items: collections.OrderedDict(items), "math": math,
    }  # fmt: skip
    local: dict[str, Any] = {}
    exec(str(tree.root._code), names, local)
    (function,) = local.values()
    called = model.forward if isinstance(model, nn.Module) else model
    given = inspect.signature(called).bind(*args, **kwargs).arguments
    wanted = list(inspect.signature(function).parameters)
    own = [model] if wanted[:1] == ["self"] else []
    return function(*own, *(given[name] for name in wanted[len(own) :]))


# Values from other modules, errors that the model caught, and objects cannot be written as code.
_NO_CODE = re.compile(r"<\w|# raised|\bself\.\w+\.\w+\[0\]\(")
# What their code calls is not to be had by the name that it is called by.
_OTHERS_NAMES = frozenset(
    {
        "torch_return_types_output", "closure_over_tensor", "partial_as_model",
        "bound_method_as_model", "callable_object_as_model",
    }
)  # fmt: skip


@pytest.mark.parametrize("case", some(CASES, 4, start=2), ids=lambda case: case.name)
def test_the_tree_of_every_model_of_the_corpus_is_consistent_and_its_code_runs(case: Case) -> None:
    make = next(iter(case.paths.values()))
    torch.manual_seed(0)
    model = case.make()
    args, kwargs = make()
    torch.manual_seed(1)
    trace = bt.trace(model, *args, **kwargs)
    tree = Run(trace._recording, model).tree
    assert_consistent(trace, tree)
    assert_storable(tree, len(trace.ops))
    if _NO_CODE.search(tree.root._code) or case.name in _OTHERS_NAMES:
        return
    torch.manual_seed(0)
    model = case.make()
    args, kwargs = make()
    again = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = bits(model(*args, **kwargs))
    args, kwargs = make()
    torch.manual_seed(1)
    assert bits(run_code(tree, again, args, kwargs)) == expected


# Names


class Odd(nn.Module):
    """Submodules whose names are taken, or cannot be typed."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.input, self.keys = nn.Linear(2, 2), nn.ReLU(), nn.Tanh()
        self._code = nn.Sigmoid()
        self.parts = nn.ModuleDict({"class": nn.ReLU(), "a b": nn.Tanh(), "é-1": nn.Tanh()})
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)])
        self.hidden = [nn.Linear(2, 2), nn.Linear(2, 2)]

    def forward(self, input: Tensor) -> Tensor:
        x = self._code(self.keys(self.input(self.output(input))))
        for part in self.parts.values():
            x = part(x)
        for part in self.hidden:
            x = part(x)
        return self.nested[0][0](x) & 1 if x.dtype is torch.int64 else self.nested[1](x)


def test_names_that_are_taken_or_cannot_be_typed_are_changed_and_found_as_they_are() -> None:
    tree = grow(Odd(), torch.ones(3, 2))
    assert list(tree.root) == [
        "input", "output_1", "input_1", "keys", "code", "parts_class", "parts_a_b", "parts_é_1",
        "hidden_0", "hidden_1", "nested_1", "output",
    ]  # fmt: skip
    spelled = {
        "output.linear": "output_1.linear",
        "input.relu": "input_1.relu",
        "_code.sigmoid": "code.sigmoid",
        "parts.class.relu": "parts_class.relu",
        "parts['a b'].tanh": "parts_a_b.tanh",
        'parts["é-1"].tanh': "parts_é_1.tanh",
        "hidden[1].linear": "hidden_1.linear",
        "nested[1].linear": "nested_1.linear",
        "output": "output",
        "input": "input",
    }
    for text, path in spelled.items():
        assert tree.resolve(text)._path == path
    assert tree.root._code.startswith("def forward(self, input : torch.Tensor):\n")
    assert getattr(tree.root, "keys").tanh._path == "keys.tanh"  # noqa: B009


def test_the_name_of_a_call_never_stands_for_another_call() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Branch()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) + self.block(x * 0)

    tree = grow(Calls(), torch.full((2,), 5.0))
    assert tree.resolve("block_1.low.linear")._path == "block_1.low.linear"
    with pytest.raises(NodePathError, match="'block' has no 'low'"):
        tree.resolve("block.low.linear")
    with pytest.raises(NodePathError, match="the model has no 'add_1'"):
        tree.resolve("add_1")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("linear", "linear"), ("layers.8", "layers_8"), ("0", "sub_0"), ("3.1", "sub_3_1"),
        ("_conv", "conv"), ("__and__", "and__"), ("class", "class_"), ("a b", "a_b"),
        ("", "op"), ("___", "op"), ("ﬁt", "fit"), ("x['k']", "x_k"), ("relu_", "relu_"),
        ("²", "sub_2"), ("a\nb", "a_b"), ("None", "None_"),
    ],
)  # fmt: skip
def test_an_identifier_can_be_typed_after_a_dot(text: str, name: str) -> None:
    assert identifier(text) == name
    assert name.isidentifier()


def test_items_of_a_sequential_are_called_as_items_of_tuples_are() -> None:
    tree = grow(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU())), torch.ones(1, 2))
    assert list(tree.root) == ["input", "sub_0", "sub_1", "output"]
    for text in ("sub_1.sub_0.relu", "1.0.relu", "[1][0].relu", "sub_1[0].relu", "1.sub_0.relu"):
        assert tree.resolve(text)._path == "sub_1.sub_0.relu"
    assert "    sub_0 = self[0](input);  input = None\n" in tree.root._code


def test_an_item_of_a_called_sequential_is_also_found_by_the_joined_name() -> None:
    model = nn.ModuleDict({"features": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    tree = grow(lambda x: model["features"](x), torch.ones(1, 2))
    (name,) = [name for name in tree.root if name.endswith("features")]
    for text in (f"{name}_1.relu", f"{name}.1.relu", f"{name}[1].relu", f"{name}.sub_1.relu"):
        assert tree.resolve(text)._path == f"{name}.sub_1.relu"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) * self.embed.weight.sum()


def test_state_goes_by_the_name_that_each_module_has_for_it_and_shows_in_each_call() -> None:
    tree = grow(Tied(), torch.zeros(3).long())
    assert (
        repr(tree)
        == """\
<root>: Graph(7)
├─ids: Tensor(3)
├─embed: Graph(4)
│ ├─input: Tensor(3)
│ ├─weight: Tensor(5, 2)
│ ├─embedding: Tensor(3, 2)
│ └─output: Tensor(3, 2)
├─head: Graph(4)
│ ├─input: Tensor(3, 2)
│ ├─weight: Tensor(5, 2)
│ ├─linear: Tensor(3, 5)
│ └─output: Tensor(3, 5)
├─embed_weight: Tensor(5, 2)
├─sum: Tensor()
├─mul: Tensor(3, 5)
└─output: Tensor(3, 5)"""
    )


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 3:
            x = self.high(x).relu() + 1
        else:
            x = self.low(x) + 2
        return self.last(x) + 3


def test_a_second_path_keeps_the_names_of_what_it_shares_with_the_first() -> None:
    model, registry = Branch(), Registry()
    trees = [grow(model, torch.full((2,), v), registry=registry) for v in (5.0, 0.0, 5.0)]
    assert list(trees[0].root) == [
        "x", "sum", "gt", "bool", "high", "relu", "add", "last", "add_1", "output",
    ]  # fmt: skip
    assert list(trees[1].root) == [
        "x", "sum", "gt", "bool", "low", "add_2", "last", "add_1", "output",
    ]  # fmt: skip
    assert repr(trees[2]) == repr(trees[0])
    alone = grow(model, torch.zeros(2))
    assert "add_2" not in alone.root  # there it is the first sum


def test_a_registry_can_be_shared_by_threads() -> None:
    model, registry, found = Branch(), Registry(), []
    traces = [bt.trace(model, torch.full((2,), float(v))) for v in (5, 0) * 4]

    def build(trace: bt.Trace) -> None:
        found.append(Run(trace._recording, model, registry).tree)

    threads = [threading.Thread(target=build, args=(trace,)) for trace in traces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({repr(tree) for tree in found}) == 2
    names = [{tuple(n.places): n.name for n in t.data.walk() if n.role == "op"} for t in found]
    assert all(a[key] == b[key] for a in names for b in names for key in a.keys() & b.keys())


# Passes


def repeat(x: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x + 1
    return x * 2


def test_a_loop_is_one_node_with_passes() -> None:
    tree = grow(repeat, torch.ones(4, 8), 100)
    assert (
        repr(tree)
        == """\
<root>: Graph(5)
├─x: Tensor(4, 8)
├─n: int
├─add: Tensor(4, 8) ×100
├─mul: Tensor(4, 8)
└─output: Tensor(4, 8)"""
    )
    assert [tree.path_of(i) for i in (0, 1, 2, 3, 101, 102)] == [
        "x", "n", "add:1", "add:2", "add:100", "mul",
    ]  # fmt: skip
    node = tree.resolve("add:100")
    assert [made.index for made in node._passes] == [101]
    assert repr(node) == "add:100: Tensor(4, 8)"
    assert len(tree.resolve("add")._passes) == 100


def test_the_code_of_a_loop_is_a_loop() -> None:
    tree = grow(repeat, torch.ones(4), 100)
    assert (
        tree.root._code
        == """\
def repeat(x : torch.Tensor, n : int):
    add = x + 1;  x = None
    for _ in range(99):
        add = add + 1
    mul = add * 2;  add = None
    return mul"""
    )


def walked(indices: list[int]) -> Callable[[Tensor], list[Tensor]]:
    def walk(x: Tensor) -> list[Tensor]:
        found = []
        for i in indices:
            found.append(x[i] * x[i - 1] * 3 + i)
        return found

    return walk


@pytest.mark.parametrize(
    ("indices", "loops"),
    [
        ([1, 2, 3, 4], ["for i in range(1, 5):"]),
        ([2, 4, 6], ["for i in range(2, 8, 2):"]),
        ([9, 7, 5, 3], ["for i in range(9, 1, -2):"]),
        ([4, 4, 4], ["for _ in range(3):"]),
        ([1, 2, 5, 7], []),
        ([1, 2, 3, 4, 9, 8], ["for i in range(1, 5):"]),
    ],
)
def test_numbers_that_go_on_evenly_are_counted_by_a_loop_in_the_code(
    indices: list[int], loops: list[str]
) -> None:
    function, x = walked(indices), torch.arange(10.0)
    tree = grow(function, x)
    assert re.findall(r"for .*:", tree.root._code) == loops
    for got, expected in zip(run_code(tree, function, (x,), {}), function(x), strict=True):
        assert torch.equal(got, expected)


def test_what_repeats_is_written_with_the_number_that_counts() -> None:
    assert (
        grow(walked([1, 2, 3, 4]), torch.arange(10.0)).root._code
        == """\
def walk(x : torch.Tensor):
    add_passes = []
    for i in range(1, 5):
        getitem = x[i]
        getitem_1 = x[i - 1]
        mul = getitem * getitem_1;  getitem = getitem_1 = None
        mul_1 = mul * 3;  mul = None
        add = mul_1 + i;  mul_1 = None
        add_passes.append(add)
    x = None
    return [*add_passes[-4:]]"""
    )


def test_what_repeats_may_have_a_comment() -> None:
    def tried(x: Tensor) -> Tensor:
        for number in range(4):
            try:
                x.view(5, -1)
            except RuntimeError:
                x = x + number
        return x

    assert (
        grow(tried, torch.ones(2, 2)).root._code
        == """\
def tried(x : torch.Tensor):
    x.view(5, -1)  # raised RuntimeError
    add = x + 0;  x = None
    for i in range(1, 4):
        add.view(5, -1)  # raised RuntimeError
        add = add + i
    return add"""
    )


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, found = x.new_zeros(x.shape[0], 4), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            found.append(h)
        return self.head(torch.stack(found, 1))


def test_a_module_called_in_a_loop_is_one_graph_with_passes() -> None:
    tree = grow(Cells(), torch.ones(2, 50, 3))
    assert (
        repr(tree.root.cell)
        == """\
cell: Graph(8) ×50
├─input: Tensor(2, 3) ×50
├─hx: Tensor(2, 4) ×50
├─weight_ih: Tensor(12, 3) ×50
├─weight_hh: Tensor(12, 4) ×50
├─bias_ih: Tensor(12) ×50
├─bias_hh: Tensor(12) ×50
├─gru_cell: Tensor(2, 4) ×50
└─output: Tensor(2, 4) ×50"""
    )
    assert len(tree.root.cell._data.code) == 1


def test_code_keeps_the_earlier_values_of_a_loop_where_they_are_needed() -> None:
    tree = grow(Cells(), torch.ones(2, 50, 3))
    assert (
        tree.root._code
        == """\
def forward(self, x : torch.Tensor):
    cell_passes = []
    shape_0 = x.shape[0]
    new_zeros = x.new_zeros(shape_0, 4);  shape_0 = None
    shape_1 = x.shape[1];  shape_1 = None
    getitem = x[:, 0]
    cell = self.cell(getitem, new_zeros);  getitem = new_zeros = None
    for i in range(1, 50):
        cell_passes.append(cell)
        getitem = x[:, i]
        cell = self.cell(getitem, cell);  getitem = None
    x = None
    cell_passes.append(cell)
    stack = torch.stack([*cell_passes[-50:]], 1);  cell_passes = cell = None
    head = self.head(stack);  stack = None
    return head"""
    )


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Branch()

    def forward(self, x: Tensor) -> Tensor:
        for value in (5.0, 0.0, 5.0):
            x = self.block(x * 0 + value)
        return x


def test_the_passes_of_a_graph_can_differ_and_be_looked_at_one_by_one() -> None:
    tree = grow(Twice(), torch.ones(2))
    block = tree.root.block
    assert list(block) == [
        "x", "sum", "gt", "bool", "high", "relu", "add", "low", "add_2", "last", "add_1", "output",
    ]  # fmt: skip
    assert list(tree.root["block:1"]) == list(tree.root["block:3"])
    assert "low" in tree.root["block:2"]
    assert "high" not in tree.root["block:2"]
    assert tree.root["block:3.relu"]._path == "block.relu:2"
    assert tree.resolve("block:3.relu") == tree.resolve("block.relu:2")
    assert tree.resolve("block:2.low.linear")._path == "block.low.linear"
    with pytest.raises(NodePathError, match=r"'block' has no 'relu'; .*it has 'x', 'sum'"):
        tree.resolve("block:2.relu")
    with pytest.raises(NodePathError, match=r"'block' has 3 passes, so there is no :4"):
        tree.resolve("block:4.relu")


def test_the_code_of_a_graph_tells_apart_passes_that_ran_differently() -> None:
    tree = grow(Twice(), torch.ones(2))
    code = tree.root.block._code
    assert code.count("def forward(self, x : torch.Tensor):") == 2
    assert "# passes 1, 3\ndef forward" in code
    assert "# pass 2\ndef forward" in code
    assert "# pass" not in tree.root["block:2"]._code
    assert "low = self.low(x)" in tree.root["block:2"]._code


def test_a_size_that_differs_from_pass_to_pass_shows_how_far_it_reaches() -> None:
    def grown(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.cat([x, x[:1]])
        return x

    tree = grow(grown, torch.ones(1, 3))
    assert repr(tree.root.cat) == "cat: Tensor(2..5, 3) ×4"
    assert tree.root.cat._shape == torch.Size([2, 3])
    assert tree.root["cat:4"]._shape == torch.Size([5, 3])


def test_calls_of_one_module_from_two_places_are_two_nodes() -> None:
    linear = nn.Linear(2, 2)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return self.linear(x)

    tree = grow(Shared(), torch.ones(1, 2))
    assert list(tree.root) == ["x", "linear", "linear_1", "output"]
    assert list(tree.root.linear) == list(tree.root.linear_1)
    assert tree.path_of(4) == "linear_1.linear"


def test_modules_that_belong_to_no_module_are_told_apart_if_they_have_state() -> None:
    def run(x: Tensor) -> Tensor:
        for _ in range(3):
            x = nn.ReLU()(x)
        return x

    tree = grow(run, torch.ones(2))
    assert list(tree.root) == ["x", "ReLU", "output"]
    assert len(tree.root.ReLU._passes) == 3
    assert "ReLU = <ReLU>(x)" in tree.root._code


def test_a_forward_called_past_the_module_has_no_node_of_its_own() -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    tree = grow(Past(), torch.ones(1, 2))
    assert list(tree.root) == ["x", "inner_weight", "inner_bias", "linear", "output"]
    assert "inner_weight = self.inner.weight\n" in tree.root._code


# Values with structure

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Held:
    value: Tensor
    more: dict[Any, Any]
    note: str = "plain"


def structured(batch: dict[str, Tensor], *rest: Tensor, scale: float = 2.0, **more: Tensor) -> Any:
    held = Held(batch["a.b"] + 1, {"k": [batch["c"] * 2, (rest[0],)], 3: more["z"]})
    top = Pair(*batch["c"].max(0))
    half = batch["c"].split(2)[1]
    return held, top, half * scale, None, batch["c"].shape, 7


@pytest.fixture
def nested() -> Tree:
    batch = {"a.b": torch.ones(2), "c": torch.ones(4, 3)}
    return grow(structured, batch, torch.zeros(1), torch.zeros(2), z=torch.ones(5))


def test_containers_show_what_they_hold(nested: Tree) -> None:
    assert (
        repr(nested)
        == """\
<root>: Graph(11)
├─batch: dict(2)
│ ├─a_b: Tensor(2)
│ └─c: Tensor(4, 3)
├─rest: tuple(2)
│ ├─sub_0: Tensor(1)
│ └─sub_1: Tensor(2)
├─more: dict(1)
│ └─z: Tensor(5)
├─add: Tensor(2)
├─mul: Tensor(4, 3)
├─max: max(2)
│ ├─values: Tensor(3)
│ └─indices: Tensor(3)
├─split: tuple(2)
│ ├─sub_0: Tensor(2, 3)
│ └─sub_1: Tensor(2, 3)
├─mul_1: Tensor(2, 3)
├─shape_0: int
├─shape_1: int
└─output: tuple(6)
  ├─sub_0: Held(2)
  │ ├─value: Tensor(2)
  │ └─more: dict(2)
  │   ├─k: list(2)
  │   │ ├─sub_0: Tensor(4, 3)
  │   │ └─sub_1: tuple(1)
  │   │   └─sub_0: Tensor(1)
  │   └─sub_3: Tensor(5)
  ├─sub_1: Pair(2)
  │ ├─first: Tensor(3)
  │ └─second: Tensor(3)
  ├─sub_2: Tensor(2, 3)
  ├─sub_3: None
  ├─sub_4: Size(2)
  │ ├─sub_0: int
  │ └─sub_1: int
  └─sub_5: int"""
    )


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("batch|a.b", "batch.a_b"), ("batch['a.b']", "batch.a_b"), ("batch.a_b", "batch.a_b"),
        ("rest[0]", "rest.sub_0"), ("rest|sub_1", "rest.sub_1"), ("rest|1", "rest.sub_1"),
        ("output|sub_0.more.k.sub_1.sub_0", "output.sub_0.more.k.sub_1.sub_0"),
        ("output[0].more['k'][1][0]", "output.sub_0.more.k.sub_1.sub_0"),
        ("output|sub_0.more.3", "output.sub_0.more.sub_3"),
        ("output|sub_1.first", "output.sub_1.first"),
        ("output|sub_1.sub_0", "output.sub_1.first"), ("output[1][1]", "output.sub_1.second"),
        ("max|values", "max.values"), ("max|sub_1", "max.indices"), ("max[0]", "max.values"),
        ("split|sub_1", "split.sub_1"), ("output|sub_4.sub_0", "output.sub_4.sub_0"),
        (" mul ", "mul"),
    ],
)  # fmt: skip
def test_a_bar_digs_into_containers_of_any_kind(nested: Tree, text: str, path: str) -> None:
    assert nested.resolve(text)._path == path


def test_a_dig_leads_back_to_the_tape(nested: Tree) -> None:
    made = nested.resolve("max|indices")._passes
    assert nested.path_of(made[0].index, made[0].element) == "max.indices"
    outputs = {path: (index, element) for path, index, element in nested.outputs}
    assert nested.path_of(*outputs["output.sub_1.second"]) == "max.indices"
    assert outputs["output.sub_3"] == (None, ())
    assert list(outputs) == [
        "output.sub_0.value", "output.sub_0.more.k.sub_0", "output.sub_0.more.k.sub_1.sub_0",
        "output.sub_0.more.sub_3", "output.sub_1.first", "output.sub_1.second", "output.sub_2",
        "output.sub_3", "output.sub_4.sub_0", "output.sub_4.sub_1", "output.sub_5",
    ]  # fmt: skip


def test_shapes_of_containers_are_nested_as_they_are(nested: Tree) -> None:
    size = torch.Size
    assert nested.root._shape == (
        (size([2]), ((size([4, 3]), (size([1]),)), size([5]))),
        (size([3]), size([3])),
        size([2, 3]),
        None,
        (None, None),
        None,
    )
    assert nested.root.max._shape == (size([3]), size([3]))
    assert nested.root.shape_0._shape is None


def test_lstm_results_and_nested_states_are_containers() -> None:
    model = nn.LSTM(3, 4)
    tree = grow(model, torch.ones(2, 1, 3))
    assert tree.resolve("output|sub_1.sub_0")._shape == torch.Size([1, 1, 4])
    assert (
        repr(tree.root.lstm)
        == """\
lstm: tuple(3)
├─sub_0: Tensor(2, 1, 4)
├─sub_1: Tensor(1, 1, 4)
└─sub_2: Tensor(1, 1, 4)"""
    )


@pytest.mark.all
def test_outputs_of_hugging_face_models_are_dug_into_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=12, n_embd=8, n_head=2, vocab_size=20, n_positions=16,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    trace = bt.trace(model, torch.zeros(1, 3).long())
    tree = Run(trace._recording, model).tree
    assert tree.resolve("output|logits")._shape == torch.Size([1, 3, 20])
    assert tree.resolve("transformer.h[11].mlp.act.output")._shape == torch.Size([1, 3, 32])
    # Named `cache` since transformers 5.24.
    cache = next(key for key in trace.output if key in ("cache", "past_key_values"))
    assert f"{cache}: DynamicCache" in repr(tree.root.output)
    assert tree.resolve(f"output|{cache}.layers.sub_3.keys")._shape[2] == 3
    assert_consistent(trace, tree)
    assert_storable(tree, len(trace.ops))


def test_outputs_of_submodules_are_dug_into_as_well() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Held:
            return Held(x + 1, {"twice": x * 2})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            held = self.inner(x)
            return held.value + held.more["twice"]

    tree = grow(Outer(), torch.ones(2))
    assert tree.resolve("inner.output|more.twice")._passes[0].index == 2
    assert "    add = inner.value + inner.more['twice'];  inner = None\n" in tree.root._code


# Flow


def test_flow_steps_are_shown_where_they_happened_on_request() -> None:
    def loops(x: Tensor) -> Tensor:
        if x.sum() > 3:
            x = x * 2
        for row in x:
            x = x - row
        return x + 1

    tree = grow(loops, torch.ones(2, 2))
    here = "test_paths.py"
    assert (
        tree.root._show(flow=True)
        == f"""\
<root>: Graph(9)
├─x: Tensor(2, 2)
├─sum: Tensor()
├─gt: Tensor()
├─bool: bool
├─if x.sum() > 3: True  ({here}:{line_of(loops, "if x.sum()")})
├─mul: Tensor(2, 2)
├─unbind: tuple(2)
│ ├─sub_0: Tensor(2)
│ └─sub_1: Tensor(2)
├─for x: 2 iterations  ({here}:{line_of(loops, "for row")})
├─sub: Tensor(2, 2) ×2
├─add: Tensor(2, 2)
└─output: Tensor(2, 2)"""
    )
    assert "if x.sum()" not in repr(tree)


def test_every_trace_of_a_bended_module_has_a_tree_with_the_same_names() -> None:
    bended, registry = bt.BendedModule(Branch()), Registry()
    for value in (5.0, 0.0):  # the second one is resumed
        bended(torch.full((2,), value))
    assert bended.stats.resumes == 1
    trees = [Run(t._recording, bended.model, registry).tree for t in bended.traces]
    for trace, tree in zip(bended.traces, trees, strict=True):
        assert_consistent(trace, tree)
        assert tree.resolve("add_1")._path == "add_1"
        assert repr(grow(bended.model, torch.full((2,), 5.0), registry=registry)) == repr(trees[0])
    assert "high" in trees[0].root
    assert "low" in trees[1].root


def test_a_graph_that_gives_other_structures_in_other_passes_has_an_output_for_each() -> None:
    class Varies(nn.Module):
        def forward(self, x: Tensor, n: int) -> Any:
            return x + n if n < 1 else (x + n, {"n": x})

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Varies()

        def forward(self, x: Tensor) -> list[Any]:
            return [self.inner(x, n) for n in range(2)]

    tree = grow(Calls(), torch.ones(1))
    assert (
        repr(tree.root.inner)
        == """\
inner: Graph(5) ×2
├─x: Tensor(1) ×2
├─add: Tensor(1)
├─add_1: Tensor(1)
├─output: Tensor(1)
└─output_1: tuple(2)
  ├─sub_0: Tensor(1)
  └─sub_1: dict(1)
    └─n: Tensor(1)"""
    )
    assert tree.root["inner:2"]._shape == (torch.Size([1]), (torch.Size([1]),))


def test_results_with_keys_of_any_kind_go_through_json() -> None:
    @bt.opaque
    def split(x: Tensor) -> dict[Any, Tensor]:
        return {("a", 1): x + 1, "b.c": x + 2, 7: x + 3}

    def uses(x: Tensor) -> Tensor:
        parts = split(x)
        return parts["a", 1] + parts["b.c"] + parts[7]

    trace = bt.trace(uses, torch.ones(2))
    tree = Run(trace._recording, uses).tree
    assert (
        repr(tree.root.split)
        == """\
split: dict(3)
├─a_1: Tensor(2)
├─b_c: Tensor(2)
└─sub_7: Tensor(2)"""
    )
    assert tree.resolve("split|b.c")._path == "split.b_c"
    assert tree.resolve("split[7]")._path == "split.sub_7"
    assert_storable(tree, len(trace.ops))


def test_a_tensor_of_unknown_origin_is_a_node() -> None:
    def hidden(x: Tensor) -> Tensor:
        return x + torch.frombuffer(bytearray(8), dtype=torch.float32)

    tree = grow(hidden, torch.ones(2))
    assert list(tree.root) == ["x", "unknown", "add", "output"]
    assert "    unknown = <unknown>\n" in tree.root._code


def test_steps_of_one_place_are_counted_by_outcome() -> None:
    def halve(x: Tensor) -> Tensor:
        while x.sum() > 1:
            x = x / 2
        return x

    shown = grow(halve, torch.ones(8)).root._show(flow=True)
    where = f"(test_paths.py:{line_of(halve, 'while')})"
    assert f"├─while x.sum() > 1: 3 iterations  {where}\n" in shown
    assert f"├─while x.sum() > 1: True ×3, False ×1  {where}\n" in shown


def test_steps_stand_in_the_module_whose_code_decided() -> None:
    tree = grow(Twice(), torch.ones(2))
    shown = tree.root.block._show(flow=True)
    assert "├─if x.sum() > 3: True ×2, False ×1  (test_paths.py:" in shown
    assert "├─if x.sum() > 3: False  (test_paths.py:" in tree.root["block:2"]._show(flow=True)
    own = tree.root._show(flow=True, depth=1)
    assert "if x.sum()" not in own


def test_sizes_are_shown_only_where_something_used_them() -> None:
    def sized(x: Tensor) -> Tensor:
        x.shape, x.size(0), x.numel()
        return x * x.shape[1] + x.size(0)

    assert list(grow(sized, torch.ones(2, 3)).root) == [
        "x", "shape_1", "mul", "size", "add", "output",
    ]  # fmt: skip


def test_numbers_are_leaves() -> None:
    tree = grow(lambda x: x * (x.sum().item() + 1), torch.ones(2))
    assert (
        repr(tree)
        == """\
<root>: Graph(6)
├─x: Tensor(2)
├─sum: Tensor()
├─item: float
├─add: float
├─mul: Tensor(2)
└─output: Tensor(2)"""
    )
    assert tree.resolve("item")._passes[0].index == 2


# Looking at nodes


def test_a_node_completes_iterates_and_contains_what_is_below() -> None:
    graph = PatchableGraph(Branch(), torch.ones(2)).graph
    assert len(graph) == 9
    assert graph._ipython_key_completions_()[:9] == list(graph)
    assert "low.linear" in graph._ipython_key_completions_()
    assert "low.linear" in graph
    assert "high" not in graph
    assert graph["low"]["linear"] == graph.low.linear == graph["low.linear"]
    assert {graph.low: 1}[graph["low"]] == 1
    assert graph._repr_mimebundle_() == {"text/plain": repr(graph)}
    assert bool(graph.x)
    assert len(graph.x) == 0


def test_a_wrong_attribute_or_key_names_what_there_is() -> None:
    graph = PatchableGraph(Branch(), torch.ones(2)).graph
    expected = (
        "no node 'linaer': 'low' has no 'linaer'; did you mean 'linear'? "
        "it has 'input', 'weight', 'bias', 'linear', 'output'"
    )
    with pytest.raises(AttributeError) as attribute:
        _ = graph.low.linaer
    with pytest.raises(KeyError) as key:
        graph.low["linaer"]
    assert str(attribute.value) == str(key.value) == expected
    assert not hasattr(graph, "__wrapped__")
    with pytest.raises(AttributeError, match="cannot be set"):
        graph.low = 1
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del graph.low
    with pytest.raises(InputError, match="a node path has to be a string, not float"):
        graph[1.5]
    with pytest.raises(InputError, match="a node path has to be a string or a node, not list"):
        graph._tree.resolve(["low"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("low", "'low' is a Graph(5), not a value; it contains 'low.input', 'low.weight', "
         "'low.bias', 'low.linear', 'low.output'"),
        ("", "'<root>' is a Graph(9), not a value; it contains 'x', 'sum', 'gt', 'bool', "
         "'low', 'add', 'last', 'add_1', 'output'"),
        ("low|linear", "no node 'low|linear': 'low' is a Graph(5): "
         "'|' leads only into tuples, lists, dicts and other containers"),
        ("x|sub_0", "no node 'x|sub_0': 'x' is a Tensor(2): "
         "'|' leads only into tuples, lists, dicts and other containers"),
        ("x.sub_0", "no node 'x.sub_0': 'x' is a Tensor(2) with nothing below it"),
        ("low.linear:2", "no node 'low.linear:2': 'low.linear' has 1 pass, so there is no :2"),
        ("x:", "no node 'x:': ':' after 'x' has no meaning"),
        ("low.", "no node 'low.': '.' after 'low' has no meaning"),
        ("low.linear.0", "no node 'low.linear.0': 'low.linear' is a Tensor(2) with nothing below "
         "it"),
        ("hihg.linear", "no node 'hihg.linear': the model has no 'hihg'; it has 'x', 'sum', 'gt', "
         "'bool', 'low', 'add', 'last', 'add_1', 'output'"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_says_how_far_it_got(path: str, message: str) -> None:
    tree = PatchableGraph(Branch(), torch.ones(2)).graph._tree
    with pytest.raises(NodePathError) as caught:
        tree.resolve(path)
    assert str(caught.value) == message
    assert caught.value.path == path


def test_a_message_names_only_a_dozen_of_many_completions() -> None:
    tree = grow(nn.Sequential(*[nn.ReLU() for _ in range(30)]), torch.ones(1))
    with pytest.raises(NodePathError, match=r"'sub_10' and 20 more$") as caught:
        tree.resolve("foo")
    assert len(caught.value.completions) == 32


def test_the_code_of_what_has_no_source_says_what_it_is() -> None:
    tree = grow(Tied(), torch.zeros(3).long())
    assert tree.root.ids._code == "ids: Tensor(3), an argument"
    assert tree.root.head.weight._code == (
        "head.weight: Tensor(5, 2), a parameter, buffer or other tensor of the model"
    )
    assert tree.root.output._code == "output: Tensor(3, 5), given out"


def test_the_code_of_a_leaf_shows_the_helpers_that_led_to_it() -> None:
    def helper(x: Tensor) -> Tensor:
        return x.relu()

    def outer(x: Tensor) -> Tensor:
        return helper(x) + 1

    places = [
        f'File "{__file__}", line {line_of(outer, "helper(x) + 1")}, in outer\n'
        "    return helper(x) + 1",
        f'File "{__file__}", line {line_of(helper, "relu")}, in helper\n    return x.relu()',
    ]
    assert grow(outer, torch.ones(1)).root.relu._code == "\n".join(places)


def test_context_managers_are_part_of_the_code() -> None:
    def mixed(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
            z = y + 1
        return z * x

    assert (
        grow(mixed, torch.ones(1)).root._code
        == """\
def mixed(x : torch.Tensor):
    with torch.no_grad():
        mul = x * 2
        add = mul + 1;  mul = None
    mul_1 = add * x;  add = x = None
    return mul_1"""
    )


def test_writes_are_part_of_the_code() -> None:
    def write(x: Tensor) -> Tensor:
        y = x.clone()
        y[0], y[1:, ...] = 1, -2
        y += 1
        return y.relu_()

    assert (
        grow(write, torch.ones(3, 2)).root._code
        == """\
def write(x : torch.Tensor):
    clone = x.clone();  x = None
    clone[0] = 1
    clone[1:, ...] = -2
    add_ = clone.add_(1);  clone = None
    relu_ = add_.relu_();  add_ = None
    return relu_"""
    )


def test_a_long_tree_tells_of_repeated_graphs_in_one_line() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(40)])
    tree = grow(model, torch.ones(1, 2))
    shown = repr(tree).splitlines()
    assert shown == [
        "<root>: Graph(42)",
        "├─input: Tensor(1, 2)",
        "├─sub_0: Graph(4)",
        "│ ├─input: Tensor(1, 2)",
        "│ ├─sub_0: Graph(5)",
        "│ │ ├─input: Tensor(1, 2)",
        "│ │ ├─weight: Tensor(2, 2)",
        "│ │ ├─bias: Tensor(2)",
        "│ │ ├─linear: Tensor(1, 2)",
        "│ │ └─output: Tensor(1, 2)",
        "│ ├─sub_1: Graph(3)",
        "│ │ ├─input: Tensor(1, 2)",
        "│ │ ├─relu: Tensor(1, 2)",
        "│ │ └─output: Tensor(1, 2)",
        "│ └─output: Tensor(1, 2)",
        "├─sub_1, ..., sub_39: Graph(4) each, as sub_0",
        "└─output: Tensor(1, 2)",
        "... 506 lines left out: look at a part, or use ._show(limit=None)",
    ]
    assert len(tree.root._show(limit=None).splitlines()) == 523
    assert tree.root._show(depth=1).splitlines()[2] == "├─sub_0: Graph(4)"


def test_a_long_tree_without_repetition_leaves_out_the_deepest_levels_then_the_end() -> None:
    model = nn.Sequential(*[nn.Linear(n, n + 1) for n in range(1, 60)])
    tree = grow(model, torch.ones(1, 1))
    shown = repr(tree).splitlines()
    assert shown[2:4] == ["├─sub_0: Graph(5)", "├─sub_1: Graph(5)"]
    assert shown[-1] == "... 295 lines left out: look at a part, or use ._show(limit=None)"
    short = tree.root._show(limit=10).splitlines()
    assert len(short) == 11
    assert short[-1] == "... 347 lines left out: look at a part, or use ._show(limit=None)"


# Roots, storage, size


def test_a_method_that_calls_the_model_has_its_calls_below_it() -> None:
    class Generates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def generate(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self(x)
            return x

    tree = grow(Generates().generate, torch.ones(1, 2))
    assert list(tree.root) == ["x", "forward", "output"]
    assert tree.resolve("forward.inner.linear:3")._path == "forward.inner.linear:3"
    assert "def generate(self, x : torch.Tensor):\n    forward = self(x);" in tree.root._code


def test_a_function_without_tensors_has_a_tree() -> None:
    assert repr(grow(lambda: None)) == "<root>: Graph(1)\n└─output: None"
    assert (
        repr(grow(lambda x: 7, torch.ones(1)))
        == """\
<root>: Graph(2)
├─x: Tensor(1)
└─output: int"""
    )


@pytest.mark.parametrize(
    "damaged", [{}, {"root": {}, "elements": []}, {"root": 3, "elements": None}, [], None]
)
def test_what_is_no_stored_tree_is_refused(damaged: Any) -> None:
    with pytest.raises(InputError, match="this is not a stored tree of paths"):
        Tree.from_dict(damaged)


def test_a_patchable_graph_replays_copies_and_pickles() -> None:
    pg = PatchableGraph(Branch(), torch.ones(2))
    pg(torch.zeros(2))
    assert (pg.stats.traces, pg.stats.replays) == (1, 1)
    for other in (copy.deepcopy(pg), pickle.loads(pickle.dumps(pg))):
        assert type(other) is PatchableGraph
        assert repr(other.graph) == repr(pg.graph)
        assert torch.equal(other(torch.ones(2)), pg(torch.ones(2)))
    assert repr(pg).startswith("PatchableGraph(Branch(")
    assert list(pg.state_dict()) == list(pg.model.state_dict())


def test_the_example_of_a_patchable_graph_is_an_ordinary_call() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    expected = copy.deepcopy(model)
    torch.manual_seed(3)
    expected(torch.ones(3, 2))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    PatchableGraph(model, torch.ones(3, 2))
    assert torch.equal(torch.get_rng_state(), after)
    assert bits(model.state_dict()) == bits(expected.state_dict())


def test_example_arguments_can_be_keywords_and_an_error_of_the_model_is_its_own() -> None:
    pg = PatchableGraph(lambda x, model, max_traces: x * model * max_traces, torch.ones(1),
                        model=torch.ones(2), max_traces=torch.ones(3, 1))  # fmt: skip
    assert list(pg.graph)[:3] == ["x", "model", "max_traces"]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        PatchableGraph(Branch())


@pytest.mark.more
def test_the_nodes_visited_grow_with_the_tape_and_not_faster() -> None:
    def steps(n: int) -> int:
        counted = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal counted
            counted += event == "call"

        def deep(x: Tensor) -> Tensor:
            for i in range(n):
                x = (x + i).relu()
            return x

        trace = bt.trace(deep, torch.ones(1))
        sys.setprofile(profile)
        try:
            Run(trace._recording, deep).tree.path_of(n)
        finally:
            sys.setprofile(None)
        return counted

    assert steps(2000) < 2.5 * steps(1000)


def test_node_views_are_equal_if_they_are_the_same_node() -> None:
    tree = grow(repeat, torch.ones(1), 2)
    assert isinstance(tree.root.add, Node)
    assert tree.resolve("add:1") == tree.resolve("add:1")
    assert tree.resolve("add:1") != tree.resolve("add:2")
    assert tree.root.add != "add"
    assert tree.resolve("mul:1") == tree.root.mul


def test_named_tuples_among_the_arguments_have_the_names_of_their_fields() -> None:
    pair = collections.namedtuple("Pair", ["left", "right"])
    tree = bt.trace(lambda p: p.left + p.right, pair(torch.ones(2), torch.ones(2))).tree
    assert str(tree).splitlines()[1:4] == [
        "├─p: Pair(2)",
        "│ ├─left: Tensor(2)",
        "│ └─right: Tensor(2)",
    ]
    assert tree["p|left"]._shape == tree.p.left._shape == torch.Size([2])
