"""Patches in place: patched runs are those of a model that was changed by hand, bit by bit.

Each comparison makes a model twice. One is changed by hand, through `tap` or through a mode that
sees torch's functions; the other is patched, and called twice with each input, so that the
second call is a replay. Outputs, gradients, state and random numbers have to be the same.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.compat.graphpatch import PatchableGraph
from bendtrace.errors import InputError, NeverFiredWarning, NodePathError, PatchError
from bendtrace.insert.patch_kinds import (
    AddPatch,
    CustomPatch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from bendtrace.log.nodes import NodePath, TreeNode
from bendtrace.log.path_views import dug
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.promise import bits, footprint, outcome, state
from tests.shares import some

Edit = Callable[[Any], Any]


class Tapped(nn.Module):
    """A model in which some values can be changed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.edits: dict[str, Edit] = {}

    def tap(self, name: str, value: Any) -> Any:
        edit = self.edits.get(name)
        return value if edit is None else edit(value)


class Block(Tapped):
    """Static: a block with a residual, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tap("x", x)
        weight = self.tap("weight", self.up.weight)
        hidden = self.tap("up", F.linear(x, weight, self.up.bias) if self.edits else self.up(x))
        hidden = self.tap("dropout", F.dropout(hidden, 0.3, self.training))
        hidden = self.tap("relu", hidden.relu())
        down = self.down(self.tap("down.input", hidden))
        total = self.tap("add", x + down * self.tap("scale", self.scale))
        return self.tap("first", self.norm(total)), self.tap("second", hidden)


class Experts(Tapped):
    """Data-dependent: each expert is called for the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tap("x", x)
        scores = self.tap("softmax", F.softmax(self.gate(x), dim=-1))
        weights, chosen = scores.max(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows) > 0:
                done = self.tap("gelu", F.gelu(self.tap(f"expert {number}", expert(x[rows]))))
                out = out.index_add(0, rows, done * weights[rows, None])
        return self.tap("out", out + x)


