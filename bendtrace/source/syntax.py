"""The syntax trees of source files: spans, blocks, and the flow of truth values."""

from __future__ import annotations

import ast
import functools
import linecache
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bendtrace.source.sites import Span

__all__ = [
    "BRANCHES",
    "COMPREHENSIONS",
    "FUNCTIONS",
    "LEAVING",
    "LOOPS",
    "SEVERAL",
    "WALKERS",
    "Handed",
    "Loop",
    "SourceFile",
    "any_or_all",
    "called_name",
    "closes_block",
    "conclude_truth",
    "ends_block",
    "follow_truth",
    "is_containment",
    "is_one_of_several",
    "needs_all",
    "rest_of_block",
    "source_file",
    "span_of",
    "spans_of",
    "spans_of_item",
]

# What takes the items of its arguments in step with the loop around it.
WALKERS = frozenset({"enumerate", "iter", "list", "map", "range", "reversed", "tuple", "zip"})
_EXHAUSTING = frozenset(
    {"dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple"}
)
SEVERAL = WALKERS | _EXHAUSTING | {"all", "any", "dict", "filter"}
LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.IfExp, ast.While)
# CPython 3.11 counts the depth of what it parses per process (gh-106905).
_parsing = threading.Lock()


@dataclass(frozen=True)
class Loop:
    """A loop of the source; each `for` of a comprehension is one.

    Attributes:
        kind: "for", "while" or "comprehension".
        span: the whole statement or expression.
        text: the iterable (`range(n)`), or the condition of a while.
        leaves_early: whether it can end before its bound: through its own break, return or raise,
            or because a generator is not exhausted.
        head: the iterable expression; None for a while.
    """

    kind: str
    span: Span
    text: str
    leaves_early: bool
    head: ast.expr | None = field(repr=False)

    @property
    def header(self) -> Span:
        """The span of the iterable; for a while, that of the loop."""
        return self.span if self.head is None else span_of(self.head)

    def length(self, taken: Mapping[Span, Sequence[int]]) -> int | None:
        """Return the number of iterations according to the header, or None if unknown.

        Args:
            taken: the traced sizes that the header consumed, in order, by the consuming expression.
        """
        if self.head is None:
            return None
        return _length(self.head, {span: iter(values) for span, values in taken.items()})


