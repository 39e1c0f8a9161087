"""Walks that are taken over from an earlier run: the same parts, or else a scan anew."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.record.recorded_call import Signature, record
from bendtrace.tape.captured import Access, Captured, CaptureKind
from bendtrace.watch import scan_cache
from bendtrace.watch.environment import Environment

SCALES = [1.0, 2.0]
FACTOR = 3.0
TABLE: dict[str, Any] = {"one": 1, "more": {"two": (2, [3])}}
LEVEL: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=1)
SHAPES = types.SimpleNamespace(size=4)
WEIGHT = torch.ones(4)


class Mode(Enum):
    PLAIN = "plain"
    OTHER = "other"


class Config:
    def __init__(self) -> None:
        self.width, self.names, self.kinds = 4, ["a", "b"], {"a": 1}


class Options:
    """An object that holds another, and so is no mere settings."""

    def __init__(self) -> None:
        self.config, self.gain = Config(), 2.0


class OtherOptions(Options):
    gain = 5.0


@functools.lru_cache
def cached(width: int) -> Tensor:
    return torch.full((width,), 0.5)


def scaled(x: Tensor, by: float = 2.0, *, shift: float = 0.0) -> Tensor:
    return x * by * FACTOR * SCALES[0] + shift


def defaulted(x: Tensor, options: Options = Options()) -> Tensor:  # noqa: B008
    return x * options.gain


def shifted(x: Tensor) -> Tensor:
    return x + TABLE["one"] + LEVEL.get() + SHAPES.size + WEIGHT


def closed(factor: float, held: list[float]) -> Callable[[Tensor], Tensor]:
    def close(x: Tensor) -> Tensor:
        return x * factor + held[0]

    return close


class Inner(nn.Module):
    gain = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.mode = Mode.PLAIN

    def forward(self, x: Tensor) -> Tensor:
        return defaulted(scaled(self.linear(x) + self.offset) * self.gain)


class OtherInner(Inner):
    gain = 2.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.shared = self.inner
        self.layers = nn.ModuleList([Inner(), nn.ReLU()])
        self.config, self.options = Config(), Options()
        self.steps, self.kept = [1, 2], {"a": [1.0], "b": torch.ones(4)}
        self.tags, self.pair = {"x", "y"}, (1, [2], torch.zeros(4))
        self.table = numpy.arange(4)
        self.many = list(range(600))
        self.rate, self.flag, self.name = 0.5, True, "model"
        self.deep: Any = Options()
        for _ in range(10):
            self.deep = [self.deep]
        self.act = closed(2.0, [1.0])  # the last of its attributes
        self.tagged = nn.Parameter(torch.ones(4))
        self.tagged.width = 4

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = shifted(self.act(self.inner(x))) * self.rate * len(self.deep)
        x = x + self.tagged * self.tagged.width
        if self.flag and "x" in self.tags and self.config.width and self.options.gain:
            x = x + cached(4) + self.kept["b"] + self.pair[2] + len(self.steps)
        return x + torch.from_numpy(self.table) + len(self.many)


def told(environment: Environment) -> list[Any]:
    """All that there is about parts, for comparing."""

    def about(part: Captured) -> Any:
        value = part.value.index if part.kind is CaptureKind.ALIAS else id(part.value)
        if part.kind is CaptureKind.PLAIN:
            value = part.value
        parent = None if part.parent is None else part.parent.index
        key = (type(part.key), part.key, getattr(part.key, "access", None))
        return (
            part.index, parent, part.access, key, part.kind, value, part.type, part.label,
            part.is_argument, part.size, part.hidden,
        )  # fmt: skip

    held = {
        index: list(content.items())
        for index, content in environment.content_of.items()
        if index not in environment.places.taken
    }
    return [
        list(map(about, environment.parts)),
        {key: part.index for key, part in environment.by_id.items()},
        {index: [(key, id(item)) for key, item in items] for index, items in held.items()},
        environment.places.before(environment.contents),
        [part.index for part in environment.alone],
        [part.index for part in environment.bare],
        [part.index for part in environment.arguments],
        environment.blockers,
        environment.module_paths,
        list(map(id, environment.hook_dicts)),
        environment.hooks,
        environment.names,
        environment.stores,
        list(map(id, environment.functions)),
        environment.tells_numbers,
        environment.namespaces,
        environment.caches,
    ]


def scan(model: Any, **arguments: Any) -> Environment:
    return Environment(model, arguments)


def walk_anew(model: Any, **arguments: Any) -> Environment:
    known = dict(scan_cache._latest)
    scan_cache._latest.clear()
    try:
        return Environment(model, arguments)
    finally:
        scan_cache._latest.clear()
        scan_cache._latest.update(known)


def test_a_second_walk_is_taken_over_and_finds_the_very_same() -> None:
    model, x = Model(), torch.ones(2, 4)
    first = scan(model, x=x)
    assert not first.is_repeated
    second = scan(model, x=x)
    assert second.is_repeated
    assert told(second) == told(first) == told(walk_anew(model, x=x))
    tensors = {part.index for part in first.parts if part.kind is CaptureKind.TENSOR}
    assert tensors
    assert all(first.parts[index] is not second.parts[index] for index in tensors)


def _replace(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model, name, value)


def _global(name: str, value: Any) -> Callable[[Model], None]:
    return lambda _: globals().__setitem__(name, value)


def _swap_linear(model: Model) -> None:
    model.inner.linear.weight = nn.Parameter(torch.zeros(4, 4))


def _other_class(model: Model) -> None:
    model.inner.__class__ = OtherInner


def _other_class_deep(model: Model) -> None:
    found = model.deep
    while isinstance(found, list):
        found = found[0]
    found.__class__ = Config


def _other_code(_: Model) -> None:
    scaled.__code__ = (lambda x, by=2.0, *, shift=0.0: x * by + SHAPES.size).__code__


def _move_first(model: Model) -> None:
    model._modules["inner"] = model._modules.pop("inner")


def _freeze(model: Model) -> None:
    model.inner.linear.weight.requires_grad_(False)


def _other_dtype(model: Model) -> None:
    model.inner.linear.weight.data = model.inner.linear.weight.data.double()


def _other_layout(model: Model) -> None:
    weight = model.inner.linear.weight
    sparse = nn.Parameter(weight.detach().to_sparse())
    # `swap_tensors` asks that nobody else refers to them; a run that has them does.
    torch._C._swap_tensor_impl(weight, sparse)


def _freeze_tagged(model: Model) -> None:
    model.tagged.requires_grad_(False)


def _rekey(model: Model) -> None:
    model.kept["z"] = model.kept.pop("b")


def _tag(model: Model) -> None:
    model.inner.linear.weight.width = 4


def _retag(model: Model) -> None:
    model.tagged.width = 5


def _other_dict(model: Model) -> None:
    model.__dict__ = dict(vars(model))


def _other_parameters(model: Model) -> None:
    model.inner._parameters = dict(model.inner._parameters)


def _to_buffer(model: Model) -> None:
    linear = model.inner.linear
    linear._buffers["bias"] = linear._parameters.pop("bias")


def _rename(model: Model) -> None:
    model.acting = model.__dict__.pop("act")


def _lift_cell(model: Model) -> None:
    model.act.__closure__[0].cell_contents = 7.0


def _held_in_cell(model: Model) -> None:
    model.act.__closure__[1].cell_contents[0] = 7.0


def _default(_: Model) -> None:
    scaled.__defaults__ = (5.0,)


def _keyword_default(_: Model) -> None:
    scaled.__kwdefaults__["shift"] = 5.0


def _class_attribute(_: Model) -> None:
    Inner.gain = 9.0


def _new_member(_: Model) -> None:
    Inner.linear = property(lambda self: self._modules["linear"])


def _hook(model: Model) -> None:
    model.inner.register_forward_hook(lambda *_: None)


def _function_attribute(_: Model) -> None:
    shifted.width = 3


def _alias(model: Model) -> None:
    model.kept["b"] = model.pair[2]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a float": _replace("rate", 0.25),
    "a float by the same number of another type": _replace("flag", 1),
    "a string": _replace("name", "other"),
    "a list": _replace("steps", [1, 2]),
    "a longer list": lambda model: model.steps.append(3),
    "an item of a list": lambda model: model.steps.__setitem__(0, 7),
    "an item of a list in a dict": lambda model: model.kept["a"].__setitem__(0, 7.0),
    "an item of a list in a tuple": lambda model: model.pair[1].__setitem__(0, 7),
    "a tuple": _replace("pair", (1, [2], torch.zeros(4))),
    "a tensor in a dict": lambda model: model.kept.__setitem__("b", torch.ones(4)),
    "an alias": _alias,
    "a key": lambda model: model.kept.__setitem__("c", 1),
    "a key gone": lambda model: model.kept.pop("a"),
    "a set": lambda model: model.tags.add("z"),
    "an array": lambda model: model.table.__setitem__(0, 9),
    "an item of a large list": lambda model: model.many.__setitem__(0, 9),
    "an attribute": _replace("new", 1),
    "an attribute gone": lambda model: delattr(model, "name"),
    "an enum": lambda model: setattr(model.inner, "mode", Mode.OTHER),
    "a setting": lambda model: setattr(model.config, "width", 8),
    "a list in settings": lambda model: model.config.names.append("c"),
    "settings that hold an object": lambda model: setattr(model.config, "other", Config()),
    "an attribute of an object": lambda model: setattr(model.options, "gain", 1.0),
    "settings in an object": lambda model: setattr(model.options.config, "width", 9),
    "a parameter": _swap_linear,
    "a parameter gone": lambda model: setattr(model.inner.linear, "bias", None),
    "requires_grad": _freeze,
    "requires_grad of a tensor with attributes": _freeze_tagged,
    "another key for a value": _rekey,
    "a dtype": _other_dtype,
    "a layout": _other_layout,
    "an attribute of a tensor": _retag,
    "a first attribute of a tensor": _tag,
    "a parameter that becomes a buffer": _to_buffer,
    "another name for an attribute": _rename,
    "a buffer": lambda model: setattr(model.inner, "offset", torch.zeros(4)),
    "a module": lambda model: setattr(model, "inner", Inner()),
    "a module appended": lambda model: model.layers.append(nn.ReLU()),
    "the order of modules": _move_first,
    "the class of a module": _other_class,
    "the class of an object deep down": _other_class_deep,
    "the class of a default": lambda _: setattr(
        defaulted.__defaults__[0],
        "__class__",
        OtherOptions,  # type: ignore[index]
    ),
    "training": lambda model: model.eval(),
    "the dict of a module": _other_dict,
    "the dict of its parameters": _other_parameters,
    "a hook": _hook,
    "a cell": _lift_cell,
    "a list in a cell": _held_in_cell,
    "a global": _global("FACTOR", 4.0),
    "a list among the globals": lambda _: SCALES.append(1.0),
    "a dict deep in a global": lambda _: TABLE["more"]["two"][1].append(4),
    "a global that is no longer plain": lambda _: TABLE.__setitem__("more", object()),
    "a global tensor": _global("WEIGHT", torch.ones(4)),
    "settings among the globals": lambda _: setattr(SHAPES, "size", 5),
    "a global function": _global("shifted", lambda x: x),
    "a context variable": lambda _: LEVEL.set(2),
    "a cache": lambda _: cached(cached.cache_info().misses + 5),
    "a default": _default,
    "a keyword's default": _keyword_default,
    "code": _other_code,
    "an attribute of a function": _function_attribute,
    "a class's attribute": _class_attribute,
    "a class's new member": _new_member,
}


@pytest.fixture
def _put_back() -> Any:
    scales, table, level = list(SCALES), {"one": 1, "more": {"two": (2, [3])}}, LEVEL.get()
    known, code = dict(globals()), scaled.__code__
    yield
    globals().update(known)
    SCALES[:] = scales
    TABLE.clear()
    TABLE.update(table)
    LEVEL.set(level)
    SHAPES.size, Inner.gain = 4, 1.5
    scaled.__code__, scaled.__defaults__, scaled.__kwdefaults__ = code, (2.0,), {"shift": 0.0}
    vars(shifted).clear()
    defaulted.__defaults__[0].__class__ = Options  # type: ignore[index]
    if "linear" in vars(Inner):
        del Inner.linear


@pytest.mark.usefixtures("_put_back")
@pytest.mark.each
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_between_two_walks_is_seen(change: str) -> None:
    model, x = Model(), torch.ones(2, 4)
    first = scan(model, x=x)
    before = told(first)
    CHANGES[change](model)
    second = scan(model, x=x)
    assert told(second) == told(walk_anew(model, x=x))
    # Plain defaults are no parts: what guards them is that the function and its code are the same.
    assert (told(second) != before) == (change not in ("a default", "a keyword's default"))
    assert not second.is_repeated


@pytest.mark.usefixtures("_put_back")
@pytest.mark.each
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_between_two_calls_counts(change: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.ones(2, 4)
    bended = bt.BendedModule(model)
    for _ in range(2):  # the first call may fill the cache, which makes it run live
        assert torch.equal(bended(x), model(x))
    CHANGES[change](model)
    try:
        expected = model(x)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        with pytest.raises(type(error)):
            bended(x)
        return
    assert torch.equal(bended(x), expected)
    assert torch.equal(bended(x), expected)


SOURCE = """
REGISTRY = {"a": object()}
SETTINGS = type("Settings", (), {})()
SETTINGS.kept = object()