class Refine(Tapped):
    """Data-dependent: a loop with an early exit."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        nn.init.eye_(self.step.weight)

    def forward(self, x: Tensor) -> Tensor:
        x, steps = self.tap("x", x), 0
        while x.norm() > 1:
            x = self.tap("mul", self.step(x).tanh() * 0.5)
            steps += 1
            if steps > 6 or x.sum() < -3:
                x = self.tap("neg", -x)
                break
        return x + steps


def inputs_of(shape: tuple[int, ...], *seeds: float, scale: float = 1.0) -> list[tuple[Any, ...]]:
    return [
        (torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) * scale,)
        for seed in seeds
    ]


def run(call: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], seed: int) -> Any:
    """Return the bits of outputs, gradients and random numbers of a forward and a backward."""
    model.zero_grad()
    given = [
        arg.clone().requires_grad_(arg.is_floating_point()) if isinstance(arg, Tensor) else arg
        for arg in args
    ]
    torch.manual_seed(seed)
    out = call(*given)
    tensors = out if isinstance(out, tuple) else (out,)
    if torch.is_grad_enabled():
        sum((t * torch.arange(1.0, 1 + t.numel()).view_as(t)).sum() for t in tensors).backward()
    gradients = [arg.grad for arg in given if isinstance(arg, Tensor)]
    gradients += [parameter.grad for parameter in model.parameters()]
    return bits([out, gradients, torch.get_rng_state(), given])


def assert_same(
    make: Callable[[], Any],
    patches: dict[str, Any],
    edits: dict[str, Edit],
    calls: list[tuple[Any, ...]],
    *,
    mode: Callable[[], Any] = nullcontext,
) -> PatchableGraph:
    """Compare a patched model with one changed by hand, live and replayed; return the first."""
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    model = make()
    pg = PatchableGraph(model, *calls[0])
    by_node = {NodePath(path): patch for path, patch in patches.items()}  # in all passes
    before = state(model)
    with mode():
        plain = [run(eager, eager, args, seed) for seed, args in enumerate(calls)]
        assert [run(pg, model, args, seed) for seed, args in enumerate(calls)] == plain
        eager.edits = edits
        wanted = [run(eager, eager, args, seed) for seed, args in enumerate(calls)]
        assert wanted != plain
        seen = footprint()
        with pg.patch(by_node):
            assert [run(pg, model, args, seed) for seed, args in enumerate(calls)] == wanted
            replays = pg.stats.replays
            assert [run(pg, model, args, seed) for seed, args in enumerate(calls)] == wanted
            assert pg.stats.replays == replays + len(calls)
        assert footprint() == seen
        replays = pg.stats.replays
        assert [run(pg, model, args, seed) for seed, args in enumerate(calls)] == plain
        # One is recorded again where a fourth number makes numbers stay traced.
        assert pg.stats.replays >= replays + len(calls) - 1
    model.zero_grad()
    assert state(model) == before
    return pg


def set_to(index: Any, new: Any) -> Edit:
    def edit(value: Tensor) -> Tensor:
        made = value.clone()
        made[index] = new
        return made

    return edit


def plus(value: Any) -> Edit:
    return lambda original: original + value


DELTA = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.0, 2.0])
STATIC: dict[str, tuple[dict[str, Any], dict[str, Edit]]] = {
    "a function's result": ({"relu": ZeroPatch()}, {"relu": set_to(..., 0)}),
    "a part of it": (
        {"relu": ZeroPatch(slice=(slice(None), slice(1, 3)))},
        {"relu": set_to((slice(None), slice(1, 3)), 0)},
    ),
    "added": ({"up.output": AddPatch(value=DELTA)}, {"up": plus(DELTA)}),
    "the op inside the module": ({"up.linear": AddPatch(value=DELTA)}, {"up": plus(DELTA)}),
    "replaced": ({"add": ReplacePatch(value=2.0, slice=0)}, {"add": set_to(0, 2.0)}),
    "one's own": ({"add": CustomPatch(custom_op=torch.sin)}, {"add": torch.sin}),
    "an input of the model": ({"x": AddPatch(value=1)}, {"x": plus(1)}),
    "an input of a module": (
        {"down.input": ZeroPatch(slice=(0, ...))}, {"down.input": set_to((0, ...), 0)},
    ),
    "a parameter": (
        {"up.weight": AddPatch(value=torch.ones(4), slice=1)},
        {"weight": lambda w: set_to(1, w[1] + torch.ones(4))(w)},
    ),
    "a buffer": ({"scale": ReplacePatch(value=3.0)}, {"scale": set_to(..., 3.0)}),
    "one part of the output": ({"output|sub_0": AddPatch(value=1)}, {"first": plus(1)}),
    "the other part": ({"output|sub_1": AddPatch(value=1)}, {"second": plus(1)}),
    "after random numbers": ({"dropout": AddPatch(value=0.25)}, {"dropout": plus(0.25)}),
    "several at one node": (
        {"relu": [AddPatch(value=1), ZeroPatch(slice=0), CustomPatch(custom_op=torch.cos)]},
        {"relu": lambda x: torch.cos(set_to(0, 0)(x + 1))},
    ),
    "several nodes": (
        {"relu": AddPatch(value=1), "x": ZeroPatch(slice=1), "up.weight": ReplacePatch(value=0.5)},
        {"relu": plus(1), "x": set_to(1, 0), "weight": set_to(..., 0.5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_a_static_model_runs_as_if_changed_by_hand(name: str) -> None:
    patches, edits = STATIC[name]
    assert_same(Block, patches, edits, inputs_of((3, 4), 0, 1) + inputs_of((5, 4), 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_without_gradients(mode: Any) -> None:
    patches, edits = STATIC["several nodes"]
    assert_same(Block, patches, edits, inputs_of((3, 4), 0, 1), mode=mode)


def test_it_works_under_autocast() -> None:
    patches, edits = STATIC["several at one node"]
    assert_same(
        Block, patches, edits, inputs_of((3, 4), 0, 1),
        mode=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )  # fmt: skip


MANY = inputs_of((6, 4), 0, 1, 2, 3)
SECOND = torch.tensor([0.0, 1.0, 0.0])
FIRST = (slice(None), 0)
ROUTED: dict[str, tuple[dict[str, Any], dict[str, Edit]]] = {
    "all passes of a loop": ({"gelu": AddPatch(value=1.0)}, {"gelu": plus(1.0)}),
    "one expert": ({"experts_1.output": ZeroPatch()}, {"expert 1": set_to(..., 0)}),
    "another path": ({"softmax": ZeroPatch(slice=FIRST)}, {"softmax": set_to(FIRST, 0)}),
    "one expert for all rows": (
        {"softmax": ReplacePatch(value=SECOND)}, {"softmax": set_to(..., SECOND)},
    ),
    "by what was there": (
        {"softmax": CustomPatch(custom_op=lambda s: s.flip(-1))}, {"softmax": lambda s: s.flip(-1)},
    ),
    "path and values": (
        {"softmax": ReplacePatch(value=SECOND), "gelu": ZeroPatch(slice=0), "x": AddPatch(value=1)},
        {"softmax": set_to(..., SECOND), "gelu": set_to(0, 0), "x": plus(1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTED)
def test_experts_run_as_if_changed_by_hand(name: str) -> None:
    patches, edits = ROUTED[name]
    assert_same(Experts, patches, edits, MANY)


LONG = inputs_of((2, 4), 0, 1, 2, scale=4.0)
LOOPED: dict[str, tuple[dict[str, Any], dict[str, Edit]]] = {
    "more steps": ({"mul": AddPatch(value=0.2)}, {"mul": plus(0.2)}),
    "fewer steps": ({"mul": CustomPatch(custom_op=lambda x: x / 3)}, {"mul": lambda x: x / 3}),
    "until the limit": ({"mul": ReplacePatch(value=1.5)}, {"mul": set_to(..., 1.5)}),
    "out at once": ({"mul": ReplacePatch(value=-2.0)}, {"mul": set_to(..., -2.0)}),
    "no step at all": ({"x": ZeroPatch()}, {"x": set_to(..., 0)}),
}


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_runs_as_often_as_if_changed_by_hand(name: str) -> None:
    patches, edits = LOOPED[name]
    assert_same(Refine, patches, edits, LONG)


def test_one_pass_of_a_loop_can_be_meant() -> None:
    count = iter(range(10**6))

    def second(x: Tensor) -> Tensor:
        return x + 1 if next(count) % 7 == 1 else x

    class Seven(Tapped):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(7):
                x = self.tap("tanh", x.tanh())
            return x

    assert_same(Seven, {"tanh:2": AddPatch(value=1)}, {"tanh": second}, inputs_of((3,), 0, 1))


def test_a_node_under_a_branch_that_the_example_did_not_take() -> None:
    class Branch(Tapped):
        def forward(self, x: Tensor) -> Tensor:
            return self.tap("sin", x.sin()) if x.sum() > 0 else self.tap("cos", x.cos())

    up, down = torch.ones(3), -torch.ones(3)
    pg = PatchableGraph(Branch(), up)
    with (
        pytest.raises(NodePathError, match=r"the model has no 'cos'"),
        pg.patch({"cos": ZeroPatch()}),
    ):
        pass
    pg(down)
    with pg.patch({"cos": AddPatch(value=1)}):
        for _ in range(2):
            assert torch.equal(pg(down), down.cos() + 1)
            assert torch.equal(pg(up), up.sin())


def test_a_module_stands_for_its_output_once_it_was_called() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) if x.sum() > 0 else self.down(x)

    pg = bt.BendedModule(Either())
    for path in ("up", ".up", pg.trace(torch.ones(3)).tree.up):
        with pg.patch({path: ZeroPatch()}):
            assert pg(torch.ones(3)).tolist() == [0.0] * 3
    with pytest.raises(
        NodePathError, match=r"'down' is a module, not a value, and no run has called it"
    ):
        pg.patch({"down": ZeroPatch()})


def test_a_patch_leads_into_code_that_no_run_has_seen() -> None:
    class Branch(Tapped):
        def forward(self, x: Tensor) -> Tensor:
            y = self.tap("mul", x * 2)
            return y.sin() if y.sum() > 0 else y.cos()

    x = torch.ones(3)
    pg = PatchableGraph(Branch(), x)
    with pg.patch({"mul": ReplacePatch(value=-1)}):
        for _ in range(2):
            assert torch.equal(pg(x), torch.full((3,), -1.0).cos())
    assert torch.equal(pg(x), (x * 2).sin())


# What the context does


@pytest.fixture
def pg() -> PatchableGraph:
    return PatchableGraph(Block().eval(), torch.ones(3, 4))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))


def test_patches_of_a_node_run_in_order(pg: PatchableGraph) -> None:
    before, after = ProbePatch(), ProbePatch()
    with pg.patch({"relu": [before, AddPatch(value=1), ZeroPatch(slice=0), after]}):
        pg(X)
    assert torch.equal(after.activation, set_to(0, 0)(before.activation + 1))


def test_inner_contexts_run_after_outer_ones_and_leave_them_as_they_were(
    pg: PatchableGraph,
) -> None:
    first, last = RecordPatch(), RecordPatch()
    plain = pg(X)[1]
    given = []
    with pg.patch({"output|sub_1": [first, AddPatch(value=1)]}):
        given.append(pg(X)[1])
        with pg.patch({"output|sub_1": ZeroPatch()}):
            given.append(pg(X)[1])
            with pg.patch({pg.graph.output.sub_1: last}):
                given.append(pg(X)[1])
            given.append(pg(X)[1])
        given.append(pg(X)[1])
    given.append(pg(X)[1])
    zeros = torch.zeros_like(plain)
    wanted = [plain + 1, zeros, zeros, zeros, plain + 1, plain]
    assert all(map(torch.equal, given, wanted))
    assert len(first.activations) == 5
    assert all(torch.equal(value, plain) for value in first.activations)
    assert [value.count_nonzero().item() for value in last.activations] == [0]


def test_contexts_can_be_left_in_any_order(pg: PatchableGraph) -> None:
    plain = pg(X)[1]
    one = pg.patch({"output|sub_1": AddPatch(value=1)})
    two = pg.patch({"output|sub_1": AddPatch(value=2)})
    one.__enter__()
    two.__enter__()
    assert torch.equal(pg(X)[1], plain + 1 + 2)
    one.__exit__(None, None, None)
    assert torch.equal(pg(X)[1], plain + 2)
    two.__exit__(None, None, None)
    assert torch.equal(pg(X)[1], plain)


def test_a_context_can_be_entered_again_also_inside_itself(pg: PatchableGraph) -> None:
    plain = pg(X)[1]
    context = pg.patch({"output|sub_1": AddPatch(value=1)})
    for _ in range(2):
        with context as entered:
            assert entered is context
            outer = context.insertions
            with context:
                assert torch.equal(pg(X)[1], plain + 1 + 1)
                assert len(context.insertions) == 2
            assert context.insertions == outer == list(pg.insertions)
            assert torch.equal(pg(X)[1], plain + 1)
        assert context.insertions == []
    assert torch.equal(pg(X)[1], plain)


def test_a_context_can_decorate_a_function(pg: PatchableGraph) -> None:
    @pg.patch({"output|sub_1": ZeroPatch()})
    def patched() -> Tensor:
        return pg(X)[1]

    plain = pg(X)[1]
    assert patched().count_nonzero() == 0
    assert torch.equal(pg(X)[1], plain)
    assert patched().count_nonzero() == 0


def test_an_error_inside_leaves_nothing_behind(pg: PatchableGraph) -> None:
    plain = pg(X)[1]
    with pytest.raises(RuntimeError, match="mine"), pg.patch({"output|sub_1": ZeroPatch()}):
        raise RuntimeError("mine")
    assert torch.equal(pg(X)[1], plain)
    wrong = ReplacePatch(value=torch.ones(7, 7))
    for _ in range(2):
        with pytest.raises(PatchError, match=r"ReplacePatch at 'relu': .* is Tensor\(7, 7\)") as e:
            with pg.patch({"x": AddPatch(value=1), "relu": wrong}):
                pg(X)
        assert e.value.path == "relu"
    assert torch.equal(pg(X)[1], plain)


def test_all_paths_are_checked_before_anything_is_placed(pg: PatchableGraph) -> None:
    plain, placed = pg(X)[1], []
    pg._insertion_registry.add = lambda *args, **kwargs: placed.append(args)  # type: ignore[method-assign]
    with pytest.raises(NodePathError, match=r"no node 'lup.output': the model has no 'lup'; did"):
        pg.patch({"x": ZeroPatch(), "lup.output": ZeroPatch(), "relu": ZeroPatch()})
    with pytest.raises(
        NodePathError,
        match=r"^2 of the paths lead to no value:\n  no node 'no': .*"
        r"\n  'output' is a tuple\(2\), not a single value; name a value in it",
    ) as caught:
        pg.patch({"no": ZeroPatch(), "x": ZeroPatch(), "output": ZeroPatch()})
    assert caught.value.path == "no"
    for path in ("output|sub_0|sub_0", "x|sub_0", "", "relu:2"):
        with pytest.raises(NodePathError):
            pg.patch({path: ZeroPatch()})
    for patches, message in (
        ({"foo"}, "patches have to be a dict from node paths to patches"),
        ([ZeroPatch()], "not a list"),
        ({3: ZeroPatch()}, "patches are given by paths and nodes of the graph, not 3"),
        ({"relu": 3}, r"'relu': 3 is not a patch; write ReplacePatch\(value\)"),
        ({"relu": [ZeroPatch(), None]}, "'relu': None is not a patch"),
        ({"relu": ZeroPatch}, r"'relu': ZeroPatch is a class; write ZeroPatch\(...\)"),
        (
            {pg.graph.relu: torch.sin},
            r"'relu': .* is not a patch; write CustomPatch\(custom_op=...",
        ),
    ):
        with pytest.raises(InputError, match=message):
            pg.patch(patches)  # type: ignore[arg-type]
    assert placed == []
    del pg._insertion_registry.add
    assert torch.equal(pg(X)[1], plain)


def test_nothing_is_placed_if_one_place_refuses(
    pg: PatchableGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = pg.patch({"x": ZeroPatch(), "relu": ZeroPatch()})
    make = pg._insertion_registry.make

    def refuses(where: Any, what: Any) -> Any:
        if where == "relu":
            raise NodePathError("no", "relu")
        return make(where, what)

    monkeypatch.setattr(pg._insertion_registry, "make", refuses)
    with pytest.raises(NodePathError):
        context.__enter__()
    assert pg.insertions == ()
    assert context.insertions == []
    monkeypatch.undo()
    with context:
        assert list(pg.insertions) == context.insertions
        pg(X)
    assert pg.insertions == ()


def test_no_patches_and_no_paths_are_fine(pg: PatchableGraph) -> None:
    with pg.patch({}), pg.patch({"relu": []}):
        pg(X)
    with pytest.raises(NodePathError):
        pg.patch({"nothing": []})


def test_a_context_says_what_it_holds(pg: PatchableGraph) -> None:
    context = pg.patch({pg.graph.relu: [ZeroPatch(slice=0), ProbePatch()], "x": AddPatch(value=1)})
    assert repr(context) == (
        "PatchContext({'relu': [ZeroPatch(slice=0), ProbePatch()], 'x': [AddPatch(value=1)]}, "
        "active within `with`)"
    )
    with context:
        pg(X)


# Patches in use


def test_one_patch_object_serves_several_places_and_digs(pg: PatchableGraph) -> None:
    add = AddPatch(value=1)
    plain = pg(X)
    with pg.patch({"output|sub_0": add, "output|sub_1": [add, add]}):
        for _ in range(2):
            given = pg(X)
            assert torch.equal(given[0], plain[0] + 1)
            assert torch.equal(given[1], plain[1] + 1 + 1)
    probe = ProbePatch()
    with pg.patch({"output|sub_1": probe}):
        pg(X)
        assert torch.equal(probe.activation, plain[1])
    with pg.patch({"output|sub_0": probe, "relu": add}):
        out = pg(X)
        assert torch.equal(probe.activation, out[0])


def test_another_spelling_of_a_path_is_the_same_node(pg: PatchableGraph) -> None:
    for path in ("output|sub_1", pg.graph.output[1], pg.graph["output|sub_1"]):
        with pg.patch({path: ZeroPatch()}):
            assert pg(X)[1].count_nonzero() == 0
    bended = bt.BendedModule(pg.model)
    bended(X)
    with bended.patch({"output[1]": ZeroPatch()}):
        assert bended(X)[1].count_nonzero() == 0


def test_a_probe_keeps_what_was_there_though_the_model_changes_it() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            kept = y.view(-1)
            y.relu_()
            return y, kept

    x = torch.tensor([-1.0, 1.0])
    pg = PatchableGraph(InPlace(), x)
    probe = ProbePatch()
    for _ in range(2):
        with pg.patch({"mul": probe}):
            assert pg(x)[0].tolist() == [0, 2]
        assert probe.activation.tolist() == [-2, 2]
    with pg.patch({"mul": ReplacePatch(value=probe.activation)}):
        for _ in range(2):
            assert pg(torch.ones(2))[0].tolist() == [0, 2]
    assert probe.activation.tolist() == [-2, 2]


def test_other_holders_of_a_tensor_keep_the_original() -> None:
    class Residual(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            held = [x]
            y = x.view(-1)
            return held[0] + 0, y

    x = torch.ones(2)
    pg = PatchableGraph(Residual(), x)
    for slice_ in (None, 0):
        with pg.patch({"view": ZeroPatch(slice=slice_)}):
            for _ in range(2):
                kept, y = pg(x)
                assert kept.tolist() == [1, 1]
                assert y[0] == 0
    assert x.tolist() == [1, 1]


def test_another_patch_of_the_same_kind_at_the_same_place_is_a_replay(pg: PatchableGraph) -> None:
    plain = pg(X)[1]
    kinds: list[list[tuple[Any, Tensor]]] = [
        [
            (AddPatch(value=1), plain + 1),
            (AddPatch(value=torch.ones(6) * 2), plain + 2),
            (ZeroPatch(), torch.zeros_like(plain)),
            (ReplacePatch(value=5, slice=0), set_to(0, 5)(plain)),
            (CustomPatch(custom_op=torch.cos), plain.cos()),
            (CustomPatch(custom_op=torch.sin), plain.sin()),
        ],
        [(ProbePatch(), plain), (RecordPatch(), plain), (ProbePatch(), plain)],
    ]
    for patches in kinds:
        for patch, wanted in patches:
            before = copy.copy(pg.stats)
            with pg.patch({"relu": patch}):
                assert torch.equal(pg(X)[1], wanted)
            assert pg.stats.replays == before.replays + 1
        assert pg.stats.traces == before.traces
    before = copy.copy(pg.stats)
    for patches in kinds:
        for patch, wanted in patches:
            with pg.patch({"relu": patch}):
                assert torch.equal(pg(X)[1], wanted)
    assert pg.stats.traces == before.traces


def test_going_through_places_and_inputs_keeps_no_patch_alive(pg: PatchableGraph) -> None:
    gone = []
    for path in ("relu", "up.output", "x", "down.weight", "output|sub_0"):
        value, record = torch.ones(1), RecordPatch()
        with pg.patch({path: [AddPatch(value=value), record]}):
            pg(X)
            pg(X)
        gone += [weakref.ref(value), weakref.ref(record), weakref.ref(record.activations[0])]
        del value, record
    gc.collect()
    assert all(reference() is None for reference in gone)


def test_a_value_that_is_trained_gets_its_gradients(pg: PatchableGraph) -> None:
    delta = torch.zeros(6, requires_grad=True)
    other = torch.zeros(6, requires_grad=True)
    optimizers = [torch.optim.Adam([values], lr=0.1) for values in (delta, other)]
    for _ in range(5):
        with pg.patch({"relu": AddPatch(value=delta)}):
            pg(X)[0].pow(2).sum().backward()
        model = pg.model
        hidden = model.up(X).relu() + other
        model.norm(X + model.down(hidden) * model.scale).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(delta, other)
    assert delta.count_nonzero() > 0


def test_activations_of_one_input_are_patched_into_another() -> None:
    experts = PatchableGraph(Experts(), *MANY[0])
    probe = ProbePatch()
    with experts.patch({"softmax": probe}):
        experts(*MANY[1])
    with experts.patch({"softmax": ReplacePatch(value=probe.activation)}):
        for _ in range(2):
            given = experts(*MANY[2])
    hand = experts.model
    hand.edits = {"softmax": lambda _: probe.activation}
    assert torch.equal(given, hand(*MANY[2]))


def test_several_inputs_are_patched_into_one_another_in_any_order(pg: PatchableGraph) -> None:
    """Each run is given another one's activation; first those of the runs as they were."""
    inputs = [x for (x,) in inputs_of((3, 4), 1, 2, 3)]
    probes = [ProbePatch() for _ in inputs]
    for x, probe in zip(inputs, probes, strict=True):
        with pg.patch({"relu": probe}):
            pg(x)
    model = pg.model
    for to, source in ((0, 1), (1, 2), (2, 0), (0, 2)):
        with pg.patch({"relu": ReplacePatch(value=probes[source].activation)}):
            given = pg(inputs[to])[0]
        hidden = model.up(inputs[source]).relu()
        x = inputs[to]
        assert torch.equal(given, model.norm(x + model.down(hidden) * model.scale))


