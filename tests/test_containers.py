"""Operations on dicts and sets of a model's state are ops, where their content changes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import bendtrace as bt
from bendtrace.watch import containers, environment, growing
from bendtrace.watch.growing import hands_over
from tests.promise import bits

TABLES: dict[Any, Any] = {}


@dataclasses.dataclass
class Usage:
    counts: dict[int, int] = dataclasses.field(default_factory=dict)


class Holds(nn.Module):
    """Holds containers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.cache: Any = {}
        self.same = self.shared = {}
        self.inside: dict[str, Any] = {"cache": {}, "n": 1}
        self.ordered: Any = collections.OrderedDict()
        self.counter: Any = collections.Counter()
        self.numbers: Any = collections.defaultdict(int)
        self.lists: Any = collections.defaultdict(list)
        self.seen: Any = set()
        self.rows: list[float] = []
        self.queue: Any = collections.deque()
        self.usage = Usage()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


def held(model: Any) -> Any:
    own = {key: value for key, value in vars(model).items() if key[0] != "_"}
    found = [_content(value) for value in own.values()]
    return bits([found, _content(TABLES)])


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return [
            type(value).__name__,
            [[str(type(k)), _content(k), _content(v)] for k, v in value.items()],
        ]
    if isinstance(value, torch.device):  # of which eager makes a new object each time
        return str(value)
    if isinstance(value, (set, list, tuple)):
        return [type(value).__name__, *map(_content, value)]
    if isinstance(value, Usage):
        return _content(value.counts)
    return value


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return bits(call(*args))
    except Exception as error:
        return type(error).__name__, str(error)


def stream(
    forward: Callable[[Any, Tensor], Any],
    calls: int = 60,
    change: Callable[[Any, int], None] | None = None,
    **options: Any,
) -> bt.BendedModule:
    """Compare calls with the model's own, and what they leave; return what has served them."""
    kind = type("Model", (Holds,), {"forward": forward})
    torch.manual_seed(0)
    eager, own = kind(), kind()
    own.load_state_dict(eager.state_dict())
    bended = bt.BendedModule(own, **options)
    tables: list[Any] = [{}, {}]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for number in range(calls):
            x = torch.randn(int(torch.randint(1, 25, (), generator=generator)), 3)
            found = []
            for at, called in enumerate((eager, bended)):
                model = (eager, own)[at]
                TABLES.clear()
                TABLES.update(tables[at])
                if change is not None:
                    change(model, number)
                result = outcome(called, x.clone())
                tables[at] = dict(TABLES)
                found.append((result, held(model)))
            assert found[0] == found[1], number
            for value in (*vars(own).values(), own.inside["cache"], TABLES):
                assert not issubclass(type(value), containers.Watching)
    return bended


PROGRAMS: dict[str, tuple[int, Callable[[Any, Tensor], Any]]] = {}


