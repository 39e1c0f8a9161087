"""Preserved state: running a model, and restoring it and the random generators."""

from __future__ import annotations

import array
import collections
import contextlib
import operator
import os
import random
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bendtrace.errors import InputError
from bendtrace.log.capture import aligned_copy
from bendtrace.python.compare import same_bits
from bendtrace.python.computations import is_computation
from bendtrace.python.internals import keeps_version
from bendtrace.tape.captured import (
    Added,
    AttributeKey,
    CaptureKind,
    EnvironmentChange,
    is_array,
    slot_names,
)
from bendtrace.tape.structure import cached_results
from bendtrace.watch.draws import RandomStates, restorer_of
from bendtrace.watch.environment import Environment
from bendtrace.watch.functions import ScriptModule
from bendtrace.watch.kinds import is_value
from bendtrace.watch.owners import module_tree, modules_in
from bendtrace.watch.reachability import namespace_of
from bendtrace.watch.scan import reason_of_hooks
from bendtrace.watch.writes import storage_of, version_of


class PreservedState:
    """Restores a model and the random generators, as often as it is asked to.

    Also a context manager, which restores them at its end.

    Args:
        model: the model that is run.
        modes: whether to restore the training mode of each module as well.
        loader: a data loader that is run through; its random generators, and those of its
            samplers, are restored as well.
        buffers: whether of the model only its buffers are restored: for one that is evaluated once,
            and may hold what uses it, such as a trainer.

    Raises:
        InputError: the model holds something that cannot be restored, such as an iterator.

    Example:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with PreservedState(model):
        ...     _ = model(torch.rand(3, 2))
        >>> int(model.num_batches_tracked)
        0
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        modes: bool = False,
        loader: Any = None,
        buffers: bool = False,
    ) -> None:
        model = getattr(model, "_bendtrace_model", model)
        modules = module_tree(model) if isinstance(model, nn.Module) else []
        self._modes = [(module, module.training) for module in modules] if modes else []
        self._state: ModelState | _Buffers = _Buffers(modules)
        if not buffers:
            self._state = ModelState(model, {}, _refusal)
            self._state.require_restorable()
        self._random = RandomStates(_generators(loader))

    def rewind(self) -> None:
        """Restore them."""
        for module, mode in self._modes:
            module.training = mode
        self._random.restore()
        self._state.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # The error of the run tells more.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(InputError):
            self.rewind()


class _Buffers:
    """The buffers of modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._rows = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]

    def undo(self) -> None:
        """Restore them."""
        for module, name, buffer, before in self._rows:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if buffer is None or before is None or buffer.is_meta:
                continue
            # Not going by versions: torch counts none for the statistics of a batch norm.
            if not same_bits(before, buffer.detach()):
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(before)


