"""Everything that is told of a run, on models that it was not built for: it has to be true."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from xml.dom import minidom

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import bendtrace as bt
from tests.promise import bits, state


class Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skips over a bottleneck, and a size that may have to be mended."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(2, 3), Block(3, 4), Block(4, 5)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(5, 4, 2, 2), nn.ConvTranspose2d(4, 3, 2, 2)])
        self.back = nn.ModuleList([Block(8, 4), Block(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, block in zip(self.up, self.back, strict=True):
            x, skip = up(x), skips.pop()
            if x.shape != skip.shape:
                x = functional.interpolate(x, skip.shape[-2:])
            x = block(torch.cat([x, skip], 1))
        return x


class Quantizer(nn.Module):
    """A codebook, with a gradient that goes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
        self.codebook = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        z = self.encode(x)
        index = torch.cdist(z, self.codebook.weight).argmin(-1)
        code = self.codebook(index)
        return self.decode(z + (code - z).detach()), index, len(index.unique())


class Solver(nn.Module):
    """Euler with steps that are as long as the error lets them be."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, y: Tensor, tolerance: float = 0.02) -> tuple[Tensor, int]:
        t, h, steps = 0.0, 0.5, 0
        while t < 1:
            slope = self.slope(y)
            half = y + h / 2 * slope
            half = half + h / 2 * self.slope(half)
            if (y + h * slope - half).abs().max() > tolerance:
                h /= 2
                continue
            y, t, steps = half, t + h, steps + 1
        return y, steps


class Experts(nn.Module):
    """Routing in Python: an expert that nobody chose does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, weights[rows, slot, None] * expert(x[rows]))
        return out


class Pointer(nn.Module):
    """An LSTM that points at its inputs, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell = nn.LSTM(2, 5, batch_first=True), nn.LSTMCell(2, 5)
        self.key, self.score = nn.Linear(5, 5, bias=False), nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        seen, (h, c) = self.encode(x)
        h, c, point, tour = h[0], c[0], x[:, 0], []
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        for _ in range(x.shape[1]):
            h, c = self.cell(point, (h, c))
            scores = self.score(torch.tanh(self.key(seen) + h[:, None])).squeeze(-1)
            chosen = scores.masked_fill(mask, -math.inf).argmax(-1)
            mask = mask.scatter(1, chosen[:, None], True)
            point = x[torch.arange(len(x)), chosen]
            tour.append(chosen)
        return torch.stack(tour, 1)


class Tree(nn.Module):
    """Recursion over nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.merge = nn.Embedding(9, 4), nn.Linear(8, 4)

    def forward(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.leaf(torch.tensor(tree))
        return self.merge(torch.cat([self(branch) for branch in tree])).tanh()


class Beam(nn.Module):
    """Search over Python lists of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.cell, self.out = nn.Embedding(7, 4), nn.GRUCell(4, 4), nn.Linear(4, 7)

    def forward(self, h: Tensor) -> tuple[list[int], float]:
        beams = [([1], 0.0, h)]
        for _ in range(3):
            found = []
            for words, score, h in beams:
                h = self.cell(self.word(torch.tensor(words[-1:])), h)
                best = self.out(h).log_softmax(-1).topk(2)
                for p, word in zip(best.values[0].tolist(), best.indices[0].tolist(), strict=True):
                    found.append(([*words, word], score + p, h))
            beams = sorted(found, key=lambda beam: -beam[1])[:2]
        return beams[0][0], beams[0][1]


class Memory(nn.Module):
    """Reading and writing in place, by weights."""

    def __init__(self) -> None:
        super().__init__()
        self.control, self.key = nn.LSTMCell(3 + 4, 5), nn.Linear(5, 4)
        self.register_buffer("cells", torch.full((6, 4), 0.1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cells, weights = self.cells.clone(), torch.zeros(6)
        weights[0] = 1
        carry, reads = None, []
        for step in x:
            now = cells.clone()
            read = weights @ now
            carry = self.control(torch.cat([step, read])[None], carry)
            key = self.key(carry[0])
            weights = functional.cosine_similarity(now, key, -1).softmax(0)
            cells += weights[:, None] * key
            reads.append(read)
        return torch.stack(reads), cells


class Attention(nn.Module):
    """A graph attention by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(4, 4), nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.value(x)
        source, target = edges
        e = (torch.cat([h[source], h[target]], -1) @ self.score).exp()
        total = torch.zeros(len(x)).scatter_add(0, target, e)
        part = (e / total[target])[:, None] * h[source]
        return torch.zeros_like(h).scatter_add_(0, target[:, None].expand(-1, 4), part)


class Diffusion(nn.Module):
    """Noise in all steps but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(3, 3), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = x - 0.1 * self.drop(self.net(x))
            if i < 3:
                x = x + torch.randn_like(x)
        return x


class Oddly(nn.Module):
    """Modules of names that mean something else, or cannot be typed."""

    NAMES = ("output", "0", "größe", "日本", "shape", "class", "input", "linear_1", 'a b<&">')

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self._modules[name] = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.NAMES:
            x = self._modules[name](x)
        return x


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
MODELS: dict[type[nn.Module], tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    UNet: ((randn(1, 2, 8, 8),), (randn(1, 2, 10, 10),)),
    Quantizer: ((randn(7, 6),), (randn(6, 6, seed=1),)),
    Solver: ((randn(2, 3) * 3,), (randn(2, 3) * 20,)),
    Experts: ((randn(5, 6),), (randn(1, 6, seed=3),)),
    Pointer: ((randn(2, 4, 2),), (randn(2, 3, 2),)),
    Tree: ((((1, 2), (3, (4, 5))),), (((1, 2), 3),)),
    Beam: ((randn(1, 4),), (randn(1, 4) * 30,)),
    Memory: ((randn(3, 3),), (randn(5, 3),)),
    Attention: ((randn(4, 4), EDGES), (randn(4, 4), EDGES[:, :3])),
    Diffusion: ((randn(2, 3),), (randn(2, 3, seed=1),)),
    Oddly: ((randn(2, 3),), (randn(4, 3),)),
}
of_each_model = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)


def ready(kind: type[nn.Module], which: int = 0) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model and its arguments, the same ones each time, and seed its run."""
    torch.default_generator.manual_seed(3)
    model = kind()
    args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in MODELS[kind][which])
    torch.default_generator.manual_seed(7)
    return model, args


