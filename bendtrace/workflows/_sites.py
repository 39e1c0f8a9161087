"""The sites of a workflow: one insertion at each for all runs, that does what each run is for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bendtrace.calls import Call
from bendtrace.errors import InputError, NodePathError, SiteError
from bendtrace.history.copies import copied
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.resolver import describe_where
from bendtrace.module import BendedModule
from bendtrace.paths.nodes import NodePath
from bendtrace.still import Still
from bendtrace.workflows._copies import differentiable, own_copy
from bendtrace.workflows._site_values import each_exchanged, exchanged, first_exchanged

__all__ = ["At", "Key", "Row", "Seen", "Sites", "listed_sites"]

At = Literal["output", "input"]

# Which of the sites as they were given, and the path of the node.
Key = tuple[int, str]

# What is done with the value of a pass: None keeps it.
Act = Callable[[Key, int, Tensor], Tensor | None]


class Seen(dict[Key, dict[int, Tensor]]):
    """What the nodes of all sites gave in one run: for each node its passes, in order."""


@dataclass(frozen=True)
class Row:
    """A site of a grid.

    Attributes:
        name: what it is called.
        keys: the nodes, which are exchanged together.
    """

    name: str
    keys: tuple[Key, ...]


def listed_sites(sites: Any, name: str = "sites") -> list[Any]:
    """Return sites as a list; what is one alone becomes a list of one.

    Raises:
        InputError: there is none.
    """
    listed = list(sites) if isinstance(sites, (list, tuple, set, frozenset)) else [sites]
    if not listed:
        raise InputError(f"{name}= is empty: say at which nodes")
    return listed


class _Station(Interjection):
    """Hands what a site gives to whatever the present run is for."""

    late = True
    self_contained = True

    def __init__(self, number: int, sites: Sites) -> None:
        self._number = number
        self._sites = sites

    @property
    def label(self) -> str:
        """What reports call it."""
        return self._sites.label

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Exchange the tensor in what the node gave."""
        return self._sites.came_by(self._number, at, output)


class _Observer(_Station):
    """The same for runs that exchange nothing."""

    observes = True


class _Noter(_Observer):
    """Notes that a node came up."""

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Note it."""
        self._sites.note(self._number, at)


class _InputStation(_Station):
    """Hands on the first tensor that a site is given."""

    after = Interjection.after

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Exchange the first tensor."""
        return first_exchanged(
            inputs, at.path, lambda tensor: self._sites.came_by(self._number, at, tensor)
        )


