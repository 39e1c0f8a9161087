"""Saving activations: it changes nothing about a run, and keeps each value as it was computed."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bendtrace as bt
from tests.benchmarks.memory import peak_of
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.hf_models import MODELS, TinyModel
from tests.promise import Inputs, bits, footprint, outcome, state

is_cow = torch._C._is_cow_tensor

WAYS: dict[str, dict[str, Any]] = {
    "all": {"save": "all"},
    "gradients": {"save": "all", "save_gradients": True},
    "graph": {"save": "all", "keep_graph": True},
    "subset": {"save": lambda entry: entry.ordinal % 2 == 0},
    "function": {"save": lambda entry: entry.tensor_contents.sum() if entry.shape else None},
    "dtype": {"save": "all", "save_dtype": torch.float64},
    "stream": {"save": "all", "save_to": "stream"},
}


def logged(function: Callable[..., Any], *args: Any, **options: Any) -> bt.Trace:
    options = {"save": "all", **options}
    return bt.trace(function, *args, **options)


def kept(log: bt.Trace) -> dict[str, Any]:
    """What was saved of each layer that an op gave, or that was given."""
    return {
        entry.label: entry.tensor_contents.tolist()
        for entry in log.layers
        if entry.kind != "output" and entry.has_contents
    }


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that can be reached from a value."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, seen)
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from tensors_in(item, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value), seen)


def plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


# What a logged run does is what the run does


def backward(value: Any) -> None:
    wanted = [t for t in tensors_in(value) if t.requires_grad and t.grad_fn is not None]
    if wanted:
        torch.autograd.backward([t.float().sum() if not t.is_complex() else t.abs().sum()
                                 for t in wanted])  # fmt: skip


def assert_same_run(
    make: Callable[[], Callable[..., Any]],
    inputs: Callable[[], Inputs],
    options: dict[str, Any],
    tmp_path: Path,
) -> bt.Trace | None:
    """A logged run does to the world what the run does without; return its log."""
    options = dict(options)
    if "save_to" in options:
        options["save_to"] = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    torch.manual_seed(1)
    eager = make()
    torch.manual_seed(1)
    model = make()
    logs: list[bt.Trace] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        logs.append(bt.trace(model, *args, **options, **kwargs))
        return logs[-1].output

    given = inputs()
    before = [t for t in tensors_in([given, model]) if plain(t)]
    copies = inputs()
    wanted = outcome(eager, copies, 7)
    prints = footprint()
    made = outcome(run, given, 7)
    assert footprint() == prints
    assert type(made[1]) is type(wanted[1]), made[1]
    assert str(made[1]) == str(wanted[1])
    assert made[0] == wanted[0], "another output"
    assert made[2] == wanted[2], "other arguments afterwards"
    assert made[3] == wanted[3], "another state of the generator"
    assert state(model) == state(eager), "other state"
    assert not [t.shape for t in before if is_cow(t)], "memory of the caller's is copy-on-write"
    return logs[0] if logs else None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_logged_run_is_the_run_itself(case: Case, way: str, tmp_path: Path) -> None:
    for inputs in case.paths.values():
        assert_same_run(case.make, inputs, WAYS[way], tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_parameters_are_those_of_the_run_itself(case: Case) -> None:
    for inputs in case.paths.values():
        torch.manual_seed(1)
        eager = case.make()
        torch.manual_seed(1)
        model = case.make()
        torch.manual_seed(2)
        try:
            wanted = eager(*inputs()[0], **inputs()[1])
        except Exception:
            continue  # test_a_logged_run_is_the_run_itself has the errors
        torch.manual_seed(2)
        log = bt.trace(model, *inputs()[0], save="all", save_gradients=True, **inputs()[1])
        backward(wanted)
        backward(log.output)
        assert state(model) == state(eager)
        hooks = [t._backward_hooks for t in tensors_in(model) if t.is_leaf]
        assert not any(hooks)


@pytest.mark.parametrize("way", ["all", "gradients", "stream"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_hugging_face_models_do_the_same_logged(
    model: TinyModel, way: str, tmp_path: Path
) -> None:
    with torch.set_grad_enabled(way == "gradients"):
        assert_same_run(model.make, lambda: ((), model.inputs()), WAYS[way], tmp_path)


# What is kept is what there was


class Notes(TorchFunctionMode):
    """Copies what each torch function gives, or writes to, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        versions = [t._version for t in args[:1] if isinstance(t, Tensor) and not t.is_inference()]
        out = func(*args, **(kwargs or {}))
        found = list(tensors_in(out)) if isinstance(out, (Tensor, tuple, list)) else []
        if out is None and versions and args[0]._version != versions[0]:
            found = [args[0]]
        self.given += [(getattr(func, "__name__", ""), value_of(t)) for t in found]
        return out


