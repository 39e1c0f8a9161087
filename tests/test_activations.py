"""Handing activations out, and running the rest of a model from activations that are given."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace import node_selector
from bendtrace.errors import (
    DivergenceError,
    InputError,
    InterjectionError,
    NeverFiredWarning,
    NodePathError,
)
from bendtrace.insert.activations import get_activations, inputs_of
from bendtrace.insert.leaves import assemble, take_apart
from bendtrace.insert.resume_point import from_activations, parse_replacements
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.promise import bits, footprint, state
from tests.shares import some


class Net(nn.Module):
    """A trunk (`fc1`, `bn`, `drop`) and a head (`relu`, `bn2`, `fc2`)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.bn2 = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 3)

    def trunk(self, x: Tensor) -> Tensor:
        return self.drop(self.bn(self.fc1(x)))

    def head(self, h: Tensor) -> Tensor:
        return self.fc2(self.bn2(torch.relu(h)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class Branching(nn.Module):
    """Branches before and after what `act` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.big, self.small = nn.Linear(4, 2), nn.Linear(4, 2)

    def trunk(self, x: Tensor) -> Tensor:
        return self.up(x) if x.sum() > 0 else self.down(x)

    def head(self, h: Tensor) -> Tensor:
        if h.norm() > 2:
            return self.big(h) * h.norm()
        for _ in range(int(h.abs().max() * 10)):
            h = h * 1.5
        return self.small(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.trunk(x)))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor, n: int) -> Tensor:
        for _ in range(n):
            x = torch.relu(self.cell(x)) + x
        return x * 2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        return self.fc2(h) * mask + h


def made(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def traced(make: Callable[[], Any], *calls: Any, **kwargs: Any) -> bt.BendedModule:
    """Return a `BendedModule` that was called with each of some inputs."""
    bended = bt.BendedModule(made(make))
    for call in calls:
        bended(*(call if isinstance(call, tuple) else (call,)), **kwargs)
    return bended


def at(bended: bt.BendedModule, path: str) -> Any:
    """Return the node of a path in the latest run."""
    assert bended._dispatcher.latest is not None
    return bended._knowledge.run(bended._dispatcher.latest._recording).tree.resolve(
        path, leaf=False
    )


# Handing out


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("fc1", ["fc1"]),
        ("fc1.linear", ["fc1.linear"]),
        (["relu", "fc2"], ["relu", "fc2"]),
        (r"fc\d", ["fc1", "fc2"]),
        (re.compile("^bn2?$"), ["bn", "bn2"]),
        (nn.BatchNorm1d, ["bn", "bn2"]),
        (node_selector.Activations.is_relu, ["relu"]),
        (lambda node: node.path == "drop", ["drop"]),
        ("fc2.input", ["fc2.input"]),
        ("fc2.weight", ["fc2.weight"]),
        ("output", ["output"]),
    ],
)
def test_activations_are_what_the_nodes_gave(where: Any, paths: list[str]) -> None:
    bended, x = traced(Net, normal(5, 4)), normal(5, 4, seed=1)
    model = copy.deepcopy(bended.model)
    wanted: dict[str, Tensor] = {"fc2.weight": model.fc2.weight}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda *a, n=name: wanted.update({n: a[2], f"{n}.input": a[1][0]})
        )
    is_spliced = where not in (r"fc\d", "fc2.input", "fc2.weight", "output")
    for again in range(2):
        torch.manual_seed(5)
        wanted["output"] = model(x)
        wanted["fc1.linear"], wanted["relu"] = wanted["fc1"], wanted["bn2.input"]
        torch.manual_seed(5)
        found, output = get_activations(bended, where, (x,), return_output=True)
        assert list(found) == paths
        for path in paths:
            assert bits(found[path]) == bits(wanted[path].detach())
        assert bits(output) == bits(wanted["output"])
        assert state(bended.model) == state_without_hooks(model)
        assert bended.stats.replays == again + is_spliced
    assert bended.insertions == ()


def state_without_hooks(model: nn.Module) -> Any:
    model = copy.deepcopy(model)
    for module in model.modules():
        module._forward_hooks.clear()
    return state(model)


def test_a_module_of_the_model_says_where_too() -> None:
    bended = traced(Net, normal(5, 4))
    assert list(get_activations(bended, bended.model.fc1, (normal(5, 4),))) == ["fc1"]


def test_they_are_found_under_the_names_they_were_asked_for_by() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))

    bended, x = traced(make, normal(5, 2)), normal(5, 2)
    found = get_activations(bended, ["0.0", "0_1", "sub_1.linear", "0_0"], (x,))
    assert list(found) == ["sub_0.sub_0", "sub_0.sub_1", "sub_1.linear"]
    assert found["0.0"] is found["0_0"] is found["sub_0.sub_0"]
    assert bits(found["0_1"]) == bits(bended.model[0](x).detach())
    assert bits(get_activations(bt.BendedModule(make()), "0_0", (x,))["0_0"].shape) == bits(
        torch.Size([5, 3])
    )


def test_nothing_has_to_be_traced_before() -> None:
    model, x = made(Branching), normal(2, 4)
    for where in ("act", "ac.*", nn.ReLU, model.act):
        found = get_activations(bt.BendedModule(model), where, (x,))
        assert bits(found["act"]) == bits(model.act(model.trunk(x)).detach())


def test_snapshots_stay_as_they_are() -> None:
    def f(x: Tensor) -> Tensor:
        h = x * 2
        h.relu_()
        return h + 1

    bended = bt.BendedModule(f)
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    for _ in range(2):
        found, output = get_activations(bended, ["mul", "relu_"], (x,), return_output=True)
        assert bits(found["mul"]) == bits(torch.tensor([-2.0, 2.0]))
        assert bits(found["relu_"]) == bits(torch.tensor([0.0, 2.0]))
        found["relu_"].zero_()
        assert bits(output.detach()) == bits(torch.tensor([1.0, 3.0]))


def test_the_tensors_themselves_can_be_differentiated() -> None:
    bended, x = traced(Net, normal(5, 4)), normal(5, 4)
    bended.eval()
    found, output = get_activations(bended, "relu", (x,), detach=False, return_output=True)
    (gradient,) = torch.autograd.grad(output.sum(), found["relu"])
    model = copy.deepcopy(bended.model)
    h = torch.relu(model.trunk(x)).detach().requires_grad_()
    model.fc2(model.bn2(h)).sum().backward()
    assert bits(gradient) == bits(h.grad)


def test_snapshots_of_an_inference_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        found = get_activations(traced(Net, normal(5, 4)), "relu", (normal(5, 4),))
    assert not found["relu"].is_inference()


def test_each_pass_has_a_path() -> None:
    bended, x = traced(Loop, (normal(2, 3), 3)), normal(2, 3)
    values, wanted = x, []
    for _ in range(3):
        wanted.append(torch.relu(bended.model.cell(values)).detach())
        values = wanted[-1] + values
    found = get_activations(bended, "relu", (x, 3))
    assert list(found) == ["relu:1", "relu:2", "relu:3"]
    assert bits(found.passes("relu")) == bits([*found.values()]) == bits(wanted)
    with pytest.raises(NodePathError, match="'relu:1', 'relu:2', 'relu:3': name one"):
        found["relu"]
    for passes, kept in [
        ([0, -1], ["relu:1", "relu:3"]),
        (1, ["relu:2"]),
        (lambda number: number > 0, ["relu:2", "relu:3"]),
    ]:
        assert list(get_activations(bended, "relu", (x, 3), passes=passes)) == kept
    once = get_activations(bended, "relu", (x, 1))
    assert list(once) == ["relu"]
    assert once["relu:1"] is once["relu"]
    assert bits(once.passes("relu")) == bits(wanted[:1])
    named = get_activations(bended, ["relu:2", "cell:1.linear"], (x, 3))
    assert list(named) == ["relu:2", "cell.linear:1"]
    assert bits(named["relu:2"]) == bits(wanted[1])


def test_they_print_as_shapes_and_not_as_values() -> None:
    found = bt.BendedModule(nn.LSTM(3, 4)).get_activations("lstm", args=(torch.ones(5, 1, 3),))
    assert repr(found) == "<Activations: 1 value>\n  lstm: a tuple of 3"
    found = bt.BendedModule(nn.Linear(3, 40)).get_activations("linear", args=(torch.ones(5, 3),))
    assert repr(found) == "<Activations: 1 value>\n  linear: (5, 40) float32"
    assert "<th>linear</th><td>(5, 40) float32</td>" in found._repr_html_()


def test_a_container_is_handed_out_as_one() -> None:
    bended, x = traced(partial(nn.LSTM, 3, 4), normal(5, 2, 3)), normal(5, 2, 3)
    output, (h, c) = bended.model(x)
    found = get_activations(bended, ["output", "output|sub_1.sub_1"], (x,))
    assert bits(found["output"]) == bits((output.detach(), (h.detach(), c.detach())))
    assert bits(found["output|sub_1.sub_1"]) == bits(c.detach())


def test_a_call_that_does_not_come_by_says_why() -> None:
    bended = traced(Branching, torch.ones(1, 4))
    bended(-torch.ones(1, 4))
    line = Branching.trunk.__code__.co_firstlineno + 1
    with pytest.warns(NeverFiredWarning, match=rf"test_activations.py:{line} `x.sum\(\) > 0`"):
        found = get_activations(bended, ["down", "act"], (torch.ones(1, 4),))
    assert list(found) == ["act"]
    with pytest.raises(NodePathError, match="did not reach 'down'"):
        found["down"]
    assert list(get_activations(bended, "down", (torch.ones(1, 4),), allow_none=True)) == []
    with pytest.raises(
        bt.errors.NodePathError, match="there is no 'up' among these activations: 'act'"
    ):
        found["up"]
    with pytest.raises(bt.errors.NodePathError, match=r"found by name, not by 0: write one of"):
        found[0]


def test_a_path_that_is_not_known_is_traced_with_the_values_taken() -> None:
    bended = traced(Branching, torch.ones(1, 4))
    model = copy.deepcopy(bended.model)
    for x in (torch.full((1, 4), 20.0), -torch.ones(1, 4), torch.full((1, 4), 0.01)):
        found, output = get_activations(bended, "act", (x,), return_output=True)
        assert bits(found["act"]) == bits(model.act(model.trunk(x)).detach())
        assert bits(output) == bits(model(x))


def test_what_is_inserted_at_a_node_counts_or_not_as_asked() -> None:
    bended, x = traced(Residual, (normal(2, 4), torch.ones(2, 1))), normal(2, 4)
    h = torch.relu(bended.model.fc1(x)).detach()
    with (
        bended.interject("relu", lambda value: value * 2),
        bended.interject("fc2", lambda v: v + 1),
    ):
        args = x, torch.ones(2, 1)
        after = get_activations(bended, ["relu", "fc2"], args)
        before = get_activations(bended, ["relu", "fc2"], args, bended=False)
        assert len(bended.insertions) == 2
    assert bits(before["relu"]) == bits(h)
    assert bits(after["relu"]) == bits(h * 2)
    assert bits(before["fc2"]) == bits(bended.model.fc2(h * 2).detach())
    assert bits(after["fc2"]) == bits(bended.model.fc2(h * 2).detach() + 1)


def test_nothing_is_left_when_the_model_raises() -> None:
    def f(x: Tensor) -> Tensor:
        raise KeyError(x.relu())

    bended, before = bt.BendedModule(f), footprint()
    with pytest.raises(KeyError):
        get_activations(bended, "rel.*", (torch.ones(2),))
    assert bended.insertions == ()
    assert footprint() == before


def test_calls_of_other_threads_are_not_mixed_in() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return wait(torch.relu(x))

    @bt.opaque
    def wait(x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait(10)
        return x + 1

    bended = bt.BendedModule(Waiting())
    get_activations(bended, "relu", (torch.zeros(1),))
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(get_activations(bended, "relu", (torch.full((1,), 7.0),)))
    )
    thread.start()
    assert inside.wait(10)
    mine = get_activations(bended, "relu", (torch.full((1,), 3.0),))
    go_on.set()
    thread.join()
    assert bits(mine["relu"]) == bits(torch.full((1,), 3.0))
    assert bits(found[0]["relu"]) == bits(torch.full((1,), 7.0))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ([], "say which"),
        (torch.ones(2), "by keyword, or in args=(...)"),
        ("rlu", "did you mean 'relu'"),
        ("co.*", "selects no known node"),
        ("relu(", "not a regular expression"),
    ],
)
def test_what_means_nothing_is_refused(where: Any, message: str) -> None:
    bended = traced(Net, normal(5, 4))
    with pytest.raises((InputError, NodePathError), match=message):
        get_activations(bended, where, (normal(5, 4),))
    assert bended.insertions == ()


def test_passes_are_named_in_one_way() -> None:
    bended = traced(Loop, (normal(2, 3), 3))
    with pytest.raises(InputError, match="'relu:2' names passes"):
        get_activations(bended, "relu:2", (normal(2, 3), 3), passes=[0])


def test_arguments_of_the_model_are_not_taken_for_options() -> None:
    def f(x: Tensor, passes: int = 1) -> Tensor:
        return x * passes

    bended = bt.BendedModule(f)
    assert inputs_of(bended, {"passes": 2}, {}) == {"passes": 2}
    with pytest.raises(InputError, match="argument called passes"):
        inputs_of(bended, None, {"x": 1})
    other = bt.BendedModule(Net())
    assert inputs_of(other, {"y": 2}, {"x": 1}) == {"y": 2, "x": 1}
    with pytest.raises(InputError, match="'x' is given twice"):
        inputs_of(other, {"x": 2}, {"x": 1})


# Running the rest


def gradients(output: Tensor, h: Tensor, model: nn.Module) -> Any:
    wanted = [h, *model.parameters()]
    return bits(torch.autograd.grad(output.square().sum(), wanted, allow_unused=True))


@pytest.mark.parametrize("rows", [5, 3])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("node", ["drop", "relu", "bn2", "bn2.batch_norm", "fc2"])
def test_the_rest_is_what_a_model_split_by_hand_gives(
    node: str, with_inputs: bool, train: bool, rows: int
) -> None:
    torch.manual_seed(0)
    bended = bt.BendedModule(Net().train(train))
    bended(normal(5, 4))
    model = copy.deepcopy(bended.model)
    h = normal(rows, 3 if node == "fc2" else 8).requires_grad_()
    rest = {
        "drop": model.head, "relu": lambda h: model.fc2(model.bn2(h)), "bn2": model.fc2,
        "bn2.batch_norm": model.fc2, "fc2": lambda h: h,
    }[node]  # fmt: skip
    if node == "drop" and not train:  # it hands on what it is given, and relu alone uses that
        assert len(bended._dispatcher.latest._recording.tape.ops)
    before, stats = torch.get_rng_state(), str(bended.stats)
    for _ in range(2):
        wanted = rest(h)
        given = from_activations(bended, {node: h}, (normal(5, 4),) if with_inputs else ())
        assert bits(given) == bits(wanted)
        assert gradients(given, h, bended.model) == gradients(wanted, h, model)
        assert state(bended.model) == state(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(bended.stats) == stats


def test_what_only_leads_to_the_given_values_is_not_carried_out() -> None:
    bended = traced(Net, normal(5, 4))
    model, h = copy.deepcopy(bended.model), normal(5, 8)
    torch.manual_seed(3)
    given = from_activations(bended, {"bn": h}, (normal(5, 4),))
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    assert bits(given) == bits(model.head(model.drop(h)))  # the dropout after it draws
    assert torch.equal(torch.get_rng_state(), drawn)
    assert state(bended.model) == state(model)
    assert bended.model.bn.num_batches_tracked == 1
    assert bended.model.bn2.num_batches_tracked == 2


def test_activations_of_a_call_lead_to_its_output() -> None:
    bended, x = traced(Net, normal(5, 4)), normal(5, 4, seed=1)
    bended.eval()
    bended(x)
    for node in ("fc1", "fc1.linear", "bn", "relu", "bn2", "fc2", "output", ["fc1", "relu"]):
        found, output = get_activations(bended, node, (x,), return_output=True)
        assert bits(from_activations(bended, found).detach()) == bits(output.detach())


def test_what_else_is_needed_is_computed_from_the_arguments() -> None:
    bended = traced(Residual, (normal(2, 4), torch.ones(2, 1)))
    model, value = copy.deepcopy(bended.model), normal(2, 4, seed=3)
    x, mask = normal(2, 4, seed=4), torch.tensor([[1.0], [0.0]])
    h = torch.relu(model.fc1(x))
    assert bits(from_activations(bended, {"fc2": value}, (x, mask))) == bits(value * mask + h)
    wanted = model.fc2(value) * mask + value
    for call in [((x, mask), {}), ((), {"mask": mask})]:
        assert bits(from_activations(bended, {"relu": value}, *call)) == bits(wanted)
    several = {"fc2": value, "relu": h}
    assert bits(from_activations(bended, several, (), {"mask": mask})) == bits(value * mask + h)


def test_an_argument_that_is_needed_and_missing_is_named() -> None:
    bended = traced(Residual, (normal(2, 4), torch.ones(2, 1)))
    line = Residual.forward.__code__.co_firstlineno + 2
    with pytest.raises(InputError) as error:
        from_activations(bended, {"relu": normal(2, 4)})
    assert str(error.value) == (
        f"the argument mask is needed as well: 'mul' (test_activations.py:{line} "
        "`self.fc2(h) * mask`) uses it. Pass it, or an activation between"
    )
    with pytest.raises(InputError) as error:
        from_activations(bended, {"fc2": normal(2, 4)}, (), {"mask": torch.ones(2, 1)})
    assert str(error.value) == (
        f"the argument x is needed as well: 'add' (test_activations.py:{line} "
        f"`self.fc2(h) * mask + h`) uses 'relu' (test_activations.py:{line - 1} "
        "`torch.relu(self.fc1(x))`), which is computed from it. Pass it, or an activation between"
    )
    assert bended.stats.traces == 1


def test_a_branch_in_the_rest_is_taken_anew() -> None:
    bended = traced(Branching, torch.full((1, 4), 0.1))
    model = copy.deepcopy(bended.model)
    rounds, big = torch.full((1, 4), 0.71), torch.full((1, 4), 3.0)
    with pytest.raises(
        bt.errors.DivergenceError, match=r"if `h.norm\(\) > 2` at .*was False .* is True"
    ):
        from_activations(bended, {"act": big})
    assert bended.stats.traces == 1
    for h in (big, rounds, torch.full((1, 4), 0.01), big):
        value = h.clone().requires_grad_()
        wanted = model.head(value)
        given = from_activations(bended, {"act": value}, (torch.ones(1, 4),))
        assert bits(given) == bits(wanted)
        assert gradients(given, value, bended.model) == gradients(wanted, value, model)
        assert state(bended.model) == state(model)
    assert (bended.stats.traces, bended.stats.resumes, bended.stats.live) == (4, 3, 0)
    for h in (big, rounds):  # known by now, from whatever side they were found
        assert bits(from_activations(bended, {"act": h})) == bits(model.head(h))
    far = torch.full((1, 4), 20.0)
    assert bits(bended(far)) == bits(model(far))
    # The model's own runs take the way that is known from what it was given.
    assert (bended.stats.traces, bended.stats.replays) == (4, 1)
    assert bits(bended(far)) == bits(model(far))
    assert (bended.stats.traces, bended.stats.replays) == (4, 2)
    assert bits(bended(-far)) == bits(model(-far))


def test_a_branch_before_the_given_value_is_not_looked_at_without_arguments() -> None:
    bended, h = traced(Branching, torch.ones(1, 4)), torch.full((1, 4), 0.01)
    model = copy.deepcopy(bended.model)
    for x in (torch.ones(1, 4), -torch.ones(1, 4)):
        found = get_activations(bended, "act", (x,))
        bended(x)
        assert bits(from_activations(bended, found)) == bits(model(x))
    with pytest.raises(DivergenceError, match="range"):
        from_activations(bended, {"act": h})
    for x in (torch.ones(1, 4), -torch.ones(1, 4)):
        assert bits(from_activations(bended, {"act": h}, (x,))) == bits(model.head(h))


def test_a_branch_before_that_decides_about_the_rest_is_looked_at() -> None:
    def f(x: Tensor) -> Tensor:
        h = torch.tanh(x)
        flag = x.sum() > 0
        scale = 2 if flag else 3
        return torch.relu(h) * scale

    bended, h = bt.BendedModule(f), torch.ones(2)
    bended(torch.ones(2))
    for x in (torch.ones(2), -torch.ones(2), torch.ones(2)):
        assert bits(from_activations(bended, {"relu": h}, (x,))) == bits(
            h * (2 if x.sum() > 0 else 3)
        )
    assert bits(from_activations(bended, {"relu": h})) in (bits(h * 2), bits(h * 3))


def test_what_a_module_that_is_over_decided_is_not_looked_at() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.bn(x)
            return x if x.max() > 1 else x * 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    bended = traced(Model, normal(6, 4))
    model, h = copy.deepcopy(bended.model), normal(6, 4, seed=2)
    low = torch.zeros(6, 4)
    low[0] = -1  # so that nothing is above 1 in the first block
    assert bits(from_activations(bended, {"one": h}, (low,))) == bits(model.two(h))
    assert state(bended.model) == state(model)
    assert bended.stats.traces == 1


def test_one_pass_of_a_loop_can_be_given() -> None:
    bended = traced(Loop, (normal(2, 3), 3))
    model, x, value = copy.deepcopy(bended.model), normal(2, 3, seed=1), normal(2, 3, seed=2)

    def wanted(number: int, n: int) -> Tensor:
        y = x
        for i in range(n):
            y = (value if i == number else torch.relu(model.cell(y))) + y
        return y * 2

    for number in range(3):
        given = from_activations(bended, {f"relu:{number + 1}": value}, (x, 3))
        assert bits(given) == bits(wanted(number, 3))
    both = {"relu:1": value, "add:2": value}
    assert bits(from_activations(bended, both, (x, 3))) == bits(
        (torch.relu(model.cell(value)) + value) * 2
    )
    with pytest.raises(
        bt.errors.InputError, match="'relu' has 3 passes in this run: name one, as in"
    ):
        from_activations(bended, {"relu": value}, (), {"n": 3})
    last = from_activations(bended, {"relu:2": value, "add:1": x}, (), {"n": 3})
    y = value + x
    assert bits(last) == bits((torch.relu(model.cell(y)) + y) * 2)
    # Another number of rounds is another path.
    assert bits(from_activations(bended, {"relu:2": value}, (x, 2))) == bits(wanted(1, 2))
    with pytest.raises(bt.errors.InputError, match=r"did not reach 'relu:3'.*`range\(n\)` was 2"):
        from_activations(bended, {"relu:3": value}, (x, 2))


def test_of_several_values_those_count_that_matter() -> None:
    bended = traced(Net, normal(5, 4))
    bended.eval()
    bended(normal(5, 4))
    model = copy.deepcopy(bended.model)
    early, late = normal(5, 8, seed=1).requires_grad_(), normal(5, 8, seed=2).requires_grad_()
    given = from_activations(bended, {"bn": early, "relu": late})
    assert bits(given) == bits(model.fc2(model.bn2(late)))
    assert torch.autograd.grad(given.sum(), early, allow_unused=True) == (None,)


def test_parts_of_containers_and_whole_ones_can_be_given() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x.relu(), {"a": x.tanh(), "b": x.sigmoid()}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split, self.rnn = Split(), nn.LSTM(3, 3)

        def forward(self, x: Tensor) -> Any:
            one, two = self.split(x)
            y, (h, c) = self.rnn(one + two["a"] * two["b"])
            low, high = torch.stack([y.amin(0), h[0] + c[0]]).unbind()
            return low, {"high": high}

    bended, x, v = traced(Model, normal(5, 2, 3)), normal(5, 2, 3), normal(5, 2, 3, seed=1)
    model, (one, two) = copy.deepcopy(bended.model), Split()(x)
    state_of = normal(1, 2, 3, seed=3)

    def rest(one: Tensor, two: Any, rnn: Any = None) -> Any:
        y, (h, c) = model.rnn(one + two["a"] * two["b"]) if rnn is None else rnn
        low, high = torch.stack([y.amin(0), h[0] + c[0]]).unbind()
        return low, {"high": high}

    ran = model.rnn(one + two["a"] * two["b"])
    for given, wanted in [
        ({"split.output|sub_1.b": v}, rest(one, {**two, "b": v})),
        ({"split.output|sub_0": v}, rest(v, two)),
        ({"split": (v, {"a": v, "b": v})}, rest(v, {"a": v, "b": v})),
        ({"rnn": (v, (state_of, state_of))}, rest(one, two, (v, (state_of, state_of)))),
        ({"rnn.output|sub_1.sub_0": state_of}, rest(one, two, (ran[0], (state_of, ran[1][1])))),
        ({"output|sub_1.high": v}, (rest(one, two)[0], {"high": v})),
        ({"output": (v, {"high": x})}, (v, {"high": x})),
    ]:
        assert bits(from_activations(bended, given, (x,))) == bits(wanted), given
    assert bended.stats.traces == 1
    for wrong in [(v,), (v, {"a": v}), v, (v, {"a": v, "b": 3}), (v, {"a": v, "b": v, "c": x})]:
        with pytest.raises(InputError, match="'split'"):
            from_activations(bended, {"split": wrong})
        with pytest.raises(InterjectionError, match="from_activations at split"):
            from_activations(bended, {"split": wrong}, (x,))


def test_numbers_that_came_out_of_tensors_can_be_given() -> None:
    def f(x: Tensor) -> Tensor:
        n = x.sum().item()
        return x * 2 + n if n > 3 else x - n

    bended, x = bt.BendedModule(f), torch.ones(4)
    bended(x)
    assert bits(from_activations(bended, {"item": 5.0}, (x,))) == bits(x * 2 + 5)
    with pytest.raises(InputError, match="a float, but 5 was given"):
        from_activations(bended, {"item": 5})


def test_what_is_inserted_applies_to_the_rest() -> None:
    bended = traced(Residual, (normal(2, 4), torch.ones(2, 1)))
    model, v, ones = copy.deepcopy(bended.model), normal(2, 4), torch.ones(2, 1)
    called = []
    bended.interject("fc1", lambda value: called.append("fc1"))
    bended.interject("relu", lambda value: value * 2)
    handle = bended.interject("fc2", lambda value: value + 1)
    bended(v, ones)
    assert handle.report().fired == 1
    for given in ({}, {"mask": ones}):  # the call went along the path that was known
        with pytest.raises(InputError, match=r"nothing has been traced yet .* call its trace"):
            from_activations(bended, {"relu": v}, (), given)
    bended.trace(v, mask=ones)
    for _ in range(2):
        given = from_activations(bended, {"relu": v}, (), {"mask": ones})
        assert bits(given) == bits((model.fc2(v) + 1) * ones + v)
        given = from_activations(bended, {"relu": v}, (), {"mask": ones}, bended=False)
        assert bits(given) == bits((model.fc2(v * 2) + 1) * ones + v * 2)
    assert (handle.report().fired, called) == (6, ["fc1", "fc1"])
    handle.remove()
    with pytest.raises(
        bt.errors.InputError, match="nothing has been traced yet with the current insertions"
    ):
        from_activations(bended, {"relu": v})
    for with_own in (True, False):
        given = from_activations(bended, {"relu": v}, (v, ones), bended=with_own)
        h = v if with_own else v * 2
        assert bits(given) == bits(model.fc2(h) * ones + h)
    assert len(bended.insertions) == 2


def test_a_given_value_is_not_written_to() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            view = h[0]
            h = h.mul_(2)
            view.add_(1)
            return h.sum() + view.unsqueeze_(0).sum()

    bended, v = traced(Model, normal(2, 3)), normal(2, 3, seed=1).requires_grad_()
    before = v.detach().clone()

    def rest(h: Tensor) -> Tensor:
        h = h.clone()
        view = h[0]
        h.mul_(2)
        view.add_(1)
        return h.sum() + view.sum()

    for call in [(), (normal(2, 3),)]:
        given = from_activations(bended, {"conv": v}, call)
        assert bits(given) == bits(rest(v))
        assert bits(torch.autograd.grad(given, v)) == bits(torch.autograd.grad(rest(v), v))
        assert bits(v.detach()) == bits(before)


@torch.no_grad()
def test_state_is_changed_by_the_rest_and_by_nothing_else() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.fc(x)
            self.seen = self.seen + self.last.detach().mean()
            return self.last

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.kept = Counting(), Counting(), []
            self.register_buffer("noise", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.early = x * 2
            h = self.one(x)
            self.noise.normal_()
            self.middle = h
            y = self.two(h)
            self.kept.append(y)
            return y

    bended = traced(Model, normal(3, 2))
    bended.model.kept.clear()
    bended(normal(3, 2))
    bended.model.kept.clear()
    model, v = copy.deepcopy(bended.model), normal(3, 2, seed=1)
    early = bits(model.early)
    torch.manual_seed(4)
    given = from_activations(bended, {"one": v})
    torch.manual_seed(4)
    model.noise.normal_()
    model.middle = v
    y = model.two(v)
    model.kept.append(y)
    assert bits(given) == bits(y)
    assert state(bended.model) == state(model)
    assert bits(bended.model.early) == early
    assert bended.model.one.calls == 2
    assert bended.model.two.calls == 3


def test_a_tensor_that_is_handed_on_is_not_mixed_up_with_the_one_that_came() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.same, self.drop = nn.Linear(3, 3), nn.Identity(), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            y = self.same(h)
            z = torch.relu(y) + h
            w = self.drop(z)
            return z * w

    torch.manual_seed(0)
    bended = bt.BendedModule(Model().eval())
    x, v = normal(2, 3), normal(2, 3, seed=1)
    bended(x)
    fc = bended.model.fc
    for node, wanted in [
        ("fc", (torch.relu(v) + v) ** 2 * 1),
        ("same", (torch.relu(v) + fc(x)) * (torch.relu(v) + fc(x))),
        ("drop", (torch.relu(fc(x)) + fc(x)) * v),
    ]:
        assert torch.equal(from_activations(bended, {node: v}, (x,)), wanted), node
    for node in ("same", "drop"):
        with pytest.raises(InputError, match="hands on a tensor that it was given"):
            from_activations(bended, {node: v})


def test_a_module_that_hands_on_a_tensor_which_nobody_else_uses_is_no_question() -> None:
    torch.manual_seed(0)
    bended = bt.BendedModule(nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 2)).eval())
    bended(normal(2, 3))
    v = normal(4, 3, seed=1)
    assert bits(from_activations(bended, {"1": v})) == bits(bended.model[2](v))


def test_of_the_calls_of_a_module_one_is_meant() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) - self.fc(x * 2)

    bended, x, v = bt.BendedModule(made(Model)), torch.ones(2), torch.full((2,), 9.0)
    fc = bended.model.fc
    with pytest.raises(InputError, match="'fc' matches both 'fc' and 'fc_1': name one"):
        from_activations(bended, {"fc": v}, (x,))
    bended(x)
    for _ in range(2):
        assert bits(from_activations(bended, {"fc": v}, (x,))) == bits(v - fc(x * 2))
        assert bits(from_activations(bended, {"fc_1": v}, (x,))) == bits(fc(x) - v)
        bended.eval()  # another path, so that the model itself has to tell
        assert list(get_activations(bended, "fc", (x,))) == ["fc", "fc_1"]


def test_a_value_that_makes_no_difference_makes_none() -> None:
    def f(x: Tensor) -> Tensor:
        x.tanh()
        return x.relu()

    bended, x = bt.BendedModule(f), torch.ones(2)
    bended(x)
    assert bits(from_activations(bended, {"tanh": x}, (-x,))) == bits(torch.zeros(2))
    with pytest.raises(
        bt.errors.InputError, match="argument x is needed as well: the rest uses 'relu'"
    ):
        from_activations(bended, {"tanh": x})
    bended = bt.BendedModule(lambda x: (x.tanh(), torch.ones(1))[1])
    bended(x)
    with pytest.raises(InputError, match=r"no output .* depends on 'tanh'"):
        from_activations(bended, {"tanh": x})


def test_what_is_no_activation_cannot_be_given() -> None:
    bended = traced(Net, normal(5, 4))
    v = torch.ones(5, 8)
    for node, message in [
        ("fc1.weight", "is a parameter or buffer"),
        ("fc2.input", "is the input of a module"),
        ("fc3", "did you mean 'fc[12]' or 'fc[12]'"),
    ]:
        with pytest.raises((InputError, NodePathError), match=message):
            from_activations(bended, {node: v})
    with pytest.raises(InputError, match=r"a Tensor\(5, 8\), but 3 was given"):
        from_activations(bended, {"fc1": 3})
    with pytest.raises(InputError, match="no activations are given"):
        from_activations(bended, {})
    with pytest.raises(InputError, match="have to be a dict by node path"):
        from_activations(bended, v)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="by node path, not by 3"):
        from_activations(bended, {3: v})


def test_the_model_s_own_input_can_be_given_as_well() -> None:
    bended, x = traced(Residual, (normal(2, 4), torch.ones(2, 1))), normal(2, 4, seed=1)
    given = from_activations(bended, {"x": x}, (), {"mask": torch.ones(2, 1)})
    assert bits(given) == bits(bended.model(x, torch.ones(2, 1)))


def test_something_has_to_be_traced() -> None:
    bended = bt.BendedModule(made(Net))
    with pytest.raises(InputError, match="nothing has been traced yet: call the module"):
        from_activations(bended, {"relu": normal(5, 8)})
    bended.eval()
    model, h = copy.deepcopy(bended.model), normal(5, 8)
    given = from_activations(bended, {"relu": h}, (normal(5, 4),))  # its own Python tells
    assert bits(given) == bits(model.fc2(model.bn2(h)))


def test_a_run_under_other_conditions_is_not_gone_on_with() -> None:
    bended, h = traced(Net, normal(5, 4)), normal(5, 8)
    with torch.no_grad():
        with pytest.raises(DivergenceError, match="grad, inference or autocast mode was"):
            from_activations(bended, {"relu": h})
        bended(normal(5, 4))
        assert not from_activations(bended, {"relu": h}).requires_grad
    assert from_activations(bended, {"relu": h}).requires_grad
    bended.eval()
    with pytest.raises(DivergenceError, match="training is not True"):
        from_activations(bended, {"relu": h})
    model = copy.deepcopy(bended.model)
    wanted = model.fc2(model.bn2(h))
    assert bits(from_activations(bended, {"relu": h}, (normal(5, 4),))) == bits(wanted)
    bended(normal(5, 4))
    assert bits(from_activations(bended, {"relu": h})) == bits(wanted)


def test_a_model_that_runs_live_needs_its_arguments() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.relu(x) * float(x.detach().numpy().flat[0])

    bended, x = bt.BendedModule(f), torch.tensor([2.0])
    bended(x)
    with pytest.raises(DivergenceError, match="passes the content of a tensor"):
        from_activations(bended, {"relu": x})
    assert bits(from_activations(bended, {"relu": x * 3}, (x,))) == bits(x * 6)


def test_the_modes_that_operations_ran_under_are_restored() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

        def head(self, h: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.two(h) + self.two(h * 2)
            with torch.no_grad():
                scale = self.three(h).mean()
            return self.three(y.float() * scale)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.one(x))

    bended = traced(Model, normal(2, 4))
    model, h = copy.deepcopy(bended.model), normal(2, 4, seed=1).requires_grad_()
    given, wanted = from_activations(bended, {"one": h}), model.head(h)
    assert bits(given) == bits(wanted)
    assert gradients(given, h, bended.model) == gradients(wanted, h, model)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_that_the_model_catches_in_the_rest_leads_on() -> None:
    def f(x: Tensor) -> Tensor:
        h = torch.relu(x)
        try:
            return h.view(2, -1)
        except RuntimeError:
            return h * 2

    bended = bt.BendedModule(f)
    bended(torch.ones(4))
    odd, even = torch.ones(3), torch.full((6,), 2.0)
    with pytest.raises(
        bt.errors.DivergenceError, match="raised nothing when traced and raises RuntimeE"
    ):
        from_activations(bended, {"relu": odd})
    assert bits(from_activations(bended, {"relu": odd}, (torch.ones(4),))) == bits(odd * 2)
    assert bits(from_activations(bended, {"relu": odd})) == bits(odd * 2)
    assert bits(from_activations(bended, {"relu": even})) == bits(even.view(2, -1))


def test_an_error_of_the_rest_is_the_model_s_own() -> None:
    bended = traced(Net, normal(5, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        from_activations(bended, {"bn2": normal(5, 7)})
    assert torch.is_grad_enabled()


class Deciding(nn.Module):
    """Changes state and draws numbers in the rest, before it branches."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.big, self.small = nn.Linear(4, 4), nn.Linear(4, 4)

    def head(self, h: Tensor) -> Tensor:
        h = self.drop(self.bn(h) * h.abs().max())
        return self.big(h) if h.abs().max() > 9 else self.small(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(x))


def test_a_rest_that_has_changed_state_is_gone_on_with_where_it_is() -> None:
    bended = traced(Deciding, normal(8, 4))
    model, h = copy.deepcopy(bended.model), normal(8, 4, seed=1) * 50
    for round_ in range(3):
        torch.manual_seed(round_)
        given = from_activations(bended, {"fc": h}, (normal(8, 4),))
        torch.manual_seed(round_)
        assert bits(given) == bits(model.head(h))
        assert state(bended.model) == state(model)
    assert (bended.stats.traces, bended.stats.resumes) == (2, 1)
    torch.manual_seed(0)
    wanted = model(normal(8, 4) * 100)
    torch.manual_seed(0)
    assert bits(bended(normal(8, 4) * 100)) == bits(wanted)
    assert bended.stats.traces == 2  # the way is known from what it was given


def test_a_rest_that_cannot_be_gone_on_with_after_it_changed_state_says_so() -> None:
    class Model(Deciding):
        def forward(self, x: Tensor) -> Tensor:
            low, high = self.fc(x).split(2, -1)
            return self.head(torch.cat([low, high], -1))

    bended, x = traced(Model, normal(8, 4)), normal(8, 4)
    value = normal(8, 2) * 50
    with pytest.raises(DivergenceError, match="changed something that the skipped code"):
        from_activations(bended, {"split|sub_0": value}, (x,))
    bended(normal(8, 4) * 100)
    model = copy.deepcopy(bended.model)
    torch.manual_seed(1)
    given = from_activations(bended, {"split|sub_0": value}, (x,))
    torch.manual_seed(1)
    assert bits(given) == bits(model.head(torch.cat([value, model.fc(x)[:, 2:]], -1)))
    assert state(bended.model) == state(model)


def test_a_branch_in_the_rest_on_something_missing_needs_it() -> None:
    def f(x: Tensor, flag: Tensor) -> Tensor:
        h = torch.relu(x)
        return h * 2 if flag.sum() > 0 else h * 3

    bended, x = bt.BendedModule(f), torch.ones(2)
    bended(x, x.clone())
    with pytest.raises(InputError, match="the argument flag is needed as well"):
        from_activations(bended, {"relu": x})
    for flag in (x, -x):
        wanted = f(x, flag)
        assert bits(from_activations(bended, {"relu": x}, (-x, flag))) == bits(wanted)
    assert bits(from_activations(bended, {"relu": x}, (), {"flag": -x})) == bits(x * 3)


def test_a_branch_in_the_rest_on_a_size_of_something_missing_needs_it() -> None:
    def f(x: Tensor, like: Tensor) -> Tensor:
        if like.shape[0] > 5:
            return x
        h = torch.relu(x)
        return h * 2 if like.shape[0] > 2 else h * 3

    bended, x = bt.BendedModule(f), torch.ones(2)
    bended(x, torch.ones(1))
    with pytest.raises(InputError, match="argument like is needed as well"):
        from_activations(bended, {"relu": x})
    assert bits(from_activations(bended, {"relu": x}, (), {"like": torch.ones(2)})) == bits(x * 3)
    with pytest.raises(
        bt.errors.DivergenceError, match=r"like.shape\[0\] > 2` .* False .* is True"
    ):
        from_activations(bended, {"relu": x}, (), {"like": torch.ones(3)})
    assert bits(from_activations(bended, {"relu": x}, (x, torch.ones(3)))) == bits(x * 2)


def test_one_of_two_places_that_hold_a_tensor_is_not_mixed_up_with_the_other() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Twice()

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.twice(x)
            return one - two

    bended, x, v = traced(Model, torch.ones(2)), torch.ones(2), torch.full((2,), 7.0)
    with pytest.raises(InputError, match="more than once in its output"):
        from_activations(bended, {"twice.output|sub_0": v})
    for number, sign in ((0, 1), (1, -1)):
        given = from_activations(bended, {f"twice.output|sub_{number}": v}, (x,))
        assert bits(given) == bits((v - x * 2) * sign)


def test_what_a_module_asked_about_its_own_value_stays_about_that() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> tuple[Any, Tensor]:
            y = x * 3
            n = x.sum().item()
            if n:
                return n, y
            return 1.0, y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counting = Counting()

        def forward(self, x: Tensor) -> Tensor:
            n, y = self.counting(x)
            return y + n

    bended, x = traced(Model, torch.ones(2)), torch.ones(2)
    given = from_activations(bended, {"counting.output|sub_0": 0.0}, (x,))
    assert bits(given) == bits(x * 3 + 0.0)
    assert bended.stats.traces == 1


def test_what_was_written_before_is_there_for_the_rest() -> None:
    def f(x: Tensor) -> Tensor:
        memory = torch.zeros(4)
        view = memory[:2]
        memory[2:] = x
        view.add_(x * 2)
        h = torch.relu(x)
        view.mul_(h)
        return memory + 1

    bended, x, v = bt.BendedModule(f), torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])
    bended(x)
    given = from_activations(bended, {"relu": v}, (x,))
    assert bits(given) == bits(torch.cat([x * 2 * v, x]) + 1)
    assert bended.stats.traces == 1