def _leaves_early(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    return any(ends_block(statement, False) for statement in loop.body)


def _length(node: ast.expr, taken: Mapping[Span, Iterator[int]]) -> int | None:
    """Return how many items walking an expression gives, as far as traced sizes tell."""
    called = called_name(node) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or called not in WALKERS or not node.args:
        return next(taken.get(span_of(node), iter(())), None)
    if called == "range":
        arguments = [_number(argument, node, taken) for argument in node.args]
        whole = [argument for argument in arguments if argument is not None]
        return len(range(*whole)) if len(whole) == len(arguments) else None
    walked = node.args[1:] if called == "map" else node.args if called == "zip" else node.args[:1]
    lengths = []
    for item in walked:
        if isinstance(item, ast.Call) and called_name(item) in WALKERS:
            lengths.append(_length(item, taken))
        else:  # a tensor is walked by the call that it is handed to
            by_call = next(taken.get(span_of(node), iter(())), None)
            lengths.append(_length(item, taken) if by_call is None else by_call)
    known = [length for length in lengths if length is not None]
    return min(known) if known and len(known) == len(lengths) else None


def _number(node: ast.expr, call: ast.Call, taken: Mapping[Span, Iterator[int]]) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        by_itself = next(taken.get(span_of(node), iter(())), None)  # len(x), int(n)
        return next(taken.get(span_of(call), iter(())), None) if by_itself is None else by_itself
    return value if type(value) is int else None


def ends_block(node: ast.AST, inner: bool) -> bool:
    """Return whether a statement can end the surrounding loop or function."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return False
    if isinstance(node, (ast.Return, ast.Raise)):
        return True
    if isinstance(node, ast.Break):
        return not inner
    if isinstance(node, LOOPS):  # a break in its else belongs to the loop around it
        return any(ends_block(child, True) for child in node.body) or any(
            ends_block(child, inner) for child in node.orelse
        )
    return any(ends_block(child, inner) for child in ast.iter_child_nodes(node))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class SourceFile:
    """The syntax tree of one file, indexed by span."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.parents: dict[ast.AST, ast.AST] = {}
        self.expressions: dict[Span, ast.expr] = {}
        self.statements: dict[Span, ast.stmt] = {}
        try:
            with _parsing:
                tree = ast.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError):  # not Python, or nothing there: no roles
            return
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, ast.expr):  # the outermost of those that look the same
                self.expressions.setdefault(span_of(node), node)
            elif isinstance(node, ast.stmt):
                self.statements.setdefault(span_of(node), node)

    def statement_at(self, span: Span) -> ast.stmt | None:
        """Return the innermost statement that contains a span."""
        holding = [node for around, node in self.statements.items() if around.holds(span)]
        return max(holding, key=lambda node: span_of(node)[:2], default=None)

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (child, parent) from `node` outwards."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def loops_around(self, node: ast.AST) -> tuple[Loop, ...]:
        """Return the loops whose body an expression is in, outermost first."""
        found: list[Loop] = []
        for child, parent in self.ancestors(node):
            if isinstance(parent, FUNCTIONS):
                break
            if isinstance(parent, LOOPS):
                # The iterable of a for is evaluated once, before the loop; a test each time.
                if child is not getattr(parent, "iter", None) and child not in parent.orelse:
                    found.append(self.loop(parent))
            elif isinstance(parent, ast.comprehension):
                if child is not parent.iter:
                    found.append(self.loop(parent))
                owner = self.parents[parent]
                assert isinstance(owner, COMPREHENSIONS)
                before = owner.generators[: owner.generators.index(parent)]
                found += map(self.loop, reversed(before))
            elif isinstance(parent, COMPREHENSIONS) and not isinstance(child, ast.comprehension):
                found += map(self.loop, reversed(parent.generators))
        return tuple(reversed(found))

    @functools.cache  # noqa: B019 - files are few and kept for the life of the process anyway
    def loop(self, node: ast.AST) -> Loop:
        """Describe a loop."""
        if isinstance(node, ast.While):
            text = self.text(node.test)
            return Loop("while", span_of(node), text, _leaves_early(node), None)
        if isinstance(node, ast.comprehension):
            owner = self.parents[node]
            assert isinstance(owner, ast.expr)
            early = isinstance(owner, ast.GeneratorExp) and not self._is_exhausted(owner)
            return Loop("comprehension", span_of(owner), self.text(node.iter), early, node.iter)
        assert isinstance(node, (ast.For, ast.AsyncFor))
        return Loop("for", span_of(node), self.text(node.iter), _leaves_early(node), node.iter)

    def _is_exhausted(self, generator: ast.GeneratorExp) -> bool:
        caller = self.parents[generator]
        return isinstance(caller, ast.Call) and called_name(caller) in _EXHAUSTING

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        return span_of(node).text(self.file)


@functools.cache
def source_file(file: str) -> SourceFile:
    """Return the tree of a file; empty for one that cannot be read."""
    return SourceFile(file)


@dataclass
class Handed:
    """How far a truth value is passed on, unchanged or negated, by the expressions around it.

    Attributes:
        decider: the outermost expression with this value, negations excluded.
        child: the expression in which it ends up.
        parent: the node that consumes that expression.
        inverted: whether an odd number of `not` is in between.
    """

    decider: ast.AST
    child: ast.AST
    parent: ast.AST | None
    inverted: bool


