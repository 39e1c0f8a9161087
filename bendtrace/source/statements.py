"""The kind of statement that consumed a value, according to the syntax tree of the source file."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from bendtrace.source.sites import Place, Span
from bendtrace.source.syntax import (
    BRANCHES,
    FUNCTIONS,
    SEVERAL,
    WALKERS,
    Handed,
    Loop,
    SourceFile,
    any_or_all,
    called_name,
    closes_block,
    conclude_truth,
    ends_block,
    follow_truth,
    is_containment,
    is_one_of_several,
    needs_all,
    rest_of_block,
    source_file,
    span_of,
    spans_of,
    spans_of_item,
)

__all__ = [
    "Loop",
    "Role",
    "asks_for_error",
    "compares_containers",
    "decides",
    "governed",
    "is_under_handler",
    "leaves_loop",
    "part_taken",
    "role_of",
    "walked_from",
]


@dataclass(frozen=True)
class Role:
    """The role of an expression in the statements around it.

    Attributes:
        kind: "if", "while", "conditional expression", "and", "or", "not", "assert", "comprehension
            filter", "match", "in", "for", "comprehension", "index", the name of a called builtin,
            or "" for anything else. An expression that decides a condition has the kind of the
            condition; "and" and "or" are operands that others may follow, "not" is an expression
            whose negation is used as a value.
        text: source of the deciding expression.
        heads: each `for` whose header contains the expression.
        tests: each `while` whose test contains the expression.
        loops: the loops of the same function around it, outermost first.
        is_subscript: whether the expression itself is `a[...]`.
        several: whether one evaluation can test many values: `any(...)`, `a in b`.
    """

    kind: str
    text: str
    heads: Loop | None
    tests: Loop | None
    loops: tuple[Loop, ...]
    is_subscript: bool = False
    several: bool = False


@functools.cache
def role_of(place: Place) -> Role:
    """Return the role of the expression at `place` in the statements around it."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:  # code that a tool made of a statement, as pytest does of `assert`
        statement = file.statements.get(place.span)
        node = statement.test if isinstance(statement, ast.Assert) else None
    if isinstance(node, ast.FormattedValue):  # `{n}` has a place of its own since Python 3.12
        around_it = file.parents[node]
        node = around_it if isinstance(around_it, ast.JoinedStr) else node
    node = _called(file, node)
    if node is None:
        around = file.statement_at(place.span)
        loops = () if around is None else file.loops_around(around)
        return Role("", place.text, None, None, loops)
    several = is_containment(node) or (isinstance(node, ast.Call) and called_name(node) in SEVERAL)
    kind, text, loop = _classify(file, node)
    heads = None if loop is None else file.loop(loop)
    tested = _while_around(file, node)
    tests = None if tested is None else file.loop(tested)
    loops = file.loops_around(node)
    return Role(kind, text, heads, tests, loops, isinstance(node, ast.Subscript), several)


def _called(file: SourceFile, node: ast.expr | None) -> ast.expr | None:
    """Return the call of `any(...)` where its name alone stands for it.

    Since Python 3.14, the compiler puts loops over generators into the place of `any`, `all`,
    `tuple` and others, and ascribes them to the name.
    """
    parent = None if node is None else file.parents[node]
    is_call = isinstance(node, ast.Name) and isinstance(parent, ast.Call) and parent.func is node
    return parent if is_call else node  # type: ignore[return-value]


@functools.cache
def walked_from(place: Place) -> Span | None:
    """Return the iterable of a generator, created at `place`, which asks for the iterator."""
    node = source_file(place.file).expressions.get(place.span)
    return span_of(node.generators[0].iter) if isinstance(node, ast.GeneratorExp) else None