def test_what_is_between_two_given_values_is_not_carried_out() -> None:
    def f(x: Tensor) -> Tensor:
        h = torch.relu(x)
        y = F.dropout(h, 0.5)
        return torch.tanh(y) + h

    bended, v, w = bt.BendedModule(f), torch.full((2,), 3.0), torch.full((2,), 4.0)
    bended(torch.ones(2))
    before = torch.get_rng_state()
    for call in ((), (torch.ones(2),)):
        assert bits(from_activations(bended, {"relu": v, "tanh": w}, call)) == bits(v + w)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(from_activations(bended, {"tanh": w}, (v,)), v + w)


def test_values_of_another_kind_are_looked_at_anew() -> None:
    def f(x: Tensor) -> Tensor:
        h = torch.relu(x)
        if h.dtype is torch.float64 or h.dim() > 1:
            return h * 2
        return h * 3 + h.shape[0]

    bended, x = bt.BendedModule(f), torch.ones(2)
    bended(x)
    for v in (x.double(), x.view(2, 1), torch.ones(5)):
        with_own = f(v)
        if len(v) != 5:
            with pytest.raises(DivergenceError, match=r"h\.d"):
                from_activations(bended, {"relu": v})
        assert bits(from_activations(bended, {"relu": v}, (x,))) == bits(with_own)
        assert bits(from_activations(bended, {"relu": v})) == bits(with_own)


