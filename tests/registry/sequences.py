"""Orders of calls, and what models hold between them: identity, containers, gradients, errors."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import math
import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.registry.calls import Call, after, args, case, in_turn, x


def flat(k: float) -> Call:
    return args(lambda: (torch.full((3, 2), k),))


def turned(k: float) -> Call:
    return args(lambda: (torch.full((2, 3), k).t(),))


def ones(*sizes: int) -> list[Call]:
    return [args(lambda n=n: (torch.ones(n),)) for n in sizes]


# Identity

ORDER = [flat(1), turned(1), turned(-1), flat(-1), turned(1), turned(-1)]
COPIED = [turned(1), flat(1), turned(2), flat(2)]


@case(*ORDER, *ORDER[::-1], *ORDER)
def guards_after_one_on_identity(x: Tensor) -> Tensor:
    y = x.contiguous()
    z = x * 2
    return z + y if x.sum() > 0 else z - y


@case(*COPIED)
def asks_whether_it_got_a_copy(x: Tensor) -> Tensor:
    return x * 2 if x.contiguous() is x else x * 3


IS_ONE: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda x, y: x is y,
    "id": lambda x, y: id(x) == id(y),
}
for _name, _is_one in IS_ONE.items():

    def asks(x: Tensor, is_one: Callable[[Any, Any], bool] = _is_one) -> Tensor:
        return x * 2 if is_one(x, x.contiguous()) else x * 3

    case(*COPIED, name=f"whose helper asks whether it got a copy by {_name}")(asks)


class Held(nn.Module):
    """Asks whether what a tensor tells of another tensor is one that the model holds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.other = torch.ones(3)
        self.view = self.other[:]
        self.name = name

    def hold(self, held: str) -> None:
        found = self.other if held == "own" else torch.ones(3)
        self.weight.grad = None if held == "none" else found
        self.view = torch.ones(3) if held == "none" else found[:]

    def forward(self, x: Tensor) -> Tensor:
        found = self.weight.grad if self.name == "grad" else self.view._base
        return x * 2 if found is self.other else x * 3


for _name in ("grad", "base"):
    for _order in itertools.permutations(("none", "own", "other")):
        holding = [after(lambda model, held=held: model.hold(held)) for held in _order * 2]
        case(*holding, name=f"a {_name} that the model holds: {', '.join(_order)}")(
            functools.partial(Held, _name)
        )


@case(*[args(lambda s=s: (torch.ones(2), torch.tensor(s))) for s in
        ((1.0, 1.0), (-1.0, 1.0), (-1.0, -1.0), (-1.0, -1.0))])  # fmt: skip
