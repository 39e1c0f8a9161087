"""The patches that zero, add to, replace, record or compute values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError, NeverFiredWarning, NodePathError, PatchError
from bendtrace.insert.interjection import (
    Effect,
    Inputs,
    Interjection,
    NodePass,
    can_cast,
    depends_on,
    effect_of_value,
    number_operand,
    takes,
)
from bendtrace.insert.leaves import write_count
from bendtrace.insert.registry import InsertionRegistry
from bendtrace.insert.resolver import Knowledge, describe_where, node_name_of, resolve_meaning
from bendtrace.insert.where import OfRows, Rows, Where, alias_of
from bendtrace.log.nodes import Chosen, NodePath, TreeNode
from bendtrace.log.path_views import Node, NodeSelector, Tree, find_node, require_leaf
from bendtrace.python.checks import shown
from bendtrace.tape.tape import TensorMeta
from bendtrace.watch.owners import modules_in

if TYPE_CHECKING:
    from bendtrace.module import BendedModule

# The base of all patches, which copies the values that it hands them.

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
        version = write_count(value)
        try:
            made: Any = self.op(value)
            if write_count(value) != version and (made is None or value is output):
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
        for each in fields.values():
            value = getattr(self, each.name, None)
            if each.repr and value is not each.default:
                shown.append(f"{each.name}={described(value)}")
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


# The context in which patches are active.

# The key type of a mapping is invariant, so a union would refuse `dict[str, ...]`.
Patches: TypeAlias = Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]


class PatchContext(ContextDecorator):
    """Patches that are active while the context lasts.

    It can be entered again, even inside itself. On exit it removes only its own insertions, in
    whatever order contexts are left. At the same node, patches of an inner context run after those
    of the outer one. As a decorator it surrounds each call of a function.

    Args:
        registry: the store for the insertions.
        knowledge: the recorded runs of the model.
        patches: for each path a patch, or several in the order in which they run.
        rows: the rows of the first axis that are patched; None for all.

    Attributes:
        insertions: the handles of the active insertions.

    Raises:
        InputError: the patches are not a mapping from paths to patches.
        NodePathError: a path does not lead to a single value.
    """

    def __init__(
        self, registry: InsertionRegistry, knowledge: Knowledge, patches: Patches, rows: Rows = None
    ) -> None:
        self._insertion_registry = registry
        self._placed: list[tuple[Where, Interjection]] = []
        self._entered: list[list[Any]] = []
        self._was_entered = True  # until it is clear that it can be
        wanted = [
            (where, list(_patches_of(where, given))) for where, given in _patch_items(patches)
        ]
        _check_paths(registry, knowledge, [where for where, _ in wanted])
        for where, given in wanted:
            place = _parameter_call(knowledge, where)
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
        handles = [self._insertion_registry.make(where, patch) for where, patch in self._placed]
        self._insertion_registry.add(*handles)
        self._entered.append(handles)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        handles = self._entered.pop()
        try:
            if kind is None:
                for handle in handles:
                    handle.warn_if_never_fired(3)
        finally:  # also where warnings are errors
            self._insertion_registry.remove(*handles)

    def __repr__(self) -> str:
        placed: dict[str, list[Interjection]] = {}
        for where, patch in self._placed:
            place = where if isinstance(where, str) else describe_where(where).strip("'")
            placed.setdefault(place, []).append(patch)
        state = "active" if self._entered else "active within `with`"
        return f"PatchContext({placed!r}, {state})"


def _patch_items(patches: Any) -> Iterator[tuple[Any, Any]]:
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


def _parameter_call(knowledge: Knowledge, where: Where) -> Where:
    """Return the node for a path of a parameter: here it selects one call, not all uses."""
    if isinstance(where, str) and (resolution := resolve_meaning(where, knowledge)) is not None:
        for tree in knowledge.trees() if resolution.is_whole_state else ():
            try:
                return Node(tree, *find_node(tree.data, where))
            except NodePathError:
                continue
    return where


def _check_paths(registry: InsertionRegistry, knowledge: Knowledge, places: list[Where]) -> None:
    """Raise, once for all, for paths that lead to nothing, or not to a single value."""
    errors: list[NodePathError] = []
    for where in places:
        try:
            _check_value(registry, knowledge, where)
        except NodePathError as error:
            errors.append(error)
    raise_all(errors)


def raise_all(errors: Sequence[NodePathError]) -> None:
    """Raise the errors of several paths as one `NodePathError`, if there are any."""
    if not errors:
        return
    first = errors[0]
    if len(errors) == 1:
        raise first
    lines = "".join(f"\n  {error}" for error in errors)
    message = f"{len(errors)} of the paths lead to no value:{lines}"
    raise NodePathError(message, first.path, first.completions)


def _check_value(registry: InsertionRegistry, knowledge: Knowledge, where: Where) -> None:
    """Raise if a path leads to nothing, or not to a single value."""
    if alias_of(where, knowledge.model) is not None:
        registry.make(where, Patch())
        return
    text = node_name_of(where, knowledge)
    places = _selected_nodes(knowledge, where, text)
    for root, node, chosen in places:
        name = describe_where(where).strip("'")
        output = node.children.get("output")
        if node.kind == "graph" and output is not None and node is not root:
            node, name = output, f"{name}.output"  # a module stands for its output
        require_leaf(root, (node, chosen), name)
    registry.make(where, Patch())
    has_run = any(True for _ in knowledge.trees())
    if has_run and not places and text and text in modules_in(knowledge.model):
        raise NodePathError(f"{text!r} is a module, not a value, and no run has called it", text)


def _selected_nodes(
    knowledge: Knowledge, where: Where, text: str | None
) -> Sequence[tuple[TreeNode, TreeNode, Chosen]]:
    """Return the selected nodes: the root of a tree, the node, and its passes."""
    if text is None:
        trees = list(knowledge.trees())
        if not trees or (isinstance(where, NodeSelector) and where.looks_ahead):
            return []
        return [
            place for path in knowledge.select(where) for place in _find_node(trees, NodePath(path))
        ]
    resolution = resolve_meaning(text, knowledge) if isinstance(where, str) else None
    if resolution is not None and resolution.kind == "layer":
        return resolution.places
    found = _find_node(knowledge.trees(), text)
    return found if found or resolution is None else resolution.places


def _find_node(trees: Iterable[Tree], path: str) -> list[tuple[TreeNode, TreeNode, Chosen]]:
    """Return the node of a path in the first run that has it."""
    for tree in trees:
        try:
            return [(tree.data, *find_node(tree.data, path))]
        except NodePathError:
            continue
    return []


# The part of a value that a patch changes.

Number = bool | int | float | complex
IndexItem = int | slice | EllipsisType | Tensor | list[Any] | tuple[Any, ...] | None
# Valid indices of a tensor. A list counts as a tuple if it contains more than numbers, and None as
# the whole tensor.
Index = IndexItem | tuple[IndexItem, ...] | list[IndexItem]


def check_index(index: Any) -> None:
    """Raise an `InputError` if something is not a valid index of a tensor."""
    items = index if isinstance(index, (list, tuple)) else (index,)
    for item in items:
        if isinstance(item, (list, tuple)):
            check_index(item)
        elif isinstance(item, Tensor):
            if item.is_floating_point() or item.is_complex():
                raise InputError(
                    f"slice={described(index)}: a tensor of {item.dtype} is not a valid index"
                )
        elif item is not None and item is not ... and not _indexes(item):
            raise InputError(
                f"slice={described(index)}: {item!r} is not a valid index of a tensor; write "
                "x[:, 2] as slice=(slice(None), 2)"
            )


def is_constant_index(index: Any) -> bool:
    """Return whether an index is made of plain numbers alone, which its text shows in full."""
    if isinstance(index, (list, tuple)):
        return all(map(is_constant_index, index))
    if type(index) is slice:
        return all(map(is_constant_index, (index.start, index.stop, index.step)))
    return index is None or index is ... or type(index) in (bool, int, range)


def _indexes(item: Any) -> bool:
    if isinstance(item, (slice, range)) or type(item).__module__ == "numpy":
        return True
    try:
        operator.index(item)
    except TypeError:
        return False
    return True


def check_value(value: Any) -> None:
    """Raise an `InputError` if something can neither be added to a tensor nor replace it."""
    if not isinstance(value, (Tensor, bool, int, float, complex)):
        raise InputError(
            f"value has to be a tensor or a number, not {described(value)} ({type(value).__name__})"
        )


def _check_number(original: Any, value: Any) -> None:
    """Raise a `PatchError` if a value is not a number, or is to be replaced by a tensor."""
    if not isinstance(original, (bool, int, float, complex)):
        raise PatchError(
            f"the value is {described(original)} ({type(original).__name__}), neither a tensor "
            "nor a number: give the path of a part of it, or use a CustomPatch",
            expected="Tensor", got=type(original).__name__,
        )  # fmt: skip
    if isinstance(value, Tensor):
        raise PatchError(
            f"the value is the number {original!r}, which {described(value)} cannot replace",
            expected=type(original).__name__, got=described(value),
        )  # fmt: skip


def edit_part(original: Any, index: Index, edit: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a tensor with one part changed: `edit` returns the new for the present one.

    Raise `PatchError` if the part does not exist, or the new part does not fit.
    """
    new = edit(_part_of(original, index))
    made = original.clone()
    made[_key(index)] = new
    return made


