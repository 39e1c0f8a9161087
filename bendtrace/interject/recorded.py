"""Running a model under the tracer with what is inserted in it."""

from __future__ import annotations

from typing import Any

from bendtrace.interject.inserter import LiveInserter
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.plan import Plan
from bendtrace.interject.reading import read_and_changed
from bendtrace.recording.recorder import Prefix, Recording
from bendtrace.recording.run import Signature, record

__all__ = ["recorded"]


def recorded(
    known: Knowledge,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan | None,
    prefix: Prefix | None = None,
    reads_states: bool = False,
) -> Recording:
    """Run a model under the tracer, with what is inserted in it.

    Args:
        known: what is known of the model.
        signature: puts its arguments in order.
        args: the positional arguments.
        kwargs: the keyword arguments.
        plan: what is inserted; None if nothing is.
        prefix: what need not be done again.
        reads_states: whether it reads all states in which the run asks for values.
    """
    inserter = None
    if plan is not None:
        known.name_nodes()  # before the run does so in passing
        inserter = LiveInserter(plan, known.registry, known.model)
    reads_states = reads_states and plan is None
    recording = record(
        known.model, args, kwargs, signature, prefix, inserter=inserter, reads_states=reads_states
    )
    if plan is not None:
        plan.ran(recording)
        if looked_at := read_and_changed(plan, recording):
            recording.tape.block(
                "what is inserted may look at what the run changes, and a replay changes at "
                f"its end: {', '.join(sorted(looked_at))}"
            )
    return recording
