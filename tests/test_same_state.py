"""No code runs that eager does not run, and what runs aside leaves the state as it was."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from bendtrace.errors import ExportError, InputError, NameOrderWarning, NodePathError
from bendtrace.watch.provenance import is_installed_file
from bendtrace.workflows import activation_patching, run_with_cache
from tests.stateful import KINDS, UNRESTORABLE, X, library, outputs


def assert_same(given: Any, wanted: Any) -> None:
    given, wanted = (v if isinstance(v, list) else [v] for v in (given, wanted))
    assert len(given) == len(wanted)
    assert all(map(torch.equal, given, wanted)), (given, wanted)


@pytest.fixture(autouse=True)
def library_as_it_was() -> Iterator[None]:
    yield
    for name in ("calls", "flag"):
        vars(library).pop(name, None)


def looked_at(model: nn.Module) -> Callable[..., Any]:
    bended = bt.BendedModule(model)
    bended.interject("add", lambda value: None)
    return bended


def replaced(model: nn.Module) -> Callable[..., Any]:
    bended = bt.BendedModule(model)
    bended.interject("lin.linear", lambda value: value.clone())
    return bended


def activations(model: nn.Module) -> Callable[..., Any]:
    bended = bt.BendedModule(model)
    return lambda x: bended.get_activations("add", args=(x,), return_output=True)[1]


def cached(model: nn.Module) -> Callable[..., Any]:
    bended = bt.BendedModule(model)
    return lambda x: run_with_cache(bended, x, ["lin.linear"])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_before_the_first_call_runs_nothing_twice(kind: str) -> None:
    wanted = outputs(KINDS[kind]())
    for use in (looked_at, replaced, activations, cached):
        assert_same(outputs(use(KINDS[kind]())), wanted)


def explored(bended: bt.BendedModule) -> None:
    bended.explore(X, {"x": (-5.0, 5.0)}, seconds=None, tries=3)


def patched(bended: bt.BendedModule) -> None:
    with torch.no_grad():
        activation_patching(bended, X, X + 1, ["lin"], lambda output: output.sum())


def stepped(bended: bt.BendedModule) -> None:
    run = bended.step(X)
    assert run.goto(-1).variables
    assert run.goto(0).variables


# What a run can restore, and a stepped one refuses, since it cannot say what a variable held.
NOT_STEPPED = {
    "class_attribute", "attribute_of_a_library", "growing_set", "numbers_in_an_array",
    "numpy_array", "data_of_a_parameter", "growing_modules", "optimizer", "environment_variable",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_aside_leaves_the_state_as_it_was_or_is_refused(kind: str) -> None:
    wanted = outputs(KINDS[kind]())
    for use in (explored, patched, stepped):
        model = KINDS[kind]()
        bended = bt.BendedModule(model)
        if kind in UNRESTORABLE or (use is stepped and kind in NOT_STEPPED):
            with pytest.raises(InputError, match=UNRESTORABLE.get(kind, "cannot be stepped")):
                use(bended)
        else:
            use(bended)
        assert_same(outputs(model), wanted)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - UNRESTORABLE.keys()))
def test_effects_do_not_depend_on_the_order_of_the_runs(kind: str) -> None:
    clean, corrupted = X, X * torch.tensor([1.0, 2.0])
    bended = bt.BendedModule(KINDS[kind]())
    with torch.no_grad():
        found = activation_patching(
            bended, clean, corrupted, ["add", "lin", "add"], lambda output: output[0, 0]
        )
    assert found.values.flatten().tolist() == [found.clean] * 3


# Names in the first call


def test_parts_inputs_states_and_layers_are_found_in_the_first_call() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.max(layer(x).relu(), 0, keepdim=True).values + x
            return x.relu()

    names = [
        "max|values", "max.indices:2", "layers.0.linear", "layers[1].linear", "layers_1.input",
        ".layers_0.weight", "x", "output", "relu_2", "relu:2", "relu_1", "linear_2",
    ]  # fmt: skip
    for name in names:
        torch.manual_seed(0)
        model = Model()
        bended, known = bt.BendedModule(model), bt.BendedModule(model)
        known(torch.eye(2))
        handle, error = None, ""
        try:
            handle = known.interject(name, lambda value: value * 0)
        except NodePathError as raised:  # it is ambiguous, which the first call says as well
            error = str(raised)
        if handle is None:
            bended.interject(name, lambda value: value * 0)
            with pytest.raises(NodePathError) as caught:
                bended(torch.eye(2))
            assert str(caught.value) == error
            continue
        with bended.interject(name, lambda value: value * 0) as other:
            for _ in range(2):
                assert_same(bended(torch.eye(2)), known(torch.eye(2)))
        assert other.targets == handle.targets, name
        assert other.report().to_dict() == handle.report().to_dict(), name
        assert bended.stats.traces == 1


def test_a_wrong_name_raises_at_the_end_of_the_first_call_and_keeps_nothing() -> None:
    calls: list[int] = []

    def model(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.sigmoid(torch.relu(x))

    bended, seen = bt.BendedModule(model), list[Tensor]()
    bended.interject("relu", seen.append)
    wrong = bended.interject("sigmoyd", lambda value: value)
    with pytest.raises(NodePathError, match="did you mean 'sigmoid'"):
        bended(X)
    assert len(calls) == 1
    assert not bended.traces
    wrong.remove()
    assert_same(bended(X), model(X))
    assert len(seen) == 2


def test_what_cannot_be_inserted_raises_at_its_node() -> None:
    class Around(bt.Interjection):
        def before(self, at: Any, inputs: Any) -> None:
            """Do nothing."""

    bended = bt.BendedModule(lambda x: torch.max(x, 0).values)
    bended.interject("max|values", Around())
    with pytest.raises(InputError, match="part of a node's output"):
        bended(X)


def test_a_method_of_the_model_resolves_names_as_it_runs() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x) + 1

        def encode(self, x: Tensor) -> Tensor:
            return x.sin()

    bended = bt.BendedModule(Model())
    bended.interject("sin", lambda value: value * 0)
    assert_same(bended.trace(X, fn="encode").output, X * 0)
    assert_same(bended(X), X * 0 + 1)
    other = bt.BendedModule(Model())
    other.interject("tan", lambda value: value * 0)
    with pytest.raises(NodePathError, match="this run has no node 'tan'"):
        other.trace(X, fn="encode")


# Names that depend on what came first


def test_a_name_that_depends_on_what_came_first_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = torch.relu(x)  # place 1
        return torch.relu(x - 1.5)  # place 2

    positive, negative = torch.tensor([3.0, -1.0]), torch.tensor([-3.0, 2.0])
    for first, second in ((positive, negative), (negative, positive)):
        bended = bt.BendedModule(model)
        bended(first)
        with pytest.warns(NameOrderWarning, match="the other side of `x.sum"):
            assert bended.interject(".relu", lambda value: value).targets
        bended = bt.BendedModule(model)
        for x in (first, second):
            bended(x)
        with pytest.raises(NodePathError, match="depends on which path came first"):
            bended.interject(".relu", lambda value: value + 100)
        place = bt.node_selector.source_text("torch.relu(x)")
        with bended.interject(place, lambda value: value + 100):
            assert_same(bended(positive), torch.relu(torch.relu(positive) + 100 - 1.5))
            assert_same(bended(negative), model(negative))


@pytest.mark.parametrize(
    ("name", "warns"),
    [
        (".relu", False),  # before the branch
        (".add", False),
        (".relu_1", True),  # on the side that was taken; the last one would have its name
        (".relu_2", True),  # one less would be counted
        (".exp", False),  # the only one
        (".sub", False),
        (".add_1", True),  # other sides may hold sums
    ],
)
@pytest.mark.parametrize("is_before", [False, True])
def test_a_name_says_that_a_side_that_no_run_has_taken_may_have_it(
    name: str, warns: bool, is_before: bool
) -> None:
    def model(x: Tensor) -> Tensor:
        h = torch.relu(x + 5)
        if x.sum() > 0:
            h = torch.exp(h) + torch.relu(x)
        else:
            h = h * x + 3
        return h.relu() - 1

    bended, x = bt.BendedModule(model), torch.ones(2)
    if not is_before:
        bended(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bended.interject(name, torch.zeros_like)
        if is_before:
            bended(x)
    assert [warning.category for warning in caught] == [NameOrderWarning] * warns
    assert all(warning.filename == __file__ for warning in caught)
    node = bended.trace(x).tree[name.lstrip(".")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bended.interject(node, torch.zeros_like)


def test_a_name_that_another_order_of_runs_would_change_says_so() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.sin(x) if x.sum() > 0 else torch.sin(x * 2)

    bended = bt.BendedModule(model)
    bended(torch.ones(2))
    bended(-torch.ones(2))
    with pytest.warns(NameOrderWarning, match="would be called 'sin' if another known run"):
        bended.interject(".sin_1", torch.neg)


# Libraries


def test_what_is_put_into_a_module_of_a_library_is_seen() -> None:
    def puts(x: Tensor) -> Tensor:
        library.calls = getattr(library, "calls", 0) + 1
        return x + library.calls

    def asks(x: Tensor) -> Tensor:
        return x + library.flag if hasattr(library, "flag") else x

    bended = bt.BendedModule(puts)
    assert [float(bended(torch.zeros(()))) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(ExportError, match="calls"):
        bt.BendedModule(puts).export(torch.zeros(()))
    asking = bt.BendedModule(asks)
    found = [float(asking(torch.zeros(())))]
    for flag in (3, 4):
        library.flag = flag
        found.append(float(asking(torch.zeros(()))))
    assert found == [0, 3, 4]


def test_what_a_library_counts_in_a_module_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages" / "bt_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    counting = "calls = 0\ndef step():\n    global calls\n    calls += 1\n    return calls\n"
    (folder / "inner.py").write_text(counting)
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.import_module("bt_package.inner")
    package = importlib.import_module("bt_package")

    def model(x: torch.Tensor) -> torch.Tensor:
        return x + package.inner.step()

    bended = bt.BendedModule(model)
    assert [float(bended(torch.zeros(()))) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(ExportError, match="calls"):
        bt.BendedModule(model).export(torch.zeros(()))
    assert package.inner.calls == 4


def test_a_library_is_one_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("site-packages", "links", "clones", "work")}
    for folder in folders.values():
        folder.mkdir()

    def package(folder: Path, name: str) -> str:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        return str(folder / name / "__init__.py")

    installed = package(folders["site-packages"], "bt_installed")
    (folders["links"] / "bt_installed").symlink_to(Path(installed).parent)
    clone = package(folders["clones"] / "src", "bt_clone")
    own = package(folders["work"] / "src", "bt_own")
    loose = package(folders["clones"] / "src", "bt_loose")
    for name in ("bt_clone", "bt_own"):
        metadata = folders["links"] / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folders["links"]))
    monkeypatch.chdir(folders["work"])
    linked = str(folders["links"] / "bt_installed" / "__init__.py")
    assert [is_installed_file(file) for file in (installed, linked, clone, own, loose, "x.py")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


# Predicates


def test_a_predicate_that_is_written_in_a_loop_is_known_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    uses: list[Callable[[bt.BendedModule], Any]] = [
        lambda bended: run_with_cache(bended, X, lambda name: name.endswith("output"))[1],
        lambda bended: run_with_cache(bended, X, re.compile("0.*"))[1],
        lambda bended: bended.get_activations(lambda node: node.is_module, args=(X,)),
    ]
    for use in uses:
        bended = bt.BendedModule(model)
        bended(X)
        wanted = list(use(bended))
        traces = bended.stats.traces
        for _ in range(3):
            assert list(use(bended)) == wanted
        assert bended.stats.traces == traces


def test_a_predicate_that_reads_something_else_selects_something_else() -> None:
    class Chosen:
        name = "0.output"

    bended = bt.BendedModule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    names, chosen = {"0.output"}, Chosen()

    def found(says: Callable[[str], bool]) -> list[str]:
        return list(run_with_cache(bended, X, says)[1])

    def in_names(name: str) -> bool:
        return name in names

    for says in (in_names, lambda name: name in names):
        names.clear()
        for path, name in (("sub_0", "0.output"), ("sub_1", "1.output")):
            names.add(name)
            assert found(says)[-1] == path
    for path, name in (("sub_0", "0.output"), ("sub_1", "1.output")):
        chosen.name = name
        assert found(lambda name: name == chosen.name) == [path]
    for wanted, path in (("0.output", "sub_0"), ("1.input", "sub_1.input")):
        assert found(lambda name, wanted=wanted: name == wanted) == [path]


def test_a_cache_of_everything_leaves_out_what_one_op_hides() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(checkpoint(self.a, x, use_reentrant=True))
            return y + torch.vmap(torch.func.jacrev(self.a))(x).sum(-1)

    model = Hides()
    x = torch.randn(2, 2, requires_grad=True)
    output, cache = run_with_cache(model, x)
    assert_same(output, model(x))
    assert {"b", "b.input", "b.linear", "output"} <= set(cache)
    assert not [name for name in cache if name.split(".")[0] == "a"]
