"""The code of one module call while it is written, and its layout as lines of Python."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from bendtrace.paths.events import items_of
from bendtrace.paths.nodes import TreeNode
from bendtrace.recording.names import base_name
from bendtrace.tape.structure import existing_in
from bendtrace.tape.tape import Ref, refs_in

if TYPE_CHECKING:
    from bendtrace.paths.build import Builder

__all__ = ["Body", "kept_name"]


# Whole numbers that stand by themselves; `#` cannot be in what is written here otherwise.
_NUMBER = re.compile(r"(?<![\w.'\"#-])\d+(?![\w.'\"])")
_MAX_PERIOD = 48  # lines of the longest repeated stretch that is looked for


class Line(NamedTuple):
    """One statement.

    Attributes:
        text: the statement.
        target: the name it assigns; "" for none.
        used: the names in it, in order.
        leaves: whether it is the last one, after which nothing needs to be freed.
        within: the context managers that it runs under; "" for none.
    """

    text: str
    target: str
    used: tuple[str, ...]
    leaves: bool = False
    within: str = ""


def kept_name(name: str) -> str:
    """Return the name of the list with a variable's values, if earlier ones are needed."""
    return f"{name}_passes"


def layout(lines: list[Line], given: Collection[str] = (), kept: Collection[str] = ()) -> list[str]:
    """Return statements as text, with variables freed after their last use and repetitions folded.

    Args:
        lines: the statements.
        given: the arguments.
        kept: variables whose earlier values are still needed after reassignment.
    """
    lines = _keeping(lines, kept)
    taken = {line.target for line in lines}.union(given)
    freed = [[name for name in names if name in taken] for names in _freed(lines)]
    found: list[str] = []
    start = 0
    while start < len(lines):
        within, stop = lines[start].within, start + 1
        while stop < len(lines) and lines[stop].within == within:
            stop += 1
        block = _folded(lines[start:stop], freed[start:stop], taken)
        if within:
            found.append(f"with {within}:")
            block = [f"    {text}" for text in block]
        found += block
        start = stop
    return found


def _folded(lines: list[Line], freed: list[list[str]], taken: Collection[str]) -> list[str]:
    """Return lines as text, with those that repeat as loops."""
    forms = [_Form(line) for line in lines]
    numbers: dict[str, int] = {}
    code = [numbers.setdefault(form.template, len(numbers)) for form in forms]
    found: list[str] = []
    position = 0
    while position < len(lines):
        period, count = _repetition(code, forms, position)
        end = position + period * count
        if count < 2:
            found.append(_with_freed(lines[position].text, freed[position]))
            position += 1
            continue
        body = _Body(forms, position, period, count, taken)
        found.append(body.header)
        after: list[str] = []
        for offset in range(period):
            each = [freed[i] for i in range(position + offset, end, period)]
            last = each[-1]
            always = [name for name in last if all(name in names for names in each)]
            after += [name for name in last if name not in always]
            found.append("    " + _with_freed(body.text(offset), always))
        if after:
            found.append(f"{' = '.join(after)} = None")
        position = end
    return found


def _keeping(lines: list[Line], kept: Collection[str]) -> list[Line]:
    """Add to lines what keeps the values of some variables in lists."""
    if not kept:
        return lines
    assigned = {line.target for line in lines}
    found = []
    for name in sorted(kept):
        start = "[]" if name in assigned else f"[{name}]"
        first = f"{kept_name(name)} = {start}"
        found.append(Line(first, kept_name(name), () if start == "[]" else (name,)))
    for line in lines:
        found.append(line)
        if line.target in kept:
            text = f"{kept_name(line.target)}.append({line.target})"
            used = kept_name(line.target), line.target
            found.append(Line(text, "", used, within=line.within))
    return found


class _Form:
    """A line apart from the whole numbers in it."""

    def __init__(self, line: Line) -> None:
        self.numbers = [int(digits) for digits in _NUMBER.findall(line.text)]
        self.template = _NUMBER.sub("#", line.text)


