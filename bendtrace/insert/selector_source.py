"""Selectors for places in the model's source."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bendtrace.errors import InputError
from bendtrace.flow import FlowStep, FlowSteps, steps_of
from bendtrace.insert.selector_algebra import Selector
from bendtrace.log.nodes import Step, TreeNode, identifier
from bendtrace.log.path_views import Candidate
from bendtrace.python.sites import InstructionPlace, is_file, place_text, read_place
from bendtrace.python.statements import (
    BRANCHES,
    COMPREHENSIONS,
    FUNCTIONS,
    SourceFile,
    closes_block,
    rest_of_block,
    source_file,
    span_of,
)
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import identical
from bendtrace.tape.tape import Guard, Use

if TYPE_CHECKING:
    from bendtrace.show.outline import BranchCoverage


@dataclass(frozen=True)
class SourcePattern:
    """A user's description of a condition or a loop."""

    # Its source, a regular expression that is searched for in it, or None for any.
    text: str | re.Pattern[str] | None = None
    line: int | None = None  # a line that it covers, or None for any
    file: str | None = None  # the source file, or the end of its path; None for any

    def means(self, text: str, lines: range, file: str) -> bool:
        """Return whether the description fits something in the source."""
        if self.line is not None and self.line not in lines:
            return False
        if self.file is not None and not is_file(file, self.file):
            return False
        if isinstance(self.text, re.Pattern):
            return self.text.search(text) is not None
        return self.text is None or _normalized_source(self.text) == _normalized_source(text)

    def __str__(self) -> str:
        given = self.text if self.line is None else self.line
        file = "" if self.file is None else f"file={self.file!r}"
        return ", ".join(filter(None, ["" if given is None else repr(given), file]))


def mark(where: Any, file: str | None, asked: str) -> SourcePattern:
    """Return a checked description of a place in the source.

    It is text, a regular expression, a line, `"model.py:41"`, or None. The source file may be given
    separately; messages name the function that asked. Raise `InputError` if the description is
    invalid.
    """
    if file is not None and not isinstance(file, str):
        raise InputError(f"{asked}() takes the path of a source file, or its end, not {file!r}")
    if isinstance(where, str):
        at = read_place(where)
        if at is not None:
            return SourcePattern(None, at[1], at[0])
        return SourcePattern(where, None, file)
    if type(where) is int and where > 0:
        return SourcePattern(None, where, file)
    if where is None or (isinstance(where, re.Pattern) and isinstance(where.pattern, str)):
        return SourcePattern(where, None, file)
    raise InputError(
        f"{asked}() takes text of the source, a regular expression, a line counted from 1, or "
        f"'file.py:41'; not {where!r}"
    )


@functools.cache
def _normalized_source(text: str) -> str:
    """Return an expression normalised without regard to blanks, quotes and brackets."""
    try:
        return ast.unparse(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ValueError):
        return " ".join(text.split())


def under_branch(
    test: str | re.Pattern[str] | int | None = None,
    *,
    side: bool | None = None,
    file: str | None = None,
) -> Selector:
    """Select nodes that are under a condition in the model's source.

    Conditions are the tests of `if`, `elif`, `while`, conditional expressions and filters of
    comprehensions, the operands of `and` and `or` except the last, and the patterns of `case`. Code
    after an `if` that returns, raises, continues or breaks is under the other side of its
    condition.

    All code from the forward of the enclosing module to the op counts. For nodes inside another
    module that is called there, only the call counts.

    Args:
        test: source of the condition (`"x.norm() > 3"`), a regular expression that is searched
            for in it, its line, `"model.py:41"`, or None for any condition.
        side: True for code that runs if it is true, False for code that runs if it is not; None for
            both.
        file: the source file, or the end of its path.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     if x.norm() > 3:
        ...         return x / 2
        ...     return x.exp()
        >>> large, small = bt.trace(model, torch.full((4,), 2.0)), bt.trace(model, torch.ones(4))
        >>> under = bt.node_selector.under_branch
        >>> bt.node_selector.find(under("x.norm() > 3", side=True), large)
        [<node div: div>]
        >>> bt.node_selector.find(under(side=False), small)
        [<node exp: exp>]
    """
    if side not in (None, True, False):
        raise InputError(f"under_branch() takes True, False or None as side=, not {side!r}")
    return UnderBranch(mark(test, file, "under_branch"), side)


