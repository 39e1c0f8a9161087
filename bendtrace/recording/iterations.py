"""Which iteration of which loop each record of a tape belongs to.

Nothing counts iterations during the run. They follow from the order of the records: one at an
instruction that does not lie behind the previous one, in the same loop of the same running
function, belongs to the loop's next iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bendtrace.recording.sites import Place, Site
from bendtrace.recording.statements import Loop, Role, role_of
from bendtrace.recording.tape import Guard, ModuleCall, Op, Tape, Test

__all__ = ["Iterations", "Mark", "marks_of", "user_code"]

Order = tuple[int, int]


@dataclass(frozen=True, eq=False, slots=True)
class Mark:
    """A record of the tape, seen from the user's code that led to it.

    Attributes:
        order: sorts marks as they happened: an op before the guards on its value.
        record: the op or guard.
        place: the innermost instruction that is not torch's own.
        role: what its expression is to the statements around it.
        activation: the same for marks of one running function.
        scope: the module call whose forward contains the place.
    """

    order: Order
    record: Op | Guard
    place: Place
    role: Role
    activation: object
    scope: ModuleCall


def user_code(scope: ModuleCall, site: Site) -> tuple[Place, object, ModuleCall]:
    """Find the user's own code that led to a site, looking outwards through module calls.

    Returns:
        The place, a key of the running function, and the module call that it belongs to.
    """
    found = site
    owner: ModuleCall | None = scope
    while found.place.in_torch and owner is not None and owner.site is not None:
        found, owner = owner.site, owner.parent
    if found.place.in_torch or owner is None:
        found, owner = site, scope
    return found.place, (id(owner), found.chain[found.level + 1 :]), owner


def marks_of(tape: Tape) -> Iterator[Mark]:
    """Yield a mark for each op and guard that has a place in the source, in order."""
    records: list[tuple[Order, Op | Guard]] = [((op.index, 0), op) for op in tape.ops]
    records += [((g.position - 1, 1 + number), g) for number, g in enumerate(tape.guards)]
    for order, record in sorted(records, key=lambda item: item[0]):
        if record.site is not None:
            place, activation, scope = user_code(record.scope, record.site)
            yield Mark(order, record, place, role_of(place), activation, scope)


class Iterations:
    """Counts iterations over the marks of a tape.

    Args:
        marks: all marks, in order.
    """

    def __init__(self, marks: list[Mark]) -> None:
        self._at: dict[Order, tuple[int, ...]] = {}
        self._counts: dict[Order, int] = {}
        self._begun: dict[Order, bool] = {}
        running: dict[object, dict[Loop, int]] = {}
        previous: dict[object, Mark] = {}
        heads: dict[tuple[object, Loop], Order] = {}
        for mark in marks:
            current = running.get(mark.activation, {})
            before = previous.get(mark.activation)
            loops = mark.role.loops
            common = [loop for loop in loops if loop in current]
            if before is not None and common and _is_back(before, mark):
                current[common[-1]] += 1
            running[mark.activation] = {loop: current.get(loop, 0) for loop in loops}
            previous[mark.activation] = mark
            self._at[mark.order] = tuple(running[mark.activation].values())
            self._count(mark, heads, current)
            for loop in loops:
                head = heads.get((mark.activation, loop))
                if head is not None and loop.kind != "while":
                    reached = running[mark.activation][loop] + 1
                    self._counts[head] = max(self._counts[head], reached)

    def _count(
        self, mark: Mark, heads: dict[tuple[object, Loop], Order], before: dict[Loop, int]
    ) -> None:
        """Note the header of a loop: where it is entered, and for `while` each passed test."""
        loop, guard = mark.role.heads, mark.record
        if loop is None or not isinstance(guard, Guard) or guard.how in ("", "metadata"):
            return
        key = (mark.activation, loop)
        if loop.kind != "while":
            heads[key] = mark.order
            self._counts[mark.order] = 0
            return
        if loop not in before or key not in heads:
            heads[key] = mark.order
            self._begun[mark.order] = True
            self._counts[mark.order] = 0
        if guard.test is Test.TRUTH and mark.role.kind in ("while", "not"):
            self._counts[heads[key]] += bool(guard.expected) is (mark.role.kind == "while")

    def at(self, order: Order) -> tuple[int, ...]:
        """Return the iteration of each loop around a mark, outermost first, from 0."""
        return self._at[order]

    def begins_while(self, order: Order) -> bool:
        """Whether the mark is the first test of a `while` that was just entered."""
        return order in self._begun

    def count(self, order: Order, loop: Loop, values: list[Any]) -> int:
        """Return how often the body of a loop was begun.

        Args:
            order: the mark of the loop's header.
            loop: the loop.
            values: the traced integers that the header consumed, in order.
        """
        if loop.kind == "while" or loop.leaves_early:
            return self._counts[order]
        if loop.range_arguments:
            given = iter(values)
            full = [next(given, None) if a is None else a for a in loop.range_arguments]
            whole = [argument for argument in full if type(argument) is int]
            return len(range(*whole)) if len(whole) == len(full) else self._counts[order]
        return int(values[-1]) if type(values[-1]) is int else self._counts[order]


def _is_back(before: Mark, mark: Mark) -> bool:
    if mark.order[0] == before.order[0]:  # a guard on the value of the op just before it
        return False
    return mark.place.offset <= before.place.offset
