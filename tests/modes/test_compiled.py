"""Each program with a backend that changes nothing: the same bits, whichever paths are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import bendtrace as bt
from tests.compiled.common import ALWAYS, assert_promise_with
from tests.corpus import CASES, Case
from tests.registry.comparing import compare, each
from tests.registry.program import Program
from tests.shares import some


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled(model: Any) -> bt.BendedModule:
    return bt.BendedModule(model, backend="eager", backend_options=ALWAYS)


@each(share=40, start=4)
def test_it_gives_what_eager_gives(program: Program) -> None:
    compare(program, "compiled", compiled)


# With sizes that depend on values, in-place operations, several paths, numbers, views.
SOME = (
    "and_chain", "batch_norm_in_eval_mode", "expert_capacity", "expert_per_sample",
    "mixture_of_depths", "multihead_attention", "numel_branch", "quick_sort_by_masks",
    "sign_of_zero", "tied_weights", "top_one_experts", "unique_values", "where_indices",
)  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    "case", some([c for c in CASES if c.name in SOME], 4), ids=lambda case: case.name
)
def test_gives_what_eager_gives_through_autograd_s_compiler(case: Case, mode: type) -> None:
    calls = [path for path in case.paths.values() for _ in range(3)]
    assert_promise_with("aot_eager", case.make, [*calls, *case.paths.values()], mode)