def test_a_patch_may_use_what_a_probe_saw_earlier_in_the_same_run(pg: PatchableGraph) -> None:
    first = ProbePatch()
    take = CustomPatch(custom_op=lambda _: first.activation[:, :4])
    with pg.patch({"up.output": first, "down.output": take}):
        for (x,) in inputs_of((3, 4), 1, 2, 3):
            model = pg.model
            wanted = model.norm(x + model.up(x)[:, :4] * model.scale)
            assert torch.equal(pg(x)[0], wanted)


def test_a_changed_shape_is_followed() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            total = torch.zeros(())
            for row in y:
                total = total + row.sum()
            return total

    x = torch.ones(3, 2)
    pg = PatchableGraph(Sums(), x)
    with pg.patch({"mul": CustomPatch(custom_op=lambda v: v[:2])}):
        for _ in range(2):
            assert pg(x).item() == 4
    assert pg(x).item() == 6


def test_arguments_by_keyword_and_in_tuples_are_patched() -> None:
    class Any_(nn.Module):
        def forward(self, x: Tensor, *more: Tensor, by: Tensor, **others: Tensor) -> Tensor:
            for other in (*more, *others.values()):
                x = x + other
            return x * by

    a, b, c, d = (torch.full((2,), float(n)) for n in range(1, 5))
    pg = PatchableGraph(Any_(), a, b, by=c, z=d)
    assert pg(a, b, by=c, z=d).tolist() == [21, 21]
    for patches, wanted in (
        ({"x": ZeroPatch()}, 18),
        ({"more|sub_0": ZeroPatch()}, 15),
        ({"by": AddPatch(value=1)}, 28),
        ({pg.graph.others.z: ReplacePatch(value=0)}, 9),
        ({"more|sub_0": ZeroPatch(), "others|z": ZeroPatch()}, 3),
    ):  # fmt: skip
        with pg.patch(patches):
            for _ in range(2):
                assert pg(a, b, by=c, z=d).tolist() == [wanted] * 2
    assert a.tolist() == [1, 1]


