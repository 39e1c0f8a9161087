"""The check of the input guards: what it notices, and that it asks again after each change."""

from __future__ import annotations

import collections
import copy
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine import check
from tests.promise import bits


class Own(nn.Module):
    """A module with attributes of many kinds, all of which its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        self.norm = nn.LayerNorm(3)
        self.register_buffer("shift", torch.ones(3))
        self.number: Any = 1
        self.text = "plus"
        self.sizes: Any = (1, (2, 3))
        self.options: Any = {"gain": 2.0}
        self.nothing: Any = {}
        self.members: Any = set()
        self.named: Any = {"x", "y"}
        self.extra: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) + self.shift
        x = x * self.options["gain"] + len(self.nothing) + len(self.members)
        x = x + self.sizes[1][0] if self.text == "plus" else x
        if type(self.nothing) is not dict:
            x = x - 11
        if type(self.number) is bool:
            x = x + 7
        if self.extra is not None:
            x = x * self.extra
        for name in sorted(map(str, self.named)):
            x = x * (len(name) + 1)
        return x * float(self.number)


class Louder(nn.Linear):
    """Another class to change a module into."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Marked(nn.Parameter):
    """A class of parameters."""


def reorder(model: Own) -> None:
    table = model.layers._modules
    table["a"] = table.pop("a")


CHANGES: dict[str, Callable[[Own], object]] = {
    "a number": lambda m: setattr(m, "number", 2),
    "an equal number of another type": lambda m: setattr(m, "number", True),
    "a float that is equal": lambda m: setattr(m, "number", 1.0),
    "a text": lambda m: setattr(m, "text", "minus"),
    "a tuple in a tuple": lambda m: setattr(m, "sizes", (1, (5, 3))),
    "an entry of a dict": lambda m: m.options.__setitem__("gain", 3.0),
    "another dict": lambda m: setattr(m, "options", {"gain": 4.0}),
    "an entry of an empty dict": lambda m: m.nothing.__setitem__("a", 1),
    "another dict for an empty one": lambda m: setattr(m, "nothing", {"a": 1}),
    "an ordered dict for an empty one": lambda m: setattr(
        m, "nothing", collections.OrderedDict(a=1)
    ),
    "an empty list for an empty dict": lambda m: setattr(m, "nothing", []),
    "a member of an empty set": lambda m: m.members.add(1),
    "another set": lambda m: setattr(m, "members", {1, 2}),
    "a member of a set": lambda m: m.named.add("longer"),
    "an equal member of another type": lambda m: setattr(m, "named", {1, "y"}),
    "what was nothing": lambda m: setattr(m, "extra", 3),
    "the training mode of a part": lambda m: m.norm.train(not m.norm.training),
    "another layer": lambda m: m.layers.__setitem__("a", nn.Linear(3, 3)),
    "one layer more": lambda m: m.layers.__setitem__("c", nn.Linear(3, 3)),
    "one layer less": lambda m: m.layers.pop("b"),
    "another order": reorder,
    "the class of a layer": lambda m: setattr(m.layers["a"], "__class__", Louder),
    "no bias any more": lambda m: setattr(m.layers["a"], "bias", None),
    "the class of a parameter": lambda m: setattr(m.layers["a"].weight, "__class__", Marked),
    "the epsilon of a layer": lambda m: setattr(m.norm, "eps", 0.5),
    "another table of submodules": lambda m: setattr(
        m.layers, "_modules", {"a": nn.Linear(3, 3), "b": m.layers["b"]}
    ),
    "another table of parameters": lambda m: m.norm.__dict__.__setitem__(
        "_parameters", {name: nn.Parameter(p + 1) for name, p in m.norm._parameters.items()}
    ),
    "another table of buffers": lambda m: m.__dict__.__setitem__(
        "_buffers", {"shift": torch.zeros(3)}
    ),
    "other attributes at once": lambda m: setattr(m.norm, "__dict__", {**vars(m.norm), "eps": 0.5}),
    "a forward of its own": lambda m: setattr(m.norm, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("reads_words", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_noticed_at_once_and_afterwards_all_is_served_again(
    change: Callable[[Own], object], reads_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads_words:  # of what is in tables, as of the many tensors of a large model
        monkeypatch.setattr(check, "_FEW_ENTRIES", 0)
    torch.manual_seed(0)
    model = Own().eval()
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3)
    with torch.no_grad():
        for _ in range(2):
            assert bits(bended(x)) == bits(model(x))
        served = bended.stats.replays
        change(model)
        for _ in range(3):
            assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 2
    assert bended.stats.replays == served + 2
    assert bended.last_mismatch is not None


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (1, True), (1, 1.0), (1, 1 + 0j)])
def test_members_of_a_set_are_compared_with_their_sign_and_type(before: Any, after: Any):
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = {before}

        def forward(self, x: Tensor) -> Tensor:
            (member,) = self.members
            return x / member if type(member) is float else x * len(str(member))

    model = Reads()
    bended = bt.BendedModule(model)
    x = torch.ones(2)
    for member in (before, before, after, after):
        model.members = {member}
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 2


def test_a_change_that_is_taken_back_is_served_by_the_first_trace():
    model = Own().eval()
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3)
    for number in (1, 5, 1, 5, 1):
        model.number = number
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 2
    assert bended.stats.replays == 3