def follow_truth(file: SourceFile, node: ast.AST, outcome: bool | None = None) -> Handed:
    """Follow a truth value outwards, past `and` and `or` only if `outcome` decides them."""
    decider, inverted, child = node, False, node
    while (parent := file.parents.get(child)) is not None:
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            inverted = not inverted
        elif isinstance(parent, ast.BoolOp):
            goes_on = outcome is None or (outcome is not inverted) is isinstance(parent.op, ast.And)
            if child is not parent.values[-1] and goes_on:
                break
        elif isinstance(parent, ast.NamedExpr) or (
            isinstance(parent, ast.IfExp) and child is not parent.test
        ):
            decider = decider if inverted else parent
        elif not (isinstance(parent, ast.Call) and called_name(parent) == "bool"):
            break
        child = parent
    return Handed(decider, child, parent, inverted)


def conclude_truth(file: SourceFile, node: ast.AST, outcome: bool) -> tuple[Handed, bool]:
    """Return where a truth value ends up, and its value there."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn):
        outcome = not outcome  # what was compared is an item
    test = follow_truth(file, node, outcome)
    return test, outcome is not test.inverted


def is_one_of_several(node: ast.expr) -> bool:
    """Return whether an expression tests several values in turn."""
    return any_or_all(node) != "" or (
        isinstance(node, ast.Compare) and (is_containment(node) or len(node.ops) > 1)
    )


def needs_all(node: ast.expr) -> bool:
    """Return whether such an expression is true only if all of them are."""
    return any_or_all(node) == "all" or not (isinstance(node, ast.Call) or is_containment(node))


def any_or_all(node: ast.expr) -> str:
    """Return which of the two an expression calls; "" if neither."""
    called = called_name(node) if isinstance(node, ast.Call) else ""
    return called if called in ("any", "all") else ""


def is_containment(node: ast.expr) -> bool:
    """Return whether an expression is `a in b` or `a not in b`."""
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn))


def closes_block(block: list[ast.stmt]) -> bool:
    """Return whether the code after a block is only reached on the other side."""
    if not block:
        return False
    last = block[-1]
    if isinstance(last, ast.If):
        return closes_block(last.body) and closes_block(last.orelse)
    return isinstance(last, LEAVING)


def spans_of_item(file: SourceFile, generator: ast.comprehension, passed: int) -> tuple[Span, ...]:
    """Return the source that each item of a comprehension's `for` leads to after some filters."""
    owner = file.parents[generator]
    assert isinstance(owner, COMPREHENSIONS)
    nodes = generator.ifs[passed:]
    for later in owner.generators[owner.generators.index(generator) + 1 :]:
        nodes += [later.iter, *later.ifs]
    elements = [owner.key, owner.value] if isinstance(owner, ast.DictComp) else [owner.elt]
    return spans_of([*nodes, *elements])


def rest_of_block(file: SourceFile, statement: ast.AST) -> tuple[Span, ...]:
    """Return the code after a statement in its block, and in the blocks that this block ends."""
    spans: tuple[Span, ...] = ()
    for child, block in file.ancestors(statement):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(block, name, None)
            if isinstance(statements, list) and child in statements:
                spans += spans_of(statements[statements.index(child) + 1 :])
        # Leaving an `if` nested in another skips the rest of that one's block too.
        if not isinstance(block, (ast.If, ast.With, ast.AsyncWith, ast.match_case)):
            break
    return spans


def span_of(node: ast.AST) -> Span:
    """Return the span of a node."""
    assert isinstance(node, (ast.expr, ast.stmt, ast.pattern))
    return Span(
        node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0
    )


def spans_of(nodes: Sequence[ast.stmt | ast.expr]) -> tuple[Span, ...]:
    """Return the spans of several nodes."""
    return tuple(span_of(node) for node in nodes)


def called_name(call: ast.Call) -> str:
    """Return the name that a call uses; "" if it is not a plain name."""
    return call.func.id if isinstance(call.func, ast.Name) else ""
