"""The costs of a run: time and memory of its ops, modules and lines, and work for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from bendtrace._trace import Trace
from bendtrace.debug.backward import BackwardPass
from bendtrace.errors import InputError
from bendtrace.log.entries import LayerEntry, Table, in_percent, in_seconds, rounded, size_text
from bendtrace.log.run_log import RunLog
from bendtrace.python.checks import required_choice, required_kind
from bendtrace.python.sites import place_text
from bendtrace.tape.tape import refs_in
from bendtrace.watch.writes import works_in_place


class CostShare(NamedTuple):
    """The cost of an op, a module or a line.

    Attributes:
        name: the layer, the module, or the place of the line with its text.
        ops: how many ops it ran.
        time: seconds that they took.
        backward: seconds that their gradients took.
        nbytes: bytes of their values.
        share: of the time of the whole run, forward and backward, from 0 to 1.
    """

    name: str
    ops: int
    time: float
    backward: float
    nbytes: int
    share: float


class Costs(Table):
    """The costs of the parts of a run, the most time first.

    Args:
        rows: the parts.
        entries: the values of the run, in its order.

    Attributes:
        peak: the most bytes of values that a replay without gradients holds at one moment, each
            from its op to the last op that reads it. Views count with their base.
        alive: the values that it holds then, the largest first.
        at: the op that runs then; None for a run without values.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     wide = x.repeat(100)
        ...     return wide.exp().sum() + x.sum()
        >>> costs = bt.workflows.cost(bt.trace(model, torch.ones(10), save="none"))
        >>> costs.peak, costs.at.label, [entry.label for entry in costs.alive]
        (8040, 'exp_1_2', ['repeat_1_1', 'exp_1_2', 'input_1_0'])
    """

    def __init__(self, rows: list[CostShare], entries: Iterable[LayerEntry]) -> None:
        formats = {"time": in_seconds, "backward": in_seconds, "nbytes": size_text}
        super().__init__(rows, {**formats, "share": in_percent})
        self.peak: int = 0
        self.alive: tuple[LayerEntry, ...] = ()
        self.at: LayerEntry | None = None
        for entry, alive in _moments(list(entries)):
            nbytes = sum(one.nbytes for one in alive)
            if nbytes > self.peak:
                by_size = sorted(alive, key=lambda one: -one.nbytes)
                self.peak, self.alive, self.at = nbytes, tuple(by_size), entry


# Functions whose results are in the memory of their first operand (torch 2.13).
_VIEWS = frozenset(
    {
        "H", "T", "__getitem__", "adjoint", "as_strided", "chunk", "detach", "diagonal", "expand",
        "expand_as", "flatten", "imag", "mH", "mT", "movedim", "narrow", "permute", "ravel", "real",
        "reshape", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split",
        "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
    }
)  # fmt: skip


def _moments(entries: list[LayerEntry]) -> Iterator[tuple[LayerEntry, list[LayerEntry]]]:
    """Yield each value of a run with all those in memory when it is computed, and itself."""
    owner: dict[str, LayerEntry] = {}
    ends: dict[str, int] = {}
    for position, entry in enumerate(entries):
        shares = entry.function in _VIEWS or entry.inplace or entry.kind == "output"
        base = owner.get(entry.parents[0]) if entry.parents and shares else None
        owner[entry.label] = base or entry
        last = len(entries) if entry.kind in ("input", "output") else position
        for label in (entry.label, *entry.parents):
            if label in owner:
                name = owner[label].label
                ends[name] = max(ends.get(name, 0), last)
    alive: list[LayerEntry] = []
    for position, entry in enumerate(entries):
        if owner[entry.label] is entry and entry.nbytes:
            alive.append(entry)
        yield entry, list(alive)
        alive = [one for one in alive if ends[one.label] > position]


_OF_RUNS = "costs are those of a run, bt.trace(model, x, save='none')"


def cost(run: Trace | BackwardPass, by: Literal["op", "module", "line"] = "op") -> Costs:
    """Return the costs of a run in time and memory, the most time first.

    Args:
        run: a trace that measured its ops, as `bt.trace(..., save="none")` does, or the
            `BackwardPass` of one, with the time of its gradients.
        by: "op" for layers, with all of their passes; "module" for modules with everything in
            them, so that shares add up to more than one; "line" for lines of code.

    Raises:
        InputError: the trace did not measure, or `by` makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> run = bt.trace(model, torch.ones(32, 64), save="none")
        >>> costs = bt.workflows.cost(run.backward(run.output.sum()), by="module")
        >>> [(row.name, row.ops, row.nbytes) for row in costs if row.name == "1"]
        [('1', 1, 8192)]
        >>> all(row.backward > 0 for row in costs)
        True
    """
    required_choice("by", by, "op", "module", "line")
    required_kind(_OF_RUNS, run, RunLog, BackwardPass)
    nodes = run.nodes if isinstance(run, BackwardPass) else ()
    trace = run.trace if isinstance(run, BackwardPass) else run
    entries = _measured_entries(trace)
    found: dict[str, list[float]] = {}
    whole = 0.0

    def add(names: Iterable[str], *numbers: float) -> None:
        nonlocal whole
        whole += numbers[1] + numbers[2]
        for name in names:
            row = found.setdefault(name, [0, 0.0, 0.0, 0])
            row[:] = [a + b for a, b in zip(row, numbers, strict=True)]

    by_label = {entry.label: entry for entry in entries}
    for entry in entries:
        if entry.kind == "op":
            is_first = not entry.element or entry.time
            add(_group_names(entry, by), bool(is_first), entry.time or 0.0, 0.0, entry.nbytes)
    for node in nodes:
        of = by_label.get(node.forward)
        names = ["outside"] if of is None or of.kind != "op" else _group_names(of, by)
        add(names, 0, 0.0, node.time or 0.0, 0)
    rows = [
        CostShare(name, int(ops), time, backward, int(nbytes), (time + backward) / (whole or 1.0))
        for name, (ops, time, backward, nbytes) in found.items()
    ]
    return Costs(sorted(rows, key=lambda row: -row.share), entries)


def _group_names(entry: LayerEntry, by: str) -> list[str]:
    if by == "op":
        return [entry.name]
    if by == "module":
        return list(dict.fromkeys(scope.rpartition(":")[0] for scope in entry.scopes)) or [
            "outside"
        ]
    source = entry.source
    if source is None:
        return ["outside"]
    return [f"{place_text(source.file, source.line)}  {source.statement}"]


def _measured_entries(run: Trace) -> list[LayerEntry]:
    """Return the entries of a run whose ops were measured."""
    entries = run._entries_without_state()
    if not any(entry.time is not None for entry in entries):
        raise InputError("this trace did not measure its ops: record it with save='none'")
    return list(entries)


class CostRow(NamedTuple):
    """The cost of one value of a run.

    Attributes:
        label: the entry of the log.
        module: the module it was computed in.
        time: seconds.
        nbytes: its size in bytes.
        source: the expression, with its line.
    """

    label: str
    module: str
    time: float
    nbytes: int
    source: str


def dead_ends(run: Trace) -> Table:
    """Return the values of a run that its output does not depend on, and no question asked about.

    Ops that write into memory that is read later count as used, as does what a run leaves in its
    model, and what its conditions tested.

    Args:
        run: a trace; with `save=`, `time` is measured.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     unused = x.exp()
        ...     unused = unused + 1
        ...     return x * 2
        >>> [row.label for row in bt.workflows.dead_ends(bt.trace(model, torch.ones(2)))]
        ['exp_1_1', 'add_1_2']
    """
    required_kind(_OF_RUNS, run, Trace)
    tape, root = run._recording.tape, run._recording.root
    left = [(change.key, change.value) for change in run._recording.changes]
    waiting = [ref.index for ref in refs_in((root.output, left))]
    waiting += [guard.index for guard in tape.guards]
    waiting += [op.index for op in tape.ops if op.writes or works_in_place(op)]
    needed: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting += [*tape.ops[index].operands, *tape.ops[index].reads.values()]
    dead = [e for e in run.entries if e.kind == "op" and e.index not in needed]
    return Table([_cost_of_entry(entry) for entry in dead], _COSTS)


def hot_path(run: Trace, by: Literal["time", "memory"] = "time") -> Table:
    """Return the chain of values that takes longest from an input to an output.

    Ops beside it may become faster without making the run faster, if ops can run side by side.

    Args:
        run: a trace that measured its ops: `bt.trace(..., save="none")` does.
        by: "time", or "memory" for the chain whose values take most bytes.

    Raises:
        InputError: the trace did not measure, or `by` makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return x.exp().sum() + x[0]
        >>> run = bt.trace(model, torch.ones(1000), save="none")
        >>> [row.label for row in bt.workflows.hot_path(run, by="memory")]
        ['input_1_0', 'exp_1_1', 'sum_1_2', 'add_1_4', 'output_1_5']
    """
    required_choice("by", by, "time", "memory")
    required_kind(_OF_RUNS, run, RunLog)
    entries = _measured_entries(run) if by == "time" else run._entries_without_state()
    longest: dict[str, tuple[float, str | None]] = {}
    for entry in entries:
        before = [label for label in entry.parents if label in longest]
        best = max(before, key=lambda label: longest[label][0], default=None)
        own = (entry.time or 0.0) if by == "time" else float(entry.nbytes)
        longest[entry.label] = own + (longest[best][0] if best is not None else 0.0), best
    outputs = [entry.label for entry in entries if entry.kind == "output"]
    step = max(outputs or longest, key=lambda label: longest[label][0], default=None)
    labels = []
    while step is not None:
        labels.append(step)
        step = longest[step][1]
    found = {entry.label: entry for entry in entries}
    return Table([_cost_of_entry(found[label]) for label in reversed(labels)], _COSTS)


class RecomputationRow(NamedTuple):
    """The memory saved, and the time lost, by computing a module again in the backward pass.

    Attributes:
        module: the call of the module.
        nbytes: bytes that its values take until then, apart from its outputs.
        time: seconds that computing them again takes.
        bytes_per_second: how much memory each second of computing saves.
    """

    module: str
    nbytes: int
    time: float
    bytes_per_second: float


def recomputation(run: Trace) -> Table:
    """Return which modules `torch.utils.checkpoint` would save most memory for, the best first.

    The bytes are an upper bound: autograd keeps those values that a derivative needs.

    Args:
        run: a trace that measured its ops: `bt.trace(..., save="none")` does.

    Raises:
        InputError: the trace did not measure.

    Example:
        >>> import torch, bendtrace as bt
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 800), torch.nn.Linear(800, 8))
        >>> model = torch.nn.Sequential(block, torch.nn.ReLU())
        >>> run = bt.trace(model, torch.ones(4, 8), save="none")
        >>> [(row.module, row.nbytes) for row in bt.workflows.recomputation(run)]
        [('0:1', 12800)]
    """
    required_kind(_OF_RUNS, run, RunLog)
    entries = [entry for entry in _measured_entries(run) if entry.kind == "op"]
    inside: dict[str, list[LayerEntry]] = {}
    for entry in entries:
        for scope in entry.scopes:
            inside.setdefault(scope, []).append(entry)
    rows = []
    for scope, its in inside.items():
        nbytes = sum(e.nbytes for e in its if scope not in e.output_of)
        time = sum(e.time or 0.0 for e in its)
        if nbytes:
            rows.append(RecomputationRow(scope, nbytes, time, nbytes / max(time, 1e-9)))
    rows.sort(key=lambda row: -row.bytes_per_second)
    return Table(rows, {"nbytes": size_text, "time": in_seconds, "bytes_per_second": rounded})


def _cost_of_entry(entry: LayerEntry) -> CostRow:
    source = entry.source
    where = "" if source is None else f"{source.text}  {place_text(source.file, source.line)}"
    return CostRow(entry.label, entry.module, entry.time or 0.0, entry.nbytes, where)


_COSTS: dict[str, Callable[[Any], str]] = {"time": in_seconds, "nbytes": size_text}
