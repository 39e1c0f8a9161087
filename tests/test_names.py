"""One name, one node: whoever is given a string understands the same by it, or refuses it."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import BendtraceError, InputError, LayerKeyError, NodePathError
from bendtrace.graph import NodeRef
from bendtrace.log.nodes import NodePath
from bendtrace.watch.functions import display_name, name_of


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.softmax(x, -1)) + x


class Blocks(nn.Module):
    """Three blocks with a softmax each, and two sums of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        for block in self.h:
            x = block(x)
        return x + 2


class Namesakes(nn.Module):
    """A function called like a module, and a module called like a layer of another."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear_2, self.linear_1 = nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_1(self.linear_2(torch.relu(x) - self.relu(-x)))


def called(make: Callable[[], Any], *args: Any) -> bt.BendedModule:
    torch.manual_seed(0)
    bended = bt.BendedModule(make())
    bended(*args)
    return bended


def inserted_at(bended: bt.BendedModule, where: Any, *args: Any) -> tuple[str, ...]:
    with bended.interject(where, lambda value: value + 1) as handle:
        bended(*args)
    return handle.report().paths


def patched_at(bended: bt.BendedModule, where: Any, *args: Any) -> tuple[str, ...]:
    record = bt.patches.RecordPatch()
    context = bended.patch({where: record})
    with context:
        bended(*args)
        return tuple(path for handle in context.insertions for path in handle.report().paths)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_layer_s_name_is_the_same_node_to_all(number: int) -> None:
    x = torch.ones(2, 4)
    bended = called(Blocks, x)
    name, path = f"softmax_{number}", f"h_{number - 1}.softmax"
    assert bended.trace(x)[name].node_path == path
    assert inserted_at(bended, name, x) == (path,)
    assert patched_at(bended, name, x) == (path,)
    found = bended.get_activations(name, args=(x,))
    assert list(found) == [path]
    value = found[name] * 2
    wanted = bended.from_activations({path: value}, x)
    assert torch.equal(bended.from_activations({name: value}, x), wanted)
    fresh = bt.BendedModule(bended.model)
    assert inserted_at(fresh, name, x) == (path,)


def test_a_module_s_name_is_the_module_to_all_and_a_path_the_node() -> None:
    x = torch.ones(2, 3)
    bended = called(Namesakes, x)
    for name, path in (("relu", "relu_1"), (".relu", "relu")):
        assert inserted_at(bended, name, x) == patched_at(bended, name, x) == (path,)
        found = bended.get_activations(name, args=(x,))
        assert list(found) == [path]
        entry = bended.trace(x)[name]
        assert isinstance(entry, bt.LayerEntry)
        assert entry.node_path.split(".")[0] == path
        given = {name: found[name] + 1}
        wanted = bended.from_activations({next(iter(found)): found[name] + 1}, x)
        assert torch.equal(bended.from_activations(given, x), wanted)


def asked(bended: bt.BendedModule, name: str, x: Tensor) -> list[Callable[[], Any]]:
    trace = bended.trace(x)
    return [
        lambda: trace[name],
        lambda: bended.interject(name, print),
        lambda: bended.patch({name: bt.patches.ZeroPatch()}),
        lambda: bended.get_activations(name, args=(x,)),
        lambda: bended.from_activations({name: x}, x),
    ]


@pytest.mark.parametrize(
    ("make", "name", "clear"),
    [
        (Blocks, "add_1", {".add_1": "add_1", "add": "add"}),
        (Namesakes, "linear_1", {".linear_1": "linear_1", "linear_2.linear": "linear_2.linear"}),
    ],
)
def test_what_is_ambiguous_is_refused_by_all_with_names_that_are_not(
    make: Callable[[], Any], name: str, clear: dict[str, str]
) -> None:
    x = torch.ones(2, 4 if make is Blocks else 3)
    bended = called(make, x)
    for ask in asked(bended, name, x):
        with pytest.raises(BendtraceError, match=f"'{name}' is ambiguous: it matches ") as caught:
            ask()
        assert str(caught.value).endswith(f"Write {' or '.join(map(repr, clear))}")
    assert not bended.insertions
    values = []
    for text, path in clear.items():
        assert inserted_at(bended, text, x) == (path,)
        found = bended.get_activations(text, args=(x,))
        assert list(found) == [path]
        values.append(found[text])
        entry = bt.trace(bended.model, x, save="all")[text]
        assert isinstance(entry, bt.LayerEntry)
        assert torch.equal(entry.tensor_contents, found[text])
        for given in ({text: found[text]}, dict(found.items())):
            assert torch.equal(bended.from_activations(given, x), bended(x))
    assert not torch.equal(*values)


def test_a_fresh_model_refuses_it_in_its_first_call() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).sum() + 2

    bended, x = bt.BendedModule(Sums()), torch.ones(2, 3)
    handle = bended.interject("add_1", torch.neg)
    with pytest.raises(NodePathError, match=r"Write '.add_1' or 'add'"):
        bended(x)
    handle.remove()
    assert inserted_at(bended, ".add_1", x) == ("add_1",)


@pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")
def test_a_name_that_is_another_node_in_another_run_is_ambiguous() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return torch.sin(x)
        return torch.sin(x * 2)

    bended = called(lambda: model, torch.ones(2))
    assert inserted_at(bended, "sin_1", torch.ones(2)) == ("sin",)
    bended(-torch.ones(2))
    with pytest.raises(
        NodePathError, match=r"'sin_1' is ambiguous.* Write 'sin' or '.sin_1'"
    ) as caught:
        bended.interject("sin_1", torch.neg)
    assert caught.value.completions == ("sin", ".sin_1")
    assert inserted_at(bended, ".sin_1", -torch.ones(2)) == ("sin_1",)


@pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")
def test_a_module_that_no_run_has_called_and_a_node_of_its_name_are_ambiguous() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) if x.sum() > 0 else self.relu(x)

    bended, x = called(Either, torch.ones(2)), torch.ones(2)
    with pytest.raises(
        NodePathError,
        match=r"the module relu and the node relu .* Write '.relu', or give the module",
    ):
        bended.interject("relu", torch.neg)
    assert inserted_at(bended, ".relu", x) == ("relu",)
    assert inserted_at(bended, bended.model.relu, -x) == ("relu_1",)


def test_paths_that_are_handed_out_mean_their_nodes_wherever_they_are_given() -> None:
    x = torch.ones(2, 4)
    bended = called(Blocks, x)
    tree = bended.trace(x).tree
    seen: list[Any] = []
    with bended.interject(tree["add_1"], lambda value, at: seen.append(at.path)) as handle:
        bended(x)
    candidate = bt.node_selector.find(bt.node_selector.matches_path("add_1"), bended.trace(x))[0]
    assert seen == ["add_1"]
    for path in (tree["add_1"]._path, handle.report().paths[0], candidate.path):
        assert path == "add_1"
        assert inserted_at(bended, path, x) == ("add_1",)
        assert inserted_at(bended, pickle.loads(pickle.dumps(path)), x) == ("add_1",)
    assert json.dumps(tree["add_1"]._path) == '"add_1"'
    file = io.BytesIO()
    torch.save(dict(bended.get_activations(".add_1", args=(x,))), file)
    file.seek(0)
    (path,) = torch.load(file, weights_only=True)
    assert inserted_at(bended, path, x) == ("add_1",)
    with pytest.raises(NodePathError):
        bended.interject(str(tree["add_1"]._path), torch.neg)


def test_a_layer_of_several_nodes_is_all_of_them() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) - self.fc(x * 2)

    x = torch.ones(1, 2)
    bended = called(Twice, x)
    assert len(bended.trace(x)["linear_1"]) == 2
    assert inserted_at(bended, "linear_1", x) == ("fc.linear", "fc_1.linear")
    assert inserted_at(bended, "linear_1:2", x) == ("fc_1.linear",)
    assert inserted_at(bended, "fc:2", x) == ("fc_1",)
    with pytest.raises(InputError, match=r"'linear_1' is ambiguous: it matches 'fc.linear' and"):
        bended.from_activations({"linear_1": x}, x)


def test_names_of_the_mirror_are_given_as_references() -> None:
    x = torch.ones(2, 4)
    bended = called(Blocks, x)
    mirror = [n for n in bended.trace(x).graph if n.startswith("softmax")]
    assert mirror == ["softmax", "softmax_1", "softmax_2"]
    assert inserted_at(bended, NodeRef("softmax_2"), x) == ("h_2.softmax",)
    with pytest.raises(NodePathError, match=r"a node 'softmax': pass 'h_0.softmax', or NodeRef"):
        bended.interject("softmax", torch.neg)


def test_the_whole_label_of_an_entry_finds_the_entry() -> None:
    def model(x: Tensor) -> Tensor:
        return x * x.sum().item() * x.max().item()

    log = bt.trace(model, torch.ones(2))
    for entry in log.entries:
        assert log[entry.label] is entry
        assert all(log[label].label == label for label in (*entry.parents, *entry.children))
    assert log["item_1"].node_path == "item"
    assert log[".item_1"].node_path == "item_1"


@pytest.mark.parametrize("name", ["1", "sub_1", "relu_1", "1.relu", "sub_1.relu", "sub_1.output"])
@pytest.mark.parametrize("is_called", [False, True])
def test_what_was_asked_for_can_be_given_back(name: str, is_called: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), torch.randn(3, 2)
    bended = bt.BendedModule(model)
    if is_called:
        bended(x)
    found, output = bended.get_activations(name, args=(x,), return_output=True)
    for given in ({name: found[name]}, found, {k: copy.copy(v) for k, v in found.items()}):
        assert torch.equal(bended.from_activations(given, x), output)
    bended(x)
    assert torch.equal(bended.from_activations({name: found[name]}), output)


def test_keys_of_activations_are_given_back_although_their_text_is_ambiguous() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x * 2) * 3

    bended, x = called(lambda: model, torch.ones(2)), torch.ones(2)
    found = bended.get_activations(".*", args=(x,))
    assert "mul_1" in found
    assert {type(key) for key in found} == {NodePath}
    given = {key: value * 2 for key, value in found.items() if key == "mul_1"}
    assert torch.equal(bended.from_activations(given, x), x * 12)
    with pytest.raises(InputError, match=r"Write '.mul_1' or 'mul'"):
        bended.from_activations({"mul_1": x}, x)


def test_a_log_and_a_model_refuse_with_their_own_errors() -> None:
    x = torch.ones(2, 4)
    bended = called(Blocks, x)
    with pytest.raises(LayerKeyError) as of_log:
        bended.trace(x)["add_1"]
    with pytest.raises(NodePathError) as of_model:
        bended.interject("add_1", torch.neg)
    assert of_log.value.near == of_model.value.completions == (".add_1", "add")


def test_a_layer_that_is_no_node_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        y[0] = 1
        return y.exp()

    bended = called(lambda: model, torch.ones(2))
    name = bended.trace(torch.ones(2))[2].short_name
    assert name == "setitem_1"
    with pytest.raises(NodePathError, match="is a layer without a node in the tree"):
        bended.interject(name, torch.neg)


class Counts(nn.Module):
    """Changes an attribute, which what is inserted looks at."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = torch.zeros(2)

    def forward(self, input: Tensor) -> Tensor:
        self._steps = self._steps + 1
        return torch.relu(input) * 2


