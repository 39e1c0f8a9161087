"""Settings of Python, of packages and of torch that a model reads, changed between calls."""

from __future__ import annotations

import builtins
import calendar
import copy
import copyreg
import csv
import datetime
import decimal
import inspect
import itertools
import math
import os
import random
import reprlib
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import bendtrace as bt
from bendtrace.watch import findings
from bendtrace.watch.findings import SETTINGS, _Content
from tests.promise import bits

_ARRAY = np.array([0.123456789, 1e-9])
_THIRD = decimal.Decimal(1) / decimal.Decimal(7)
_HUB = torch.hub.get_dir()


class _Kept:
    """Something that is copied."""


_KEPT = _Kept()


def _divided(x: Tensor) -> Tensor:
    try:
        return x + bool((_ARRAY / np.zeros(2))[0] > 0)
    except FloatingPointError:
        return x - 1


def _swapped(a: int, b: int) -> tuple[int, int]:
    return _divmod(a, b)[::-1]


class _Pair:
    __match_args__ = ("a", "b")
    a, b = 2, 3


def _matched(x: Tensor) -> Tensor:
    match _PAIR:
        case _Pair(first, _):
            return x * first
    raise AssertionError


def _imported(x: Tensor) -> Tensor:
    import _of_the_users

    return x * _of_the_users.factor


_divmod = divmod
_python_state, _warns = random.getstate, torch.is_warn_always_enabled
_PAIR = _Pair()
_FIRST, _OTHER = types.ModuleType("_of_the_users"), types.ModuleType("_of_the_users")
_FIRST.factor, _OTHER.factor = 2, 3  # type: ignore[attr-defined]


def _validated(x: Tensor) -> Tensor:
    try:
        return torch.distributions.Normal(x, -torch.ones(3)).mean
    except ValueError:
        return x - 1


def _zone(name: str) -> Callable[[], None]:
    def change() -> None:
        os.environ["TZ"] = name
        time.tzset()

    return change


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


