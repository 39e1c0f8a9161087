"""The context in which patches are active."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from typing import Any, Generic, Self, TypeAlias, TypeVar

from torch import Tensor

from bendtrace._checks import shown
from bendtrace.errors import InputError, NeverFiredWarning, NodePathError, PatchError
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.registry import InsertionRegistry
from bendtrace.interject.resolver import describe_where, name_of, resolve_meaning
from bendtrace.interject.restricted import OfRows, Rows
from bendtrace.interject.structure import version_of
from bendtrace.interject.where import Where, alias_of
from bendtrace.paths.candidates import NodeSelector
from bendtrace.paths.nodes import Chosen, NodePath, TreeNode
from bendtrace.paths.view import Node, Tree, find, require_leaf
from bendtrace.torch_rules.owners import modules_in

# The base of all patches, which copies what it hands them.

Target = TypeVar("Target")
# Those, and what rests on them, that a subclass with another `op` does not inherit.
_PROMISES = ("requires_clone", "observes", "self_contained", "deferrable", "effect", "after")


class Patch(Interjection, Generic[Target]):
    """Changes the value at a node. Subclasses override `op`.

    Dataclasses make good patches, and need not know where they are used: one patch works at several
    nodes, and at several parts of one.

    Attributes:
        requires_clone: whether `op` receives a copy, which it may change in place, and whether a
            tensor that `op` returns from elsewhere is copied, since the model may change it in
            place. Patches that only read, or only compute new tensors, can set it to False.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Doubled(bt.patches.Patch):
        ...     def op(self, original_output):
        ...         return original_output * 2
        >>> Doubled().op(torch.ones(2))
        tensor([2., 2.])
    """

    requires_clone: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass that overrides `op` does not inherit the promise of its parent.
        if "op" in vars(cls):
            for promise in _PROMISES:
                if promise not in vars(cls):
                    setattr(cls, promise, getattr(Patch, promise))

    def op(self, original_output: Target) -> Target | None:
        """Return the new value, of the same type; None keeps the present one."""
        return original_output

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Replace the value of a node by the result of `op`."""
        value = copy_tensors(output, Tensor.clone) if self.requires_clone else output
        version = version_of(value)
        try:
            made: Any = self.op(value)
            if version_of(value) != version and (made is None or value is output):
                self._refuse_write(value is output)
        except PatchError as error:
            if error.path:
                raise
            raise PatchError(
                f"{self.label} at {_node_text(at)}: {error}",
                path=at.path, expected=error.expected, got=error.got,
            ) from error.__cause__  # fmt: skip
        if self.requires_clone and made is not value:
            made = copy_tensors(made, Tensor.clone)
        return made

    def _refuse_write(self, is_original: bool) -> None:
        if is_original:
            raise PatchError(
                "op changed the model's own value in place: keep requires_clone=True, and op "
                "receives a copy"
            )
        raise PatchError(
            "op changed its copy of the value in place and returned nothing: return the copy"
        )

    def __repr__(self) -> str:
        shown: list[str] = []
        fields: dict[str, dataclasses.Field[Any]] = getattr(self, "__dataclass_fields__", {})
        for field in fields.values():
            value = getattr(self, field.name, None)
            if field.repr and value is not field.default:
                shown.append(f"{field.name}={described(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _node_text(at: NodePass) -> str:
    """Return the path of a node as users write it, with the pass from the second one on."""
    if not at.number:
        return repr(at.path)
    node, bar, part = at.path.partition("|")
    return repr(f"{node}:{at.number + 1}{bar}{part}")


def copy_tensors(value: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with all tensors in it copied, and the containers that hold them.

    Objects of other kinds, such as the caches of language models, are not copied.

    Args:
        value: a tensor, or tuples, lists and dicts of tensors.
        copied: copies a tensor.
    """
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, dict):
        # Some dicts have attributes besides, or keep their items there: Hugging Face's outputs.
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = copy_tensors(item, copied)
        return made
    if type(value) in (tuple, list):
        return type(value)(copy_tensors(item, copied) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(copy_tensors(item, copied) for item in value)
    return value


def described(value: Any) -> str:
    """Return a short description of a value.

    Example:
        >>> import torch
        >>> [described(value) for value in (torch.ones(2, 3), 3, [torch.ones(1)], torch.tensor(1))]
        ['Tensor(2, 3)', '3', '[Tensor(1)]', 'tensor(1)']
    """
    if isinstance(value, Tensor):
        if value.dim() == 0 and not value.requires_grad and not value.is_meta:
            return repr(value)
        return f"{type(value).__name__}({', '.join(map(str, value.shape))})"
    if type(value) in (list, tuple):
        inside = ", ".join(map(described, value[:4])) + (", ..." if len(value) > 4 else "")
        if type(value) is list:
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return getattr(value, "__qualname__", None) or repr(value)


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
        rows: the rows of the first axis that are patched; None for all.

    Attributes:
        insertions: the handles of the active insertions.

    Raises:
        InputError: the patches are not a mapping from paths to patches.
        NodePathError: a path does not lead to a single value.
    """

    def __init__(
        self, board: InsertionRegistry, known: Knowledge, patches: Patches, rows: Rows = None
    ) -> None:
        self._board = board
        self._placed: list[tuple[Where, Interjection]] = []
        self._entered: list[list[Any]] = []
        self._was_entered = True  # until it is clear that it can be
        wanted = [(where, list(_patches_of(where, given))) for where, given in _items(patches)]
        _check(board, known, [where for where, _ in wanted])
        for where, given in wanted:
            place = _parameter(known, where)
            self._placed += [
                (place, patch if rows is None else OfRows(patch, rows)) for patch in given
            ]
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        handles = self._entered.pop()
        try:
            if kind is None:
                for handle in handles:
                    handle.warn_if_never_fired(3)
        finally:  # also where warnings are errors
            self._board.remove(*handles)

    def __repr__(self) -> str:
        placed: dict[str, list[Interjection]] = {}
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


def _patches_of(where: Any, given: Any) -> Iterator[Patch[Any]]:
    """Yield the patches for a path; raise for anything else."""
    for patch in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(patch, type) and issubclass(patch, Patch):
            raise InputError(
                f"{describe_where(where)}: {patch.__name__} is a class; write {patch.__name__}(...)"
            )
        if not isinstance(patch, Patch):
            hint = "; write CustomPatch(custom_op=...)" if callable(patch) else ""
            if isinstance(patch, (Tensor, int, float)):
                hint = "; write ReplacePatch(value)"
            raise InputError(f"{describe_where(where)}: {shown(patch)} is not a patch{hint}")
        yield patch


def _parameter(known: Knowledge, where: Where) -> Where:
    """Return the node for a path of a parameter: here it selects one call, not all uses."""
    if isinstance(where, str) and (meant := resolve_meaning(where, known)) is not None:
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
        return [
            place for path in known.select(where) for place in _find_node(trees, NodePath(path))
        ]
    meant = resolve_meaning(text, known) if isinstance(where, str) else None
    if meant is not None and meant.kind == "layer":
        return meant.places
    found = _find_node(known.trees(), text)
    return found if found or meant is None else meant.places


def _find_node(trees: Iterable[Tree], path: str) -> list[tuple[TreeNode, TreeNode, Chosen]]:
    """Return the node of a path in the first run that has it."""
    for tree in trees:
        try:
            return [(tree.data, *find(tree.data, path))]
        except NodePathError:
            continue
    return []