class AWeightAndASizeByOneNumber(nn.Module):
    """Reads a size where, along another path, it reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.one = nn.Parameter(torch.ones(2) * 7)
        self.other = nn.Parameter(torch.ones(2) * 9)

    def forward(self, x: Tensor, signs: Tensor) -> Tensor:
        self.count.add_(1)
        if signs[0] > 0:
            return x + self.one * self.other
        y = x * 5
        size = y.size(0)
        return y if signs[1] > 0 else y * size


def same_list(same: bool) -> Call:
    def make() -> tuple[Any, ...]:
        one = [1]
        return one, one if same else [1], torch.ones(1)

    return args(make)


@case(*map(same_list, (False, True, False, True)))
def one_list_as_two_arguments(a: list[int], b: list[int], x: Tensor) -> Tensor:
    a.append(1)
    return x * len(b)


@case(*ones(2, 2, 2), look=lambda model, out: [out, out[0] is out[1], model.last is out[0][0]])
class OneContainerInTwoPlaces(nn.Module):
    def forward(self, x: Tensor) -> Any:
        both = [x + 1]
        pair = (both, both)
        self.last = both
        return pair, pair


# Metadata and numbers


@case(*[args(lambda n=n: (torch.ones(3), torch.ones(n).double())) for n in (3, 1, 3, 1)])
def a_dtype_by_which_operand_is_a_scalar_tensor(x: Tensor, y: Tensor) -> Tensor:
    z = x + y.squeeze()
    return z * 2 if z.dtype == torch.float64 else z * 3


@case(x(1, 1, 1), x(-1, -1, -1), x(1, 1, 1), x(-1, -1, -1))
class MetadataReadBeforeAWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        flag = x.requires_grad
        x.mul_(self.w)
        y = x * 2 if x.sum() > 0 else x * 3
        return y * (5 if flag else 7)


@case(*ones(3, 1, 3, 1))
def the_sign_of_an_exponent(x: Tensor) -> Any:
    power = 2 ** (x.shape[0] - 2)
    return (x * 2 if isinstance(power, int) else x * 3), power


def is_int(n: Any) -> bool:
    return type(n) is int


@case(*[args(lambda n=n: (torch.ones(2), n)) for n in (2, 2.5, 2, 3)])
def a_helper_that_asks_for_the_exact_type(x: Tensor, n: float) -> Tensor:
    return x * 2 if is_int(n) else x * -1


SQUEEZED = [args(lambda x=x: (x.clone(),)) for x in
            (torch.ones(1, 3), -torch.ones(3), -torch.ones(1, 3))]  # fmt: skip


@case(*SQUEEZED, *SQUEEZED)
def a_rank_before_a_squeeze(x: Tensor) -> Tensor:
    rank = x.ndim
    x.squeeze_()
    return x * rank if x.sum() > 0 else x * (rank + 10)


@case(*[args(lambda v=v: (torch.tensor(v),)) for v in ([1j, 2], [1j, 2], [2j, 2])])
def a_list_of_complex_numbers(x: Tensor) -> Any:
    return x.tolist()


@case(*[args(lambda n=n: (torch.ones(2), torch.ones(n))) for n in (*range(1, 9), *[4] * 30)])
class AValueThatStopsChanging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        n = (steps * 1).shape[0]
        if n > self.longest:
            self.longest = n
        return x * self.longest


@case(*[x(*values) for values in (*itertools.permutations((1, 4, 7, 2)), (3, 3, 3, 3))])
def numbers_that_are_put_in_order(x: Tensor) -> Any:
    sizes = x.long().tolist()
    most = max(sizes)
    if x[0] > x[1]:
        most = min(most, sizes[0])
    return torch.arange(most) * sorted(sizes)[1], most, max(x.tolist()) * x


LENGTHS = ones(*range(1, 8), *range(7, 2, -1), 9, 3, 11, 9)


@case(*LENGTHS, served=in_turn("replays", 12))
class ACacheByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        if n not in self.cache:
            self.cache[n] = torch.arange(n).cos()
        return x * self.cache[n]


@case(*LENGTHS)
class ACacheOfTheLatestLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: OrderedDict[Any, Any] = OrderedDict()

    def forward(self, x: Tensor) -> Tensor:
        key = (x.shape[0], x.dtype)
        table = self.tables.pop(key, None)
        if table is None:
            table = torch.arange(x.shape[0]).cos(), torch.arange(x.shape[0]).sin()
        self.tables[key] = table
        if len(self.tables) > 3:
            self.tables.popitem(last=False)
        return x * table[0] + table[1]


@case(*[x(*values) for values in itertools.permutations((1, 2, -3, 4))])
class CountsAndMembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.usage: Any = collections.Counter()
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        best = int(x.argmax())
        self.usage[best] += 1
        if best not in self.seen:
            self.seen.add(best)
            return x * self.usage[best]
        return x.relu() if x[0] > x[1] else x + self.usage[best]


SETS = [args(lambda s=s: (torch.ones(2), set(s))) for s in ([1, 9], [9, 1], [0.0], [-0.0])]


@case(*SETS, *SETS)
def the_order_of_a_set_and_the_sign_of_zero(x: Tensor, numbers: set[Any]) -> Tensor:
    for number in numbers:
        x = torch.copysign(x * 2 + number, torch.tensor(float(number)))
    return x


# Names


@case(*ones(4, 4, 4))
def keywords_as_names_of_keyword_arguments(x: Tensor) -> Tensor:
    return x.random_(**{"from": 1, "to": 5})


@case(*ones(2, 2, 2), served=in_turn("replays", 2))
def a_positional_only_parameter_and_a_keyword(x: Tensor) -> Tensor:
    def both(x: Tensor, /, **others: Tensor) -> Tensor:
        return x * 2 + others["x"]

    return both(x, **{"x": torch.full((2,), 5.0)})


def step() -> None:
    """Would make a model that calls it run live."""
    torch.default_generator.get_state()


@case(*ones(3, 3, 3), served=in_turn("replays", 2))
class AnAttributeOfTheNameOfAGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class Output(dict):  # type: ignore[type-arg]
    pass


class OrderedOutput(collections.OrderedDict):  # type: ignore[type-arg]
    pass


def output_of(base: type, kind: Any, item: float, attribute: float) -> Call:
    def make() -> tuple[Any, ...]:
        output: Any = base(a=kind(item))
        output.a = kind(attribute)
        return torch.ones(2), output

    return args(make)


def an_item_and_an_attribute_of_one_name(x: Tensor, output: Any) -> Tensor:
    y = x * output["a"] + output.a
    output["a"] = y
    output.a = output.a * 2
    return y


VALUES = [(1.0, 1.0), (2.0, 1.0), (2.0, 5.0), (2.0, 5.0)]
for _base, _kind in itertools.product((Output, OrderedOutput), (float, torch.tensor)):
    case(
        *[output_of(_base, _kind, *pair) for pair in VALUES],
        name=f"an item and an attribute of one name: {_base.__name__}, {_kind.__name__}",
    )(an_item_and_an_attribute_of_one_name)


# State between calls


class Keeps(nn.Module):
    """Keeps something between calls; `kind` says what and how."""

    shared = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        type(self).shared = 0
        self.kind = kind
        self.queue: deque[float] = deque(maxlen=3)
        self.latest: deque[Any] = deque(maxlen=3)
        self.window, self.step = [1], 0
        self.seen: set[Any] = set()
        self.order = OrderedDict(a=1, b=2)
        self.large = [0] * 600
        if kind == "iterator":
            self.steps = iter(range(1, 100))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "deque":
            self.queue.append(float(x.detach().sum()))
            self.latest.extend([(x.shape[0],), 0.5])
            self.window = [*self.window[-2:], len(self.window)]
            self.step += 1
            return x * len(self.queue) * sum(self.window) * math.cos(self.step / 10)
        if self.kind == "set":
            self.seen.add((x.shape[0], len(self.seen)))
            return x * len(self.seen)
        if self.kind == "order":
            self.order.move_to_end(next(iter(self.order)))
            return x * next(iter(self.order.values()))
        if self.kind == "large":
            self.large[5] += 1
            return x * self.large[5]
        if self.kind == "iterator":
            return x * next(self.steps)
        assert self.kind == "class"
        type(self).shared += 1
        return x * type(self).shared


for _kind_of_state in ("deque", "set", "order", "large", "iterator", "class"):
    case(*ones(*[2] * 9), name=f"what a model keeps between calls: {_kind_of_state}")(
        functools.partial(Keeps, _kind_of_state)
    )


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def swap(self) -> None:
        self.parts["a"] = self.parts.pop("a")

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


case(*ones(3), *[after(Chain.swap)] * 2, name="submodules that change places")(Chain)


UP, DOWN = (args(lambda: (torch.arange(300.0),)), args(lambda: (torch.arange(300.0).flip(0),)))


@case(DOWN, UP, DOWN, UP)
def a_long_list_that_the_model_sorts(x: Tensor) -> Tensor:
    values = x.tolist()
    first = values[0]
    values.sort()
    return x * first


FACTOR = [1.0]


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.full((n,), FACTOR[0])


def refill(factor: float | None) -> Callable[[Any], None]:
    def clear(model: Any) -> None:
        if factor is not None:
            FACTOR[0] = factor
            table.cache_clear()

    return clear


@case(*[after(refill(factor)) for factor in (1.0, None, None, None, 7.0, None, None, None)])
def tensors_of_a_cache_that_is_cleared(x: Tensor) -> Tensor:
    return x * table(x.shape[0])


@functools.cache
def grid(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    found = torch.zeros(rows, 2, dtype=dtype, device=device)
    found[:, 0] = torch.arange(rows).sin() * FACTOR[0]
    found[:, 1] = torch.arange(rows).cos()
    return found


@functools.lru_cache(maxsize=8)
def grids(rows: int) -> tuple[Tensor, Tensor]:
    both = grid(rows, torch.float32, torch.device("cpu"))
    return both[:, 0] * table(rows), both[:, 1].add(1)


def clear_all(model: Any) -> None:
    for cache in (table, grid, grids):
        cache.cache_clear()


FILLING = [after(clear_all), *[after(refill(None), *[1.0] * n) for n in (3, 4, 4, 3, 5, 3)]]


@case(*FILLING, *FILLING[::-1])
def fills_of_nested_caches(x: Tensor) -> Tensor:
    sine, cosine = grids(x.shape[0])
    if x.sum() > 3:
        return x * sine + grid(len(x) + 1, x.dtype, x.device)[1:, 0]
    return x * cosine - table(x.shape[0])


@case(*FILLING[1:], *FILLING[::-1])
class FillsCacheOfItsMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - as models do
    def bias(self, rows: int) -> Tensor:
        with torch.no_grad():
            return self.fc(torch.arange(rows)[:, None].float())[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[:, None])[:, 0] + self.bias(x.shape[0])


# Gradients


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 2


square = Square.apply  # bound before any run: the common way to write it


@case(*ones(2, 2, 2))
def an_autograd_function_bound_before_the_run(x: Tensor) -> Tensor:
    return square(x).sum()


def trained(model: Any, out: Any) -> Any:
    out.backward()
    return out


@case(*[args(lambda: (torch.ones(4, 8),))] * 3, look=trained, served=in_turn("replays", 2))
class NoGradInsideAutocast(nn.Module):
    """It keeps the cache of weights that autocast has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
            with torch.no_grad():
                z = self.fc(x) * 2
            return self.fc(y + z).float().sum()