def value_of(tensor: Tensor) -> Any:
    return bits(tensor.detach())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_are_those_that_by_hand_copies_have(case: Case) -> None:
    for inputs in case.paths.values():
        torch.manual_seed(1)
        eager = case.make()
        torch.manual_seed(1)
        model = case.make()
        notes = Notes()
        torch.default_generator.manual_seed(3)
        try:
            with notes:
                eager(*inputs()[0], **inputs()[1])
        except Exception:
            continue  # test_a_logged_run_is_the_run_itself has the errors
        torch.default_generator.manual_seed(3)
        log = bt.trace(model, *inputs()[0], save="all", **inputs()[1])
        saved = [
            (entry.function, value_of(entry.tensor_contents))
            for entry in log.layers
            if entry.kind == "op" and entry.has_contents
        ]
        assert [value for _, value in saved] == [value for _, value in notes.given]


def test_values_are_those_that_forward_hooks_see() -> None:
    model = next(model for model in MODELS if model.name == "gpt2").make().train()
    inputs = next(model for model in MODELS if model.name == "gpt2").inputs()
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, output, name=name: seen.setdefault(name, []).append(
                next(tensors_in(output)).clone()
            )
        )
        for name, module in model.named_modules()
        if name and not list(module.children())
    ]
    torch.manual_seed(4)
    model(**inputs)
    for handle in handles:
        handle.remove()
    torch.manual_seed(4)
    log = bt.trace(model, save="all", **inputs)
    assert len(seen) > 10
    for name, values in seen.items():
        assert torch.equal(log[name].tensor_contents, values[0]), name


# Later writes do not reach it


def add_in_place(y: Tensor) -> Any:
    return y.add_(1)


def through_a_view(y: Tensor) -> Any:
    y.view(-1)[1:].mul_(5)


def through_its_transpose(y: Tensor) -> Any:
    y.t()[0] = 9


def through_its_data(y: Tensor) -> Any:
    y.data.fill_(9)
    y.detach().add_(1)


def into_it(y: Tensor) -> Any:
    torch.add(y, 1, out=y)


def by_numpy(y: Tensor) -> Any:
    y.detach().numpy()[:] = 9


def by_dlpack(y: Tensor) -> Any:
    torch.from_dlpack(y.detach()).fill_(9)


def by_its_storage(y: Tensor) -> Any:
    y.untyped_storage().fill_(0)


def by_another_tensor_of_its_storage(y: Tensor) -> Any:
    torch.empty(0).set_(y.detach().untyped_storage(), 0, (6,)).fill_(9)


def by_set(y: Tensor) -> Any:
    torch.empty(0).set_(y.detach()).fill_(9)


def by_its_address(y: Tensor) -> Any:
    ctypes.memset(y.data_ptr(), 0, 24)


def by_an_optimizer(y: Tensor) -> Any:
    p = nn.Parameter(y.detach())
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=1.0).step()


def by_resizing(y: Tensor) -> Any:
    y.resize_(4, 4)
    y.fill_(9)


def by_resizing_through_out(y: Tensor) -> Any:
    z = y.new_empty(0)
    torch.add(y, 1, out=z)
    z.fill_(3)
    y.copy_(z)


def by_resizing_its_storage(y: Tensor) -> Any:
    y.untyped_storage().resize_(400)
    y.fill_(9)


def by_sharing_it(y: Tensor) -> Any:
    y.share_memory_()
    y.fill_(9)


def by_swapping_its_data(y: Tensor) -> Any:
    y.data = torch.zeros(2, 3)
    y.add_(1)


