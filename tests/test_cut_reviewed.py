"""Faults that a reviewer found in what is inserted: each with the smallest model that shows it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from bendtrace.errors import InputError, InterjectionError
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from tests.promise import bits


def _x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _double(value: Tensor) -> Tensor:
    return value * 2


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        with torch.no_grad():
            result: Tensor = module(x)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _InOneOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return _Through.apply(self.a(x), self.b)


class _Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(self.b)(x)
        return mapped + self.b(x)


@pytest.mark.parametrize("make", [_InOneOp, _Mapped])
@pytest.mark.parametrize("where", [nn.Linear, "b.weight"])
def test_what_runs_inside_of_one_op_is_not_left_out_in_silence(
    make: Callable[[], nn.Module], where: Any
) -> None:
    model, x = make(), _x(2, 3)
    bended = bt.BendedModule(model)
    bended(x)
    with pytest.raises(InterjectionError), bended.interject(where, _double):
        bended(x)


def test_a_model_with_a_module_under_two_names_is_replayed() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.c = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.c(self.a(x) + self.b(-x))

    bended = bt.BendedModule(Shared())
    for _ in range(3):
        bended(_x(2, 4))
    assert (bended.stats.traces, bended.stats.replays) == (1, 2)


def test_invert_does_not_work_in_place() -> None:
    def flipped(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > 0
        return mask, ~mask

    x = _x(3, 4)
    bended = bt.BendedModule(flipped)
    bended(x)
    with bended.interject("invert", torch.ones_like):
        for _ in range(2):
            mask, inverse = bended(x)
            assert torch.equal(mask, x > 0)
            assert inverse.all()


class _Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inplace = nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x), inplace=self.inplace)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _Flagged()

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        result: Tensor = h + self.block(h)
        return result


def test_a_module_with_a_flag_for_its_activation_does_not_work_in_place() -> None:
    model, x = _Residual(), _x(3, 4)
    bended = bt.BendedModule(model)
    with bended.interject("block", _double):
        for _ in range(3):
            assert torch.equal(bended(x), x + model.block(x) * 2)


class _Closed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.apply_norm = lambda x: self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.apply_norm(x).tanh()
        return y if y.sum() > 0 else -y


def test_the_first_call_with_a_name_leaves_no_trace_elsewhere() -> None:
    norm = nn.BatchNorm1d(4)

    def function(x: Tensor) -> Tensor:
        y: Tensor = norm(x).tanh()
        return y if y.sum() > 0 else -y

    closed = _Closed()
    for model, counted in ((function, norm), (closed, closed.norm)):
        bended = bt.BendedModule(model)
        bended.interject("tanh", _double, passes=[-1])
        try:
            bended(_x(3, 4))
        except InputError:
            assert counted.num_batches_tracked == 0
        else:
            assert counted.num_batches_tracked == 1


def test_a_parameter_inside_a_checkpoint_is_exchanged_as_where_it_was_used_before() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda y: torch.tanh(self.a(y)), self.a(x), use_reentrant=False)

    model = Model()
    bended = bt.BendedModule(model)
    bended.interject("a.weight", _double)
    for _ in range(3):
        model.zero_grad()
        bended(_x(3, 4)).sum().backward()
        assert model.a.weight.grad is not None
        given = model.a.weight.grad.clone()
        model.zero_grad()
        weight = model.a.weight * 2
        linear = nn.functional.linear
        first = linear(_x(3, 4), weight, model.a.bias)
        torch.tanh(linear(first, weight, model.a.bias)).sum().backward()
        assert torch.equal(given, model.a.weight.grad)


def test_a_parameter_that_is_returned_is_exchanged() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.w, self.w

    x = _x(3, 4)
    bended = bt.BendedModule(Model())
    bended(x)
    with bended.interject("w", _double):
        for _ in range(2):
            product, weight = bended(x)
            assert torch.equal(product, x * 2)
            assert torch.equal(weight, torch.full((4,), 2.0))


def test_a_buffer_in_a_slice_is_exchanged() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.tensor(1))

        def forward(self, x: Tensor) -> Tensor:
            return x[: self.n]

    bended = bt.BendedModule(Model())
    bended(_x(3, 4))
    with bended.interject("n", _double):
        for _ in range(2):
            assert bended(_x(3, 4)).shape == (2, 4)


@pytest.mark.parametrize("where", ["layers.0.self_attn", "layers.0.linear1", "layers.1.norm2"])
def test_a_module_that_the_fast_path_of_transformers_passes_by_is_called(where: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = _x(2, 3, 4)

    def change(value: Any) -> Any:
        return (value[0] * 2, value[1]) if isinstance(value, tuple) else value * 2

    with torch.no_grad():
        bended = bt.BendedModule(model)
        plain = bended(x)
        module = model.get_submodule(where)
        native = module.register_forward_hook(lambda _, args, value: change(value))
        wanted = model(x)
        native.remove()
        with bended.interject(module, change):
            for _ in range(2):
                assert bits(bended(x)) == bits(wanted)
        assert bits(bended(x)) == bits(plain)


def test_a_parameter_alone_leaves_the_fast_path_of_attention_as_it_is() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x)

    torch.manual_seed(0)
    model, x = Model().eval(), _x(2, 3, 4)
    for name, _ in model.named_parameters():
        with torch.no_grad():
            bended = bt.BendedModule(model)
            with bended.interject(name, _double):
                changed = {name: model.get_parameter(name) * 2}
                wanted = torch.func.functional_call(model, changed, (x,))
                for _ in range(2):
                    assert bits(bended(x)) == bits(wanted), name


class _Filler(nn.Module):
    def forward(self, held: dict[str, Tensor], listed: list[Tensor]) -> dict[str, Tensor]:
        held["y"] = held["x"] * 2
        listed.append(held["y"])
        return held


class _Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filler = _Filler()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        held, listed = {"x": x}, [x * 3]
        self.filler(held, listed=listed)
        return held["y"], held["x"], *listed


def test_a_function_that_changes_a_container_changes_the_one_that_others_hold() -> None:
    def change(held: dict[str, Tensor]) -> None:
        held["y"] = held["y"] + 1

    class Before(Interjection):
        def before(self, at: NodePass, inputs: Inputs) -> None:
            inputs[0]["x"] = inputs[0]["x"] + 1
            inputs.kwargs["listed"][0] = inputs.kwargs["listed"][0] * 2

    def before(_: Any, args: Any, kwargs: Any) -> None:
        args[0]["x"] = args[0]["x"] + 1
        kwargs["listed"][0] = kwargs["listed"][0] * 2

    model, x = _Holding(), _x(2, 3)
    bended = bt.BendedModule(model)
    hooks: list[tuple[Any, Callable[[], Any]]] = [
        (change, lambda: model.filler.register_forward_hook(lambda *given: change(given[-1]))),
        (Before(), lambda: model.filler.register_forward_pre_hook(before, with_kwargs=True)),
    ]
    for what, register in hooks:
        native = register()
        wanted = model(x)
        native.remove()
        with bended.interject("filler", what):
            for _ in range(3):
                assert bits(bended(x)) == bits(wanted)


class _Told(Interjection):
    def backward(self, at: NodePass, grad_input: Any, grad_output: Any) -> None:
        return None


def test_gradients_can_be_told_at_all_nodes_of_a_model_that_writes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y[y > 0.5] = 0
            y[1] = y[0] * 2
            return y

    torch.manual_seed(0)
    model = Model()
    wanted = model(_x(3, 4))
    bended = bt.BendedModule(model)
    bended.interject(lambda node: True, _Told())
    for _ in range(2):
        assert torch.equal(bended(_x(3, 4)), wanted)


def test_an_insertion_at_a_module_that_gives_nothing_is_called() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.silent = Silent()

        def forward(self, x: Tensor) -> Tensor:
            self.silent(x)
            return x + 1

    seen: list[Any] = []
    bended = bt.BendedModule(Model())
    with bended.interject("silent", seen.append):
        bended(_x(2))
        bended(_x(2))
    assert seen == [None, None]


def test_a_predicate_of_passes_is_asked_in_every_call() -> None:
    wanted = [True]
    bended = bt.BendedModule(lambda x: x.tanh())
    x = _x(3)
    bended(x)
    with bended.interject("tanh", _double, passes=lambda number: wanted[0]):
        assert torch.equal(bended(x), x.tanh() * 2)
        wanted[0] = False
        assert torch.equal(bended(x), x.tanh())


@pytest.mark.parametrize("where", ["more", "named"])
def test_all_that_an_input_of_any_number_takes_is_exchanged_or_refused(where: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
            return x + sum(more) + sum(named.values())

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item * 2 for key, item in value.items()}
        return tuple(item * 2 for item in value)

    x = _x(3)
    bended = bt.BendedModule(Model())
    bended(x, x, x, z=x)
    try:
        bended.interject(where, change)
        bended(x, x, x, z=x)
    except bt.BendtraceError:
        return
    wanted = x + sum([x * 2, x * 2]) + x if where == "more" else x + sum([x, x]) + x * 2
    for _ in range(2):
        assert torch.equal(bended(x, x, x, z=x), wanted)


def test_a_name_means_the_same_before_and_after_the_first_run() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.a(x) + self.a(-x)

    model, x = Twice(), _x(2, 4)
    given = []
    for runs in (0, 1):
        bended = bt.BendedModule(model)
        for _ in range(runs):
            bended(x)
        with bended.interject("a", lambda value: value + 1):
            given.append(bended(x))
    assert torch.equal(*given)


def test_a_parameter_is_exchanged_once_in_each_call() -> None:
    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                z = self.w(x)
            return self.w(z)

    calls: list[Tensor] = []
    bended = bt.BendedModule(Solver())
    bended(_x(2, 4))
    with bended.interject("w.weight", lambda weight: calls.append(weight)):
        for number in range(1, 4):
            bended(_x(2, 4))
            assert len(calls) == number


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.drop(self.norm(torch.tanh(x)))
        return z + 1 if x.sum() > 0 else z - 1


def test_nothing_is_done_twice_where_another_function_gives_its_own_value_or_not() -> None:
    torch.manual_seed(0)
    model = _Norms()
    hand = copy.deepcopy(model)
    bended = bt.BendedModule(model)
    x = _x(3, 4).abs()
    seen: list[int] = []
    functions: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (torch.clone, x), (lambda value: value, -x), (torch.clone, -x), (torch.clone, x),
        (lambda value: value, x), (lambda value: value, -x),
    ]  # fmt: skip
    for number, (function, given) in enumerate(functions):
        seen.clear()
        torch.manual_seed(number)
        wanted = hand(given)
        with (
            bended.interject("tanh", function),
            bended.interject("norm", lambda _, at: seen.append(at.number)),
        ):
            torch.manual_seed(number)
            assert torch.equal(bended(given), wanted), number
        assert bits(dict(model.state_dict())) == bits(dict(hand.state_dict())), number
        assert seen == [0]


def test_a_parameter_is_the_same_in_all_modes_of_a_call() -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                first = self.w(x)
            with torch.autocast("cpu", torch.bfloat16):
                last = self.w(x)
            return first, self.w(x), last

    model, x = Modes(), _x(2, 4)
    bended = bt.BendedModule(model)
    bended.interject("w.weight", _double)
    for _ in range(3):
        changed = {"w.weight": model.w.weight * 2}
        wanted = torch.func.functional_call(model, changed, (x,))
        assert bits(bended(x)) == bits(wanted)
        model.zero_grad()
        sum(part.sum() for part in wanted if part.requires_grad).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        sum(part.sum() for part in bended(x) if part.requires_grad).backward()
        assert bits([parameter.grad for parameter in model.parameters()]) == bits(grads)


def test_a_first_call_that_is_looked_at_first_can_be_checkpointed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return torch.tanh(self.a(x))

    torch.manual_seed(0)
    model, x = Model(), _x(2, 4)
    (2 * model.a(x)).tanh().sum().backward()
    wanted = model.a.weight.grad
    model.zero_grad()
    bended = bt.BendedModule(model)
    bended.interject("a", _double)
    checkpoint(bended, x, use_reentrant=False).sum().backward()
    assert wanted is not None
    assert torch.equal(model.a.weight.grad, wanted)  # type: ignore[arg-type]


class _Parts(nn.Module):
    """Has a method that calls a part of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(x)

    def classify(self, x: Tensor) -> Any:
        return self(self.encoder(x))


