"""Names of nodes: identifiers that stay put from run to run."""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Hashable
from dataclasses import dataclass, field
from keyword import iskeyword
from types import CodeType

from bendtrace.recording.sites import Site

__all__ = ["OUTPUT", "Registry", "identifier"]

OUTPUT = "output"  # no other node of a graph may take this name


def identifier(text: str) -> str:
    """Return a name for `text` that can be typed after a dot.

    Leading underscores go, since the views of nodes keep such names for themselves, and since
    completion hides them. What would begin with a digit becomes `sub_`, as for parts of tuples.

    Example:
        >>> [identifier(text) for text in ("layers.8", "0", "_conv", "class", "my key")]
        ['layers_8', 'sub_0', 'conv', 'class_', 'my_key']
    """
    text = unicodedata.normalize("NFKC", text)  # as Python does to names in source
    name = re.sub(r"\W+", "_", text).lstrip("_")
    if text.rstrip("])'\"") != text:
        name = name.rstrip("_")
    if not name:
        return "op"
    if not name.isidentifier():
        name = f"sub_{name}"
    if not name.isidentifier():
        name = "sub_" + re.sub(r"[^0-9A-Za-z_]", "_", name)
    return f"{name}_" if iskeyword(name) else name


@dataclass
class _Names:
    """The names below one node."""

    by_key: dict[Hashable, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: {OUTPUT})
    counts: dict[str, int] = field(default_factory=dict)
    has_output: bool = False


class Registry:
    """Which node has which name, in all traces that share the registry.

    A node is known by where it happens: the node around it, and the chain of instructions that
    led to it. What comes first gets the plain name, the next `linear_1`, and so on. Nodes that a
    second path has in common with the first keep their names, whatever else is on that path.

    Attributes:
        lock: to be held while names are given.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._names: dict[str, _Names] = {}
        # Code objects go by identity because hashing one is slow; they are kept alive, so that
        # an identity is never used twice.
        self._sites: dict[tuple[int, ...], int] = {}
        self._codes: dict[int, CodeType] = {}

    def site(self, site: Site | None) -> int:
        """Return the number of a site: the same in every trace; 0 for none."""
        if site is None:
            return 0
        key = site.identity
        known = self._sites.get(key)
        if known is None:
            known = self._sites[key] = len(self._sites) + 1
            self._codes.update((id(code), code) for code, _ in site.chain)
        return known

    def name(self, parent: str, key: Hashable, base: str) -> str:
        """Return the name of a node.

        Args:
            parent: path of the node around it.
            key: what makes it this node and not another one there.
            base: what to call it, if the name is free.
        """
        names = self._names.get(parent)
        if names is None:
            names = self._names[parent] = _Names()
        name = names.by_key.get(key)
        if name is not None:
            return name
        name = base
        while name in names.taken:
            names.counts[base] = names.counts.get(base, 0) + 1
            name = f"{base}_{names.counts[base]}"
        names.taken.add(name)
        names.by_key[key] = name
        return name

    def output(self, parent: str, key: Hashable) -> str:
        """Return the name of what a graph gives out: `output`, unless that has another form."""
        names = self._names.setdefault(parent, _Names())
        if not names.has_output:
            names.has_output = True
            names.by_key[key] = OUTPUT
        return self.name(parent, key, OUTPUT)