def test_what_another_known_path_needs_besides_is_caught_up_on_if_it_is_not_too_late() -> None:
    class Model(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(2))
            self.writes = writes

        def forward(self, x: Tensor) -> Tensor:
            before = self.memory * 1 + x
            h = torch.relu(x)
            if self.writes:
                self.memory.add_(h)
            return h if h.sum() > 5 else h + before

    for writes in (False, True):
        bended, x = bt.BendedModule(Model(writes)), torch.ones(2)
        bended(x)
        bended(x * 9)
        for value in (x * 4, x * 2, x * 7, x):
            bended.model.memory.fill_(1)
            if writes and value.sum() < 5:  # the latest trace has no use for what came before
                with pytest.raises(
                    bt.errors.DivergenceError, match="the skipped code before would see"
                ):
                    from_activations(bended, {"relu": value}, (x * 5,))
                continue
            given = from_activations(bended, {"relu": value}, (x * 5,))
            assert bits(given) == bits(value if value.sum() > 5 else value + 1 + x * 5)
            assert bits(bended.model.memory) == bits(1 + writes * value)
        assert (bended.stats.traces, bended.stats.live) == (2, 0)


def test_what_would_come_in_another_order_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            before = self.memory + x
            h = torch.tanh(before)
            self.memory.add_(h)
            return h if h.sum() < 5 else h + before

    bended, x = traced(Model, torch.ones(2)), torch.ones(2)
    memory = bended.model.memory.clone()
    with pytest.raises(DivergenceError, match="changed something that the skipped code"):
        from_activations(bended, {"tanh": x * 50}, (x,))
    assert bits(bended.model.memory) == bits(memory + 50)
    bended.model.memory.fill_(60)
    bended.model(x)  # has its own way
    with bended.interject("tanh", lambda value: value * 100):
        bended(x)
    bended.model.memory.fill_(1)  # by now, the other way is known from its beginning
    for given, output in ((50, 52), (1, 1)):
        bended.model.memory.fill_(1)
        assert bits(from_activations(bended, {"tanh": x * given}, (x,))) == bits(x * output)
        assert bits(bended.model.memory) == bits(x * (1 + given))