@functools.cache
def part_taken(place: Place) -> str:
    """Return the source of the subscript around `place`: `x.shape[0]` for `x.shape`."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    parent = None if node is None else file.parents[node]
    taken = isinstance(parent, ast.Subscript) and parent.value is node
    return file.text(parent) if taken and parent is not None else place.text


@functools.cache
def compares_containers(place: Place) -> bool:
    """Return whether the comparison at `place` looks like one of containers."""
    node = source_file(place.file).expressions.get(place.span)
    return isinstance(node, ast.Compare) and any(
        isinstance(operand, (ast.Tuple, ast.List, ast.Set, ast.Dict))
        or (isinstance(operand, ast.Attribute) and operand.attr == "shape")
        or (isinstance(operand, ast.Call) and _gives_container(operand))
        for operand in (node.left, *node.comparators)
    )


def _gives_container(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr == "Size" or (call.func.attr == "size" and not call.args)
    return called_name(call) in ("tuple", "list", "set", "dict")


@functools.cache
def is_under_handler(place: Place) -> bool:
    """Return whether the same function might continue after an error at `place`.

    Call this only for places that the exception table of their code covers. Of these, the source
    can only rule out blocks under torch's own context managers.
    """
    return any(True for _ in _handlers(place))


@functools.cache
def asks_for_error(place: Place) -> bool:
    """Return whether code that continues after an error at `place` might inspect the error."""
    return any(
        not isinstance(handler, ast.ExceptHandler) or handler.name is not None
        for handler in _handlers(place)
    )


def _handlers(place: Place) -> Iterator[ast.AST | None]:
    """Yield what might stop an error: handlers, other blocks, None where there is no source."""
    file = source_file(place.file)
    node: ast.AST | None = file.expressions.get(place.span) or file.statements.get(place.span)
    if node is None:
        yield None
        return
    for child, parent in file.ancestors(node):
        if isinstance(parent, FUNCTIONS):
            return
        if isinstance(parent, (ast.Try, ast.TryStar)):
            if child in parent.body:
                yield from parent.handlers
            # A finally block can leave the function, or the loop, and so drop the error.
            if any(ends_block(statement, False) for statement in parent.finalbody):
                yield parent
        elif isinstance(parent, (ast.With, ast.AsyncWith)) and not all(
            file.text(item.context_expr).startswith(_LET_THROUGH) for item in parent.items
        ):
            yield parent


# Context managers that never swallow an error.
_LET_THROUGH = (
    "torch.", "no_grad", "enable_grad", "inference_mode", "autocast", "nullcontext",
    "contextlib.nullcontext",
)  # fmt: skip


@functools.cache
def decides(place: Place, outcome: bool) -> bool | None:
    """Return the value of a `while` test as far as the expression at `place` decides it.

    None if it is not part of such a test, or does not decide it alone.
    """
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return None
    if is_one_of_several(node) and outcome is needs_all(node):
        return None
    test, value = conclude_truth(file, node, outcome)
    return value if isinstance(test.parent, ast.While) and _is_test(test) else None


@functools.cache
def governed(place: Place, outcome: bool) -> tuple[Span, ...]:
    """Return the source that runs because of the outcome of the expression at `place`.

    For the header of a loop, its body; for a branch, the side taken, up to the end of the block if
    the other side leaves the block.
    """
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return ()
    loop = _classify(file, node)[2]
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        return spans_of(loop.body)
    if isinstance(loop, ast.comprehension):
        return spans_of_item(file, loop, 0)
    if isinstance(file.parents[node], ast.pattern):
        case = next(p for _, p in file.ancestors(node) if isinstance(p, ast.match_case))
        return _of_case(file, case, outcome)
    test, value = conclude_truth(file, node, outcome)
    child, parent = test.child, test.parent
    if isinstance(parent, ast.BoolOp):
        position = next(i for i, operand in enumerate(parent.values) if operand is child)
        return spans_of(parent.values[position + 1 :])
    if isinstance(parent, BRANCHES) and child is parent.test:
        return _side(file, parent, value)
    if isinstance(parent, ast.match_case):
        return _of_case(file, parent, value)
    if isinstance(parent, ast.comprehension) and child in parent.ifs and value:
        position = next(i for i, condition in enumerate(parent.ifs) if condition is child)
        return spans_of_item(file, parent, position + 1)
    return ()


@functools.cache
def leaves_loop(place: Place, outcome: bool) -> tuple[Span, ...]:
    """Return the rest of the innermost loop that still runs, if `outcome` ends the loop."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return ()
    test, value = conclude_truth(file, node, outcome)
    if isinstance(test.parent, ast.If) and _is_test(test):
        taken = test.parent.body if value else test.parent.orelse
        if taken and isinstance(taken[-1], ast.Break):
            # Unless the test has more to ask.
            return (*spans_of(taken), *([place.span] if is_one_of_several(node) else []))
    return ()