def apply(x):
    return x * REGISTRY.get("by", 1.0) * getattr(SETTINGS, "by", 1.0)
"""


class Calling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return finished.apply(x)  # type: ignore[name-defined]  # noqa: F821


def _plain_settings(finished: types.ModuleType) -> None:
    finished.SETTINGS.kept, finished.SETTINGS.by = 0, 2.0


def _plain_registry(finished: types.ModuleType) -> None:
    finished.REGISTRY.update(a=0, by=2.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda finished: setattr(finished, "REGISTRY", {"by": 2.0}),
        lambda finished: delattr(finished, "SETTINGS"),
        _plain_registry,
        _plain_settings,
    ],
)
def test_what_was_not_worth_walking_is_walked_once_it_is(
    change: Callable[[types.ModuleType], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of installed packages only what may be data is scanned, and its content can decide that."""
    finished = types.ModuleType("finished")
    finished.__file__ = "/site-packages/finished.py"
    monkeypatch.setitem(sys.modules, "finished", finished)
    exec(SOURCE, vars(finished))

    monkeypatch.setitem(globals(), "finished", finished)
    model, x = Calling(), torch.ones(2)
    first = scan(model, x=x)
    before = told(first)
    assert scan(model, x=x).is_repeated
    change(finished)
    second = scan(model, x=x)
    assert not second.is_repeated
    assert told(second) == told(walk_anew(model, x=x))
    assert told(second) != before