def test_plain_attributes_that_modules_before_set_stay() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ran = False

        def forward(self, x: Tensor) -> Tensor:
            self.ran = True
            return x * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    bended, x = traced(Model, torch.ones(2)), torch.ones(2)
    bended.model.one.ran = bended.model.two.ran = False
    assert bits(from_activations(bended, {"one": x})) == bits(x * 2)
    assert (bended.model.one.ran, bended.model.two.ran) == (False, True)


@pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")
def test_values_on_both_sides_of_an_unknown_branch_are_given_to_the_model_itself() -> None:
    def f(x: Tensor) -> Tensor:
        h = torch.relu(x)
        y = h * 2 if h.sum() > 3 else h * 5
        return torch.tanh(y) + h

    bended, x, v = bt.BendedModule(f), torch.ones(2), torch.full((2,), 4.0)
    bended(x)
    for _ in range(2):
        given = from_activations(bended, {"relu": v, "tanh": x * 7}, (x,))
        assert bits(given) == bits(x * 7 + v)
    bended(v)
    with pytest.raises(InputError, match=r"did not reach 'mul_1'.*`h.sum\(\) > 3`"):
        from_activations(bended, {"relu": x * 0.1, ".mul_1": x}, (x,))


def test_a_node_that_another_trace_has_leads_to_that_trace() -> None:
    bended = traced(Branching, torch.ones(1, 4))
    bended(-torch.ones(1, 4))
    model = copy.deepcopy(bended.model)
    for node, x in [("up", torch.ones(1, 4)), ("down", -torch.ones(1, 4))]:
        v = getattr(model, node)(x).detach() * 1.001
        for call in [(), (x,)]:
            assert bits(from_activations(bended, {node: v}, call)) == bits(model.head(model.act(v)))
    with pytest.raises(
        bt.errors.InputError, match=r"did not reach 'down'.*`x.sum\(\) > 0` was taken"
    ):
        from_activations(bended, {"down": v}, (torch.ones(1, 4),))
    assert bended.insertions == ()


