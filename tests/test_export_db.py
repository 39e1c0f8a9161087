"""The example models of torch.export, among them those that it cannot export."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import bendtrace as bt
from bendtrace.debug.calls import Call
from bendtrace.export.exporting import difference
from tests.promise import Inputs, assert_promise
from tests.shares import some

with warnings.catch_warnings(action="ignore"):
    from torch._export.db.examples import all_examples

EXAMPLES = all_examples()

# These run live, for reasons that are given.
LIVE = {
    "optional_input": "a tensor of unknown origin",  # a parameter's default
}


# These change an argument in place, which torch refuses where it requires gradients.
NOT_DIFFERENTIABLE = {"user_input_mutation"}


def inputs(name: str, values: str, gradients: bool = False) -> Inputs:
    """Return a copy of an example's arguments, with these or other values, or twice as long."""

    def of(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if values == "longer" and item.dim():
            made = torch.cat([item, item])
        elif values == "negative":
            made = item.logical_not() if item.dtype is torch.bool else -item
        else:
            made = item.clone()
        return made.requires_grad_(gradients and made.is_floating_point())

    case = EXAMPLES[name]
    args, kwargs = tree_map(of, (case.example_args, case.example_kwargs))
    return args, kwargs


def runs(name: str, values: str, gradients: bool = False) -> bool:
    args, kwargs = inputs(name, values, gradients)
    try:
        copy.deepcopy(EXAMPLES[name].model)(*args, **kwargs)
    except Exception:
        return False
    return True


# torch's own compiler, which carries out `map` and `cond`, does what torch warns of.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("gradients", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_gives_what_eager_gives(name: str, gradients: bool) -> None:
    if gradients and name in NOT_DIFFERENTIABLE:
        assert not runs(name, "own", gradients)
        return
    assert runs(name, "own", gradients)
    longer = ["longer", "longer"] if runs(name, "longer", gradients) else []
    values = ("own", "own", "negative", *longer, "own")
    bended = assert_promise(
        lambda: copy.deepcopy(EXAMPLES[name].model),
        [partial(inputs, name, v, gradients) for v in values],
    )
    if name in LIVE:
        assert bended.stats.replays == 0
        assert LIVE[name] in bended.why_live[0]
    else:
        assert bended.stats.live == 0
        assert bended.stats.replays >= 2 + bool(longer)


# What no exported program has a form of, with the reason that is given.
NOT_EXPORTED = {
    "autograd_function": "is not torch's",
    "cond_closed_over_variable": "higher_order is not torch's",
    "dynamic_shape_map": "higher_order is not torch's",
    "model_attr_mutation": "sets self.attr_list",
    "optional_input": "a tensor of unknown origin",
    "tensor_setattr": "sets x.attr",
    "user_input_mutation": "writes to an argument",
}


@pytest.mark.parametrize("name", some(EXAMPLES, each=9))
def test_example_is_exported_or_refused_with_its_reason(name: str) -> None:
    model = copy.deepcopy(EXAMPLES[name].model)
    calls = [Call(*inputs(name, v)) for v in ("same", "negative") if runs(name, v)]
    if name in NOT_EXPORTED:
        with pytest.raises(bt.errors.ExportError, match=NOT_EXPORTED[name]):
            bt.BendedModule(model).export(*calls)
        return
    exported = bt.BendedModule(model).export(*calls)
    for call in calls:
        with torch.no_grad():
            assert difference(call.to(exported), call.to(model)) is None
