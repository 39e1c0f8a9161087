"""The source around a branch: the code under each side, and the text of its first line."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, field

from bendtrace.source.sites import Place, Span
from bendtrace.source.statements import governed
from bendtrace.source.syntax import (
    FUNCTIONS,
    SourceFile,
    closes_block,
    conclude_truth,
    follow_truth,
    is_one_of_several,
    needs_all,
    source_file,
    span_of,
    spans_of,
    spans_of_item,
)

__all__ = [
    "Choice",
    "Header",
    "choices_in",
    "decided_by",
    "function_of",
    "header_of",
    "is_elif",
    "last_return",
    "loops_around",
    "return_around",
    "return_under",
    "under",
    "while_around",
]


@dataclass(frozen=True)
class Header:
    """The text of a branch, loop or value.

    Attributes:
        text: the line, without the colon of a statement.
        inverted: whether the line is the negation of the expression that was tested.
        span: for a loop, the span of its iterable, however many parts of it were tested.
    """

    text: str
    inverted: bool = False
    span: Span | None = None


@functools.cache
def header_of(place: Place, kind: str, text: str) -> Header:
    """Return the line for a flow step.

    Args:
        place: its place.
        kind: its kind: "if", "while", "for", "and", ...
        text: source of the expression that decides.
    """
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return Header(_plainly(kind, text or "(source not found)"))
    if kind in ("for", "comprehension"):
        for _, parent in file.ancestors(node):
            if isinstance(parent, (ast.For, ast.AsyncFor, ast.comprehension)):
                line = f"for {file.text(parent.target)} in {file.text(parent.iter)}"
                line = line if kind == "for" else f"[... {line}]"
                return Header(line, False, span_of(parent.iter))
    if kind in ("in", "any", "all", "key", "match", "index") or kind not in _WORDS:
        return Header(_plainly(kind, text))
    test = follow_truth(file, node)
    text = f"not {text}" if test.inverted and kind != "not" else text
    return Header(_WORDS[kind].format(_before(file, node, test.child) + text), test.inverted)


_WORDS = {
    "if": "if {}", "while": "while {}", "assert": "assert {}", "and": "{} and ...",
    "or": "{} or ...", "not": "not {}", "conditional expression": "... if {} else ...",
    "comprehension filter": "[... if {}]",
}  # fmt: skip


def _plainly(kind: str, text: str) -> str:
    if kind in _WORDS:
        return _WORDS[kind].format(text)
    return text


def _before(file: SourceFile, node: ast.AST, last: ast.AST) -> str:
    """Say which operands were asked before the last one of an `and` or `or`."""
    for child, parent in file.ancestors(node):
        if child is last:
            return ""
        if isinstance(parent, ast.BoolOp):
            return "... and " if isinstance(parent.op, ast.And) else "... or "
    return ""


@functools.cache
def under(place: Place, outcome: bool) -> tuple[Span, ...]:
    """Return the source under the side that a branch took.

    Unlike `governed`, it leaves out the code after the statement that runs only because the other
    side leaves the function or the loop.
    """
    statement = _statement_around(source_file(place.file), place)
    if statement is None:
        return ()
    around = span_of(statement)
    return tuple(span for span in governed(place, outcome) if around.holds(span))


@functools.cache
def while_around(place: Place) -> tuple[Header, tuple[Span, ...]] | None:
    """Return the `while` whose test contains a place, and the source that it repeats."""
    file = source_file(place.file)
    node = _statement_around(file, place)
    if not isinstance(node, ast.While):
        return None
    test = span_of(node.test)
    header = Header(f"while {file.text(node.test)}", False, test)
    return header, (test, *spans_of(node.body))


def return_under(place: Place, outcome: bool) -> ast.Return | None:
    """Return the `return` directly under the side that a branch took."""
    statements = source_file(place.file).statements
    for span in under(place, outcome):
        found = statements.get(span)
        if isinstance(found, ast.Return):
            return found
    return None


def return_around(place: Place) -> ast.Return | None:
    """Return the `return` whose value contains a place."""
    statement = _statement_around(source_file(place.file), place)
    return statement if isinstance(statement, ast.Return) else None


@functools.cache
def last_return(place: Place) -> ast.Return | None:
    """Return the `return` with which the function around a place ends."""
    file = source_file(place.file)
    node: ast.AST | None = file.expressions.get(place.span) or file.statements.get(place.span)
    if node is None:
        return None
    for _, parent in file.ancestors(node):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            last = parent.body[-1]
            return last if isinstance(last, ast.Return) else None
    return None


def _statement_around(file: SourceFile, place: Place) -> ast.stmt | None:
    node: ast.AST | None = file.expressions.get(place.span)
    while node is not None and not isinstance(node, ast.stmt):
        node = file.parents.get(node)
    return node


@functools.cache
def is_elif(place: Place) -> bool:
    """Return whether the `if` around a place is written as `elif`."""
    file = source_file(place.file)
    node = _statement_around(file, place)
    parent = None if node is None else file.parents.get(node)
    if not (isinstance(node, ast.If) and isinstance(parent, ast.If) and parent.orelse == [node]):
        return False
    return node.col_offset == parent.col_offset


@dataclass(frozen=True)
class Choice:
    """A branch in the source.

    Attributes:
        kind: "if", "while", "for-else", "assert", "conditional expression", "and", "or",
            "comprehension filter" or "case".
        text: source of the condition.
        file: the file it is in.
        span: the span of the condition, or of the loop with the `else`.
        function: name of the function it is in.
        if_true: the source that runs only if it is true.
        if_false: the source that runs only if it is false.
        is_partly_watched: whether the condition tests several values in turn, each of which may
            decide it in only one direction.
    """

    kind: str
    text: str
    file: str
    span: Span
    function: str
    if_true: tuple[Span, ...] = field(compare=False, repr=False)
    if_false: tuple[Span, ...] = field(compare=False, repr=False)
    is_partly_watched: bool = field(default=False, compare=False)

    @property
    def line(self) -> int:
        """Its line, counted from 1."""
        return self.span.line


@functools.cache
def loops_around(choice: Choice) -> int:
    """Return how many loops of its function are around a branch, not counting any within it."""
    file = source_file(choice.file)
    node = file.expressions.get(choice.span)
    return 0 if node is None else len(file.loops_around(node))


_KINDS: dict[type[ast.AST], str] = {
    ast.If: "if", ast.While: "while", ast.IfExp: "conditional expression", ast.Assert: "assert",
}  # fmt: skip


def function_of(place: Place) -> ast.AST | None:
    """Return the function, or the lambda, that a place is in; None for a module's own code."""
    file = source_file(place.file)
    node: ast.AST | None = file.expressions.get(place.span) or file.statements.get(place.span)
    if node is None:
        node = file.statement_at(place.span)
    while node is not None and not isinstance(node, FUNCTIONS):
        node = file.parents.get(node)
    return node