def test_torchbend_s_form_is_understood() -> None:
    bended = traced(Residual, (normal(2, 4), torch.ones(2, 1)))
    x, mask = normal(2, 4), torch.ones(2, 1)
    found = get_activations(bended, ["relu", "fc2"], (), {"x": x, "mask": mask})
    for form in [
        parse_replacements(("relu", "fc2"), {**found, "x": x, "mask": mask}),
        parse_replacements((found, x), {"mask": mask}),
        parse_replacements((found, x, mask), {}),
    ]:
        assert bits(from_activations(bended, *form).detach()) == bits(bended(x, mask).detach())
    with pytest.raises(InputError, match="no value is given for 'fc2'"):
        parse_replacements(("relu", "fc2"), {"relu": x})
    for args in [(), (x,), ("relu", x)]:
        with pytest.raises(InputError, match="a dict of activations by path, followed by"):
            parse_replacements(args, {"relu": x})


def test_nothing_is_left_behind() -> None:
    bended = traced(Branching, torch.full((1, 4), 0.1))
    before, names = footprint(), vars(bended).keys() | set()
    for h in (torch.full((1, 4), 0.01), torch.full((1, 4), 5.0)):
        from_activations(bended, {"act": h}, (torch.ones(1, 4),))
    assert footprint() == before
    assert vars(bended).keys() == names
    assert bended.insertions == ()


