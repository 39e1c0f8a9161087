"""Runs a model under the tracer with its insertions."""

from __future__ import annotations

from typing import Any

from bendtrace.interject.gates import Gate, raise_caught
from bendtrace.interject.inserter import LiveInserter
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.plan import Plan
from bendtrace.interject.reading import read_and_changed
from bendtrace.interject.splicer import Splicer
from bendtrace.recording.lifting import Lifting
from bendtrace.recording.recorder import Recording
from bendtrace.recording.run import Signature, record
from bendtrace.recording.script import Script

__all__ = ["has_gates", "recorded"]


def recorded(
    known: Knowledge,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan | None,
    script: Script | None = None,
    reads_states: bool = False,
    lifting: Lifting | None = None,
    splicer: Splicer | None = None,
) -> Recording:
    """Run a model under the tracer, with insertions.

    Args:
        known: the recorded runs of the model.
        signature: binds the arguments.
        args: the positional arguments.
        kwargs: the keyword arguments.
        plan: the insertions; None for none.
        script: what need not run again.
        reads_states: whether the run reads all states where it asks for values.
        lifting: lifts counters of loops, and numbers in the state; None to lift none.
        splicer: for a run that is to be kept with those without insertions, splices these in.
            They are ops of the run if the first of them cannot be spliced.
    """
    inserter = None
    if plan is not None:
        known.name_nodes()  # before the run does so in passing
        inserter = LiveInserter(plan, known.registry, known.model, splicer=splicer)
        reads_states = True  # what is inserted must not be called twice
    recording = record(
        known.model, args, kwargs, signature, script, inserter=inserter,
        reads_states=reads_states, lifting=lifting,
    )  # fmt: skip
    if plan is not None:
        if splicer is not None:
            raise_caught()  # in a run without insertions, nothing has raised it
        plan.ran(recording)
        if looked_at := read_and_changed(plan, recording):
            if splicer is not None:
                splicer.is_apart = True
            recording.tape.block(
                "an insertion may read what the run changes, or change what it reads: "
                f"{', '.join(sorted(looked_at))}"
            )
    return recording


def has_gates(recording: Recording) -> bool:
    """Whether something that is inserted is an op of a run."""
    return any(isinstance(op.target, Gate) for op in recording.tape.ops)
