"""The attributes of the public classes: all that is not private is listed and documented."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.debug.backward import BackwardNode, BackwardPass
from bendtrace.debug.stepping import SteppedRun
from bendtrace.insert.bend_catalogue import BendHandle
from bendtrace.insert.bending import Bending
from bendtrace.insert.patch_kinds import PatchContext
from bendtrace.log.entries import ModuleEntry
from bendtrace.log.run_log import Entries

LOG = """
    draw entries flow_steps flow_table graph guard_rows hash layers modules name picture rolled
    rolled_graph save seed step_labels table time to_html to_pandas to_text tree why_live write_as
"""
LISTED: dict[type[Any], str] = {
    bt.ModelHistory: LOG,
    bt.Trace: LOG
    + """
        backward code function guards module_calls names ops output replay to_dict to_fx to_json
        validate
    """,
    bt.LayerEntry: """
        arguments children device dtype element flop_count flops flow function grad_contents grad_fn
        gradient has_contents index inplace is_layer kind label layer_type lookup_keys macs module
        name nbytes node node_path ordinal output_of parents pass_number passes saved scopes shape
        short_name source state target tensor_contents time unsaved value
    """,
    ModuleEntry: """
        class_name flow inputs label name outputs parameters parent pass_number passes source
        training
    """,
    Entries: "",
    bt.BendedModule: """
        activation_names audit bend bended_keys bending bending_config compiled coverage draw
        explain explore export from_activations get_activations graph hooks insertions
        interject last_mismatch latest_trace model patch print_activations print_weights remove_all
        reset stats step trace traces tree update weight_names why_live
    """,
    Bending: """
        activation_names activations add_version bend bended_keys bended_state_dict bending_config
        callbacks capture configs controllables interpolate_versions load_configs print_activations
        print_weights remove_version reset save_config_as save_configs set_config set_version update
        version versions weight_names
    """,
    bt.Insertion: """
        active clear_report passes remove report runs what where
    """,
    BendHandle: "active remove report reports",
    PatchContext: "insertions report",
    bt.Report: "changed fired label notes paths rows to_dict where",
    bt.Activations: "passes",
    bt.Stats: "live replays resumes retraces traces",
    bt.Explanation: "nearest serving",
    BackwardPass: """
        all_nodes backward created_graph draw earlier gradients log nested nodes table to_pandas
        trace
    """,
    BackwardNode: """
        element forward given gradients_in gradients_out is_edited label made made_in module name
        next node_path op order parameter pass_number passes scopes source time type where
    """,
    SteppedRun: """
        answer back finish forward frames goto name nbytes output position set to_html trace value
        variables
    """,
}
# What the places of a run call on an insertion.
CALLED_BY_GATES = {
    bt.Insertion: """
        allow_none failed fired fired_backward fires_later is_checked is_known_to_change ran targets
        warn_if_never_fired
    """
}


def examples() -> Iterator[Any]:
    """Yield an object of each class, so that attributes of objects are seen as well."""
    model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2)
    bended = bt.BendedModule(model)
    trace = bt.trace(model, x, save="all")
    log = trace.backward(trace.output.sum())
    yield from (trace, log.log, trace[1], trace.modules[0], trace[:2], log, log[0])
    bended(x)
    yield from (bended, bended.bending, bended.stats, bended.explain(x), bended.step(x))
    with bended.interject("0", torch.neg) as insertion, bended.bend(bt.bends.Scale(2.0), "0$") as b:
        yield from (insertion, b, bended.get_activations("0", args=(x,)), insertion.report())
    with bended.patch({"0": bt.patches.ZeroPatch()}) as context:
        yield context
        bended(x)


def public_names(one: Any) -> set[str]:
    """Return the names without an underscore that an object has from this package."""
    ours = {cls for cls in type(one).__mro__ if cls.__module__.startswith("bendtrace")}
    found = {*getattr(one, "__dict__", ())}
    for cls in ours:
        found |= {*vars(cls), *inspect.get_annotations(cls)}
    others = {name for cls in {*type(one).__mro__} - ours for name in vars(cls)}
    if isinstance(one, nn.Module):
        others |= vars(nn.Sequential()).keys()
    return {name for name in found - others if not name.startswith("_")}


def is_documented(one: Any, name: str) -> bool:
    """Whether an attribute has a docstring, or its class says what it is."""
    doc = inspect.getdoc(inspect.getattr_static(type(one), name, None))
    if doc and doc != inspect.getdoc(type(getattr(one, name, None))):
        return True
    ours = [cls for cls in type(one).__mro__ if cls.__module__.startswith("bendtrace")]
    return any(
        re.search(rf"^ +{name}: ", cls.__doc__ or "", re.MULTILINE)
        or re.search(rf'^    {name}: .*\n    """\w', inspect.getsource(cls), re.MULTILINE)
        for cls in ours
    )


@pytest.mark.parametrize("cls", LISTED, ids=lambda cls: cls.__name__)
def test_the_public_attributes_are_those_that_are_listed_and_documented(cls: type[Any]) -> None:
    # Made here: a stepped run from before other tests finds that the world has changed since.
    one = next(one for one in examples() if type(one) is cls)
    called = set(CALLED_BY_GATES.get(cls, "").split())
    assert public_names(one) - called == set(LISTED[cls].split())
    assert [name for name in public_names(one) - called if not is_documented(one, name)] == []
