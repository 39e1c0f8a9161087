"""The context in which patches are active."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, Self, TypeAlias

from bendtrace.errors import InputError, NeverFiredWarning, NodePathError
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.patches.base import Patch
from bendtrace.interject.registry import InsertionRegistry
from bendtrace.interject.resolver import describe_where, meant_by, name_of
from bendtrace.interject.where import Where, alias_of
from bendtrace.paths.candidates import NodeSelector
from bendtrace.paths.nodes import Chosen, NodePath, TreeNode
from bendtrace.paths.view import Node, Tree, find, require_leaf
from bendtrace.torch_rules.owners import modules_in

__all__ = ["PatchContext", "Patches", "raise_all"]

# The key type of a mapping is invariant, so a union would refuse `dict[str, ...]`.
Patches: TypeAlias = Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]


class PatchContext(ContextDecorator):
    """Patches that are active while the context lasts.

    It can be entered again, even inside itself. On exit it removes only its own insertions, in
    whatever order contexts are left. At the same node, patches of an inner context run after those
    of the outer one. As a decorator it surrounds each call of a function.

    Args:
        board: the store for the insertions.
        known: the recorded runs of the model.
        patches: for each path a patch, or several in the order in which they run.

    Attributes:
        insertions: the handles of the active insertions.

    Raises:
        InputError: the patches are not a mapping from paths to patches.
        NodePathError: a path does not lead to a single value.
    """

    def __init__(self, board: InsertionRegistry, known: Knowledge, patches: Patches) -> None:
        self._board = board
        self._placed: list[tuple[Where, Patch[Any]]] = []
        self._entered: list[list[Any]] = []
        self._was_entered = True  # until it is clear that it can be
        wanted = [(where, list(_listed(where, given))) for where, given in _items(patches)]
        _check(board, known, [where for where, _ in wanted])
        for where, given in wanted:
            place = _parameter(known, where)
            self._placed += [(place, patch) for patch in given]
        self._was_entered = not self._placed

    def __del__(self) -> None:
        if not getattr(self, "_was_entered", True):
            warnings.warn(
                f"the patches {self!r} were never applied: patch(...) returns a context; enter "
                "it with `with`, or use it as a decorator",
                NeverFiredWarning,
                stacklevel=2,
            )

    def __call__(self, func: Any) -> Any:
        """Surround each call of a function with the context."""
        self._was_entered = True
        return super().__call__(func)

    @property
    def insertions(self) -> list[Any]:
        """The handles of the active insertions."""
        return [handle for handles in self._entered for handle in handles]

    def report(self) -> list[Any]:
        """Return what each of the active insertions has done so far.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
            >>> with bended.patch({"0": bt.patches.ZeroPatch()}) as patched:
            ...     _ = bended(torch.ones(2))
            ...     print(*patched.report())
            ZeroPatch at '0': called once at 1 node
              sub_0: once, changed the value once
        """
        return [handle.report() for handle in self.insertions]

    def __enter__(self) -> Self:
        self._was_entered = True
        handles = [self._board.make(where, patch) for where, patch in self._placed]
        self._board.add(*handles)
        self._entered.append(handles)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handles = self._entered.pop()
        try:
            if kind is None:
                for handle in handles:
                    handle.warn_if_never_fired(3)
        finally:  # also where warnings are errors
            self._board.remove(*handles)

    def __repr__(self) -> str:
        placed: dict[str, list[Patch[Any]]] = {}
        for where, patch in self._placed:
            said = where if isinstance(where, str) else describe_where(where).strip("'")
            placed.setdefault(said, []).append(patch)
        state = "active" if self._entered else "active within `with`"
        return f"PatchContext({placed!r}, {state})"


def _items(patches: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(patches, Mapping):
        raise InputError(
            "patches have to be a dict from node paths to patches, as in "
            f"patch({{'linear.output': ZeroPatch()}}), not a {type(patches).__name__}"
        )
    yield from patches.items()


def _listed(where: Any, given: Any) -> Iterator[Patch[Any]]:
    """Yield the patches for a path; raise for anything else."""
    for patch in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(patch, type) and issubclass(patch, Patch):
            raise InputError(
                f"{describe_where(where)}: {patch.__name__} is a class; write {patch.__name__}(...)"
            )
        if not isinstance(patch, Patch):
            raise InputError(
                f"{describe_where(where)}: {patch!r} is not a patch"
                + ("; write CustomPatch(custom_op=...)" if callable(patch) else "")
            )
        yield patch


def _parameter(known: Knowledge, where: Where) -> Where:
    """Return the node for a path of a parameter: here it selects one call, not all uses."""
    if isinstance(where, str) and (meant := meant_by(where, known)) is not None:
        for tree in known.trees() if meant.is_whole_state else ():
            try:
                return Node(tree, *find(tree.data, where))
            except NodePathError:
                continue
    return where


def _check(board: InsertionRegistry, known: Knowledge, places: list[Where]) -> None:
    """Raise, once for all, for paths that lead to nothing, or not to a single value."""
    errors: list[NodePathError] = []
    for where in places:
        try:
            _check_value(board, known, where)
        except NodePathError as error:
            errors.append(error)
    raise_all(errors)


def raise_all(errors: Sequence[NodePathError]) -> None:
    """Raise the errors of several paths as one, if there are any.

    Raises:
        NodePathError: there are.
    """
    if not errors:
        return
    first = errors[0]
    if len(errors) == 1:
        raise first
    lines = "".join(f"\n  {error}" for error in errors)
    message = f"{len(errors)} of the paths lead to no value:{lines}"
    raise NodePathError(message, first.path, first.completions)


def _check_value(board: InsertionRegistry, known: Knowledge, where: Where) -> None:
    """Raise if a path leads to nothing, or not to a single value."""
    if alias_of(where, known.model) is not None:
        board.make(where, Patch())
        return
    text = name_of(where, known)
    places = _places(known, where, text)
    for root, node, chosen in places:
        said = describe_where(where).strip("'")
        output = node.children.get("output")
        if node.kind == "graph" and output is not None and node is not root:
            node, said = output, f"{said}.output"  # a module stands for its output
        require_leaf(root, (node, chosen), said)
    board.make(where, Patch())
    has_run = any(True for _ in known.trees())
    if has_run and not places and text and text in modules_in(known.model):
        raise NodePathError(f"{text!r} is a module, not a value, and no run has called it", text)


def _places(
    known: Knowledge, where: Where, text: str | None
) -> Sequence[tuple[TreeNode, TreeNode, Chosen]]:
    """Return the selected nodes: the root of a tree, the node, and its passes."""
    if text is None:
        trees = list(known.trees())
        if not trees or (isinstance(where, NodeSelector) and where.looks_ahead):
            return []
        return [place for path in known.select(where) for place in _found(trees, NodePath(path))]
    meant = meant_by(text, known) if isinstance(where, str) else None
    if meant is not None and meant.kind == "layer":
        return meant.places
    found = _found(known.trees(), text)
    return found if found or meant is None else meant.places


def _found(trees: Iterable[Tree], path: str) -> list[tuple[TreeNode, TreeNode, Chosen]]:
    """Return the node of a path in the first run that has it."""
    for tree in trees:
        try:
            return [(tree.data, *find(tree.data, path))]
        except NodePathError:
            continue
    return []