def test_batch_norm_keeps_its_statistics_under_a_patch() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    eager, model = make(), make()
    x = torch.randn(5, 4)
    pg = PatchableGraph(model, x)
    eager(x)
    path = next(name for name in pg.graph if "1" in name)
    with pg.patch({f"{path}.output": AddPatch(value=1)}):
        for _ in range(3):
            given = pg(x)
            assert bits(given) == bits((eager[1](eager[0](x)) + 1).relu())
            assert state(model) == state(eager)


def test_a_model_that_runs_live_is_patched_too() -> None:
    class Live(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            return y + torch.tensor([*y.detach().numpy().flat])

    x = torch.ones(2)
    pg = PatchableGraph(Live(), x)
    with pg.patch({"mul": AddPatch(value=1)}):
        for _ in range(3):
            assert pg(x).tolist() == [6, 6]
    assert pg(x).tolist() == [4, 4]


def test_a_copy_of_the_graph_is_patched_by_the_same_paths() -> None:
    pg = PatchableGraph(Experts(), *MANY[0])
    node = pg.graph.softmax
    wanted = None
    for made in (pg, copy.deepcopy(pg), pickle.loads(pickle.dumps(pg))):
        with made.patch({node: ReplacePatch(value=SECOND), "gelu": AddPatch(value=1)}):
            given = made(*MANY[1])
        wanted = given if wanted is None else wanted
        assert torch.equal(given, wanted)
    assert not torch.equal(pg(*MANY[1]), wanted)


def test_a_bended_module_is_patched_too() -> None:
    bended = bt.BendedModule(Block().eval())
    plain = bended(X)[1]
    with bended.patch({"relu": AddPatch(value=1), "output|sub_1": AddPatch(value=1)}):
        for _ in range(2):
            assert torch.equal(bended(X)[1], plain + 1 + 1)
    assert torch.equal(bended(X)[1], plain)


def test_a_weight_is_patched_in_the_call_that_the_path_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), self.linear(x)

    x = torch.randn(2, 3)
    pg = PatchableGraph(Twice(), x)
    linear = pg.model.linear
    changed = F.linear(x, linear.weight + 1, linear.bias)
    for path, wanted in (
        ("linear.weight", (changed, linear(x))),
        (pg.graph.linear_1.weight, (linear(x), changed)),
    ):
        with pg.patch({path: AddPatch(value=1)}):
            for _ in range(2):
                assert bits(pg(x)) == bits(wanted)