def in_loop(
    loop: str | re.Pattern[str] | int | None = None, *, file: str | None = None
) -> Selector:
    """Select nodes in a loop of the model's source: `for`, `while` or a comprehension.

    All code from the forward of the enclosing module to the op counts. For nodes inside another
    module that is called there, only the call counts.

    Args:
        loop: source of the iterable (`"range(n)"`) or of the test of a `while`, a regular
            expression that is searched for in it, the line, `"model.py:41"`, or None for any loop.
        file: the source file, or the end of its path.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     for _ in range(2):
        ...         x = x.relu()
        ...     while x.sum() > 1:
        ...         x = x / 2
        ...     return x.exp()
        >>> trace = bt.trace(model, torch.ones(4))
        >>> in_loop = bt.node_selector.in_loop
        >>> bt.node_selector.find(in_loop("range(2)"), trace)
        [<node relu: relu>]
        >>> bt.node_selector.find(in_loop() & ~in_loop("range(2)"), trace)
        [<node sum: sum>, <node gt: gt>, <node div: div>]
    """
    return InLoop(mark(loop, file, "in_loop"))


def at_line(line: int | str, file: str | None = None) -> Selector:
    """Select nodes by source line.

    A node is at the first and the last line of its expression. A node inside a function that is
    called there is at the line of the call, too.

    Args:
        line: the line, counted from 1, `"model.py:41"`, or `"In[3]:7"` of a notebook.
        file: the source file, or the end of its path; None for any.

    Raises:
        InputError: `line` is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     x = x.relu()
        ...     return x.exp() + 1
        >>> trace = bt.trace(model, torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.at_line(3), trace)
        [<node exp: exp>, <node add: add>]
        >>> bt.node_selector.at_line("model.py:41")
        at_line(41, file='model.py')
    """
    found = mark(line, file, "at_line")
    if found.line is None:
        raise InputError(f"at_line() takes a line counted from 1, or 'model.py:41'; not {line!r}")
    return AtLine(found)


@dataclass(frozen=True, repr=False)
class UnderBranch(Selector):
    """Nodes under a condition."""

    test: SourcePattern
    side: bool | None = None

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return any(
            self.side in (None, branch.side)
            and self.test.means(branch.text, branch.lines, place.file)
            for place in _outside_places(node)
            for branch in branches_around(place)
        )

    def __repr__(self) -> str:
        side = "" if self.side is None else f"side={self.side}"
        return f"under_branch({', '.join(filter(None, [str(self.test), side]))})"


@dataclass(frozen=True, repr=False)
class InLoop(Selector):
    """Nodes in a loop."""

    loop: SourcePattern

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return any(
            self.loop.means(text, lines, place.file)
            for place in _outside_places(node)
            for text, lines in _loops_around(place)
        )

    def __repr__(self) -> str:
        return f"in_loop({self.loop})"


@dataclass(frozen=True, repr=False)
class AtLine(Selector):
    """Nodes at a line."""

    line: SourcePattern

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return any(
            self.line.means("", range(line, line + 1), place.file)
            for place in _outside_places(node)
            for line in (place.span.line, place.span.end_line)
        )

    def __repr__(self) -> str:
        return f"at_line({self.line})"


class ConditionSide(NamedTuple):
    """A condition, as seen from code that depends on it."""

    text: str  # its source
    lines: range  # the lines that it is on
    side: bool  # whether it has to be true


def _outside_places(node: Candidate) -> Iterator[InstructionPlace]:
    """Yield the places outside torch that led to a node, innermost first."""
    if node.site is not None:
        yield from (place for place in node.site.places if not place.in_torch)


def _node_at(file: SourceFile, place: InstructionPlace) -> ast.AST | None:
    found = file.expressions.get(place.span)
    if found is not None:
        return found
    # A method that is called on a line of its own begins there (Python 3.11 to 3.14).
    around = [
        span for span in file.expressions if span[2:] == place.span[2:] and span.holds(place.span)
    ]
    if around:
        return file.expressions[max(around)]
    # Some code covers a whole statement, such as the assignment in `x += 1`.
    return file.statements.get(place.span) or file.statement_at(place.span)


@functools.cache
def _loops_around(place: InstructionPlace) -> tuple[tuple[str, range], ...]:
    """Return the iterables of the loops around a place, and the lines on which they begin."""
    file = source_file(place.file)
    node = _node_at(file, place)
    found = []
    for loop in () if node is None else file.loops_around(node):
        last = loop.span.line if loop.head is None else loop.header.end_line
        found.append((loop.text, range(loop.span.line, last + 1)))
    return tuple(found)


@functools.cache
def branches_around(place: InstructionPlace) -> tuple[ConditionSide, ...]:
    """Return the conditions around something in the source, innermost first."""
    file = source_file(place.file)
    node = _node_at(file, place)
    return () if node is None else tuple(_condition_sides(file, node))


