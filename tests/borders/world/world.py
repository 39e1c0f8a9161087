"""A program in two worlds: one is run as it is, the other through a `BendedModule`."""

from __future__ import annotations

import importlib
import itertools
import logging
import re
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bendtrace as bt
from tests.promise import bits

_numbers = itertools.count()

_HEADER = """
import collections, contextlib, dataclasses, datetime, enum, functools, itertools, logging, math
import operator, os, random, types, uuid, warnings, weakref
from collections import Counter, OrderedDict, defaultdict, deque
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
"""


@dataclass(frozen=True)
class Program:
    """A program with state of its own.

    Attributes:
        main: the source of its main file, which has a `model` and, if calls are given more than a
            tensor, `arguments`.
        helper: the source of another file, `helper`.
        steps: statements that run between the calls, with the names of the main file.
        replays: how many of the calls have to be replayed.
        reason: what a reason to run live has to say, if there has to be one.
    """

    main: str
    helper: str = ""
    steps: tuple[str, ...] = ("", "", "", "")
    replays: int = 0
    reason: str = ""


class WatchedContent:
    """One copy of a program.

    Args:
        program: the program.
        folder: where its files are written.
    """

    def __init__(self, program: Program, folder: Path) -> None:
        self._package = f"world_{next(_numbers)}"
        here = folder / self._package
        here.mkdir()
        (here / "__init__.py").write_text("")
        (here / "helper.py").write_text(_HEADER + program.helper)
        (here / "main.py").write_text(_HEADER + "from . import helper\n" + program.main)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            torch.manual_seed(0)
            with warnings.catch_warnings(action="ignore"):  # of what is deprecated
                self.main = importlib.import_module(f"{self._package}.main")
        finally:
            sys.path.remove(str(folder))
        self.helper = sys.modules[f"{self._package}.helper"]
        self.call: Any = self.main.model

    def forget(self) -> None:
        """Remove its files from the modules that Python knows."""
        for name in [*sys.modules]:
            if name.partition(".")[0] == self._package:
                del sys.modules[name]

    def outcome(self, number: int, *first: torch.Tensor) -> Any:
        """Call the model and return what came of it, in bits.

        Args:
            number: the seed.
            *first: arguments before the others.
        """
        torch.default_generator.manual_seed(number)
        x = torch.arange(1.0, 4.0)
        args = self.main.arguments(x) if hasattr(self.main, "arguments") else (x,)
        args = (*first, *args)
        try:
            result = self.call(*args)
        except Exception as error:
            result = type(error).__name__, str(error).replace(self._package, "world")
        text = repr(bits([result, self._state(), torch.get_rng_state()]))
        return re.sub(" at 0x[0-9a-fA-F]+", "", text.replace(self._package, "world"))

    def _state(self) -> Any:
        return [
            (name, value)
            for space in (self.main, self.helper)
            for name, value in vars(space).items()
            if name[:2] != "__" and name != "model" and not isinstance(value, _CODE)
            if "<Logger" not in repr(value)  # which knows all others
        ]


_CODE = (types.ModuleType, types.FunctionType, type, logging.Logger)


@contextmanager
def environment() -> Iterator[None]:
    """Leave Python's own settings as they were."""
    import os
    import random

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level, environment = logging.root.level, dict(os.environ)
        states = random.getstate()
        try:
            yield
        finally:
            logging.root.setLevel(level)
            logging.disable(logging.NOTSET)
            os.environ.clear()
            os.environ.update(environment)
            random.setstate(states)


def run(program: Program, folder: Path) -> tuple[list[Any], list[Any], Any]:
    """Run a program natively and through a `BendedModule`; return what came of both, and that."""
    outcomes: list[list[Any]] = []
    bended: Any = None
    for wrap in (False, True):
        world = WatchedContent(program, folder)
        try:
            if wrap:
                bended = world.call = bt.BendedModule(world.main.model)
            with environment():
                found = [world.outcome(0)]
                for number, step in enumerate(program.steps, 1):
                    exec(step, vars(world.main), {})
                    found.append(world.outcome(number))
            outcomes.append(found)
        finally:
            world.forget()
    return outcomes[0], outcomes[1], bended


_BRANCH = """
def behind_a_branch(side, *args):
    return model(*args) if side > 0 else side + 1
"""
# What the first calls and those after each step ask, of which the model is called for 1 alone.
_PLANS = (((-1, -1), (1, -1)), ((-1,), (-1, 1, 1)), ((1, -1), (1, -1)))


def check_behind_a_branch(program: Program, folder: Path, plan: int) -> None:
    """Assert that a program does the same in both worlds where not every call reaches it.

    What its paths depend on changes between the runs that record them.
    """
    program = Program(program.main + _BRANCH, program.helper, program.steps)
    first, after = _PLANS[plan % len(_PLANS)]
    outcomes: list[list[Any]] = []
    for wrap in (False, True):
        world = WatchedContent(program, folder)
        try:
            world.call = world.main.behind_a_branch
            if wrap:
                world.call = bt.BendedModule(world.call)
            with environment():
                numbers, found = itertools.count(), []
                for step, sides in (("", first), *((step, after) for step in program.steps)):
                    exec(step, vars(world.main), {})
                    for side in sides:
                        found.append(world.outcome(next(numbers), torch.tensor(float(side))))
            outcomes.append(found)
        finally:
            world.forget()
    for number, (wanted, got) in enumerate(zip(*outcomes, strict=True)):
        assert got == wanted, f"call {number} of\n{program.helper}\n{program.main}\n{program.steps}"


def check(program: Program, folder: Path) -> Any:
    """Assert that a program does the same in both worlds."""
    eager, ours, bended = run(program, folder)
    for number, (wanted, got) in enumerate(zip(eager, ours, strict=True)):
        assert got == wanted, (
            f"call {number} of\n{program.helper}\n{program.main}\n{program.steps}\n"
            f"{bended.stats}\n{bended.why_live}"
        )
    assert bended.stats.replays >= program.replays, (bended.stats, bended.why_live)
    if program.reason:
        assert any(program.reason in why for why in bended.why_live), bended.why_live
    return bended