@pytest.mark.more
def test_objects_that_come_to_stand_where_others_stood_are_told_apart() -> None:
    model, x = Model(), torch.ones(2, 4)
    kept = [scan(model, x=x)]
    for value in range(50):
        # The new number, and the new list, are where the former ones were in memory.
        model.rate = None
        model.rate = float(value)
        model.steps = None
        model.steps = [value]
        model.inner.offset = None
        model.inner.offset = torch.full((4,), float(value))
        second = scan(model, x=x)
        assert told(second) == told(walk_anew(model, x=x))
        second.release()
        kept[0] = second


def test_an_argument_that_is_part_of_the_model_is_not_taken_for_another() -> None:
    model, x = Model(), torch.ones(2, 4)
    first = scan(model, x=x)
    assert scan(model, x=x).is_repeated
    for argument in (model.inner.linear.weight, x, model.inner.linear.weight, x):
        first = scan(model, x=argument)
        assert told(first) == told(walk_anew(model, x=argument))


def test_helper_objects_of_another_class_are_told_apart() -> None:
    model, x = Model(), torch.ones(2, 4)
    first = scan(model, x=x, helper=Options())
    assert scan(model, x=x, helper=Options()).is_repeated
    helper = OtherOptions()
    second = scan(model, x=x, helper=helper)
    assert not second.is_repeated
    assert told(second) == told(walk_anew(model, x=x, helper=helper))
    del first


