"""Every model of the corpus with an interjection at each of its nodes that changes nothing.

The models do what they do without, along all their paths, in the order A, A, B, A, B, C, C. What is
told on the way is all that an interjection can be told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace import Inputs, Interjection, NodePass
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.kernels import kernels, seen
from tests.promise import assert_promise
from tests.shares import some

# Gives a dict with numbers for keys: to take it apart asks for these.
NUMBERED = {"group_by_traced_label"}


class Seeing(Interjection):
    """Is told of everything, and keeps it."""

    wants_inputs = True
    self_contained = True

    def before(self, at: NodePass, inputs: Inputs) -> Inputs:
        return inputs

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        return output


class Backward(Interjection):
    """Sees gradients, and keeps them."""

    self_contained = True

    def backward(self, at: NodePass, grad_input: Any, grad_output: Any) -> None:
        assert all(grad is None or grad.dtype is not None for grad in (*grad_input, *grad_output))


class Instead(Interjection):
    """Calls the node itself in the place of the node."""

    self_contained = True

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        return call(*inputs, **inputs.kwargs)


KINDS: dict[str, tuple[type[Interjection], Callable[[bt.node_selector.Candidate], bool]]] = {
    "seeing": (Seeing, lambda node: True),
    "backward": (Backward, lambda node: True),
    "instead": (Instead, lambda node: not node.is_module),
}


@functools.cache
def takes_other_kernels(name: str, kind: str) -> bool:
    """Whether torch's own hooks, as what is inserted, make its layers take other kernels."""
    (case,) = (case for case in CASES if case.name == name)
    for inputs in case.paths.values():
        found = []
        for is_seen in (False, True):
            torch.manual_seed(0)
            model = case.make()
            if not isinstance(model, nn.Module) or len(list(model.modules())) == 1:
                return False
            args, kwargs = inputs()
            call = seen(model, backward=kind == "backward") if is_seen else model
            try:
                found.append(kernels(functools.partial(call, *args, **kwargs)))
            except Exception:
                break  # the model's own, or that of a hook that it is not made for
        if len(found) == 2 and found[0] != found[1]:
            return True
    return False


@pytest.mark.more
def test_models_that_take_other_kernels_when_they_are_looked_into_are_found() -> None:
    names = [name for name in (case.name for case in CASES) if "tten" in name or "trans" in name]
    found = {
        kind: {name for name in names if takes_other_kernels(name, kind)}
        for kind in ("seeing", "backward")
    }
    fast = {"transformer_encoder_layer_fast_path", "multihead_attention_fast_path"}
    assert found["seeing"] == fast
    # Behind a backward hook the three inputs of self-attention are three tensors.
    assert found["backward"] == {*fast, "transformer_repeated_until_stable"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", some(CASES, 8, start=5), ids=lambda case: case.name)
def test_what_keeps_everything_changes_nothing(case: Case, kind: str) -> None:
    what, where = KINDS[kind]
    handles: list[bt.Insertion] = []

    def insert(bended: bt.BendedModule) -> None:
        handles.append(bended.interject(where, what(), allow_none=True))

    first, second, *rest = case.paths.values()
    calls = [first, first, second, first, second, *rest, *rest]

    def compare_with(eager: Callable[..., Any]) -> Callable[..., Any]:
        if kind == "instead" or not takes_other_kernels(case.name, kind):
            return eager
        return seen(eager, backward=kind == "backward")

    bended = assert_promise(case.make, calls, insert=insert, compare_with=compare_with)
    assert len(handles) == 1
    assert bended.insertions == tuple(handles)
    nodes = {n.path for trace in bended.traces for n in bt.node_selector.find(where, trace)}
    if kind == "seeing":
        assert set(handles[0].report().paths) >= nodes


@pytest.mark.parametrize("case", some(CASES, 8, start=6), ids=lambda case: case.name)
def test_what_is_inserted_does_not_change_which_iteration_a_flow_step_is_in(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if takes_other_kernels(case.name, "seeing"):
        monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    for number, inputs in enumerate(case.paths.values()):
        steps = []
        for is_inserted in (False, True):
            torch.manual_seed(number)
            model = case.make()
            bended = bt.BendedModule(model)
            if is_inserted:
                bended.interject(lambda node: True, Seeing(), allow_none=True)
            args, kwargs = inputs()
            try:
                trace = bended.trace(*args, **kwargs)
            except Exception:
                break  # the model's own error, of which other tests tell
            steps.append([(step.text, step.iteration) for step in trace.flow_steps])
        if case.name in NUMBERED:
            steps = [some[: len(steps[0])] for some in steps]
        assert steps == steps[:1] * len(steps)
