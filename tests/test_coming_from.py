"""What docs/coming_from says is the same here is carried out, line by line.

The pages have tables with calls of another library on the left, and a last column that is headed
"here". All code in that column runs, from the top of a page to its end, in one namespace, which
begins with what `SETUPS` makes for the page. What it has to give besides not failing is in
`EXPECTED`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.documents import ROOT

pytestmark = pytest.mark.all

FOLDER = ROOT / "docs" / "coming_from"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")
_CELLS = re.compile(r"(?<!\\)\|")
_SPANS = re.compile(r"`([^`]+)`")


# Reading the tables


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in _CELLS.split(line)[1:-1]]


def here(page: Path) -> list[str]:
    """The cells below "here", in the order of the page."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found, inside = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
        elif not inside:
            inside = True
            is_ours = cells(line)[-1] == "here"
        elif is_ours and not set(line) <= set("|- "):
            found.append(cells(line)[-1])
    return found


def snippets(cell: str) -> list[str]:
    """The code in a cell; lines with a break between them are one piece."""
    pieces: list[str] = []
    end = None
    for span in _SPANS.finditer(cell):
        code = span[1].replace("\\|", "|")
        if end is not None and cell[end : span.start()] == "<br>":
            pieces[-1] += f"\n{code}"
        else:
            pieces.append(code)
        end = span.end()
    return pieces


def run(code: str, names: dict[str, Any]) -> Any:
    """Run code, and return the value if it is an expression."""
    try:
        expression = compile(code, "a cell", "eval")
    except SyntaxError:
        exec(compile(code, "a cell", "exec"), names)
        return None
    return eval(expression, names)


# What the pages' names stand for


class Decoder(nn.Module):
    """The model of torchbend's first notebook, with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Conv1d(4, 8, 3))
        self.norm, self.out = nn.BatchNorm1d(8), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.convs(x)))

    def encode(self, x: Tensor) -> Tensor:
        return self.convs(x)


def torchbend() -> dict[str, Any]:
    return {
        "module": Decoder().eval(), "other": Decoder().eval(), "x": torch.randn(4, 1, 32),
        "nn": nn, "coder": Coder(), "torch": torch,
    }  # fmt: skip


class Coder:
    """No module, and nothing that can be called."""

    def __init__(self) -> None:
        self.inner = Decoder().eval()

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def torchlens() -> dict[str, Any]:
    x, other = torch.randn(2, 2, 3, 8, 8)
    return {
        "torch": torch, "Path": Path, "model": Images().eval(), "x": x, "other": other,
        "loader": [x, other], "recurrent": Recurrent(), "sequence": torch.randn(2, 5),
        "saved": lambda log: [entry.label for entry in log if entry.has_contents],
    }  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.fc(x) + 1
        return x


class Pair(nn.Module):
    """The model of graphpatch's page on its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.linear(x), self.linear(x + 1))


def graphpatch() -> dict[str, Any]:
    return {
        "torch": torch, "model": Pair(), "x": torch.ones(3, 2), "delta": torch.ones(3),
        "llm": gpt2(), "tokens": torch.randint(3, 99, (1, 4)),
    }  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.features(x)).mean((2, 3)))


class Show(bt.compat.torchwatcher.ForwardInterjection):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def process(self, name: str, module: nn.Module | None, inputs: Any) -> None:
        self.names.append(name)


def torchwatcher() -> dict[str, Any]:
    loader = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 1])) for _ in range(3)]
    return {
        "torch": torch, "nn": nn, "partial": functools.partial, "model": Net(), "x": loader[0][0],
        "loader": loader, "show": Show(), "Block": nn.Sequential,
    }  # fmt: skip


def tacklebox() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    called: list[str] = []
    return {
        "torch": torch, "model": model, "first": model[0], "last": model[2],
        "x": torch.ones(2, 3), "called": called,
        "after": lambda module, inputs, outputs: called.append(f"after {module.name}"),
        "before": lambda module, inputs: called.append(f"before {module.name}"),
        "back": lambda module, grad_in, grad_out: called.append(f"back {module.name}"),
    }  # fmt: skip


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the test extra")
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def language_model() -> dict[str, Any]:
    clean, corrupt = torch.randint(3, 99, (2, 1, 6))
    return {
        "torch": torch, "model": gpt2(), "tokens": clean, "clean": clean, "corrupt": corrupt,
        "metric": lambda out: out.logits[0, -1, 5] - out.logits[0, -1, 7],
        "net": nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 2)), "x": torch.randn(2, 5),
    }  # fmt: skip


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "graphpatch": graphpatch, "nnsight": language_model, "tacklebox": tacklebox,
    "torchbend": torchbend, "torchlens": torchlens, "torchwatcher": torchwatcher,
    "transformer_lens": language_model,
}  # fmt: skip