def _condition_sides(file: SourceFile, node: ast.AST) -> Iterator[ConditionSide]:
    for child, parent in file.ancestors(node):
        if isinstance(child, ast.stmt):
            yield from _exits_before(file, child, parent)
        if isinstance(parent, FUNCTIONS):
            return
        if isinstance(parent, BRANCHES) and child is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            yield _condition_side(file, parent.test, child in body)
        elif isinstance(parent, ast.BoolOp):
            for operand in parent.values[: parent.values.index(child)]:  # type: ignore[arg-type]
                yield _condition_side(file, operand, isinstance(parent.op, ast.And))
        elif isinstance(parent, ast.comprehension) and child in parent.ifs:
            for test in parent.ifs[: parent.ifs.index(child)]:
                yield _condition_side(file, test, True)
        elif isinstance(parent, COMPREHENSIONS):
            walked = parent.generators
            if isinstance(child, ast.comprehension):
                walked = walked[: walked.index(child)]
            for test in (test for generator in walked for test in generator.ifs):
                yield _condition_side(file, test, True)
        elif isinstance(parent, ast.Match) and isinstance(child, ast.match_case):
            yield from (
                _case(file, case, False) for case in parent.cases[: parent.cases.index(child)]
            )
            yield _case(file, child, True)


def _exits_before(file: SourceFile, child: ast.stmt, parent: ast.AST) -> Iterator[ConditionSide]:
    """Yield the conditions under which the code before a statement has not left its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            for statement in block[: block.index(child)]:
                yield from _statement_conditions(file, statement)


def _statement_conditions(file: SourceFile, statement: ast.stmt) -> Iterator[ConditionSide]:
    if isinstance(statement, ast.If):
        for block, other, side in (
            (statement.body, statement.orelse, False),
            (statement.orelse, statement.body, True),
        ):
            if closes_block(block):
                yield _condition_side(file, statement.test, side)
                if other:
                    yield from _statement_conditions(file, other[-1])


def _condition_side(file: SourceFile, test: ast.expr, side: bool) -> ConditionSide:
    span = span_of(test)
    return ConditionSide(file.text(test), range(span.line, span.end_line + 1), side)


def _case(file: SourceFile, case: ast.match_case, side: bool) -> ConditionSide:
    guard = "" if case.guard is None else f" if {file.text(case.guard)}"
    span = span_of(case.pattern)
    return ConditionSide(
        f"case {file.text(case.pattern)}{guard}", range(span.line, span.end_line + 1), side
    )


# Explains why a run did not reach a node: which decision of the run led past it.


def why_past(
    path: str,
    nodes: Mapping[str, Candidate],
    others: Iterable[Recording],
    runs: Iterable[Recording],
) -> str:
    """Return a text that names the decision that led runs past a node; "" if it is unknown.

    It is the innermost condition around the node in the source whose outcome was different in a
    run. If there is none, it is the first decision of a run that differs in the most similar run
    that reached the node. The runs did not reach it, the others did.
    """
    others = list(others)
    furthest, found = -1, ""
    for run in runs:
        steps = steps_of(run)
        denied = _denial(path, nodes, steps)
        if denied is not None:
            return _step_text(denied)
        for other in others:
            depth, guard = _common_decisions(other, run)
            step = next((s for s in steps if s.guard is not None and s.guard == guard), None)
            if step is not None and depth > furthest:
                furthest, found = depth, _step_text(step)
    return found


def _denial(path: str, nodes: Mapping[str, Candidate], steps: FlowSteps) -> FlowStep | None:
    """Return the step at which the innermost condition around a node was not met."""
    while path:
        node = nodes.get(path)
        for place in () if node is None or node.site is None else node.site.places:
            for branch in () if place.in_torch else branches_around(place):
                asked = [step for step in steps if _is_test_of(step, branch, place.file)]
                if asked and all(bool(step.value) is not branch.side for step in asked):
                    return asked[-1]
        path = path.rpartition(".")[0]  # the call that it is in
    return None


def _is_test_of(step: FlowStep, branch: ConditionSide, file: str) -> bool:
    return (
        (step.file, step.text) == (file, branch.text)
        and step.line in branch.lines
        and isinstance(step.value, (bool, int, float))
    )


def _common_decisions(one: Recording, other: Recording) -> tuple[int, int | None]:
    """Return the number of decisions that two runs have in common, and the second's next guard."""
    depth = 0
    for (_, mine), (number, theirs) in zip(
        _deciding_guards(one), _deciding_guards(other), strict=False
    ):
        own_site = None if mine.site is None else mine.site.identity
        other_site = None if theirs.site is None else theirs.site.identity
        if own_site != other_site:
            break
        if not identical(mine.answer, theirs.answer):
            return depth, number
        depth += 1
    return depth, None