def logged(kind: type[nn.Module], which: int = 0, **options: Any) -> bt.Trace:
    model, args = ready(kind, which)
    return bt.trace(model, *args, save="all", **options)


@of_each_model
def test_a_logged_run_and_its_gradients_are_those_of_eager_bit_for_bit(kind: Any) -> None:
    def run(call: Callable[..., Any]) -> Any:
        model, args = ready(kind)
        output = call(model, *args)
        after = torch.get_rng_state().tolist()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.square().sum().backward()
        return bits([output, args]), state(model), after

    def log(model: nn.Module, *args: Any) -> Any:
        return bt.trace(model, *args, save="all", save_gradients=True).output

    assert run(log) == run(lambda model, *args: model(*args))


@of_each_model
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_every_op_gives_again_what_the_log_says(
    kind: Any, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    with mode():
        log = logged(kind)
    found = log.validate()
    assert found, str(found)
    assert not found.skipped, str(found)
    # What asks only for the length or the shape of a value, or what a mask hides.
    assert len(found.idle) <= 0.15 * found.edges, str(found)


@of_each_model
def test_the_edges_of_a_log_are_those_of_its_ops_and_lead_to_the_output(kind: Any) -> None:
    log = logged(kind)
    edges = {(parent, entry.label) for entry in log.entries for parent in entry.parents}
    assert edges == {(entry.label, child) for entry in log.entries for child in entry.children}
    order = {entry.label: place for place, entry in enumerate(log.entries)}
    assert all(order[parent] < order[child] for parent, child in edges)
    outputs = [entry for entry in log.layers if entry.kind == "output"]
    above = nx.DiGraph(edges)
    for entry in log.layers:
        if entry.kind == "input" and outputs:
            assert any(nx.has_path(above, entry.label, output.label) for output in outputs)


@of_each_model
def test_every_entry_prints_and_is_found_by_all_its_names(kind: Any) -> None:
    log = logged(kind)
    for entry in log.entries:
        text = str(entry)
        assert text.startswith(("Layer ", "Number ", "State "))
        assert log[entry.label] is entry
        if "." in entry.node_path:
            found = log[entry.node_path]
            assert entry in ([found] if isinstance(found, bt.LayerEntry) else list(found))
    for key in log._ipython_key_completions_():
        assert key in log
        assert log[key] is not None


@of_each_model
def test_a_run_and_the_same_run_again_do_not_differ_and_another_does(kind: Any) -> None:
    log = logged(kind)
    assert not bt.diff(log, logged(kind)), str(bt.diff(log, logged(kind)))
    there, back = bt.diff(log, logged(kind, 1)), bt.diff(logged(kind, 1), log)
    assert there
    assert there.first is not None
    assert back
    assert len(there.text().splitlines()) > 3
    minidom.parseString(there.draw().svg)


@of_each_model
def test_what_was_saved_tells_and_shows_the_same_when_it_is_loaded(
    kind: Any, tmp_path: Path
) -> None:
    log = logged(kind)
    log.save(tmp_path / "run")
    loaded = bt.load(tmp_path / "run")
    assert [str(entry) for entry in loaded.entries] == [str(entry) for entry in log.entries]
    for tell in (
        str, bt.ModelHistory.rolled, bt.ModelHistory.to_html,
        lambda log: log.flow_table, lambda log: log.tree._show(flow=True),
        lambda log: log.tree._code, lambda log: log.draw().svg,
        lambda log: log.draw(rolled=True).svg, lambda log: log._ipython_key_completions_(),
    ):  # fmt: skip
        assert tell(loaded) == tell(log)
    assert not bt.diff(log, loaded)


@of_each_model
def test_pictures_are_well_formed_and_uncollapsed_ones_name_every_layer(kind: Any) -> None:
    log = logged(kind)
    for options in ({}, {"rolled": True}, {"max_nodes": 4}, {"overlay": "time"}):
        minidom.parseString(log.draw(**options).svg)
    drawn = minidom.parseString(log.draw(collapse=False, max_nodes=10**6, numbers="all").svg)
    words = {
        word.strip(",")
        for text in drawn.getElementsByTagName("text")
        for child in text.childNodes
        for word in str(child.nodeValue).split()
    }
    # Of several results of an op, the first and the last are named.
    assert {entry.label for entry in log.layers if entry.element in ((), (0,))} <= words


@pytest.mark.parametrize("kind", [UNet, Attention, Quantizer, Tree, Memory, Experts, Oddly])
def test_the_code_of_a_tree_is_python_that_gives_the_output(kind: Any) -> None:
    log = logged(kind)
    model, args = ready(kind)
    code = log.tree._code
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, "<the code of a tree>", "exec"), names)
    forward = names[next(name for name in names if name not in ("torch", "__builtins__"))]
    again = forward(model, *args)
    assert bits([again, state(model)]) == bits([log.output, state(log.function)])


