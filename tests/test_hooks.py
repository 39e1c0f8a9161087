"""HookManager: which hooks are called with what, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.insert import native as station
from bendtrace.insert.gradients import CallGradients
from tests.hooked import ONE, TWO, Function, Log, leaf, traces_of_hooks
from tests.promise import bits, state


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def manager() -> Iterator[bt.HookManager]:
    with bt.HookManager() as made:
        yield made
    assert not station._local.calls


# What forward hooks are given


class Named(NamedTuple):
    left: Any
    right: Any


@dataclass
class Data:
    left: Any
    right: Any = None


@dataclass(frozen=True)
class Frozen:
    left: Any


STRUCTURES: list[tuple[Any, list[Tensor]]] = [
    (ONE, [ONE]),
    ((), []),
    (None, []),
    ("text", []),
    ((ONE, TWO), [ONE, TWO]),
    ((ONE, None, 3, (TWO, (None,))), [ONE, TWO]),
    ([ONE, [TWO]], [ONE, TWO]),
    ({"b": ONE, "a": TWO, "c": None}, [ONE, TWO]),
    (OrderedDict(b=ONE, a=[TWO]), [ONE, TWO]),
    (defaultdict(list, b=ONE), [ONE]),
    (Named(ONE, {"x": TWO}), [ONE, TWO]),
    (Data(ONE, [TWO]), [ONE, TWO]),
    (Frozen(ONE), [ONE]),
    ((ONE, ONE), [ONE, ONE]),
]


@pytest.mark.parametrize(("value", "tensors"), STRUCTURES, ids=lambda value: type(value).__name__)
def test_outputs_are_all_tensors_however_deep(
    value: Any, tensors: list[Tensor], manager: bt.HookManager, log: Log
) -> None:
    module = Function(lambda self: value)
    manager.register_forward_hook(log.after, module=module)
    assert module() is value
    ((_, _, inputs, outputs),) = log.take()
    assert inputs == ()
    assert type(outputs) is tuple
    assert [id(tensor) for tensor in outputs] == [id(tensor) for tensor in tensors]


@pytest.mark.parametrize(("value", "tensors"), STRUCTURES, ids=lambda value: type(value).__name__)
def test_new_outputs_are_put_where_the_old_ones_were(
    value: Any, tensors: list[Tensor], manager: bt.HookManager
) -> None:
    before = bits(copy.deepcopy(value))
    module = Function(lambda self: value)
    manager.register_forward_hook(lambda m, i, o: tuple(t + 10 for t in o), module=module)
    given = module()
    assert type(given) is type(value)
    assert bits(value) == before, "the model's own object was changed"
    found: list[Tensor] = []
    with bt.HookManager() as other:
        again = Function(lambda self: given)
        other.register_forward_hook(lambda m, i, o: found.extend(o), again=again)
        again()
    assert [t.tolist() for t in found] == [(t + 10).tolist() for t in tensors]


def test_inputs_are_the_positional_tensors_and_then_those_by_keyword(
    manager: bt.HookManager, log: Log
) -> None:
    module = Function(lambda self, x, flag, *, mask=None, parts=(): x * mask + parts[0])
    log.register(manager, module=module)
    x, mask, part = leaf(2), leaf(2, seed=1), leaf(2, seed=2)
    out = module(x, True, mask=mask, parts=[part])
    out.sum().backward()
    (_, _, before), (_, _, after, outputs), (_, _, grad_in, grad_out) = log.take()
    assert [id(t) for t in before] == [id(x), id(mask), id(part)]
    assert [t.tolist() for t in after] == [x.tolist(), mask.tolist(), part.tolist()]
    assert outputs[0] is out
    assert [g.tolist() for g in grad_in] == [mask.tolist(), x.tolist(), [1, 1]]
    assert [g.tolist() for g in grad_out] == [[1, 1]]


def test_new_inputs_reach_the_module_in_their_places(manager: bt.HookManager) -> None:
    seen: list[Any] = []

    def forward(self: Any, x: Any, parts: Any, *, mask: Any) -> Any:
        seen.append((x, parts, mask))
        return x

    module = Function(forward)
    manager.register_forward_pre_hook(lambda m, i: tuple(t * 2 for t in i), module=module)
    parts = {"a": (TWO, None)}
    module(ONE, parts, mask=TWO)
    ((x, given, mask),) = seen
    assert (x.tolist(), mask.tolist()) == ([2, 4], [6, 8])
    assert given["a"][0].tolist() == [6, 8]
    assert parts["a"][0] is TWO, "the caller's own dict was changed"


def test_hooks_see_what_the_hooks_before_them_returned(manager: bt.HookManager, log: Log) -> None:
    module = Function(lambda self, x: x + 1)
    manager.register_forward_pre_hook(lambda m, i: (i[0] * 2,), hook_fn_name="twice", m=module)
    manager.register_forward_pre_hook(log.before, m=module)
    manager.register_forward_hook(lambda m, i, o: (o[0] * 5,), hook_fn_name="times 5", m=module)
    manager.register_forward_hook(log.after, m=module)
    assert module(ONE).tolist() == [15, 25]
    (_, _, before), (_, _, inputs, outputs) = log.take()
    assert [t.tolist() for t in (*before, *inputs, *outputs)] == [[2, 4], [2, 4], [15, 25]]


def test_hooks_are_called_in_the_order_of_registration_whenever_they_were_activated(
    manager: bt.HookManager,
) -> None:
    called: list[int] = []
    module = nn.Identity()
    for number in range(4):
        manager.register_forward_hook(
            lambda m, i, o, number=number: called.append(number), module=module, activate=False
        )
    for hook in reversed(list(manager.name_to_hookfn.values())):
        hook.activate()
    module(ONE)
    assert called == [0, 1, 2, 3]


BAD: list[tuple[Any, str]] = [
    (torch.ones(2), "a Tensor"),
    ((torch.ones(2),), "a tuple of 1 (Tensor)"),
    ([torch.ones(2), torch.ones(2)], "a list of 2 (Tensor, Tensor)"),
    ((torch.ones(2), None), "a tuple of 2 (Tensor, NoneType)"),
    (True, "a bool"),
]


@pytest.mark.parametrize(("returned", "told"), BAD, ids=[told for _, told in BAD])
def test_what_a_hook_must_not_return_is_named(
    returned: Any, told: str, manager: bt.HookManager
) -> None:
    module = Function(lambda self, x, y: (x, y))
    hook = manager.register_forward_pre_hook(lambda m, i: returned, hook_fn_name="f", m=module)
    manager.register_forward_hook(lambda m, i, o: returned, hook_fn_name="g", m=module)
    with pytest.raises(InputError) as error:
        module(ONE, TWO)
    assert str(error.value) == (
        "forward pre hook 'f' on module 'm' has to return None, or the inputs as a tuple of 2 "
        f"tensors; it returned {told}"
    )
    hook.deactivate()
    with pytest.raises(
        bt.errors.InputError, match=r"^forward hook 'g' on module 'm' .* the outputs as"
    ):
        module(ONE, TWO)


def test_errors_of_hooks_pass_through(manager: bt.HookManager, log: Log) -> None:
    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    module = nn.Linear(2, 2)
    for register in (
        manager.register_forward_pre_hook,
        manager.register_forward_hook,
        manager.register_backward_hook,
    ):
        register(fails, module=module)
        with pytest.raises(ZeroDivisionError):
            module(leaf(2)).sum().backward()
        manager.remove_all_hooks()
        assert not hasattr(module, "name")
    log.register(manager, module=module)
    module(leaf(2)).sum().backward()
    assert len(log.events) == 3


def test_a_list_that_the_module_changes_is_the_callers(manager: bt.HookManager, log: Log) -> None:
    def forward(self: Any, x: Tensor, states: list[Tensor], more: dict[str, Any]) -> Tensor:
        states.append(x)
        more["pair"] = (states[0], 1)
        return x + states[0]

    module = Function(forward)
    log.register(manager, module=module)
    x, first = leaf(2) * 1, leaf(2, seed=1) * 1
    states, more = [first], {"kept": (first, x)}
    module(x, states, more).sum().backward()
    assert len(states) == 2
    assert states[0] is first
    assert torch.equal(states[1], x)
    assert more["kept"][0] is first
    assert more["pair"][1] == 1


# Activation


@pytest.fixture
def three(manager: bt.HookManager) -> dict[str, bt.hooks.HookHandle]:
    """Hooks of three kinds on two modules."""
    modules = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    manager.register_forward_hook(print, hook_fn_name="f", activate=False, **modules)
    manager.register_forward_pre_hook(print, hook_fn_name="p", activate=False, **modules)
    manager.register_backward_hook(repr, hook_fn_name="r", activate=False, **modules)
    return dict(manager.name_to_hookhandle)


def active(handles: dict[str, bt.hooks.HookHandle]) -> str:
    return " ".join(name for name, handle in handles.items() if handle.active)


FILTERS: list[tuple[dict[str, Any], str]] = [
    ({}, "f[a] f[b] p[a] p[b] r[a] r[b]"),
    ({"category": "all"}, "f[a] f[b] p[a] p[b] r[a] r[b]"),
    ({"category": "forward_pre_hook"}, "p[a] p[b]"),
    ({"hook_types": [print]}, "f[a] f[b] p[a] p[b]"),
    ({"hook_types": print}, "f[a] f[b] p[a] p[b]"),
    ({"hook_types": (print, repr), "category": "backward_hook"}, "r[a] r[b]"),
    ({"hook_types": [print], "category": "backward_hook"}, ""),
    ({"hook_types": []}, ""),
]


@pytest.mark.parametrize(("filters", "wanted"), FILTERS)
def test_filters_choose_what_is_activated(
    filters: dict[str, Any],
    wanted: str,
    manager: bt.HookManager,
    three: dict[str, bt.hooks.HookHandle],
) -> None:
    on_a = " ".join(name for name in wanted.split() if name.endswith("[a]"))
    a = manager.name_to_module["a"]
    manager.activate_all_hooks(**filters)
    assert active(three) == wanted
    manager.activate_all_hooks()
    manager.deactivate_all_hooks(**filters)
    assert active(three) == " ".join(name for name in three if name not in wanted.split())
    manager.deactivate_all_hooks()
    manager.activate_module_hooks(a, **filters)
    assert active(three) == on_a
    manager.deactivate_module_hooks(a, **filters)
    assert active(three) == ""
    with manager.hook_all_context(**filters):
        assert active(three) == wanted
    with manager.hook_module_context(a, **filters) as same:
        assert same is manager
        assert active(three) == on_a
    assert active(three) == ""


def test_a_context_leaves_what_it_found(
    manager: bt.HookManager, three: dict[str, bt.hooks.HookHandle]
) -> None:
    manager.activate_all_hooks(category="forward_hook")
    with manager.hook_all_context():
        with manager.hook_module_context(manager.name_to_module["a"], hook_types=[repr]):
            assert active(three) == "f[a] f[b] p[a] p[b] r[a] r[b]"
            manager.deactivate_all_hooks()
        assert active(three) == "r[a]", "active around the inner context"
        with pytest.raises(ZeroDivisionError), manager.hook_all_context(category="backward_hook"):
            raise ZeroDivisionError
        assert active(three) == "r[a]"
    assert active(three) == "f[a] f[b]"


def test_a_context_can_be_entered_again_and_looks_up_what_is_there(
    manager: bt.HookManager, three: dict[str, bt.hooks.HookHandle]
) -> None:
    context = manager.hook_all_context(category="forward_hook")
    manager.register_forward_hook(print, c=nn.Identity(), activate=False)
    for _ in range(2):
        with context, context:
            assert active(dict(manager.name_to_hookhandle)) == "f[a] f[b] f[c]"
        assert active(dict(manager.name_to_hookhandle)) == ""
    with context:
        manager.remove_hook_by_name("f[c]")
        manager.register_forward_hook(print, d=nn.Identity())
    assert active(dict(manager.name_to_hookhandle)) == "f[d]", "it came after the context"


def test_a_context_that_ends_does_not_silence_others(
    manager: bt.HookManager, three: dict[str, bt.hooks.HookHandle]
) -> None:
    # In the original, the end of any context deactivated all hooks that it named.
    with manager.hook_all_context(category="forward_hook"):
        with manager.hook_all_context():
            pass
        assert active(three) == "f[a] f[b]"


def test_hooks_of_several_managers_and_of_torch_live_side_by_side(log: Log) -> None:
    module = nn.Linear(2, 2)
    called: list[str] = []
    one, two = bt.HookManager(), bt.HookManager()
    module.register_forward_hook(lambda m, i, o: called.append("torch 1"))
    one.register_forward_hook(lambda m, i, o: called.append(f"one {m.name}"), x=module)
    module.register_forward_hook(lambda m, i, o: called.append("torch 2"))
    two.register_forward_hook(lambda m, i, o: called.append(f"two {m.name}"), y=module)
    two.register_backward_hook(lambda m, i, o: called.append(f"back {m.name}"), y=module)
    one.register_backward_hook(log.backward, x=module)
    module.register_full_backward_hook(lambda m, i, o: called.append("torch back"))
    x = leaf(2)
    module(x).sum().backward()
    assert sorted(called) == ["back y", "one x", "torch 1", "torch 2", "torch back", "two y"]
    assert called.index("one x") < called.index("two y")
    assert bits(log.gradients()[0][0]) == bits(x.grad)
    one.remove_all_hooks()
    called.clear()
    module(x).sum().backward()
    assert sorted(called) == ["back y", "torch 1", "torch 2", "torch back", "two y"]
    two.remove_all_hooks()
    assert len(module._forward_hooks) == 2
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_can_remove_itself(when: str, manager: bt.HookManager, log: Log) -> None:
    relu = nn.ReLU(inplace=True)

    def once(module: Any, *values: Any) -> None:
        log.events.append((when,))
        manager.remove_all_hooks()

    register = dict(before=manager.register_forward_pre_hook, after=manager.register_forward_hook)[
        when
    ]
    manager.register_backward_hook(log.backward, relu=relu)
    register(once, relu=relu)
    for _ in range(2):
        x = leaf(3)
        h = x * 1
        relu(h)
        h.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, (x > 0).float()), "the input knows of the change in place"
    assert log.take() == [(when,)]
    assert traces_of_hooks(relu) == []


def test_hooks_that_are_switched_off_in_the_middle_of_a_call(
    manager: bt.HookManager, log: Log
) -> None:
    inner = nn.ReLU(inplace=True)
    outer = nn.Sequential(nn.Identity(), inner)
    manager.register_backward_hook(log.backward, outer=outer)
    manager.register_forward_hook(lambda m, i, o: manager.deactivate_all_hooks(), inner=inner)
    x = leaf(3)
    h = x * 1
    outer(h)
    assert traces_of_hooks(outer) == []
    h.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x > 0).float())
    assert log.events == []


def test_backward_hooks_are_called_if_active_from_the_call_on(
    manager: bt.HookManager, log: Log
) -> None:
    linear = nn.Linear(2, 2)
    hook = manager.register_backward_hook(log.backward, linear=linear, activate=False)
    inactive = linear(leaf(2)).sum()
    hook.activate()
    inactive.backward()
    assert log.events == []
    was_active = linear(leaf(2)).sum()
    hook.deactivate()
    was_active.backward(retain_graph=True)
    assert log.events == []
    hook.activate()
    was_active.backward()
    assert len(log.events) == 1


# Names and tables


def test_the_name_is_there_only_while_hooks_run(manager: bt.HookManager, log: Log) -> None:
    linear = nn.Linear(2, 2)
    before = state(linear)
    log.register(manager, first=linear)
    linear(leaf(2)).sum().backward()
    assert [name for _, name in log.kinds] == ["first"] * 3
    assert not hasattr(linear, "name")
    linear.zero_grad()
    assert state(linear) == before


class WithProperty(nn.Identity):
    @property
    def name(self) -> str:
        return "own"


class WithClassAttribute(nn.Identity):
    name = "own"


def with_attribute() -> nn.Module:
    module = nn.Identity()
    module.name = "own"
    return module


def with_parameter() -> nn.Module:
    module = nn.Identity()
    module.name = nn.Parameter(torch.ones(1))
    return module


def with_buffer() -> nn.Module:
    module = nn.Identity()
    module.register_buffer("name", torch.ones(1))
    return module


def with_submodule() -> nn.Module:
    module = nn.Identity()
    module.name = nn.Linear(1, 1)
    return module


@pytest.mark.parametrize(
    "make",
    [WithProperty, WithClassAttribute, with_attribute, with_parameter, with_buffer, with_submodule],
)
def test_a_name_of_the_modules_own_stays(
    make: Callable[[], nn.Module], manager: bt.HookManager
) -> None:
    module = make()
    own, before, keys = module.name, set(vars(module)), list(module.state_dict())
    seen: list[Any] = []

    def hook(m: Any, *values: Any) -> None:
        seen.append((m.name, manager.name_of(m)))

    manager.register_forward_hook(hook, registered=module)
    module(ONE)
    ((shown, name),) = seen
    assert (shown is own or shown == own, name) == (True, "registered")
    assert module.name is own or module.name == own
    assert set(vars(module)) == before
    assert list(module.state_dict()) == keys


def test_the_name_is_right_in_hooks_within_hooks(manager: bt.HookManager) -> None:
    module = nn.Identity()
    seen: list[str] = []

    def calls_itself(m: Any, inputs: Any) -> None:
        seen.append(m.name)
        if len(seen) < 4:
            m(ONE)
            seen.append(m.name)

    manager.register_forward_pre_hook(calls_itself, one=module)
    module(ONE)
    assert seen == ["one"] * 7
    manager.remove_all_hooks()
    seen.clear()

    def fails(m: Any, inputs: Any, outputs: Any) -> None:
        seen.append(m.name)
        raise ZeroDivisionError

    def calls_with_another(m: Any, inputs: Any, outputs: Any) -> None:
        manager.deactivate_all_hooks()
        with bt.HookManager() as other:
            other.register_forward_hook(fails, two=m)
            with pytest.raises(ZeroDivisionError):
                m(ONE)
        seen.append(m.name)

    manager.register_forward_hook(calls_with_another, one=module)
    module(ONE)
    assert seen == ["two", "one"]
    assert not hasattr(module, "name")


def test_the_name_is_there_in_all_threads(manager: bt.HookManager) -> None:
    module = nn.Identity()
    inside, leave = threading.Event(), threading.Event()
    seen: list[str] = []

    def hook(m: Any, inputs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert leave.wait(30)
        seen.append(m.name)

    manager.register_forward_pre_hook(hook, both=module)
    thread = threading.Thread(target=module, args=(ONE,))
    thread.start()
    assert inside.wait(30)
    module(ONE)  # comes and goes while the other is inside
    assert module.name == "both"
    leave.set()
    thread.join()
    assert seen == ["both", "both"]
    assert not hasattr(module, "name")


def test_calls_in_several_threads_are_kept_apart(manager: bt.HookManager) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    found: dict[int, list[Any]] = {number: [] for number in range(4)}

    def hook(m: Any, grad_in: Any, grad_out: Any) -> None:
        found[current.number].append((m.name, grad_in[0]))

    current = threading.local()
    manager.register_backward_hook(hook, **{f"l{n}": m for n, m in model.named_children()})

    def run(number: int) -> None:
        current.number = number
        for _ in range(20):
            x = leaf(2, 4, seed=number)
            model(x).sum().backward()
            assert x.grad is not None
            assert bits(found[number][-1][1]) == bits(x.grad)

    threads = [threading.Thread(target=run, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, events in found.items():
        assert [name for name, _ in events] == ["l2", "l1", "l0"] * 20, number
        assert all(bits(events[i]) == bits(events[i % 3]) for i in range(60))


def test_modules_and_functions_of_equal_repr_are_told_apart(manager: bt.HookManager) -> None:
    class Loud:
        def __init__(self, called: list[str], what: str) -> None:
            self.called, self.what = called, what

        def __call__(self, module: Any, inputs: Any, outputs: Any) -> None:
            self.called.append(f"{self.what} {module.name}")

        def __repr__(self) -> str:
            return "loud"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Loud)

        __hash__ = None  # type: ignore[assignment]

    class Equal(nn.Identity):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None  # type: ignore[assignment]

    called: list[str] = []
    one, two = nn.ReLU(), nn.ReLU()
    a, b = Loud(called, "a"), Loud(called, "b")
    manager.register_forward_hook(a, one, two)
    manager.register_forward_hook(b, one)
    assert list(manager.name_to_module) == ["ReLU()", "ReLU()_1"]
    assert list(manager.name_to_hookfn) == ["loud", "loud_1"]
    assert list(manager.name_to_hookhandle) == ["loud[ReLU()]", "loud[ReLU()_1]", "loud_1[ReLU()]"]
    one(ONE), two(ONE)
    assert called == ["a ReLU()", "b ReLU()", "a ReLU()_1"]
    hook = manager.name_to_hookfn["loud"]
    assert hook.module_to_handle[one] is not hook.module_to_handle[two]
    manager.remove_hook_function(a)
    called.clear()
    one(ONE), two(ONE)
    assert called == ["b ReLU()"]
    manager.remove_all_hooks()

    first, second = Equal(), Equal()
    manager.register_forward_hook(a, first=first, second=second)
    manager.deactivate_module_hooks(second)
    called.clear()
    first(ONE), second(ONE)
    assert called == ["a first"]
    assert list(hook.module_to_handle) == []


def test_lambdas_and_methods_are_the_functions_that_they_are(manager: bt.HookManager) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def hook(self, *values: Any) -> None:
            self.count += 1

    module, one, two = nn.Identity(), Counter(), Counter()
    for counter in (one, two, one):
        manager.register_forward_hook(counter.hook, module=module)
    for _ in range(2):
        manager.register_forward_hook(lambda m, i, o: None, module=module)
    assert len(manager.name_to_hookfn) == 4
    module(ONE)
    assert (one.count, two.count) == (1, 1)
    manager.deactivate_all_hooks(hook_types=[one.hook])
    module(ONE)
    assert (one.count, two.count) == (1, 2)
    manager.remove_hook_function(two.hook)
    module(ONE)
    assert (one.count, two.count) == (1, 2)


def test_one_function_can_be_hooks_of_several_kinds(manager: bt.HookManager) -> None:
    called: list[int] = []

    def count(module: Any, *values: Any) -> None:
        called.append(len(values))

    linear = nn.Linear(2, 2)
    manager.register_forward_pre_hook(count, linear=linear, hook_fn_name="pre")
    manager.register_forward_hook(count, linear=linear)
    manager.register_backward_hook(count, linear=linear)
    assert len(manager.name_to_hookfn) == 3
    linear(leaf(2)).sum().backward()
    assert called == [1, 2, 2]
    manager.remove_hook_function(count, category="forward_hook")
    linear(leaf(2)).sum().backward()
    assert called == [1, 2, 2, 1, 2]
    manager.remove_hook_function(count)
    assert not manager.name_to_hookfn
    assert traces_of_hooks(linear) == []


def test_names_that_cannot_be_given_are_refused_before_anything_changes(
    manager: bt.HookManager,
) -> None:
    a, b = nn.ReLU(), nn.ReLU()
    manager.register_forward_hook(print, a=a, hook_fn_name="f")
    before = repr(manager), dict(manager.name_to_module), dict(manager.name_to_hookfn)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: manager.register_forward_hook(repr, b=b, a=b), "'a' is taken by another module"),
        (lambda: manager.register_forward_hook(repr, b=b, c=a), "'c' is already registered as 'a'"),
        (lambda: manager.register_forward_hook(repr, x=b, y=b), "'y' is already registered as 'x'"),
        (
            lambda: manager.register_forward_hook(repr, b=b, hook_fn_name="f"),
            "'f' is taken by the forward_hook <built-in function print>",
        ),
        (
            lambda: manager.register_backward_hook(print, b=b, hook_fn_name="f"),
            "'f' is taken by the forward_hook",
        ),
        (
            lambda: manager.register_forward_hook(print, b=b, hook_fn_name="g"),
            "'g' is already registered as 'f'",
        ),
        (lambda: manager.register_forward_hook(3, b=b), "a hook has to be callable, and 3 is not"),
        (lambda: manager.register_forward_hook(repr, b=3), "on modules; b= is a int"),
        (lambda: manager.register_forward_hook(repr, b, 3), "a positional argument is a int"),
        (lambda: manager.register_forward_hook(repr, activate=b), "it has to be a bool, not"),
        (lambda: manager.register_forward_hook(repr, hook_fn_name=3), "has to be a string, not 3"),
        (lambda: manager.activate_all_hooks(category="forward"), "category 'forward': choose one"),
        (lambda: manager.hook_all_context(category="x"), "there is no hook category 'x'"),
        (lambda: manager.activate_all_hooks(hook_types=[len]), "len> is not registered as a hook"),
        (lambda: manager.hook_module_context(b), r"ReLU\(\) is not registered; 'a' is"),
        (lambda: manager.activate_module_hooks(b), r"ReLU\(\) is not registered"),
        (lambda: manager.deactivate_module_hooks("a"), "what was given is a str"),
        (lambda: manager.remove_module(b), r"ReLU\(\) is not registered"),
        (lambda: manager.remove_hook_function(len), "is not registered as a hook"),
        (lambda: bt.HookManager(3), "a model has to be a module"),
    ]
    for call, told in refused:
        with pytest.raises(InputError, match=told):
            call()
    now = repr(manager), dict(manager.name_to_module), dict(manager.name_to_hookfn)
    assert now == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_are_refused(manager: bt.HookManager) -> None:
    scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(
        bt.errors.InputError,
        match=("hooks cannot be registered on a scripted module; relu= is a scripted module"),
    ):
        manager.register_forward_hook(print, relu=scripted)
    assert len(manager.name_to_module) == 0


def test_names_that_were_made_up_give_way_to_given_ones(manager: bt.HookManager) -> None:
    linear = nn.Linear(1, 1)

    def hook(*values: Any) -> None:
        pass

    made = manager.register_forward_hook(hook, linear)
    handle = made.module_to_handle[linear]
    assert handle.name == f"{hook!r}[{linear!r}]"
    manager.register_forward_hook(hook, linear=linear, hook_fn_name="hook")
    assert handle.name == "hook[linear]"
    assert dict(manager.name_to_hookhandle) == {"hook[linear]": handle}
    assert dict(manager.name_to_module) == {"linear": linear}
    assert dict(manager.name_to_hookfn) == {"hook": made}


def test_a_manager_of_a_model_knows_the_names_of_its_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.ReLU(), nn.ReLU()]))
    manager = bt.HookManager(model)
    manager.register_forward_hook(print, model, *model[1], model[0], nn.ReLU())
    assert list(manager.name_to_module) == [repr(model), "1.0", "1.1", "0", "ReLU()"]
    manager.remove_all_hooks()


def test_names_that_are_not_there_are_told_with_near_ones(manager: bt.HookManager) -> None:
    manager.register_forward_hook(print, first=nn.Identity(), hook_fn_name="show")
    with pytest.raises(
        bt.errors.HookNameError, match=r"no hook is registered as 'shaw\[first\]'; registered"
    ):
        manager.remove_hook_by_name("shaw[first]")
    with pytest.raises(KeyError) as error:
        manager.name_to_module["frist"]
    assert str(error.value) == "no module is registered as 'frist'; registered: 'first'"
    assert manager.name_to_module.get("frist") is None
    with pytest.raises(KeyError, match="no hook function is registered as 'x'; registered: 'show'"):
        manager.remove_hook_function_by_name("x")
    manager.remove_all_hooks()
    with pytest.raises(KeyError, match="no module is registered as 'first'; nothing is registered"):
        manager.remove_module_by_name("first")


def test_registering_a_pair_again_activates_it_and_nothing_else(manager: bt.HookManager) -> None:
    called: list[str] = []
    module = nn.Identity()

    def hook(m: Any, i: Any, o: Any) -> None:
        called.append(m.name)

    for activate in (False, True, False, True):
        manager.register_forward_hook(hook, module=module, activate=activate)
    module(ONE)
    assert called == ["module"]
    assert len(manager.name_to_hookhandle) == 1


def test_removing_purges_all_tables(manager: bt.HookManager, log: Log) -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    log.register(manager, a=a, b=b)
    handle = next(iter(manager.name_to_hookhandle.values()))
    assert handle.module is a
    manager.remove_hook(handle)
    assert repr(handle).endswith("removed>")
    assert a not in handle.hook_fn.module_to_handle
    handle.remove()  # a second time does nothing
    with pytest.raises(InputError, match="was removed: register it again"):
        handle.activate()
    manager.activate_all_hooks()
    a(leaf(2)).sum().backward()
    assert [kind for kind, _ in log.kinds] == ["after", "backward"]
    manager.remove_module(a)
    assert list(manager.name_to_module) == ["b"]
    manager.remove_hook_function_by_name(handle.hook_fn.name)
    assert len(manager.name_to_hookhandle) == 2
    manager.remove_all_hooks()
    tables = manager.name_to_module, manager.name_to_hookfn, manager.name_to_hookhandle
    assert [len(table) for table in tables] == [0, 0, 0]
    assert traces_of_hooks(a) == traces_of_hooks(b) == []
    assert repr(manager) == "<HookManager: no hooks>"


def test_what_people_meet_reads_well(manager: bt.HookManager) -> None:
    linear = nn.Linear(1, 1)
    hook = manager.register_forward_hook(print, linear=linear, hook_fn_name="show")
    manager.register_backward_hook(repr, linear=linear, hook_fn_name="r", activate=False)
    assert repr(hook) == "<HookFunction show: forward_hook on linear>"
    assert repr(manager) == (
        "<HookManager: 2 hooks\n"
        "  HookHandle show[linear]: active\n"
        "  HookHandle r[linear]: inactive>"
    )
    assert manager.name_to_hookhandle._ipython_key_completions_() == ["show[linear]", "r[linear]"]
    assert repr(hook.module_to_handle) == "{<linear>: <HookHandle show[linear]: active>}"


# What is left behind


def test_a_model_is_as_it_was(log: Log) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Identity())
    before = {module: dict(vars(module)) for module in model.modules()}
    with bt.HookManager(model) as manager:
        names = {f"m{name}": module for name, module in model.named_modules()}
        log.register(manager, **names)
        model(leaf(2)).sum().backward()
        assert len(log.take()) == 12
    assert traces_of_hooks(model) == []
    assert {module: dict(vars(module)) for module in model.modules()} == before
    model(leaf(2)).sum().backward()
    assert log.events == []


@pytest.mark.more
def test_activations_are_freed_as_without_hooks(manager: bt.HookManager) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(0))
    count: list[int] = []
    manager.register_backward_hook(lambda m, i, o: count.append(1), **dict(model.named_children()))
    gc.collect()
    before = sum(type(thing) is CallGradients for thing in gc.get_objects())
    gc.disable()
    try:
        x = leaf(2, 3)
        h = x * 1
        given = weakref.ref(h)
        out = model(h)
        returned = weakref.ref(out)
        loss = out.sum()
        del h, out
        assert given() is None
        assert returned() is None
        loss.backward()
    finally:
        gc.enable()
    assert len(count) == 4
    del loss
    gc.collect()
    assert sum(type(thing) is CallGradients for thing in gc.get_objects()) == before


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=lambda e: repr(e))
def test_a_call_that_ends_in_an_error(
    error: BaseException, manager: bt.HookManager, log: Log
) -> None:
    def forward(self: Any, x: Tensor, states: list[Tensor], fail: bool) -> Tensor:
        x.relu_()
        if fail:
            raise error
        return x + states[0]

    module = Function(forward)
    log.register(manager, module=module)
    x, kept = leaf(3), leaf(3, seed=1) * 1
    h = x * 1
    states = [kept]
    with pytest.raises(type(error)):
        module(h, states, True)
    assert log.kinds == [("before", "module")]
    if isinstance(error, Exception):
        assert states[0] is kept
        h.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, (x > 0).float()), "the input knows of the change in place"
    log.take()
    module(leaf(3) * 1, [leaf(3)], False).sum().backward()
    assert [kind for kind, _ in log.kinds] == ["before", "after", "backward"]
    with pytest.raises(type(error)):
        module(leaf(3) * 1, states, True)
    manager.deactivate_all_hooks()
    assert traces_of_hooks(module) == []


def test_modules_that_call_themselves(manager: bt.HookManager, log: Log) -> None:
    def forward(self: Any, x: Tensor, depth: int) -> Tensor:
        if depth == 2:
            try:
                self(x * 1, 9)
            except ZeroDivisionError:
                pass
        if depth == 9:
            raise ZeroDivisionError
        return x.mul_(2) if depth == 0 else self(x * 3, depth - 1) + x

    module = Function(forward)
    log.register(manager, module=module)
    x = leaf(1)
    module(x, 2).backward()
    gradients = [e[2:] for e in log.take() if e[0] == "backward"]
    assert [(i[0].item(), o[0].item()) for i, o in gradients] == [(2, 1), (7, 1), (22, 1)]


def test_copies_of_a_module_have_its_hooks_and_pickles_are_refused(
    manager: bt.HookManager, log: Log
) -> None:
    linear = nn.Linear(2, 2)
    log.register(manager, linear=linear)
    twin = copy.deepcopy(linear)
    twin(leaf(2)).sum().backward()
    assert log.kinds == [("before", "linear"), ("after", "linear"), ("backward", "linear")]
    log.take()
    with pytest.raises(InputError, match=r"cannot be pickled: deactivate .*before"):
        torch.save(linear, io.BytesIO())
    manager.deactivate_all_hooks()
    twin(leaf(2))
    assert log.events == []
    assert pickle.loads(pickle.dumps(linear)).in_features == 2


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")  # of torch._dynamo, about what it does not compile
def test_under_torch_compile_hooks_are_called(manager: bt.HookManager, log: Log) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), nn.Linear(3, 3))
    x = leaf(2, 3)
    manager.register_forward_hook(lambda m, i, o: (o[0] * 2,), last=model[1])
    wanted = model(x)
    manager.register_backward_hook(log.backward, inner=model[0], relu=model[0][1], last=model[1])
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        out = compiled(x)
        assert bits(out) == bits(wanted)
        out.sum().backward()
        assert [name for _, name in log.kinds] == ["last", "relu", "inner"]
        log.take()
