"""What kind of statement consumed a value, read off the syntax tree of the source file."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass

from bendtrace.recording.sites import Place, Span

__all__ = ["Loop", "Role", "governed", "is_under_handler", "role_of"]

_WALKERS = frozenset({"enumerate", "iter", "list", "map", "range", "reversed", "tuple", "zip"})
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Loop:
    """A loop of the source.

    Attributes:
        kind: "for", "while" or "comprehension".
        span: the whole statement or expression.
        text: what is walked (`range(n)`), or the condition of a while.
        leaves_early: whether a break, return or raise of its own can end it before its bound.
        range_arguments: for a loop over `range(...)`: its arguments where they are literal
            integers, None for the others; empty for other loops.
    """

    kind: str
    span: Span
    text: str
    leaves_early: bool
    range_arguments: tuple[int | None, ...]


@dataclass(frozen=True)
class Role:
    """What an expression is to the statements around it.

    Attributes:
        kind: "if", "while", "conditional expression", "and", "or", "not", "assert",
            "comprehension filter", "match", "for", "comprehension", "index", the name of a
            called builtin, or "" where none of these fits.
        text: source of the expression that decides.
        heads: the loop that the expression is the header of.
        loops: the loops of the same function around it, outermost first.
    """

    kind: str
    text: str
    heads: Loop | None
    loops: tuple[Loop, ...]


class _File:
    """The syntax tree of one file, indexed by span."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.parents: dict[ast.AST, ast.AST] = {}
        self.by_span: dict[Span, list[ast.AST]] = {}
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError):  # not Python, or nothing there: no roles
            return
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, (ast.expr, ast.pattern)):
                self.by_span.setdefault(_span(node), []).append(node)
            elif isinstance(node, (ast.If, ast.While)):
                # `if x: break` on one line: the jump is ascribed to the whole statement.
                self.by_span.setdefault(_span(node), []).append(node.test)

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (child, parent) from `node` outwards."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def loops_around(self, node: ast.AST) -> tuple[Loop, ...]:
        found = []
        for child, parent in self.ancestors(node):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                break
            if isinstance(parent, _LOOPS):
                # The iterable of a for is evaluated once, before the loop; a test each time.
                if child is not getattr(parent, "iter", None) and child not in parent.orelse:
                    found.append(self.loop(parent))
            elif isinstance(parent, _COMPREHENSIONS):
                if child is not parent.generators[0]:
                    found.append(self.loop(parent))
        return tuple(reversed(found))

    @functools.cache  # noqa: B019 - files are few and kept for the life of the process anyway
    def loop(self, node: ast.AST) -> Loop:
        if isinstance(node, ast.While):
            return Loop("while", _span(node), self.text(node.test), _leaves_early(node), ())
        if isinstance(node, _COMPREHENSIONS):
            head = node.generators[0].iter
            kind, early = "comprehension", bool(node.generators[0].ifs)
        else:
            assert isinstance(node, (ast.For, ast.AsyncFor))
            head, kind, early = node.iter, "for", _leaves_early(node)
        arguments: tuple[int | None, ...] = ()
        if isinstance(head, ast.Call) and _called(head) == "range":
            arguments = tuple(_literal(argument) for argument in head.args)
        return Loop(kind, _span(node), self.text(head), early, arguments)

    def text(self, node: ast.AST) -> str:
        return _span(node).text(self.file)


@functools.cache
def _file(file: str) -> _File:
    return _File(file)


@functools.cache
def role_of(place: Place) -> Role:
    """Find what the expression at `place` is to the statements around it."""
    file = _file(place.file)
    nodes = file.by_span.get(place.span, ())
    node = next((n for n in nodes if isinstance(n, ast.expr)), None) or next(iter(nodes), None)
    if node is None:
        return Role("", place.text, None, ())
    kind, decider, loop = _classify(file, node)
    heads = file.loop(loop) if loop is not None else None
    return Role(kind, file.text(decider), heads, file.loops_around(node))


@functools.cache
def is_under_handler(place: Place) -> bool:
    """Whether a `try` of the same function would catch what is raised at `place`."""
    file = _file(place.file)
    node = next(iter(file.by_span.get(place.span, ())), None)
    if node is None:
        return False
    for child, parent in file.ancestors(node):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(parent, ast.Try) and parent.handlers and child in parent.body:
            return True
        if isinstance(parent, ast.With) and any(
            "suppress" in file.text(i.context_expr) for i in parent.items
        ):
            return True
    return False