@case(*ones(3, 3, 3, 3))
class AGradientThatIsThereOrNot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.w.grad is not None:
            self.w.grad.zero_()
        (self.w * x).sum().backward()
        return self.w.grad * 2


def trained_or_not(model: Any, out: Any) -> Any:
    kept = model.__dict__.pop("kept", None)
    if out.requires_grad:
        out.sum().backward()
    return out, model.w.grad, None if kept is None else kept.grad


class WorksOnTheGraph(nn.Module):
    """Calls what works on a tensor's place in the graph of autograd, and not on its value."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(3.0) + 1)
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, x)


def with_a_hook(model: Any, x: Tensor) -> Tensor:
    y = model.w * 2
    y.register_hook(lambda gradient: gradient * 3)
    return x * y


def with_a_grad_that_is_retained(model: Any, x: Tensor) -> Tensor:
    y = model.w * 2
    y.retain_grad()
    model.__dict__["kept"] = y
    return x * y


def with_its_own_backward_pass(model: Any, x: Tensor) -> Tensor:
    (model.w * x).sum().backward()
    found = model.w.grad.clone()
    model.w.grad = None
    return x * found


def with_a_grad_that_it_sets(model: Any, x: Tensor) -> Tensor:
    model.w.grad = x.detach() * 2
    return x * model.w.grad


def with_a_leaf_of_its_own(model: Any, x: Tensor) -> Tensor:
    y = x.detach().clone().requires_grad_()
    (y * y).sum().backward()
    assert y.grad is not None
    return x * y.grad


def detached_in_place(model: Any, x: Tensor) -> Tensor:
    y = model.w * 2
    y.detach_()
    return x * y


def written_in_place(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.w.mul_(0.5)
    return x * model.w


for _work in (
    with_a_hook, with_a_grad_that_is_retained, with_its_own_backward_pass,
    with_a_grad_that_it_sets, with_a_leaf_of_its_own, detached_in_place, written_in_place,
):  # fmt: skip
    _calls = [
        args(lambda n=n: (torch.tensor([1.0, 2.0, 3.0], requires_grad=n == 1) * n,))
        for n in (1, 2, 3)
    ]
    case(*_calls, look=trained_or_not, name=f"a graph {_work.__name__}")(
        functools.partial(WorksOnTheGraph, _work)
    )


@case(*[args(lambda: (torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)))] * 3)
def a_view_that_torch_refuses_to_talk_about(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        view = x.view(-1)
    y = y + 1
    x.copy_(y)
    with torch.no_grad():
        view.add_(1)  # its base was changed under grad mode: its graph is undefined
    return y * 2


# What does not require gradients when it is made, and does later: none of it is live.


def written_under_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.zeros(2, 3)
    out[0] = model.w * x
    if out.sum() > 3:
        out[1] = model.w
    return out * 2


def marked_by_an_assignment(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        leaf = torch.zeros_like(x)
        leaf.requires_grad = True
    loss = (leaf * model.w + x).square()
    return x * torch.autograd.grad(loss.sum(), leaf)[0]


for _work in (written_under_grad, marked_by_an_assignment):
    _calls = [args(lambda n=n: (torch.tensor([1.0, 2.0, 3.0]) * n,)) for n in (1, 2, -3, 1, -3)]
    case(*_calls, look=trained_or_not, name=f"a graph {_work.__name__}", served=in_turn("live", 0))(
        functools.partial(WorksOnTheGraph, _work)
    )


@case(*[args(lambda: (torch.ones(2, 3),))] * 3, served=in_turn("replays", 2))
class GradientsOfADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.fc, parameters, (x,)).square().mean()

        found = torch.func.grad(loss)(dict(self.fc.named_parameters()))
        return found["weight"] * 2 + found["bias"]


# Copies


@case(*ones(2, 3, 2, 2, 3), served=in_turn("replays", 2))
class CopiesADictWithALongerAndLongerList(nn.Module):
    """A memo of copies names objects by their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {"sizes": [0], "tensor": torch.ones(2)}

    def forward(self, x: Tensor) -> Any:
        made = copy.deepcopy(self.held)
        made["sizes"].append(len(x))
        made["tensor"] += x.sum()
        self.held["sizes"] = [len(x)]
        return made, self.held["tensor"]


