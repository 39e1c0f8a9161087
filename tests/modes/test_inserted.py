"""Each program with something inserted that changes nothing, at all nodes, or that changes one.

What is inserted is compared with torch's own hooks, where these make layers take other kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import bendtrace as bt
from bendtrace import Inputs, Interjection, NodePass
from tests.corpus import CASES, Case
from tests.kernels import kernels, seen
from tests.registry.comparing import compare, each
from tests.registry.program import Program
from tests.shares import some


class Seeing(Interjection):
    """Receives everything, and keeps it."""

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


class Observing(Interjection):
    """Looks at everything."""

    observes = True
    self_contained = True

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        return None


def same(value: Any) -> Any:
    return value


KINDS: dict[str, tuple[Callable[[], Any], Callable[[bt.node_selector.Candidate], bool]]] = {
    "seeing": (Seeing, lambda node: True),
    "observing": (Observing, lambda node: True),
    "backward": (Backward, lambda node: True),
    "instead": (Instead, lambda node: not node.is_module),
    "instead, modules": (Instead, lambda node: node.is_module and bool(node.path)),
    "function": (lambda: same, lambda node: True),
}


KEEPS_FUSED = ("observing", "instead", "instead, modules")


@functools.cache
def takes_other_kernels(name: str, kind: str) -> bool:
    """Whether torch's own hooks, as what is inserted, make its layers take other kernels."""
    for case in CASES:
        if f"corpus.{case.name}" == name:
            break
    else:
        return False
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
    names = [f"corpus.{case.name}" for case in CASES if "tten" in case.name or "trans" in case.name]
    found = {
        kind: {name for name in names if takes_other_kernels(name, kind)}
        for kind in ("seeing", "backward")
    }
    fused = "corpus.transformer_encoder_layer_fast_path"
    assert found["seeing"] == {fused}
    # Behind a backward hook the three inputs of self-attention are three tensors.
    assert found["backward"] == {fused, "corpus.transformer_repeated_until_stable"}


@pytest.mark.parametrize("kind", KINDS)
@each("corpus", "single", share=24, start=5)
def test_what_changes_nothing_changes_nothing(program: Program, kind: str) -> None:
    make, where = KINDS[kind]
    subjects: list[bt.BendedModule] = []

    def inserted(model: Any) -> bt.BendedModule:
        subjects.append(bt.BendedModule(model))
        subjects[-1].interject(where, make(), allow_none=True)
        return subjects[-1]

    def eager(model: Any) -> Callable[..., Any]:
        # An observer of all nodes leaves fused layers as they are.
        if kind in KEEPS_FUSED or not takes_other_kernels(program.name, kind):
            return model  # type: ignore[no-any-return]
        return seen(model, backward=kind == "backward")

    compare(program, f"inserted, {kind}", inserted, eager)
    for bended in subjects:
        (handle,) = bended.insertions
        report = handle.report()
        nodes = {n.path for trace in bended.traces for n in bt.node_selector.find(where, trace)}
        assert kind != "seeing" or set(report.paths) >= nodes
        assert kind != "observing" or not report.changed


def _exchange(value: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
    return tree_map(
        lambda v: exchange(v) if isinstance(v, Tensor) and v.is_floating_point() else v, value
    )


def changed(value: Any) -> Any:
    """Return other numbers in the place of those that are inside."""
    return _exchange(value, lambda tensor: tensor * 0.5 + 1)


def changed_in_place(value: Any) -> None:
    """Change the numbers that are inside."""
    with torch.no_grad():
        _exchange(value, lambda tensor: tensor if tensor.is_leaf else tensor.mul_(0.5))


class ChangedInputs(Interjection):
    """Gives nodes other tensors."""

    self_contained = True

    def before(self, at: NodePass, inputs: Inputs) -> Inputs:
        return Inputs(changed_inputs(None, tuple(inputs)), inputs.kwargs)


def changed_inputs(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(changed(arg) if isinstance(arg, Tensor) else arg for arg in args)


# What is inserted, and what a native hook does.
HOOKS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], Any]]] = {
    "output": (
        lambda: changed,
        lambda module: module.register_forward_hook(lambda module, args, out: changed(out)),
    ),
    "output in place": (
        lambda: changed_in_place,
        lambda module: module.register_forward_hook(
            lambda module, args, out: changed_in_place(out)
        ),
    ),
    "inputs": (ChangedInputs, lambda module: module.register_forward_pre_hook(changed_inputs)),
}
# They copy or call modules in ways in which native hooks are called as well, or are refused.
OTHER_HOOKS = {
    "corpus.modules_of_forward": "it runs a copy of a module, which has the native hook as well",
    "sequences.GradientsOfADict": "insertions are not called inside of transforms, hooks are",
    "single_ops.scripted": "a scripted module takes no hooks",
    "single_ops.frozen": "a scripted module takes no hooks",
}


@pytest.mark.parametrize("kind", HOOKS)
@each("corpus", "single", share=60, start=1)
def test_what_changes_values_at_modules_does_what_native_hooks_do(
    program: Program, kind: str
) -> None:
    if program.name in OTHER_HOOKS:
        pytest.skip(OTHER_HOOKS[program.name])
    make, hook = HOOKS[kind]

    def inside(model: Any) -> dict[str, nn.Module]:
        parts = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        return {path: part for path, part in parts.items() if path}

    def hooked(model: Any) -> Any:
        for part in inside(model).values():
            hook(part)
        return model

    def inserted(model: Any) -> bt.BendedModule:
        bended, names = bt.BendedModule(model), inside(model)
        bended.interject(
            lambda node: node.is_module and node.qualified_name in names, make(), allow_none=True
        )
        return bended

    compare(program, f"inserted, {kind}", inserted, hooked)


# Gives a dict with numbers for keys: to take it apart asks for these.
NUMBERED = {"group_by_traced_label"}


@pytest.mark.parametrize("case", some(CASES, 8, start=6), ids=lambda case: case.name)
def test_it_does_not_change_which_iteration_a_flow_step_is_in(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if takes_other_kernels(f"corpus.{case.name}", "seeing"):
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
