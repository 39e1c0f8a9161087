"""graphpatch's page on working with the graph runs as it stands there, and patches of its users.

Its prompts have no import. Two things read differently: `_code` is what this library writes, and a
`Linear` is called by its own name, not by its place in a list.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import rlcompleter
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace import PatchableGraph
from bendtrace.errors import NodePathError
from bendtrace.log.path_views import Tree
from bendtrace.patches import (
    AddPatch,
    CustomPatch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from tests import seeds


class TupleOutputModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.linear(x), self.linear(x + 1))


LINE = TupleOutputModule.forward.__code__.co_firstlineno + 1
PLACE = f"""\
File "{__file__}", line {LINE}, in forward
    return (self.linear(x), self.linear(x + 1))"""

TREE = """\
<root>: Graph(5)
├─x: Tensor(3, 2)
├─linear: Graph(5)
│ ├─input: Tensor(3, 2)
│ ├─weight: Tensor(3, 2)
│ ├─bias: Tensor(3)
│ ├─linear: Tensor(3, 3)
│ └─output: Tensor(3, 3)
├─add: Tensor(3, 2)
├─linear_1: Graph(5)
│ ├─input: Tensor(3, 2)
│ ├─weight: Tensor(3, 2)
│ ├─bias: Tensor(3)
│ ├─linear: Tensor(3, 3)
│ └─output: Tensor(3, 3)
└─output: tuple(2)
  ├─sub_0: Tensor(3, 3)
  └─sub_1: Tensor(3, 3)"""

LINEAR = """\
linear: Graph(5)
├─input: Tensor(3, 2)
├─weight: Tensor(3, 2)
├─bias: Tensor(3)
├─linear: Tensor(3, 3)
└─output: Tensor(3, 3)"""

CODE = """\
def forward(self, x : torch.Tensor):
    linear = self.linear(x)
    add = x + 1;  x = None
    linear_1 = self.linear(add);  add = None
    return (linear, linear_1)"""

LINEAR_CODE = f"""\
Calling context:
{PLACE}
Compiled code:
def forward(self, input : torch.Tensor):
    weight = self.weight
    bias = self.bias
    linear = torch._C._nn.linear(input, weight, bias);  input = weight = bias = None
    return linear"""


@pytest.fixture
def tuple_pg() -> PatchableGraph:
    return PatchableGraph(TupleOutputModule(), torch.ones(3, 2))


def test_what_is_typed_in_the_document_shows_what_it_shows(tuple_pg: PatchableGraph) -> None:
    names: dict[str, Any] = {"pg": tuple_pg, "tuple_pg": tuple_pg}
    ours = {"_code": CODE, "add._code": PLACE, "linear._code": LINEAR_CODE}
    typed = [one for one in seeds.prompted("graphpatch") if "<TAB>" not in one[0]]
    assert len(typed) == 6
    for line, shown in typed:
        path = line.partition(".graph")[2].removeprefix(".")
        assert repr(eval(line, names)) == ours.get(path, shown)


def test_the_two_ways_of_the_document_to_say_a_path_are_one(tuple_pg: PatchableGraph) -> None:
    names = {"tuple_pg": tuple_pg, "ZeroPatch": ZeroPatch, "torch": torch}
    lines = re.findall(r"^>>> (with .*:)$", seeds.text("graphpatch"), re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        line = line.replace("[ZeroPatch()]):", "[ZeroPatch()]}):")  # it lacks a brace in one
        line = line.replace("}}", "}")
        exec(f"{line}\n    out = tuple_pg(torch.ones(3, 2))[0]", names)
        assert not names["out"].any()


def completions(text: str, **names: Any) -> list[str]:
    """What a plain Python prompt offers after a tab."""
    completer = rlcompleter.Completer(names)
    found: list[str] = []
    while (match := completer.complete(text, len(found))) is not None:
        found.append(match)
    return found


def test_the_root_prints_as_in_the_document(tuple_pg: PatchableGraph) -> None:
    assert repr(tuple_pg.graph) == TREE


def test_a_part_of_the_graph_prints_as_in_the_document(tuple_pg: PatchableGraph) -> None:
    assert repr(tuple_pg.graph.linear) == LINEAR


def test_a_tab_reveals_all_children_of_a_node(tuple_pg: PatchableGraph) -> None:
    children = ["add", "linear", "linear_1", "output", "x"]
    assert completions("g.", g=tuple_pg.graph) == [f"g.{name}" for name in children]
    assert completions("g.linear.b", g=tuple_pg.graph) == ["g.linear.bias"]
    assert completions("g.output.", g=tuple_pg.graph) == ["g.output.sub_0", "g.output.sub_1"]


def test_a_leaf_completes_to_nothing_but_what_begins_with_an_underscore(
    tuple_pg: PatchableGraph,
) -> None:
    offered = completions("g.", g=tuple_pg.graph.linear.bias)
    assert offered
    assert all(name.startswith("g._") for name in offered)


def test_the_code_of_the_root_is_what_the_model_ran(tuple_pg: PatchableGraph) -> None:
    assert repr(tuple_pg.graph._code) == CODE


def test_the_code_of_a_leaf_is_the_line_it_comes_from(tuple_pg: PatchableGraph) -> None:
    assert repr(tuple_pg.graph.add._code) == PLACE


def test_the_code_of_a_submodule_is_its_calling_context_and_its_own(
    tuple_pg: PatchableGraph,
) -> None:
    assert repr(tuple_pg.graph.linear._code) == LINEAR_CODE


def test_shapes_are_those_of_the_example(tuple_pg: PatchableGraph) -> None:
    assert tuple_pg.graph.linear.input._shape == torch.Size([3, 2])
    assert repr(tuple_pg.graph.linear.input._shape) == "torch.Size([3, 2])"


def test_a_path_can_be_given_as_a_node_or_a_string(tuple_pg: PatchableGraph) -> None:
    tree = tuple_pg.graph._tree
    node = tuple_pg.graph.linear.output
    assert tree.resolve(node) == tree.resolve("linear.output") == node
    assert tree.resolve("output|sub_0") == tuple_pg.graph.output.sub_0


def test_what_is_no_leaf_is_refused_with_the_dig_paths_there_are(tuple_pg: PatchableGraph) -> None:
    tree = tuple_pg.graph._tree
    for path in ("output", tuple_pg.graph.output):
        with pytest.raises(NodePathError) as caught:
            tree.resolve(path)
        assert caught.value.completions == ("output|sub_0", "output|sub_1")
        assert str(caught.value) == (
            "'output' is a tuple(2), not a single value; "
            "name a value in it: 'output|sub_0', 'output|sub_1'"
        )


def test_a_node_that_does_not_exist_is_refused_at_once(tuple_pg: PatchableGraph) -> None:
    with pytest.raises(NodePathError, match=r"the model has no 'liner'; did you mean") as e:
        tuple_pg.graph._tree.resolve("liner.output")
    assert e.value.path == "liner.output"
    assert isinstance(e.value, KeyError)
    assert isinstance(e.value, bt.BendtraceError)


def test_nested_containers_are_dug_into_with_dots_after_the_bar() -> None:
    pg = PatchableGraph(lambda x: ((x + 1, x * 2), {"mean": x.mean()}), torch.ones(2))
    assert pg.graph._tree.resolve("output|sub_0.sub_1") == pg.graph.output.sub_0.sub_1
    assert pg.graph._tree.resolve("output|sub_1.mean")._shape == torch.Size([])


@pytest.mark.more
def test_a_layer_of_a_language_model_is_found_by_the_path_in_the_document() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=9, hidden_size=8, num_attention_heads=2, vocab_size=20,
        intermediate_size=12, max_position_embeddings=16,
    )  # fmt: skip
    pg = PatchableGraph(transformers.LlamaForCausalLM(config).eval(), torch.zeros(1, 3).long())
    path = "model.layers_8.mlp.down_proj.linear"
    assert pg.graph[path]._shape == torch.Size([1, 3, 8])
    for other in ("model.layers.8.mlp.down_proj.linear", "model.layers[8].mlp.down_proj.linear"):
        assert pg.graph[other]._path == path


def test_it_is_called_like_the_model(tuple_pg: PatchableGraph) -> None:
    model, x = tuple_pg.model, torch.randn(4, 2)
    for got, expected in zip(tuple_pg(x), model(x), strict=True):
        assert torch.equal(got, expected)


def test_the_tree_outlives_the_model(tuple_pg: PatchableGraph) -> None:
    stored = json.dumps(tuple_pg.graph._tree.to_dict())
    graph = Tree.from_dict(json.loads(stored)).root
    assert repr(graph) == TREE
    assert graph._code == CODE
    assert graph.linear._code == LINEAR_CODE
    assert graph.add._code == PLACE
    assert graph.linear.weight._shape == torch.Size([3, 2])


# Patching


def test_a_node_and_its_string_are_the_same_place(tuple_pg: PatchableGraph) -> None:
    x = torch.randn(3, 2)
    first, second = tuple_pg(x)
    given = []
    for path in (tuple_pg.graph.linear.output, "linear.output"):
        with tuple_pg.patch({path: [ZeroPatch()]}):
            given.append(tuple_pg(x))
        assert torch.equal(tuple_pg(x)[0], first)
    for patched in given:
        assert patched[0].count_nonzero() == 0
        assert torch.equal(patched[1], second)


def test_the_second_call_of_a_module_is_a_node_of_its_own(tuple_pg: PatchableGraph) -> None:
    x = torch.randn(3, 2)
    first, second = tuple_pg(x)
    probe = ProbePatch()
    with tuple_pg.patch(
        {"linear_1.output": [probe, ZeroPatch()], "linear.output": AddPatch(value=1)}
    ):
        given = tuple_pg(x)
    assert torch.equal(probe.activation, second)
    assert given[1].count_nonzero() == 0
    assert torch.equal(given[0], first + 1)


def test_the_parts_of_an_output_are_reached_by_digging(tuple_pg: PatchableGraph) -> None:
    x = torch.randn(3, 2)
    first, second = tuple_pg(x)
    with tuple_pg.patch(
        {"output|sub_0": [AddPatch(value=torch.ones(1))], tuple_pg.graph.output.sub_1: ZeroPatch()}
    ):
        given = tuple_pg(x)
    assert type(given) is tuple
    assert torch.equal(given[0], first + 1)
    assert torch.equal(given[1], torch.zeros_like(second))


def test_a_nested_part_is_reached_by_its_path() -> None:
    pg = PatchableGraph(lambda x: ((x + 1, x * 2), {"mean": x.mean()}), torch.ones(2))
    with pg.patch({"output|sub_0.sub_1": ZeroPatch(), "output|sub_1.mean": AddPatch(value=1)}):
        (kept, zeroed), named = pg(torch.ones(2))
    assert kept.tolist() == [2, 2]
    assert zeroed.tolist() == [0, 0]
    assert named["mean"].item() == 2


def test_what_is_no_leaf_cannot_be_patched(tuple_pg: PatchableGraph) -> None:
    for path in ("output", tuple_pg.graph.output, "liner.output"):
        with pytest.raises(NodePathError), tuple_pg.patch({path: [ZeroPatch()]}):
            raise AssertionError("it was entered")


def test_a_module_is_no_leaf(tuple_pg: PatchableGraph) -> None:
    for path in ("linear", tuple_pg.graph.linear):
        with pytest.raises(NodePathError, match=r"^'linear' is a Graph\(5\), not a single value"):
            tuple_pg.patch({path: ZeroPatch()})


class Names(nn.Module):
    """A loop, ops of one name, and a module that two names are given to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.third = nn.Tanh()

    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        for _ in range(times):
            x = self.first(x * 2) + 1
            x = x + 2
        return self.third(x) * self.second(x)


