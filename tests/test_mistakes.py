"""Mistakes that were silent: each is said at once."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, NeverFiredWarning
from tests.causal_models import HEADS, Transformer
from tests.promise import assert_promise, bits, randn_inputs, state


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.drop = nn.Linear(4, 4), nn.ReLU(), nn.Dropout()

    def encode(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) * 2


class Holds:
    """An object that can be called, and holds a module."""

    def __init__(self) -> None:
        self.model, self.factor = Encoder(), 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.model.encode(x) * self.factor


# Methods of modules, and objects that hold some


def test_a_method_of_a_module_has_the_tensors_and_modes_of_the_module() -> None:
    model = Encoder()
    bended = bt.BendedModule(model.encode)
    assert bended.weight_names == ["fc.weight", "fc.bias"]
    assert dict(bended.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert bits(dict(bended.state_dict())) == bits(dict(model.state_dict()))
    assert bended.eval() is bended
    assert not model.training
    assert not model.drop.training
    assert torch.equal(bended(torch.ones(2, 4)), model.encode(torch.ones(2, 4)))
    assert bended.train().training
    assert model.drop.training
    bended.double()
    assert model.fc.weight.dtype is torch.float64
    bended.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
    assert not model.fc.weight.any()


def test_a_method_of_a_module_keeps_the_promise_and_can_be_trained() -> None:
    torch.manual_seed(0)
    bended = assert_promise(lambda: Encoder().encode, [randn_inputs(2, 4)] * 3)
    assert bended.stats.replays == 2
    model = Encoder()
    bended = bt.BendedModule(model.encode)
    optimizer = torch.optim.SGD(bended.parameters(), lr=0.1)
    before = bits(dict(model.state_dict()))
    bended(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert bits(dict(model.state_dict())) != before


@pytest.mark.parametrize("make", [lambda: Encoder().eval().encode, Holds])
def test_weights_and_modules_of_what_is_no_module_are_bent(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    bended = bt.BendedModule(model).eval()
    x = torch.ones(2, 4)
    plain = bended(x)
    (weight,) = (name for name in bended.weight_names if name.endswith("fc.weight"))
    (bias,) = (name for name in bended.weight_names if name.endswith("fc.bias"))
    with bended.bend(bt.bends.Scale(2.0), f"{weight}|{bias}"):
        for _ in range(2):
            assert torch.equal(bended(x), plain * 2)
    with bended.interject(nn.ReLU, lambda value: value * 3):
        assert torch.allclose(bended(x), plain * 3)
    with bended.interject(weight.removesuffix(".weight"), torch.zeros_like):
        assert not bended(x).any()
    assert torch.equal(bended(x), plain)
    assert bended.stats.live == 0


def test_an_object_that_holds_a_module_has_its_tensors_and_modes() -> None:
    model = Holds()
    bended = bt.BendedModule(model)
    assert bended.weight_names == ["model.fc.weight", "model.fc.bias"]
    assert [name for name, _ in bended.named_parameters()] == ["model.fc.weight", "model.fc.bias"]
    assert list(bended.state_dict()) == ["model.fc.weight", "model.fc.bias"]
    bended.eval()
    assert not model.model.drop.training
    assert state(model.model) == state(bended.model.model)


# What is said at once


X = torch.ones(2, 4)


def relu_of(*shape: int) -> bt.BendedModule[Any]:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU()))
    bended(torch.ones(shape))
    return bended


def harvested(model: Any, where: Any, out: Path, loader: Any = None, **options: Any) -> Any:
    loader = [X] if loader is None else loader
    return bt.harvest(model, loader, where=where, out=out, progress=False, **options)


def calls_itself() -> None:
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    bended(X)
    with bended.interject("relu", lambda value: bended(value)):
        bended(X)


def attending() -> tuple[bt.BendedModule[Any], Tensor]:
    torch.manual_seed(0)
    bended, tokens = bt.BendedModule(Transformer()), torch.tensor([[1, 2, 3]])
    bended(tokens)
    return bended, tokens


def patched_heads(site: Any, heads: int = HEADS, **options: Any) -> Any:
    bended, tokens = attending()
    metric = {"metric": lambda out: out[0, -1, 0]}
    return bt.workflows.activation_patching(
        bended, tokens, tokens + 1, [site], heads=heads, **metric, **options
    )


def patched_rows(model: Any, where: str, rows: int = 0) -> None:
    bended = bt.BendedModule(model)
    bended(X)
    with bended.patch({where: bt.patches.ZeroPatch()}, rows=rows):
        bended(X)


OF_RUNS = r"costs are those of a run, bt.trace\(model, x, save='none'\)"
NO_HEADS = "is neither split into {} heads nor joined from them, so its slices mean nothing"
A_CLASS = "ReLU is a class, which makes models: pass an object of it"
SUM = {"loss": torch.sum}
# Each call that people tried, with the error that it raises and how its message begins.
MISTAKES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "bend a class": (lambda _: bt.BendedModule(nn.ReLU), InputError, A_CLASS),
    "trace a class": (lambda _: bt.trace(nn.ReLU, X), InputError, A_CLASS),
    "log a class": (lambda _: bt.log_forward_pass(nn.ReLU, X), InputError, A_CLASS),
    "draw a class": (lambda _: bt.show_model_graph(nn.ReLU, X), InputError, A_CLASS),
    "bisect classes": (lambda _: bt.bisect(nn.ReLU, nn.ReLU, X), InputError, A_CLASS),
    "find a NaN in a class": (
        lambda _: bt.workflows.find_nan(nn.ReLU, X), InputError, A_CLASS,
    ),
    "gradients of a class": (
        lambda _: bt.workflows.gradient_flow(nn.ReLU, X, **SUM), InputError, A_CLASS,  # type: ignore[arg-type]
    ),
    "harvest a class": (lambda out: harvested(nn.ReLU, "relu", out), InputError, A_CLASS),
    "trace a name": (lambda _: bt.trace("model.pt", X), InputError, "a model has to be callable"),  # type: ignore[arg-type]
    "harvest nothing": (
        lambda out: harvested(torch.relu, [], out), InputError, "where= is an empty list: pass",
    ),
    "harvest no batch": (
        lambda out: harvested(torch.relu, "relu", out, []), InputError, "the loader yielded no b",
    ),
    "harvest the mean of images": (
        lambda out: harvested(relu_of(2, 3, 4, 4), "0", out, [torch.ones(2, 3, 4, 4)],
                              reduce="mean"),
        InputError,
        r"reduce='mean' keeps the axis of the features, which a value of shape \(2, 3, 4, 4\) does"
        " not show: pass feature_axis=1",
    ),
    "harvest the mean of a tuple": (
        lambda out: harvested(lambda x: x.max(-1), "max", out, reduce="mean"), InputError,
        "'max' gave max, but only tensors can be stored: name a part, such as 'max|sub_0'",
    ),
    "patch heads behind the projection": (
        lambda _: patched_heads("blocks.0.attn.out"), bt.errors.SiteError,
        f"heads=2: the output of 'blocks_0.attn.out' {NO_HEADS.format(2)}",
    ),
    "patch as many heads as there are not": (
        lambda _: patched_heads("blocks.0.attn.qkv", 4), bt.errors.SiteError, NO_HEADS.format(4),
    ),
    "patch the heads of a block": (
        lambda _: patched_heads("blocks.1", at="input"), bt.errors.SiteError, NO_HEADS.format(2),
    ),
    "ablate heads behind the projection": (
        lambda _: bt.workflows.ablate(attending()[0], "blocks.0.attn", heads=2, head=0),
        bt.errors.SiteError, NO_HEADS.format(2),
    ),
    "ablate heads that nobody has seen": (
        lambda _: bt.workflows.ablate(bt.BendedModule(Transformer()), "blocks.0.attn", heads=2),
        InputError, "heads= is compared with a run of the model: call the model once before",
    ),
    "bend everything by nothing": (
        lambda _: relu_of(2).bend(bt.bends.Scale(2.0), ""), InputError, "the empty pattern matches",
    ),
    "step without arguments": (
        lambda _: relu_of(2).step(), TypeError, "missing 1 required positional argument",
    ),
    "step with one argument more": (
        lambda _: relu_of(2).step(X, scale=2), TypeError, "unexpected keyword argument 'scale'",
    ),
    "bend a number of a configuration": (
        lambda _: bt.bends.BendingConfig((bt.bends.Scale(2.0), 3)), InputError,
        r"a configuration takes tuples of a bending callback, .* not \(Scale\(scale=2.0\), 3\)",
    ),
    "harvest pairs with labels": (
        lambda out: harvested(relu_of(2), "0", out, [(X, torch.ones(2))]), bt.errors.HarvestError,
        "call= says how to call the model with one that holds more, such as labels",
    ),
    "save a run nowhere": (
        lambda _: bt.trace(torch.relu, X).save(None), InputError,  # type: ignore[arg-type]
        "directory has to be a path, not None",
    ),
    "load a model": (
        lambda _: bt.load(nn.ReLU()), InputError,  # type: ignore[arg-type]
        r"directory has to be a path, not ReLU\(\)",
    ),
    "read a configuration from a number": (
        lambda _: bt.bends.BendingConfig.load(0), InputError,  # type: ignore[arg-type]
        "the file of a configuration has to be a path, not 0",
    ),
    "export to a number": (
        lambda _: relu_of(2).export(torch.ones(2), to=3), InputError,  # type: ignore[arg-type]
        "to= has to be a path, not 3",
    ),
    "harvest nowhere": (
        lambda _: harvested(torch.relu, "relu", None), InputError,  # type: ignore[arg-type]
        "out= has to be a path, not None",
    ),
    "draw many nodes": (
        lambda _: bt.trace(torch.relu, X).draw(max_nodes="all"), InputError,  # type: ignore[arg-type]
        "max_nodes= has to be a positive int, not 'all'",
    ),
    "set the value of a stepped run": (
        lambda _: setattr(relu_of(2).step(torch.ones(2)), "value", torch.zeros(2)), InputError,
        r"run.value = ... would change nothing: run.set\(op, value\) sets",
    ),
    "bisect within a word": (
        lambda _: bt.bisect(torch.relu, torch.relu, X, rtol="small"), InputError,  # type: ignore[arg-type]
        "rtol= has to be a number of at least 0, not 'small'",
    ),
    "diff within a word": (
        lambda _: bt.diff(*[bt.trace(torch.relu, X)] * 2, atol="small"), InputError,  # type: ignore[call-overload]
        "atol= has to be a number of at least 0, not 'small'",
    ),
    "move a cache to a device that is not there": (
        lambda _: bt.workflows.run_with_cache(torch.relu, X)[1].to("gpu"), InputError,
        "device= is a device of torch, such as 'cpu', not 'gpu'",
    ),
    "insert a function of nothing": (
        lambda _: relu_of(2).interject("0", lambda: X), InputError,
        "<lambda> is called with the value of a node, and takes no argument",
    ),
    "bend by a function of nothing": (
        lambda _: relu_of(2).bend(lambda: X, "0"), InputError, "<lambda> is called with the value",  # type: ignore[arg-type, misc]
    ),
    "trace a tensor": (
        lambda _: bt.trace(X, X), InputError, "a model has to be callable; a Tensor is not",  # type: ignore[arg-type]
    ),
    "harvest a tensor": (
        lambda out: harvested(relu_of(2), "0", out, X), InputError,
        r"a loader yields batches, and a Tensor is one batch: pass \[batch\]",
    ),
    "harvest a batch of a tokenizer": (
        lambda out: harvested(relu_of(2), "0", out, {"input": X}), InputError, "is one batch",
    ),
    "insert a tensor": (
        lambda _: relu_of(2).interject("0", X), InputError,
        "not a Tensor; .*ReplacePatch.* puts a tensor there",
    ),
    "insert at a function": (
        lambda _: relu_of(2).interject(torch.relu, "0"), InputError,
        r"not '0'; the location comes first: interject\(where, what\)",
    ),
    "insert a class": (
        lambda _: relu_of(2).interject("0", bt.patches.ZeroPatch), InputError,
        r"not the class ZeroPatch; pass an object of it, as in ZeroPatch\(...\)",
    ),
    "patch by a tensor": (
        lambda _: relu_of(2).patch({"0": X}), InputError,
        r"'0': a Tensor is not a patch; write ReplacePatch\(value\)",
    ),
    "patch by a function": (
        lambda _: relu_of(2).patch({"0": torch.relu}), InputError, "write CustomPatch",
    ),
    "patch by a list of pairs": (
        lambda _: relu_of(2).patch([("0", bt.patches.ZeroPatch())]), InputError,
        "patches have to be a dict from node paths to patches",
    ),
    "save by a bool": (
        lambda _: bt.trace(torch.relu, X, save=True), InputError,
        "save= takes names of layers, not True: 'all' saves everything",
    ),
    "stop by a bool": (
        lambda _: bt.trace(torch.relu, X, stop_after=True), InputError,
        "stop_after= takes names of layers, not True: None runs to the end",
    ),
    "misspell an option of trace": (
        lambda _: bt.trace(torch.relu, X, save="rellu"), bt.errors.LayerKeyError,
        "save: there is no layer, module or node path 'rellu'; similar names: relu, relu_1",
    ),
    "draw a module that is not there": (
        lambda _: bt.trace(nn.Sequential(nn.ReLU()), X).draw(within="layer"), InputError,
        "no module 'layer' was called in this run; it called 0",
    ),
    "steps by a word": (
        lambda _: bt.trace(torch.relu, X).flow_steps.of("if"), InputError,  # type: ignore[arg-type]
        r"of\(\) takes classes of flow steps, such as bt.flow.LoopFlowStep, not 'if'",
    ),
    "fold by a word": (
        lambda _: bt.trace(torch.relu, X).to_fx(fold="modules"), InputError,  # type: ignore[arg-type]
        "fold= takes a bool, or a predicate of modules, not 'modules'",
    ),
    "write a trace as DOT": (
        lambda _: bt.graph.to_dot(bt.trace(torch.relu, X)), InputError,  # type: ignore[arg-type]
        r"a mirror is a graph such as bt.trace\(model, x\).graph, not",
    ),
    "the costs of a model": (
        lambda _: bt.workflows.cost(nn.ReLU()), InputError, f"{OF_RUNS}, not",  # type: ignore[arg-type]
    ),
    "the hot path of a model": (
        lambda _: bt.workflows.hot_path(nn.ReLU()), InputError, OF_RUNS,  # type: ignore[arg-type]
    ),
    "the dead ends of a model": (
        lambda _: bt.workflows.dead_ends(relu_of(2)), InputError, OF_RUNS,  # type: ignore[arg-type]
    ),
    "the recomputation of a model": (
        lambda _: bt.workflows.recomputation(nn.ReLU()), InputError, OF_RUNS,  # type: ignore[arg-type]
    ),
    "the facets of a model": (
        lambda _: bt.workflows.facets(nn.ReLU()), InputError,  # type: ignore[arg-type]
        r"facets are found in a run, bt.trace\(model, x\), not ReLU\(\)",
    ),
    "a configuration that is not there": (
        lambda _: relu_of(2).bending.set_config("loud"), InputError,
        "there is no configuration 'loud'; there are none",
    ),
    "a heat map of two models": (
        lambda _: bt.diff(nn.ReLU(), nn.ReLU()), InputError, "is a ReLU, not a trace",  # type: ignore[arg-type]
    ),
    "rows of a scalar": (
        lambda _: patched_rows(lambda x: x.sum(), "sum"), bt.errors.PatchError,
        "ZeroPatch at 'sum': rows= needs a tensor with rows, not a scalar",
    ),
    "rows beyond the batch": (
        lambda _: patched_rows(torch.relu, "relu", 9), bt.errors.PatchError,
        r"rows=\[9\], but the value has 2 rows",
    ),
    "the last call": (
        lambda _: relu_of(2).interject("0", torch.zeros_like, calls=-1), InputError,
        "calls= counts from 0, since nobody knows the last call: -1",
    ),
    "scan a function": (
        lambda _: bt.workflows.scan(torch.relu, X), InputError, "scan needs a module, whose weigh",
    ),
    "call the model in an insertion": (
        lambda _: calls_itself(), bt.errors.InterjectionError,
        "function at 'relu' calls the BendedModule that it is inserted in, .* `bended.model`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said(mistake: str, tmp_path: Path) -> None:
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call(tmp_path / "out")


def test_a_harvest_that_failed_at_once_can_be_corrected(tmp_path: Path) -> None:
    bended, images = relu_of(2, 3, 4, 4), [torch.rand(2, 3, 4, 4)]
    with pytest.raises(InputError, match="pass feature_axis=1"):
        harvested(bended, "0", tmp_path, images, reduce="mean")
    found = harvested(bended, "0", tmp_path, images, reduce="mean", feature_axis=1)
    assert torch.equal(found["0"][:], images[0].mean((2, 3)))
    with pytest.raises(InputError, match="contains another harvest: feature_axis= was 1"):
        harvested(bended, "0", tmp_path, images, reduce="mean", feature_axis=-1)


@pytest.mark.parametrize("where", ["reluu", re.compile("relu+x")])
def test_a_wrong_name_from_before_the_first_call_says_how_it_is_removed(where: Any) -> None:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU()))
    bended.interject("0", lambda value: value + 1)
    bended.interject(where, torch.zeros_like)
    for _ in range(2):  # before and after a run could show the name
        with pytest.raises(bt.errors.NodePathError) as info:
            bended(X)
        (note,) = info.value.__notes__
        assert note.startswith("<insertion of zeros_like at ")
        assert note.endswith("calls raise until it is removed: bended.insertions[1].remove()")
    eval(note.rpartition(": ")[2])
    assert torch.equal(bended(X), X + 1)


def test_heads_are_found_where_they_are() -> None:
    for site, options in (
        ("blocks.0.attn.out", {"at": "input"}),
        ("blocks.0.attn.qkv", {"heads": 6}),  # those of queries, keys and values
        ("blocks.0.attn.reshape", {}),
        ("blocks.0.attn.softmax", {"head_axis": 1}),
    ):
        assert patched_heads(site, **options).heads == tuple(range(options.get("heads", HEADS)))  # type: ignore[arg-type, operator]


def test_patches_that_are_never_applied_are_told() -> None:
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    bended(torch.ones(2))
    with pytest.warns(NeverFiredWarning, match=r"patches .*ZeroPatch.* were never applied"):
        bended.patch({"relu": bt.patches.ZeroPatch()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with bended.patch({"relu": bt.patches.ZeroPatch()}):
            assert not bended(torch.ones(2)).any()

        @bended.patch({"relu": bt.patches.ZeroPatch()})
        def patched() -> Tensor:
            return bended(torch.ones(2))

        assert not patched().any()
        del patched
        gc.collect()


@pytest.mark.parametrize("is_live", [False, True])
def test_nothing_is_inserted_while_the_model_is_called(is_live: bool) -> None:
    class Inserts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_live:
                x.detach().numpy().tobytes()
            if self.training:
                bended.interject("relu", lambda value: value * 10)
            return x.relu()

    bended = bt.BendedModule(Inserts().eval())
    for _ in range(3):
        bended(torch.ones(2))
    bended.train()
    for _ in range(3):
        with pytest.raises(
            InputError,
            match="insertions cannot be added while the model is running",
        ):
            bended(torch.ones(2))
    assert not bended.insertions
    bended.eval()
    bended.interject("relu", lambda value: value * 10)
    assert torch.equal(bended(torch.ones(2)), torch.full((2,), 10.0))


def test_an_insertion_may_be_made_in_another_model_of_the_call() -> None:
    inner = bt.BendedModule(lambda x: x.relu())

    def outer(x: Tensor) -> Tensor:
        with inner.interject("relu", lambda value: value + 1, allow_none=True):
            return inner(x)

    inner(torch.ones(2))
    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 2.0))


def test_a_node_of_the_tree_of_another_model_is_refused() -> None:
    def one(x: Tensor) -> Tensor:
        return x.relu() * 2

    def other(x: Tensor) -> Tensor:
        y = x.exp()
        return y + y.relu()

    bended = bt.BendedModule(one)
    bended(torch.ones(2))
    node = bt.trace(other, torch.ones(2)).tree.relu
    with pytest.raises(InputError, match=r"'relu' is at .* in the run of this node, and"):
        bended.interject(node, torch.zeros_like)
    own = bt.trace(one, torch.ones(2)).tree.relu
    with bended.interject(own, torch.zeros_like):
        assert not bended(torch.ones(2)).any()


def test_a_module_of_the_tree_of_another_model_is_refused() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU(), nn.Tanh()))
    bended(torch.ones(2))
    tree = bt.trace(nn.Sequential(nn.Tanh(), nn.ReLU()), torch.ones(2)).tree
    with pytest.raises(InputError, match=r"'sub_0' is a Tanh in the run .* and a ReLU in this"):
        bended.interject(tree.sub_0, torch.zeros_like)


def test_everything_inserted_can_be_taken_away_at_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    bended = bt.BendedModule(model)
    x = torch.ones(1, 2)
    plain = bended(x)
    bended.interject("1", torch.ones_like)
    bended.bend(bt.bends.Scale(2.0), "0$", "0.weight")
    bt.workflows.steer(bended, torch.ones(2), "0")
    bended.reset()
    assert bended.insertions  # bends are reset, and nothing else
    bended.remove_all()
    assert not bended.insertions
    assert torch.equal(bended(x), plain)
    bended.remove_all()


class Narrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def narrow(value: torch.Tensor) -> torch.Tensor:
    return value[:, :2]


def test_an_error_says_which_insertion_changed_a_shape() -> None:
    bended = bt.BendedModule(Narrowed())
    x = torch.ones(3, 4)
    note = f"`narrow` (test_mistakes.py:{narrow.__code__.co_firstlineno}) at `relu` turned "
    for _ in range(3):  # traced, recorded with the insertion, replayed
        bended(x)
        with bended.interject("relu", narrow), pytest.raises(RuntimeError, match="shapes") as info:
            bended(x)
        assert info.value.__notes__ == [f"{note}(3, 4) into (3, 2)"]
    with bended.interject("relu", lambda value: value.double()):
        with pytest.raises(RuntimeError, match="dtype") as info:
            bended(x)
        (said,) = info.value.__notes__
        assert said.endswith("at `relu` turned torch.float32 (3, 4) into torch.float64 (3, 4)")
    with bended.interject("second.input", narrow), pytest.raises(RuntimeError) as info:
        bended(x)
    (said,) = info.value.__notes__
    assert said == f"{note.replace('`relu`', '`second.input`')}(3, 4) into (3, 2)"
    with bended.interject("relu", lambda value: value * 2), pytest.raises(RuntimeError) as info:
        bended(torch.ones(3, 5))
    assert not hasattr(info.value, "__notes__")  # nothing changed a shape in that call
    torch.testing.assert_close(bended(x), bended._model(x), rtol=0, atol=0)


def test_an_error_says_which_activations_were_passed() -> None:
    bended = bt.BendedModule(Narrowed())
    bended(X)
    with pytest.raises(RuntimeError, match="shapes") as info:
        bended.from_activations({"relu": torch.ones(2, 5)})
    assert info.value.__notes__ == ["the activations that were passed: 'relu' of shape (2, 5)"]


def test_a_misspelt_option_of_trace_is_named() -> None:
    with pytest.raises(TypeError, match="saev") as info:
        bt.trace(Narrowed(), torch.ones(1, 4), saev="all")  # type: ignore[call-arg]
    assert info.value.__notes__ == [
        "saev= was passed to the model; did you mean save=, an option of bendtrace.trace?"
    ]
    with pytest.raises(TypeError, match="colour") as info:
        bt.trace(Narrowed(), torch.ones(1, 4), colour="red")  # type: ignore[call-arg]
    assert not hasattr(info.value, "__notes__")


def test_a_misspelt_attribute_is_looked_for_on_the_bended_module() -> None:
    bended = bt.BendedModule(Narrowed())
    with pytest.raises(AttributeError, match="traec") as info:
        _ = bended.traec
    assert info.value.name == "traec"
    assert info.value.obj is bended  # from whose attributes Python makes its suggestion


def test_a_bended_module_draws_its_paths(tmp_path: Path) -> None:
    bended = bt.BendedModule(Narrowed())
    bended(torch.ones(1, 4))
    assert bended.draw(tmp_path / "paths.svg").svg == bended.tree.draw().svg
    assert (tmp_path / "paths.svg").read_text().startswith("<svg")
    with pytest.raises(bt.errors.InputError):
        bended.draw(tmp_path / "paths.gif")
    assert not (tmp_path / "paths.gif").exists()


def test_show_model_graph_draws_one_run(tmp_path: Path) -> None:
    model, x = Narrowed(), torch.ones(1, 4)
    for option in ("rolled", "unrolled"):
        path = tmp_path / f"{option}.svg"
        picture = bt.show_model_graph(model, x, vis_opt=option, vis_outpath=path)
        assert picture.svg == bt.trace(model, x).draw(rolled=option == "rolled").svg
        assert "relu" in path.read_text()
    with pytest.raises(bt.errors.InputError, match="vis_opt has to be 'rolled' or 'unrolled'"):
        bt.show_model_graph(model, x, vis_opt="none")  # type: ignore[arg-type]
