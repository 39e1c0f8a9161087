"""Sections in processes of their own: one that ends, hangs or breaks the device is one case."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.cuda.rows import NOT_RUN, WRONG, Options, Row, line_of

__all__ = ["run_section"]

_GRACE = 10.0  # seconds for what is going on when the time is up
_TIME_WAS_UP = "the time was up"
# What has to be in the environment before CUDA is: cuBLAS gives the same bits only with it.
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run_section(
    module: str,
    options: Options,
    until: float,
    tell: Callable[[Row], object] = lambda row: None,
    *,
    here: bool = False,
) -> list[Row]:
    """Run all cases of a section, and return a row for each.

    Args:
        module: its module. `names(options)` returns the names of its cases; `check(name, options)`
            runs one and returns a `Row`.
        options: what to try.
        until: when no further case is begun, by `time.monotonic`.
        tell: is told each row.
        here: whether to stay in this process.
    """
    left = options.chosen(importlib.import_module(module).names(options))
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        tell(row)

    while left:
        why = _TIME_WAS_UP
        if time.monotonic() < until:
            if here:
                left = _here(module, left, options, until, note)
            else:
                left, why = _elsewhere(module, left, options, until, note)
        if why:
            for name in left:
                note(Row(name, NOT_RUN, why))
            break
    return rows


def _here(
    module: str, names: Sequence[str], options: Options, until: float, note: Callable[[Row], object]
) -> list[str]:
    options.prepare()
    for number, name in enumerate(names):
        if time.monotonic() >= until:
            return list(names[number:])
        note(_checked(module, name, options))
    return []


def _elsewhere(
    module: str, names: Sequence[str], options: Options, until: float, note: Callable[[Row], object]
) -> tuple[list[str], str]:
    """Run cases in a fresh process while it lives; return those left, and why if known."""
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve,
        args=(sender, module, list(names), options, until - time.monotonic() + time.time()),
    )
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    sender.close()
    left = list(names)
    try:
        while left:
            if not receiver.poll(max(until - time.monotonic(), 0.0) + _GRACE):
                note(Row(left[0], NOT_RUN, "it had not ended when the time was up"))
                return left[1:], _TIME_WAS_UP
            try:
                row = receiver.recv()
            except EOFError:
                process.join(_GRACE)
                said = f"its process ended with exit code {process.exitcode}"
                note(Row(left[0], WRONG, said))
                return left[1:], ""
            if row is None:
                return left, _TIME_WAS_UP
            note(row)
            left.pop(0)
            if row.why.endswith(_BROKEN):
                return left, ""
        return [], ""
    finally:
        process.join(1.0 if not left else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()


_BROKEN = "; the device could not be used any more, so the rest ran in a fresh process"


def _serve(
    sender: Connection, module: str, names: Sequence[str], options: Options, until: float
) -> None:
    options.prepare()
    for name in names:
        if time.time() >= until:  # the clock that all processes have
            sender.send(None)
            return
        row = _checked(module, name, options)
        try:
            options.synchronize()
        except Exception as error:  # such as an assertion on the device: CUDA does not recover
            why = f"{row.why or line_of(error)}{_BROKEN}"
            sender.send(Row(name, WRONG, why, row.numbers))
            return
        sender.send(row)


def _checked(module: str, name: str, options: Options) -> Row:
    check: Callable[[str, Options], Any] = importlib.import_module(module).check
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(action="ignore"):
            row = check(name, options)
    except Exception as error:
        return Row(name, WRONG, line_of(error))
    finally:
        torch.set_num_threads(threads)
    assert isinstance(row, Row)
    return row