@pytest.mark.parametrize("kind", [UNet, Attention, Solver, Experts, Memory, Diffusion, Oddly])
def test_operations_are_counted_as_torch_counts_them(kind: Any) -> None:
    log = logged(kind)
    model, args = ready(kind)
    with FlopCounterMode(display=False) as counter:
        model(*args)
    assert sum(entry.flops or 0 for entry in log.entries) == counter.get_total_flops() > 0


# What conditions came to


def decided(condition: str, *args: Any) -> bt.Trace:
    """Trace a function with that condition, which adds one if it holds."""
    source = f"def decide(x, k):\n    if {condition}:\n        x = x + 1\n    return x * 2\n"
    name = f"<condition {condition}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names: dict[str, Any] = {}
    exec(compile(source, name, "exec"), names)
    return bt.trace(names["decide"], *args, save="all")


CONDITIONS = [
    "x.shape != k.shape", "x.shape == k.shape", "(x.shape[0], 1) != (2, 1)",
    "[1, x.shape[1]] == [1, 9]", "x.shape[0] not in (5, 6)", "x.shape[0] in (5, 2)",
    "not x.sum() > 0", "x.sum() > 0", "3 != x.shape[0] != 4", "bool(x.shape[0] - 2)",
    "max(x.shape) > 2", "any(v > 0 for v in x.sum(0))", "len(x) in {2, 3}",
    "x.shape[0] == 2 and x.sum() < 0", "(x.sum() > 0) == (x.mean() > 5)",
    "sorted(x.shape)[0] == 2 or x.sum() > 9", "x.shape in [(2, 3), (3, 3)]",
]  # fmt: skip


