"""Training by eager and by a `BendedModule`, compared after each step; pictures and changes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bendtrace as bt
from tests.promise import Inputs, bits, outcome, random_states, seed_everything, state

Call = Callable[[], Inputs]
TENSOR = len(bits(torch.zeros(())))


def loss_of(value: Any) -> Tensor:
    """Return one number for all floating tensors of an output that have gradients."""
    losses = [
        leaf.square().mean() * (number + 1)
        for number, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel()
    ]
    return torch.stack(losses).sum()


def assert_trains_alike(
    make: Callable[[], nn.Module],
    calls: Iterable[Call],
    wrap: Callable[[nn.Module], Any] = bt.BendedModule,
) -> Any:
    """Take steps of an optimizer with both, and compare gradients, buffers and what comes of it.

    Args:
        make: builds the model, twice the same under the same seed.
        calls: makes the inputs of each step.
        wrap: makes what is compared with the model.

    Returns:
        What `wrap` made.
    """
    torch.manual_seed(0)
    eager = make().train()
    torch.manual_seed(0)
    model = make().train()
    bended = wrap(model)
    pairs = []
    for called, owner in ((eager, eager), (bended, model)):
        pairs.append((called, owner, torch.optim.SGD(owner.parameters(), 0.05, momentum=0.9)))
    for seed, inputs in enumerate(calls):
        seen = []
        for called, owner, optimizer in pairs:
            optimizer.zero_grad()
            seed_everything(seed)
            np.random.seed(seed)
            args, kwargs = inputs()
            out = called(*args, **kwargs)
            loss_of(out).backward()
            gradients = [bits(parameter.grad) for parameter in owner.parameters()]
            optimizer.step()
            seen.append((bits(out), gradients, random_states(), state(owner)))
        assert seen[0] == seen[1], f"step {seed}"
    assert not all(gradient == bits(None) for gradient in seen[0][1])
    return bended


def assert_logged_and_drawn(make: Callable[[], nn.Module], inputs: Call) -> None:
    """The log has the module calls and values that native hooks see, and can be drawn."""
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    model = make()
    seen: list[tuple[str, Any]] = []
    for name, module in eager.named_modules():
        module.register_forward_hook(
            lambda module, args, out, name=name: seen.append((name, copy.deepcopy(bits(out))))
        )
    args, kwargs = inputs()
    torch.default_generator.manual_seed(5)
    wanted = bits(eager(*args, **kwargs))
    args, kwargs = inputs()
    torch.default_generator.manual_seed(5)
    log = bt.log_forward_pass(model, args, kwargs)
    assert bits(log.output) == wanted
    assert sorted(call.path for call in log.module_calls) == sorted(name for name, _ in seen)
    compared = 0
    passes: Counter[str] = Counter()
    for name, out in seen:
        passes[name] += 1
        if name and isinstance(out, tuple) and len(out) == TENSOR:
            # What it held when the module gave it, whatever writes into it afterwards.
            entry = log[f"{name}:{passes[name]}"]
            assert bits(entry.tensor_contents.detach())[4] == out[4], name
            compared += 1
    assert compared
    drawn = ElementTree.fromstring(log.draw().svg)
    assert sum(1 for _ in drawn.iter()) > 10


def assert_looked_at(bended: bt.BendedModule, eager: nn.Module, calls: Iterable[Call]) -> None:
    """Something at all nodes that only looks changes nothing, on known and on new paths."""
    seen: list[str] = []
    with bended.interject(lambda candidate: True, lambda value, at: seen.append(at.path)):
        for seed, inputs in enumerate(calls):
            count = len(seen)
            assert outcome(bended, inputs(), seed) == outcome(eager, inputs(), seed)
            assert len(seen) > count
    assert state(bended.model) == state(eager)


def assert_changed_as_by_a_hook(
    bended: bt.BendedModule, eager: nn.Module, where: str, change: Callable[[Any], Any],
    calls: Iterable[Call],
) -> None:  # fmt: skip
    """A change at a module is what a native forward hook on it does."""
    plain, hooked = [], []
    calls = list(calls)
    handle = None
    for results in (plain, hooked):
        for seed, inputs in enumerate(calls):
            results.append(outcome(eager, inputs(), seed)[:2])
        handle = handle or eager.get_submodule(where).register_forward_hook(
            lambda module, args, out: change(out)
        )
    handle.remove()
    assert plain != hooked
    with bended.interject(where, change) as insertion:
        for _ in range(2):
            for seed, inputs in enumerate(calls):
                assert outcome(bended, inputs(), seed)[:2] == hooked[seed], f"call {seed}"
    assert insertion.report().changed
