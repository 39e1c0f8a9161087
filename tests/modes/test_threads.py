"""Each call of a program in a thread of its own, while another thread records something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import bendtrace as bt
from tests.registry.comparing import compare, each
from tests.registry.program import Program


def in_a_thread(called: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # In a new thread some kernels take another number of threads until torch is asked for it,
        # which the library does before each call (see docs/limits.md).
        with ThreadPoolExecutor(1, initializer=torch.get_num_threads) as pool:
            return pool.submit(called, *args, **kwargs).result()

    return call


def beside_another(model: Any) -> Callable[..., Any]:
    called = bt.BendedModule(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        started, ended = threading.Event(), threading.Event()

        def record() -> None:
            try:
                while not ended.is_set():
                    bt.trace(lambda x: x * 2 if x.sum() > 0 else x, torch.ones(2))
                    started.set()
            finally:
                started.set()

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(record)
            started.wait()
            try:
                return in_a_thread(called)(*args, **kwargs)
            finally:
                ended.set()
                other.result()

    return call


@each(share=12, start=5)
def test_it_gives_what_eager_gives_in_a_thread(program: Program) -> None:
    compare(program, "threads", beside_another, in_a_thread)