def test_functions_of_torch_can_be_given_inside_leaf_modules() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train()
    bended, x = bt.BendedModule(layer), normal(2, 5, 8)
    bended(x)
    product = "self_attn.scaled_dot_product_attention"
    found, output = get_activations(bended, product, (x,), return_output=True)
    assert bits(from_activations(bended, found, (x,)).detach()) == bits(output.detach())
    v = normal(2, 5, 16, seed=1)
    y = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
    wanted = layer.norm2(y + layer.linear2(F.relu(v)))
    assert bits(from_activations(bended, {"linear1": v}, (x,))) == bits(wanted)
    assert bits(output.detach()) == bits(layer(x).detach())


# What a key means


def test_nodes_have_the_names_that_they_have_elsewhere_whichever_run_is_asked_first() -> None:
    def f(x: Tensor) -> Tensor:
        if x.sum() > 1:
            return torch.relu(x) * 2
        if x.sum() > 0:
            return torch.relu(x) * 3
        return torch.relu(x) * 4

    calls, v = [torch.ones(2), torch.ones(2) / 4, -torch.ones(2)], torch.full((2,), 5.0)
    for asked, factor in zip(calls, (2, 3, 4), strict=True):
        (name,) = get_activations(traced(lambda: f, *calls, asked), ".*relu.*", (asked,))
        bended = traced(lambda: f, *calls, asked)
        assert bits(from_activations(bended, {name: v})) == bits(v * factor)
        assert list(get_activations(bended, ".*relu.*", (asked,))) == [name]


