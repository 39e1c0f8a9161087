"""Gates in generated code, for as long as their results are of the same kind as their values."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.engine.source import Interrupted, Unfit
from bendtrace.insert.gates import AfterGate, attempt, gate_passes, is_repeated, of_call
from bendtrace.insert.interjection import NO_INPUTS
from bendtrace.insert.leaves import write_count
from bendtrace.python.internals import internal
from bendtrace.record.scopes import REFERENCES_OF_LOCAL
from bendtrace.tape.captured import is_leaf, is_uneven, requires_grad

if TYPE_CHECKING:
    from bendtrace.insert.splicer import Splicer


class SplicedGate:
    """Passes a value through a gate, behind so many ops and guards of a run, put by a splicer.

    `is_part` says whether a tensor is a part of the model, or was one of its arguments.
    """

    def __init__(
        self,
        gate: AfterGate,
        splicer: Splicer,
        is_part: Callable[[Tensor], bool],
        place: tuple[int, int],
    ) -> None:
        # Those at the same place up to this one, in order.
        self.gates: tuple[AfterGate, ...] = (gate,)
        self._gate = gate
        self._path = gate.at.path
        self._splicer = splicer
        self._is_part = is_part
        self._place = place
        self._tests: dict[Any, KindTest] = {}  # by the shape
        self._latest: KindTest | None = None

    def __call__(self, value: Any) -> Any:
        """Pass a value through.

        Raises:
            Interrupted: the gate has raised an error, or returned another kind of value.
        """
        call, gate = of_call(), self._gate
        plan, passes, current = call.plan, call.passes, call.attempt
        assert plan is not None
        _, _, selects, entry = plan.called_at.get(id(gate)) or gate.called_by(plan)
        if entry is None or current.answers or call.is_repeated:
            return self._slowly(value, tensor_kind(value))
        if selects and not gate.is_due(entry, call):
            gate.begin(passes)
            return value
        test = self._latest
        if test is None or not test.is_alike(value):
            test = self._latest = self._test_of(value)
            if test is None:
                return self._slowly(value, tensor_kind(value))
        kind = test.kind
        # The usual case: what `AfterGate` does, in a third of the instructions.
        at, version = gate.begin(passes), value._version
        try:
            given = entry.what.after(at, NO_INPUTS, value)
            if value._version == version:
                if given is None or given is value:
                    if test.is_alike(value):
                        entry.insertion.fired(at, False)
                        current.note_unchanged(self._path, at.number)
                        return value
                elif (
                    sys.getrefcount(given) <= REFERENCES_OF_LOCAL
                    and test.is_alike(given)
                    and not entry.what.observes
                    and self._path in (tally := entry.insertion._tally).changes
                ):
                    keeps, writes = self._splicer.keeps, self._splicer.writes
                    if not writes or not (keeps or _is_even_shared(given)):
                        tally.noted.append((at, True, 1))
                        current.note(self._path, at.number, given, keeps, writes, given._version)
                        return given
            given = gate.exchanged_for(entry, value, given, at, version)
        except Exception as error:
            gate.failed(error, (entry,))
            self._hand_on(error)
            raise Interrupted(*self._place) from None
        is_referenced = sys.getrefcount(given) > REFERENCES_OF_LOCAL
        return self._weighed(value, given, is_referenced, at.number, kind, version)

    def _test_of(self, value: Any) -> KindTest | None:
        """Return a test for what is like a value; None if too little is known of that."""
        if type(value) is not Tensor or value.is_nested:
            return None
        test = self._tests.get(value.shape)
        if test is None or not test.is_alike(value):
            kind = tensor_kind(value)
            if kind is None or kind[0]:  # a tensor of inference mode has no version to compare
                return None
            if len(self._tests) >= _MOST_SHAPES:
                self._tests.clear()
            test = self._tests[value.shape] = KindTest(value, kind)
        return test

    def _slowly(self, value: Any, kind: tuple[Any, ...] | None) -> Any:
        if is_repeated():
            return self._gate(value)
        number, version = gate_passes(self._gate), write_count(value)
        try:
            given = self._gate(value)
        except Exception as error:
            self._hand_on(error)
            raise Interrupted(*self._place) from None
        is_referenced = sys.getrefcount(given) > REFERENCES_OF_LOCAL
        return self._weighed(value, given, is_referenced, number, kind, version)

    def _weighed(
        self,
        value: Any,
        given: Any,
        is_referenced: bool,
        number: int,
        kind: tuple[Any, ...] | None,
        version: int,
    ) -> Any:
        """Return what a gate has returned for a value in a pass, if known code can go on with it.

        Somebody else may have a reference to that, too. The kind and version are those of the value
        before.
        """
        path, current, splicer = self._path, attempt(), self._splicer
        if given is not value:
            is_met = is_referenced and (current.has_met(given) or self._is_part(given))
            may_change = splicer.writes
            if not is_met and fits(kind, given, may_change):
                if not may_change or is_referenced or not splicer.keeps:
                    current.note(path, number, given, splicer.keeps, may_change)
                else:
                    current.meets(given)
                    current.note(path, number, given.clone(), True, False)
                return given
            current.note(path, number, given, True, False)
        else:
            is_fit = kind is not None and tensor_kind(value) == kind
            is_untouched = write_count(value) == version and not value.is_inference()
            # Another kind tells whether the data were exchanged.
            if is_untouched and (is_fit or kind is None):
                current.note_unchanged(path, number)
            elif is_shared(value):
                current.refuse(path, number)
            elif is_fit:
                current.note(path, number, value, splicer.keeps, splicer.writes)
            else:
                current.note(path, number, value, True, False)
            if is_fit:
                return value
        splicer.is_apart = True
        unfit = None
        if current.can_begin_again():
            unfit = Unfit(f"what is inserted at {path!r} gives another kind of tensor")
        hand_on = functools.partial(self._hand_on, None if given is value else given)
        raise Interrupted(*self._place, unfit, hand_on)

    def _hand_on(self, given: Any) -> None:
        """Have the model's Python go on from what the gate has returned, or raised."""
        attempt().hands_on(self.gates, given)


