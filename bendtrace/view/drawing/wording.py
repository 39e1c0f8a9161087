"""The texts in a picture, and in its tooltips."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch

from bendtrace._places import place_text
from bendtrace.flow import FlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry, ParameterUse
from bendtrace.history.sizes import number_text
from bendtrace.view.drawing.canvas import cut, printable
from bendtrace.view.drawing.items import Box, Leaf

__all__ = [
    "box_lines",
    "box_title",
    "decision_lines",
    "leaf_lines",
    "leaf_title",
    "shape_text",
    "tooltip",
]

_ITEM = re.compile(r"\[\d+\](?=:|$)")
_TIMES = "\N{MULTIPLICATION SIGN}"
_DOT = " \N{MIDDLE DOT} "
_MOST = 44  # letters of a line
_STATE = 2  # so many parameters have their shapes written


def shape_text(entry: LayerEntry) -> str:
    """Return the shape of a value, and its dtype if that is not the usual one.

    Example:
        >>> import torch
        >>> from bendtrace.history.entries import LayerEntry
        >>> shape_text(LayerEntry("op", "add", "add_1_1", "add_1", shape=(2, 3))).split(_TIMES)
        ['2', '3']
    """
    if entry.shape is None:
        return ""
    text = shape(entry.shape)
    if entry.dtype is not None and entry.dtype is not torch.float32:
        text += " " + str(entry.dtype).removeprefix("torch.")
    return text


def shape(sizes: Sequence[int]) -> str:
    """Return sizes as text."""
    return _TIMES.join(map(str, sizes)) if sizes else "scalar"


def count(number: float) -> str:
    """Return a large number in short form: 85.1M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def plural(number: int, noun: str) -> str:
    """Return a number with a noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def leaf_title(leaf: Leaf) -> str:
    """Return the first line of a node: the name that finds it in the log."""
    entry = leaf.entries[0]
    if entry.kind == "number":
        return cut(f"{entry.label} = {number_text(entry.value)}", _MOST)
    if leaf.times > 1:
        return cut(entry.layer_type, _MOST)
    # (The gradients that one node of a backward pass returns differ only by their numbers.)
    labels = list(dict.fromkeys(_ITEM.sub("", one.label) for one in leaf.entries))
    if len(labels) > 2:  # several values of one op
        return cut(f"{labels[0]} \N{HORIZONTAL ELLIPSIS} {labels[-1]}", _MOST)
    return cut(", ".join(labels), _MOST)


def leaf_lines(leaf: Leaf, parent: str, first: bool) -> list[str]:
    """Return the lines below: the module, and its parameters.

    Args:
        leaf: the node.
        parent: name of the module around it.
        first: whether to name only the first of several modules, since the surrounding box names
            the others.
    """
    lines = []
    if leaf.box is not None:
        name = _names(leaf.box.names[:1] if first else leaf.box.names, parent)
        lines.append(cut(f"{name}{_DOT}{_classes(leaf.box)}", _MOST))
    entry = leaf.entries[0]
    if entry.state:
        lines.append(cut(_state(entry.state), _MOST))
    return lines


def _state(uses: Sequence[ParameterUse]) -> str:
    uses = sorted(uses, key=lambda use: (not use.is_parameter, "weight" not in use.name))
    shown = [f"{use.name.rpartition('.')[2]} {shape(use.shape)}" for use in uses[:_STATE]]
    more = len(uses) - _STATE
    return ", ".join(shown) + (f", {more} more" if more > 0 else "")


def box_title(box: Box, parent: str, first: bool) -> str:
    """Return the name of a box."""
    if box.kind == "module":
        return cut(_names(box.names[:1] if first else box.names, parent), _MOST)
    leaves = list(box.leaves())
    if box.kind == "part":
        named = [leaf.entries[0].name for leaf in leaves if leaf.entries]
        return cut(f"{named[0]} \N{HORIZONTAL ELLIPSIS} {named[-1]}", _MOST) if named else "part"
    return "repeated"


def box_lines(box: Box) -> list[str]:
    """Return the other lines of a box: classes, and the content if it is closed."""
    lines = [_classes(box)] if box.kind == "module" else []
    if not box.is_folded:
        return [cut(line, _MOST) for line in lines]
    leaves = list(box.leaves())
    ops = sum(leaf.kind == "op" for leaf in leaves)
    facts = [plural(ops, "op")]
    own = {
        use.name: use.numel
        for leaf in leaves
        for entry in leaf.entries
        for use in entry.state
        if use.is_parameter
    }
    if own:
        facts.append(f"{count(sum(own.values()))} parameters")
    decisions = sum(leaf.kind == "decision" for leaf in leaves)
    if decisions:
        facts.append(plural(decisions, "decision"))
    lines.append(_DOT.join(facts))
    return [cut(line, _MOST) for line in lines]


def _classes(box: Box) -> str:
    return ", ".join(dict.fromkeys(call.class_name for call in box.calls))


def _names(names: Sequence[str], parent: str) -> str:
    """Return names of modules as one text, without what the box around them says already."""
    short = [
        name.removeprefix(parent + ".") if parent and name.startswith(parent + ".") else name
        for name in names
    ]
    if len(short) == 1:
        return short[0]
    return f"{short[0]} \N{HORIZONTAL ELLIPSIS} {short[-1]}"


def decision_lines(steps: Sequence[FlowStep]) -> list[str]:
    """Return the condition of a decision, and its outcome."""
    first = steps[0]
    if isinstance(first, LoopFlowStep):
        its = sorted({step.iterations or 0 for step in steps if isinstance(step, LoopFlowStep)})
        if first.iterations is None:
            return [f"{first.kind}: {first.how_often}"]
        often = "\N{EN DASH}".join(map(str, sorted({its[0], its[-1]})))
        noun = "iteration" if its == [1] else "iterations"
        return [f"{first.kind}: {often} {noun}"]
    sides = Counter(str(step.value) for step in steps)
    if len(steps) == 1:
        taken = next(iter(sides))
    else:
        taken = ", ".join(f"{side} {_TIMES}{number}" for side, number in sides.items())
    return [cut(f"{first.kind} \N{RIGHTWARDS ARROW} {taken}", _MOST)]


def tooltip(
    entries: Sequence[LayerEntry], calls: Sequence[ModuleEntry], steps: Sequence[FlowStep]
) -> str:
    """Return the tooltip of a node."""
    lines: list[str] = []
    for entry in entries[:1]:
        lines.append(entry.label)
        if entry.node_path:
            lines.append(f"path: {entry.node_path}")
        if entry.function:
            lines.append(f"function: {entry.target or entry.function}")
        if entry.shape is not None:
            dtype = str(entry.dtype).removeprefix("torch.") if entry.dtype else ""
            lines.append(f"value: {shape(entry.shape)} {dtype} {entry.device or ''}".rstrip())
        lines += [f"{use.name}: {shape(use.shape)}" for use in entry.state[:8]]
        if entry.source is not None:
            lines.append(f"at {place_text(entry.source.file, entry.source.line)}")
            lines.append(entry.source.statement or entry.source.text)
    if len(entries) > 1:
        lines.append(f"and {len(entries) - 1:,} more: \N{HORIZONTAL ELLIPSIS} {entries[-1].label}")
    for call in calls[:1]:
        lines.append(f"module: {call.name} ({call.class_name})")
        if call.source is not None and not entries:
            lines.append(f"at {place_text(call.source.file, call.source.line)}")
            lines.append(call.source.statement or call.source.text)
    if len(calls) > 1:
        lines.append(f"and {plural(len(calls) - 1, 'more call')}: to {calls[-1].label}")
    for step in steps[:1]:
        lines += [step.text, f"{step.kind} at {place_text(step.file, step.line)}"]
    return "\n".join(cut(printable(line), 160) for line in lines if line)
