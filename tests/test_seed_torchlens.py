"""TorchLens's README runs as it stands there, but for the import; then what it cannot follow.

AlexNet is written down here as torchvision has it. Of what is printed, only what depends on
weights, on time or on how a size is counted may differ.
"""

# ruff: noqa: E101, E501

from __future__ import annotations

import gc
import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import bendtrace as tl
from bendtrace.compat import _torchlens_logs
from tests import seeds
from tests.promise import bits, footprint, state


class AlexNet(nn.Module):
    def __init__(self, num_classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(p=dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(p=dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


LOG = """\
Log of AlexNet forward pass:
	Model structure: purely feedforward, without branching; 23 total modules.
	24 tensors (4.8 MB) computed in forward pass; 24 tensors (4.8 MB) saved.
	16 parameter operations (61100840 params total; ...).
	Random seed: ...
	Time elapsed: ...s
	Module Hierarchy:
		features:
		    features.0, features.1, features.2, features.3, features.4, features.5, features.6, features.7,
		    features.8, features.9, features.10, features.11, features.12
		avgpool
		classifier:
		    classifier.0, classifier.1, classifier.2, classifier.3, classifier.4, classifier.5, classifier.6
	Layers:
		0: input_1_0
		1: conv2d_1_1
		2: relu_1_2
		3: maxpool2d_1_3
		4: conv2d_2_4
		5: relu_2_5
		6: maxpool2d_2_6
		7: conv2d_3_7
		8: relu_3_8
		9: conv2d_4_9
"""

LAYER = """\
Layer conv2d_3_7, operation 8/24:
	Output tensor: shape=(1, 384, 13, 13), dtype=torch.float32, size=253.5 KB
		tensor([[...],
        [...],
        [...],
        [...],
        [...]])...
	Params: Computed from params with shape (384,), (384, 192, 3, 3); 663936 params total (2.5 MB)
	Parent Layers: maxpool2d_2_6
	Child Layers: relu_3_8
	Function: conv2d (gradfunc=ConvolutionBackward0)
	Computed inside module: features.6
	Time elapsed:  ...s
	Output of modules: features.6
	Output of bottom-level module: features.6
	Lookup keys: -17, 7, conv2d_3_7, conv2d_3_7:1, features.6, features.6:1
"""


def assert_reads(printed: str, shown: str) -> None:
    """The first lines are those that are shown; three dots stand for anything."""
    lines, wanted = printed.splitlines(), shown.splitlines()
    assert len(lines) >= len(wanted)
    for line, want in zip(lines, wanted, strict=False):
        pattern = ".*".join(map(re.escape, want.split("...")))
        assert re.fullmatch(pattern, line.rstrip()), f"{line!r} is not {want!r}"


def test_the_readme_runs_with_one_line_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = SimpleNamespace(alexnet=AlexNet)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    code = "\n".join(seeds.fenced("torchlens"))
    assert code.count("import torcheer as tl") == 1
    monkeypatch.chdir(tmp_path)
    code = code.replace("import torcheer as tl", "from bendtrace.compat import torchlens as tl")
    names = seeds.run(code, {}, tmp_path / "readme.py")
    printed = capsys.readouterr().out
    assert names["model_history"].picture.svg.startswith("<svg")
    assert (tmp_path / "modelgraph.pdf").read_bytes().startswith(b"%PDF")
    assert_reads(printed, LOG)
    log, _, rest = printed.partition("Layer conv2d_3_7,")
    assert log == f"{names['model_history']}\n"
    layer, _, values = f"Layer conv2d_3_7,{rest}".partition("\ntensor([[[[")
    assert_reads(layer, LAYER)
    assert f"tensor([[[[{values}" == f"{names['model_history']['features.6'].tensor_contents}\n"
    # What its comments say.
    for key in re.findall(r"^# model_history\[(.*?)\]", code, re.MULTILINE):
        assert names["model_history"][eval(key)] is names["model_history"]["conv2d_3_7"]


@pytest.fixture(scope="module")
def alexnet() -> Any:
    torch.manual_seed(0)
    return AlexNet()


@pytest.fixture(scope="module")
def model_history(alexnet: Any) -> Any:
    x = torch.rand(1, 3, 224, 224)
    return tl.log_forward_pass(alexnet, x, layers_to_save="all", vis_opt="none")


def test_a_layer_prints_as_in_the_seed(model_history: Any) -> None:
    assert_reads(str(model_history["conv2d_3_7"]), LAYER)


@pytest.mark.parametrize(
    "key", ["conv2d_3_7", "conv2d_3", "conv2d_3_7:1", "features.6", "features.6:1", 7, -17]
)
def test_every_key_of_the_seed_finds_the_layer(model_history: Any, key: Any) -> None:
    assert model_history[key] is model_history["conv2d_3_7"]
    assert key in model_history


def test_the_activation_of_a_layer_is_what_the_module_gives(
    model_history: Any, alexnet: Any
) -> None:
    before = model_history["maxpool2d_2_6"].tensor_contents
    given = model_history["conv2d_3_7"].tensor_contents
    assert torch.equal(given, alexnet.features[6](before))
    # relu_3_8 worked in place on it afterwards.
    assert given.min() < 0
    assert torch.equal(model_history["relu_3_8"].tensor_contents, given.relu())


def test_names_and_neighbours_of_the_layers_are_those_of_the_seed(model_history: Any) -> None:
    names = [entry.label for entry in model_history.layers]
    assert names[:3] == ["input_1_0", "conv2d_1_1", "relu_1_2"]
    assert names[-3:] == ["relu_7_21", "linear_3_22", "output_1_23"]
    assert len(names) == len(model_history) == 24
    assert len(model_history.modules) == 23
    layer = model_history["conv2d_3_7"]
    assert layer.parents == ["maxpool2d_2_6"]
    assert layer.children == ["relu_3_8"]
    assert layer.grad_fn == "ConvolutionBackward0"


def test_outputs_are_found_by_their_short_name_and_modules_by_what_they_give(
    model_history: Any,
) -> None:
    assert model_history["output_1"] is model_history[-1]
    assert model_history["input_1_0"] is model_history[0]
    assert model_history["features"] is model_history["features.12"]
    assert model_history["classifier"] is model_history["linear_3_22"]
    assert model_history["avgpool"].layer_type == "adaptiveavgpool2d"


def test_pictures_of_both_kinds_can_be_asked_for(alexnet: Any, tmp_path: Any) -> None:
    x = torch.rand(1, 3, 63, 63)
    for option in ("rolled", "unrolled"):
        path = tmp_path / f"{option}.svg"
        tl.log_forward_pass(alexnet, x, layers_to_save="none", vis_opt=option, vis_outpath=path)
        assert "conv2d" in path.read_text()


class SimpleRecurrent(nn.Module):
    """The recurrent model of the seed's picture: one weight, four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.fc(x)
            x = x + 1
            x = x * 2
        return x


@pytest.fixture(scope="module")
def recurrent() -> Any:
    return tl.log_forward_pass(SimpleRecurrent(), torch.rand(5, 5), layers_to_save="all")


def test_the_recurrent_model_has_passes(recurrent: Any) -> None:
    assert [entry.label for entry in recurrent.layers] == [
        "input_1_0",
        *(f"{name}:{step}" for step in range(1, 5) for name in
          ("linear_1_1", "add_1_2", "mul_1_3")),
        "output_1_4",
    ]  # fmt: skip
    structure = str(recurrent).splitlines()[1]
    assert "recurrent" in structure
    assert "purely feedforward" not in structure


def test_passes_are_found_by_name_module_and_position(recurrent: Any) -> None:
    second = recurrent[4]
    assert second.label == "linear_1_1:2"
    for key in ("linear_1_1:2", "linear_1:2", "fc:2", -10):
        assert recurrent[key] is second
    assert second.parents == ["mul_1_3:1"]
    assert second.children == ["add_1_2:2"]


def test_a_layer_with_several_passes_is_all_of_them(recurrent: Any) -> None:
    for key in ("linear_1_1", "linear_1", "fc"):
        found = recurrent[key]
        assert [entry.pass_number for entry in found] == [1, 2, 3, 4]
    with pytest.raises(AttributeError, match="linear_1_1:2"):
        _ = recurrent["linear_1"].tensor_contents


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=16))


def test_the_two_residual_adds_of_a_block_are_no_recurrence(gpt2: Any) -> None:
    gpt2 = gpt2.eval()
    log = tl.log_forward_pass(gpt2, torch.arange(6)[None], layers_to_save="all")
    assert all(entry.passes == 1 for entry in log.layers)
    assert "recurrent" not in str(log).splitlines()[1]
    for block in range(3):
        adds = [e for e in log.layers if e.module == f"h.{block}" and e.layer_type == "add"]
        assert len(adds) == 2
        assert adds[0].name != adds[1].name


# What no log of torch's functions alone can tell


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(self.act(self.fc(x)))) + self.fc(x)


def test_a_module_that_is_called_several_times_has_passes() -> None:
    log = tl.log_forward_pass(Shared(), torch.rand(2, 4), layers_to_save="all")
    assert [call.label for call in log.modules] == ["fc:1", "act:1", "fc:2", "act:2", "fc:3"]
    assert len(log["fc"]) == 3
    assert log["fc:2"].parents == [log["act:1"].label]
    assert log["fc:3"].parents == ["input_1_0"]


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        view = y[0]
        view.mul_(10)
        y[1] = 0
        return y


def test_what_was_saved_is_the_value_before_a_later_write() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    log = tl.log_forward_pass(InPlace(), x, layers_to_save="all")
    assert [entry.tensor_contents.tolist() for entry in log if entry.kind == "op"] == [
        [[2.0, 4.0], [6.0, 8.0]],
        [[3.0, 5.0], [7.0, 9.0]],
        [3.0, 5.0],
        [30.0, 50.0],
        [[30.0, 50.0], [0.0, 0.0]],
    ]
    assert log[-1].tensor_contents.tolist() == [[30.0, 50.0], [0.0, 0.0]]


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum().item()
        while total > 2:
            x = x / 2
            total = x.sum().item()
        return x + 1 if total > 1 else x - 1


def test_branches_and_loops_on_items_are_part_of_the_log() -> None:
    log = tl.log_forward_pass(Item(), torch.ones(8), layers_to_save="all")
    halves = log["div_1"]
    assert [entry.pass_number for entry in halves] == [1, 2]
    kinds = [step.kind for step in log.flow_steps]
    assert "while" in kinds
    assert log["add_1"].kind == "op"
    numbers = [entry.value for entry in log.entries if entry.layer_type == "item"]
    assert numbers == [8.0, 4.0, 2.0]
    for entry in halves:
        assert [log.flow_steps[number].kind for number in entry.flow] == ["while"]


@pytest.mark.parametrize(
    "key",
    ["input_1", "linear_1_1:2", "fc:2", "add_1", "output_1", "output_1_4", 0, 3, -1, -2, -3, -8],
)
def test_a_subset_is_saved_by_the_keys_that_find_it(key: Any) -> None:
    model, x = Shared(), torch.rand(2, 4)
    log = tl.log_forward_pass(model, x, layers_to_save=[key])
    wanted = log[key]
    assert wanted.has_contents
    whole = tl.log_forward_pass(model, x, layers_to_save="all")
    assert bits(wanted.tensor_contents) == bits(whole[key].tensor_contents)
    # What the model gives out is also what its last op gave.
    same = {wanted.label, "add_1_3", "output_1_4"} if key in ("add_1", "output_1", "output_1_4",
                                                              -1, -2) else {wanted.label}  # fmt: skip
    assert {entry.label for entry in log if entry.has_contents} <= same


def test_nothing_is_saved_for_none() -> None:
    log = tl.log_forward_pass(Shared(), torch.rand(2, 4), layers_to_save="none")
    assert not any(entry.has_contents for entry in log.entries)
    assert "8 tensors (256 B) computed in forward pass; 0 tensors (0 B) saved." in str(log)


def test_gradients_are_those_of_the_backward_pass() -> None:
    model, x = Shared(), torch.rand(2, 4)
    log = tl.log_forward_pass(model, x, save_gradients=True)
    hidden = model.fc(x).detach().requires_grad_()
    (model.act(model.fc(model.act(hidden))) + model.fc(x).detach()).sum().backward()
    assert log["linear_1:1"].grad_contents is None
    log.output.sum().backward()
    assert torch.equal(log["linear_1:1"].grad_contents, hidden.grad)


# Keys that are wrong


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("conv2d_3_8", "conv2d_3_7"),
        ("conv2d3", "conv2d_3"),
        ("features.60", "features.6"),
        ("feature.6", "features.6"),
        ("conv2d_3_7:2", "conv2d_3_7"),
    ],
)
def test_an_unknown_key_names_its_near_misses(model_history: Any, key: str, near: str) -> None:
    assert key not in model_history
    with pytest.raises(KeyError) as caught:
        model_history[key]
    assert isinstance(caught.value, tl.BendtraceError)
    assert repr(key) in str(caught.value)
    assert near in str(caught.value)


@pytest.mark.parametrize("key", [24, -25, 10**6])
def test_a_position_that_is_not_there_is_told(model_history: Any, key: int) -> None:
    assert key not in model_history
    with pytest.raises(KeyError, match="the 24 layers have positions 0 to 23, or -24 to -1"):
        model_history[key]


@pytest.mark.parametrize("key", ["", "   ", ":", "conv2d_3:", ":1", "conv2d_3_7:0", "conv2d_3_7:-1",
                                 "conv2d_3_7:1:1", None, 1.5, True, ("conv2d_3",), "features..6",
                                 "🔥", "a" * 10_000, "output.sub_0.x"])  # fmt: skip
def test_keys_that_make_no_sense_are_refused(model_history: Any, key: Any) -> None:
    assert key not in model_history
    with pytest.raises(KeyError):
        model_history[key]


def test_slices_go_by_position_and_by_name(model_history: Any) -> None:
    labels = [entry.label for entry in model_history.layers]
    assert [entry.label for entry in model_history[2:5]] == labels[2:5]
    assert [entry.label for entry in model_history[-3:]] == labels[-3:]
    assert [entry.label for entry in model_history[::-1]] == labels[::-1]
    assert [entry.label for entry in model_history["conv2d_2":"conv2d_3"]] == labels[4:7]
    assert list(model_history[50:]) == []
    assert [entry.label for entry in model_history] == labels


def test_every_layer_is_found_by_all_its_lookup_keys(model_history: Any) -> None:
    for entry in model_history.layers:
        (line,) = [line for line in str(entry).splitlines() if "Lookup keys:" in line]
        for key in line.partition(": ")[2].split(", "):
            found = model_history[int(key) if re.fullmatch(r"-?\d+", key) else key]
            assert found is entry, key


def test_every_node_path_finds_its_entry(model_history: Any) -> None:
    for entry in model_history.entries:
        assert entry.node_path
        assert model_history[entry.node_path] is entry


def test_keys_are_completed(model_history: Any) -> None:
    keys = model_history._ipython_key_completions_()
    assert {"conv2d_3_7", "conv2d_3", "features.6"} <= set(keys)
    assert all(isinstance(key, str) for key in keys)


# Nothing is left behind, and nothing is changed


def models() -> list[Any]:
    torch.manual_seed(0)
    return [
        (Shared(), torch.rand(2, 4)),
        (SimpleRecurrent(), torch.rand(5, 5)),
        (InPlace(), torch.rand(2, 2)),
        (Item(), torch.ones(8)),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)), torch.rand(3, 4)),
        (nn.LSTM(4, 3), torch.rand(2, 1, 4)),
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("options", [{"layers_to_save": "all"}, {"layers_to_save": "none"},
                                     {"layers_to_save": "all", "save_gradients": True}])  # fmt: skip
def test_a_log_leaves_output_state_and_random_numbers_as_eager_does(
    number: int, options: dict[str, Any]
) -> None:
    (model, x), (eager, _) = models()[number], models()[number]
    torch.manual_seed(5)
    expected = eager(x.clone())
    drawn = torch.rand(3)
    before = footprint()
    attributes = [sorted(vars(module)) for module in model.modules()]
    functions = {name: getattr(torch, name) for name in ("add", "relu", "Tensor", "conv2d")}
    methods = {name: getattr(torch.Tensor, name) for name in ("__add__", "relu", "item", "cpu")}
    torch.manual_seed(5)
    log = tl.log_forward_pass(model, x.clone(), **options)
    assert bits(torch.rand(3)) == bits(drawn)
    assert bits(log.output) == bits(expected)
    assert bits(state(model)) == bits(state(eager))
    assert footprint() == before
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert all(getattr(torch, name) is function for name, function in functions.items())
    assert all(getattr(torch.Tensor, name) is method for name, method in methods.items())


def test_the_arguments_keep_what_they_were() -> None:
    x = torch.rand(2, 4, requires_grad=True)
    version = x._version
    log = tl.log_forward_pass(Shared(), x, layers_to_save="all", save_gradients=True)
    assert x._version == version
    assert x.grad is None
    del log
    gc.collect()
    assert not x._backward_hooks


@pytest.mark.more
def test_two_threads_can_log_at_once() -> None:
    torch.manual_seed(0)
    jobs = [(SimpleRecurrent(), torch.rand(5, 5)), (Item(), torch.ones(8))]
    alone = [tl.log_forward_pass(model, x, layers_to_save="all") for model, x in jobs]
    barrier = threading.Barrier(2)
    found: list[list[Any]] = [[], []]

    def work(number: int) -> None:
        model, x = jobs[number]
        barrier.wait()
        for _ in range(20):
            found[number].append(tl.log_forward_pass(model, x, layers_to_save="all"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, others in zip(alone, found, strict=True):
        assert len(others) == 20
        for other in others:
            assert [e.label for e in other.entries] == [e.label for e in one.entries]
            for mine, theirs in zip(one.layers, other.layers, strict=True):
                assert bits(mine.tensor_contents) == bits(theirs.tensor_contents)


def test_an_error_of_the_model_comes_out_as_it_is_and_leaves_nothing_behind() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1) @ torch.ones(99, 1)

    before = footprint()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tl.log_forward_pass(Broken(), torch.rand(2, 4), layers_to_save="all")
    assert footprint() == before


@pytest.mark.parametrize(
    "options",
    [
        {"layers_to_save": "some"},
        {"layers_to_save": ["conv2d_99"]},
        {"layers_to_save": 3.5},
        {"vis_opt": "both"},
        {"nonsense": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((tl.BendtraceError, TypeError)) as caught:
        tl.log_forward_pass(Shared(), torch.rand(2, 4), **options)
    value = next(iter(options.values()))
    shown = value[0] if isinstance(value, list) else value
    assert str(shown) in str(caught.value) or "nonsense" in str(caught.value)


class Residual(nn.Module):
    """The basic block of torchvision's ResNets."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.layers = nn.Sequential(*(
            nn.Sequential(Residual(inner, outer, stride), Residual(outer, outer, 1))
            for inner, outer, stride in sizes
        ))  # fmt: skip
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


class Block(nn.Module):
    """The encoder block of torchvision's vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 16), nn.Dropout()
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(given)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = self.dropout(x)
        x = x + given
        y = self.mlp(self.ln_2(x))
        return x + y


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 5, 16))
        self.dropout, self.ln = nn.Dropout(), nn.LayerNorm(16)
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln(self.layers(self.dropout(x + self.position)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 16, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.encoder, self.heads = Encoder(), nn.Sequential(nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_proj(x).reshape(len(x), 16, 4).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        return self.heads(self.encoder(x)[:, 0])


def bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertModel(BertConfig(**sizes, intermediate_size=32, vocab_size=50))


def small_gpt2() -> Any:
    return GPT2Model(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16))


LABELLED = {
    "alexnet": (AlexNet, torch.ones(1, 3, 64, 64)), "lstm": (lambda: nn.LSTM(4, 8, 2),
    torch.ones(5, 1, 4)), "gpt2": (small_gpt2, torch.arange(6)[None]),
    "bert": (bert, torch.arange(6)[None]), "resnet18": (ResNet18, torch.ones(1, 3, 32, 32)),
    "vit": (ViT, torch.ones(1, 3, 32, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
def test_the_labels_of_six_models_are_those_of_torchlens_2_36(name: str) -> None:
    """The file was made by torchlens 2.36.1, whose labels of buffers are left out."""
    make, x = LABELLED[name]
    log = tl.compat.torchlens.trace(make().eval(), x, layers_to_save="none")
    several = {entry.name for entry in log.layer_list if entry.passes > 1}
    found = [one if one.partition(":")[0] in several else one[:-2] for one in log.op_labels]
    wanted = json.loads(Path(seeds.__file__).with_name("torchlens_labels.json").read_text())
    assert " ".join(found) == wanted[name]


def test_the_labels_of_bendtrace_are_those_without_calls_in_a_row() -> None:
    """Two residual additions of one module are two layers, and so are ReLUs after other layers."""
    log = tl.trace(ResNet18().eval(), torch.ones(1, 3, 32, 32))
    labels = [entry.label for entry in log.layers]
    assert labels[4:12] == [
        "maxpool2d_1_4", "conv2d_2_5", "batchnorm_2_6", "relu_2_7", "conv2d_3_8", "batchnorm_3_9",
        "iadd_1_10", "relu_3_11",
    ]  # fmt: skip
    vit = tl.trace(ViT().eval(), torch.ones(1, 3, 32, 32))
    assert max(entry.passes for entry in vit.layers) == 1


def test_all_operators_that_assign_have_their_names() -> None:
    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x += 1
        x -= 1
        x *= 2
        x /= 2
        x //= 1
        x %= 7
        x **= 2
        return x.add_(1)

    found = [entry.layer_type for entry in tl.trace(changed, torch.ones(2)).layers]
    assert found[2:-1] == ["iadd", "isub", "imul", "idiv", "ifloordiv", "imod", "ipow", "add"]


def test_operators_have_the_labels_of_torchlens_2_36() -> None:
    """The list is what torchlens 2.36.1 prints for this function."""

    def computed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = +((((x / y) % y) // y) ** y)
        x = torch.div(2 ** (2 // (2 % x)), y).remainder(y)
        return torch.floor_divide(x, y).data

    log = lens.trace(computed, [torch.rand(3) + 1, torch.rand(3) + 1], save=lens.func("truediv"))
    assert log.layer_labels == [
        "input_1", "input_2", "truediv_1_1", "mod_1_2", "floordivide_1_3", "pow_1_4", "pos_1_5",
        "remainder_1_6", "floordivide_2_7", "pow_2_8", "div_1_9", "remainder_2_10",
        "floordivide_3_11", "detach_1_12", "output_1",
    ]  # fmt: skip
    assert log.saved_ops.labels()[0] == "truediv_1_1"


lens = tl.compat.torchlens


@pytest.fixture
def three() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def test_the_options_of_the_first_releases_do_what_they_say(three: Any, tmp_path: Path) -> None:
    x = torch.ones(4, 2)
    log = lens.log_forward_pass(
        three, [x], {}, ["linear"], output_device="cpu", activation_postfunc=torch.sum,
        mark_input_output_distances=True, detach_saved_tensors=True, save_function_args=True,
        save_gradients=True, vis_opt="rolled", vis_nesting_depth=1, vis_fileformat="svg",
        vis_outpath=tmp_path / "run", vis_save_only=True, vis_direction="leftright", random_seed=1,
    )  # fmt: skip
    assert log.saved_ops.labels() == ["linear_1_1", "linear_2_3", "output_1_4"]
    assert log["linear_1"].tensor_contents.equal(three[0](x).sum())
    assert (tmp_path / "run.svg").read_text() == log.picture.svg
    assert log["relu_1"].max_distance_from_output == 2
    for option in ({"keep_unsaved_layers": False}, {"vis_node_overrides": {"color": "red"}}):
        with pytest.raises(tl.errors.InputError, match="not supported"):
            lens.log_forward_pass(three, x, **option)
    with pytest.raises(KeyError, match="conv3d"):
        lens.log_forward_pass(three, x, layers_to_save=["conv3d"])
    whole = lens.log_forward_pass(three, x, save_function_args=True)
    assert whole["linear_1"].tensor_contents.requires_grad
    assert all(
        a is b
        for a, b in zip(whole["linear_1"].creation_args[1:], three[0].parameters(), strict=True)
    )
    assert whole["linear_2"].creation_args[0].equal(three[:2](x))
    assert log["relu_1"].creation_kwargs == {"inplace": False}


def test_pictures_are_shown_where_there_is_a_screen(
    three: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", shown.append)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    lens.show_model_graph(three, torch.ones(1, 2))
    assert shown == [] or sys.platform in ("win32", "darwin")
    monkeypatch.setenv("DISPLAY", ":0")
    lens.show_model_graph(three, torch.ones(1, 2))
    assert shown[-1] == (tmp_path / "modelgraph.pdf").as_uri()


def test_every_field_of_an_entry_can_be_read(three: Any) -> None:
    log = lens.trace(three, torch.ones(4, 2), save_grads=True, mark_layer_depths=True)
    log.log_backward(log[log.output_layers[0]].out.sum())
    fields = {
        name: [getattr(entry, name) for entry in log.layer_list] for name in _torchlens_logs._FIELDS
    }
    row = {name: values[1] for name, values in fields.items()}
    expected = {
        "layer_label_w_pass_short": "linear_1:1", "layer_total_num": 1, "pass_num": 1,
        "same_layer_operations": ["linear_1_1"], "has_saved_activations": True,
        "tensor_shape": (4, 3), "tensor_fsize_nice": "48 B", "grad_shape": (4, 3),
        "func_applied_name": "linear", "gradfunc": "AddmmBackward0", "num_params_total": 9,
        "parent_param_shapes": [(3,), (3, 2)], "parent_layers": ["input_1_0"],
        "child_layers": ["relu_1_2"], "has_spouses": False, "is_input_layer": False,
        "has_input_ancestor": True, "is_output_parent": False, "module_passes_exited": ["0:1"],
        "containing_module_origin": "0:1", "initialized_inside_model": False,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert fields["is_output_parent"] == [False, False, False, True, False]
    assert log["linear_1"].func_applied is nn.functional.linear


def test_selectors_choose_what_is_saved(three: Any) -> None:
    x = torch.ones(4, 2)
    for where, found in [
        (lens.func("relu"), ["relu_1_2"]),
        (lens.in_module("2"), ["linear_2_3"]),
        (lens.module("0") | lens.label("relu_1:1"), ["linear_1_1", "relu_1_2"]),
        (lens.contains("linear") & ~lens.regex("_1_"), ["linear_2_3"]),
        (lens.where(lambda entry: entry.num_params_total == 9), ["linear_1_1"]),
    ]:
        log = lens.trace(three, x, save=where)
        # What the model returns is also the result of its last layer.
        assert log.saved_ops.labels() == list(dict.fromkeys([*found, "linear_2_3", "output_1_4"]))
        assert log.find_sites(where).labels() == found
    ended = lens.trace(three, x, halt=lens.in_module("1"))
    assert ended.layer_list[-1].label == "relu_1_2"
    assert lens.pluck(three, x, "relu_1_2").equal(three[:2](x))
    assert lens.extract(three, x, {"first": "linear_1"})["first"].equal(three[0](x))
    with pytest.raises(tl.errors.InputError, match="several layers: linear_1_1, linear_2_3"):
        lens.pluck(three, x, "linear")


def test_gradients_are_kept_where_they_are_asked_for(three: Any) -> None:
    capture = lens.options.CaptureOptions(save_grads=lens.func("relu"))
    log = lens.trace(three, torch.ones(4, 2), capture=capture)
    log.log_backward(log["output_1"].out.sum())
    assert log.saved_grad_ops.labels() == ["relu_1_2"]
    assert log["relu_1"].grad.equal(three[2].weight.expand(4, 3))


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        (lens.func("relu"), [0, 1]), (lens.label("relu_1"), [0, 1]), (lens.label("relu_1:2"), [1]),
        (lens.contains("relu"), [0, 1]), ("relu_1:1", [0]),
    ],
)  # fmt: skip
def test_a_change_is_in_the_log_where_its_layer_is(where: Any, passes: list[int]) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = torch.relu(x) + 1
            return x

    x = torch.ones(2)
    log = lens.trace(Twice(), x, intervene=lens.when(where, lens.scale(3)))
    wanted = x
    for number in range(2):
        relu = wanted.relu() * (3 if number in passes else 1)
        assert log["relu_1"][number].out.equal(relu)
        wanted = relu + 1
    assert log["output_1"].out.equal(wanted)
    assert log.op_labels == lens.trace(Twice(), x).op_labels


def test_helpers_change_values_as_their_names_say() -> None:
    x, axis = torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 2.0])
    torch.manual_seed(0)
    for helper, wanted in [
        (lens.zero_ablate(), [[0.0, 0.0]]), (lens.mean_ablate(), [[3.5, 3.5]]),
        (lens.mean_ablate(axis), [[1.0, 1.0]]), (lens.scale(2), [[6.0, 8.0]]),
        (lens.clamp(max=3.5), [[3.0, 3.5]]), (lens.replace_with(x + 1), [[4.0, 5.0]]),
        (lens.steer(axis, 0.5, feature_axis=-1), [[3.0, 5.0]]),
        (lens.project_onto(axis, feature_axis=-1), [[0.0, 4.0]]),
        (lens.project_off(axis[None]), [[3.0, 0.0]]), (lens.noise(0.0, seed=1), [[3.0, 4.0]]),
        (lambda out, *, hook: out - 1, [[2.0, 3.0]]),
    ]:  # fmt: skip
        changed = lens.when(lens.func("relu"), helper)
        assert lens.trace(nn.ReLU(), x, intervene=changed)["relu_1"].out.tolist() == wanted
    with pytest.raises(tl.errors.InputError, match="feature_axis"):
        lens.trace(nn.ReLU(), x, intervene=lens.when(lens.func("relu"), lens.steer(axis)))


def test_forks_are_run_again_and_compared(three: Any) -> None:
    x = torch.ones(4, 2)
    clean = lens.trace(three, x)
    forked = clean.fork("changed").attach_hooks(lens.func("relu"), lens.zero_ablate())
    assert forked["relu_1"].out.equal(clean["relu_1"].out)
    forked.replay()
    assert not forked["relu_1"].out.any()
    assert "relu_1_2" in str(forked["relu_1"])
    assert clean["relu_1"].out.any()
    bundle = lens.bundle({"clean": clean, "changed": forked})
    assert bundle.compare_at(lens.func("relu")).tolist() == [[0, 1], [1, 0]]
    assert bundle.most_changed(top_k=1)[0][0] == "relu_1_2"
    again = clean.fork().set("relu_1", clean["relu_1"].out * 2).rerun(three, x + 1)
    assert again["output_1"].out.equal(three[2](clean["relu_1"].out * 2))


def test_saved_logs_have_the_same_names(three: Any, tmp_path: Path) -> None:
    log = lens.trace(three, torch.ones(4, 2))
    lens.save(log, tmp_path / "log")
    loaded = lens.load(tmp_path / "log")
    assert loaded.op_labels == log.op_labels
    assert loaded["relu_1"].out.equal(log["relu_1"].out)
    assert loaded.modules["1"].class_name == "ReLU"
    assert loaded.modules["0:1"].ops == ["linear_1_1:1"]
    assert loaded["relu_1"].intervention_replaced is None
    assert list(loaded["relu_1"].grads) == []
    assert loaded.find_nan() == log.find_nan()
    names = [name for name, _ in three.named_parameters()]
    assert sorted(loaded.params.to_pandas()["name"]) == sorted(names)
    assert lens.validate(three, torch.ones(4, 2))
    assert log.validate_saved_activations()


def test_a_log_is_read_with_the_names_of_torchlens_2() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    x = torch.ones(1, 2)
    log = tl.compat.torchlens.trace(model, x, layers_to_save=["relu"])
    assert log.layer_labels == ["input_1", "linear_1_1", "relu_1_2", "linear_2_3", "output_1"]
    assert log.input_layers + log.output_layers == ["input_1_0", "output_1_4"]
    assert "relu_1_2" in log.saved_ops
    assert dict(log.saved_ops) == dict(log.saved_ops.items())
    assert "linear_1_1" not in log.saved_ops
    relu = log["relu_1"]
    assert (relu.func_name, relu.num_passes, relu.is_input) == ("relu", 1, False)
    assert torch.equal(relu.out, model[:2](x))
    assert torch.equal(log[log.output_layers[0]].out, model(x))
    assert log["linear_1"].out is None
    assert tl.compat.torchlens.get_model_metadata(model, x).num_tensors == len(log)


class Counted(torch.nn.Module):
    """Has ways of several lengths, one of them through a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        for _ in range(2):
            x = self.linear(x)
        return x + y, y * x.sum().item(), torch.ones(3)


def test_depths_and_transforms_are_those_asked_for() -> None:
    x = torch.ones(2, 3)
    log = tl.compat.torchlens.trace(
        Counted(), x, mark_layer_depths=True, activation_transform=torch.mean, save_arg_values=True
    )
    found = {
        entry.label: (
            entry.min_distance_from_input, entry.max_distance_from_input,
            entry.min_distance_to_output, entry.max_distance_to_output,
        )
        for entry in log.layers
    }  # fmt: skip
    assert found["input_1_0"] == (0, 0, 3, 6)
    assert found["linear_1_2:1"] == (1, 1, 3, 5)
    assert found["sum_1_4"] == (3, 3, 3, 3)
    assert found["mul_2_5"] == (2, 5, 1, 1)
    assert found["ones_1_6"] == (None, None, 1, 1)
    assert found["output_2_8"] == (3, 6, 0, 0)
    assert not log["ones_1"].has_input_ancestor
    assert log["ones_1"].has_output_descendant
    assert torch.equal(log["mul_1_1"].transformed_out, (x * 2).mean())
    plain = tl.compat.torchlens.trace(Counted(), x)["mul_1_1"]
    assert (plain.transformed_out, plain.has_input_ancestor) == (None, False)


def test_pictures_and_checks_have_the_names_of_torchlens_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Counted(), torch.ones(2, 3)
    names = tl.compat.torchlens
    picture = names.show_model_graph(
        model, x, vis_mode="rolled", vis_call_depth=1, vis_save_only=True, vis_buffers=True,
        recurrence_detection=True, vis_outpath=str(tmp_path / "run"), vis_fileformat="svg",
    )  # fmt: skip
    assert (tmp_path / "run.svg").read_text() == picture.svg
    assert picture.svg == tl.trace(model, x).draw(rolled=True, depth=1).svg
    with pytest.raises(tl.errors.InputError, match="vis_mode has to be"):
        names.show_model_graph(model, x, vis_mode="none")
    assert names.validate_forward_pass(model, x, random_seed=1)
    monkeypatch.setattr(tl.Trace, "validate", lambda self: ())
    assert not names.validate_forward_pass(model, x)


def test_a_tuple_is_one_argument_of_a_model_that_takes_one() -> None:
    def added(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]

    one, other = torch.ones(2), torch.full((2,), 3.0)
    assert torch.equal(tl.log_forward_pass(added, (one, other)).output, one + other)
    assert torch.equal(tl.log_forward_pass(torch.add, (one, other)).output, one + other)


class Halves(nn.Module):
    """A loop, and a division that gives NaN for ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.inner[0].weight.data.copy_(torch.eye(2))
        self.inner[0].bias.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.inner(x)
        return (x - 1) / (x - 1)


def test_the_first_value_that_is_not_finite_is_found() -> None:
    model, x = Halves(), torch.tensor([[1.0, 2.0]])
    log = lens.trace(model, x)
    found = log.find_nan()
    assert (found.found, found.label, found.kind) == (True, "truediv_1_5", "nan")
    assert found.op.out.isnan().tolist() == [[True, False]]
    assert found.source_line.startswith(__file__)
    assert log.first_nonfinite().startswith("First non-finite value: truediv_1_5 is nan, shape=")
    assert lens.debug.find_nan(model, x).label == "truediv_1_5"
    finite = lens.debug.bisect_nan(lens.trace(model, x * 2))
    assert (finite.found, finite.scope) == (False, "saved activations")
    some = lens.trace(model, x, save=lens.func("truediv")).find_nan()
    assert some.uncertainty_zone[:2] == ("sub_1_3", "sub_2_4")
    few = lens.trace(model, x * 2, save=lens.func("linear")).find_nan()
    assert "Re-trace with save=" in few.message


def test_runs_are_diagnosed_in_tables() -> None:
    pytest.importorskip("pandas")
    model, x = Halves(), torch.rand(3, 2) + 2
    log, other = lens.trace(model, x), lens.trace(model, x * 2)
    found = lens.debug.lineage(log, "relu_1:1", max_depth=1)
    assert [row[:2] for row in found.nodes] == [("relu_1_2:1", 0), ("linear_1_1:1", 1)]
    below = lens.debug.lineage(log, "sub_2", direction="descendants").nodes
    assert [row[0] for row in below] == ["sub_2_4:1", "truediv_1_5:1", "output_1:1"]
    assert lens.debug.lineage(log, "conv").nodes == []
    same, frame = lens.debug.compare(log, log), lens.debug.compare(log, other)
    assert same.attrs["matched"] == len(same) == len(log.layer_list)
    assert frame.attrs["value_diverged"] >= 1
    assert frame.set_index("op").loc["input_1:1", "max_abs"] == pytest.approx(float(x.max()))
    dead = lens.debug.dead_neurons(log, threshold=1e9).set_index("op")
    assert dead.loc["relu_1_2:2"].tolist()[:4] == [2, 2, 1.0, [0, 1]]
    assert set(lens.debug.dead_neurons(log, dim=7)["reason"]) == {"invalid-dim"}
    path = lens.debug.hot_path(log, by="memory")
    assert path["total_cost"].sum() == sum(one.nbytes for one in log.layer_list if one.kind == "op")
    assert path["pct_total"].sum() == pytest.approx(100)
    with pytest.raises(tl.errors.InputError, match="flops, memory, duration"):
        lens.debug.hot_path(log, by="time")
    assert lens.debug.gradient_flow_audit(log).attrs["message"].startswith("no saved gradients")


def test_each_logged_backward_pass_has_gradients_of_its_own() -> None:
    pytest.importorskip("pandas")
    log = lens.trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2), save_grads=True)
    assert log.save_grads is True
    loss = log["output_1"].out.sum()
    log.log_backward(loss, retain_graph=True)
    entry = log["tanh_1"]
    once = entry.grad.clone()
    log.log_backward(loss * 3)
    assert [(one.ordinal, one.backward_pass_index) for one in entry.grads] == [(1, 1), (2, 2)]
    assert entry.grad_for(bwd=1).equal(once)
    assert entry.grads.for_pass(2).grad.equal(once * 3)
    with pytest.raises(ValueError, match=r"use op\.grads\[\.\.\.\] / op\.grad_for\(bwd=k\)"):
        entry.grad  # noqa: B018
    with pytest.raises(KeyError, match="backward pass 3"):
        entry.grad_for(bwd=3)
    memory = sum(one.memory for op in log.saved_grad_ops for one in op.grads)
    assert log.total_gradient_memory == log.total_backward_memory == memory > 0
    assert lens.debug.gradient_flow_audit(log).attrs["message"].startswith("bwd is required")
    frame = lens.debug.gradient_flow_audit(log, bwd=2, exploding_threshold=4.0).set_index("op")
    assert frame.loc["tanh_1_2:1", "grad_norm"] == pytest.approx(3 * 2**0.5)
    assert list(frame.index[frame["exploding"]]) == ["tanh_1_2:1", "output_1:1"]
    log.cleanup()
    assert not log.saved_ops
    assert not log.backward_passes


def test_changes_by_hooks_and_modules_of_a_log() -> None:
    model, x = Halves(), torch.rand(1, 2) + 2
    hooks = {lens.func("relu"): lens.zero_ablate(), "sub_2": lens.scale(2)}
    log = lens.trace(model, x, hooks=hooks)
    changed = [one.label for one in log.layer_list if one.intervention_replaced]
    assert changed == ["relu_1_2:1", "relu_1_2:2", "sub_2_4"]
    assert log["relu_1:2"].out.eq(0).all()
    assert log["sub_2"].out.eq(-2).all()
    assert log["relu_1:1"].modules == ["inner:1", "inner.1:1"]
    labels = ["input_1", "linear_1_1", "relu_1_2", "linear_1_1", "relu_1_2"]
    assert log["self"].ops == [*labels, "sub_1_3", "sub_2_4", "truediv_1_5", "output_1"]
    assert log.modules["inner:2"].ops == ["linear_1_1:2", "relu_1_2:2"]
    some = lens.trace(model, x, save=lens.module("inner.0:2"))
    assert some.saved_module_calls.labels() == ["inner.0:2"]
    assert (some.num_saved_module_calls, log.num_saved_module_calls) == (1, 6)
    plain = lens.trace(model, x)
    plain.attach_hooks(lens.func("relu"), torch.zeros_like, lambda value: value + 3)
    assert plain.replay()["relu_1:2"].out.eq(3).all()
    assert plain.resolve_sites(lens.func("relu")).labels() == ["relu_1_2:1", "relu_1_2:2"]
    with pytest.raises(tl.errors.InputError, match="2 layers are selected"):
        plain.resolve_sites(lens.func("relu"), max_fanout=1)
    with pytest.raises(TypeError, match="string function name"):
        lens.func(3)


def test_bundles_get_and_lose_members(three: Any) -> None:
    one, two, more = (lens.trace(three, torch.rand(1, 2)) for _ in range(3))
    bundle = lens.bundle({"one": one})
    assert bundle.add(two, "two").add([more], ["more"]).names == ["one", "two", "more"]
    assert bundle.remove(two) is two
    assert bundle.remove(["more"]) == [more]
    for wrong in (one, "two", ["one"]):
        with pytest.raises(tl.errors.InputError, match="logs other than 'one' are removed"):
            bundle.remove(wrong)
    with pytest.raises(tl.errors.InputError, match="a log 'one' already"):
        bundle.add(two, "one")


def test_values_are_shown_as_pictures() -> None:
    pytest.importorskip("matplotlib")
    log = lens.trace(nn.Identity(), torch.rand(1, 3, 4, 5))
    shapes = {}
    for method in ("auto", "heatmap", "channels", "rgb", "hist"):
        axes = log.layers[0].show(method).axes
        shapes[method] = [image.get_array().shape for axis in axes for image in axis.images]
    plane = (4, 5)
    assert shapes == {
        "auto": [plane], "heatmap": [plane], "channels": [plane] * 3, "rgb": [(4, 5, 3)], "hist": []
    }  # fmt: skip
    for method, shape in (("rgb", (4, 5)), ("heatmap", (3,)), ("bars", (3,))):
        with pytest.raises(tl.errors.InputError):
            lens.trace(nn.Identity(), torch.rand(shape)).layers[0].show(method)


@pytest.mark.parametrize(
    ("model", "shape", "flexible"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), (1, 784), ()),
        (nn.Linear(4, 2, dtype=torch.complex64), (1, 4), ()),
        (nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)), (1, 4), ()),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 75**2, 2)),
            (1, 3, 77, 77),
            (),
        ),
        (
            nn.Sequential(
                nn.Conv2d(1, 2, 5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * 11**2, 2)
            ),
            (1, 1, 26, 26),  # 27 works as well
            (),
        ),
        (nn.Conv2d(4, 8, 3, groups=2, dtype=torch.float64), (1, 4, 32, 32), (2, 3)),
        (nn.Conv1d(1, 2, 400), (1, 1, 1024), (2,)),
        (nn.Conv3d(2, 4, 3), (1, 2, 16, 16, 16), (2, 3, 4)),
        (nn.ConvTranspose2d(6, 2, 3), (1, 6, 32, 32), (2, 3)),
        (nn.BatchNorm1d(9), (1, 9, 16), (2,)),
        (nn.GroupNorm(2, 6), (1, 6, 32, 32), (2, 3)),
        (nn.LayerNorm((3, 5)), (1, 3, 5), ()),
        (nn.GRU(5, 3), (16, 1, 5), (0,)),
        (nn.LSTM(5, 3, batch_first=True), (1, 16, 5), (1,)),
        (nn.LSTMCell(3, 4), (1, 3), ()),
        (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), (1, 16, 8), (1,)),
        (nn.EmbeddingBag(5, 3), (1, 16), (1,)),
        (nn.ReLU(), (1, 3, 32, 32), (2, 3)),
    ],
    ids=str,
)
def test_inputs_are_inferred_from_first_layers(
    model: nn.Module, shape: tuple[int, ...], flexible: tuple[int, ...]
) -> None:
    found = lens.debug.infer_input_shape(model)
    assert (found.found, found.shape, found.reason) == (True, shape, "")
    assert found.flexible_dims == flexible
    assert all(module.training for module in model.modules())
    fixed = "exact" if isinstance(model, nn.Sequential) and len(shape) > 2 else "static"
    assert found.strategy == ("adaptive_default" if flexible else fixed)
    integers = isinstance(model, nn.EmbeddingBag)
    assert found.value_range == (("randint", 0.0, 5.0) if integers else ("randn", 0.0, 1.0))
    model.eval()(found.example_input)


class Fed(nn.Module):
    """Computes something with a layer, and counts its runs."""

    def __init__(self, layer: nn.Module, function: Any) -> None:
        super().__init__()
        self.layer, self.function, self.runs = layer, function, 0
        self.unused, self.table = nn.Conv2d(1, 2, 1), nn.Parameter(torch.zeros(1, 10, 4))

    def forward(self, x: torch.Tensor) -> Any:
        self.runs += 1
        return self.function(self, x) * torch.rand(1)


def with_mask(model: Fed, mask: torch.Tensor) -> torch.Tensor:
    return model.layer(torch.ones(mask.shape).masked_fill(mask, 0))


@pytest.mark.parametrize(
    ("layer", "function", "shape", "dtype"),
    [
        (nn.Linear(3, 4), lambda m, x: x @ m.layer.weight.T, (1, 3), torch.float32),
        (nn.Linear(4, 4), with_mask, (1, 4), torch.bool),
        (nn.Conv2d(5, 4, 3), lambda m, x: m.layer(x.permute(0, 3, 1, 2)), (1, 32, 32, 5), None),
        (
            nn.Embedding(7, 4),
            lambda m, x: m.layer(x) + m.table[:, : x.shape[1]],
            (1, 10),
            torch.long,
        ),
        (nn.Conv2d(3, 4, 8, 8), lambda m, x: m.layer(x).view(1, 4, 81), (1, 3, 72, 72), None),
        (nn.Conv2d(3, 4, 3), lambda m, x: m.layer(x).reshape((1, 10000)), (1, 3, 52, 52), None),
        (nn.Flatten(), lambda m, x: nn.functional.one_hot(x, 7), (1, 3, 32, 32), torch.long),
    ],
    ids=range(7),
)
def test_inputs_are_inferred_from_functions(
    layer: nn.Module, function: Any, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    model = Fed(layer, function)
    before, drawn = state(model), torch.get_rng_state()
    found = lens.debug.infer_input_shape(model)
    assert (found.shape, found.dtype) == (shape, dtype or torch.float32)
    assert found.attempts[0] != (shape, "ok")
    assert (found.shape, "ok") in found.attempts
    assert state(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training
    assert model.runs == 0


def test_models_without_an_inferred_input_say_why() -> None:
    infer = lens.debug.infer_input_shape
    two = infer(nn.Bilinear(2, 3, 4))
    assert (two.found, two.reason) == (False, "non_shape_blocker")
    assert "input2" in two.message
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 10 * 20, 2))
    wide = infer(model)
    assert (wide.found, wide.reason) == (False, "exact_size_unreachable")
    assert {shape for shape, _ in wide.attempts} >= {(1, 3, 16, 16), (1, 3, 17, 17)}
    never = infer(Fed(nn.Conv2d(3, 4, 3), lambda m, x: m.layer(x).missing))
    assert (never.found, never.reason) == (False, "no_size_found")
    assert "missing" in never.message
    any_input = infer(nn.ReLU(), channels=1, input_dtype=torch.float64)
    assert (any_input.shape, any_input.dtype) == ((1, 1, 32, 32), torch.float64)
    once = infer(Fed(nn.Conv2d(3, 4, 3), lambda m, x: m.layer(x) if m.runs == 1 else None))
    assert once.shape == (1, 3, 32, 32)
    recurrent = Fed(nn.GRU(2, 2), lambda m, x: m.layer(x)[2])
    assert not infer(recurrent).found
    assert not recurrent.layer._forward_pre_hooks
    with pytest.raises(tl.errors.InputError, match=r"has to be a torch\.nn\.Module, not function"):
        infer(with_mask)