def _refusal(reasons: Iterable[str]) -> InputError:
    return InputError(
        "the model is run several times from the same state, which cannot be restored: "
        + "; ".join(dict.fromkeys(reasons))
    )


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random generators that a loader draws from, apart from the global ones."""
    holders = [loader]
    for name in ("sampler", "batch_sampler"):
        holder = getattr(loader, name, None)
        holders += [holder, getattr(holder, "sampler", None)]
    found = {id(made): made for made in (getattr(holder, "generator", None) for holder in holders)}
    return [made for made in found.values() if isinstance(made, torch.Generator)]


class _EarlierTensor(NamedTuple):
    """A tensor that existed before the run."""

    label: str
    tensor: Tensor
    copy: Tensor | None
    alias: Tensor  # which keeps its memory and its shape
    requires_grad: bool


class ModelState:
    """Everything that a run of a model can read and change, as it is now."""

    def __init__(
        self,
        function: Callable[..., Any],
        bound: dict[str, Any],
        refuse: Callable[[Iterable[str]], InputError],
    ) -> None:
        self._refuse = refuse
        model = Environment(function, bound)
        # A scan of the model does not follow the code of its forward hooks.
        tables = (items for _, name, items in model.hook_tables if name in _FORWARD)
        hooks = {id(hook): hook for items in tables for _, hook in items}
        self._environments = [model, *(Environment(hook, {}) for hook in hooks.values())]
        self._before = [_contents_of(environment) for environment in self._environments]
        self._blockers = [list(environment.blockers) for environment in self._environments]
        generators = [
            part.value
            for environment in self._environments
            for part in (*environment.generators, *environment.host_generators)
            if part.value is not None
        ]
        self.generators: list[Any] = generators
        self._drawn = [*map(restorer_of, generators)]
        self._variables = dict(os.environ)
        self._earlier: dict[int, _EarlierTensor] = {}
        self._storages: set[int] = set()
        for environment in self._environments:
            copies = not _WRITING.isdisjoint(environment.names)
            for part in environment.parts:
                if part.kind is CaptureKind.TENSOR and isinstance(part.value, Tensor):
                    is_parameter = isinstance(part.value, nn.Parameter)
                    self._hold(part.label, part.value, copies or not is_parameter)
        self.scripts: set[Any] = set()
        for name, script in modules_in(function).items():
            if isinstance(script, ScriptModule):  # a scan does not follow what it writes to
                self.scripts.add(script._c)
                for key, tensor in (*script.named_parameters(), *script.named_buffers()):
                    self._hold(f"self.{name}.{key}", tensor, True)
        self._storages.discard(0)
        self._versions = self._versions_now()
        found = {id(value): value for e in self._environments for value in _mutable_objects(e)}
        restorers = ((value, _restorer(value)) for value in found.values())
        self._restorers = [restore for _, restore in restorers if restore is not None]

    def _hold(self, label: str, tensor: Tensor, copies: bool) -> None:
        copy = aligned_copy(tensor.detach()) if copies and not tensor.is_meta else None
        self._earlier[id(tensor)] = _EarlierTensor(
            label, tensor, copy, tensor.detach(), tensor.requires_grad
        )
        self._storages.add(storage_of(tensor))

    def require_restorable(self) -> None:
        """Raise if it is known before a run that a part of it is out of reach."""
        model, *others = self._environments
        hooked = tuple(
            reason_of_hooks(label, name)
            for label, name, items in model.hook_tables
            if items and name in _FORWARD
        )
        own = [reason for reason in model.blockers if not (hooked and reason.startswith(hooked))]
        lazy = [earlier.label for earlier in self._earlier.values() if is_lazy(earlier.tensor)]
        own += [f"the run makes {label}" for label in lazy]
        own += [reason for other in others for reason in other.blockers]
        if own:
            raise self._refuse(own)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory that existed before the run."""
        return storage_of(tensor) in self._storages

    def undo(self) -> None:
        """Restore what a run has changed."""
        for restore in self._drawn:
            restore()
        if self._variables != os.environ:
            os.environ.clear()
            os.environ.update(self._variables)
        for restore in self._restorers:
            restore()
        left: list[str] = []
        rows = zip(self._environments, self._before, self._blockers, strict=True)
        for environment, before, blockers in rows:
            for reason, cache, was_empty in environment.misses():
                if was_empty:
                    cache.cache_clear()
                elif not is_computation(cache.__wrapped__) or not all(
                    map(is_value, cached_results(cache))
                ):
                    left.append(reason)
            changes = list(environment.changes())
            if changes or len(environment.blockers) > len(blockers):
                _remove_new(environment)
                for change in changes:
                    _revert(change, before.get(change.part.index, {}))
                _restore_identities(environment)
                environment.blockers[:] = blockers
                left += [f"the run changes {change.label}" for change in environment.changes()]
                left += environment.blockers[len(blockers) :]
            environment.blockers[:] = blockers
        for earlier, version in zip(self._earlier.values(), self._versions, strict=True):
            tensor = earlier.tensor
            if tensor.requires_grad and not earlier.requires_grad:
                if tensor._is_view():  # torch detaches no view in place
                    left.append(f"the run changes {earlier.label}")
                    continue
                tensor.detach_()
            if _geometry(tensor) != _geometry(earlier.alias):
                tensor.data = earlier.alias
            if earlier.copy is None:
                if version_of(earlier.tensor) != version:
                    left.append(f"the run changes {earlier.label}")
            elif not same_bits(earlier.copy, earlier.tensor.detach()):
                _restore_content(
                    earlier.tensor, earlier.copy, version_of(earlier.tensor) == version
                )
        self._versions = self._versions_now()
        if left:
            raise self._refuse(left)

    def _versions_now(self) -> list[int]:
        return [version_of(earlier.tensor) for earlier in self._earlier.values()]


# Names in code that may write to parameters: torch does not count writes to their `data`, and
# optimizers write to all. Copies of all parameters would cost too much where they are not needed.
_WRITING = frozenset({"data", "step"})
_FORWARD = ("_forward_hooks", "_forward_pre_hooks")


def _contents_of(environment: Environment) -> dict[int, dict[Any, Any]]:
    before = dict(environment.content_of)
    if environment.contents is not None:
        before |= environment.places.before(environment.contents)
    return before


def _mutable_objects(environment: Environment) -> Iterator[Any]:
    """Yield what a run can change besides tensors, and attributes and lists that a scan lists."""
    for part in environment.parts:
        if part.kind in _IN_PLACE:
            if type(part.value) is not dict:  # a namespace (see `_restore_identities`)
                yield part.value
    yield from environment.watched_objects.things()
    yield from environment.depends.cells.values()