def _deciding_guards(recording: Recording) -> list[tuple[int, Guard]]:
    return [
        (number, guard)
        for number, guard in enumerate(recording.tape.guards)
        if guard.use not in (Use.RESULT, Use.METADATA)
    ]


def _step_text(step: FlowStep) -> str:
    where = f"{place_text(step.file, step.line)} `{step.text}`"
    if isinstance(step.value, bool):
        return f"branch at {where} {'was' if step.value else 'was not'} taken for this input"
    return f"{step.kind} at {where} was {step.value!r} for this input"


def unseen_sides(branch: BranchCoverage) -> Iterator[str]:
    """Yield the source of the branch sides that were not seen."""
    file = source_file(branch.file)
    for side in branch.missing:
        for node in _sides_at(file, branch.line, side):
            yield file.text(node)


def branch_before(node: TreeNode, parents: Sequence[TreeNode]) -> Step | None:
    """Return a branch whose other side might change a node's name, if a run had taken it first.

    The other side may hold a node of this name itself, or leave out one that was counted before.
    The parents are the graph around it, in each known run that has reached this graph.
    """
    base, seen = _node_identifier(node), defaultdict[tuple[str, int], set[str]](set)
    for parent in parents:
        for step in parent.steps:
            seen[step.file, step.line].update(outcome for _, outcome, _ in step.outcomes)
    for parent in parents:
        order = list(parent.children)
        rivals = [child for child in parent.children.values() if _node_identifier(child) == base]
        names = [rival.name for rival in rivals]
        for step in parent.steps if node.name in names else ():
            outcomes = seen[step.file, step.line]
            if outcomes not in ({"True"}, {"False"}):
                continue
            if step.after in parent.children and (
                order.index(node.name) <= order.index(step.after)
            ):
                continue
            file, side = source_file(step.file), outcomes == {"True"}
            if any(base in _bases_in(code) for code in _sides_at(file, step.line, not side)):
                return step
            spans = [span_of(code) for code in _sides_at(file, step.line, side)]
            under = [
                any(place.file == step.file and span.line <= place.line <= span.end_line
                    for place in rival.places for span in spans)
                for rival in rivals
            ]  # fmt: skip
            number = names.index(node.name)
            # Without this side, others come first, or fewer are counted.
            if not all(under[number:]) if under[number] else any(under[:number]):
                return step
    return None


def _node_identifier(node: TreeNode) -> str:
    return identifier(node.label or node.name).rstrip("_")


def _bases_in(code: ast.AST) -> set[str]:
    """Return what operations in some source may be called, without numbers and underscores."""
    found = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.operator, ast.unaryop, ast.cmpop)):
            found |= _OF_OPERATORS.get(type(node), set())
        elif isinstance(node, ast.Subscript):
            found |= {"getitem"}
    return {identifier(name).rstrip("_") for name in found}


_OF_OPERATORS: dict[type[ast.AST], set[str]] = {
    ast.Add: {"add", "radd"}, ast.Sub: {"sub", "rsub"}, ast.Mult: {"mul", "rmul"},
    ast.Div: {"div", "rdiv"}, ast.FloorDiv: {"floordiv", "rfloordiv"},
    ast.Mod: {"remainder", "rmod"}, ast.Pow: {"pow", "rpow"}, ast.MatMult: {"matmul", "rmatmul"},
    ast.USub: {"neg"}, ast.Invert: {"invert"}, ast.BitAnd: {"and"}, ast.BitOr: {"or"},
    ast.BitXor: {"xor"}, ast.Gt: {"gt"}, ast.GtE: {"ge"}, ast.Lt: {"lt"}, ast.LtE: {"le"},
    ast.Eq: {"eq"}, ast.NotEq: {"ne"},
}  # fmt: skip


@functools.cache
def _sides_at(file: SourceFile, line: int, side: bool) -> tuple[ast.expr | ast.stmt, ...]:
    """Return the code that runs on one side of the branches at a line."""
    found: list[ast.expr | ast.stmt] = []
    for node in file.parents:
        if not (isinstance(node, BRANCHES) and node.test.lineno == line):
            continue
        if isinstance(node, ast.IfExp):
            found.append(node.body if side else node.orelse)
            continue
        here, other = (node.body, node.orelse) if side else (node.orelse, node.body)
        found += here
        if isinstance(node, ast.If) and closes_block(other):
            found += [file.statements[span] for span in rest_of_block(file, node)]
    return tuple(found)
