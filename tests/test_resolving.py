"""Every entry point that takes a place takes every way of naming one, and means the same node."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, LayerKeyError, NodePathError

SELECT = bt.node_selector


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(4, -1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.c_proj(scores @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.attn, self.mlp = nn.LayerNorm(4), Attention(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln(x))
        return x + torch.relu(self.mlp(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return x


class Language(nn.Module):
    """A language model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.head = Body(), nn.Linear(4, 7, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.transformer(ids))


class Loop(nn.Module):
    """A loop that goes round three times."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > 0.6:
            x = self.step(x) * 0 + x / 2
        return x * 3


@pytest.fixture(scope="module")
def language() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Language().eval(), torch.tensor([[1, 2, 3]])


@pytest.fixture(scope="module")
def loop() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Loop().eval(), torch.ones(1, 4)


class Seen(bt.Interjection):
    """Keeps where it was called."""

    observes = True

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def after(self, at: Any, inputs: Any, output: Any) -> None:
        self.found.append((at.path, at.number))


def called(model: nn.Module, given: Tensor) -> bt.BendedModule:
    bended = bt.BendedModule(model)
    bended(given)
    return bended


# Each returns the paths of the nodes that were meant, with the number of the pass.


def by_trace(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    return [entry.label for entry in bt.trace(model, given)._lookup.all(where)]


def by_interject(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    bended, seen = called(model, given), Seen()
    bended.interject(where, seen)
    bended(given)
    return [f"{path}:{number + 1}" for path, number in seen.found]


def by_get_activations(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    return list(called(model, given).get_activations(where, args=(given,)))


def by_save(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    trace = bt.trace(model, given, save=where)
    return [e.label for e in trace.entries if e.has_contents and e.kind != "output"]


def by_stop_after(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    trace = bt.trace(model, given, stop_after=where)
    return [trace.layers[-1].label]


def by_bend(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    bended = called(model, given)
    handle = bended.bend(bt.bends.Scale(1.0), where)
    bended(given)
    return list(handle.report().paths)


def by_patch(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    bended = called(model, given)
    with bended.patch({where: bt.patches.AddPatch(0.0)}) as context:
        bended(given)
        return [path for made in context.insertions for path in made.report().paths]


def by_harvest(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        if getattr(where, "looks_ahead", False):
            with torch.no_grad():
                model = called(model, given)
        names = list(bt.harvest(model, [given], where=where, out=out, progress=False))
    return [f"{name}:1" if f"{name}:2" in names else name for name in names]


def by_from_activations(model: nn.Module, given: Tensor, where: Any) -> list[str]:
    called(model, given).from_activations({where: torch.ones(1)}, given)
    return []


ENTRIES: dict[str, Callable[[nn.Module, Tensor, Any], list[str]]] = {
    name.removeprefix("by_"): function
    for name, function in list(globals().items())
    if name.startswith("by_") and name != "by_from_activations"
}


def meant(model: nn.Module, given: Tensor, names: list[str]) -> set[str]:
    """Return the labels of the values that what an entry point returned stands for."""
    trace = bt.trace(model, given)
    return {entry.label for name in names for entry in trace._lookup.all(name)}


def ways_to_the_softmax(model: nn.Module, given: Tensor) -> dict[str, Any]:
    """Return all ways of naming the softmax of the second block."""
    trace = bt.trace(model, given)
    path = "transformer.h_1.attn.softmax"
    return {
        "node path": path,
        "spelled path": "transformer.h[1].attn.softmax",
        "label": "softmax_2",
        "label with position": trace["softmax_2"].name,
        "label with pass": "softmax_2:1",
        "tree node": trace.tree.transformer.h_1.attn.softmax,
        "its path": trace.tree.transformer.h_1.attn.softmax._path,
        "log entry": trace["softmax_2"],
        "mirror node": bt.graph.NodeRef("softmax_1"),
        "regular expression": re.compile(r"h_1\.attn\.softmax$"),
        "qualified regular expression": re.compile(r"h\.1\.attn\.softmax$"),
        "selector": SELECT.matches_function("softmax") & SELECT.matches_path(re.compile("h_1")),
        "selector that looks ahead": SELECT.matches_function("softmax").last(),
        "predicate": lambda node: getattr(node, "path", None) == path,
    }


def ways_to_the_attention(model: nn.Module, given: Tensor) -> dict[str, Any]:
    """Return all ways of naming the attention of the second block, a module."""
    trace = bt.trace(model, given)
    return {
        "node path": "transformer.h_1.attn",
        "qualified name": "transformer.h.1.attn",
        "with underscores": "transformer_h_1_attn",
        "tree node": trace.tree.transformer.h_1.attn,
        "module": model.get_submodule("transformer.h.1.attn"),
        "module entry": next(m for m in trace.modules if m.name == "transformer.h.1.attn"),
        "regular expression": re.compile(r"h\.1\.attn$"),
        "selector": SELECT.matches_qualified_name("transformer.h.1.attn"),
    }


# What an entry point cannot take, for a reason that its error says.
LIVE = (
    "node path", "spelled path", "with underscores", "tree node", "its path", "mirror node",
    "regular expression", "qualified regular expression", "selector", "selector that looks ahead",
)  # fmt: skip
REFUSED: dict[str, tuple[str, ...]] = {
    # The run is over before anything else is known of it than modules and layers.
    "stop_after": LIVE,
    # Names of layers and modules, as the run goes on; node paths are known at its end.
    "save": ("regular expression", "qualified regular expression", "spelled path"),
    # No run with a mirror is there before the harvest begins.
    "harvest": ("mirror node",),
}
# The functions of save= and stop_after= are asked about entries, and the strings and regular
# expressions of bend= are patterns that are matched from the beginning of a name.
OTHERWISE = {
    ("save", "predicate"), ("stop_after", "predicate"), ("bend", "regular expression"),
    ("bend", "qualified regular expression"), ("bend", "qualified name"), ("bend", "node path"),
    ("bend", "with underscores"), ("bend", "spelled path"), ("bend", "its path"),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_finds_an_op_by_every_name(
    entry: str, language: tuple[nn.Module, Tensor]
) -> None:
    model, given = language
    for way, where in ways_to_the_softmax(model, given).items():
        if (entry, way) in OTHERWISE:
            continue
        if way in REFUSED.get(entry, ()):
            with pytest.raises((LayerKeyError, NodePathError, InputError)):
                ENTRIES[entry](model, given, where)
            continue
        found = meant(model, given, ENTRIES[entry](model, given, where))
        assert found == {"softmax_2_23"}, way


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_finds_a_module_by_every_name(
    entry: str, language: tuple[nn.Module, Tensor]
) -> None:
    model, given = language
    output = meant(model, given, ["transformer.h_1.attn"])
    assert len(output) == 1
    for way, where in ways_to_the_attention(model, given).items():
        if (entry, way) in OTHERWISE:
            continue
        if way in REFUSED.get(entry, ()):
            with pytest.raises((LayerKeyError, NodePathError, InputError)):
                ENTRIES[entry](model, given, where)
            continue
        assert meant(model, given, ENTRIES[entry](model, given, where)) == output, way


@pytest.mark.parametrize("entry", ["trace", "interject", "get_activations", "save", "harvest"])
def test_every_entry_point_finds_one_pass_of_a_loop(
    entry: str, loop: tuple[nn.Module, Tensor]
) -> None:
    model, given = loop
    trace = bt.trace(model, given)
    assert len(trace.tree.div._passes) == 3
    second = {trace["div_1:2"].label}
    for where in ("div:2", "div_1:2", trace["div_1:2"], trace.tree["div:2"]):
        assert meant(model, given, ENTRIES[entry](model, given, where)) == second, where
    every = {trace[f"div_1:{number}"].label for number in (1, 2, 3)}
    for where in ("div", "div_1", trace.tree.div, SELECT.matches_function("div")):
        if entry == "harvest" or where is not None:
            assert meant(model, given, ENTRIES[entry](model, given, where)) == every, where
    outputs = meant(model, given, ["step"])
    assert len(outputs) == 3
    for where in ("step", model.get_submodule("step"), nn.Linear):
        assert meant(model, given, ENTRIES[entry](model, given, where)) == outputs, where


@pytest.mark.parametrize("of", [ways_to_the_softmax, ways_to_the_attention])
def test_activations_are_given_by_every_name(
    of: Callable[[nn.Module, Tensor], dict[str, Any]], language: tuple[nn.Module, Tensor]
) -> None:
    model, given = language
    bended = called(model, given)
    ways = of(model, given)
    value = bended.get_activations(ways["tree node"], args=(given,))
    ((path, held),) = value.items()
    wanted = bended.from_activations({path: held * 2}, given)
    assert not torch.equal(wanted, bended(given))
    for way, where in ways.items():
        assert torch.equal(bended.from_activations({where: held * 2}, given), wanted), way


@pytest.mark.parametrize("entry", [*ENTRIES, "from_activations"])
def test_what_is_not_there_is_refused_with_near_misses_of_the_same_kind(
    entry: str, language: tuple[nn.Module, Tensor]
) -> None:
    model, given = language
    for name, near in (
        ("transformer.h_1.attn.sofmax", "softmax"), ("softmax_9", "softmax_"), ("h.1", "h"),
    ):  # fmt: skip
        with pytest.raises((LayerKeyError, NodePathError, InputError)) as caught:
            (by_from_activations if entry == "from_activations" else ENTRIES[entry])(
                model, given, name
            )
        assert repr(name) in str(caught.value), str(caught.value)
        assert near in str(caught.value).replace(repr(name), ""), str(caught.value)


@pytest.mark.parametrize("entry", [*ENTRIES, "from_activations"])
def test_an_ambiguous_name_is_refused_with_what_it_can_be(entry: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu_2 = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu_2(x.relu()).relu()

    model, given = Named(), torch.ones(1, 4)
    if entry in ("bend", "stop_after", "harvest"):
        # A pattern; whichever comes first; and before the first run the module alone is known.
        return
    ask = by_from_activations if entry == "from_activations" else ENTRIES[entry]
    with pytest.raises((LayerKeyError, NodePathError, InputError), match="ambiguous: it") as caught:
        ask(model, given, "relu_2")
    assert "the module relu_2" in str(caught.value)
    assert "the layer relu_2" in str(caught.value)