@pytest.mark.parametrize("passes", [None, [0], [-1]])
@pytest.mark.parametrize("runs", [0, 1])
def test_parts_that_a_method_runs_have_what_is_inserted_from_the_first_call_on(
    runs: int, passes: Any
) -> None:
    torch.manual_seed(0)
    model, x = _Parts(), _x(3, 4)
    wanted = model.head(torch.tanh(model.encoder[0](x) * 2))
    bended = bt.BendedModule(model)
    for _ in range(runs):
        bended.classify(x)
    with bended.interject("encoder.0", _double, passes=passes):
        for _ in range(3):
            try:
                given = bended.classify(x)
            except bt.BendtraceError:
                assert passes == [-1]
                return
            assert torch.equal(given, wanted)


def test_a_tied_parameter_can_be_named_by_a_module_that_does_not_run() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.used = nn.Embedding(5, 4), nn.Embedding(5, 4)
            self.used.weight = self.shared.weight

        def forward(self, numbers: Tensor) -> Any:
            return self.used(numbers)

    model, numbers = Tied(), torch.tensor([1, 2])
    assert [name for name, _ in model.named_parameters()] == ["shared.weight"]
    bended = bt.BendedModule(model)
    with bended.interject("shared.weight", _double):
        for _ in range(2):
            assert torch.equal(bended(numbers), model(numbers) * 2)