@pytest.mark.parametrize("other", [(2, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_never_told_to_be_what_it_was_not(
    condition: str, other: tuple[int, ...]
) -> None:
    values = {"x": torch.ones(2, 3), "k": torch.ones(other)}
    log = decided(condition, values["x"], values["k"])
    assert log.flow_steps
    for step in log.flow_steps:
        if step.kind in ("if", "and", "or", "not") and step.text in condition:
            assert bool(eval(step.text, dict(values))) == step.value
    for entry in log.layers:
        for line in str(entry).splitlines():
            if f"if `{condition}` was " in line:
                assert f"was {bool(eval(condition, dict(values)))}" in line
    assert ("add_1" in log) == bool(eval(condition, dict(values)))


# Inputs and outputs that are not just tensors


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    x: Tensor
    rest: Any = None


def odd_cases() -> Iterator[Any]:
    x = randn(2, 3)
    for name, function, args in (
        ("nothing", lambda: None, ()),
        ("no tensors", lambda a, b: a + b, (1, 2)),
        ("the input", lambda x: x, (x,)),
        ("no input", lambda: torch.ones(2), ()),
        ("no dimension", lambda x: x * 2 + 1, (torch.tensor(3.0),)),
        ("no elements", lambda x: (x * 2, x.sum()), (torch.empty(0, 3),)),
        ("complex", lambda x: (x.abs(), torch.view_as_real(x * 1j)), (torch.randn(2).cfloat(),)),
        ("bool", lambda x: (x | ~x).all(), (torch.tensor([True, False]),)),
        ("meta", lambda x: x * 2, (torch.empty(2, 3, device="meta"),)),
        ("one tensor twice", lambda a, b: a.add_(1) + b, (x, x)),
        ("a view of the other", lambda a, b: a.add_(1) + b, (x, x[0])),
        ("one output twice", lambda x: (x.exp(), [x, (x,)], None), (x,)),
        ("nested", lambda x: [{"a.b": x * 2, 0: (x, None)}, "text", torch.float32], (x,)),
        ("records", lambda r, p: Record(r.x + p.a, Pair(p.b, None)), (Record(x), Pair(x, x))),
        ("a huge number", lambda x, n: x * (n % 7), (x, 10**30)),
        ("names of ours", lambda forward, output: forward + output, (x, x)),
        ("sizes and numbers", lambda x: (x.shape, x.sum().item(), x.tolist()), (x,)),
        ("what is sparse", lambda x: x.to_sparse() @ x.t(), (x,)),
        ("in place", lambda x: x.t_().mul_(2).unsqueeze_(0), (x,)),
    ):
        yield pytest.param(function, args, id=name)


@pytest.mark.parametrize(("function", "args"), list(odd_cases()))
def test_odd_arguments_and_results_are_told_shown_compared_and_saved(
    function: Callable[..., Any], args: tuple[Any, ...], tmp_path: Path
) -> None:
    log = bt.trace(function, *args, save="all")
    assert str(log).startswith("Log of ")
    assert all(str(entry) and entry.label in log for entry in log.entries)
    assert all(key in log for key in log._ipython_key_completions_())
    assert len(log.to_pandas()) == len(log)
    assert log.validate()
    minidom.parseString(log.draw().svg)
    assert "<html" in log.to_html()
    assert log.tree._code.startswith("def ")
    assert not bt.diff(log, log)
    log.save(tmp_path / "run")
    loaded = bt.load(tmp_path / "run")
    assert str(loaded.tree) == str(log.tree)
    assert [entry.label for entry in loaded] == [entry.label for entry in log]


def test_fields_of_named_tuples_and_dataclasses_are_nodes_in_arguments_and_results() -> None:
    x = torch.ones(2)
    given = Record(x, x + 1), Pair(x + 2, x + 3)
    log = bt.trace(lambda r, p: Record(r.x + p.a, Pair(p.b, r.rest)), *given)
    assert [list(log.tree.r), list(log.tree.p)] == [["x", "rest"], ["a", "b"]]
    assert log.tree.p.b._shape == log.tree.output.rest.a._shape == (2,)
    assert log["p.b"].label == "input_4_3"


def test_modules_of_odd_names_are_found_by_them_and_shown() -> None:
    log = logged(Oddly)
    for number, name in enumerate(Oddly.NAMES, 1):
        if name == "linear_1":  # a layer of another module is called so, too
            with pytest.raises(
                bt.errors.LayerKeyError, match=r"the module linear_1 .* and the layer linear_1_1"
            ):
                log[name]
        else:
            assert log[f"{name}:1"].label == f"linear_{number}_{number}"
    assert "a b&lt;&amp;" in log.draw().svg
    assert 'a b<&">' not in log.to_html()


def test_memory_as_it_was_found_is_no_difference() -> None:
    def pack(x: Tensor) -> Tensor:
        torch.empty_like(x).fill_(float(next(counter)))
        out = torch.empty_like(x)
        out.copy_(x)
        return out * 2

    counter = iter(range(9))
    seen = [bt.trace(pack, torch.ones(64), save="all") for _ in range(2)]
    assert seen[0].output.equal(seen[1].output)
    told = {change.a.layer_type for change in bt.diff(*seen).changed}
    assert not any("empty" in kind for kind in told)
