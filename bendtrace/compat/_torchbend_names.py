"""The names that torchbend gives activations, and patterns for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bendtrace.errors import InputError, NodePathError
from bendtrace.interject.bends.catalogue import Activation, Catalogue, NamedActivations, compiled
from bendtrace.interject.knowledge import Knowledge
from bendtrace.paths.view import Node, NodePath


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
    known by the name that torch.fx gives it, `relu`. What the latest trace has repeated is several
    activations, numbered as in a graph of torch.fx: `relu` is the first round of a loop.

    Args:
        known: the recorded runs of the method.

    Attributes:
        every: the activations, and the modules that may return some.
        by_name: those that a run has reached, by name.
        by_path: their names by node path.
        aliases: the other names of some.
    """

    def __init__(self, known: Knowledge) -> None:
        self._known = known
        self.every = Catalogue(known).activations()
        self.by_name: dict[str, Activation] = {}
        self.aliases: dict[str, Activation] = {}
        whole = {a.name: a for a in self.every if a.level == "whole" and a.shape is not None}
        self._passes = self._repeated(whole)
        for found in whole.values():
            for name, one in self._passes.get(found.name, ()):
                self.by_name[name] = one
            if found.name not in self._passes:
                wish = found.names[-1].replace(".", "_")
                self.by_name[_free(wish, self.by_name)] = found
                if found.op.startswith("call_") and found.op != "call_module":
                    self.aliases[_free(_base(found), self.aliases)] = found
        self.by_path = {found.name: name for name, found in self.by_name.items()}

    def _repeated(self, whole: dict[str, Activation]) -> dict[str, list[tuple[str, Activation]]]:
        """Return the names of what the latest run has called again, for all of one kind."""
        recordings = self._known.recordings()
        runs = self._known.run(recordings[0]).nodes.executions if recordings else []
        order = [path for path in runs if path in whole]
        counts = Counter(order)
        kinds = {_base(whole[path]) for path, count in counts.items() if count > 1}
        found: dict[str, list[tuple[str, Activation]]] = {}
        taken = dict.fromkeys(a.name for a in whole.values() if a.op == "placeholder")
        for path in order:
            activation = whole[path]
            if (base := _base(activation)) in kinds:
                name, several = _free(base, taken), found.setdefault(path, [])
                taken[name] = None
                of_pass = f"{path}:{len(several) + 1}" if counts[path] > 1 else path
                several.append((name, activation._replace(name=of_pass, names=(name,))))
        return found

    def at(self, path: str) -> list[str]:
        """Return the names of what is at a node path, in all its passes."""
        path = path.strip("'")  # as a node is described
        names = [name for name, _ in self._passes.get(path, ())]
        return names or [self.by_path.get(path, path)]

    def keys(self, item: Any, bent: list[str]) -> list[Any]:
        """Return what `reset` has to be given for a name or pattern of rounds, or what was given.

        Raises:
            InputError: something is bent in all rounds, of which some are named.
        """
        found = []
        for key in bent if isinstance(item, (str, re.Pattern)) else ():
            names = self.at(key) if key.strip("'").partition(":")[0] in self._passes else []
            hits = [name for name in names if name == item or compiled(item).fullmatch(name)]
            if hits and len(hits) < len(names):
                raise InputError(f"{', '.join(names)} are bent together: reset all of them")
            found += [key] if hits else []
        return found or [item]

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
        matched = {found.name for _, found in self.matching(pattern)}
        of_site = {p: {one.name for _, one in several} for p, several in self._passes.items()}
        whole = {path for path, passes in of_site.items() if passes <= matched}
        some = [path for path, passes in of_site.items() if path not in whole and passes & matched]
        if not some and known & of_site.keys() == whole:
            others = sorted(matched.difference(known, *of_site.values()))
            return ([pattern] if means else []) + [f"{re.escape(path)}$" for path in others]
        # Names of rounds are no names of the model, which may have others of the same spelling.
        paths = matched.difference(*(of_site[path] for path in whole)) | whole
        paths |= known - of_site.keys()
        return [self._node(path) for path in sorted(paths)]

    def _node(self, path: str) -> Node:
        for tree in self._known.trees():
            with suppress(NodePathError):
                return tree.resolve(NodePath(path), leaf=False)
        raise InputError(f"no known run has reached {path!r}: trace the method first")


def _base(found: Activation) -> str:
    """Return what torch.fx calls the first activation of a kind."""
    if found.op == "call_module":
        return found.names[-1].replace(".", "_")
    return re.sub(r"_\d+$", "", found.name.rpartition(".")[2])


def _free(wish: str, taken: Any) -> str:
    name, count = wish, 0
    while name in taken:
        count += 1
        name = f"{wish}_{count}"
    return name
