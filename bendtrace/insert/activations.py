"""Activations: the outputs of nodes in one call of a model."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.errors import InputError, NodePathError
from bendtrace.insert.bend_catalogue import NamedActivations, compile_pattern, leaves_of
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass, Passes, PassNumbers, takes
from bendtrace.insert.leaves import assemble, describe, take_apart
from bendtrace.insert.registry import InsertionRegistry
from bendtrace.insert.resolver import flat
from bendtrace.insert.where import Where
from bendtrace.log.capture import aligned_copy
from bendtrace.log.entries import counted
from bendtrace.log.path_views import Node, NodePath
from bendtrace.python.checks import required_arguments
from bendtrace.python.sites import users_level
from bendtrace.tape.tape import meta_of
from bendtrace.watch.mode_queries import unseen

if TYPE_CHECKING:
    from bendtrace.module import BendedModule

_SHOWN = 20
# Characters that occur in regular expressions, but not in node paths.
_PATTERN = re.compile(r"[\\^$*+?(){}]")
_OPTIONS = frozenset(
    {"allow_none", "args", "bended", "detach", "kwargs", "passes", "return_output"}
)


class Activations(dict[str, Any]):
    """The outputs of nodes, by node path.

    A node that ran several times has one path per pass: `relu:1`, `relu:2`. If a node's output is a
    container, the value here is the same kind of container. Any other name of a node works as a
    key, too, if it selects a single value. The keys are `NodePath`, strings that name exactly these
    nodes in every function that takes nodes, even where the same text typed by hand would be
    ambiguous. It prints as the shapes of the values; `dict(found)` prints the values.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     for _ in range(2):
        ...         x = torch.relu(x - 1)
        ...     return x
        >>> found = bt.BendedModule(model).get_activations("relu", args=(torch.tensor([3.0]),))
        >>> found
        <Activations: 2 values>
          relu:1: (1,) float32
          relu:2: (1,) float32
        >>> found["relu:2"]
        tensor([1.])
        >>> found.passes("relu")
        [tensor([2.]), tensor([1.])]
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, list[str]]) -> None:
        super().__init__(values)
        self._names = dict(names)

    def passes(self, path: str) -> list[Any]:
        """Return the outputs of a node, one for each pass that is here, in order."""
        if path in self:
            return [self[path]]
        start = f"{path}:"
        return [value for key, value in self.items() if key.startswith(start)]

    def __repr__(self) -> str:
        return activations_text(type(self).__name__, self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __missing__(self, key: Any) -> Any:
        if not isinstance(key, str):
            message = f"activations are found by name, not by {key!r}: write one of {list(self)}"
            raise NodePathError(message, str(key), tuple(self))
        matches = self._names.get(key, [])
        if len(matches) == 1:
            return self[matches[0]]
        if key.endswith(":1") and key[:-2] in self:
            return self[key[:-2]]
        several = matches or [name for name in self if name.startswith(f"{key}:")]
        if several:
            listed = ", ".join(map(repr, several))
            raise NodePathError(f"{key!r} is {listed}: name one", key, tuple(several))
        if key in self._names:
            raise NodePathError(f"this call did not reach {key!r}", key, tuple(self))
        listed = ", ".join(map(repr, self)) or "nothing"
        raise NodePathError(f"there is no {key!r} among these activations: {listed}", key)


def activations_text(title: str, values: Mapping[str, Any]) -> str:
    """Return values by name as text, with a line for each of the first twenty."""
    lines = [f"<{title}: {counted(len(values), 'value')}>"]
    lines += [f"  {key}: {_describe_item(value)}" for key, value in islice(values.items(), _SHOWN)]
    if len(values) > _SHOWN:
        lines.append(f"  ... and {len(values) - _SHOWN} more")
    return "\n".join(lines)


def as_html(values: Mapping[str, Any]) -> str:
    """Return values by name as an HTML table of their shapes."""
    rows = ((escape(key), escape(_describe_item(value))) for key, value in values.items())
    cells = "".join(f"<tr><th>{key}</th><td>{shown}</td></tr>" for key, shown in rows)
    return f"<table><caption>{counted(len(values), 'value')}</caption>{cells}</table>"


def _describe_item(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{meta_of(value).shape} {str(value.dtype).removeprefix('torch.')}"
    return describe(value)


class _OutputObserver(Interjection):
    """Keeps the outputs of nodes in some passes, as snapshots with `detach`.

    With `late`, it sees the values after other insertions at the node.
    """

    observes = True

    def __init__(self, passes: Passes, detach: bool, late: bool) -> None:
        self.late = late
        self.kept: dict[tuple[str, int], Any] = {}
        self.counts: dict[str, int] = {}
        # Of the tensors themselves gradients may be asked for.
        self.deferrable = detach
        self._passes = passes
        self._detach = detach
        self._thread = threading.get_ident()

    @property
    def label(self) -> str:
        return "get_activations"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        if threading.get_ident() != self._thread:  # of a call that other code makes
            return
        path = at.path or "output"
        self.counts[path] = max(self.counts.get(path, 0), at.number + 1)
        if self._passes.needs_total or self._passes.admits(at.number, None):
            self.kept[path, at.number] = _copy_of_output(output) if self._detach else output

    def rows(self, names_passes: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for (path, number), value in self.kept.items():
            total = self.counts[path]
            if self._passes.admits(number, total):
                key = f"{path}:{number + 1}" if names_passes or total > 1 else path
                found[NodePath(key)] = value
        return found


def _copy_of_output(value: Any) -> Any:
    if takes(value):
        return value
    shape, found = take_apart(value)
    with unseen(), torch.inference_mode(False), torch.no_grad():
        kept = [aligned_copy(item.detach()) if isinstance(item, Tensor) else item for item in found]
    return assemble(shape, kept)


def get_activations(
    model: BendedModule,
    where: Where | Sequence[Where],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: PassNumbers = None,
    detach: bool = True,
    bended: bool = True,
    return_output: bool = False,
    allow_none: bool = False,
) -> Any:
    r"""Return the outputs of nodes in one call (see `BendedModule.get_activations`).

    A text that contains one of `\ ^ $ * + ? ( ) { }` is a regular expression.
    """
    registry: InsertionRegistry = model._insertion_registry
    args, kwargs = required_arguments(args, kwargs)
    items = list(flat(where))
    if not items:
        raise InputError("say which activations to return: pass at least one node")
    admitted = Passes(passes)
    made: list[tuple[Any, _OutputObserver, Insertion]] = []
    for item in items:
        observer = _OutputObserver(admitted, detach, late=bended)
        insertion = _make_observer(registry, model._model, item, observer, allow_none)
        if passes is not None and any(target.passes is not None for target in insertion.targets):
            raise InputError(f"{item!r} names passes: give them either there or with passes=")
        made.append((item, observer, insertion))
    insertions = [insertion for _, _, insertion in made]
    others = () if bended else registry.insertions
    registry.remove(*others)
    registry.add(*insertions, *others)
    try:
        output = model(*args, **kwargs)
    finally:
        registry.remove(*insertions)
    if not allow_none:
        for insertion in insertions:
            insertion.warn_if_never_fired(users_level() + 1)
    found = _gather_activations(made)
    return (found, output) if return_output else found


def inputs_of(
    model: BendedModule, kwargs: Mapping[str, Any] | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the model's keyword arguments, some of which were passed like options.

    Raises:
        InputError: an argument of the model has the name of an option, or one was given twice.
    """
    taken = _OPTIONS & model._signature.parameters
    if taken and inputs:
        raise InputError(
            f"the model has an argument called {min(taken)}, which is also the name of an "
            f"option: pass its arguments in args=(...) and kwargs={{...}}"
        )
    _, kwargs = required_arguments((), kwargs)
    twice = inputs.keys() & kwargs.keys()
    if twice:
        raise InputError(f"{min(twice)!r} is given twice, also in kwargs=")
    return {**kwargs, **inputs}


def _gather_activations(made: Iterable[tuple[Any, _OutputObserver, Insertion]]) -> Activations:
    values: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for item, observer, insertion in made:
        named = any(target.passes is not None for target in insertion.targets)
        rows = observer.rows(named)
        values.update(rows)
        key = item._path if isinstance(item, Node) else item
        if isinstance(key, str):
            names[key] = list(rows)
    return Activations(values, names)


def _make_observer(
    registry: InsertionRegistry,
    model: Callable[..., Any],
    item: Any,
    observer: _OutputObserver,
    allow_none: bool,
) -> Insertion:
    if isinstance(item, Tensor):
        raise InputError(
            "get_activations takes nodes as positional arguments; pass the inputs of the "
            "model by keyword, or in args=(...)"
        )
    if isinstance(item, str) and _PATTERN.search(item):
        item = NamedActivations((compile_pattern(item),), leaves_of(model))
    return registry.make(item, observer, allow_none=allow_none)