def add_to_part(original: Any, index: Index, value: Any) -> Any:
    """Return a tensor or a number with something added to a part of a copy; None for all of it.

    Raise `PatchError` if the part does not exist, or the value cannot hold the sum.
    """
    if index is not None:
        return edit_part(original, index, lambda part: add_to_part(part, None, value))
    if not isinstance(original, Tensor):
        _check_number(original, value)
        return _as_number(original, original + value, value)
    if isinstance(value, Tensor):
        _check_shape(original, value)
        value = value.to(original.device)
    made = original + value
    if made.dtype is not original.dtype:
        if not can_cast(made.dtype, original.dtype):
            raise _unfit_type(original, value)
        made = made.to(original.dtype)
    return made if made.shape == original.shape else made.reshape(original.shape)


def replace_part(original: Any, index: Index, value: Any) -> Any:
    """Return a tensor or a number with a part replaced in a copy; None for all of it.

    Raise `PatchError` if the part does not exist, or cannot hold the value.
    """
    if index is None and not isinstance(original, Tensor):
        _check_number(original, value)
        return _as_number(original, value, value)
    part = original if index is None else _part_of(original, index)
    if isinstance(value, Tensor):
        _check_shape(part, value)
        fits = can_cast(value.dtype, part.dtype)
        value = value.to(part.device)
    else:
        fits = _holds(part.dtype, value)
    if not fits:
        raise _unfit_type(part, value)
    # Not a new tensor, even if nothing of the old one is left: as in graphpatch, earlier nodes get
    # zero gradients, not none.
    made = original.clone()
    made[... if index is None else _key(index)] = value
    return made


