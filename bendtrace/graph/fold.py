"""Which module calls of a run can be shown, or carried out, as a single node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bendtrace.recording.recorder import Recording
from bendtrace.recording.structure import Instance, Made, Opaque
from bendtrace.recording.tape import ModuleCall, OpKind, Ref, Tape, refs_in

__all__ = ["Folding", "folding", "is_leaf_module"]


def is_leaf_module(module: nn.Module) -> bool:
    """Whether torch.fx would leave a module whole: one of torch.nn's own, not a container."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)


@dataclass
class Folding:
    """Calls that stand for the ops inside them.

    Attributes:
        call_of: for each op inside a folded call, the call.
        first: for each folded call, by identity, its first op.
    """

    call_of: dict[int, ModuleCall] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)

    def calls(self) -> Iterator[ModuleCall]:
        """Yield the folded calls."""
        yield from {id(call): call for call in self.call_of.values()}.values()


def results(call: ModuleCall) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield each op that a call's output holds, with the keys that lead to it."""
    yield from _paths(call.output, ())


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    if isinstance(value, Ref):
        yield value.index, path
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from _paths(item, (*path, position))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))


def folding(recording: Recording, is_leaf: Callable[[nn.Module], bool]) -> Folding:
    """Choose the outermost calls of leaf modules that one node can stand for.

    A call is left open if something outside uses a value from within that it does not return,
    or if it was given something that is not on the tape.
    """
    found = Folding()
    tape = recording.tape
    users = _last_users(recording)
    done = -1
    for call in tape.calls:
        if call.start < done or call.parent is None or call.module is None:
            continue
        if not call.path or call.path.startswith("<") or not is_leaf(call.module):
            continue
        inside = _inside(tape, call, users)
        if inside and _is_closed(tape, call, inside, users):
            found.call_of.update(dict.fromkeys(inside, call))
            found.first[id(call)] = min(inside)
            done = call.stop
    _take_in_shared_state(recording, found)
    return found


def _take_in_shared_state(recording: Recording, found: Folding) -> None:
    """Fold the state that several calls of a module use, if nothing else does."""
    tape = recording.tape
    elsewhere: set[int] = set()
    outside: list[Any] = [(op.args, op.kwargs) for op in tape.ops if op.index not in found.call_of]
    outside += [(call.args, call.kwargs, call.output) for call in found.calls()]
    outside += [recording.root.output, [change.value for change in recording.changes]]
    for value in outside:
        elsewhere.update(ref.index for ref in refs_in(value))
    users = {
        ref.index: found.call_of[op.index]
        for op in tape.ops
        if op.index in found.call_of
        for ref in refs_in((op.args, op.kwargs))
    }
    guarded = {guard.index for guard in tape.guards if guard.index not in found.call_of}
    for op in tape.ops:
        if op.kind is OpKind.STATE and op.index in users and op.index not in elsewhere | guarded:
            found.call_of.setdefault(op.index, users[op.index])


def _inside(tape: Tape, call: ModuleCall, users: dict[int, int]) -> set[int]:
    """The ops of a call; not the state in it that is used elsewhere too."""
    inside = set()
    for op in tape.ops[call.start : call.stop]:
        scope: ModuleCall | None = op.scope
        while scope is not None and scope is not call:
            scope = scope.parent
        shared = op.kind is OpKind.STATE and users.get(op.index, -1) >= call.stop
        if scope is call and op.kind is not OpKind.INPUT and not shared:
            inside.add(op.index)
    return inside


def _is_closed(tape: Tape, call: ModuleCall, inside: set[int], users: dict[int, int]) -> bool:
    if _has_opaque((call.args, call.kwargs, call.output)):
        return False
    if any(ref.index in inside for ref in refs_in((call.args, call.kwargs))):
        return False
    if any(tape.ops[index].raised is not None for index in inside):
        return False
    given = {index for index, _ in results(call)}
    return all(index in given or users.get(index, -1) < call.stop for index in inside)


def _last_users(recording: Recording) -> dict[int, int]:
    """For each op, the position of the last thing that uses its value."""
    tape, last = recording.tape, dict[int, int]()
    for op in tape.ops:
        for ref in refs_in((op.args, op.kwargs)):
            last[ref.index] = op.index
    for ref in refs_in((recording.root.output, [change.value for change in recording.changes])):
        last[ref.index] = len(tape.ops)
    return last


def _has_opaque(value: Any) -> bool:
    if isinstance(value, (Opaque, Instance, Made)):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_opaque, value))
    return isinstance(value, dict) and any(map(_has_opaque, value.values()))
