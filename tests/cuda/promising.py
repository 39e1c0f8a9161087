"""The promise: what the model gives, traced and replayed, bit by bit."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import bendtrace as bt
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.cuda.moving import moved
from tests.cuda.rows import INCOMPARABLE, RIGHT, WRONG, Options, Row, line_of
from tests.hf_models import MODELS, TinyModel
from tests.promise import Inputs, assert_promise
from tools.hub.steps import assert_trains_alike

__all__ = ["GROUPS", "check", "names"]

GROUPS = {
    "corpus": "models of the corpus, along all their paths",
    "tiny": "tiny transformers, with several sizes and paddings",
    "training": "tiny transformers, training steps with dropout",
    "hub": "`transformers` architectures, also logged, inspected and patched",
}
_TRIES = 3
_SEVERAL = "the model itself gives other bits each time"

Wrap = Callable[[Any], Any]
# Compares a model with what is made of it, and returns what there is to say of the calls.
Comparison = Callable[[Wrap], dict[str, Any]]


def names(options: Options) -> list[str]:
    """Return the names of the cases, each after its group."""
    found = [f"corpus: {case.name}" for case in CASES]
    if importlib.util.find_spec("transformers") is None:
        return found
    from tools.hub.building import CHOSEN

    found += [f"tiny: {model.name}" for model in MODELS]
    found += [f"training: {model.name}" for model in MODELS]
    return found + [f"hub: {name}" for name in CHOSEN]


def check(name: str, options: Options) -> Row:
    """Compare a model with its `BendedModule` on the device."""
    group, _, title = name.partition(": ")
    if group == "corpus":
        return corpus_case(name, next(case for case in CASES if case.name == title), options)
    if group == "hub":
        return _hub(name, title, options)
    model = next(model for model in MODELS if model.name == title)
    comparison = _tiny(model, options) if group == "tiny" else _training(model, options)
    return compared(name, comparison)


# The corpus


def corpus_case(name: str, case: Case, options: Options) -> Row:
    """Compare a model of the corpus along all its paths, in the order of the registry."""
    device = options.device

    def make() -> Callable[..., Any]:
        return moved(case.make(), device)

    def on_device(path: Callable[[], Inputs]) -> Callable[[], Inputs]:
        def inputs() -> Inputs:
            with torch.device("cpu"):  # whatever the default one is
                made = path()
            return moved(made, device)

        return inputs

    paths = [on_device(path) for path in case.paths.values()]
    first, second, *rest = paths
    calls = [first, first, second, first, second, *rest, *rest]
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    note = ""
    if options.on_cuda and (error := _own_error(case, make, paths, mode)) is not None:
        # Its code makes tensors on the CPU.
        mode, note = lambda: torch.device(device), "with the device as torch's default one"
        if _own_error(case, make, paths, mode) is not None:
            mode, note = nullcontext, f"the model itself raises there: {line_of(error)}"

    def comparison(wrap: Wrap) -> dict[str, Any]:
        return _counted(assert_promise(make, calls, mode=mode, wrap=wrap))

    row = compared(name, comparison)
    if not note:
        return row
    outcome = INCOMPARABLE if mode is nullcontext and row.outcome == RIGHT else row.outcome
    if outcome == INCOMPARABLE:
        note += "; the BendedModule raises the same"
    return Row(name, outcome, "; ".join(filter(None, (note, row.why))), row.numbers)


def _own_error(
    case: Case,
    make: Callable[[], Callable[..., Any]],
    paths: list[Callable[[], Inputs]],
    mode: Callable[[], AbstractContextManager[Any]],
) -> Exception | None:
    """Return an error that the model raises on the device, and not on the CPU."""
    for there, path in zip(paths, case.paths.values(), strict=True):
        error = _raised(make, there, mode)
        if error is not None and type(error) is not type(_raised(case.make, path, nullcontext)):
            return error
    return None


def _raised(
    make: Callable[[], Callable[..., Any]],
    inputs: Callable[[], Inputs],
    mode: Callable[[], AbstractContextManager[Any]],
) -> Exception | None:
    torch.manual_seed(0)
    model = make()
    with mode():
        args, kwargs = inputs()
        try:
            model(*args, **kwargs)
        except Exception as error:
            return error
    return None


# Transformers


def _tiny(model: TinyModel, options: Options) -> Comparison:
    def inputs(make: Callable[..., Any], **size: int) -> Callable[[], Inputs]:
        return lambda: ((), moved(make(**size), options.device))

    calls = [inputs(model.inputs)] * 2
    calls += [inputs(model.padded)] * 2 if model.padded is not None else []
    calls += [inputs(model.inputs, **size) for size in model.other_sizes for _ in range(2)]
    calls.append(inputs(model.inputs))

    def comparison(wrap: Wrap) -> dict[str, Any]:
        return _counted(
            assert_promise(
                lambda: moved(model.make(), options.device), calls, mode=torch.no_grad, wrap=wrap
            )
        )

    return comparison


def _training(model: TinyModel, options: Options) -> Comparison:
    def inputs(seed: int) -> Callable[[], Inputs]:
        return lambda: ((), moved(model.inputs(seed=seed), options.device))

    def comparison(wrap: Wrap) -> dict[str, Any]:
        return _counted(
            assert_trains_alike(
                lambda: moved(model.make(), options.device), [inputs(s) for s in (0, 0, 1, 0)], wrap
            )
        )

    return comparison


def _hub(name: str, model_type: str, options: Options) -> Row:
    from tools.hub.building import build, quiet
    from tools.hub.checking import called
    from tools.hub.inputs import guessed
    from tools.hub.sweeping import row

    def inputs() -> dict[str, Any]:
        return moved(guessed(build(model_type))[1], options.device)

    try:
        with quiet(), torch.no_grad():
            moved(build(model_type), options.device)(**inputs())
    except Exception as error:  # another version of transformers, or tensors made on the CPU
        return Row(name, INCOMPARABLE, f"the model itself raises there: {line_of(error)}")

    def comparison(wrap: Wrap) -> dict[str, Any]:
        if wrap is not bt.BendedModule:
            with quiet(), torch.no_grad():
                given, model = inputs(), moved(build(model_type), options.device)
                assert called(model, given, 0) == called(model, given, 0), _SEVERAL
            return {}
        found = row(model_type, lambda value: moved(value, options.device))
        assert found.outcome in ("itself", "refused"), f"{found.outcome}: {found.why}"
        seen = found.checked
        return {} if seen is None else {"replays": seen.replays, "live": len(seen.live)}

    return compared(name, comparison)


# Comparing


def compared(name: str, comparison: Comparison) -> Row:
    """Compare, and find out about a difference whether it is the model's own.

    First torch is as it is by default. If the model differs from itself there, the comparison is
    made again with deterministic algorithms.
    """
    try:
        return Row(name, RIGHT, numbers=comparison(bt.BendedModule))
    except Exception as error:
        if not _differs_from_itself(comparison):
            return Row(name, WRONG, _said(error))
    with _deterministic():
        try:
            numbers = comparison(bt.BendedModule)
        except Exception as error:
            if not _differs_from_itself(comparison):
                return Row(name, WRONG, f"with deterministic algorithms: {_said(error)}")
            return Row(name, INCOMPARABLE, f"{_SEVERAL}, with deterministic algorithms too")
    return Row(name, RIGHT, f"with deterministic algorithms; without, {_SEVERAL}", numbers)


def _differs_from_itself(comparison: Comparison) -> bool:
    for _ in range(_TRIES):
        try:
            comparison(lambda model: model)
        except Exception:
            return True
    return False


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """What has no deterministic algorithm runs all the same: the comparison will tell."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def _said(error: Exception) -> str:
    """The first line of what an assertion says; the rest would be all the bits."""
    if not isinstance(error, AssertionError):
        return line_of(error)
    return line_of((str(error).strip().splitlines() or ["an assertion failed"])[0])


def _counted(called: Any) -> dict[str, Any]:
    if not isinstance(called, bt.BendedModule):
        return {}
    stats = called.stats
    return {"replays": stats.replays, "live": stats.live}