def test_a_run_lets_go_of_its_arguments_and_of_what_the_model_holds() -> None:
    model, x = Model(), torch.ones(2, 4)
    runs = [scan(model, x=x), scan(model, x=x)]
    assert runs[1].is_repeated
    for run in runs:
        run.release()
        kinds = (CaptureKind.TENSOR, CaptureKind.LIST, CaptureKind.DICT)
        held = [part for part in run.parts if part.kind in kinds and part.access is Access.ITEM]
        assert len(held) > 10
        assert all(part.value is None for part in (*held, *run.arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": torch.ones(2, 4), "y": torch.ones(1)},
        {"x": [torch.ones(2, 4)]},
        {"x": torch.ones(2, 4), "y": 3},
        {"x": torch.ones(2, 4), "config": Config()},
        {"x": torch.ones(2, 4), "function": scaled},
        {"x": torch.ones(2, 4), "generator": torch.Generator()},
    ],
)
def test_other_arguments_lead_to_the_parts_they_would_have_led_to(arguments: Any) -> None:
    model = Model()
    first = [scan(model, x=torch.ones(2, 4)), scan(model, **arguments)]
    again = scan(model, **arguments)
    assert told(again) == told(walk_anew(model, **arguments))
    del first


def test_a_number_is_plain_again_once_the_code_asks_for_types() -> None:
    class Telling(nn.Module):
        def forward(self, x: Tensor, n: int) -> Tensor:
            return x * n

    def asks(self: Any, x: Tensor, n: int) -> Tensor:
        return x * n if type(n) is int else x

    model, x = Telling(), torch.ones(2)
    first = scan(model, x=x, n=2)
    assert first.parts[1].kind is CaptureKind.NUMBER
    Telling.forward = asks  # type: ignore[method-assign]
    assert scan(model, x=x, n=2).parts[1].kind is CaptureKind.PLAIN