class _Body:
    """Lines that repeat, as a loop."""

    def __init__(
        self, forms: list[_Form], start: int, period: int, count: int, taken: Collection[str]
    ) -> None:
        self._forms = forms[start : start + period]
        self._deltas = [
            [b - a for a, b in zip(one.numbers, next_.numbers, strict=True)]
            for one, next_ in zip(self._forms, forms[start + period :], strict=False)
        ]
        varying = (
            (number, delta)
            for form, deltas in zip(self._forms, self._deltas, strict=True)
            for number, delta in zip(form.numbers, deltas, strict=True)
            if delta
        )
        self._first, step = next(varying, (0, 0))
        self._variable = next(n for n in ("i", "j", "k", "i_", "j_", "k_") if n not in taken)
        stop = self._first + step * count
        if not step:
            self.header = f"for _ in range({count}):"
        elif step != 1:
            self.header = f"for {self._variable} in range({self._first}, {stop}, {step}):"
        else:
            first = f"{self._first}, " if self._first else ""
            self.header = f"for {self._variable} in range({first}{stop}):"

    def text(self, offset: int) -> str:
        form, deltas = self._forms[offset], iter(self._deltas[offset])
        numbers = iter(form.numbers)

        def written(match: re.Match[str]) -> str:
            number, delta = next(numbers), next(deltas)
            if not delta:
                return str(number)
            ahead = number - self._first
            if not ahead:
                return self._variable
            text = f"{self._variable} {'+' if ahead > 0 else '-'} {abs(ahead)}"
            around = form.template[match.start() - 1], form.template[match.end() :][:1]
            return text if around[0] in "[(" and around[1] in "])" else f"({text})"

        return re.sub("#", written, form.template)


