"""A rest that leaves its recorded run: where it may go over to, and how else it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace.interject.rests import KnownRun, Prepared
from bendtrace.recording.functions import is_gate
from bendtrace.recording.parts import identical
from bendtrace.recording.recorder import Prefix, Recording
from bendtrace.recording.tape import Guard, OpKind, TensorMeta, Test, refs_in
from bendtrace.replay.program import Program
from bendtrace.replay.source import test_of
from bendtrace.replay.stretches import Divergence, Stretch

__all__ = ["Left", "is_before", "other_side", "owner_of", "random_states"]


@dataclass
class Left:
    """A rest that has left all known paths.

    Attributes:
        run: the run that it was of.
        prepared: the rest.
        divergence: where it left, as the code of replays knows it.
        position: the first op that was not come by.
        done: the ops that were carried out.
        slots: the given values.
        random: the states of the random generators when it began.
    """

    run: KnownRun
    prepared: Prepared
    divergence: Divergence
    position: int
    done: frozenset[int]
    slots: dict[str, Any]
    random: list[Tensor]

    @property
    def has_effects(self) -> bool:
        """Whether something besides the values of the run has been changed, or may have been."""
        now = random_states()
        same = len(now) == len(self.random) and all(map(torch.equal, now, self.random))
        return not same or self.prepared.rest.memory.has_effects(self.done)

    @property
    def can_be_resumed(self) -> bool:
        """Whether the model's Python can take over, and find the given values in its way."""
        ops = self.prepared.recording.tape.ops
        if self.divergence.position != self.position:
            return False
        for spots in self.prepared.spots.values():
            for spot in spots:
                op = ops[spot.index]
                between = ops[spot.index + 1 : spot.start]
                if (
                    spot.start > self.position
                    or op.kind is not OpKind.CALL
                    or not isinstance(op.meta, TensorMeta)
                    or any(
                        ref.index == spot.index and not is_gate(other)
                        for other in between
                        for ref in refs_in((other.args, other.kwargs))
                    )
                ):
                    return False
        return not self.prepared.rest.disturbs(self.done, self.position)

    def prefix(self) -> Prefix | None:
        """Return what the model's Python does not have to do again."""
        for cut in self.prepared.cuts:
            self.divergence.values[f"v{cut.index}"] = self.slots[f"s{cut.slot}"]
        return self.divergence.prefix()

    def agrees_with(self, recording: Recording) -> bool:
        """Whether all was decided alike until here, so that a run belongs to the program."""
        before = {
            (guard.position, test_of(guard)): guard.expected
            for guard in self.prepared.recording.tape.guards
            if guard.position < self.position
        }
        return all(
            identical(guard.expected, before.get((guard.position, test_of(guard)), guard.expected))
            for guard in recording.tape.guards
            if guard.position < self.position
        )


def owner_of(program: Program, recording: Recording, number: int) -> tuple[Stretch, int]:
    """Return the code that tests a guard of a run, and the number that the guard has there."""
    stretch = next(own for own, _ in program.stretches() if own.recording is recording)
    while (parent := stretch.parent) is not None:
        if number < 0:
            if -1 - number >= stretch.start:
                break
        else:
            guard = stretch.recording.tape.guards[number]
            branch = next(
                n for n, sides in parent.sides.items() for side in sides if side.target is stretch
            )
            twin = next(
                (
                    n
                    for n, other in enumerate(parent.recording.tape.guards)
                    if (other.position, test_of(other)) == (guard.position, test_of(guard))
                    and (other.position < stretch.start or n == branch)
                ),
                None,
            )
            if twin is None:
                break
            number = twin
        stretch = parent
    return stretch, number


def other_side(owner: Stretch, number: int, outcome: Any, recording: Recording) -> Recording | None:
    """Return the run that went on with another outcome of a guard; None if none is known."""
    tape = owner.recording.tape
    own = tape.guards[number].expected if number >= 0 else tape.ops[-1 - number].raised
    is_identity = number >= 0 and tape.guards[number].test in (Test.SAME, Test.OTHER)
    if owner.recording is not recording and not is_identity and identical(own, outcome):
        return owner.recording
    side = owner.side(number, outcome)
    return None if side is None or side.target is None else side.target.recording


def is_before(number: int, guard: Guard, divergence: Divergence) -> bool:
    """Whether a guard was tested before a run was left, or is the one that it was left by."""
    start = divergence.stretch.start
    when = max(guard.position, start)
    left = divergence.guard
    if left is None:
        return when <= -1 - divergence.number
    return (when, number) <= (max(left.position, start), divergence.number)


def random_states() -> list[Tensor]:
    """Return the states of torch's random generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states
