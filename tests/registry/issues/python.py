"""What Python means is lost: iterators, identity, containers, objects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.registry.issues._issue import issue
from tools.scoreboard.case import Step, Wrap, tried

Steps = Iterator[Step]
X = torch.arange(1.0, 5.0)


@issue(197896, "a method of a class made in the call changes a list and a dict of the closure")
def method_of_a_local_class(wrap: Wrap) -> Steps:
    state: dict[str, int] = {"n": 0}
    log: list[tuple[int, ...]] = []

    def model(x: Tensor) -> Tensor:
        class Helper:
            def touch(self) -> None:
                state["n"] += 1
                log.append(tuple(x.shape))

        Helper().touch()
        return x.sin()

    call = wrap(model)
    for number in range(3):
        out = call(X[: number + 1])
        yield Step("inputs" if number else "traced", (out, dict(state), list(log)))


@issue(192872, "a list of a class made in the call is appended to before and after a break")
def list_of_a_local_class(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        class Holder:
            items: list[int] = []  # noqa: RUF012

        Holder.items.append(1)
        y = x * 2
        if y.sum() > 0:
            Holder.items.append(2)
        return y * 3 + len(Holder.items)

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(-X))


@issue(174050, "a class says that it is another one, by __class__")
def other_class(wrap: Wrap) -> Steps:
    class Real:
        pass

    class Stand(Real):
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            return int

    def model(x: Tensor, thing: Any) -> Tensor:
        return x + 1 if isinstance(thing, int) else x - 1

    call = wrap(model)
    yield Step("traced", call(X, Stand()))
    yield Step("inputs", call(X, Real()))


@issue(165385, "an attribute that cannot be set is set in a try")
def attribute_that_cannot_be_set(wrap: Wrap) -> Steps:
    class Thing:
        pass

    def model(x: Tensor, thing: Any) -> Tensor:
        try:
            thing.__weakref__ = None
        except AttributeError:
            return x + 1
        return x - 1

    call = wrap(model)
    yield Step("traced", call(X, Thing()))
    yield Step("inputs", call(-X, Thing()))


@issue(152262, "an iterator that is used up does not say so")
def used_up(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        for values in (iter([1, 2, 3]), reversed([1, 2, 3])):
            list(values)
            try:
                next(values)
            except StopIteration:
                x = x.sin()
            else:
                x = x + 100
        return x

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(-X))


@issue(198190, "a generator that is returned loses what it returns itself, and send")
def returned_generator(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Any:
        def steps() -> Any:
            given = yield x * 1
            yield x * (2 if given is None else given)
            return "done"

        return steps()

    call = wrap(model)

    def used(x: Tensor, sent: Any) -> Any:
        generator = call(x)
        found = [next(generator), generator.send(sent)]
        try:
            next(generator)
        except StopIteration as stop:
            return found, stop.value
        return found

    yield Step("traced", tried(used, X, None))
    yield Step("inputs", tried(used, X, 5))


@issue(196211, "iter of a reversed iterator that was begun starts anew")
def begun_reversed(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        values = reversed([x, x + 2, x + 5])
        last: Tensor = next(values)
        return last - next(iter(values))

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(X * 3))


@issue(175855, "a list grows while a generator goes over it")
def growing_list(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        values = [x.sum()]

        def grow() -> Iterator[Tensor]:
            for item in values:
                if len(values) < 3:
                    values.append(item + 1)
                yield item

        return torch.stack(list(grow())).sum()

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(-X))


@issue(186671, "a subclass of set lies about its items in __iter__")
def lying_set(wrap: Wrap) -> Steps:
    class Lying(set):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([99])

    call = wrap(lambda x, one, two: x + 1 if one == two else x - 1)
    yield Step("traced", call(X, {1, 2, 3}, Lying({1, 2, 3})))
    yield Step("inputs", call(X, {99}, Lying({1, 2, 3})))


@issue(196167, "an ordered set loses its order")
def ordered_set(wrap: Wrap) -> Steps:
    from torch.utils._ordered_set import OrderedSet

    def model(x: Tensor) -> Any:
        numbers = OrderedSet([3, 1, 2])
        numbers.add(0)
        return list(numbers), x + next(iter(numbers))

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(-X))


@issue(106125, "objects are compared by an __eq__ that looks at their __dict__")
def equal_by_dict(wrap: Wrap) -> Steps:
    class Config:
        def __eq__(self, other: object) -> bool:
            return self.__dict__ == other.__dict__

        __hash__ = None  # type: ignore[assignment]

    class Model(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: Tensor, config: Config) -> Tensor:
            return x + 1 if self.config == config else x - 1

    one, two = Config(), Config()
    call = wrap(Model(one))
    yield Step("traced", call(X, two))
    two.size = 3  # type: ignore[attr-defined]
    yield Step("change", call(X, two))
    one.size = 3  # type: ignore[attr-defined]
    yield Step("change", call(X, two))


@issue(197101, "random.seed in a function has no effect in the call that captures it")
def seeding_python(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Any:
        random.seed(0)
        return x + random.random(), random.randint(0, 1000)

    call = wrap(model)
    for number in range(3):
        random.seed(100 + number)
        yield Step("inputs" if number else "traced", (call(X), random.random()))


@issue(197085, "random.shuffle and random.sample draw the same in each call")
def shuffled(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Any:
        order = list(range(6))
        random.shuffle(order)
        return x * order[0], order, random.sample(range(100), 3)

    call = wrap(model)
    random.seed(0)
    for number in range(3):
        yield Step("inputs" if number else "traced", (call(X), random.random()))


@issue(113539, "an array of numpy is resized in place")
def resized_array(wrap: Wrap) -> Steps:
    import numpy as np

    def model(x: Tensor) -> Tensor:
        array = np.arange(3)
        array.resize(3, 1, refcheck=False)
        return x.sum() * torch.from_numpy(array)

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(-X))


@issue(167, "in-place modules are taken for such as only pass on", "johnmarktaylor91/torchlens")
def in_place_modules(wrap: Wrap) -> Steps:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(4, 4),
                          nn.ReLU(inplace=True))  # fmt: skip
    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(-X))


@issue(143, "a log leaves out what runs under vmap", "johnmarktaylor91/torchlens")
def under_vmap(wrap: Wrap) -> Steps:
    weight = torch.arange(12.0).reshape(3, 4)

    def model(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row * x).sum())(weight) + 1

    call = wrap(model)
    yield Step("traced", call(X))
    weight.add_(1)
    yield Step("change", call(X))


@issue(432, "iterating over a tensor fails silently", "ndif-team/nnsight")
def iterating(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        return torch.stack([row.softmax(-1) for row in torch.stack([x, x * 2])])

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(torch.ones(3, 2)))


@issue(630, "a value that was kept is overwritten in place later on", "ndif-team/nnsight")
def overwritten(wrap: Wrap) -> Steps:
    kept: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        h = x * 2 - 3
        kept.append(h)
        return h.relu_() + 1

    call = wrap(model)
    for number in range(2):
        out = call(X * (number + 1))
        yield Step("inputs" if number else "traced", (out, [value.clone() for value in kept]))


@issue(502, "an assignment to a slice of a kept output is lost in a batch", "ndif-team/nnsight")
def assigned_slice(wrap: Wrap) -> Steps:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def hook(module: Any, given: Any, out: Tensor) -> None:
        out[:, 0] = 7.0

    model[0].register_forward_hook(hook)
    call = wrap(model)
    with torch.no_grad():
        yield Step("traced", call(torch.ones(2, 4)))
        yield Step("inputs", call(torch.ones(3, 4) * 2))