def test_parameters_get_the_gradients_through_a_patch_of_them() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    delta = torch.randn(3, 3, requires_grad=True)
    leaves = [x, delta, model.weight]

    def gradients(out: Tensor) -> Any:
        first = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        return [first, torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)]

    wanted = bits(gradients(F.linear(x, model.weight + delta, model.bias)))
    pg = PatchableGraph(model, x)
    with pg.patch({"weight": AddPatch(value=delta)}):
        for _ in range(2):
            assert bits(gradients(pg(x))) == wanted


def test_numbers_out_of_tensors_are_patched_where_they_come_out() -> None:
    def scaled(x: Tensor) -> tuple[Tensor, float]:
        peak = x.max().item()
        return (x / peak if peak > 1 else x), peak * 2

    pg = PatchableGraph(scaled, torch.tensor([1.0, 4.0]))
    for x in (torch.tensor([1.0, 4.0]), torch.tensor([0.5, 0.5])):
        for value in (2.0, 0.5):
            with pg.patch({"item": ReplacePatch(value=value)}):
                for _ in range(2):
                    given, peak = pg(x)
                    assert given.tolist() == (x / 2 if value == 2.0 else x).tolist()
                    assert peak == value * 2
    with pytest.raises(
        NodePathError, match="'mul' is a Python number, which cannot be replaced; choose"
    ):
        pg.patch({"mul": ZeroPatch()})


