"""Every model of the corpus, along all its paths, in the order A, A, B, A, B, C, C."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bendtrace as bt
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.past_joins import past_joins, resumed_anywhere
from tests.promise import Inputs, assert_graph_agrees, assert_promise, bits
from tests.shares import some

# Cases whose second visit of a path is not a replay, each with the reason.
NOT_REPLAYED = {
    "forward_hook_branches": "has a forward hook, which has to fire: runs live",
    "own_generator": "makes a generator in forward, which has no value to record: runs live",
    "rejection_sampling": "the number of draws is random: each call is a path of its own",
    "call_counter": "counts its calls in an attribute: each call is checked for another value",
    "alternating_layers": "takes turns by a counter in an attribute",
    "mask_cached_by_length": "caches what it computed: the next call finds another state",
    "hidden_state_attribute": "the first call finds no hidden state yet: a path of its own",
    "history_list": "the list it appends to is longer at each call",
    "ring_buffer": "a buffer that moves on at each call decides the path",
    "step_buffer_schedule": "a buffer counts the calls and decides the path",
}


@pytest.mark.parametrize("case", some(CASES, 2), ids=lambda case: case.name)
def test_gives_what_eager_gives_and_replays_known_paths(case: Case) -> None:
    first, second, *rest = case.paths.values()
    order = [first, first, second, first, second]
    bended = assert_promise(case.make, [*order, *rest, *rest])
    if case.name not in NOT_REPLAYED:
        # The calls 1, 3 and 4 visit a path for the second time, and the last of the rest.
        again = int(case.name in LONG)
        tree = bended._dispatcher._trees.plain
        if tree.varying or tree._steady:  # numbers at one place differ: it is tried to keep them
            again += 2
        assert bended.stats.replays >= 3 + len(rest) - again
        assert bended.stats.traces <= 2 + len(rest) + again
        assert bended.stats.live == 0
    else:
        assert bended.stats.replays < 3 + len(rest), "is replayed after all: take it off the list"


@pytest.mark.parametrize("case", some(CASES, 3, start=1), ids=lambda case: case.name)
def test_recorded_past_joins_does_what_is_known(case: Case) -> None:
    with past_joins():
        assert_promise(case.make, [*case.paths.values()] * 3)


@pytest.mark.parametrize("case", some(CASES, 3, start=2), ids=lambda case: case.name)
def test_resumed_anywhere_does_what_is_known(case: Case) -> None:
    with resumed_anywhere(1):
        assert_promise(case.make, [*case.paths.values()] * 3)


# The states of the first runs of these are not read, because they ask so much or make modules: the
# first path is recorded once more when another one is known. Where eager fills a cache between two
# runs, the second does not join the first.
LONG = {
    "transformer_repeated_until_stable", "connected_components", "modules_of_forward",
    "cached_python_helper",
}  # fmt: skip


@pytest.mark.parametrize("fold", [False, True], ids=["ops", "leaf_modules"])
@pytest.mark.parametrize("case", some(CASES, 4, start=1), ids=lambda case: case.name)
def test_graph_of_each_path_agrees_with_eager(case: Case, fold: bool) -> None:
    for inputs in case.paths.values():
        torch.manual_seed(1)
        eager = case.make()
        torch.manual_seed(1)
        model = case.make()
        try:
            trace = bt.trace(model, *inputs()[0], **inputs()[1])
        except Exception as error:
            with pytest.raises(type(error)):
                _call(eager, inputs())
            continue
        _call(eager, inputs())  # the trace was a call too: both models are in the same state
        torch.manual_seed(7)
        wanted = bits(_call(eager, inputs()))
        assert_graph_agrees(trace, wanted, inputs(), fold=fold, seed=7)


def _call(model: Any, inputs: Inputs) -> Any:
    args, kwargs = inputs
    return model(*args, **kwargs)