class Ordered(nn.Module):
    """Reads the order of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = nn.Linear(3, 3), 1.5
        self.one, self.other = 2.0, 3.0

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        names = [name for name in vars(self) if name in ("one", "other", "third")]
        for name in names:
            x = x * 2 + getattr(self, name)
        return self.fc(x)


def _name_again(model: nn.Module) -> None:
    vars(model)["".join(("on", "e"))] = vars(model).pop("one")  # behind the other one


@pytest.mark.parametrize(
    "change",
    [
        _name_again,
        lambda m: vars(m).__setitem__("third", vars(m).pop("other")),
        lambda m: setattr(m, "third", 4.0),
        lambda m: delattr(m, "one"),
        lambda m: setattr(m, "_parameters", dict(m._parameters)),
        lambda m: setattr(m, "_modules", {"fc": nn.Linear(3, 3)}),
        lambda m: setattr(m, "__dict__", {**vars(m), "one": 5.0}),
        lambda m: setattr(m, "one", 2),
    ],
)
def test_other_attributes_are_noticed_where_one_is_assigned_before_each_call(
    change: Callable[[nn.Module], object],
) -> None:
    torch.manual_seed(0)
    model = Ordered()
    bended, x = bt.BendedModule(model), torch.randn(2, 3)

    def is_same() -> bool:
        model.gain = float("1.5")  # an equal one, which the dict counts as a change
        return bits(bended(x)) == bits(model(x))

    assert all(is_same() for _ in range(3))
    assert bended.stats.replays == 2
    change(model)
    for _ in range(3):
        assert is_same()
    assert bended.stats.replays == 4


def test_parameters_may_be_replaced_and_are_read_anew():
    model = Own().eval()
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3)
    bended(x)
    for _ in range(3):
        model.layers["a"].weight = nn.Parameter(torch.randn(3, 3))
        model.shift = torch.randn(3)
        assert bits(bended(x)) == bits(model(x))
    with torch.no_grad():
        model.layers["a"].weight.mul_(2)
    model.layers["b"].weight.data = torch.randn(3, 3)
    assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 1


def test_replaced_parameters_are_let_go():
    import weakref

    model = nn.Linear(3, 3)
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3)
    for _ in range(2):
        bended(x)
    old = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.randn(3, 3))
    assert old() is None


def test_a_key_that_comes_in_place_of_another_one_is_noticed():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    model = Reads()
    bended = bt.BendedModule(model)
    x = torch.ones(2)
    for _ in range(2):
        bended(x)
    model._parameters["other"] = model._parameters.pop("weight")
    with pytest.raises(AttributeError, match="weight"):
        bended(x)
    model._parameters["weight"] = model._parameters.pop("other")
    assert bits(bended(x)) == bits(model(x))


def test_what_is_equal_and_not_the_same_is_no_change():
    model = Own().eval()
    model.sizes = (1000, (2000, 3))
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3)
    bended(x)
    for _ in range(2):
        model.sizes = (int("1000"), (int("2000"), 3))
        model.text = "".join(("pl", "us"))
        model.options = {"gain": float("2.0")}
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 1


HOOKS: dict[str, Callable[[nn.Module, nn.Module, Callable[[Tensor], Tensor]], Any]] = {
    "forward": lambda model, layer, f: layer.register_forward_hook(lambda m, a, out: f(out)),
    "with kwargs": lambda model, layer, f: layer.register_forward_hook(
        lambda m, a, k, out: f(out), with_kwargs=True
    ),
    "pre": lambda model, layer, f: layer.register_forward_pre_hook(lambda m, a: (f(a[0]),)),
    "backward": lambda model, layer, f: layer.register_full_backward_hook(
        lambda m, given, out: (f(given[0]),)
    ),
    "model": lambda model, layer, f: model.register_forward_hook(lambda m, a, out: f(out)),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_of_a_trace_that_are_exchanged_or_removed_are_noticed(
    register: Callable[..., Any],
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    bended = bt.BendedModule(model)

    def same(count: int = 2) -> bool:
        found = []
        for call in (model, bended) * count:
            x = torch.ones(1, 2, requires_grad=True)
            out = call(x)
            out.sum().backward()
            found.append((bits(out), bits(x.grad)))
        return all(one == found[0] for one in found)

    first = register(model, model[0], lambda value: value * 2)
    assert same(3)
    first.remove()
    second = register(model, model[0], lambda value: value * 3)
    assert same()
    third = register(model, model[0], lambda value: value + 1)
    assert same()
    second.remove()
    assert same()
    third.remove()
    assert same()


def test_hooks_in_another_order_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    hooks = [
        model[0].register_forward_hook(lambda m, a, out: out * 2),
        model[0].register_forward_hook(lambda m, a, out: out + 1),
    ]
    bended, x = bt.BendedModule(model), torch.ones(1, 2)
    assert bits(bended(x)) == bits(bended(x)) == bits(model(x))
    table: Any = model[0]._forward_hooks
    table[hooks[0].id] = table.pop(hooks[0].id)
    assert bits(bended(x)) == bits(model(x))
    table[hooks[0].id] = lambda m, a, out: out * 7
    assert bits(bended(x)) == bits(model(x))


def test_hooks_in_another_table_are_noticed():
    model = Own().eval()
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3)
    for _ in range(2):
        bended(x)
    model.norm._forward_hooks = collections.OrderedDict()
    assert bits(bended(x)) == bits(model(x))
    model.norm.register_forward_hook(lambda module, args, output: output * 5)
    for _ in range(2):
        assert bits(bended(x)) == bits(model(x))


def test_an_attribute_of_a_class_that_changes_is_noticed():
    class Reads(nn.Module):
        gain: Any = 2

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    model = Reads()
    bended = bt.BendedModule(model)
    x = torch.ones(2, dtype=torch.int64)
    for gain in (2, 2, 3, 2.0, True, 3):
        Reads.gain = gain
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 4
    Reads.forward = lambda self, x: x - self.gain  # type: ignore[method-assign]
    for _ in range(2):
        assert bits(bended(x)) == bits(model(x))


OFFSET = 1.0


def test_a_global_that_changes_is_noticed():
    def model(x: Tensor) -> Tensor:
        return x + OFFSET

    bended = bt.BendedModule(model)
    x = torch.ones(2)
    try:
        for value in (1.0, 2.0, 1.0, -0.0, 0.0):
            globals()["OFFSET"] = value
            globals()["UNRELATED"] = value  # written to the same dict, and of no account
            assert bits(bended(x)) == bits(model(x))
    finally:
        globals()["OFFSET"] = 1.0
    assert bended.stats.traces == 3  # it is an input from then on


def test_a_method_that_hides_an_inherited_one_is_noticed_if_another_goes() -> None:
    class Base(nn.Module):
        def act(self, x: Tensor) -> Tensor:
            return x.relu()

    class Model(Base):
        unused = 1

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

    model, x = Model(), torch.tensor([-1.0, 2.0])
    bended = bt.BendedModule(model)
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    del Model.unused
    Model.act = lambda self, x: x.sigmoid()
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 2


def test_a_slot_that_was_empty_is_noticed_when_it_is_filled() -> None:
    class Settings:
        __slots__ = ("factor", "shift")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()
            self.settings.factor = 2.0

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.settings.factor
            return x + self.settings.shift if hasattr(self.settings, "shift") else x

    model, x = Model(), torch.ones(2)
    bended = bt.BendedModule(model)
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    model.settings.shift = 5.0
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    del model.settings.shift
    assert bits(bended(x)) == bits(model(x))


def test_a_global_that_was_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: Tensor) -> Tensor:
        try:
            chosen = NOT_THERE_YET
        except NameError:
            chosen = False
        return x + 1 if chosen else x - 1

    bended, x = bt.BendedModule(model), torch.ones(2)
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    monkeypatch.setitem(globals(), "NOT_THERE_YET", True)
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x)) == bits(x + 1)
    monkeypatch.delitem(globals(), "NOT_THERE_YET")
    assert bits(bended(x)) == bits(model(x))


def test_parameters_in_another_order_are_noticed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            for parameter in self.parameters():
                x = x * 2 + parameter
            return x

    model, x = Model(), torch.ones(2)
    bended = bt.BendedModule(model)
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    first = model.a
    del model.a
    model.a = first
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 2


def test_an_object_without_attributes_may_get_one_that_hides_its_classs() -> None:
    class Settings:
        factor = 1.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.settings.factor

    model, x = Model(), torch.ones(2)
    bended = bt.BendedModule(model)
    for factor in (None, None, 4.0, 4.0, 5.0):
        if factor is not None:
            model.settings.factor = factor
        assert bits(bended(x)) == bits(model(x))


def test_a_helper_object_of_another_class_is_noticed() -> None:
    class Plus:
        def __init__(self) -> None:
            self.amount = 2.0

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.amount

    class Times(Plus):
        def __call__(self, x: Tensor) -> Tensor:
            return x * self.amount * 5

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper, self.list = Plus(), [Plus()]

        def forward(self, x: Tensor) -> Tensor:
            return self.list[0](self.helper(x))

    model, x = Model(), torch.ones(2)
    bended = bt.BendedModule(model)
    for change in (None, None, model.helper, None, model.list[0], None):
        if change is not None:
            change.__class__ = Times
        assert bits(bended(x)) == bits(model(x))


def test_an_argument_that_the_model_holds_by_now_is_noticed() -> None:
    class Memo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = None
            self.out: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if x is self.last:
                return self.out * 1
            self.last, self.out = x, torch.rand(2) + x
            return self.out + 1

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.options = nn.Parameter(torch.ones(2)), {"a": torch.ones(2)}

        def forward(self, x: Tensor, options: Any) -> Tensor:
            out = x * 2 if x is self.weight else x * 3
            return out + 1 if options is self.options else out

    a, b = torch.ones(2), torch.zeros(2)
    eager, model = Memo(), Memo()
    bended = bt.BendedModule(model)
    for number, x in enumerate((a, b, a, b, b, b, a, a, b)):
        torch.manual_seed(number)
        wanted, state = bits(eager(x)), torch.get_rng_state()
        torch.manual_seed(number)
        assert bits(bended(x)) == wanted
        assert torch.equal(torch.get_rng_state(), state)

    tied = Tied()
    bended = bt.BendedModule(tied)
    other = {"a": torch.ones(2)}
    for _ in range(2):
        for x in (a, tied.weight):
            for options in (other, tied.options):
                assert bits(bended(x, options)) == bits(tied(x, options))


def test_things_that_become_one_and_the_same_are_noticed() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * sum(w.pow(2).sum() for w in self.parameters())

    class Counting(Penalised):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x)

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first: Any = ([torch.ones(2)], "a")
            self.second: Any = [torch.ones(2)]

        def forward(self, x: Tensor) -> Tensor:
            self.first[0].append(x)
            out = x * len(self.second)
            self.first[0].pop()
            return out

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first: Any = {"t": torch.ones(2)}
            self.second: Any = {"t": torch.zeros(2)}
            self.listed = [torch.ones(2), torch.zeros(2)]

        def forward(self, x: Tensor, given: Any) -> Tensor:
            self.first["t"] = x * 2
            x = self.second["t"] + given["t"] + x
            return x + 1 if self.listed[0] is self.listed[1] else x

    def tie_weights(model: Any) -> None:
        model.q.weight = model.p.weight

    def hold_once(model: Any) -> None:
        model.second = model.first[0]

    x = torch.ones(2)
    for kind, tie in ((Penalised, tie_weights), (Counting, tie_weights), (Held, hold_once)):
        torch.manual_seed(0)
        eager = kind()
        model = copy.deepcopy(eager)
        bended = bt.BendedModule(model)
        for number in range(8):
            if number == 5:
                tie(model)
                tie(eager)
            assert bits(bended(x)) == bits(eager(x))

    def tie_list(model: Any) -> None:
        model.listed[1] = model.listed[0]

    def tie_dicts(model: Any) -> None:
        model.second = model.first

    for change in (tie_list, tie_dicts):
        eager, boxes = Boxes(), Boxes()
        bended = bt.BendedModule(boxes)
        for number in range(6):
            if number == 3:
                change(eager)
                change(boxes)
            given = {"t": torch.ones(2)}
            assert bits(bended(x, given)) == bits(eager(x, given))
        assert bits(bended(x, boxes.first)) == bits(eager(x, eager.first))
        assert bits(bended(x, boxes.first)) == bits(eager(x, eager.first))


def test_classes_that_the_model_holds_are_watched() -> None:
    class Meta(type):
        pass

    class Settings:
        factor = 2

    class Chosen(metaclass=Meta):
        factor = 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.chosen = [Settings], Chosen

        def forward(self, x: Tensor) -> Tensor:
            return x * self.classes[0].factor + self.chosen.factor

    model, x = Model(), torch.ones(2)
    bended = bt.BendedModule(model)
    for change in (None, None, (Settings, 5), None, (Chosen, 7), None):
        if change is not None:
            change[0].factor = change[1]
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 3


class Mapping(dict[str, int]):
    gain = 2.0


class Items(list[int]):
    gain = 2.0


class Fixed(tuple[int, ...]):
    gain = 2.0


@pytest.mark.parametrize("make", [lambda: Mapping(a=1), lambda: Items([1]), lambda: Fixed((1,))])
@pytest.mark.parametrize("is_argument", [False, True])
def test_attributes_of_a_container_are_noticed(make: Callable[[], Any], is_argument: bool) -> None:
    def read(x: Tensor, holder: Any) -> Tensor:
        x = x * (holder.extra if hasattr(holder, "extra") else 1) * holder.gain
        return x + len(vars(holder)) * len(holder)

    holder = make()
    model = read if is_argument else lambda x: read(x, holder)
    bended, args = bt.BendedModule(model), (torch.ones(2), holder)[: 1 + is_argument]
    changes: list[Callable[[], object]] = [
        lambda: setattr(holder, "extra", 3.0),
        lambda: setattr(holder, "gain", 7.0),
        lambda: setattr(holder, "other", None),
        lambda: delattr(holder, "extra"),
        lambda: delattr(holder, "other"),
    ]
    for change in [lambda: None, *changes]:
        change()
        for _ in range(2):
            assert bits(bended(*args)) == bits(model(*args))


class Sums(nn.Module):
    """Writes to a buffer, or to an argument, and reads an array after it."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(3, np.float32)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor, written: Tensor | None = None) -> Tensor:
        (self.total if written is None else written).add_(x)
        return x + float(self.array.sum())


