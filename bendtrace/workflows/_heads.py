"""Whether a value consists of heads: a run splits it into them, or has joined it from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from bendtrace.errors import InputError, SiteError
from bendtrace.history.building import Log
from bendtrace.history.entries import LayerEntry
from bendtrace.module import BendedModule
from bendtrace.paths.candidates import Candidate
from bendtrace.workflows._grids import Columns

# Each number of their results depends on all numbers of a row, and so on every head.
_MIXING = frozenset(
    {
        "__matmul__", "__rmatmul__", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d",
        "einsum", "embedding", "layer_norm", "linear", "matmul", "mm",
    }
)  # fmt: skip

_JOINING = frozenset({"cat", "concat", "concatenate", "hstack", "stack"})


def require_heads(
    model: BendedModule, columns: Columns, at: str, selects: Callable[[Candidate], bool]
) -> None:
    """Raise if the values at some nodes do not consist of the heads that a workflow separates.

    Args:
        model: the model, of which a run has to be known.
        columns: the parts of the values.
        at: "output" or "input".
        selects: whether a node is a site.

    Raises:
        SiteError: slices of such a value would mean nothing.
        InputError: no run is known, and the nodes are not projections by their parameters.
    """
    if columns.heads is None:
        return
    recordings = model._known.recordings()
    if not recordings:
        parts = [node.module for node in model._known.modules() if selects(node)]
        if at == "input" and parts and all(map(_projects, parts)):
            return
        raise InputError("heads= is compared with a run of the model: call the model once before")
    for recording in recordings:
        run = model._known.run(recording)
        nodes = [*filter(selects, model._known.nodes_of(recording).candidates.values())]
        for node in nodes:
            for entry in _values(run.log, node, at):
                if not _Heads(run.log, columns).are_in(entry, is_given=at == "input"):
                    raise SiteError(
                        f"heads={columns.heads}: the {at} of {node.path!r} is neither split into "
                        f"{columns.heads} heads nor joined from them, so its slices mean nothing. "
                        'What the heads return is what their output projection is given: at="input"'
                        " of that",
                        node.path,
                    )
        if nodes:
            return


def _projects(module: nn.Module | None) -> bool:
    return module is not None and any(p.dim() > 1 for p in module.parameters(recurse=False))


def _values(log: Log, node: Candidate, at: str) -> Iterator[LayerEntry]:
    """Yield the first value that a node is given, or that it returns."""
    known = {entry.label: entry for entry in log.entries}
    if node.module is not None:
        calls = (call for call in log.modules if call.name == node.module_path)
        labels = next(((c.inputs if at == "input" else c.outputs) for c in calls), [])
    else:
        its = next((entry for entry in log.entries if entry.node_path == node.path), None)
        labels = [] if its is None else its.parents if at == "input" else [its.label]
    yield from (known[label] for label in labels[:1] if known[label].shape is not None)


class _Heads:
    def __init__(self, log: Log, columns: Columns) -> None:
        assert columns.heads is not None
        self._known = {entry.label: entry for entry in log.entries}
        self._count: int = columns.heads
        self._axis = columns.head_axis

    def are_in(self, entry: LayerEntry, *, is_given: bool) -> bool:
        shape = entry.shape or ()
        if not -len(shape) <= self._axis < len(shape) or shape[self._axis] % self._count:
            return True  # for which there is another error
        width = shape[self._axis] // self._count
        users = [self._known[label] for label in entry.children]
        return (
            width == 1
            or (is_given and any(user.function in _MIXING - {"layer_norm"} for user in users))
            or self._meets(entry, width, is_before=False)
            or self._meets(entry, width, is_before=True)
        )

    def _meets(self, entry: LayerEntry, width: int, is_before: bool) -> bool:
        """Return whether an op before or after, up to those that mix heads, separates them."""
        least = (entry.shape or ()).count(width)
        waiting, known = [entry], {entry.label}
        while waiting:
            one = waiting.pop()
            if is_before and one.function in _MIXING:
                continue
            labels = one.parents if is_before else one.children
            others = [self._known[label] for label in labels]
            whole = one.function in _JOINING if is_before else len({o.index for o in others}) == 1
            if whole and len(others) == self._count:  # each is a head
                return True
            for other in others:
                shape = [*(other.shape or ())]
                mixes = not is_before and other.function in _MIXING
                if other.label in known or mixes or not shape:
                    continue
                if shape.count(width) > least:
                    shape.remove(width)
                    # Of queries, keys and values side by side, each third has its heads.
                    if any(size > 1 and not self._count % size for size in shape):
                        return True
                known.add(other.label)
                waiting.append(other)
        return False