def fits(kind: tuple[Any, ...] | None, given: Any, writes: bool) -> bool:
    """Return whether a tensor can take the place of another, of some kind, in a known run.

    That may write to tensors in place.
    """
    if kind is None or type(given) is not Tensor or tensor_kind(given) != kind:
        return False
    return not (writes and is_shared(given))


def tensor_kind(tensor: Any) -> tuple[Any, ...] | None:
    """Return what code may rely on about a tensor, whatever is in it; None if that is not known."""
    if type(tensor) is not Tensor or is_uneven(tensor) or tensor.__dict__:
        return None
    if tensor._base is None:
        history = _history(tensor)
    else:
        history = requires_grad(tensor), is_leaf(tensor)
    return (
        tensor.is_inference(),
        _form(tensor),
        tensor.stride(),
        tensor.storage_offset(),
        history,
        tensor.is_conj(),
        tensor.is_neg(),
    )


_form = operator.attrgetter("dtype", "device", "shape")
_history = operator.attrgetter("requires_grad", "is_leaf")


class KindTest:
    """Tests whether other tensors are of the kind of one."""

    __slots__ = ("_guards", "_has_history", "kind")

    def __init__(self, tensor: Tensor, kind: tuple[Any, ...]) -> None:
        self.kind = kind
        self._has_history: bool = requires_grad(tensor)
        self._guards: Callable[[Any], bool] | None = None
        # A guard of torch.compile compares in one step what takes ten to ask for: all of the kind
        # but the offset, own attributes, and what is said of views and of leaves.
        is_usual = tensor._base is None and not tensor.storage_offset()
        if _guards is not None and is_usual and not (self._has_history and tensor.is_leaf):
            made = _guards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._guards = made.check

    def is_alike(self, value: Any) -> bool:
        """Return whether a value is a tensor of the kind."""
        if self._guards is None:
            return tensor_kind(value) == self.kind
        return (
            type(value) is Tensor
            and not value.is_nested  # which the guard would end the process for
            and self._guards(value)
            and value._base is None
            and not (value.storage_offset() or value.__dict__)
            and not (self._has_history and value.is_leaf)
        )


# Seen in torch 2.13 to 2.15; it takes the mode of the thread into account that it was made in.
_guards: Any = internal("torch._C._dynamo.guards.TensorGuards", None)
_MOST_SHAPES = 64  # for which tests are kept


def is_shared(tensor: Tensor) -> bool:
    """Return whether other tensors may have the same memory."""
    return is_uneven(tensor) or _is_even_shared(tensor)


def _is_even_shared(tensor: Tensor) -> bool:
    return tensor._is_view() or _uses(tensor.untyped_storage()._cdata) > _uses_of_one()


# `sys.getrefcount` counts Python's references only, and a view has a storage object of its own over
# the same memory. Without the count of torch (2.13), all memory is taken to be shared.
_uses: Callable[[int], int] = internal("torch._C._storage_Use_Count", None) or (lambda _: 1 << 30)


@functools.cache
def _uses_of_one() -> int:
    """Return what it says of memory that one tensor has.

    Asking makes a storage object, which counts as well (2 in torch 2.13), so the number is
    measured: not when this is imported, which may be in the middle of a recording.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        probe = torch.empty(1, device="cpu")
        return _uses(probe.untyped_storage()._cdata)