@pytest.mark.parametrize(
    ("model", "where", "doubled"),
    [
        (
            lambda x: x.max(-1).values * 3,
            "max|values",
            lambda x: x.max(-1).values * 2 * 3,
        ),
        (
            lambda x: torch.stack(x.split(1)[::-1]),
            "split|sub_1",
            lambda x: torch.stack([x.split(1)[1] * 2, x.split(1)[0]]),
        ),
        (
            lambda x: torch.stack(torch.broadcast_tensors(x, x[:1])),
            "broadcast_tensors|sub_0",
            lambda x: torch.stack([x * 2, x[:1].expand(2, 2)]),
        ),
    ],
)
def test_a_part_of_a_container_is_kept_in_one_call_and_changed_in_the_next(
    model: Any, where: str, doubled: Any
) -> None:
    bended, x = bt.BendedModule(model), _x(2, 2)
    changes = False
    with bended.interject(where, lambda value: value * 2 if changes else None):
        for changes in (False, True, False, True, True):
            assert bits(bended(x)) == bits((doubled if changes else model)(x))


def test_what_raises_is_no_pass_for_insertions_as_it_is_none_in_trees() -> None:
    def roots(x: Tensor) -> list[Tensor]:
        found = []
        for factor in (0.0, 1.0, 2.0):
            try:
                found.append(torch.linalg.cholesky(x * factor))
            except RuntimeError:
                continue
        return found

    bended, x = bt.BendedModule(roots), torch.eye(2)
    assert len(bended.trace(x).tree.linalg_cholesky._shape) == 2
    found = bended.get_activations("linalg_cholesky", x=x)
    assert list(found) == ["linalg_cholesky:1", "linalg_cholesky:2"]
    one, two = roots(x)
    with bended.interject("linalg_cholesky:1", lambda value: value * 3):
        for _ in range(2):
            assert bits(bended(x)) == bits([one * 3, two])


