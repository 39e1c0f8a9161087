"""Each program with inputs that require gradients: their gradients, and the gradients of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import bendtrace as bt
from tests.registry.comparing import compare, each
from tests.registry.program import Program


def differentiated(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a model and goes back, twice."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return "no graph"  # such calls are in test_plain.py
        values = tree_leaves([args, kwargs])
        leaves = [t for t in values if isinstance(t, torch.Tensor) and _can_require(t)]
        for leaf in leaves:
            leaf.requires_grad_()
        total = _total(model(*args, **kwargs))
        if total is None or not total.requires_grad:
            return "no graph"
        total.backward(retain_graph=True)
        first = [leaf.grad for leaf in leaves]
        twice = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        again = _total([g for g in twice if g is not None])
        second = None
        if again is not None and again.requires_grad:
            second = torch.autograd.grad(again, leaves, allow_unused=True)
        return [first, [g.detach() if g is not None else g for g in twice], second]

    return call


def _can_require(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.is_leaf


def _total(value: Any) -> torch.Tensor | None:
    """Return one number that depends on everything in an output that has a graph."""
    parts = [
        (t.abs() if t.is_complex() else t).sin().sum()
        for t in tree_leaves(value)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    return torch.stack([part.double() for part in parts]).sum() if parts else None


@each("gradients", "corpus", "single", share=2)
def test_gradients_are_those_of_eager(program: Program) -> None:
    made: list[bt.BendedModule] = []

    def wrap(model: Any) -> Callable[..., Any]:
        made.append(bt.BendedModule(model))
        return differentiated(made[-1])

    compare(program, "gradients", wrap, differentiated)
    if program.served_with_gradients is not None:
        program.served_with_gradients(made[0])