@functools.cache
def governed(place: Place, outcome: bool) -> tuple[Span, ...]:
    """Return the source that runs because the expression at `place` came out as it did.

    For the header of a loop, its body; for a branch, the side taken, which goes on to the end
    of the block where the other side leaves it.
    """
    file = _file(place.file)
    nodes = file.by_span.get(place.span, ())
    node = next((n for n in nodes if isinstance(n, ast.expr)), None)
    if node is None:
        return ()
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        outcome = not outcome
    for child, parent in file.ancestors(node):
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            outcome = not outcome
        elif isinstance(parent, ast.BoolOp):
            goes_on = outcome is isinstance(parent.op, ast.And)
            if child is not parent.values[-1] and goes_on:
                rest = parent.values[parent.values.index(child) + 1 :]  # type: ignore[arg-type]
                return tuple(_span(value) for value in rest)
        elif isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is parent.test:
            return _side(file, parent, outcome)
        elif isinstance(parent, (ast.For, ast.AsyncFor)) and child is parent.iter:
            return _spans(parent.body)
        elif isinstance(parent, ast.comprehension):
            owner = file.parents[parent]
            return (_span(owner),) if outcome else ()
        elif isinstance(parent, ast.match_case):
            return _spans(parent.body) if outcome else ()
        elif isinstance(parent, ast.stmt):
            return ()
    return ()


def _side(file: _File, branch: ast.If | ast.IfExp | ast.While, outcome: bool) -> tuple[Span, ...]:
    if isinstance(branch, ast.IfExp):
        return (_span(branch.body if outcome else branch.orelse),)
    taken, other = (branch.body, branch.orelse) if outcome else (branch.orelse, branch.body)
    spans = _spans(taken)
    leaves = bool(other) and isinstance(other[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))
    if isinstance(branch, ast.If) and leaves:
        block = file.parents[branch]
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(block, name, None)
            if isinstance(statements, list) and branch in statements:
                spans += _spans(statements[statements.index(branch) + 1 :])
    return spans


def _spans(statements: list[ast.stmt]) -> tuple[Span, ...]:
    return tuple(_span(statement) for statement in statements)


def _classify(file: _File, node: ast.AST) -> tuple[str, ast.AST, ast.AST | None]:
    """Return the kind, the expression that decides, and the loop node that it heads."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not", node.operand, None
    for child, parent in file.ancestors(node):
        if isinstance(parent, ast.BoolOp):
            if child is not parent.values[-1]:
                return ("and" if isinstance(parent.op, ast.And) else "or"), child, None
            continue  # the last operand decides what the whole decides
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            grandparent = file.parents[parent]
            tests = isinstance(grandparent, ast.While) and grandparent.test is parent
            return "not", child, grandparent if tests else None
        if isinstance(parent, ast.If) and child is parent.test:
            return "if", node, None
        if isinstance(parent, ast.While) and child is parent.test:
            return "while", node, parent
        if isinstance(parent, ast.IfExp) and child is parent.test:
            return "conditional expression", node, None
        if isinstance(parent, ast.Assert) and child is parent.test:
            return "assert", node, None
        if isinstance(parent, ast.comprehension):
            if child in parent.ifs:
                return "comprehension filter", node, None
            owner = file.parents[parent]
            assert isinstance(owner, _COMPREHENSIONS)
            return "comprehension", child, owner if parent is owner.generators[0] else None
        if isinstance(parent, (ast.For, ast.AsyncFor)) and child is parent.iter:
            return "for", child, parent
        if isinstance(parent, ast.match_case) or isinstance(child, ast.pattern):
            return "match", node, None
        if isinstance(parent, ast.Call) and _called(parent) in _WALKERS and child in parent.args:
            continue
        break
    if isinstance(node, ast.Subscript):
        return "index", node, None
    if isinstance(node, ast.Call):
        return _called(node), node, None
    return "", node, None


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _literal(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def _leaves_early(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    def leaves(node: ast.AST, inner: bool) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            return False
        if isinstance(node, (ast.Return, ast.Raise)):
            return True
        if isinstance(node, ast.Break):
            return not inner
        inner = inner or isinstance(node, _LOOPS)
        return any(leaves(child, inner) for child in ast.iter_child_nodes(node))

    return any(leaves(statement, False) for statement in loop.body)


def _span(node: ast.AST) -> Span:
    assert isinstance(node, (ast.expr, ast.stmt, ast.pattern))
    return Span(
        node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0
    )
