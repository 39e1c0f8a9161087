"""The selection of a program: how its arguments, flags and state differ from those of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bendtrace.flow import steps_of
from bendtrace.history.sizes import counted
from bendtrace.recording.iterations import user_code
from bendtrace.replay.analysis import GuardKind
from bendtrace.replay.global_state import GlobalState
from bendtrace.replay.program import Program
from bendtrace.tape.captured import Access, Captured, CaptureKind
from bendtrace.tape.tape import OpKind, TensorMeta

__all__ = ["differing", "selection", "signature_of"]

Facts = dict[str, str]


def signature_of(program: Program) -> str:
    """Return the inputs of the program's first call: `x: float32[5, 4], n: 3`."""
    metas = {op.target: op.meta for op in program.recording.tape.ops if op.kind is OpKind.INPUT}
    parts = [part for part in program.recording.environment.parts if part.is_argument]
    shown = []
    for part in parts:
        if part.kind is CaptureKind.TENSOR:
            meta = metas.get(part)
            if isinstance(meta, TensorMeta):
                text = f"{_plain(meta.dtype)}{list(meta.shape)}"
            else:
                text = f"{_plain(part.size.dtype)}, {part.size.rank} dimensions"
            shown.append(f"{part.label}: {text}")
        elif part.parent is None and part.kind in (CaptureKind.PLAIN, CaptureKind.NUMBER):
            value = metas.get(part) if part.kind is CaptureKind.NUMBER else part.value
            shown.append(f"{part.label}: {_short(value)}")
    if len(shown) > _SHOWN:
        shown[_SHOWN:] = [f"and {len(shown) - _SHOWN} more"]
    return ", ".join(shown) or "no arguments"


_SHOWN = 8


def selection(programs: Sequence[Program]) -> list[list[str]]:
    """Return for each program the properties that not all of them share, the most telling first."""
    facts = [_facts_of(program) for program in programs]
    different = set(_distinct(facts))
    return [
        list(_grouped({label: text for label, text in own.items() if label in different}))
        for own in facts
    ]


def differing(programs: Sequence[Program]) -> tuple[str, int]:
    """Return the property with the most values among the programs, and their number."""
    distinct = _distinct([_facts_of(program) for program in programs])
    label, values = max(distinct.items(), key=lambda item: item[1], default=("", 0))
    label, _, aspect = label.partition("#")
    return (f"{_ASPECTS[aspect]} of `{label}`" if aspect else f"`{label}`", values or 1)


_ASPECTS = {
    "rank": "the number of dimensions", "dtype": "the dtype", "device": "the device",
    "layout": "the layout", "grad": "requires_grad",
}  # fmt: skip


def _distinct(facts: Sequence[Facts]) -> dict[str, int]:
    """Return the labels that differ somewhere, with the number of their values."""
    labels = dict.fromkeys(label for own in facts for label in own)
    # A program that does not ask for something differs for other reasons.
    values = {label: {own[label] for own in facts if label in own} for label in labels}
    return {label: len(found) for label, found in values.items() if len(found) > 1}


def _grouped(facts: Facts) -> Iterator[str]:
    """Merge equal facts about many modules' attributes: `self.training = True (and 12 more)`."""
    alike: Counter[tuple[str, str]] = Counter()
    for label, text in facts.items():
        alike[_attribute(label), text] += 1
    for label, text in facts.items():
        count = alike.pop((_attribute(label), text), 0)
        if count:
            more = f" (and {count - 1} more like it)" if count > 1 else ""
            yield f"{_said(label, text)}{more}"


def _said(label: str, text: str) -> str:
    return f"{label.partition('#')[0]} {text}"


def _attribute(label: str) -> str:
    return "." + label.rpartition(".")[2] if label.startswith("self.") else label


def _facts_of(program: Program) -> Facts:
    facts: Facts = {}
    parts = program.recording.environment.parts
    names = [part.label for part in parts if part.access is Access.ROOT]
    facts["the arguments given"] = f"are {', '.join(names) or 'none'}"
    state: Facts = {}
    for part in parts:
        told = facts if part.is_argument else state
        if part.kind is CaptureKind.TENSOR:
            if part.is_argument or part in program.analysis.typed_state:
                told.update(_facts_of_tensor(part))
        elif (text := _fact(part)) is not None:
            told[part.label] = text
    facts.update(_conditions(program))
    facts.update(_facts_of_ambience(program.global_state))
    return facts | state


def _facts_of_ambience(global_state: GlobalState) -> Facts:
    context = global_state.context
    used = [f"{cast.device_type} {_plain(cast.dtype)}" for cast in context.autocast if cast.enabled]
    facts = {
        "grad mode": f"is {'on' if context.grad else 'off'}",
        "inference mode": f"is {'on' if context.inference else 'off'}",
        "autocast": f"is {', '.join(used) or 'off'}",
    }
    for name, value in global_state._asdict().items():
        if name != "context":
            facts[_AMBIENCE.get(name, name)] = f"is {_short(value)}"
    return facts


_AMBIENCE = {
    "dtype": "the default dtype",
    "modes": "the stack of function modes",
    "hooked": "whether there are global module hooks",
    "fast_attention": "torch.backends.mha's fast path",
    "flags": "(determinism, precision, mkldnn, anomaly detection, threads)",
}


def _facts_of_tensor(part: Captured) -> Facts:
    facts, label = part.size, part.label
    told = {
        f"{label}#rank": f"has {counted(facts.rank, 'dimension')}",
        f"{label}#dtype": f"is {_plain(facts.dtype)}",
    }
    told[f"{label}#device"] = f"is on {facts.device}"
    told[f"{label}#layout"] = f"is {_plain(facts.layout)}"
    told[f"{label}#grad"] = "requires grad" if facts.requires_grad else "does not require grad"
    return told


def _fact(part: Captured) -> str | None:
    kind = part.kind
    if kind is CaptureKind.PLAIN:
        return f"is {_short(part.value)}"
    if kind in (CaptureKind.LIST, CaptureKind.TUPLE):
        return f"is a {part.type.__name__} of {part.size}"
    if kind is CaptureKind.DICT and part.access is not Access.FIXED:
        return f"has the keys {_short(tuple(map(str, part.size)))}"
    if kind in (CaptureKind.SET, CaptureKind.LARGE, CaptureKind.ARRAY):
        return f"is {_short(part.value)}"
    if kind is CaptureKind.ALIAS:
        return f"is {part.value.label}"
    if kind in (CaptureKind.NUMBER, CaptureKind.OBJECT):
        return f"is a {part.type.__name__}"
    if kind in (CaptureKind.MODULE, CaptureKind.IDENTITY) and part.access is not Access.FIXED:
        return f"is the {part.type.__name__} at {id(part.value):#x}"
    return None


def _conditions(program: Program) -> Facts:
    """The input guards from the model's source, by their text."""
    tape = program.recording.tape
    texts = {
        step.guard: step.text for step in steps_of(program.recording)
        if step.guard is not None
    }  # fmt: skip
    found: dict[str, list[str]] = {}
    for number, guard in enumerate(tape.guards):
        if program.analysis.kinds[number] is GuardKind.INPUT and guard.site is not None:
            place = user_code(guard.scope, guard.site)[0]
            text = texts.get(number) or place.text or f"a condition at {place}"
            found.setdefault(text, []).append(_short(guard.expected))
    return {text: f"is {' and '.join(dict.fromkeys(values))}" for text, values in found.items()}


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: object) -> str:
    text = repr(value).removeprefix("torch.")
    return text if len(text) <= 60 else text[:57] + "..."