def _is_test(test: Handed) -> bool:
    return test.child is getattr(test.parent, "test", None)


def _side(
    file: SourceFile, branch: ast.If | ast.IfExp | ast.While, outcome: bool
) -> tuple[Span, ...]:
    if isinstance(branch, ast.IfExp):
        return (span_of(branch.body if outcome else branch.orelse),)
    taken, other = (branch.body, branch.orelse) if outcome else (branch.orelse, branch.body)
    spans = spans_of(taken)
    if isinstance(branch, ast.If) and closes_block(other):
        spans += rest_of_block(file, branch)
    return spans


def _of_case(file: SourceFile, case: ast.match_case, outcome: bool) -> tuple[Span, ...]:
    if outcome:
        return spans_of([*([case.guard] if case.guard else []), *case.body])
    match = file.parents[case]
    assert isinstance(match, ast.Match)
    spans: tuple[Span, ...] = ()
    for other in match.cases[match.cases.index(case) + 1 :]:
        guard = [other.guard] if other.guard else []
        spans += (span_of(other.pattern), *spans_of([*guard, *other.body]))
    return spans + (rest_of_block(file, match) if closes_block(case.body) else ())


def _classify(file: SourceFile, node: ast.expr) -> tuple[str, str, ast.AST | None]:
    """Return the kind, the text that decides, and the loop that the expression heads."""
    # Whether an item is contained, any and all: the truth of many things, a plain answer.
    if is_containment(node):
        return "in", file.text(node), None
    if called := any_or_all(node):
        return called, file.text(node), None
    if isinstance(file.parents[node], ast.pattern):
        return "match", f"case {file.text(node)}", None
    test = follow_truth(file, node)
    child, parent, text = test.child, test.parent, file.text(test.decider)
    if isinstance(parent, ast.BoolOp):
        return ("and" if isinstance(parent.op, ast.And) else "or"), text, None
    if _is_test(test):
        kind = next(kind for cls, kind in _TESTS.items() if isinstance(parent, cls))
        return kind, text, None
    if isinstance(parent, ast.match_case):
        return "match", text, None
    if isinstance(parent, ast.comprehension) and child in parent.ifs:
        return "comprehension filter", text, None
    if test.inverted:
        return "not", text, None
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return "and", text, None  # a < b < c, of which the value is used
    return _classify_walk(file, node)


_TESTS: dict[type[ast.AST], str] = {
    ast.If: "if",
    ast.While: "while",
    ast.IfExp: "conditional expression",
    ast.Assert: "assert",
}


def _while_around(file: SourceFile, node: ast.AST) -> ast.While | None:
    """Return the `while` in whose test an expression stands."""
    for child, parent in file.ancestors(node):
        if isinstance(parent, ast.While):
            return parent if child is parent.test else None
        if isinstance(parent, (ast.stmt, ast.Lambda)):
            return None
    return None


def _classify_walk(file: SourceFile, node: ast.expr) -> tuple[str, str, ast.AST | None]:
    for child, parent in file.ancestors(node):
        if isinstance(parent, ast.comprehension) and child is parent.iter:
            return "comprehension", file.text(child), parent
        if isinstance(parent, (ast.For, ast.AsyncFor)) and child is parent.iter:
            return "for", file.text(child), parent
        if not (isinstance(parent, ast.Call) and called_name(parent) in WALKERS):
            break
        if child not in parent.args:
            break
    if isinstance(node, ast.Subscript):
        return "index", file.text(node), None
    return (called_name(node) if isinstance(node, ast.Call) else ""), file.text(node), None