def _part_of(original: Any, index: Index) -> Tensor:
    """Return a part of a tensor. Raise `PatchError` if the part does not exist."""
    if not isinstance(original, Tensor):
        raise PatchError(
            f"only tensors can be sliced, and the value is {described(original)}",
            expected="Tensor", got=described(original),
        )  # fmt: skip
    try:
        return original[_key(index)]
    except (IndexError, TypeError, ValueError) as error:
        raise PatchError(
            f"{_of_shape(original.shape)} has no part [{_bracket_text(index)}]: "
            f"{_first_line_of_error(error)}",
            got=_of_shape(original.shape),
        ) from error


def _key(index: Index) -> Any:
    """Return the index for the brackets.

    torch once took lists of more than numbers for tuples, and graphpatch's documents say so.
    """
    if isinstance(index, (list, tuple)):
        items = [list(item) if isinstance(item, range) else item for item in index]
        if isinstance(index, tuple) or not all(_is_plain_index(item) for item in items):
            return tuple(items)
        return items
    return list(index) if isinstance(index, range) else index


def _is_plain_index(item: Any) -> bool:
    return isinstance(item, int) or type(item).__module__ == "numpy"


def _check_shape(part: Tensor, value: Tensor) -> None:
    """Raise if a value does not broadcast to the shape of its target."""
    sizes = list(value.shape)
    while len(sizes) > part.dim() and sizes[0] == 1:
        del sizes[0]  # as in `part[...] = value`
    wanted = part.shape[part.dim() - len(sizes) :]
    if len(sizes) > part.dim() or any(
        size not in (1, expected) for size, expected in zip(sizes, wanted, strict=True)
    ):
        raise PatchError(
            f"the value has to be {_of_shape(part.shape)}, or broadcast to that, but is "
            f"{_of_shape(value.shape)}",
            expected=_of_shape(part.shape), got=_of_shape(value.shape),
        )  # fmt: skip