def test_a_node_is_meant_itself_where_another_run_has_one_that_answers_to_its_name() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor, y: Any = None) -> Any:
            return self.fc(x) if y is None else self.fc(y) * 2

    model, x = Calls(), _x(2)
    bended = bt.BendedModule(model)
    calls = (x,), (x, x)
    for inputs in calls:
        bended(*inputs)
    # The run that is looked at first gives the first name, which others are called by as well.
    trees = [trace.tree for trace in reversed(bended.traces)]
    assert {tree.fc._path for tree in trees} == {"fc", "fc_1"}
    for tree in trees:
        meant = 2 if "y" in dir(tree) else 1
        with bended.interject(tree.fc, lambda value: value * 0):
            assert [bool((bended(*inputs) == 0).all()) for inputs in calls] == [
                meant == 1, meant == 2,
            ]  # fmt: skip


@pytest.mark.parametrize("runs", [0, 1])
@pytest.mark.parametrize("where", [["relu", "sigmoid", "tanh"], ["tanh", "relu", "sigmoid"]])
def test_a_name_that_may_come_up_later_leaves_those_beside_it_as_they_are(
    where: list[str], runs: int
) -> None:
    def model(x: Tensor) -> Tensor:
        x = torch.relu(x)
        if x.sum() > 5:
            x = torch.tanh(x)
        return torch.sigmoid(x)

    bended, seen = bt.BendedModule(model), list[str]()
    for _ in range(runs):
        bended(torch.ones(2))
    with bended.interject(where, lambda _, at: seen.append(at.path), allow_none=True):
        for factor in (1, 1, 9, 1, 9):
            bended(torch.ones(2) * factor)
    short, long = ["relu", "sigmoid"], ["relu", "tanh", "sigmoid"]
    assert seen == [*short, *short, *long, *short, *long]


def test_what_a_gate_asks_for_itself_is_no_flow_step() -> None:
    def model(x: Tensor) -> Any:
        y = torch.relu(x)
        if y.sum() > 1:
            y = y * 2
        return y, {"k": [x], "t": y * 2}

    bended = bt.BendedModule(model)
    plain = [(step.text, step.value) for step in bended.trace(torch.ones(3)).flow_steps]
    with bended.interject("output", lambda _: None):
        steps = bended.trace(torch.ones(3)).flow_steps
    assert [(step.text, step.value) for step in steps] == plain == [("y.sum() > 1", True)]
