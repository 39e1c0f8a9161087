"""What gates have returned in a call, in case that the call has to begin again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bendtrace.errors import InterjectionError
from bendtrace.interject.structure import tensors_of, version_of


class Attempt:
    """An attempt to serve a call by known code, with what gates have returned in it.

    The model's own Python may have to take over from the start of the call. Nothing that is
    inserted is called a second time then: the gates return what they have returned before.

    Attributes:
        answers: for a call that begins again, what gates return, by node and pass; None for the
            value that they receive, and an error for one that they raise.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], Any] = {}
        self._returned: dict[tuple[str, int], _Returned | None] = {}
        self._met: dict[int, weakref.ref[Tensor]] = {}
        self._given: tuple[Any, ...] = ()
        self._place: tuple[int, int, int] | None = None
        self._here: list[tuple[Any, str, int]] = []

    def receives(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of the call."""
        self._given = args, dict(kwargs)

    def has_met(self, tensor: Tensor) -> bool:
        """Whether the model may have a tensor already, as an argument or from another gate."""
        known = self._met.get(id(tensor))
        if known is not None and known() is tensor:
            return True
        return any(one is tensor for one in tensors_of(self._given))

    def note(self, path: str, number: int, given: Tensor, keeps: bool, may_change: bool) -> None:
        """Note what a gate has returned.

        Args:
            path: the node.
            number: the pass.
            given: what was returned.
            keeps: whether to keep it alive.
            may_change: whether the model may change it in place.
        """
        self.meets(given)
        self._returned[path, number] = _Returned(path, given, keeps, may_change)

    def note_unchanged(self, path: str, number: int) -> None:
        """Note that a gate has returned the value that it was given, as it was."""
        self._returned[path, number] = None

    def refuse(self, path: str, number: int) -> None:
        """Note that a gate has done something that it cannot do again."""
        self._returned[path, number] = _Returned(path, None, True, True)

    def meets(self, tensor: Tensor) -> None:
        """Note that the model has a tensor from a gate."""
        self._met[id(tensor)] = weakref.ref(tensor)

    def comes_to(self, place: tuple[int, int, int], gate: Any, path: str, number: int) -> None:
        """Note that a gate is called at a place in known code.

        Args:
            place: the run, and how many of its ops and guards come before.
            gate: the gate.
            path: its node.
            number: the pass.
        """
        if place != self._place or any(one is gate for one, *_ in self._here):
            self._place, self._here = place, []
        self._here.append((gate, path, number))

    def hands_on(self, given: Any) -> list[Any]:
        """Have the gates at the latest place return once more what they have returned.

        The model's Python takes over behind the op before that place, and comes to all of them.

        Args:
            given: what the last of them has returned, or the error that it has raised; None for the
                value that it received.

        Returns:
            The gates.
        """
        for _, path, number in self._here:
            self.answers[path, number] = None  # the others: what they gave is the value by now
        _, path, number = self._here[-1]
        self.answers[path, number] = given
        return [gate for gate, *_ in self._here]

    def can_begin_again(self) -> bool:
        """Whether gates could return what they have returned."""
        return all(value is None or value.why_not() == "" for value in self._returned.values())

    def begin_again(self) -> None:
        """Have gates return what they have returned.

        Raises:
            InterjectionError: that is gone, or was changed since.
        """
        returned, self._returned, self._met = self._returned, {}, {}
        self.answers = {
            at: None if value is None else value.found() for at, value in returned.items()
        }


class _Returned:
    """What a gate has returned.

    Args:
        path: the node.
        given: what was returned; None if it cannot be returned again.
        keeps: whether to keep it alive.
        may_change: whether the model may change it in place.
    """

    def __init__(self, path: str, given: Tensor | None, keeps: bool, may_change: bool) -> None:
        self._path = path
        self._kept: Any = given if keeps or given is None else weakref.ref(given)
        self._may_change = may_change
        self._version = version_of(given)

    def found(self) -> Tensor:
        """Return it.

        Raises:
            InterjectionError: it is gone, or may have been changed since.
        """
        why = self.why_not()
        if not why:
            given = self._found()
            assert given is not None
            return given
        raise InterjectionError(
            f"what is inserted at {self._path!r} has been called, and {why}; but the call has to "
            "begin again, since something inserted has returned another kind of value than in "
            "earlier calls: call the model again",
            self._path,
        )

    def why_not(self) -> str:
        """Return why it cannot be returned once more; "" if it can."""
        given = self._found()
        if given is None:
            return "what it returned is gone"
        return "what it returned was changed" if self._was_changed(given) else ""

    def _found(self) -> Tensor | None:
        found = self._kept() if isinstance(self._kept, weakref.ref) else self._kept
        return found if isinstance(found, Tensor) else None

    def _was_changed(self, given: Tensor) -> bool:
        if given.is_inference():  # whose changes torch does not count
            return self._may_change
        return version_of(given) != self._version