def _repetition(code: list[int], forms: list[_Form], start: int) -> tuple[int, int]:
    """Return the length and number of the stretches from `start` on that repeat the first.

    They may differ in numbers that go up, or down, by the same amount each time.
    """
    for period in range(1, min(_MAX_PERIOD, (len(code) - start) // 2) + 1):
        if code[start] != code[start + period]:
            continue
        block, count = code[start : start + period], 1
        while code[start + count * period : start + (count + 1) * period] == block:
            count += 1
        count = min(count, _steady(forms, start, period, count))
        if count > 1:
            return period, count
    return 1, 1


def _steady(forms: list[_Form], start: int, period: int, count: int) -> int:
    """Return for how many stretches the numbers in them go on as from the first to the second."""
    if count < 2:
        return count

    def numbers(number: int) -> list[int]:
        first = start + number * period
        return [n for form in forms[first : first + period] for n in form.numbers]

    before, now = numbers(0), numbers(1)
    deltas = [b - a for a, b in zip(before, now, strict=True)]
    if len({delta for delta in deltas if delta}) > 1:
        return 1
    steady = 2
    while steady < count:
        before, now = now, numbers(steady)
        if [b - a for a, b in zip(before, now, strict=True)] != deltas:
            break
        steady += 1
    return steady if steady > 2 or not any(deltas) else 1


def _freed(lines: list[Line]) -> list[list[str]]:
    """Return, for each line, the names whose values nothing after it needs."""
    live: set[str] = set()
    freed: list[list[str]] = []
    for line in reversed(lines):
        dead = []
        if line.target and line.target not in live and not line.leaves:
            dead.append(line.target)
        live.discard(line.target)
        for name in line.used:
            if name not in live and name not in dead and name != line.target and not line.leaves:
                dead.append(name)
            live.add(name)
        freed.append(dead)
    return freed[::-1]


def _with_freed(text: str, names: list[str]) -> str:
    return f"{text};  {' = '.join(names)} = None" if names else text


class _Local(NamedTuple):
    """What a value is called.

    Attributes:
        name: the variable.
        version: how often that had been assigned when the value was.
        access: what to write after it.
    """

    name: str
    version: int
    access: str = ""


class Body:
    """The body of a function that is written line by line.

    Args:
        builder: builds the tree.

    Attributes:
        arguments: names of the arguments.
        within: the context managers that the next lines run under.
    """

    def __init__(self, builder: Builder) -> None:
        self.arguments: list[str] = []
        self.within = ""
        self._builder = builder
        self._lines: list[Line] = []
        self._names: dict[tuple[int, tuple[Any, ...]], _Local] = {}
        self._versions: dict[str, int] = {}
        self._older: set[str] = set()

    def text(self) -> list[str]:
        """Return the lines."""
        return layout(self._lines, self.arguments, self._older)

    def knows(self, index: int) -> bool:
        """Return whether the result of an op has a name."""
        return (index, ()) in self._names

    def name(self, ref: Ref) -> str:
        """Return the name of a value here."""
        index, keys = self._builder.events.origin(ref.index)
        for length in range(len(keys), -1, -1):
            local = self._names.get((index, keys[:length]))
            if local is not None:
                text = local.name
                behind = self._versions.get(text, 0) - local.version
                if behind:  # the name stands for a later pass by now
                    self._older.add(text)
                    text = f"{kept_name(text)}[{-1 - behind}]"
                return text + local.access + "".join(f"[{key!r}]" for key in keys[length:])
        elsewhere = self._builder.paths.get(index)
        return f"<{elsewhere or base_name(self._builder.events.ops[index])}>"

    def used(self, value: Any) -> tuple[str, ...]:
        """Return the variables used in the text of a recorded object."""
        texts = [self.name(ref) for ref in refs_in(value)]
        texts += [thing.part.label for thing in existing_in(value)]
        found = (re.match(r"\w+", text) for text in texts)
        return tuple(dict.fromkeys(match[0] for match in found if match is not None))

    def assign(self, name: str, text: str, used: tuple[str, ...] = ()) -> None:
        """Add a line that assigns a value to a variable; none if it is the same variable."""
        if text == name:
            return
        self._lines.append(Line(f"{name} = {text}", name, used, within=self.within))
        self._versions[name] = self._versions.get(name, 0) + 1

    def statement(self, text: str, used: tuple[str, ...], leaves: bool = False) -> None:
        """Add a line that assigns nothing."""
        self._lines.append(Line(text, "", used, leaves, self.within))

    def call_it(self, index: int, element: tuple[Any, ...], name: str) -> None:
        """Record the variable that holds a value."""
        self._names[index, element] = self._local(name)

    def call_argument(self, child: TreeNode) -> None:
        """Record the names of the values in an argument."""
        self._call_parts(child, self._local(child.name))

    def call_results(self, value: Any, name: str) -> None:
        """Record the names of the values in the output of a call, which has a variable."""
        self._call_items(value, self._local(name))

    def _local(self, name: str) -> _Local:
        return _Local(name, self._versions.get(name, 0))

    def _call_parts(self, child: TreeNode, local: _Local) -> None:
        if child.kind in ("tensor", "number"):
            made = child.passes[-1]
            assert made.index is not None
            self._names.setdefault((made.index, made.element), local)
        for inner in child.children.values():
            if inner.passes[-1].parent == len(child.passes) - 1:
                access = f"[{inner.key!r}]"
                if child.type not in ("tuple", "list", "dict") and isinstance(inner.key, str):
                    access = f".{inner.key}" if inner.key.isidentifier() else access
                self._call_parts(inner, local._replace(access=local.access + access))

    def _call_items(self, value: Any, local: _Local) -> None:
        value = self._builder.plain(value)
        if isinstance(value, Ref):
            self._names[self._builder.events.origin(value.index)] = local
            return
        for item in items_of(value, self._builder.events) or ():
            self._call_items(item.value, local._replace(access=local.access + item.access))