def _unfit_type(part: Tensor, value: Any) -> PatchError:
    got = str(value.dtype) if isinstance(value, Tensor) else f"{value!r} ({type(value).__name__})"
    return PatchError(
        f"the node holds {part.dtype}, which cannot hold {got}", expected=str(part.dtype), got=got
    )


def _holds(dtype: torch.dtype, number: Number) -> bool:
    """Return whether tensors of a dtype can hold a number, apart from rounding."""
    if isinstance(number, complex):
        return dtype.is_complex
    if dtype.is_complex or dtype.is_floating_point:
        return True
    if dtype is torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max and number == int(number)


def _as_number(original: Number, made: Number, value: Number) -> Number:
    """Return a number converted to the type of another, if possible."""
    kind = next(kind for kind in (bool, int, float, complex) if isinstance(original, kind))
    fits = {
        bool: made in (0, 1),
        int: isinstance(made, int) or (isinstance(made, float) and made.is_integer()),
        float: not isinstance(made, complex),
        complex: True,
    }
    if not fits[kind]:
        raise PatchError(
            f"the node holds {kind.__name__}, which cannot hold {made!r} (the value is {value!r})",
            expected=kind.__name__, got=repr(made),
        )  # fmt: skip
    return kind(made)  # type: ignore[arg-type]  # complex ones were refused


def _of_shape(shape: torch.Size) -> str:
    return f"Tensor({', '.join(map(str, shape))})"


def _bracket_text(index: Index) -> str:
    """Return an index as users write it in brackets."""
    items = index if isinstance(index, tuple) else (index,)
    return ", ".join(_item_text(item) for item in items)


def _item_text(item: Any) -> str:
    if not isinstance(item, slice):
        return "..." if item is ... else described(item)
    parts = ["" if part is None else str(part) for part in (item.start, item.stop, item.step)]
    return ":".join(parts[:2] + ([parts[2]] if parts[2] else []))


def _first_line_of_error(error: Exception) -> str:
    return str(error).partition("\n")[0]


Patchable = Tensor | Number


class _PartPatch(Patch[Patchable]):
    """A patch that edits a value, or the part of it at an index, with another value."""

    value: Any
    slice: Index
    edit: ClassVar[Callable[[Any, Any, Any], Any]]
    requires_clone: bool = False
    self_contained: bool = True

    def __post_init__(self) -> None:
        check_value(self.value)
        check_index(self.slice)

    def op(self, original_output: Patchable) -> Patchable:
        """Return the edited value."""
        made: Patchable = type(self).edit(original_output, self.slice, self.value)
        return made

    @depends_on("value", "slice")
    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _edit_effect(type(self).edit, self.slice, self.value, like)


@dataclass(kw_only=True, eq=False, repr=False)
class ZeroPatch(_PartPatch):
    """Sets a value, or a part of it, to zero.

    Earlier nodes get zero gradients through this node.

    Args:
        slice: the part: the index that one would write in brackets after the tensor, with `slice(2,
            4)` for `2:4`; the whole value if None.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.patches.ZeroPatch(slice=(slice(None), 0)).op(torch.ones(2, 3))
        tensor([[0., 1., 1.],
                [0., 1., 1.]])
    """

    slice: Index = None
    value: ClassVar[int] = 0  # type: ignore[misc]  # of the others, each has its own
    edit: ClassVar[Callable[[Any, Any, Any], Any]] = staticmethod(replace_part)