def test_lazy_modules_are_refused_however_often_they_are_walked() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    for _ in range(2):
        with pytest.raises(InputError, match="lazy modules"):
            record(model, (torch.ones(2, 2),), {}, Signature(model))
    model(torch.ones(2, 2))
    assert record(model, (torch.ones(2, 2),), {}, Signature(model)).result.shape == (2, 3)


def test_nothing_is_kept_of_a_model_once_its_runs_are_gone() -> None:
    model, x = Model(), torch.ones(2, 4)
    model(x)  # which fills its cache
    trace = bt.trace(model, x)
    assert scan_cache.latest_walk(model) is not None
    again = bt.trace(model, x)
    assert again._recording.environment.is_repeated
    gone = weakref.ref(model)
    del trace
    gc.collect()
    trace = bt.trace(model, x)
    assert trace._recording.environment.is_repeated, "the second run has it as well"
    del model, trace, again
    gc.collect()
    assert gone() is None


def test_a_kept_run_keeps_no_tensor_that_the_model_let_go_of() -> None:
    model, x = Model(), torch.ones(2, 4)
    model(x)  # which fills its cache
    traces = [bt.trace(model, x), bt.trace(model, x)]
    assert traces[1]._recording.environment.is_repeated
    gone = [weakref.ref(model.kept["b"]), weakref.ref(model.inner.offset)]
    model.kept["b"] = model.inner.offset = torch.zeros(4)
    gc.collect()
    assert [tensor() for tensor in gone] == [None, None]


def test_runs_in_between_do_not_disturb_what_another_found() -> None:
    """A run that is still going on has its own parts, whatever others take over or release."""
    model, x = Model(), torch.ones(2, 4)
    first = scan(model, x=x)
    second, third = scan(model, x=x), scan(model, x=x)
    assert second.is_repeated
    assert third.is_repeated
    expected = told(third)
    first.release()
    second.release()
    assert told(third) == expected
    model.rate = 0.75
    model.steps.append(3)
    model.inner.offset = torch.ones(4)
    changed = {change.label for change in third.changes()}
    assert changed == {"self.rate", "self.steps", "self.inner.offset"}
    model.inner.linear.weight.mark = 1
    assert "self.inner.linear.weight.mark" in {change.label for change in third.changes()}


def test_models_that_pass_for_equal_are_told_apart() -> None:
    class Equal(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

        def forward(self, x: Tensor) -> Tensor:
            return x * self.rate

    one, other, x = Equal(1.0), Equal(2.0), torch.ones(2)
    first = scan(one, x=x)
    second = scan(other, x=x)
    assert not second.is_repeated
    assert told(second) == told(walk_anew(other, x=x))
    del first