@functools.cache
def choices_in(path: str, function: ast.AST) -> tuple[Choice, ...]:
    """Return the branches of a function, without those of nested functions."""
    file = source_file(path)
    found: list[Choice] = []
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        found += _choices_at(file, node)
        waiting += ast.iter_child_nodes(node)
    return tuple(sorted(found, key=lambda choice: choice.span))


@functools.cache
def decided_by(place: Place, outcome: bool) -> tuple[tuple[Choice, bool], ...]:
    """Return the branches that an expression decided by its truth, with the side taken.

    These are the `and` or `or` that it is an operand of, and everything that depends on their
    truth, as far as it is decided at that point.
    """
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    decided: list[tuple[ast.AST, bool]] = []
    if node is None:  # an assert that a tool has rewritten
        statement = file.statements.get(place.span)
        decided += [(statement.test, outcome)] if isinstance(statement, ast.Assert) else []
    elif not (is_one_of_several(node) and outcome is needs_all(node)):
        plain = follow_truth(file, node)
        if isinstance(plain.parent, ast.BoolOp):
            decided.append((plain.child, outcome is not plain.inverted))
        test, value = conclude_truth(file, node, outcome)
        if test.parent is not None and not isinstance(test.parent, ast.BoolOp):
            decided.append((test.child, value))
    known = {
        choice.span: choice
        for child, _ in decided
        for choice in _choices_at(file, file.parents[child])
    }
    pairs = [(known.get(span_of(child)), value) for child, value in decided]
    return tuple((choice, value) for choice, value in pairs if choice is not None)


def _only_if(
    file: SourceFile, branch: ast.If | ast.IfExp | ast.While, value: bool
) -> tuple[Span, ...]:
    """Return the source that runs only after a branch took one side.

    Where the other side leaves, that is also the rest of its own block, but not of those around
    it, which can be reached past the branch.
    """
    if isinstance(branch, ast.IfExp):
        return (span_of(branch.body if value else branch.orelse),)
    taken, other = (branch.body, branch.orelse) if value else (branch.orelse, branch.body)
    spans = spans_of(taken)
    if isinstance(branch, ast.If) and closes_block(other):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(file.parents[branch], name, None)
            if isinstance(block, list) and branch in block:
                spans += spans_of(block[block.index(branch) + 1 :])
    return spans


def _choices_at(file: SourceFile, node: ast.AST) -> list[Choice]:
    if isinstance(node, ast.BoolOp):
        kind = "and" if isinstance(node.op, ast.And) else "or"
        sides = [
            (kind, operand, spans_of(node.values[i + 1 :]) if kind == "and" else (),
             spans_of(node.values[i + 1 :]) if kind == "or" else ())
            for i, operand in enumerate(node.values[:-1])
        ]  # fmt: skip
    elif isinstance(node, ast.comprehension):
        sides = [
            ("comprehension filter", test, spans_of_item(file, node, i + 1), ())
            for i, test in enumerate(node.ifs)
        ]
    elif isinstance(node, ast.Assert):
        sides = [("assert", node.test, (), ())]
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        true, false = _only_if(file, node, True), _only_if(file, node, False)
        sides = [(_KINDS[type(node)], node.test, true, false)]
    elif isinstance(node, (ast.For, ast.AsyncFor)) and node.orelse:
        sides = [("for-else", node.iter, spans_of(node.orelse), ())]
    else:
        return []
    function: ast.AST | None = node
    while function is not None and not isinstance(function, FUNCTIONS):
        function = file.parents.get(function)
    name = getattr(function, "name", "<lambda>")
    return [
        Choice(kind, file.text(test), file.file, span_of(test), name, true, false,
               any(isinstance(inner, ast.expr)
                   and (isinstance(inner, ast.BoolOp) or is_one_of_several(inner))
                   for inner in ast.walk(test)))
        for kind, test, true, false in sides
        if not isinstance(test, ast.Constant)
    ]  # fmt: skip
