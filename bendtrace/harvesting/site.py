"""The directory of a harvest: whether it is free, or holds the beginning of this one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bendtrace.errors import InputError, SaveError
from bendtrace.harvesting.filling import require_place
from bendtrace.harvesting.reading import HARVEST, VERSION, Harvest
from bendtrace.harvesting.shards import INDEX, SETTINGS, is_ours, shards_in, writing
from bendtrace.harvesting.workers import Workers
from bendtrace.storage.sealed import DirectoryLock, read_sealed, replace_sealed
from bendtrace.storage.tensors import sync_directory

__all__ = ["Site"]


class Site:
    """The directory of a harvest.

    Args:
        directory: where it is.
        about: what the harvest is: its settings, the model, how many processes.
        check_weights: whether the weights have to be those of the beginning.
        resume: whether a harvest that is there may be gone on with.
    """

    def __init__(
        self, directory: str, about: dict[str, Any], check_weights: bool, resume: bool
    ) -> None:
        self.directory = directory
        self._about = about
        self._check_weights = check_weights
        self._resume = resume
        self._lock: DirectoryLock | None = None

    @contextmanager
    def opened(self, workers: Workers) -> Iterator[bool]:
        """Make the directory ready; given is whether the harvest there is complete already.

        Raises:
            SaveError: it holds something else, is being written to, or cannot be.
            InputError: it holds another harvest.
        """
        try:
            workers.first(self._open)
            yield os.path.exists(os.path.join(self.directory, INDEX))
        finally:
            if self._lock is not None:
                self._lock.release()

    def _open(self) -> None:
        path = os.path.join(self.directory, SETTINGS)
        with writing(self.directory):
            if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
                raise SaveError(self.directory, "it is a file; a harvest is a directory")
            os.makedirs(self.directory, exist_ok=True)
            self._lock = DirectoryLock(self.directory)
            names = os.listdir(self.directory)
            others = sorted(name for name in names if not is_ours(name))
            if SETTINGS in names:
                self._compare(read_sealed(path, HARVEST, VERSION))
            elif others or any(name.endswith(".json") for name in names):
                shown = ", ".join((others or names)[:3])
                raise SaveError(
                    self.directory,
                    f"it is no harvest and holds other files ({shown}); choose another directory",
                )
            draft = f"{path}.tmp"
            if os.path.exists(draft):
                os.remove(draft)
            if SETTINGS not in names:
                about = {"format": HARVEST, "version": VERSION, **self._about}
                replace_sealed(path, about, draft)
                sync_directory(os.path.dirname(self.directory))
            elif INDEX not in names:  # find out now whether it can be written to
                with open(draft, "wb"):
                    pass
                os.remove(draft)

    def _compare(self, there: dict[str, Any]) -> None:
        """Refuse another harvest."""
        if not self._resume:
            raise InputError(
                f"{self.directory!r} holds a harvest, and resume=False says not to go on with one: "
                "choose another directory"
            )
        differences = list(_differences(there, self._about, self._check_weights))
        if differences:
            raise InputError(
                f"{self.directory!r} holds another harvest: {'; '.join(differences)}. Choose "
                "another directory, or the same settings"
            )

    def complete(self) -> None:
        """Write the index of all shards, which says that nothing is missing.

        Raises:
            InputError: two processes have harvested samples of the same id, or give one name to
                different nodes.
        """
        index = os.path.join(self.directory, INDEX)
        made = Harvest.open(self.directory)
        places: dict[str, str] = {}
        for shard in shards_in(self.directory):
            for path, place in shard.places.items():
                require_place(path, places.setdefault(path, place), place)
        if self._about["settings"]["sharded"] and self._about["processes"] > 1:
            ids = made.ids
            if len(set(ids)) < len(ids):
                seen: set[Any] = set()
                twice = [i for i in ids if i in seen or seen.add(i)]  # type: ignore[func-returns-value]
                raise InputError(
                    f"{len(twice)} ids came up more than once, such as {twice[:3]}: with "
                    "sharded=True each sample has to be in the part of one process"
                )
        with writing(self.directory):
            if os.path.exists(f"{index}.tmp"):
                os.remove(f"{index}.tmp")
            replace_sealed(index, made._told(), f"{index}.tmp")


def _differences(there: dict[str, Any], here: dict[str, Any], check_weights: bool) -> Iterator[str]:
    for key in sorted(there["settings"].keys() | here["settings"].keys()):
        old, new = there["settings"].get(key), here["settings"].get(key)
        if old != new:
            yield f"{key}= was {old!r} there, and is {new!r}"
    if there["processes"] != here["processes"]:
        yield f"{there['processes']} processes wrote there, and these are {here['processes']}"
    old, new = there["model"], here["model"]
    if old["class"] != new["class"]:
        yield f"the model was a {old['class']}, and is a {new['class']}"
    elif old["structure"] != new["structure"]:
        yield "the model has other modules, parameters or training modes than it had there"
    elif check_weights and old["weights"] != new["weights"]:
        yield "the weights of the model are not those of then (check_weights=False lets that pass)"
