"""What has to hold for any model: traced, replayed, logged, looked at and changed, it is itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InterjectionError
from tests.past_joins import past_joins
from tests.promise import bits, footprint, random_states, seed_everything

Inputs = dict[str, Any]


@dataclass
class Checked:
    """How a model fared.

    Attributes:
        name: what it is called.
        kind: which inputs it was given.
        ops: how many ops its trace has.
        replays: how many of the plain calls after the first one were replays.
        live: why calls ran live, if some did.
        patched: the module that was set to zero; None if there is none that gives a tensor.
        refused: what raised an error that says why it cannot be; empty for nearly all models.
        faults: what was wrong; empty if all is well.
    """

    name: str
    kind: str = ""
    ops: int = 0
    replays: int = 0
    live: tuple[str, ...] = ()
    patched: str | None = None
    refused: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """One word for it."""
        return "wrong" if self.faults else "refused" if self.refused else "itself"


def called(model: Any, inputs: Inputs, seed: int) -> Any:
    """Return the bits of what a call gives or raises, and of the random state afterwards."""
    seed_everything(seed)
    np.random.seed(seed)
    try:
        result = bits(model(**copied(inputs)))
    except InterjectionError:
        raise
    except Exception as error:
        result = type(error).__name__, str(error)
    return result, random_states()


def copied(inputs: Inputs) -> Inputs:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def held(model: nn.Module) -> list[Any]:
    """Return the attributes of all modules, and copies of what the state dict has."""
    hidden = {name for name in vars(nn.Module()) if name != "training"}
    attributes = [
        (path, {k: v for k, v in vars(module).items() if k not in hidden})
        for path, module in model.named_modules()
    ]
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return [bits(attributes), tensors]


def same_held(one: list[Any], other: list[Any]) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(_same_tensor(one[1][name], other[1][name]) for name in one[1])
    )


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.dim():  # cannot be viewed as bytes
        return bool(bits(one) == bits(other))
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def zero(value: Any) -> Any:
    return value * 0 if isinstance(value, Tensor) else None


def middle_module(model: nn.Module, inputs: Inputs) -> str | None:
    """Return the name of a module in the middle of a run that gives a floating tensor."""
    found: list[str] = []
    names = {module: name for name, module in model.named_modules() if name}

    def note(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.is_floating_point() and out.numel():
            found.append(names[module])

    handles = [module.register_forward_hook(note) for module in names]
    try:
        model(**copied(inputs))
    finally:
        for handle in handles:
            handle.remove()
    once = [name for name in found if found.count(name) == 1]
    return once[len(once) // 2] if once else None


@contextlib.contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, args, out: zero(out))
    try:
        yield
    finally:
        handle.remove()


def check(
    name: str, make: Callable[[], Any], inputs: Inputs, others: tuple[Inputs, ...] = ()
) -> Checked:
    """Do everything with a model, and compare each thing with the model itself.

    Args:
        name: what to call it.
        make: builds the model, the same each time.
        inputs: what it is called with.
        others: further inputs, which may go other ways.
    """
    checked = Checked(name)
    eager, model = make(), make()
    bended = bt.BendedModule(model)
    steps: list[tuple[str, Callable[[], str | None]]] = [
        ("calls", lambda: _calls(eager, bended, inputs, others, checked)),
        ("log", lambda: _log(eager, inputs, checked)),
        ("tree", lambda: None if len(str(bended.tree)) > 20 else "prints nothing"),
        ("looking", lambda: _looking(eager, bended, inputs)),
        ("zero", lambda: _zero(eager, bended, inputs, checked)),
        ("afterwards", lambda: _calls(eager, bended, inputs, others, None)),
        ("past joins", lambda: _past_joins(eager, bended, inputs, others)),
    ]
    for step, act in steps:
        try:
            fault = act()
        except InterjectionError as error:
            checked.refused.append(f"{step}: {error}")
            continue
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            fault = f"{type(error).__name__}: {first[:300]}"
        if fault is not None:
            checked.faults.append(f"{step}: {fault}")
    if not same_held(held(eager), held(model)):
        checked.faults.append("the state of the model is another")
    return checked


def _calls(
    eager: Any, bended: bt.BendedModule, inputs: Inputs, others: tuple[Inputs, ...],
    checked: Checked | None,
) -> str | None:  # fmt: skip
    for number, given in enumerate((inputs, inputs, *others, inputs)):
        before = footprint()
        wanted = called(eager, given, number)
        if called(bended, given, number) != wanted:
            return f"call {number} gives something else"
        if footprint() != before:
            return "something is left behind"
    if checked is not None:
        checked.replays, checked.live = bended.stats.replays, bended.why_live
        checked.ops = len(bended.traces[0].ops) if bended.traces else 0
    return None


def _past_joins(
    eager: Any, bended: bt.BendedModule, inputs: Inputs, others: tuple[Inputs, ...]
) -> str | None:
    with past_joins():
        return _calls(eager, bended, inputs, others, None)


def _log(eager: Any, inputs: Inputs, checked: Checked) -> str | None:
    seed_everything(0)
    log = bt.log_forward_pass(eager, (), copied(inputs))
    checked.ops = checked.ops or len(log)
    if not len(log) or len(str(log)) < 20:
        return "is empty"
    seed_everything(0)
    if bits(log.output) != bits(eager(**copied(inputs))):
        return "has another output"
    return None


def _looking(eager: Any, bended: bt.BendedModule, inputs: Inputs) -> str | None:
    seen = []
    with bended.interject(lambda candidate: True, lambda value: seen.append(1)):
        for _ in range(2):
            count = len(seen)
            if called(bended, inputs, 5) != called(eager, inputs, 5):
                return "gives something else"
            if len(seen) == count:
                return "nothing was looked at"
    return None


def _zero(eager: Any, bended: bt.BendedModule, inputs: Inputs, checked: Checked) -> str | None:
    seed_everything(6)
    place = middle_module(eager, inputs)
    checked.patched = place
    if place is None:
        return None
    with hooked(eager.get_submodule(place)):
        wanted = called(eager, inputs, 6)
    with bended.interject(place, zero) as handle:
        for _ in range(2):
            if called(bended, inputs, 6) != wanted:
                return f"at {place} gives something else than a hook"
        if not handle.report().fired:
            return f"at {place} was not called"
    return None