class Namesakes(nn.Module):
    """Has a module and a buffer that functions are called like."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = nn.Sigmoid()
        self.register_buffer("mean", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(x) - x.mean()
        return self.sigmoid(x) + self.mean


def test_a_name_of_the_model_s_own_means_that_and_a_node_itself() -> None:
    bended, x, v = traced(Namesakes, normal(3)), normal(3), normal(3, seed=1)
    for args in ((), (x,)):
        for name, message in [
            ("mean", "'mean' is a parameter or buffer, not an activation"),
            (".mean_1", "'.mean_1' is a parameter or buffer, not an activation"),
            ("sigmoid_1.input", "is the input of a module"),
        ]:
            with pytest.raises(InputError, match=message):
                from_activations(bended, {name: v}, args)
    given = {at(bended, "sigmoid"): v, at(bended, "mean"): v.mean()}
    for args in ((), (x,)):
        wanted = torch.sigmoid(v - v.mean()) + 1
        assert bits(from_activations(bended, given, args)) == bits(wanted)
        found = from_activations(bended, {"sigmoid": v}, args)
        assert bits(found) == bits(v + bended.model.mean)


def test_parameters_and_inputs_are_refused_before_any_call_as_well() -> None:
    for name, message in [
        ("fc1.weight", "is a parameter or buffer"),
        ("fc2.input", "is the input of a module"),
    ]:
        bended = bt.BendedModule(made(Net))
        with pytest.raises(InputError, match=message):
            from_activations(bended, {name: torch.ones(5, 8)}, (normal(5, 4),))
        assert int(bended.model.bn.num_batches_tracked) == 0
        assert not bended.insertions


def test_a_value_is_not_given_by_two_names() -> None:
    bended, v = traced(lambda: nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), normal(3, 2)), None
    whole = get_activations(bended, "sub_1", (normal(3, 2),))["sub_1"]
    for first, second, v in [
        ("0", "sub_0", normal(3, 2)),
        (at(bended, "sub_0"), "sub_0", normal(3, 2)),
        ("sub_1", "sub_1.output", whole),
    ]:
        with pytest.raises(InputError, match=r"given twice|select the same value"):
            from_activations(bended, {first: v, second: v})
    with pytest.raises(InputError, match="select the same value, or overlapping parts of it"):
        from_activations(bended, {"sub_1": whole, "sub_1.output|sub_0": whole[0]})


def test_of_values_that_calls_give_as_they_end_together_the_outer_one_s_counts() -> None:
    bended = traced(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), normal(3, 2))
    a, b, relu = normal(3, 2, seed=1), normal(3, 2, seed=2), torch.relu
    for args in ((), (normal(3, 2),)):
        for given in ({"sub_0": a, "sub_0.linear": b}, {"sub_0.linear": b, "sub_0": a}):
            assert bits(from_activations(bended, given, args)) == bits(relu(a))


@pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")
def test_a_call_that_answers_to_the_name_of_another_one_is_not_taken_for_it() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            if y is None:
                return self.fc(x) * 5
            h = self.fc(y)
            return h * 3 if h.max() < 9 else h * 2

    x, v = torch.zeros(2), torch.ones(2)
    bended = traced(Two, (x,), (x, x))
    alone = next(
        name
        for tree in bended._knowledge.trees()
        for name in ("fc", "fc_1")
        if name in tree.data.children and "y" not in tree.data.children
    )
    both = {"fc": "fc_1", "fc_1": "fc"}[alone]
    assert bits(from_activations(bended, {alone: v})) == bits(v * 5)
    assert bits(from_activations(bended, {both: v})) == bits(v * 3)
    assert bits(from_activations(bended, {both: v}, (x, x))) == bits(v * 3)
    assert bits(from_activations(bended, {both: v * 20}, (x, x))) == bits(v * 40)
    with pytest.raises((InputError, NodePathError)):
        from_activations(bended, {both: v}, (x,))
    with pytest.raises((InputError, NodePathError)):
        from_activations(bended, {alone: v}, (x, x))


def test_a_path_without_a_pass_is_refused_where_the_rest_comes_by_again() -> None:
    def f(x: Tensor) -> Tensor:
        x = x * 1
        while x.sum() > 1:
            x = x / 2
        return x

    bended, x = traced(lambda: f, torch.tensor([2.0])), torch.tensor([2.0])
    assert bits(from_activations(bended, {"div": torch.tensor([0.5])}, (x,))) == bits(x / 4)
    with pytest.raises(
        bt.errors.InputError, match="'div' has 3 passes for these arguments: name one"
    ):
        from_activations(bended, {"div": torch.tensor([4.0])}, (x,))
    bended(x)
    given = from_activations(bended, {"div:1": torch.tensor([4.0])}, (x,))
    assert bits(given) == bits(torch.tensor([1.0]))


def test_a_given_value_that_the_model_keeps_is_not_written_to_by_later_calls() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            self.h.add_(1)
            self.h = torch.relu(x)
            return self.h * 2

    bended, v = traced(Keeps, torch.ones(2), torch.ones(2)), torch.ones(2)
    for args in ((), (torch.ones(2),)):
        from_activations(bended, {"relu": v}, args)
        bended(torch.ones(2))
        assert bits(v) == bits(torch.ones(2))


# Against the whole model with the values put in

SOME = [
    "autocast_block", "augmented_assignment_through_alias", "batch_norm_in_train_mode_then_branch",
    "cholesky_with_jitter", "deep_equilibrium", "early_exit_classifier", "exit_stack",
    "group_by_traced_label", "history_list", "inplace_on_view", "lstm_cell_with_resets",
    "quick_sort_by_masks",
    "row_assignment_in_loop", "running_mean_buffer", "shared_module_called_traced_times",
    "top_two_experts_with_index_add", "torch_return_types_output", "transformer_encoder_layer",
    "tree_lstm", "unet_with_cropped_skip", "while_norm_exceeds",
]  # fmt: skip


def known(case: Case, latest: Any) -> bt.BendedModule:
    """Return a new `BendedModule` that was called along all its paths, and then traced."""
    torch.manual_seed(1)
    bended = bt.BendedModule(case.make())
    for inputs in case.paths.values():
        args, kwargs = inputs()
        bended(*args, **kwargs)
    args, kwargs = latest()
    bended.trace(*args, **kwargs)
    return bended


def moved(value: Any) -> Any:
    """Return a value like another one, with somewhat other numbers."""
    shape, found = take_apart(value)
    generator = torch.Generator().manual_seed(0)
    return assemble(
        shape,
        [
            item.detach() * 1.2 + 0.1 * torch.randn(item.shape, generator=generator).to(item.dtype)
            if isinstance(item, Tensor) and item.is_floating_point()
            else item
            for item in found
        ],
    )


@pytest.mark.parametrize("name", some(SOME, 20, start=1))
def test_the_rest_gives_what_the_model_gives_with_the_values_put_in(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    for inputs in case.paths.values():
        bended = known(case, inputs)
        nodes = [n for n in at(bended, "")._data.walk() if n.role in ("op", "call") and n.path]
        for number, node in enumerate(nodes[:: max(1, len(nodes) // 4)]):
            path = node.path if len(node.passes) == 1 else f"{node.path}:{len(node.passes)}"
            args, kwargs = inputs()
            bended = known(case, inputs)
            try:
                found = get_activations(bended, at(bended, path), args, kwargs)
            except NodePathError as error:
                if "is a Python number, which cannot be replaced; choose" in str(error):
                    continue  # which nobody can exchange
                raise
            assert found
            values = {key: moved(value) if number % 2 else value for key, value in found.items()}
            whole, rest = known(case, inputs), known(case, inputs)
            for key, value in values.items():
                whole.interject(at(whole, key), lambda own, value=value: copy.deepcopy(value))
            given = {at(rest, key): value for key, value in values.items()}
            outcomes = []
            for call in (whole, partial(from_activations, rest, given)):
                args, kwargs = inputs()
                try:
                    result = call(*args, **kwargs) if call is whole else call(args, kwargs)
                    outcomes.append(_plainly(result))
                except (ValueError, RuntimeError, IndexError, TypeError) as error:
                    outcomes.append(type(error))
            assert outcomes[0] == outcomes[1], (path, number)


def _plainly(value: Any) -> Any:
    """Return the bits of the tensors and numbers in a value, whether they require grad or not."""
    _, found = take_apart(value)
    return [bits(v.detach().contiguous()) if isinstance(v, Tensor) else bits(v) for v in found]


def test_the_methods_are_the_functions() -> None:
    bended = traced(Residual, (normal(2, 4), torch.ones(2, 1)))
    x, mask = normal(2, 4), torch.ones(2, 1)
    found, output = bended.get_activations("relu", ["fc2"], x=x, mask=mask, return_output=True)
    assert list(found) == ["relu", "fc2"]
    assert list(bended.get_activations("relu", args=(x,), kwargs={"mask": mask})) == ["relu"]
    for given in [
        bended.from_activations(found, mask=mask),
        bended.from_activations(found, x, mask, _bended=False),
        bended.from_activations("relu", "fc2", mask=mask, **found),
    ]:
        assert bits(given) == bits(output.detach())


def test_inputs_can_be_given_by_name_also_where_the_model_takes_any() -> None:
    x = torch.tensor([-1.0, 2.0])
    bended = bt.BendedModule(lambda x, *args, **kwargs: x.relu())
    assert torch.equal(bended.get_activations("relu", x=x)["relu"], x.relu())