# The first line that begins so has to have led to this; `_` is what it gave.
EXPECTED: dict[str, dict[str, str]] = {
    "graphpatch": {
        "lm = PatchableGraph(": "'lm_head' in list(lm.graph)",
        "pg.graph.linear.input._shape": "_ == (3, 2)",
        "probe.activation": "_.equal(model.linear(x))",
        "record.activations": "len(_) == 2",
        "from dataclasses import dataclass": "clamped.max() <= 0",
        "with lm.patch(": "7 not in said[0, 4:].tolist() and said.shape[1] > 4",
        "pg.save(": "pg(x)[0].equal(model.linear(x))",
        "with torch.no_grad(): run = pg.step(x)": "stepped[0].equal(model.linear(x))",
        "trace = bt.trace(": "len(record.nodes) > 2",
    },
    "nnsight": {
        "hidden = bended.get_activations(": "hidden.shape == (1, 6, 32)",
        "output, cache = ": "logits.equal(output.logits)",
        'with bended.interject("transformer.h.0", torch.zeros_like)': (
            "not logits.equal(output.logits)"
        ),
        "with bt.rewriting.replace(": "bended(tokens).logits.equal(output.logits)",
        "run = bt.trace(": "g.shape == (2, 10)",
        "loop = ": "[bool(value.any()) for value in looped] == [True, True, False, False]",
        'bt.workflows.scan(model, tokens)["transformer.h.0"].shape': "_ == (1, 6, 32)",
        "short = ": "len(short) < len(log)",
        "ids = bended.generate(": "ids.shape == (1, 9)",
        "patch = ": "both.shape[0] == 2 and not both[1].equal(bended(corrupt).logits[0])",
        'run = bt.trace(net, x, save="none")': "any(node.is_edited for node in record)",
        "with torch.no_grad(): run = ": "changed.equal(net[1].bias.expand(2, 2))",
    },
    "tacklebox": {
        'hookmngr.register_forward_hook(after, hook_fn_name="after")': (
            "list(hookmngr.name_to_hookfn)[0] == 'after'"
        ),
        "hookmngr.activate_all_hook(": "hookmngr.name_to_hookhandle['after[first]'].active",
        "hookmngr.deactivate_all_hooks(category": (
            "not hookmngr.name_to_hookhandle['after[first]'].active"
        ),
        "with hookmngr.hook_all_context(": (
            "called == ['before first', 'after first', 'after last']"
        ),
        "handle.active": "_ is False",
        "list(hookmngr.get_module_hooks(": "len(_) == 3",
        "hookmngr.remove_hook_by_name(": "'after[last]' not in hookmngr.name_to_hookhandle",
        "hookmngr.remove_module_by_name(": "'first' not in hookmngr.name_to_module",
        "hookmngr.remove_all_hooks()": "not first._forward_hooks and not first._forward_pre_hooks",
        "with torch.no_grad(): run = ": "run.variables['input'].shape == (2, 3)",
    },
    "torchbend": {
        "encoder = ": "encoder(x).equal(module.encode(x))",
        'trace["out"].shape': "tuple(_) == out.shape",
        "bended.bend(cb, r": (
            "set(bended.bended_keys()) == {'out', 'convs.0.weight', 'convs.1.weight'}"
        ),
        "bended.bending.bended_state_dict()": "(_['convs.0.weight'] == 0).any()",
        'with bended.bend(cb, "out")': "not bended.bended_keys()",
        'with bended.bend(abs, "out")': "bended(x).equal(module(x))",
        'bended.update("macro1", 0.0)': "not bended(x).any()",
        "c1.value = 0.5": "bended(x).equal(module(x))",
        "bended.bending.controllables": "list(_) == ['macro1']",
        "bended.bending.set_version()": "bended.bending.version == 'original'",
        'keep.captures["out"]': "len(_) > 0",
        'bended.get_activations("out", x=x, bended=False)': "_['out'].equal(module(x))",
        "bended.reset()\nvalue = ": (
            "bended.from_activations('convs_1', convs_1=value).equal(module(x))"
        ),
        "config.save(": "str(bt.bends.BendingConfig.load('test.json')) == str(config)",
        "bended.bend(Square()": "set(bended.bended_keys()) == {'out', 'convs.0.weight'}",
        "wrapped = ": "wrapped.module is coder",
        'bended.is_traced("encode")': "_",
        'bended.bended_keys(fn="encode")': "_ == ['convs_1'] and not bended.bended_keys()",
        "bended.encode(x)": "not _.any() and bended(x).equal(module(x))",
        "wrapped.encode(x)": "not _.any()",
        'bended.bendable_keys("convs"': "_[-2:] == ['convs_0', 'convs_1'] and len(_) == 6",
        "bended.weight_shape(": "_ == (4, 1, 3)",
        "bended.bend(tb.Bias(1.0)": "outs['convs_1_bended'].equal(outs['convs_1'] + 1)",
        "bended.getter(x=x)": "_['out'].equal(bended(x))",
        "bended.bend(tb.InterpolateActivation()": "len(mixture) == 2",
        "keep = tb.Capture()": "keep.captures['forward:out'].equal(bended(x))",
        'bended.save_config_as("one")': "bended.config == '_default'",
        "config = tb.BendingConfig(": "len(config.op_from_key('convs.0.weight')) == 1",
        "bended.bend(config)\nbended.write": "bended.version == 'masked'",
        "with bended.interpolate(1., imported": (
            "not mixed.equal(module.encode(x)) and bended(x).equal(module(x))"
        ),
        "tb.BendingParameter(": "_ == 1",
        "with torch.no_grad(): run = ": "quiet.eq(0.5).all()",
        "bt.workflows.find_nan(": "_ is None",
    },
    "torchlens": {
        "bt.log_forward_pass(model, x, vis_opt": "Path('run.svg').read_text()[:4] == '<svg'",
        "model_history['conv2d_2:1']": "_ is model_history['features.2'] is model_history[3]",
        "model_history[-7]": "_ is model_history[3]",
        "model_history['features.2'].tensor_contents": "_.equal(model.features[:3](x))",
        "bt.log_forward_pass(model, x, layers_to_save": "saved(_) == ['relu_1_2', 'conv2d_2_3']",
        "[entry.label for entry in log.layers]": "_[1] == 'conv2d_1_1' and len(_) == len(log)",
        'log["conv2d_1_1"].tensor_contents': "_.equal(model.features[0](x))",
        'log["features.2"].shape': "_ == (2, 4, 4, 4)",
        "log[3].function": "_ == 'conv2d'",
        'log["conv2d_2_3"].source': "_ is not None",
        'bt.trace(model, x, save="relu_*")': "saved(_) == ['relu_1_2', 'relu_2_4', 'relu_3_7']",
        "bt.trace(model, x, save=lambda entry": "saved(_)[:2] == ['linear_1_6', 'relu_3_7']",
        'bt.trace(model, x, save="features.2"': "_[-1].label == 'conv2d_2_3'",
        'bt.trace(model, x, save="relu_1_2"': "_.equal(model.features[:2](x))",
        'log["relu_1_2"].grad_contents': "_.shape == (2, 4, 6, 6)",
        "bended = ": "ablated.output[0].equal(model.classifier[2].bias)",
        "bt.diff(": "bool(_)",
        "log.validate()": "'bitwise equal' in str(_)",
        "log.save(": "str(loaded) == str(log)",
        "with torch.no_grad(): run = bended.step(x)": "not changed.equal(model(x))",
        "second = ": "sum(node.is_edited for node in halved) == 1",
        'log.table("parameters")': "len(_.to_list()) == 8",
        'log.write_as("chrome"': "'traceEvents' in Path('run.json').read_text()",
    },
    "torchwatcher": {
        "watched = interject_by_match(": "show.names == ['features.1', 'relu']",
        "interject_by_match(model, node_selector.matches": "_(x).shape == (4, 3)",
        "bended = ": "handle.report().fired == 1",
        "dead.to_dict()": "set(_) == {'features.1', 'relu'}",
        "handle.report().paths": "_ == ('features.sub_2',)",
        "node_selector.find(": "len(_) == 2",
        "other = ": "isinstance(other.features[1], nn.GELU)",
        "node_selector.nth(": (
            "[node.path for node in node_selector.find(_, traced)] == ['features.sub_2']"
        ),
        "node_selector.has_following(": (
            "'features.sub_0' in [node.path for node in node_selector.find(_, traced)]"
        ),
        "probe = ": "list(probe.probes) == ['features']",
        "bt.workflows.gradient_flow(": "len(_) == 6",
        "with torch.no_grad(): stepped = ": "'x' in stepped.variables",
    },
    "transformer_lens": {
        "_, cache = ": "len(cache) > 100",
        "bt.workflows.run_with_cache(bended, tokens, lambda": (
            "list(_[1]) == ['blocks.0.hook_resid_post', 'blocks.1.hook_resid_post']"
        ),
        'cache["transformer.h.0.output"]': "_.equal(cache['blocks.0.hook_resid_post'])",
        'cache["blocks.0.attn.hook_pattern"]': "_.shape == (1, 4, 6, 6)",
        'with bended.interject("transformer.h_0.attn.softmax"': (
            "bended(tokens).logits.equal(logits)"
        ),
        "log = ": "log['transformer.h.0'].grad_contents.shape == (1, 6, 32)",
        "resid = ": "resid.effect.shape == (2, 6)",
        "said = ": "said.equal(model.generate(tokens, max_new_tokens=3, pad_token_id=0))",
        "found = ": "found.shape[:2] == tokens.shape",
        "trace = bt.trace(": "any(node.is_edited for node in record)",
    },
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_stands_below_here_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"bt": bt, **SETUPS[page.stem]()}
    expected = dict(EXPECTED.get(page.stem, {}))
    count = 0
    for cell in here(page):
        assert snippets(cell) or cell.startswith("-"), f"no code in {cell!r}"
        for code in snippets(cell):
            try:
                given = run(code, names)
            except Exception as error:
                error.add_note(f"in {page.name}: {code}")
                raise
            if key := next(filter(code.startswith, expected), None):
                assert eval(expected.pop(key), {**names, "_": given}), f"{code} gave {given!r}"
            count += 1
    assert count > 15
    assert not expected, "these lines are not on the page"


def test_every_page_is_tried() -> None:
    assert [page.stem for page in PAGES] == sorted(SETUPS)
    index = (FOLDER / "index.md").read_text("utf-8")
    for page in PAGES:
        assert f"]({page.name})" in index
