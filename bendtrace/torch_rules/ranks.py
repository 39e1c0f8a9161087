"""How ranks exchange what they are about to do: through the store of the process group.

Nothing here is a collective, so it cannot be confused with a collective of the model, and a rank
that never comes can be distinguished from a late one.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from bendtrace.errors import RankDivergenceError

__all__ = ["Group", "Ranks", "ranks"]


@dataclass(frozen=True)
class Group:
    """A process group: its name, which is the same on all ranks, and its (global) ranks."""

    name: str
    ranks: tuple[int, ...]


# How long a rank waits for the others before it looks where they are, in seconds.
_PATIENCE = 0.2
_LOOKS = 1.0  # and then again and again
_TELLING = 5.0  # how long others have to say what they did, once it is over
_GO, _STOP = b"go", b"stop"


@dataclass
class Ranks:
    """The other ranks of the process, reachable through a store.

    Attributes:
        store: the store of the default process group.
        rank: this process.
        size: the number of ranks.
        timeout: the number of seconds to wait for others.
        events: the number of meetings, by group.
        messages: the number of requests to the store.
        call: the latest call in which ranks communicate: its model, and its number.
    """

    store: Any
    rank: int
    size: int
    timeout: float
    events: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    call: tuple[str, int] = ("", 0)
    _is_gone: bool = False
    _latest: dict[str, int] = field(default_factory=dict)  # at which all came to agree

    def meet(self, group: Group, what: str, told: str) -> None:
        """Wait until all ranks of a group are about to do the same.

        Args:
            group: the group.
            what: what this rank is about to do, in the same words as on the others.
            told: the description for messages if something else is about to happen.

        Raises:
            RankDivergenceError: the ranks are about to do different things.
        """
        self._come_back()
        number = self._next(group)
        key = f"{group.name}/{number}"
        first = self._exchange(f"{key}/what", what)
        if first != what.encode():
            self._stop(key)
        arrived = self._add(f"{key}/count")
        if arrived == len(group.ranks):
            answer = self._exchange(f"{key}/answer", _GO.decode())
        else:
            # All have come to the meeting before, and so have left the one before that.
            if arrived == 1 and self._latest.get(group.name) == number - 1:
                self._forget(group, number - 2)
            answer = self._answer(group, key)
        if answer != _GO:
            raise self._divergence(group, key, told)
        self._latest[group.name] = number

    def leave(self, groups: Iterable[Group], told: str) -> None:
        """Stop others from waiting for this rank at their next meeting.

        Args:
            groups: the groups that it would have met.
            told: what happened to it, for messages.
        """
        for group in groups:
            key = f"{group.name}/{self._next(group)}"
            self._set(f"{key}/told/{self.rank}", told)
            self._stop(key)
        self.go(told)

    def go(self, told: str) -> None:
        """Announce that this rank will not meet others in its latest call again."""
        self._is_gone = True
        self._set(f"at/{self.rank}", json.dumps({"gone": told, "call": self.call}))

    def _come_back(self) -> None:
        if self._is_gone:
            self._is_gone = False
            self._set(f"at/{self.rank}", "{}")

    # Waiting

    def _answer(self, group: Group, key: str) -> bytes:
        """Wait for the last rank to come, or for somebody to find out that it will not."""
        started, patience = time.monotonic(), _PATIENCE
        before: Any = None
        while not self._comes(f"{key}/answer", patience):
            patience = _LOOKS
            mine = {"at": key, "ranks": list(group.ranks), "group": group.name}
            self._set(f"at/{self.rank}", json.dumps(mine))
            places = self._places()
            why = self._hopeless(group, key, places)
            if why and places == before:  # and not just about to change
                self._tell_of(key, why)
                self._stop(key)
            before = places if why else None
            if time.monotonic() - started > self.timeout:
                late = sorted(set(group.ranks) - self._at(key, places))
                text = f"did not come within {self.timeout:g} s"
                self._tell_of(key, dict.fromkeys(late, text))
                self._stop(key)
        return self._get(f"{key}/answer")

    def _places(self) -> dict[int, dict[str, Any]]:
        """Return where ranks wait, or that they have gone, as far as they said so."""
        found: dict[int, dict[str, Any]] = {}
        for rank in range(self.size):
            if self._is_there(f"at/{rank}"):
                found[rank] = json.loads(self._get(f"at/{rank}"))
        return found

    @staticmethod
    def _at(key: str, places: Mapping[int, Mapping[str, Any]]) -> set[int]:
        return {rank for rank, place in places.items() if place.get("at") == key}

    def _hopeless(
        self, group: Group, key: str, places: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, str]:
        """Return why one of those who are missing will never come; empty if they all may."""
        late = sorted(set(group.ranks) - self._at(key, places))
        waiting: list[tuple[int, tuple[int, ...]]] = [(rank, (rank,)) for rank in late]
        seen: set[int] = set()
        while waiting:
            rank, chain = waiting.pop()
            place = places.get(rank, {})
            if rank in seen:
                continue
            seen.add(rank)
            # If it has gone from an earlier call, or from one of another model, it is late.
            if place.get("gone") and self._is_reached_by(place["call"]):
                return {chain[0]: _reason(chain, places, str(place["gone"]))}
            if place.get("at") and not self._is_there(f"{place['at']}/answer"):
                if self.rank in place["ranks"]:  # it waits for this one, if only in the end
                    return {chain[0]: _reason(chain, places, f"waits for rank {self.rank}")}
                missing = set(place["ranks"]) - self._at(place["at"], places)
                waiting += [(other, (*chain, other)) for other in sorted(missing)]
        return {}

    def _is_reached_by(self, call: Sequence[Any]) -> bool:
        return bool(call[0] == self.call[0] and call[1] >= self.call[1])

    # What is said when it is over

    def _stop(self, key: str) -> None:
        self._exchange(f"{key}/answer", _STOP.decode())

    def _tell_of(self, key: str, told: Mapping[int, str]) -> None:
        for rank, text in told.items():
            self._exchange(f"{key}/told/{rank}", text)

    def _divergence(self, group: Group, key: str, told: str) -> RankDivergenceError:
        self._exchange(f"{key}/told/{self.rank}", told)  # unless it was given up before
        found: dict[int, str] = {}
        until = time.monotonic() + _TELLING
        for rank in group.ranks:
            left = max(until - time.monotonic(), 0.01)
            if self._comes(f"{key}/told/{rank}", left):
                found[rank] = self._get(f"{key}/told/{rank}").decode()
            else:
                found[rank] = "does something else"
        return RankDivergenceError(group.name, found)

    # The store

    def _next(self, group: Group) -> int:
        number = self.events.get(group.name, 0)
        self.events[group.name] = number + 1
        return number

    def _forget(self, group: Group, number: int) -> None:
        """Remove what was said at a meeting that all have left."""
        if number >= 0:
            for name in ("what", "count", "answer"):
                self.messages += 1
                self.store.delete_key(f"{group.name}/{number}/{name}")

    def _exchange(self, key: str, value: str) -> bytes:
        """Set a key unless it is set, and return what it is."""
        self.messages += 1
        return bytes(self.store.compare_set(key, "", value))

    def _add(self, key: str) -> int:
        self.messages += 1
        return int(self.store.add(key, 1))

    def _set(self, key: str, value: str) -> None:
        self.messages += 1
        self.store.set(key, value)

    def _get(self, key: str) -> bytes:
        self.messages += 1
        return bytes(self.store.get(key))

    def _is_there(self, key: str) -> bool:
        self.messages += 1
        return bool(self.store.check([key]))

    def _comes(self, key: str, seconds: float) -> bool:
        """Whether a key is set within some time."""
        # Not by `store.wait`: torch warns of each time that it takes longer.
        until, pause = time.monotonic() + seconds, 1e-4
        while not self._is_there(key):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return True


def _reason(chain: Sequence[int], places: Mapping[int, Mapping[str, Any]], last: str) -> str:
    """Say why the first of some ranks, each of which waits for the next, will never come."""
    links = [f"waits in group {places[rank]['group']} for rank {then}, which "
             for rank, then in itertools.pairwise(chain)]  # fmt: skip
    return "".join([*links, last])


_lock = threading.Lock()
_known: dict[str, Any] = {}
_events: dict[str, int] = {}  # go on counting if the process group is made anew


def ranks(timeout: float) -> Ranks:
    """Return the object through which this process communicates with the others.

    Args:
        timeout: the number of seconds to wait for others.
    """
    default = dist.group.WORLD
    with _lock:
        known: Ranks | None = _known.get("ranks")
        if known is None or _known["group"] is not default:
            store: Any = dist.distributed_c10d._get_default_store()
            if hasattr(store, "clone"):
                store = store.clone()  # whose connection nobody else has to wait for
            store = dist.distributed_c10d.PrefixStore("bendtrace", store)
            known = Ranks(store, dist.get_rank(), dist.get_world_size(), timeout, _events)
            _known.update(ranks=known, group=default)
        known.timeout = timeout
    return known