@pytest.mark.parametrize("is_argument", [False, True])
def test_a_tensor_that_comes_to_lie_in_the_memory_of_an_array_is_noticed(is_argument: bool) -> None:
    found = []
    for is_traced in (False, True):
        model = Sums()
        call = bt.BendedModule(model) if is_traced else model
        args = [torch.ones(3), torch.zeros(3)][: 1 + is_argument]
        outputs = [bits(call(*args)) for _ in range(3)]
        shared = torch.from_numpy(model.array)
        if is_argument:
            args[1] = shared
        else:
            model.total = shared
        outputs += [bits(call(*args)) for _ in range(3)]
        found.append((outputs, model.array.tolist(), bits(model.total)))
    assert found[0] == found[1]
    assert found[0][1] != [0.0, 0.0, 0.0]


@pytest.mark.parametrize("is_by_keyword", [False, True])
def test_a_function_that_gets_its_first_defaults_is_noticed(is_by_keyword: bool) -> None:
    def by_position(x: Tensor, factor: float) -> Tensor:
        return x * factor

    def by_keyword(x: Tensor, *, factor: float) -> Tensor:
        return x * factor

    helper: Any = by_keyword if is_by_keyword else by_position

    def model(x: Tensor) -> Tensor:
        try:
            return helper(x)
        except TypeError:
            return x - 1

    bended, x = bt.BendedModule(model), torch.ones(2)
    for defaults in (None, 3.0, 4.0, None):
        if is_by_keyword:
            helper.__kwdefaults__ = None if defaults is None else {"factor": defaults}
        else:
            helper.__defaults__ = None if defaults is None else (defaults,)
        for _ in range(3):
            assert bits(bended(x)) == bits(model(x))