def test_only_the_names_of_graphpatch_are_names() -> None:
    pg = PatchableGraph(Names(), torch.ones(1, 2))
    assert list(pg.graph)[-5:] == ["add_5", "third", "second", "mul_3", "output"]
    assert "add_1_3" in {entry.name for entry in bt.trace(pg.model, torch.ones(1, 2)).entries}
    for path in (
        "add_1_3", "first.weight.0", "add:2", "third_1.output", "second_1.output",
        "first", "output.sub_0", ".add", "first_3.output", re.compile("add"), bt.trace, nn.Linear,
    ):  # fmt: skip
        with pytest.raises((NodePathError, bt.errors.InputError)):
            pg.patch({path: ZeroPatch()})


class Shared(nn.Module):
    """One module under six names, called by all of them."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.one = self.two = nn.Linear(2, 2)
        self.list = nn.ModuleList([self.one, nn.Tanh(), self.one])
        self.chain = nn.Sequential(self.one, nn.Tanh(), self.one)
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(x) + self.one(x)
        for i in range(3):
            x = self.list[i](x)
        layers = self.list if self.hidden else []
        for layer in layers:
            x = layer(x)
        return self.chain(self.list[-1](x)) + self.one(x)


def test_a_call_has_the_name_that_the_module_is_called_by() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.ones(1, 2)
    pg = PatchableGraph(model, x)
    names = "two one add list_0 list_1 list_2 list_2_1 chain one_1 add_1 output".split()
    assert list(pg.graph)[1:] == names
    assert list(pg.graph.chain) == ["input", "sub_0", "sub_1", "sub_2", "output"]
    linear = model.one
    start = linear(x) + linear(x)
    listed = linear(torch.tanh(linear(start)))
    whole = linear(listed)
    end = linear(torch.tanh(linear(whole)))
    values = {
        "two.output": linear(x), "list_2.output": listed, "one_1.output": linear(listed),
        "chain.sub_0.linear": linear(whole), "chain.sub_2.output": end,
    }  # fmt: skip
    for again in (pg, pickle.loads(pickle.dumps(pg)), PatchableGraph(model, x)):
        probes = {name: ProbePatch() for name in values}
        with again.patch(probes):
            again(x)
        for name, value in values.items():
            assert torch.equal(probes[name].activation, value), name
    with pg.patch({"one_1.weight": ZeroPatch(), "one_1.bias": ZeroPatch()}):
        assert torch.equal(pg(x), end)


class Backwards(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(len(self) - 1 - index)


class Indirect(nn.Module):
    """Calls a module by items of its own kind, or through a variable for another module."""

    def __init__(self, by_item: bool) -> None:
        super().__init__()
        self.one = nn.Tanh()
        self.holder = nn.Module()
        self.holder.one = self.one
        self.items = Backwards([self.one, nn.ReLU(), self.one])
        self.by_item = by_item

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.holder
        return self.one(x) + (self.items[0](x) if self.by_item else held.one(x))


@pytest.mark.parametrize("by_item", [True, False])
def test_what_only_looks_like_a_name_is_none(by_item: bool) -> None:
    pg = PatchableGraph(Indirect(by_item), torch.ones(1, 2))
    assert [name for name in pg.graph if "call" in name] == ["one_call", "one_call_1"]


def test_calls_of_a_module_whose_name_no_code_shows_are_not_numbered() -> None:
    pg = PatchableGraph(Shared(hidden=True), torch.ones(1, 2))
    assert "list_2_call" in pg.graph
    assert "list_2" not in pg.graph
    for path in ("one.output", "one_1.output", "list_2.output"):
        with pytest.raises(NodePathError, match="no node"):
            pg.patch({path: ZeroPatch()})


def test_a_loop_is_unrolled_as_graphpatch_does() -> None:
    model, x = Names(), torch.ones(1, 2)
    pg = PatchableGraph(model, x)
    names = ["mul", "first", "add", "add_1", "mul_1", "first_1", "add_2", "add_3"]
    assert list(pg.graph)[1:9] == names
    probes = {name: ProbePatch() for name in ("mul", "add", "add_1", "add_2", "first_2.output")}
    with pg.patch({**probes, pg.graph.add_5: ProbePatch()}):
        pg(x)
    first = model.first(x * 2) + 1
    second = model.first((first + 2) * 2) + 1
    third = model.first((second + 2) * 2)
    for probe, value in zip(probes.values(), (x * 2, first, first + 2, second, third), strict=True):
        assert torch.equal(probe.activation, value)
    with pg.patch({"mul": ZeroPatch()}):
        once = pg(x)
    with pg.patch({pg.graph.mul: ZeroPatch()}):
        assert torch.equal(pg(x), once)
    value = model.first(torch.zeros(1, 2)) + 1 + 2
    for _ in range(2):
        value = model.first(value * 2) + 1 + 2
    assert torch.equal(once, value.tanh() * value.tanh())


def test_what_only_another_call_reached_has_the_name_of_its_graph() -> None:
    pg = PatchableGraph(Names(), torch.ones(1, 2), times=1)
    with pytest.raises(NodePathError, match="the model has no 'add_2'"):
        pg.patch({"add_2": ZeroPatch()})
    pg(torch.ones(1, 2), times=2)
    with pg.patch({"add_2": (second := ProbePatch())}):
        pg(torch.ones(1, 2), times=2)
    assert second.activation is not None


def test_each_use_of_a_weight_can_be_patched(tuple_pg: PatchableGraph) -> None:
    model, x = tuple_pg.model, torch.randn(3, 2)
    before = model.linear.weight.detach().clone()
    weight = before.clone()
    weight[1] += torch.ones(2)
    probe = ProbePatch()
    with tuple_pg.patch({"linear.weight": [AddPatch(slice=[1, ...], value=torch.ones(2)), probe]}):
        given = tuple_pg(x)
    assert torch.equal(probe.activation, weight)
    assert torch.equal(given[0], nn.functional.linear(x, weight, model.linear.bias))
    assert torch.equal(model.linear.weight, before)


def test_the_input_of_a_module_is_patched(tuple_pg: PatchableGraph) -> None:
    model, x = tuple_pg.model, torch.randn(3, 2)
    with tuple_pg.patch({"linear.input": ReplacePatch(value=42, slice=(slice(None), 0))}):
        given = tuple_pg(x)
    changed = x.clone()
    changed[:, 0] = 42
    assert torch.equal(given[0], model.linear(changed))
    assert torch.equal(given[1], model.linear(x + 1))


def test_a_layer_takes_what_another_one_gave() -> None:
    pg = PatchableGraph(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(3))
    first, second = (f"{name}.output" for name in pg.graph if name not in ("input", "output"))
    with pg.patch(
        {first: [seen := ProbePatch()], second: CustomPatch(custom_op=lambda t: seen.activation)}
    ):
        for _ in range(2):
            x = torch.randn(3)
            assert torch.equal(pg(x), pg.model[0](x))


def test_a_running_mean_is_kept_over_calls(tuple_pg: PatchableGraph) -> None:
    record = RecordPatch()
    mean = CustomPatch(custom_op=lambda t: torch.stack(record.activations).mean(0))
    inputs = [torch.randn(3, 2) for _ in range(4)]
    for x in inputs:
        with tuple_pg.patch({"output|sub_0": record, "output|sub_1": mean}):
            given = tuple_pg(x)
    assert torch.equal(given[1], torch.stack([tuple_pg.model.linear(x) for x in inputs]).mean(0))


class Scaled(nn.Module):
    scale = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x)) * self.scale


def test_a_number_of_a_module_is_patched_while_the_context_lasts() -> None:
    model, x = Scaled(), torch.ones(1, 2)
    pg = PatchableGraph(model, x)
    plain = model(x)
    assert pg.graph.scale == "scale"
    with pg.patch({pg.graph.scale: AddPatch(value=1), "output": AddPatch(value=1)}):
        patched = pg(x)
    assert torch.equal(patched, model.linear(model.linear(x)) * 3 + 1)
    assert "scale" not in vars(model)
    assert torch.equal(pg(x), plain)
    model.scale = 5
    with pg.patch({"scale": [ReplacePatch(value=7)]}):
        assert model.scale == 7
    assert model.scale == 5


def test_the_first_of_several_calls_has_graphpatchs_name_as_well() -> None:
    pg = PatchableGraph(Scaled(), torch.ones(1, 2))
    assert pg.graph.linear_0._path == "linear"
    with pg.patch({"linear_0.output": (first := ProbePatch())}):
        pg(torch.ones(1, 2))
    assert torch.equal(first.activation, pg.linear(torch.ones(1, 2)))
    with pytest.raises(NodePathError):
        pg.patch({"linear_7.output": ProbePatch()})
    with pytest.raises(AttributeError):
        _ = pg.graph.linear_7


def test_extraction_options_are_accepted_but_not_functions() -> None:
    from bendtrace.compat.graphpatch import ExtractionOptions

    options = ExtractionOptions(skip_compilation=True, classes_to_skip_compiling={nn.Linear})
    assert "linear" in PatchableGraph(Scaled(), options, torch.ones(1, 2)).graph
    with pytest.raises(bt.errors.InputError, match="no graph is extracted"):
        ExtractionOptions(custom_extraction_functions={nn.Linear: print})
    with pytest.raises(bt.errors.InputError, match="postprocessing_function is not supported"):
        ExtractionOptions(postprocessing_function=print)
    ExtractionOptions(copy_transformers_generation_config=False, allow_unused_submodules=None)


def test_what_save_wrote_is_loaded_with_its_example() -> None:
    pg, file = PatchableGraph(Scaled(), torch.ones(1, 2)), io.BytesIO()
    pg.save(file)
    file.seek(0)
    loaded = PatchableGraph.load(file, map_location="cpu")
    assert torch.equal(loaded(torch.ones(1, 2)), pg(torch.ones(1, 2)))
    assert repr(loaded.graph) == repr(pg.graph)
    torch.save([1], other := io.BytesIO())
    other.seek(0)
    with pytest.raises(bt.errors.InputError, match="holds a list, and no PatchableGraph"):
        PatchableGraph.load(other)


@pytest.mark.more
def test_a_model_with_hooks_of_accelerate_is_saved_without_them() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    wanted = model(x)
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu"))
    pg, file = PatchableGraph(model, x), io.BytesIO()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    pg.save(file)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(pg(x), wanted)
    file.seek(0)
    loaded = PatchableGraph.load(file)
    assert torch.equal(loaded(x), wanted)
    assert not hasattr(loaded.model[0], "_hf_hook")
    model[0].to("meta")
    with pytest.raises(bt.errors.InputError, match="accelerate has put weights of the model"):
        pg.save(io.BytesIO())
    assert hasattr(model[0], "_hf_hook")
