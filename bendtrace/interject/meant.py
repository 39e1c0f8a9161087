"""What a string names in a model: the same thing in all its runs, or the string is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torch import nn

from bendtrace.errors import NodePathError
from bendtrace.history.names import Meaning, Names, ambiguity
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.text import Chosen
from bendtrace.paths.view import is_path_only
from bendtrace.recording.owners import module_of

__all__ = ["Meant", "Runs", "meant_by"]


class Runs(Protocol):
    """What is known of a model."""

    @property
    def model(self) -> Callable[..., Any]:
        """The model."""

    def names(self) -> Iterable[Names]:
        """The names of the runs, those without insertions first."""


@dataclass(frozen=True)
class Meant:
    """What a string names.

    Attributes:
        kind: what it is.
        name: for modules and states, the qualified name.
        module: for modules, the module.
        places: nodes of runs: the root of the tree, the node, and its passes; None for all.
        is_owned: whether it is one of the model's own modules, parameters or buffers.
    """

    kind: Literal["state", "module", "node", "layer"]
    name: str = ""
    module: nn.Module | None = None
    places: tuple[tuple[TreeNode, TreeNode, Chosen], ...] = ()
    is_owned: bool = False

    @property
    def is_whole_state(self) -> bool:
        """Whether it is a parameter or buffer wherever it is used."""
        return self.is_owned and self.kind == "state"

    def paths(self) -> list[str]:
        """Return the paths of the nodes, each with its pass if it is one of several."""
        found = []
        for _, node, chosen in self.places:
            one = chosen is not None and len(chosen) == 1
            found.append(f"{node.path}:{chosen[0] + 1}" if one and chosen else node.path)
        return list(dict.fromkeys(found))


def meant_by(text: str, known: Runs) -> Meant | None:
    """Return what a string names in a model; None if nothing by it is known.

    Raises:
        NodePathError: it names several things.
    """
    found: list[tuple[Names, Meaning]] = []
    for names in known.names():
        meanings = names.meanings(text)
        if len(meanings) > 1:
            raise _refusal(text, [(names, meaning) for meaning in meanings])
        found += [(names, meaning) for meaning in meanings]
    owned = None if is_path_only(text) else _owned(text, known)
    if owned is not None:
        if any(meaning.is_owned for _, meaning in found):
            found = [row for row in found if row[1].kind == "layer" or _is_of(owned, *row)]
        others = [row for row in found if not _is_of(owned, *row)]
        if others:
            mine = Meaning(owned.kind, text, (), frozenset(), owned.name)
            raise _refusal(text, [(others[0][0], mine), others[0]], owned)
        return replace(owned, places=tuple(_places(found)))
    if any(meaning.is_exact for _, meaning in found):
        # Another run may have a node that only answers to the path, as `fc_1` does to `fc`.
        found = [row for row in found if not row[1].is_alias]
    by_paths: dict[Any, tuple[Names, Meaning]] = {}
    for names, meaning in found:
        by_paths.setdefault("alias" if meaning.is_alias else meaning.paths, (names, meaning))
    chosen = list(by_paths.values())
    if len(chosen) > 1:
        raise _refusal(text, chosen)
    return Meant(chosen[0][1].kind, text, None, tuple(_places(chosen))) if chosen else None


def _owned(text: str, known: Runs) -> Meant | None:
    """Return the parameter, buffer or module of a name, which can have underscores for dots."""
    model = module_of(known.model)
    if model is None or not text:
        return None
    if text in dict(states_of(model)):
        return Meant("state", text, is_owned=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [text] if text in modules else [n for n in modules if n.replace(".", "_") == text]
    return Meant("module", named[0], modules[named[0]], is_owned=True) if len(named) == 1 else None


def _is_of(owned: Meant, names: Names, meaning: Meaning) -> bool:
    """Whether what a string names in a run is the module or state that it is the name of."""
    if meaning.kind == owned.kind:
        return True
    if owned.kind == "state":
        return all(node.role == "state" for node, _ in meaning.places)
    calls = (mine for mine in names.meanings(owned.name) if mine.kind == owned.kind)
    return any(mine.covers(meaning) for mine in calls)


def _places(found: Iterable[tuple[Names, Meaning]]) -> Iterator[tuple[TreeNode, TreeNode, Chosen]]:
    seen = set()
    for names, meaning in found:
        for node, chosen in meaning.places:
            if node.path not in seen:
                seen.add(node.path)
                yield names.tree.data, node, chosen


def _refusal(
    text: str, meanings: list[tuple[Names, Meaning]], owned: Meant | None = None
) -> NodePathError:
    message, clear = ambiguity(text, meanings)
    if owned is not None and owned.module is not None:  # which no run has called
        message += ", or give the module itself"
    return NodePathError(message, text, clear)


def states_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the parameters and buffers of a model, under all their names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