def test_a_patch_that_was_never_applied_is_told_of_where_the_context_is() -> None:
    def branch(x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    pg = PatchableGraph(branch, torch.ones(3))
    with pytest.warns(NeverFiredWarning, match=r"ZeroPatch at 'sin' .*`.*x.sum\(\) > 0") as caught:
        with pg.patch({"sin": ZeroPatch(), "x": ProbePatch()}):
            pg(-torch.ones(3))
    assert [warning.filename for warning in caught] == [__file__]
    assert pg.insertions == ()
    with pg.patch({"sin": ZeroPatch()}):
        pass  # no call, no warning
    with pytest.raises(NeverFiredWarning), pg.patch({"sin": ZeroPatch(), "x": ZeroPatch()}):
        pg(-torch.ones(3))
    assert pg.insertions == ()


def leaves(root: TreeNode) -> Iterator[tuple[str, TreeNode]]:
    for node in root.walk():
        if node.kind in ("tensor", "number") and node.path:
            yield dug(root, node), node


def can_be_patched(pg: bt.BendedModule, path: str) -> bool:
    try:
        context = pg.patch({path: ZeroPatch()})
    except NodePathError:
        return False
    context(lambda: None)  # which is not meant to be entered
    return True


# Tensors that no patch is shown, though they are in the tree.
NOT_SEEN = {
    "initialised_on_first_call": ["copy_", "data", "std"],  # only in the example
}


@pytest.mark.parametrize("case", some(CASES, 6, start=3), ids=lambda case: case.name)
def test_looking_at_every_value_of_a_model_changes_nothing(case: Case) -> None:
    """All values that can be patched are, with patches that keep them."""
    torch.manual_seed(0)
    eager = case.make()
    torch.manual_seed(0)
    model = case.make()
    example = next(iter(case.paths.values()))
    wanted, raised, *_ = outcome(eager, example(), 5)
    if raised is not None:
        pytest.skip("the example raises")
    args, kwargs = example()
    torch.manual_seed(5)
    pg = bt.BendedModule(model)
    root = pg.trace(*args, **kwargs).tree._data
    records = {
        path: RecordPatch()
        for path, node in leaves(root)
        if node.kind == "tensor" or can_be_patched(pg, path)
    }
    keep = CustomPatch(custom_op=lambda value: value, requires_clone=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)  # not all are on all paths
        with pg.patch({path: [keep, record] for path, record in records.items()}):
            for _ in range(2):
                for seed, inputs in enumerate(case.paths.values()):
                    wanted = outcome(eager, inputs(), seed)
                    given = outcome(pg, inputs(), seed)
                    assert (type(given[1]), str(given[1])) == (type(wanted[1]), str(wanted[1]))
                    assert (given[0], *given[2:]) == (wanted[0], *wanted[2:])
                    assert state(model) == state(eager)
    tensors = {path for path, node in leaves(root) if node.kind == "tensor"}
    unseen = [path for path in tensors if not records[path].activations]
    if case.name in ("transformer_encoder_layer", "transformer_repeated_until_stable"):
        # Asked for on the way to the fused path only, which is not taken past patches.
        unseen = [path for path in unseen if not re.search(r"\w_(weight|bias)$", path)]
    assert sorted(unseen) == NOT_SEEN.get(case.name, [])


# Some rows of a batch


def test_rows_of_a_batch_have_patches_that_differ() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    bended, x = bt.BendedModule(model), torch.randn(4, 4)
    probe, bias = ProbePatch(), torch.ones((), requires_grad=True)
    plain = bended(x)
    hidden = model[:2](x)
    for _ in range(3):  # spliced in, and replayed
        with (
            bended.patch({"1": ZeroPatch()}, rows=1),
            bended.patch({"1": AddPatch(value=bias)}, rows=[0, -1]),
            bended.patch({"1": probe}, rows=slice(2, None)),
        ):
            out = bended(x)
        wanted = torch.stack([hidden[0] + 1, hidden[1] * 0, hidden[2], hidden[3] + 1])
        assert torch.equal(out, model[2](wanted))
        assert torch.equal(probe.activation, wanted[2:])
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    torch.testing.assert_close(gradient, model[2].weight.sum() * 2)
    assert torch.equal(bended(x), plain)
    assert bended.stats.live == 0


@pytest.mark.parametrize(
    ("where", "rows", "error", "message"),
    [
        ("1", 7, PatchError, r"ZeroPatch at 'sub_1': rows=\[7\], but the value has 2 rows"),
        ("1", "a", InputError, "rows= takes indices of rows, or a slice, not 'a'"),
        ("1", [], InputError, "rows= takes indices of rows"),
        ("sum", 0, PatchError, "rows= needs a tensor with rows, not a scalar"),
    ],
)
def test_rows_that_are_not_there_are_refused(
    where: str, rows: Any, error: type[Exception], message: str
) -> None:
    class Summed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    bended = bt.BendedModule(Summed(nn.Tanh(), nn.ReLU()))
    bended(torch.ones(2, 3))
    with pytest.raises(error, match=message), bended.patch({where: ZeroPatch()}, rows=rows):
        bended(torch.ones(2, 3))


def test_a_patch_of_rows_keeps_their_shape() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU()))
    narrow = CustomPatch(custom_op=lambda value: value[:, :1])
    with (
        pytest.raises(PatchError, match=r"shape and dtype of the rows, \(1, 3\) torch.float32"),
        bended.patch({"0": narrow}, rows=0),
    ):
        bended(torch.ones(2, 3))
