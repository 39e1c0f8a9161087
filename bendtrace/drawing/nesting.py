"""What there is to draw, as items in boxes: the values of a run in the calls of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from bendtrace.flow import FlowStep, IndexFlowStep, LogicalFlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry

if TYPE_CHECKING:
    from bendtrace.history.run_log import RunLog

__all__ = ["Box", "Item", "Leaf", "Numbers", "nest", "origins", "roll"]

Numbers = Literal["deciding", "all", "none"]

# Numbers that tell of a tensor's metadata, not of what is in it.
_METADATA = {"dim", "len", "ndim", "nelement", "numel", "shape", "size", "stride"}
_CONVERSIONS = {"__bool__", "bool"}


@dataclass(eq=False)
class Leaf:
    """A node: the values that an op gave, or a decision.

    Attributes:
        kind: "input", "op", "number" or "output", or "decision" for flow steps.
        entries: the values that it stands for; of several passes, in the order of the run.
        steps: numbers of the flow steps that it stands for.
        times: how many passes it stands for.
        box: the innermost box that has no more than this in it and is not drawn for it.
    """

    kind: str
    entries: list[LayerEntry] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    times: int = 1
    box: Box | None = None


@dataclass(eq=False)
class Box:
    """Items that belong together.

    Attributes:
        kind: "root", "module" for calls of a module, "repeat" for what is repeated, and "part"
            for neighbours that have nothing else in common.
        calls: the calls of modules that it stands for.
        items: what is in it, in the order of the run.
        times: how often it was repeated: several numbers where it stands for several boxes
            which were not repeated equally often.
        is_folded: whether it is drawn closed.
    """

    kind: str
    calls: list[ModuleEntry] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    times: list[int] = field(default_factory=lambda: [1])
    is_folded: bool = False

    @property
    def name(self) -> str:
        """Qualified name of the module that was called first."""
        return self.calls[0].name if self.calls else ""

    @property
    def names(self) -> list[str]:
        """Qualified names of the modules that were called, each once."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def leaves(self) -> Iterator[Leaf]:
        """Yield all leaves in it, in the order of the run."""
        for item in self.items:
            if isinstance(item, Leaf):
                yield item
            else:
                yield from item.leaves()

    def boxes(self) -> Iterator[Box]:
        """Yield all boxes in it, outer ones first."""
        for item in self.items:
            if isinstance(item, Box):
                yield item
                yield from item.boxes()


Item: TypeAlias = Leaf | Box


def nest(
    history: RunLog,
    entries: Sequence[LayerEntry],
    *,
    flow: bool = True,
    numbers: Numbers = "deciding",
    inside: Sequence[str] = (),
) -> Box:
    """Sort values into the calls of modules that they were computed in.

    Args:
        history: the log they come from.
        entries: the values, in the order of the run.
        flow: whether flow steps become decisions.
        numbers: which numbers are shown.
        inside: labels of the module calls around all of it, which get no boxes.

    Returns:
        A box without a name, with all of it in it.
    """
    positions = {entry.label: float(i) for i, entry in enumerate(entries)}
    steps = _decisions(history, entries, positions, inside) if flow else []
    shown = _shown(history, entries, [number for _, _, number in steps], numbers)
    placed: list[tuple[float, tuple[str, ...], Leaf]] = [
        (position, scopes, Leaf("decision", steps=[number])) for position, scopes, number in steps
    ]
    ops: dict[int, Leaf] = {}
    for position, entry in enumerate(entries):
        if entry.label not in shown:
            continue
        if entry.element and entry.index is not None and entry.index in ops:
            ops[entry.index].entries.append(entry)
            continue
        leaf = Leaf(entry.kind, [entry])
        if entry.element and entry.index is not None:
            ops[entry.index] = leaf
        placed.append((float(position), entry.scopes, leaf))
    placed.sort(key=lambda found: found[0])
    calls = {call.label: call for call in history.modules}
    root = Box("root")
    boxes: dict[tuple[str, ...], Box] = {(): root}
    for _, scopes, leaf in placed:
        scopes = scopes[len(inside) :] if scopes[: len(inside)] == tuple(inside) else ()
        for depth in range(1, len(scopes) + 1):
            if scopes[:depth] not in boxes:
                box = boxes[scopes[:depth]] = Box("module", [calls[scopes[depth - 1]]])
                boxes[scopes[: depth - 1]].items.append(box)
        boxes[scopes].items.append(leaf)
    return root