WRITERS = [
    add_in_place, through_a_view, through_its_transpose, through_its_data, into_it, by_numpy,
    by_dlpack, by_its_storage, by_another_tensor_of_its_storage, by_set, by_its_address,
    by_an_optimizer, by_resizing, by_resizing_through_out, by_resizing_its_storage,
    by_sharing_it, by_swapping_its_data,
]  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_during_the_run_is_the_run_s_alone(
    write: Callable[[Tensor], Any], mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    def model(x: Tensor) -> Any:
        y = x * 2
        view = y.view(6)
        write(y)
        return y, y + 1, view

    x = torch.ones(2, 3)
    with mode():
        try:
            wanted = model(torch.ones(2, 3))
        except RuntimeError as error:  # not every way is open to tensors of inference mode
            with pytest.raises(type(error), match=str(error)[:20]):
                logged(model, x)
            return
        log = logged(model, x)
        assert bits(log.output) == bits(wanted)
    assert log["mul_1"].tensor_contents.tolist() == [[2.0] * 3] * 2
    assert log["view_1"].tensor_contents.tolist() == [2.0] * 6
    assert x.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_after_the_run_is_not_kept(write: Callable[[Tensor], Any]) -> None:
    def model(x: Tensor) -> Any:
        y = x * 2
        return y, y.view(6)

    wanted, log = model(torch.ones(2, 3)), logged(model, torch.ones(2, 3))
    write(wanted[0])
    write(log.output[0])
    assert bits(log.output) == bits(wanted)
    assert log["mul_1"].tensor_contents.tolist() == [[2.0] * 3] * 2
    assert log["view_1"].tensor_contents.tolist() == [2.0] * 6
    assert log["output_1"].tensor_contents.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_to_a_kept_value_reaches_nobody_else(
    write: Callable[[Tensor], Any],
) -> None:
    def model(x: Tensor) -> Any:
        y = x * 2
        return y, y.view(6)

    x = torch.ones(2, 3)
    log = logged(model, x)
    for label in ("mul_1", "input_1"):
        write(log[label].tensor_contents)
    assert bits(log.output) == bits(model(torch.ones(2, 3)))
    assert log["view_1"].tensor_contents.tolist() == [2.0] * 6
    assert x.tolist() == [[1.0] * 3] * 2


def test_each_step_of_writing_is_kept_on_its_own() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.clone()
        for _ in range(3):
            y[0] = y[0] * 2
        y.mul_(3).sub_(1)
        return y.relu_()

    assert kept(logged(model, torch.tensor([1.0, -1.0]))) == {
        "input_1_0": [1.0, -1.0],
        "clone_1_1": [1.0, -1.0],
        "getitem_1_2:1": 1.0, "mul_1_3:1": 2.0, "setitem_1_4:1": [2.0, -1.0],
        "getitem_1_2:2": 2.0, "mul_1_3:2": 4.0, "setitem_1_4:2": [4.0, -1.0],
        "getitem_1_2:3": 4.0, "mul_1_3:3": 8.0, "setitem_1_4:3": [8.0, -1.0],
        "mul_2_5": [24.0, -3.0],
        "sub_1_6": [23.0, -4.0],
        "relu_1_7": [23.0, 0.0],
    }  # fmt: skip


def test_what_is_kept_survives_pickling_and_copying() -> None:
    log = logged(lambda x: (x * 2).add_(1), torch.ones(2))
    saved, file = log["mul_1"].tensor_contents, io.BytesIO()
    copied = copy.deepcopy(saved)
    torch.save(saved, file)
    file.seek(0)
    for other in (copied, torch.load(file), pickle.loads(pickle.dumps(saved))):
        other.fill_(7)
        assert saved.tolist() == [2.0, 2.0]


# Memory that others know by its address stays where it is


def test_numpy_and_the_caller_s_argument_stay_one_memory() -> None:
    array = np.ones((2, 3), np.float32)

    def model(x: Tensor) -> Tensor:
        x.add_(1)
        x.view(-1)[0] = 5
        array[1] = 7  # of which the run knows nothing
        return x + 0

    log = logged(model, torch.from_numpy(array))
    assert array.tolist() == [[5.0, 2.0, 2.0], [7.0] * 3]
    assert log["add_2"].tensor_contents.tolist() == array.tolist()
    assert log["input_1"].tensor_contents.tolist() == [[1.0] * 3] * 2
    assert log["add_1"].tensor_contents.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("form", ["t", "data", "detach", "expand_as", "view_as", "narrow"])
def test_numpy_and_a_parameter_stay_one_memory(form: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    alias, address = parameter.detach().numpy(), parameter.data_ptr()

    def model(x: Tensor) -> Tensor:
        if form in ("expand_as", "view_as"):
            view = getattr(parameter, form)(parameter)
        elif form == "narrow":
            view = parameter.narrow(0, 0, 1)
        else:
            view = parameter.data if form == "data" else getattr(parameter, form)()
        return x + view.sum()

    log = logged(model, torch.ones(1))
    assert not is_cow(parameter)
    with torch.no_grad():
        parameter.add_(1)
    assert alias.tolist() == [[2.0] * 3] * 2
    assert parameter.data_ptr() == address
    viewed = log.layers[1]
    assert viewed.tensor_contents.unique().tolist() == [1.0]


def test_an_alias_that_is_made_within_the_run_stays_one_memory() -> None:
    def model(x: Tensor) -> Any:
        y = x * 2
        y.add_(1)
        array = y.numpy()
        z = y.mul_(2)
        array[0] = 0
        return y, z + 1, array

    y, z, array = logged(model, torch.ones(3)).output
    y[1] = 8
    array[2] = 4
    assert y.tolist() == array.tolist() == [0.0, 8.0, 4.0]
    assert z.tolist() == [1.0, 7.0, 7.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda memory: torch.frombuffer(memory, dtype=torch.float32),
        lambda memory: torch.from_numpy(np.frombuffer(memory, np.float32)),
        lambda memory: torch.from_dlpack(np.frombuffer(memory, np.float32)),
        lambda memory: torch.asarray(memoryview(memory), dtype=torch.float32),
    ],
    ids=["frombuffer", "from_numpy", "from_dlpack", "asarray"],
)
def test_a_tensor_over_the_bytes_of_another_object_stays_over_them(
    make: Callable[[bytearray], Tensor],
) -> None:
    memory = bytearray(16)

    def model(x: Tensor) -> Any:
        y = make(memory)
        first = y[:2] * 1
        y.add_(x)
        second = y * 1
        memory[:] = bytes(16)
        return first, second, y * 1, y

    log = logged(model, torch.ones(4))
    values = [log[f"mul_{n}"].tensor_contents.tolist() for n in (1, 2, 3)]
    assert values == [[0.0] * 2, [1.0] * 4, [0.0] * 4]
    log.output[3].fill_(1)
    assert bytes(memory) == np.ones(4, np.float32).tobytes()


def test_shared_memory_stays_shared() -> None:
    x = torch.zeros(3).share_memory_()
    parameter = nn.Parameter(torch.zeros(3).share_memory_())
    addresses = x.data_ptr(), parameter.data_ptr()

    def model(x: Tensor) -> Tensor:
        made = torch.zeros(3).share_memory_()
        made.add_(x.view(-1).add_(1))
        return made + parameter.view(-1)

    log = logged(model, x)
    assert (x.data_ptr(), parameter.data_ptr()) == addresses
    assert x.is_shared()
    assert parameter.is_shared()
    assert log["output_1"].tensor_contents.tolist() == [1.0] * 3


# Nothing is copied before something is written


SIZE = 64 * 64 * 4  # bytes of one activation


def chain(x: Tensor) -> Tensor:
    for _ in range(10):
        x = (x + 1).view(64, 64)
    return x


def test_nothing_is_copied_without_a_later_write() -> None:
    addresses: list[int] = []

    class Addresses(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                addresses.append(torch._C._data_address(out))
            return out

    with torch.no_grad():
        peak, _ = peak_of(lambda: logged(chain, torch.ones(64, 64)))
        log = logged(chain, torch.ones(64, 64))
    # A sum and a view of the same memory a step; the argument is copied, whoever knows it.
    assert peak <= (10 + 2) * SIZE
    assert sum(is_cow(e.tensor_contents) for e in log.layers if e.kind == "op") >= 18


def test_memory_is_copied_once_for_a_later_write() -> None:
    def model(x: Tensor) -> Tensor:
        y = x + 1
        for _ in range(10):
            y.add_(1)
        return y

    with torch.no_grad():
        peak, _ = peak_of(lambda: logged(model, torch.ones(64, 64)))
    assert 11 * SIZE <= peak <= 13 * SIZE


def test_a_subset_costs_only_the_subset() -> None:
    with torch.no_grad():
        log, eager = logged(chain, torch.ones(64, 64), save="add_1:3"), chain(torch.ones(64, 64))
        assert [e.label for e in log.layers if e.has_contents] == ["add_1_1:3"]
        one, _ = peak_of(lambda: logged(chain, torch.ones(64, 64), save="add_1:3"))
        last, _ = peak_of(lambda: logged(chain, torch.ones(64, 64), save=-1))
        none, _ = peak_of(lambda: logged(chain, torch.ones(64, 64), save="none"))
    assert none <= 2 * SIZE
    assert one <= none + SIZE
    assert last <= none + SIZE
    assert torch.equal(log.output, eager)


def test_a_stream_keeps_nothing_in_memory(tmp_path: Path) -> None:
    with torch.no_grad():
        peak, _ = peak_of(lambda: logged(chain, torch.ones(64, 64), save_to=tmp_path / "a"))
        log = logged(chain, torch.ones(64, 64), save_to=tmp_path / "b")
    assert peak <= 4 * SIZE
    for step in range(10):
        read = log[f"add_1:{step + 1}"].tensor_contents
        assert read.unique().tolist() == [step + 2.0]


def test_a_log_that_is_dropped_frees_what_it_kept() -> None:
    with torch.no_grad():
        log = logged(chain, torch.ones(64, 64))
        assert len(log.layers) == 22

        def drop() -> None:
            nonlocal log
            log = logged(chain, torch.ones(64, 64))
            del log
            gc.collect()

        _, left = peak_of(drop)
    assert left == 0
