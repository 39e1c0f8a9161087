"""Path patching, against values written out by hand and against activation patching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import NodePathError, SiteError
from bendtrace.research.patching import activation_patching
from bendtrace.research.paths import path_patching
from bendtrace.rewriting import between
from tests.causal_models import (
    CLEAN,
    CORRUPTED,
    HEADS,
    WIDTH,
    gpt2,
    halving,
    halving_by_hand,
    inputs_of_halving,
    kept,
    logit_difference,
    pre_hooked,
    transformer,
    with_part,
)
from tests.shares import some


class Residual(nn.Module):
    """Two steps on a stream, and a reading of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Add both, and read."""
        x = x + torch.tanh(self.a(x))
        x = x + torch.tanh(self.b(x))
        return self.c(x)


def _residual() -> Residual:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Residual()


X, Y = torch.tensor([[1.0, -0.5, 2.0]]), torch.tensor([[0.2, 1.5, -1.0]])


def _first(output: Tensor) -> Tensor:
    return output[0, 0]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_contributions_along_paths_are_those_written_out_by_hand(direction: Any) -> None:
    m = _residual()
    other, base = (X, Y) if direction == "denoise" else (Y, X)
    tanh = torch.tanh
    first = base + tanh(m.a(base))  # the stream after the first step, as it is
    changed = base + tanh(m.a(other))  # and with the other output of `a`
    through_b = first + tanh(m.b(changed))
    around_b = changed + tanh(m.b(first))
    both = changed + tanh(m.b(changed))

    def found(receiver: str, **options: Any) -> float:
        made = path_patching(m, X, Y, ["a"], [receiver], _first, direction=direction, **options)
        assert made.values.shape == (1, 1)
        return made.values.item()

    assert found("b", paths="all") == _first(m.c(through_b)).item()
    assert found("c", paths="all") == _first(m.c(both)).item()
    assert found("c", paths="all", frozen="b") == _first(m.c(around_b)).item()
    assert found("output", paths="all") == _first(m.c(both)).item()
    assert found("output", paths="all", frozen=["b"]) == _first(m.c(around_b)).item()
    round_, through = (
        ["a", "tanh", "add", ".add_1", "c"],
        ["a", "tanh", "add", "b", ".tanh_1", ".add_1", "c"],
    )
    assert found("c", paths=[round_]) == _first(m.c(around_b)).item()
    assert found("c", paths=[through]) == _first(m.c(through_b)).item()
    assert found("c", paths=[round_, through]) == _first(m.c(both)).item()
    assert found("b", paths=[["a", "tanh", "add", "b"]]) == _first(m.c(through_b)).item()
    assert len({_first(m.c(value)).item() for value in (through_b, around_b, both, first)}) == 4


def test_a_direct_edge_is_what_between_puts_on_it() -> None:
    model = _residual()
    bended = bt.BendedModule(model)
    given = bended.get_activations("add", args=(X,))["add"]
    found = path_patching(bended, X, Y, ["add"], ["b", ".add_1", ["b", ".add_1"]], _first)
    expected = []
    for receivers in (["b"], [".add_1"], ["b", ".add_1"]):
        handles = [between(bended, "add", name, lambda _: given) for name in receivers]
        expected.append(_first(bended(Y)).item())
        for handle in handles:
            handle.remove()
    assert found.values[0].tolist() == expected
    assert found.edges.tolist() == [[1, 1, 2]]
    assert found.receivers == ("b", ".add_1", "b + .add_1")
    assert len(set(expected)) == 3
    # All that uses the value being patched, it is as if the value itself was.
    whole = activation_patching(bended, X, Y, "add", _first)
    assert found.values[0, 2].item() == whole.values.item()


@pytest.mark.more
@pytest.mark.parametrize("model", [transformer(), gpt2(), gpt2(use_cache=False)])
@pytest.mark.parametrize("direction", some(["denoise", "noise"], 2))
def test_all_paths_to_the_output_are_activation_patching(model: nn.Module, direction: Any) -> None:
    is_gpt2 = hasattr(model, "transformer")
    names = (
        ["transformer.wte", "transformer.h.0.attn", "transformer.h.0.mlp", "transformer.h.1"]
        if is_gpt2
        else ["embed", "blocks.0.attn", "blocks.0.mlp", "blocks.1"]
    )
    bended = bt.BendedModule(model)
    with torch.no_grad():
        whole = activation_patching(
            bended, CLEAN, CORRUPTED, names, logit_difference, direction=direction
        )
        found = path_patching(
            bended, CLEAN, CORRUPTED, names, "output|logits" if is_gpt2 else "output",
            logit_difference, paths="all", direction=direction,
        )  # fmt: skip
    assert torch.equal(found.values, whole.values)
    assert torch.equal(found.effect, whole.effect)
    assert (found.clean, found.corrupted) == (whole.clean, whole.corrupted)


@pytest.mark.more
def test_heads_are_senders_by_what_the_output_projection_is_given() -> None:
    model = transformer()
    name = "blocks.0.attn.out"
    options: dict[str, Any] = {"heads": HEADS, "at": "input"}
    whole = activation_patching(model, CLEAN, CORRUPTED, name, logit_difference, **options)
    found = path_patching(
        model, CLEAN, CORRUPTED, name, "output", logit_difference, paths="all", **options
    )
    assert torch.equal(found.values, whole.values)
    # From each head to the attention of the next block, by the residual stream alone.
    found = path_patching(
        model, CLEAN, CORRUPTED, name, ["blocks.1.attn", "blocks.1.mlp"], logit_difference,
        paths="all", frozen=["blocks.0.mlp", "blocks.1.attn"], **options,
    )  # fmt: skip
    first, second = model.blocks
    given, own = (kept(model, first.attn.out, tokens, inputs=True) for tokens in (CLEAN, CORRUPTED))
    x = kept(model, first, CORRUPTED, inputs=True)
    width = WIDTH // HEADS
    for head in range(HEADS):
        index = (..., slice(head * width, (head + 1) * width))
        stream = x + first.attn.out(with_part(own, index, given))
        stream = stream + kept(model, first.mlp, CORRUPTED)
        with pre_hooked(second.attn, lambda _, stream=stream: second.ln_1(stream)):
            expected = logit_difference(model(CORRUPTED)).item()
        assert found.values[0, 0, head].item() == expected
        later = stream + kept(model, second.attn, CORRUPTED)
        with pre_hooked(second.mlp, lambda _, later=later: second.ln_2(later)):
            expected = logit_difference(model(CORRUPTED)).item()
        assert found.values[0, 1, head].item() == expected
    assert found.values.shape == (1, 2, HEADS)


@pytest.mark.more
def test_gpt2_from_attention_to_attention_by_the_residual_stream() -> None:
    model = gpt2()
    first, second = model.transformer.h
    found = path_patching(
        bt.BendedModule(model), {"input_ids": CLEAN}, {"input_ids": CORRUPTED},
        ["transformer.h.0.attn"], ["transformer.h.1.attn"], logit_difference, paths="all",
        frozen=["transformer.h.0.mlp"],
    )  # fmt: skip
    stream = kept(model, first, CORRUPTED, inputs=True) + kept(model, first.attn, CLEAN)
    stream = stream + kept(model, first.mlp, CORRUPTED)
    with pre_hooked(second.ln_1, lambda value: value.clone()):
        plain = logit_difference(model(CORRUPTED)).item()
    changed = second.ln_1(stream)
    normal = second.attn.forward

    def attend(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return normal(changed, *args, **kwargs)

    second.attn.forward = attend
    expected = logit_difference(model(CORRUPTED)).item()
    del second.attn.forward
    assert found.values.item() == expected != plain


@pytest.mark.more
def test_a_module_on_a_path_stands_for_all_ways_through_it() -> None:
    model = transformer()
    found = path_patching(
        model, CLEAN, CORRUPTED, "embed", "blocks.0.attn", logit_difference,
        paths=[["embed", "add", "blocks.0.ln_1", "blocks.0.attn"]],
    )  # fmt: skip
    block = model.blocks[0]
    x = kept(model, model.embed, CLEAN) + kept(model, model.place, CORRUPTED)
    with pre_hooked(block.attn, lambda _: block.ln_1(x)):
        assert found.values.item() == logit_difference(model(CORRUPTED)).item()
    both = path_patching(
        model, CLEAN, CORRUPTED, "blocks.0", "norm", logit_difference,
        paths=[["blocks.0", "blocks.1", "norm"]],
    )  # fmt: skip
    whole = activation_patching(model, CLEAN, CORRUPTED, "blocks.0", logit_difference)
    assert torch.equal(both.values, whole.values)


def test_branches_stay_those_of_the_run_until_the_receiver() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    clean, base = inputs["down", 0], inputs["up", 2]
    given = model.start(clean)
    # The steps and the branch are those of the run that is patched.
    state = given
    for _ in range(2):
        state = torch.tanh(model.step(state)) * 0.9
    metric = lambda out: out[0, 0]  # noqa: E731
    found = path_patching(
        model, clean, base, "start", ["relu", "up", "output"], metric, paths="all"
    )
    expected = model.up(torch.relu(state))[0, 0].item()
    assert found.values[0].tolist() == [expected] * 3
    # From the receiver on the model goes its own way.
    early = path_patching(model, clean, base, "start", "step:1", metric)
    own: list[str] = []

    def put(name: str, number: int, value: Tensor) -> Tensor:
        own.append(name)
        return model.step(given) if (name, number) == ("step", 0) else value

    assert early.values.item() == metric(halving_by_hand(model, base, put)).item()


def test_passes_of_a_node_are_senders_and_receivers_by_themselves() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x) * 2 + x
        return x

    clean, base = torch.tensor([0.5, 1.0]), torch.tensor([-0.3, 0.1])

    def states(x: Tensor) -> list[Tensor]:
        found = [x]
        for _ in range(3):
            found.append(torch.tanh(found[-1]) * 2 + found[-1])
        return found

    c, k = states(clean), states(base)
    found = path_patching(model, clean, base, "tanh:2", ["mul:2", "tanh:3"], torch.sum, paths="all")
    second = torch.tanh(c[1]) * 2 + k[1]
    assert found.values[0, 0].item() == (torch.tanh(second) * 2 + second).sum().item()
    assert found.values[0, 1].item() == (torch.tanh(second) * 2 + k[2]).sum().item()


def test_ops_in_place_on_the_way_are_carried_out_on_copies() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.a(x)
            out += x
            out = torch.relu_(out)
            return self.b(out) * out

    torch.manual_seed(0)
    model = InPlace()
    for receiver in ("b", "mul", "output"):
        found = path_patching(model, X, Y, "a", receiver, _first, paths="all")
        plain, changed = torch.relu(model.a(Y) + Y), torch.relu(model.a(X) + Y)
        expected = {
            "b": model.b(changed) * plain, "mul": model.b(changed) * changed,
            "output": model.b(changed) * changed,
        }[receiver]  # fmt: skip
        assert found.values.item() == _first(expected).item()
        assert found.corrupted == _first(model(Y)).item()


def test_what_is_added_in_place_is_added_once() -> None:
    def model(x: Tensor) -> Tensor:
        out = x * 2
        out += torch.sin(x)
        return out * 3

    for receiver in (".mul_1", "output"):
        found = path_patching(model, X, Y, "sin", receiver, _first, paths="all")
        assert found.values.item() == _first((Y * 2 + torch.sin(X)) * 3).item()


def test_random_numbers_on_the_way_are_those_of_the_run() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
    ).train()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    clean, base = torch.randn(4, 3), torch.randn(4, 3)
    state = torch.get_rng_state()
    bended = bt.BendedModule(model)
    whole = activation_patching(bended, clean, base, "0", _first)
    found = path_patching(bended, clean, base, "0", ["1", "3", "output"], _first, paths="all")
    assert found.values[0].tolist() == whole.values[0].tolist() * 3
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert bended.insertions == ()


def test_elements_of_what_a_node_gives_are_edges() -> None:
    def model(x: Tensor) -> Tensor:
        q, k = (x * 2).chunk(2, dim=-1)
        return (q.exp() * k).sum(-1)

    clean, base = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -1.0]])
    found = path_patching(
        model, clean, base, ["chunk|sub_0", "mul"], ["exp", ".mul_1", "chunk"], torch.sum,
        paths="all",
    )  # fmt: skip
    q, k, other = base[0, 0] * 2, base[0, 1] * 2, clean[0] * 2
    assert found.values[0, 0].item() == (other[0].exp() * k).item()
    assert found.values[0, 1].item() == (other[0].exp() * k).item()
    assert found.values[0, 2].item() == (q.exp() * k).item()  # no path leads there
    assert found.edges[0, 2] == 0
    assert found.values[1].tolist() == [
        (other[0].exp() * k).item(), (other[0].exp() * other[1]).item(),
        (other[0].exp() * other[1]).item(),
    ]  # fmt: skip
    along = path_patching(
        model, clean, base, "mul", ".mul_1", torch.sum, paths=[["mul", "chunk", ".mul_1"]]
    )
    assert along.values.item() == (q.exp() * other[1]).item()
    direct = path_patching(model, clean, base, "chunk|sub_1", ".mul_1", torch.sum)
    assert direct.values.item() == (q.exp() * other[1]).item()


def test_numbers_that_come_out_of_tensors_go_along() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        return x * h.sum().item()

    for receiver in (".mul_1", "item", "output"):
        found = path_patching(
            model, torch.full((3,), 5.0), torch.ones(3), "mul", receiver, torch.sum, paths="all"
        )
        assert found.values.item() == 90.0
        assert found.corrupted == 18.0


def test_inputs_are_senders() -> None:
    model = _residual()
    found = path_patching(model, X, Y, "x", ["a", "add"], _first)
    stream = Y + torch.tanh(model.a(X))
    assert found.values[0, 0].item() == _first(model.c(stream + torch.tanh(model.b(stream)))).item()
    stream = X + torch.tanh(model.a(Y))
    assert found.values[0, 1].item() == _first(model.c(stream + torch.tanh(model.b(stream)))).item()


def _item(x: Tensor) -> Tensor:
    h = x * 2
    return x * (h.sum().item() + 1)


def _assigned(x: Tensor) -> Tensor:
    h = x * 2
    out = torch.zeros(3)
    out[1:] = h[1:]
    return out.exp()


def _assigned_before(x: Tensor) -> Tensor:
    h = x * 2
    out = torch.zeros(3)
    out[1:] = h[1:]
    return out.exp().cos()


def _viewed(x: Tensor) -> Tensor:
    h = x * 2
    rows = x.clone()
    rows.view(-1).add_(h)
    return rows.exp()


@pytest.mark.parametrize(
    ("model", "receiver", "said"),
    [
        (_item, ".mul_1", "Python number, which cannot be computed on the side; choose"),
        (_assigned, "exp", "a memory edge"),
        (_assigned_before, "cos", "a memory edge"),
        (_assigned_before, "output", "a memory edge"),
        (_viewed, "exp", "a memory edge"),
    ],
)
def test_what_cannot_be_carried_out_aside_is_refused(model: Any, receiver: str, said: str) -> None:
    bended = bt.BendedModule(model)
    with pytest.raises(SiteError, match=said) as raised:
        path_patching(
            bended, torch.ones(3), torch.zeros(3), "mul", receiver, torch.sum, paths="all"
        )
    assert "test_workflows_paths.py" in str(raised.value)
    assert bended.insertions == ()


def test_writes_that_lead_nowhere_are_no_hindrance() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        out = torch.zeros(3)
        first = h.exp() + 1
        out[1:] = h[1:]
        return first.sum() + out.sin().sum()

    clean, base = torch.ones(3), torch.zeros(3)
    found = path_patching(model, clean, base, "mul", "add", torch.sum, paths="all")
    assert found.values.item() == ((clean * 2).exp() + 1).sum().item()
    with pytest.raises(SiteError, match="a memory edge"):
        path_patching(model, clean, base, "mul", [".add_1"], torch.sum, paths="all")
    found = path_patching(
        model, clean, base, "mul", ".add_1", torch.sum, paths="all", frozen=["sin"]
    )
    assert found.values.item() == ((clean * 2).exp() + 1).sum().item()


def test_what_is_not_there_is_told_of() -> None:
    model = _residual()
    bended = bt.BendedModule(model)
    with pytest.raises(SiteError, match=r"no edge .*'a'.*'c'.*paths='all'"):
        path_patching(bended, X, Y, "a", "c", _first)
    with pytest.raises(SiteError, match="the mirror has no edge from 'tanh' to 'c'"):
        path_patching(bended, X, Y, "a", "c", _first, paths=[["a", "tanh", "c"]])
    with pytest.raises(SiteError, match="does not begin with one of the senders"):
        path_patching(bended, X, Y, "a", "c", _first, paths=[["b", ".tanh_1"]])
    with pytest.raises(NodePathError):
        path_patching(bended, X, Y, "a", "d", _first)
    none = path_patching(bended, X, Y, "b", "a", _first, paths="all")
    assert none.values.item() == none.corrupted
    assert none.edges.item() == 0
    own = bended.interject("tanh", lambda value: value * 2)
    with pytest.raises(SiteError, match="an insertion in the model"):
        path_patching(bended, X, Y, "a", "b", _first, paths="all")
    assert bended.insertions == (own,)


def test_runs_that_differ_raise_or_are_nan() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    clean, base = inputs["up", 1], inputs["down", 1]
    metric = lambda out: out[0, 0]  # noqa: E731
    with pytest.raises(SiteError, match="'relu': relu: the corrupted run did not reach it"):
        path_patching(model, clean, base, "relu", "down", metric, paths="all")
    found = path_patching(
        model, clean, base, ["relu", "start"], "down", metric, paths="all", missing="nan"
    )
    assert found.values.isnan().flatten().tolist() == [True, False]
    with pytest.raises(SiteError, match="did not reach 'up'"):
        path_patching(model, clean, base, "start", "up", metric, paths="all")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"paths": "some"}, "paths="),
        ({"paths": []}, "paths="),
        ({"paths": [["a"]]}, "a path has to be a sequence"),
        ({"paths": ["a", "b"]}, "a path has to be a sequence"),
        ({"frozen": "b"}, "frozen="),
        ({"direction": "left"}, "direction="),
        ({"senders": []}, "senders="),
        ({"receivers": []}, "receivers="),
        ({"receivers": [["output", "b"]], "paths": "all"}, "combined with other receivers"),
        ({"heads": 2}, "not a multiple of 2"),
        ({"metric": None}, "metric="),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    bended = bt.BendedModule(_residual())
    given: dict[str, Any] = {"senders": "add", "receivers": "b", "metric": _first} | options
    with pytest.raises(bt.BendtraceError, match=said):
        path_patching(bended, X, Y, **given)
    assert bended.insertions == ()


def test_results_are_tables() -> None:
    found = path_patching(_residual(), X, Y, ["add", "x"], ["b", "add"], _first, paths="all")
    assert repr(found).startswith("PathPatching (denoise): clean ")
    frame = found.to_pandas()
    assert list(frame.columns) == ["sender", "receiver", "value", "effect"]
    assert frame["value"].tolist() == found.values.flatten().tolist()