def _decisions(
    history: RunLog,
    entries: Sequence[LayerEntry],
    positions: Mapping[str, float],
    inside: Sequence[str],
) -> list[tuple[float, tuple[str, ...], int]]:
    """Return (position, labels of the calls around it, number) of each flow step to draw."""
    first_under: dict[int, float] = {}
    begins: dict[str, float] = {}
    for index, entry in enumerate(entries):
        for number in entry.flow:
            first_under.setdefault(number, float(index))
        for scope in entry.scopes:
            begins.setdefault(scope, float(index))
    by_name: dict[str, list[ModuleEntry]] = {}
    for call in history.modules:
        if call.label in begins:
            by_name.setdefault(call.name, []).append(call)
    chains = {call.label: call for call in history.modules}
    found: list[tuple[float, tuple[str, ...], int]] = []
    latest = -1.0
    for number, step in enumerate(history.flow_steps):
        label = history.step_labels[number]
        if number in first_under:
            position = first_under[number] - 0.25
        elif label in positions:
            position = max(positions[label] + 0.5, latest)
        else:
            continue  # it is about values that are not in the picture
        latest = max(latest, position)
        if not isinstance(step, (LogicalFlowStep, LoopFlowStep, IndexFlowStep)):
            continue
        if isinstance(step, LoopFlowStep) and step.kind == "while":
            continue  # its tests say as much
        found.append((position, _around(step, position, by_name, begins, chains), number))
    return [(p, s, n) for p, s, n in found if s[: len(inside)] == tuple(inside)]


def _around(
    step: FlowStep,
    position: float,
    by_name: Mapping[str, Sequence[ModuleEntry]],
    begins: Mapping[str, float],
    calls: Mapping[str, ModuleEntry],
) -> tuple[str, ...]:
    """Return the labels of the module calls around a flow step, outermost first."""
    candidates = by_name.get(step.module_path, ())
    begun = [call for call in candidates if begins[call.label] <= position + 1]
    label = begun[-1].label if begun else candidates[0].label if candidates else ""
    chain: list[str] = []
    while label:
        chain.append(label)
        label = calls[label].parent
    return tuple(reversed(chain))


def _shown(
    history: RunLog, entries: Sequence[LayerEntry], steps: Iterable[int], numbers: Numbers
) -> set[str]:
    """Return the labels of the values that get nodes."""
    shown = {e.label for e in entries if e.kind in ("input", "op", "output")}
    known = {entry.label: entry for entry in entries if entry.kind == "number"}
    if numbers == "all":
        shown |= known.keys()
    if numbers == "deciding":
        stack = [history.step_labels[number] for number in steps]
        seen: set[str] = set()
        while stack:
            label = stack.pop()
            if label in known and label not in seen:
                seen.add(label)
                stack += known[label].parents
                if known[label].function not in _CONVERSIONS:
                    shown.add(label)
    return shown


def origins(
    label: str, by_label: Mapping[str, LayerEntry], shown: Mapping[str, object], *, sizes: bool
) -> Iterator[str]:
    """Yield what a value comes from: itself if it is shown, otherwise what it was computed from.

    Args:
        label: of the value.
        by_label: all values.
        shown: those in the picture.
        sizes: whether to go back through sizes and other metadata of tensors.
    """
    stack, seen = [label], {label}
    while stack:
        label = stack.pop()
        if label in shown:
            yield label
            continue
        entry = by_label.get(label)
        if entry is None or (not sizes and entry.layer_type in _METADATA):
            continue
        for parent in reversed(entry.parents):
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)


def roll(box: Box, key_of_step: Mapping[int, object]) -> None:
    """Put the passes of each op, and the calls of each module, together.

    Args:
        box: in which this is done, and in all boxes in it.
        key_of_step: equal for flow steps that are passes of one.
    """
    known: dict[object, Item] = {}
    kept: list[Item] = []
    for item in box.items:
        key = _key(item, key_of_step)
        first = known.setdefault(key, item)
        if first is item:
            kept.append(item)
        elif isinstance(first, Leaf) and isinstance(item, Leaf):
            first.entries += item.entries
            first.steps += item.steps
            first.times += item.times
        elif isinstance(first, Box) and isinstance(item, Box):
            first.calls += item.calls
            first.items += item.items
    box.items = kept
    for item in kept:
        if isinstance(item, Box):
            roll(item, key_of_step)


def _key(item: Item, key_of_step: Mapping[int, object]) -> object:
    if isinstance(item, Box):
        return ("box", item.name)
    if item.kind == "decision":
        return ("decision", key_of_step[item.steps[0]])
    return (item.kind, item.entries[0].name)