_IN_PLACE = (
    CaptureKind.IDENTITY, CaptureKind.SET, CaptureKind.ARRAY, CaptureKind.OPEN_ARRAY,
)  # fmt: skip


def _restorer(value: Any) -> Callable[[], object] | None:
    """Return what restores the content of an object; None if nothing is known that does."""
    kind = type(value)
    is_random = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    is_numpys = kind.__module__.startswith("numpy.random")
    if is_random or (is_numpys and (hasattr(value, "_bit_generator") or hasattr(value, "capsule"))):
        return restorer_of(value)
    base: Any = next((base for base in _BASES if isinstance(value, base)), None)
    if base is not None:
        return _restorer_by(value, base)
    if isinstance(value, (list, bytearray, array.array)):
        items: Any = value[:]
        return lambda: value.__setitem__(slice(None), items)
    if is_array(value):
        content = value.copy()

        def restore_array() -> None:
            if value.shape == content.shape and value.flags.writeable:
                value[...] = content

        return restore_array
    names = ("cell_contents",) if kind is types.CellType else tuple(slot_names(kind))
    if not names:
        return None
    before = [_attribute_or_none(value, name) for name in names]

    def restore_attributes() -> None:
        for name, item in zip(names, before, strict=True):
            if _attribute_or_none(value, name) is not item:
                if item is _ABSENT:
                    object.__delattr__(value, name)
                else:
                    object.__setattr__(value, name, item)

    return restore_attributes


# Restored by the methods of the class, whatever those of a subclass do.
_BASES = (collections.OrderedDict, dict, set, collections.deque)
_ABSENT: Any = object()


def _attribute_or_none(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, ValueError):  # the latter of an empty cell
        return _ABSENT


def _restorer_by(value: Any, base: Any) -> Callable[[], None]:
    is_dict = issubclass(base, dict)

    def content() -> list[Any]:
        return [*base.keys(value), *base.values(value)] if is_dict else [*base.__iter__(value)]

    before = content()
    given = [*base.items(value)] if is_dict else before
    fill = base.extend if base is collections.deque else base.update

    def restore() -> None:
        now = content()
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            base.clear(value)
            fill(value, given)

    return restore


def _remove_new(environment: Environment) -> None:
    """Remove globals, and attributes of classes and modules, that were not there."""
    classes = {id(namespace_of(cls)): cls for cls in environment.depends.classes.values()}
    made = [(space, names & space.keys()) for space, names in environment.missing.values()]
    made += [(space, {*space} - {*before}) for space, before in environment.namespaces.values()]
    for space, names in made:
        for name in names:
            if name[:2] != "__":  # Python's own, and those that torch.compile puts there
                _put_name(space, name, _ABSENT, classes)


def _restore_identities(environment: Environment) -> None:
    """Restore globals, and attributes of classes, that are only compared."""
    classes = {id(namespace_of(cls)): cls for cls in environment.depends.classes.values()}
    for part in environment.parts:
        if part.kind is CaptureKind.IDENTITY and isinstance(
            part.value, (dict, types.MappingProxyType)
        ):
            for name, item in environment.content_of.get(part.index, {}).items():
                if part.value.get(name, _ABSENT) is not item:
                    _put_name(part.value, name, item, classes)


def _put_name(space: Any, name: Any, item: Any, classes: dict[int, type]) -> None:
    """Put something into a namespace, or remove what is there, if that is possible."""
    cls = classes.get(id(space))
    if cls is not None and item is _ABSENT:
        type.__delattr__(cls, name)
    elif cls is not None:
        type.__setattr__(cls, name, item)
    elif type(space) is dict and item is _ABSENT:
        del space[name]
    elif type(space) is dict:
        space[name] = item


def _revert(change: EnvironmentChange, before: dict[Any, Any]) -> None:
    """Restore what was there before a change."""
    if change.key is Added.ITEMS:
        for _ in change.value:
            change.part.value.pop()
    elif change.key is None:
        change.store([before[number] for number in range(len(before))])
    elif change.key in before:
        change.store(before[change.key])
    elif not isinstance(change.key, AttributeKey):
        del change.part.value[change.key]
    else:
        delattr(change.part.value, change.key.name)


def _geometry(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return storage_of(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()


def _restore_content(tensor: Tensor, content: Tensor, is_uncounted: bool) -> None:
    """Restore the content of a tensor.

    A graph that has saved the tensor must raise in its backward pass, unless torch has not counted
    the write that is undone, such as a write of a batch norm to its statistics.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if is_uncounted and not tensor.is_inference():
            with keeps_version(tensor):
                tensor.copy_(content)
        else:
            tensor.copy_(content)