class Sites:
    """Sites in a model, for as long as the context lasts.

    All are inserted at once, and for all runs, so that these have their traces in common: which
    of them is exchanged, and for what, is told to each run.

    Attributes:
        places: for the nodes that are only noted, the passes in which they came up in the last run.

    Args:
        bended: the model.
        items: what says where they are, one for each site.
        calls: what the model will be called with: where a site is known by no run yet, these
            are run once, to get to know the names on their paths.
        at: whether what a node gives is meant, or the first tensor that it is given.
        also: more of them, at which what they give is meant. They come last in number, and are
            called before the others, and are no rows.
        noted: more still, of which only is noted, in `places`, when they come up.
        label: what reports call it.
        observes: whether no run will exchange anything.
        every_part: whether each tensor in a container is looked at by itself, under the path of the
            part. Otherwise a container has to hold one tensor.
        allow_none: whether it is right that something means no node.
    """

    def __init__(
        self,
        bended: BendedModule,
        items: Sequence[Any],
        calls: Sequence[Call],
        *,
        at: At = "output",
        also: Sequence[Any] = (),
        noted: Sequence[Any] = (),
        label: str = "workflow",
        observes: bool = False,
        every_part: bool = False,
        allow_none: bool = False,
    ) -> None:
        if at not in ("output", "input"):
            raise InputError(f'at= is "output" or "input", not {at!r}')
        self.label = label
        self._bended = bended
        self._items = [*items, *also, *noted]
        self._count = len(items)
        self.places: dict[Key, list[int]] = {}
        self._calls = [own_copy(call) for call in calls]
        kind: type[_Station] = _Observer if observes else _Station
        self._kinds: list[type[_Station]] = [_InputStation if at == "input" else kind] * len(items)
        self._kinds += [kind] * len(also) + [_Noter] * len(noted)
        self._every_part = every_part
        self._allow_none = allow_none
        self._insertions: list[Insertion] = []
        self._act: Act | None = None
        self._thread = threading.get_ident()
        self._still = Still(bended.model)

    def run(self, call: Call, act: Act | None = None, *, with_gradients: bool = False) -> Any:
        """Call the model with copies of some inputs, from the same random numbers and buffers.

        Args:
            call: the inputs.
            act: is given the tensor of each pass of each node that is meant.
            with_gradients: whether gradients go as far as the inputs.
        """
        given = own_copy(call)
        if with_gradients:
            given = differentiable(given)
        self._still.rewind()
        self.places = {}
        self._act = act
        try:
            return given.to(self._bended)
        finally:
            self._act = None

    def seen(
        self, call: Call, act: Act | None = None, *, with_gradients: bool = False
    ) -> tuple[Any, Seen]:
        """Call the model, and return what it gave, and copies of what was seen at the sites.

        Args:
            call: the inputs.
            act: as for `run`; what it puts in the place of values is what is seen.
            with_gradients: as for `run`.
        """
        seen = Seen()

        def keep(key: Key, number: int, value: Tensor) -> Tensor | None:
            made = None if act is None else act(key, number, value)
            with torch.inference_mode(False), torch.no_grad():
                kept = value if made is None else made
                seen.setdefault(key, {})[number] = copied(kept.detach())
            return made

        output = self.run(call, keep, with_gradients=with_gradients)
        return output, seen

    def rows(self, *runs: Iterable[Key]) -> list[Row]:
        """Return the sites, in the order in which they were given.

        What means several nodes is a row for each, in the order in which they came up; a list of
        sites is one row.

        Args:
            *runs: what was seen in the runs.

        Raises:
            SiteError: no run came by any of the nodes of a site.
        """
        found = []
        for number, item in enumerate(self._items[: self._count]):
            keys = list(dict.fromkeys(key for run in runs for key in run if key[0] == number))
            if not keys and not self._allow_none:
                notes = "; ".join(self._insertions[number].report().notes)
                said = describe_where(item)
                raise SiteError(f"no run came by {said}" + (f": {notes}" if notes else ""), said)
            if isinstance(item, (list, tuple, set, frozenset)):
                if keys:
                    found.append(Row(" + ".join(_shown(key) for key in keys), tuple(keys)))
            elif len(keys) == 1 and isinstance(item, str):
                found.append(Row(item, (keys[0],)))
            else:
                found += [Row(_shown(key), (key,)) for key in keys]
        return found

    def settle(self, *runs: Iterable[Key]) -> None:
        """Insert by their paths what would have to be looked for in each run anew."""
        for number, insertion in enumerate(self._insertions):
            if not insertion.passes.needs_total and not any(w.is_ahead for w in insertion.wants):
                continue
            keys = dict.fromkeys(key for run in runs for key in run if key[0] == number)
            if keys and not insertion.passes.needs_total:
                insertion.remove()
                self._insertions[number] = self._bended.interject(
                    [NodePath(path) for _, path in keys], insertion.what, allow_none=True
                )

    def note(self, number: int, at: NodePass) -> None:
        """Note that a node came up."""
        if threading.get_ident() == self._thread:
            self.places.setdefault((number, at.path or "output"), []).append(at.number)

    def came_by(self, number: int, at: NodePass, value: Any) -> Any:
        """Do what the present run is for; return the value that goes on, or None."""
        act = self._act
        if act is None or threading.get_ident() != self._thread:
            return None
        path = at.path or "output"
        if isinstance(value, Tensor):
            return act((number, path), at.number, value)
        if self._every_part:
            return each_exchanged(
                value, path, lambda part, item: act((number, part), at.number, item)
            )
        said = describe_where(self._items[number])
        return exchanged(value, path, said, lambda item: act((number, path), at.number, item))

    def __enter__(self) -> Self:
        try:
            self._insert()
        except NodePathError:
            self._get_to_know()
            self._insert()
        else:
            if any(_is_unknown(insertion) for insertion in self._insertions):
                self._take_out()
                self._get_to_know()
                self._insert()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._take_out()
        self._still.rewind()

    def _insert(self) -> None:
        made = [
            self._bended._board.make(
                list(item) if isinstance(item, (tuple, set, frozenset)) else item,
                self._kinds[number](number, self),
                allow_none=self._allow_none,
            )
            for number, item in enumerate(self._items)
        ]
        self._bended._board.add(*made[self._count :], *made[: self._count])
        self._insertions = made

    def _take_out(self) -> None:
        self._bended._board.remove(*self._insertions)

    def _get_to_know(self) -> None:
        """Run the model as it is, so that there are names for what it does."""
        try:
            for call in self._calls:
                self._still.rewind()
                own_copy(call).to(self._bended)
        finally:
            self._still.rewind()


def _is_unknown(insertion: Insertion) -> bool:
    return not insertion.is_checked or any(want.is_open for want in insertion.wants)


def _shown(key: Key) -> str:
    return key[1]