INSTALLED = """
import functools
import torch

factor = [2.0]

@functools.lru_cache
def cached(number):
    return torch.full((2,), float(number)) * factor[0]
"""


@pytest.mark.parametrize("is_filled_again", [False, True])
def test_a_cleared_cache_of_an_installed_package_is_noticed(is_filled_again: bool) -> None:
    package: dict[str, Any] = {"__name__": "an_installed_package"}
    file = Path(sysconfig.get_paths()["purelib"], "an_installed_package.py")
    exec(compile(INSTALLED, str(file), "exec"), package)
    cached = package["cached"]

    def model(x: Tensor) -> Tensor:
        return x + cached(3)

    bended, x = bt.BendedModule(model), torch.ones(2)
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    package["factor"][0] = 4.0
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    cached.cache_clear()
    if is_filled_again:
        model(x)
    for _ in range(3):
        assert bits(bended(x)) == bits(x + 12)


class Thing:
    """An object that is compared by its identity."""

    def __init__(self) -> None:
        self.factor = 2.0


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Thing()
        self.items = [Thing()]
        self.named = {"a": Thing()}

    def forward(self, x: Tensor, thing: Thing) -> Tensor:
        if thing is self.one:
            return x * 2
        if thing in self.items:
            return x * 3
        return x * (4 if thing is self.named["a"] else 5)


