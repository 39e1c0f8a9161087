"""The comparison of a mode with eager, and which programs a mode runs."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bendtrace.errors import BendtraceError
from tests.promise import bits, footprint
from tests.shares import some

from .program import PROGRAMS, Program, Wrap

__all__ = ["compare", "each", "seen"]

# Programs are registered when these are imported.
_PLACES = (
    "tests.corpus", "tests.test_guarded", "tests.test_texts", "tests.registry.issues",
    *(f"tests.registry.{name}" for name in (
        "arrays", "facts", "filled", "joins", "lists", "loop_lists", "outputs", "rounds",
        "row_loops", "sequences", "single_ops", "state_arrays", "state_containers",
    )),
    *(f"tests.borders.{name}" for name in (
        "autograd_functions", "foreign", "hidden_numbers", "scripted", "test_hooks", "test_modes",
        "test_modules", "test_opaque", "test_python", "test_random", "test_self", "test_tensors",
        "test_transforms",
    )),
)  # fmt: skip


# Programs that are wrong in a mode, by its name. Each is a fault of ours that waits for its repair.
FAULTS = {
    (
        "inserted, backward",
        "facts.a_version_that_is_incremented",
    ): "torch's own error, in the backward pass, names the alias in place of the tensor",
    **{
        (mode, "sequences.a_subclass_that_counts_what_it_is_asked"): "it is asked for copies of it"
        for mode in ("saved", "saved gradients", "stepped")
    },
}


def seen(program: Program, wrap: Wrap) -> list[Any]:
    """Return the bits of all that can be seen of each call of a program."""
    torch.manual_seed(0)
    return [bits(step) for step in program.drive(wrap)]


def compare(
    program: Program,
    mode: str,
    ours: Wrap,
    eager: Wrap = lambda model: model,
    *,
    refusal: str | None = None,
    strict: str = "corpus",
) -> None:
    """Assert that a program does the same in a mode and in eager, or is refused as it says.

    Where a fault is known, assert that it is still there.

    Args:
        program: the program.
        mode: the name of the mode.
        ours: makes of a model what runs it in this mode.
        eager: makes of a model what eager is compared in, such as hooks of torch's own.
        refusal: a pattern of messages with which the mode may refuse programs.
        strict: a tag of programs that say themselves what the mode cannot do with them.
    """
    if (mode, program.name) in FAULTS:
        with pytest.raises(AssertionError):
            _compare(program, mode, ours, eager, refusal, strict)
        return
    _compare(program, mode, ours, eager, refusal, strict)


def _compare(
    program: Program, mode: str, ours: Wrap, eager: Wrap, refusal: str | None, strict: str
) -> None:
    refusals: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        # Which torch gives once a process: the first of the two runs would have it alone.
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True to a scalar")
        for pattern in program.ignores:
            warnings.filterwarnings("ignore", pattern)
        wanted = seen(program, eager)
        before = footprint()
        try:
            found = seen(program, _noting(ours, refusals))
        except BendtraceError:
            if not refusals:
                raise
            found = []  # the program does not catch what its calls raise
        assert footprint() == before, "something is left behind"
    if mode in program.cannot:
        assert any(re.search(program.cannot[mode], refusal) for refusal in refusals), refusals
        return
    if refusal is not None and refusals and strict not in program.tags:
        assert all(re.search(refusal, text) for text in refusals), refusals
        return
    assert not refusals, refusals[0]
    assert len(found) == len(wanted)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one == other, f"call {number} of {program.name}"


def _noting(wrap: Wrap, refusals: list[str]) -> Wrap:
    """Note the errors of this library, which a program may catch."""

    def wrapped(model: Any) -> Callable[..., Any]:
        called = wrap(model)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return called(*args, **kwargs)
            except BendtraceError as error:
                refusals.append(str(error))
                raise

        return call

    return wrapped


def each(
    *tags: str, share: int = 1, start: int = 0, without: str = "unseen"
) -> pytest.MarkDecorator:
    """Return a mark that hands a test each program.

    Args:
        tags: of which a program has one; all programs, if there are none.
        share: every so manieth runs with the usual commands, the others with `--all`.
        start: where to begin to count.
        without: a tag of programs that are left out.
    """
    for place in _PLACES:
        importlib.import_module(place)
    chosen = [
        program
        for program in PROGRAMS.values()
        if (not tags or program.tags & {*tags}) and without not in program.tags
    ]
    return pytest.mark.parametrize(
        "program", some(chosen, share, start=start), ids=lambda program: program.name
    )