# What is read, how it is changed, and how that is put back.
_Case = tuple[Callable[[Tensor], Any], Callable[[], Any], Callable[[], Any]]
_PRINTED = lambda: np.set_printoptions(precision=2)  # noqa: E731
_AS_EVER = lambda: np.set_printoptions(precision=8)  # noqa: E731
_CASES: dict[str, _Case] = {
    "text_of_an_array": (lambda x: (x, str(_ARRAY)), _PRINTED, _AS_EVER),
    "form_of_an_array": (lambda x: (x, f"{_ARRAY!r}"), _PRINTED, _AS_EVER),
    "numpy_array2string": (lambda x: (x, np.array2string(_ARRAY)), _PRINTED, _AS_EVER),
    "numpy_printoptions": (lambda x: x * np.get_printoptions()["precision"], _PRINTED, _AS_EVER),
    "numpy_errors": (
        _divided, lambda: np.seterr(divide="raise"), lambda: np.seterr(divide="ignore"),
    ),
    "known_by_another_name": (
        lambda x: x * (_python_state()[1][3] % 97),
        lambda: random.seed(3), lambda: random.seed(4),
    ),
    "setting_known_by_another_name": (
        lambda x: x * (2 if _warns() else 3),
        lambda: torch.set_warn_always(True), lambda: torch.set_warn_always(False),
    ),
    "random_getstate": (
        lambda x: x * (random.getstate()[1][3] % 97),
        lambda: random.seed(3), lambda: random.seed(4),
    ),
    "writeable": (
        lambda x: x * (2 if _ARRAY.flags.writeable else 3),
        lambda: _ARRAY.setflags(write=False), lambda: _ARRAY.setflags(write=True),
    ),
    "builtin": (
        lambda x: x * divmod(7, 2)[0],
        lambda: setattr(builtins, "divmod", _swapped), lambda: setattr(builtins, "divmod", _divmod),
    ),
    "match_args": (
        _matched, lambda: setattr(_Pair, "__match_args__", ("b", "a")),
        lambda: setattr(_Pair, "__match_args__", ("a", "b")),
    ),
    "signature": (
        lambda x: x * len(inspect.signature(_swapped).parameters),
        lambda: setattr(_swapped, "__signature__", inspect.Signature()),
        lambda: vars(_swapped).pop("__signature__", None),
    ),
    "module_in_forward": (
        _imported, lambda: sys.modules.__setitem__("_of_the_users", _OTHER),
        lambda: sys.modules.__setitem__("_of_the_users", _FIRST),
    ),
    "method_of_tensors": (
        lambda x: x.of_mine() if hasattr(x, "of_mine") else x,
        lambda: setattr(Tensor, "of_mine", lambda self: self * 2),
        lambda: hasattr(Tensor, "of_mine") and delattr(Tensor, "of_mine"),
    ),
    "warn_always": (
        lambda x: x * (2 if torch.is_warn_always_enabled() else 3),
        lambda: torch.set_warn_always(True), lambda: torch.set_warn_always(False),
    ),
    "view_replay": (
        lambda x: x * (2 if torch.autograd.is_view_replay_enabled() else 3),
        lambda: torch.autograd._force_original_view_tracking(True).__enter__(),
        lambda: torch.autograd._force_original_view_tracking(False).__enter__(),
    ),
    "cudnn_attention": (
        lambda x: x * (2 if torch.backends.cuda.cudnn_sdp_enabled() else 3),
        lambda: torch.backends.cuda.enable_cudnn_sdp(False),
        lambda: torch.backends.cuda.enable_cudnn_sdp(True),
    ),
    "autocast_dtype": (
        lambda x: x * torch.finfo(torch.get_autocast_dtype("cpu")).bits,
        lambda: torch.set_autocast_dtype("cpu", torch.float32),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    "numpy_bufsize": (
        lambda x: x * np.getbufsize(), lambda: np.setbufsize(16384), lambda: np.setbufsize(8192),
    ),
    "numpy_random_state": (
        lambda x: (x, int(np.random.get_state()[1][0])),
        lambda: np.random.seed(3), lambda: np.random.seed(4),
    ),
    "decimal_operator": (
        lambda x: x * float(_THIRD / 3),
        lambda: _set(decimal.getcontext(), "prec", 3)(),
        lambda: _set(decimal.getcontext(), "prec", 28)(),
    ),
    "reprlib": (
        lambda x: (x, reprlib.repr([1] * 9)),
        _set(reprlib.aRepr, "maxlist", 2), _set(reprlib.aRepr, "maxlist", 6),
    ),
    "calendar": (
        lambda x: x * (1 + calendar.firstweekday()),
        lambda: calendar.setfirstweekday(6), lambda: calendar.setfirstweekday(0),
    ),
    "csv": (
        lambda x: x * csv.field_size_limit(),
        lambda: csv.field_size_limit(5), lambda: csv.field_size_limit(131072),
    ),
    "time_zone": (lambda x: x * (1 + time.timezone), _zone("Asia/Tokyo"), _zone("UTC")),
    "time_stamp": (
        lambda x: x * (1 + datetime.datetime.fromtimestamp(0).hour),
        _zone("Asia/Tokyo"), _zone("UTC"),
    ),
    "copyreg": (
        lambda x: x * (2 if isinstance(copy.copy(_KEPT), _Kept) else 3),
        lambda: copyreg.pickle(_Kept, lambda _: (list, ())),
        lambda: copyreg.dispatch_table.pop(_Kept, None),
    ),
    "function_of_a_module_in_a_module": (
        lambda x: x * len(os.path.join("a", "b")),
        _set(os.path, "join", lambda *_: "z"), _set(os.path, "join", os.path.join),
    ),
    "class_of_a_module": (
        lambda x: x * len(list(itertools.pairwise([1, 2, 3]))),
        _set(itertools, "pairwise", zip), _set(itertools, "pairwise", itertools.pairwise),
    ),
    "transformers_verbosity": (
        lambda x: x * transformers.logging.get_verbosity(),
        transformers.logging.set_verbosity_debug, transformers.logging.set_verbosity_error,
    ),
    "distributions_validation": (
        _validated,
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
        lambda: torch.distributions.Distribution.set_default_validate_args(True),
    ),
    "sparse_invariants": (
        lambda x: x * (2 if torch.sparse.check_sparse_tensor_invariants.is_enabled() else 3),
        torch.sparse.check_sparse_tensor_invariants.enable,
        torch.sparse.check_sparse_tensor_invariants.disable,
    ),
    "overwriting_parameters": (
        lambda x: x * (2 if torch.__future__.get_overwrite_module_params_on_conversion() else 3),
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(False),
    ),
    "filled_memory": (
        lambda x: x * (2 if torch.utils.deterministic.fill_uninitialized_memory else 3),
        _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
        _set(torch.utils.deterministic, "fill_uninitialized_memory", True),
    ),
    "opt_einsum": (
        lambda x: x * (2 if torch.backends.opt_einsum.enabled else 3),
        _set(torch.backends.opt_einsum, "enabled", False),
        _set(torch.backends.opt_einsum, "enabled", True),
    ),
    "hub": (
        lambda x: x * len(torch.hub.get_dir()),
        lambda: torch.hub.set_dir("elsewhere"), lambda: torch.hub.set_dir(_HUB),
    ),
    "constant_of_torch": (
        lambda x: x * torch.pi, _set(torch, "pi", 3.0), _set(torch, "pi", math.pi),
    ),
    "constant_of_a_module_of_torch": (
        lambda x: x * torch.nn.functional.of_the_users,
        _set(torch.nn.functional, "of_the_users", 5), _set(torch.nn.functional, "of_the_users", 1),
    ),
    "constant_of_numpy": (
        lambda x: x * np.of_the_users, _set(np, "of_the_users", 5), _set(np, "of_the_users", 1),
    ),
    "constant_of_tensors": (
        lambda x: x * x.of_the_users,
        _set(Tensor, "of_the_users", 5), _set(Tensor, "of_the_users", 1),
    ),
}  # fmt: skip


class _Answers:
    """Answers for all attributes, also those that Python has."""

    def __getattribute__(self, name: str) -> Any:
        return _answer[0]


_answer = [1]
_ANSWERS = _Answers()


def test_an_object_that_answers_for_all_of_its_attributes() -> None:
    bended = bt.BendedModule(lambda x: x * _ANSWERS.anything)
    for answer in (1, 1, 3, 1):
        _answer[0] = answer
        assert torch.equal(bended(torch.ones(2)), torch.ones(2) * answer)
    assert bended.stats.live == 4
    assert bended.why_live == ("_Answers.__getattribute__ hides what _ANSWERS holds",)


def test_a_run_changes_none_of_the_settings_itself() -> None:
    contents = [_Content(value, read, label) for _, value, read, label in SETTINGS]

    def function(x: Tensor) -> Tensor:
        assert [content.label for content in contents if not content.same()] == []
        return x + 1

    assert torch.equal(bt.trace(function, torch.ones(2)).output, torch.ones(2) + 1)


_seed_of_torch = torch.initial_seed


def test_a_function_that_is_known_by_another_name_is_named_by_its_own() -> None:
    def function(x: Tensor) -> Tensor:
        return x * (_seed_of_torch() % 7)

    bended = bt.BendedModule(function)
    for seed in (5, 4, 3):
        torch.manual_seed(seed)
        assert torch.equal(bended(torch.ones(2)), function(torch.ones(2)))
    (reason,) = bended.why_live
    place = f"{__file__}:{function.__code__.co_firstlineno}"
    assert reason.startswith(f"initial_seed (see {place})")


class _Number:
    """An object that stands for a number."""

    def __init__(self) -> None:
        self.value = 1

    def __index__(self) -> int:
        return self.value


def test_an_object_that_stands_for_a_number_in_a_slice() -> None:
    start = _Number()

    def function(x: Tensor) -> Tensor:
        return x[start:] * 2

    bended, x = bt.BendedModule(function), torch.arange(5.0)
    for value in (1, 1, 3, 3, 1):
        start.value = value
        assert torch.equal(bended(x), function(x))
    assert bended.stats.replays == 3


def test_hooks_for_all_modules_are_called_as_often_as_by_the_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    bended, x = bt.BendedModule(model), torch.randn(2, 3)
    bended(x)
    register = torch.nn.modules.module.register_module_forward_hook
    with register(lambda module, args, output: output * 2):
        assert torch.equal(bended(x), model(x))
    assert torch.equal(bended(x), model(x))


def test_settings_of_numpy_are_read_again_only_once_one_was_exchanged() -> None:
    if not findings._numpys_variables():
        pytest.skip("this numpy does not say where it has its settings")
    bended, x = bt.BendedModule(lambda x: x + float(np.ones(2).sum())), torch.ones(3)
    for _ in range(3):
        bended(x)
    seen = findings._numpys_latest[0]
    bended(x)
    assert findings._numpys_latest[0] is seen
    for change in (np.errstate(over="ignore"), np.printoptions(precision=3)):
        with change:
            bended(x)
            assert findings._numpys_latest[0] is not seen
        bended(x)
        seen = findings._numpys_latest[0]
    assert bended.stats.replays == 5  # what differed within was recorded
    assert bended.stats.traces == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _CASES)
def test_a_setting_that_changes_between_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, change, restore = _CASES[name]
    monkeypatch.setenv("TZ", "UTC")  # which is put back
    for owner in (torch.nn.functional, np, Tensor):
        monkeypatch.setattr(owner, "of_the_users", 1, raising=False)
    # Of this file only what the function names is read.
    model = types.FunctionType(function.__code__, globals(), name, None, function.__closure__)
    bended = bt.BendedModule(model)
    seen = []
    try:
        for step in (restore, None, change, None, restore, None):
            if step is not None:
                step()
            x = torch.tensor([1.0, 2.0, 3.0])
            wanted, given = function(x.clone()), bended(x.clone())
            assert bits(given) == bits(wanted)
            seen.append(repr(bits(wanted)))
    finally:
        restore()
        time.tzset()
    assert seen[2] != seen[1], "the function does not depend on it"
    assert seen[4] == seen[1]
    assert bended.stats.replays >= 2 or bended.stats.live