def test_an_argument_that_is_an_object_of_the_model_is_noticed() -> None:
    model, thing, x = Holder(), Thing(), torch.ones(2)
    bended = bt.BendedModule(model)
    others = [model.one, model.items[0], model.named["a"]]
    for one in (thing, thing, *others, thing):
        assert bits(bended(x, one)) == bits(model(x, one))
    model.named["a"] = thing
    assert bits(bended(x, thing)) == bits(model(x, thing)) == bits(x * 4)
    model.items[0] = thing
    assert bits(bended(x, thing)) == bits(model(x, thing)) == bits(x * 3)
    model.one = thing
    assert bits(bended(x, thing)) == bits(model(x, thing)) == bits(x * 2)


class Bare(nn.Module):
    """A module whose tables are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.extras: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        for tensor in (*self.buffers(recurse=False), *self.parameters(recurse=False)):
            x = x * tensor
        for module in self.children():
            x = module(x)
        return x * (1 + len(self._buffers)) + len(self.extras)


def test_what_is_put_into_a_table_that_was_empty_is_noticed() -> None:
    changes: list[Callable[[Bare], object]] = [
        lambda bare: bare.register_buffer("extra", torch.full((2,), 3.0)),
        lambda bare: bare.register_parameter("extra", nn.Parameter(torch.full((2,), 4.0))),
        lambda bare: bare.add_module("extra", nn.Softplus()),
        lambda bare: bare.extras.update(a=1.0),
        lambda bare: bare.register_forward_hook(lambda module, args, out: out * 7),
        lambda bare: bare.register_forward_pre_hook(lambda module, args: (args[0] * 7,)),
    ]
    for change in changes:
        bare, x = Bare(), torch.ones(2)
        model = nn.Sequential(bare, nn.Tanh())
        bended = bt.BendedModule(model)
        for _ in range(3):
            assert bits(bended(x)) == bits(model(x))
        change(bare)
        for _ in range(2):
            assert bits(bended(x)) == bits(model(x))