@case(*ones(2, 3, 2, 2))
def copies_of_two_views_share_memory(x: Tensor) -> list[Tensor]:
    sizes, whole, part = copy.deepcopy([len(x), x, x[1:]])
    part += sizes
    return [whole, part]


CACHE: list[int] = [0]


@functools.cache
def counted(size: int) -> int:
    CACHE[0] += 1
    return size + CACHE[0]


def cached(is_first: bool, size: int) -> Call:
    def change(model: Any) -> None:
        if is_first:
            counted.cache_clear()
            CACHE[0] = 0

    return after(change, *[1] * size)


@case(cached(True, 2), cached(False, 2), cached(False, 3), cached(False, 2))
def a_cache_that_counts(x: Tensor) -> Any:
    return x + counted(len(x)), CACHE[0]


class Counting(Tensor):
    """Counts what it is asked, and answers by the count."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func.__name__ == "add" and cls.asked % 2 else out


def counting(*values: float) -> Call:
    def call(model: Any) -> tuple[Tensor]:
        Counting.asked = 0
        return (torch.tensor(values).as_subclass(Counting),)

    return call


@case(
    *[counting(*values) for values in ((1, 2), (1, 2), (-1, 3), (1, 1))],
    look=lambda model, out: (out, Counting.asked),
    served=in_turn("replays", 2),
)
def a_subclass_that_counts_what_it_is_asked(x: Tensor) -> Tensor:
    y = x + 1
    y = y + x
    return y.sum() + x if (y > 0).all() else y


# Writes that only autograd notices


@case(*ones(2, 3, 2))
def a_leaf_that_is_written_to_without_gradients(x: Tensor) -> Tensor:
    leaf = nn.Parameter(x * 1)
    with torch.no_grad():
        leaf.mul_(2)
    return leaf * 2


@case(*ones(3, 3, 2, 2, 3))
def a_size_behind_a_write_to_a_view(x: Tensor) -> Tensor:
    size = x.numel()
    made = x.new_zeros(size, size)
    made.diagonal().fill_(1)
    viewed = made.view(size, *x.shape)
    return viewed * 2 if len(x) > 2 else viewed


# Errors


@case(*ones(3, 4, 3, 4, 3))
class AssignsBeforeAnError(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.n = x.shape[0]
        self.last = x
        return torch.zeros(3) + x


def pairs(*sizes: int) -> list[Call]:
    return [args(lambda n=n: (torch.ones(2, 3), torch.ones(n))) for n in sizes]


@case(*pairs(3, 2, 3, 2))
def an_error_that_a_finally_block_drops(x: Tensor, y: Tensor) -> Tensor:
    z = x
    try:
        z = x + y
    finally:
        return z * 2  # noqa: B012 - that is the point


@case(*pairs(2, 3, 2, 3, 3, 2), served=in_turn("replays", 4))
def an_op_that_raises_in_some_calls(x: Tensor, y: Tensor) -> Tensor:
    try:
        x.add_(y)
    except RuntimeError:
        return x * 3
    return x * 2


@case(*pairs(2, 4, 2, 4, 3, 3), served=in_turn("replays", 3))
def the_text_of_a_caught_error(x: Tensor, y: Tensor) -> tuple[Tensor, str]:
    try:
        return x + y, ""
    except RuntimeError as error:
        return x, str(error)


# Objects with a state in C, which are not rebuilt


def runs_live(bended: bt.BendedModule) -> None:
    assert bended.stats.live == 3


@case(*ones(2, 2, 2), look=lambda model, out: out.random(), served=runs_live)
def returns_a_generator(x: Tensor) -> Any:
    return random.Random(len(x))


@case(*ones(2, 2, 2), look=lambda model, out: out.group(), served=runs_live)
def returns_a_match(x: Tensor) -> Any:
    return re.match("a", "a")
