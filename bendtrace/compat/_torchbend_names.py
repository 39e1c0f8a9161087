"""The names that torchbend gives activations, and patterns for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bendtrace.interject.bends.catalogue import Activation, Catalogue, NamedActivations
from bendtrace.interject.bends.spec import compiled
from bendtrace.interject.knowledge import Knowledge

__all__ = ["At", "Names", "split"]


@dataclass(frozen=True)
class At:
    """Something in one method of a model.

    Attributes:
        fn: the name of the method.
        what: a pattern or another location.
    """

    fn: str
    what: Any


def split(item: Any) -> tuple[str | None, Any]:
    """Return the method that a location names, `"encode:conv"`, and the location in it."""
    if isinstance(item, At):
        return item.fn, item.what
    if isinstance(item, str) and (named := re.fullmatch(r"([A-Za-z_]\w*):(.+)", item, re.S)):
        return named[1], named[2]
    return None, item


class Names:
    """The activations of one method by name.

    A name is the qualified name with underscores, `blocks_0_relu`. A function in a module is also
    known by the name that torch.fx gives it, `relu`.

    Args:
        known: the recorded runs of the method.

    Attributes:
        every: the activations, and the modules that may return some.
        by_name: those that a run has reached, by name.
        by_path: their names by node path.
        aliases: the other names of some.
    """

    def __init__(self, known: Knowledge) -> None:
        self.every = Catalogue(known).activations()
        self.by_name: dict[str, Activation] = {}
        self.aliases: dict[str, Activation] = {}
        for found in self.every:
            if found.level == "whole" and found.shape is not None:
                self.by_name[_free(found.names[-1].replace(".", "_"), self.by_name)] = found
                if found.op.startswith("call_") and found.op != "call_module":
                    base = re.sub(r"_\d+$", "", found.name.rpartition(".")[2])
                    self.aliases[_free(base, self.aliases)] = found
        self.by_path = {found.name: name for name, found in self.by_name.items()}

    def matching(self, pattern: str | re.Pattern[str]) -> Iterator[tuple[str, Activation]]:
        """Yield what a pattern matches from the start of a name, as torchbend does, by name."""
        expression = compiled(pattern)
        done = set()
        for name, found in (*self.by_name.items(), *self.aliases.items()):
            names = (name,) if self.aliases.get(name) is found else (name, *found.names)
            if found.name not in done and any(map(expression.match, names)):
                done.add(found.name)
                yield (name if name == pattern else self.by_path[found.name]), found

    def patterns(self, pattern: str | re.Pattern[str]) -> list[Any]:
        """Return what selects in a `bendtrace.BendedModule` what a pattern means here."""
        expression = compiled(pattern)
        selector = NamedActivations((expression,), frozenset())
        means = [found for found in self.every if selector.means(found.level, found.names)]
        known = {found.name for found in means}
        others = [found.name for _, found in self.matching(pattern) if found.name not in known]
        return ([pattern] if means else []) + [f"{re.escape(name)}$" for name in others]


def _free(wish: str, taken: Any) -> str:
    name, count = wish, 0
    while name in taken:
        count += 1
        name = f"{wish}_{count}"
    return name