@dataclass(kw_only=True, eq=False, repr=False)
class AddPatch(_PartPatch):
    """Adds to a value, or to a part of it.

    Args:
        value: the summand: a number, or a tensor that broadcasts to the shape of the part, moved to
            its device and rounded to its dtype. It receives its gradient, if it requires one.
        slice: the part, as for `ZeroPatch`.

    Example:
        >>> import torch, bendtrace as bt
        >>> patch = bt.patches.AddPatch(value=torch.tensor([1., 2.]), slice=(0, slice(1, None)))
        >>> patch.op(torch.ones(2, 3))
        tensor([[1., 2., 3.],
                [1., 1., 1.]])
    """

    value: Patchable = field(kw_only=False)
    slice: Index = None
    edit: ClassVar[Callable[[Any, Any, Any], Any]] = staticmethod(add_to_part)


@dataclass(kw_only=True, eq=False, repr=False)
class ReplacePatch(_PartPatch):
    """Replaces a value, or a part of it.

    Earlier nodes get zero gradients through the replaced part.

    Args:
        value: a number, or a tensor that broadcasts to the shape of the part, moved to its device
            and rounded to its dtype. It receives its gradient, if it requires one. It is copied, so
            that the model cannot change it.
        slice: the part, as for `ZeroPatch`.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.patches.ReplacePatch(value=3, slice=0).op(torch.ones(2, 3))
        tensor([[3., 3., 3.],
                [1., 1., 1.]])
    """

    value: Patchable = field(kw_only=False)
    slice: Index = None
    edit: ClassVar[Callable[[Any, Any, Any], Any]] = staticmethod(replace_part)


def _edit_effect(
    edit: Callable[[Any, Any, Any], Any], index: Index, value: Any, like: TensorMeta
) -> Effect | str:
    if not is_constant_index(index):
        return "its slice has tensors in it"
    if type(value) is float:
        return effect_of_value(
            lambda tensor, value: _with_number(edit, tensor, index, value),
            value, like, edit, repr(index),
        )  # fmt: skip
    return effect_of_value(
        lambda tensor, value: edit(tensor, index, value), value, like, edit, repr(index)
    )


def _with_number(edit: Any, tensor: Tensor, index: Index, value: Any) -> Any:
    if edit is not add_to_part:
        return edit(tensor, index, value)
    if index is None:
        return add_to_part(tensor, None, number_operand(value, tensor))
    return edit_part(
        tensor, index, lambda part: add_to_part(part, None, number_operand(value, part))
    )


@dataclass(kw_only=True, eq=False, repr=False)
class CustomPatch(Patch[Any]):
    """Replaces a value by the result of a function.

    The function is called in each run, with that run's value. It receives a copy, which it may
    change in place; if it returns None, the value stays.

    Args:
        custom_op: the function: `custom_op(value)` returns the new value.
        slice: the part of the value to replace, as for `ZeroPatch`.
        requires_clone: whether to pass a copy, and to copy the result; False saves that for
            functions that only read or compute new tensors.

    Example:
        >>> import torch, bendtrace as bt
        >>> patch = bt.patches.CustomPatch(custom_op=lambda x: x.flip(0), slice=slice(1, None))
        >>> patch.op(torch.arange(4))
        tensor([0, 3, 2, 1])
    """

    custom_op: Callable[[Any], Any] = field(kw_only=False)
    slice: Index = None
    requires_clone: bool = True

    def __post_init__(self) -> None:
        if not callable(self.custom_op):
            raise InputError(
                f"custom_op has to be a function of the value, not {described(self.custom_op)}"
            )
        check_index(self.slice)

    def op(self, original_output: Any) -> Any:
        """Return the result of the function."""
        if self.slice is None:
            return self.custom_op(original_output)
        return edit_part(original_output, self.slice, self._part)

    def _part(self, part: Tensor) -> Tensor:
        """Return the result of the function for a part, which it may have changed in place."""
        given = part.clone()
        version = write_count(given)
        made = self.custom_op(given)
        if made is None:
            if write_count(given) != version:
                raise PatchError("op changed its part of the value in place and returned nothing")
            return part
        if not isinstance(made, (Tensor, bool, int, float, complex)):
            raise PatchError(
                f"op returned {described(made)} ({type(made).__name__}) for a part of a tensor",
                expected=described(part), got=described(made),
            )  # fmt: skip
        result: Tensor = replace_part(part, None, made)
        return result