def program(paths: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[forward.__name__] = paths, forward
        return forward

    return add


@program(6)
def a_cache_by_length(self: Holds, x: Tensor) -> Tensor:
    n = x.size(0)
    if n not in self.cache:
        self.cache[n] = torch.arange(n).cos()
    return self.fc(x) * self.cache[n][:, None]


@program(6)
def a_cache_by_several_numbers(self: Holds, x: Tensor) -> Tensor:
    key = (x.shape[0], x.dtype, x.device, "cos")
    table = self.cache.get(key)
    if table is None:
        table = self.cache[key] = torch.arange(x.shape[0], dtype=x.dtype).cos()
    return x * table[:, None]


@program(6)
def a_cache_that_is_shared(self: Holds, x: Tensor) -> Tensor:
    """The dict is a global, and holds tuples."""
    return _table(len(x))[0][:, None] * x


def _table(n: int) -> Any:
    if n not in TABLES:
        angles = torch.arange(n)
        TABLES[n] = angles.cos(), angles.sin()
    return TABLES[n]


@program(6)
def a_cache_in_a_dict(self: Holds, x: Tensor) -> Tensor:
    cache = self.inside["cache"]
    return cache.setdefault(x.shape[0], torch.ones(x.shape[0])) @ x


@program(10)
def a_cache_of_bounded_size(self: Holds, x: Tensor) -> Tensor:
    n = x.shape[0]
    if n in self.ordered:
        self.ordered.move_to_end(n)
    else:
        self.ordered[n] = torch.arange(n).cos()
        if len(self.ordered) > 6:
            self.ordered.popitem(last=False)
    return x * self.ordered[n][:, None]


@program(10)
def a_cache_that_is_cleared(self: Holds, x: Tensor) -> Tensor:
    if len(self.cache) > 5:
        self.cache.clear()
    self.cache[len(x)] = x.sum()
    return self.cache[len(x)] * x


@program(7)
def members(self: Holds, x: Tensor) -> Any:
    best = int(x.argmax())
    is_new = best not in self.seen
    self.seen.add(best)
    self.seen.discard(best - 1)
    return x * 2 if is_new else x


@program(6)
def counts(self: Holds, x: Tensor) -> Any:
    best = int(x.argmax())
    self.counter[best] += 1
    self.numbers[best] += 2
    self.usage.counts[best] = self.usage.counts.get(best, 0) + 1
    return x * self.counter[best] + self.numbers[best]


@program(8)
def counts_of_lists(self: Holds, x: Tensor) -> Any:
    rows = (x[0] * 100).long().tolist()
    self.counter.update(rows)
    self.seen.update(rows)
    return x * len(self.counter) + len(self.seen)


@program(7)
def written_to(self: Holds, x: Tensor) -> Tensor:
    best = int(x[0].argmax())
    if best in self.cache:
        self.cache[best].mul_(0.5).add_(x[0])
    else:
        self.cache[best] = x[0].clone()
    return self.cache[best] * 2


@program(6)
def errors_that_are_caught(self: Holds, x: Tensor) -> Tensor:
    try:
        table = self.cache[len(x)]
    except KeyError:
        table = self.cache[len(x)] = torch.arange(len(x)).cos()
    return x * table[:, None]


@program(8)
def an_answer_after_it(self: Holds, x: Tensor) -> Any:
    """A call that leaves the known paths stores nothing twice."""
    cache = self.cache
    n = x.shape[0]
    cache[n] = cache.pop(n, 0) + 1
    self.seen.add(n)
    return x * 2 if x.sum() > 0 else x - cache[n]


@program(16)
def members_that_are_gone_through(self: Holds, x: Tensor) -> Tensor:
    """A replay goes through them on the container itself, in its order."""
    self.seen.add(len(x) % 5)
    self.cache[len(x) % 3] = x.sum()
    first = sum(list(self.cache)) + min(self.seen) - max(self.cache) + tuple(self.seen)[-1]
    return x * sum(sorted(self.seen)) + first


@program(16)
def values_that_are_gone_through(self: Holds, x: Tensor) -> Tensor:
    self.numbers[len(x) % 4] += 1
    self.cache[len(x) % 3] = x.mean().item()
    first = sorted(self.numbers.items())[0]
    return x * sum(self.numbers.values()) + sum(self.cache.values()) + first[1]


@program(6)
def what_is_most_common(self: Holds, x: Tensor) -> Tensor:
    self.counter.update(x[:1].argmax(1).tolist())
    number, times = self.counter.most_common(1)[0]
    return x * number + times / self.counter.total()


@program(9)
def a_list_that_gets_longer(self: Holds, x: Tensor) -> Any:
    self.rows.append(x.mean().item())
    if len(self.rows) > 10:
        x = x * (sum(self.rows[-10:]) / 10)
    return x * (self.rows[-1] + max(self.rows)) / len(self.rows)


@program(7)
def a_deque_of_tensors(self: Holds, x: Tensor) -> Any:
    self.queue.append(x.mean(0))
    if len(self.queue) > 3:
        self.queue.popleft()
    return x * self.queue[0] + self.queue[-1].sum()


@program(12)
def lists_by_number(self: Holds, x: Tensor) -> Any:
    self.lists[len(x)].append(x.mean().item())
    row = self.lists[len(x)]
    return x * (sum(row) / len(row)) + len(self.lists)


@program(10)
def counts_by_number_in_a_dict(self: Holds, x: Tensor) -> Any:
    self.cache.setdefault(len(x), {})["n"] = 1
    own = self.cache[len(x)]
    own["n"] += int(x.argmax())
    return x * own["n"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_operations_are_done_again_by_replays(name: str) -> None:
    paths, forward = PROGRAMS[name]
    bended = stream(forward, 120)
    assert bended.stats.traces <= paths, bended.stats
    assert bended.stats.live <= 2, bended.why_live


def as_a_whole(self: Holds, x: Tensor) -> Any:
    self.cache[len(x)] = x.sum()
    return sum(self.cache.values()) * x


def sorted_members(self: Holds, x: Tensor) -> Any:
    self.seen.add(int(x.argmax()))
    return x * sorted(self.seen)[0] + len(set(self.seen)) + len({-1} | self.seen)


def merged(self: Holds, x: Tensor) -> Any:
    self.cache[len(x)] = len(x)
    return x, {**self.cache}, dict(self.cache), self.cache == {len(x): len(x)}


def copied(self: Holds, x: Tensor) -> Any:
    self.cache[len(x)] = len(x)
    return x, copy.copy(self.cache), copy.deepcopy(self.cache)


def of_an_exact_type(self: Holds, x: Tensor) -> Any:
    self.cache[len(x)] = len(x)
    return x if type(self.cache) is dict and isinstance(self.cache, dict) else -x


def under_two_names(self: Holds, x: Tensor) -> Any:
    self.shared[len(x)] = len(x)
    return x * len(self.same)


def told_by_identity(self: Holds, x: Tensor) -> Any:
    self.cache[len(x)] = len(x)
    return x if self.cache is self.__dict__["cache"] else -x


def replaced(self: Holds, x: Tensor) -> Any:
    self.cache = {}
    self.cache[len(x)] = x.sum()
    return self.cache[len(x)] * x


def replaced_at_times(self: Holds, x: Tensor) -> Any:
    if len(self.cache) > 3:
        self.cache = {}
    self.cache[len(x)] = x.sum()
    return self.cache[len(x)] * x


def lists(self: Holds, x: Tensor) -> Any:
    self.lists[len(x) % 5].append(len(x))
    return x * len(self.lists[len(x) % 5])


def holding_lists(self: Holds, x: Tensor) -> Any:
    found = self.cache.setdefault(len(x), [])
    found.append(1)
    return x * len(found)


def kept_elsewhere(self: Holds, x: Tensor) -> Any:
    cache = self.cache
    cache[len(x)] = len(x)
    self.kept = (cache, 1)
    return x, cache


def in_a_list(self: Holds, x: Tensor) -> Any:
    """A function of torch's asks for the exact type of each container."""
    self.cache[len(x)] = len(x)
    found = tree_map(lambda one: one + 1 if isinstance(one, int) else one, [self.cache])
    return x, [dict(one) for one in found]


def returned(self: Holds, x: Tensor) -> Any:
    self.cache[len(x)] = len(x)
    self.seen.add(len(x))
    return (x * 2, self.cache) if x.sum() > 0 else (x, self.seen)


def in_a_closure(self: Holds, x: Tensor) -> Any:
    cache = self.cache
    cache[len(x)] = len(x)
    return x, (lambda: cache)().get(3), [one for one in (1, 2) if one in cache]


def tensors_as_keys(self: Holds, x: Tensor) -> Any:
    self.cache[x] = len(x)
    return x * self.cache[x] + len(self.cache)


def parameters(self: Holds, x: Tensor) -> Any:
    self.cache[len(x)] = self.fc.weight
    return x @ self.cache[len(x)] + self.fc(x)


def floats_as_keys(self: Holds, x: Tensor) -> Any:
    self.cache[x.sum().item()] = 1
    return x * len(self.cache)


def truth(self: Holds, x: Tensor) -> Any:
    if self.cache and not self.seen:
        x = x * 2
    self.cache[len(x)] = len(x)
    if len(x) % 4 == 0:
        self.cache.clear()
        self.seen.add(len(x))
    elif len(x) % 4 == 1:
        self.seen.clear()
    return x


def counted(self: Holds, x: Tensor) -> Any:
    self.counter.update([len(x)])
    return x * self.counter.most_common(1)[0][1]


def sizes_as_keys(self: Holds, x: Tensor) -> Any:
    self.cache[x.shape] = len(x)
    return x * self.cache[x.shape], [type(key) for key in self.cache]


def errors(self: Holds, x: Tensor) -> Any:
    self.seen.add(len(x))
    self.cache[len(x) % 7] = 1
    return x * self.cache[len(x) % 5] / (0 if len(x) % 11 == 3 else 1)


def all_values_behind_a_question(self: Holds, x: Tensor) -> Any:
    n = x.size(0)  # which nothing reads any more where a resumed run goes on
    self.cache[n] = n
    return x * sum(self.cache.values()) if x.sum() > 2 else x


OTHERS = [
    as_a_whole, sorted_members, merged, copied, of_an_exact_type, under_two_names,
    told_by_identity, replaced, replaced_at_times, lists, holding_lists, kept_elsewhere,
    in_a_list, returned, in_a_closure, tensors_as_keys, parameters, floats_as_keys, truth,
    counted, sizes_as_keys, errors, all_values_behind_a_question,
]  # fmt: skip


@pytest.mark.parametrize("forward", OTHERS, ids=lambda one: one.__name__)
def test_other_uses_are_right(forward: Callable[[Any, Tensor], Any]) -> None:
    stream(forward)


def emptied(model: Any, number: int) -> None:
    """Others change the containers between calls."""
    if number % 7 == 3:
        model.cache.clear()
    if number % 11 == 5:
        model.cache = {5: torch.ones(5), 8: torch.ones(8)}
    if number % 13 == 12:
        model.cache.update({n: torch.zeros(n) for n in range(1, 25)})


@pytest.mark.parametrize("options", [{}, {"backend": "aot_eager"}, {"audit": 1.0}], ids=str)
def test_others_may_change_the_containers(options: dict[str, Any]) -> None:
    stream(a_cache_by_length, change=emptied, **options)
    stream(written_to, change=emptied, **options)


def test_what_is_inserted_is_called_with_the_same_values() -> None:
    kind = type("Model", (Holds,), {"forward": a_cache_by_length})
    torch.manual_seed(0)
    eager, own = kind(), kind()
    own.load_state_dict(eager.state_dict())
    eager.fc.register_forward_hook(lambda module, args, output: output * 1.5)
    bended = bt.BendedModule(own)
    seen = []
    bended.interject(own.fc, lambda value: value * 1.5)
    for number in range(1, 40):
        x = torch.randn(number % 12 + 1, 3, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        wanted, found = eager(x), bended(y)
        wanted.sum().backward()
        found.sum().backward()
        assert bits([wanted, x.grad, eager.cache]) == bits([found, y.grad, own.cache])
        seen.append(bended.stats.traces)
    assert seen[-1] == seen[12]


def test_threads_may_use_a_container_meanwhile() -> None:
    kind = type("Model", (Holds,), {"forward": a_cache_by_length})
    model = kind()
    bended = bt.BendedModule(model)
    stopped, wrong = threading.Event(), []

    def look() -> None:
        while not stopped.is_set():
            for n in range(1, 25):
                found = model.cache.get(n)
                if found is not None and len(found) != n:
                    wrong.append(n)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(60):
            x = torch.randn(number % 24 + 1, 3)
            bended(x)
    finally:
        stopped.set()
        thread.join()
    assert not wrong
    assert type(model.cache) is dict
    assert list(model.cache) == [*range(1, 25)]


def test_an_error_of_the_model_leaves_the_containers_in_place() -> None:
    def forward(self: Holds, x: Tensor) -> Tensor:
        self.cache[len(x)] = len(x)
        return x.view(len(x), 4) if len(x) % 3 == 0 else x

    stream(forward)


def test_runs_inside_of_runs_share_a_container() -> None:
    def inside(x: Tensor) -> Tensor:
        return x * _table(len(x))[0][:, None]

    def make(wrap: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
        inner = wrap(inside)
        as_one = bt.opaque(lambda x: inner(x))

        def around(x: Tensor) -> Any:
            n = len(x) + 100
            if n not in TABLES:
                TABLES[n] = torch.ones(()), torch.zeros(())
            return as_one(x) * TABLES[n][0]

        return wrap(around)  # type: ignore[no-any-return]

    seen = []
    for wrap in (lambda model: model, bt.BendedModule):
        TABLES.clear()
        model = make(wrap)
        outputs = [model(torch.ones(n, 3)) for n in [*range(1, 10)] * 2]
        seen.append(bits([outputs, _content(TABLES)]))
    assert seen[0] == seen[1]
    TABLES.clear()


def test_a_reason_names_the_use() -> None:
    bended = stream(as_a_whole)
    assert "dict.values of a dict that changes from call to call at" in str(bended.why_live)
    assert bended.stats.live == 1


def test_code_that_only_a_run_shows_may_hand_a_container_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growing, "hands_over", lambda *args: LEAKS)
    globals()["LEAKS"] = False
    kind = type("Model", (Holds,), {"forward": a_cache_by_length})
    bended = bt.BendedModule(kind())
    for n in (1, 2):
        bended(torch.ones(n, 3))
    scanned = environment.Environment._containers

    def containers_then_leak(self: Any, labels: frozenset[str]) -> Any:
        found = scanned(self, labels)
        globals()["LEAKS"] = True
        return found

    monkeypatch.setattr(environment.Environment, "_containers", containers_then_leak)
    bended(torch.ones(3, 3))
    assert "the run does more with self.cache than operations on it" in str(bended.why_live)
    monkeypatch.undo()
    bended(torch.ones(4, 3))
    assert [*bended.model.cache] == [1, 2, 3, 4]


LEAKS = False

USES: dict[str, tuple[str, int, bool]] = {
    "c.cache[k] = v; c.cache[k] += 1; del c.cache[k]": ("cache", 0, False),
    "k in c.cache or (len(c.cache) > 5 and not c.cache)": ("cache", 0, False),
    "own = c.cache; own.get(k); f(len(own), own[k])": ("cache", 0, False),
    "f(c.cache[k.shape[0], -v][:, None], k=(k, v))": ("cache", 0, False),
    "f(len(c.inside[1]), c.inside[1][k], c.inside[1].pop(k))": ("inside", 1, False),
    "own = c.inside[1]; own[k] = v": ("inside", 1, False),
    "f(c.inside)": ("inside", 1, True),
    "f(c.inside[1])": ("inside", 1, True),
    "f(c.cache)": ("cache", 0, True),
    "f(k=c.cache)": ("cache", 0, True),
    "f(*c.cache)": ("cache", 0, True),
    "c.kept = c.cache": ("cache", 0, True),
    "own = [c.cache]": ("cache", 0, True),
    "own = {1: c.cache}": ("cache", 0, True),
    "own, other = c.cache, 1; f(own)": ("cache", 0, True),
    "own = other = c.cache; f(other)": ("cache", 0, True),
    "k[c.cache] = v": ("cache", 0, True),
    "k[v] = c.cache": ("cache", 0, True),
    "c.cache is k": ("cache", 0, True),
    "(c.cache if k else v).get(1)": ("cache", 0, True),
    "(c.cache or {}).get(1)": ("cache", 0, True),
    "getattr(c, 'cache')": ("cache", 0, True),
    "del c.cache": ("cache", 0, True),
    "c.cache(k)": ("cache", 0, True),
}


@pytest.mark.parametrize("text", USES)
def test_uses_that_hand_a_container_over_are_found(text: str) -> None:
    name, level, expected = USES[text]
    space: dict[str, Any] = {}
    exec(f"def use(c, k, v, f):\n    {text}", space)
    assert hands_over(space["use"].__code__, name, level) is expected


HELD: dict[str, bool] = {
    "c.by[k].append(v); f(len(c.by[k]), sum(c.by[k]), c.by[k][-1])": False,
    "own = c.by.get(k); own.append(v)": False,
    "c.by.setdefault(k, []).append(v)": False,
    "own = c.by[k]; own[0] += 1": False,
    "f(c.by[k])": True,
    "f(c.by.get(k))": True,
    "own = c.by[k]; f(own)": True,
    "c.last = c.by[k]": True,
    "own = [c.by[k]]": True,
    "own = c.by.setdefault(k, []); f(own)": True,
}


@pytest.mark.parametrize("text", HELD)
def test_uses_that_hand_over_what_a_container_holds_are_found(text: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def use(c, k, v, f):\n    {text}", space)
    assert hands_over(space["use"].__code__, "by", 0, {"len", "sum"}, True) is HELD[text]


WHOLE: dict[str, tuple[str, int, bool]] = {
    "f(sorted(c.cache), sum(c.cache))": ("cache", 0, False),
    "own = c.cache; f(list(own))": ("cache", 0, False),
    "f(max(c.inside[1]))": ("inside", 1, False),
    "f(list(c.inside))": ("inside", 1, True),
    "f(sorted(c.cache, reverse=True))": ("cache", 0, True),
    "f(max(c.cache, v))": ("cache", 0, True),
    "f(set(c.cache))": ("cache", 0, True),
    "f(any(c.cache))": ("cache", 0, False),
    "f(set(c.cache), any(c.cache))": ("cache", 0, True),
    "f(sum(c.cache.values()), sorted(c.inside[1].items()))": ("inside", 1, False),
    "f(sum(c.cache.values()), len(c.cache.keys()))": ("cache", 0, False),
    "f(c.cache.values())": ("cache", 0, True),
    "own = c.cache.values(); f(sum(own))": ("cache", 0, True),
    "own = c.cache.values; f(sum(own()))": ("cache", 0, True),
    "f(sorted(c.cache) is c.cache)": ("cache", 0, True),
}


@pytest.mark.parametrize("text", WHOLE)
def test_functions_that_go_through_a_container_may_receive_it(text: str) -> None:
    name, level, expected = WHOLE[text]
    space: dict[str, Any] = {}
    exec(f"def use(c, k, v, f):\n    {text}", space)
    allowed = containers.WHOLE | {"len"}
    assert hands_over(space["use"].__code__, name, level, allowed) is expected


def test_functions_of_these_names_that_are_others_may_not_receive_it() -> None:
    globals()["sum"] = max
    try:
        kind = type("Model", (Holds,), {"forward": _own_sum})
        eager, bended = kind(), bt.BendedModule(kind())
        for n in range(1, 20):
            assert torch.equal(eager(torch.ones(n, 3)), bended(torch.ones(n, 3)))
        assert bended.stats.live > 10
    finally:
        del globals()["sum"]


def test_a_loop_over_what_it_changes_raises() -> None:
    def forward(self: Holds, x: Tensor) -> Tensor:
        self.seen.add(len(x))
        if len(self.seen) > 3:
            for member in self.seen:
                self.seen.discard(member)
        return x * len(self.seen)

    stream(forward)


def _own_sum(self: Holds, x: Tensor) -> Tensor:
    self.seen.add(len(x))
    return x * sum(self.seen)


MAKERS: dict[str, Callable[[list[int]], Any]] = {
    "comprehension": lambda numbers: {number for number in numbers},
    "constructor": set,
    "frozen": frozenset,
    "pairs": lambda numbers: {(number, 1) for number in numbers},
    "constants": lambda numbers: {15, 7} if numbers[0] > 8 else {7, 15},
    "classes": lambda numbers: {(nn.ReLU, nn.Tanh, nn.ELU, nn.GELU)[n % 4] for n in numbers},
    "mixed": lambda numbers: {(n, nn.ReLU, frozenset({n, 8})) for n in numbers},
    "changed": lambda numbers: ({*numbers} - {numbers[0]}) | {numbers[0] + 8},
}


class Keeps(nn.Module):
    """Makes a set of numbers, some of which fall into the same place of its table."""

    def __init__(self, make: Callable[[list[int]], Any]) -> None:
        super().__init__()
        self.make = make
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        self.kept = self.other = self.make(x.long().tolist())
        return x * 2, self.kept


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_sets_have_the_order_that_they_have_in_eager(make: Callable[[list[int]], Any]) -> None:
    model, other = Keeps(make), Keeps(make)
    bended = bt.BendedModule(other)
    found = [15.0, 7.0, 23.0, 31.0, 1.0, 9.0, 5.0, 40.0]
    for size in (2, 3, 2, 3, 6, 8):
        for numbers in (found[:size], found[:size][::-1], found[-size:]):
            x = torch.tensor(numbers)
            wanted, given = model(x)[1], bended(x)[1]
            assert [*given] == [*wanted] == [*other.kept]
            assert {*map(type, given)} == {*map(type, wanted)}
            assert given is other.kept is other.other


def chosen(x: Tensor) -> Tensor:
    kept = {k: i for i, k in enumerate(x.long().tolist()) if k > 2}
    return x + sum(kept.values()) + len(kept)


def looked_up(x: Tensor) -> Tensor:
    rows = {k: x[i] for i, k in enumerate(x.long().tolist())}
    return torch.stack([rows[k] for k in sorted(rows)]).sum() * x


def compared(x: Tensor) -> Tensor:
    members, others = set(), {1, 2, 3}
    for k in x.long().tolist():
        members.add(k)
    return x * len(members & others) + len(members - others) + int(members <= others)


def remembered(x: Tensor) -> Tensor:
    memo: dict[Any, Any] = {}
    for number in x.long().tolist():
        for k in (number, number % 3):
            if (k, 3) not in memo:
                memo[k, 3] = k * 2 if k > 4 else k
            x = x + memo[k, 3]
    return x


@pytest.mark.parametrize("model", [chosen, looked_up, compared, remembered])
@pytest.mark.parametrize("inserted", [False, True])
def test_hashes_of_computed_keys_are_part_of_a_state(
    model: Callable[[Tensor], Tensor], inserted: bool
) -> None:
    bended = bt.BendedModule(model)
    if inserted:
        bended.interject(lambda node: True, lambda value: None)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        size = int(torch.randint(3, 6, (), generator=generator))
        x = torch.randint(10, (size,), generator=generator).float()
        assert bits(bended(x)) == bits(model(x))


class Filling(nn.Module):
    """Fills a cache, a set and a dict of sums, each by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}
        self.seen: set[int] = set()
        self.sums: dict[int, float] = collections.defaultdict(float)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows not in self.cache:
            self.cache[rows] = torch.arange(rows).float().unsqueeze(1)
        self.seen.add(rows)
        self.sums[rows % 3] += x.sum().item()
        return x * self.cache[rows] + self.sums[rows % 3] + len(self.seen)


def test_operations_on_a_container_are_no_nodes() -> None:
    """An interjection would see them from that call on in which they become ops."""
    model, bended = Filling(), bt.BendedModule(Filling())
    generator = torch.Generator().manual_seed(0)
    paths: list[str] = []

    class Seeing(bt.Interjection):
        self_contained = True

        def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
            paths.append(at.path)

    bended.interject(lambda node: True, Seeing(), allow_none=True)
    for _ in range(40):
        x = torch.randn(int(torch.randint(1, 9, (), generator=generator)), 2, generator=generator)
        is_new = x.shape[0] not in model.cache
        paths.clear()
        assert torch.equal(bended(x), model(x))
        made = ["arange", "float", "unsqueeze"] if is_new else []
        assert paths == [*made, "sum", "item", "mul", "add_1", "add_2", ""]
    assert bended.stats.replays > 20