def test_reasons_name_attributes_by_their_paths_also_after_the_insertion_is_gone() -> None:
    model, x = Counts(), torch.ones(2)

    def steps(value: Tensor) -> Tensor:
        return value + model._steps

    bended = bt.BendedModule(model)
    with bended.interject("input", steps):
        for _ in range(3):
            bended(x)
    for _ in range(2):
        (reason,) = bended.why_live
        assert reason.endswith("or change what it reads: self._steps")
        assert bended.stats.live == 3
        bended(x)


def test_messages_call_what_is_inserted_by_its_place() -> None:
    class Steps(bt.Interjection):
        def after(self, at: Any, inputs: Any, output: Any) -> Any:
            return None

    bended, x = called(Blocks, torch.ones(2, 4)), torch.ones(2, 4)
    with bended.interject("h_1.softmax", Steps()):
        bended(x)
        trace = bended.trace(x)
        (gate,) = (op.target for op in trace.ops if "Steps" in str(op.target))
    assert "__" in name_of(gate)
    assert display_name(gate) == "the insertion at 'h_1.softmax' (Steps)"
    assert display_name(torch.relu) == "relu"


class Late(nn.Module):
    """Calls a module that has an argument of another name, and one called `input`."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.own = Attention(), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.own(self.block(values * 2))


def test_input_is_the_first_argument_of_a_module_whatever_its_name() -> None:
    x = torch.arange(8.0).view(2, 4)
    bended = called(Late, x)
    for name in ("block.input", "block.x"):
        found = bended.get_activations(name, args=(x,))
        assert list(found) == ["block.x"]
        assert torch.equal(found[name], x * 2)
    plain = bended.model(x)
    with bended.interject("block.input", torch.zeros_like) as handle:
        given = bended(x)
    assert handle.report().paths == ("block.x",)
    assert torch.equal(given, bended.model(x * 0))
    assert not torch.equal(given, plain)
    assert list(bended.get_activations("own.input", args=(x,))) == ["own.input"]
    assert list(bended.get_activations("input", args=(x,))) == ["values"]


class Wired(nn.Module):
    """Has a submodule called `input`."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.input(x)


def test_a_submodule_called_input_keeps_its_name() -> None:
    x = torch.ones(2)
    found = called(lambda: nn.Sequential(Wired()), x).get_activations("0.input", args=(x,))
    assert torch.equal(found["0.input"], x.tanh())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("blocks.0.hook_resid_post", "transformer_lens_aliases"),
        (r"h\.\d", r"pass re.compile('h\\.\\d')"),
    ],
)
def test_a_string_that_is_no_name_says_what_to_pass(name: str, hint: str) -> None:
    bended = called(Blocks, torch.ones(2, 4))
    with pytest.raises(NodePathError) as caught:
        bended.interject(name, torch.neg)
    assert hint in str(caught.value)


def test_a_function_that_was_not_called_is_named_as_users_write_it() -> None:
    bended = called(lambda: nn.Sequential(nn.ReLU()), torch.ones(2, 4))  # which calls F.relu
    for function, name in ((torch.relu, "torch.relu"), (Tensor.relu, "Tensor.relu")):
        with pytest.raises(NodePathError, match=f"^{name} selects .* did you mean 'sub_0.relu'"):
            bended.interject(function, torch.neg)