class _KeepingPatch(Patch[Any]):
    """Keeps values of a node, and leaves them as they are."""

    detach: bool
    requires_clone = False
    observes = True
    self_contained = True

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """Return whether it can look after the run, as it can if its copies need no gradients."""
        return self.detach

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Keep a copy of the value of a node, or the value itself where nobody else has it."""
        if not takes(output):
            return self.op(output)
        self._keep(output)
        return output

    def op(self, original_output: Any) -> Any:
        """Keep a copy of the value."""
        self._keep(copy_tensors(original_output, _detach_copy if self.detach else Tensor.clone))
        return original_output

    def _keep(self, value: Any) -> None:
        raise NotImplementedError


@dataclass(kw_only=True, eq=False, repr=False)
class ProbePatch(_KeepingPatch):
    """Keeps the latest value of a node.

    Args:
        detach: whether to detach it from the autograd graph. If not, a loss on the activation
            supports backward, and the run's memory is kept as long as the activation.

    Attributes:
        activation: a copy of the latest value; None before the first.

    Example:
        >>> import torch, bendtrace as bt
        >>> probe = bt.patches.ProbePatch()
        >>> _ = probe.op(torch.ones(2))
        >>> probe.activation
        tensor([1., 1.])
    """

    activation: Any = field(default=None, init=False)
    detach: bool = True

    def _keep(self, value: Any) -> None:
        self.activation = value


@dataclass(kw_only=True, eq=False, repr=False)
class RecordPatch(_KeepingPatch):
    """Keeps all values of a node, over its passes and over calls of the model.

    Args:
        activations: an existing list to append to.
        detach: whether to detach them from the autograd graph.

    Attributes:
        activations: copies of the values, in order.

    Example:
        >>> import torch, bendtrace as bt
        >>> record = bt.patches.RecordPatch()
        >>> for value in (1.0, 2.0):
        ...     _ = record.op(torch.tensor(value))
        >>> record
        RecordPatch(activations=[tensor(1.), tensor(2.)])
    """

    activations: list[Any] = field(default_factory=list)
    detach: bool = True

    def _keep(self, value: Any) -> None:
        self.activations.append(value)


def _detach_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


# Patches of the numbers that modules have as attributes.


@contextlib.contextmanager
def patched_numbers(numbers: Mapping[tuple[nn.Module, str], Any], others: Any) -> Iterator[None]:
    """Within it, numbers are patched, by module and attribute, and another context is entered.

    Raise `InputError` if something is not a patch, or makes something else than a number.
    """
    new = {}
    for (owner, name), given in numbers.items():
        value = getattr(owner, name)
        for patch in [given] if isinstance(given, Patch) else given:
            if not isinstance(patch, Patch):
                raise InputError(f"the value at {name!r} is not a patch: {patch!r}")
            made = patch.op(value)
            value = value if made is None else made
        if type(value) not in (bool, int, float):
            raise InputError(f"the number at {name!r} can only become a number, not {value!r}")
        new[owner, name] = value
    missing = object()
    before = {(owner, name): vars(owner).get(name, missing) for owner, name in new}
    try:
        for (owner, name), value in new.items():
            setattr(owner, name, value)
        with others:
            yield
    finally:
        for (owner, name), old in before.items():
            if old is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def patch(bended: BendedModule[Any], /, patches: Patches, *, rows: Rows = None) -> PatchContext:
    """Return a context in which patches apply at nodes; after it the model is as before.

    Args:
        bended: the model.
        patches: for each node one patch, or several in the order in which they apply. Nodes are
            given by path (`layers_0.mlp.relu`, `linear.input`, `linear.weight`,
            `output|sub_0`), as tree nodes, or in any other way that `interject` accepts.
        rows: the rows of the batch to patch: an index, several, or a slice; None for all. The
            patches receive these rows only. So several examples of one batch can each have
            patches.

    Raises:
        NodePathError: a node does not exist, or does not hold a single value.
        InputError: a value in `patches` is not a patch, or `rows` selects no rows.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu().sum())
        >>> bended(torch.ones(2))
        tensor(2.)
        >>> with bended.patch({"relu": bt.patches.AddPatch(value=1, slice=0)}):
        ...     bended(torch.ones(2))
        tensor(3.)
    """
    return PatchContext(bended._insertion_registry, bended._knowledge, patches, rows)
