"""The kind of statement that consumed a value, according to the syntax tree of the source file."""

from __future__ import annotations

import ast
import functools
import linecache
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from bendtrace.python.sites import InstructionPlace, Span, place_at


@dataclass(frozen=True)
class Role:
    """The role of an expression in the statements around it."""

    # "if", "while", "conditional expression", "and", "or", "not", "assert", "comprehension filter",
    # "match", "in", "for", "comprehension", "index", the name of a called builtin, or "" for
    # anything else. An expression that decides a condition has the kind of the condition; "and" and
    # "or" are operands that others may follow, "not" is an expression whose negation is used as a
    # value.
    kind: str
    text: str  # source of the deciding expression
    heads: SourceLoop | None  # each `for` whose header contains the expression
    tests: SourceLoop | None  # each `while` whose test contains the expression
    loops: tuple[SourceLoop, ...]  # the loops of the same function around it, outermost first
    is_subscript: bool = False  # whether the expression itself is `a[...]`
    several: bool = False  # whether one evaluation can test many values: `any(...)`, `a in b`


@functools.cache
def role_of(place: InstructionPlace) -> Role:
    """Return the role of the expression at `place` in the statements around it."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:  # code that a tool made of a statement, as pytest does of `assert`
        statement = file.statements.get(place.span)
        node = statement.test if isinstance(statement, ast.Assert) else None
    if isinstance(node, ast.FormattedValue):  # `{n}` has its own place since Python 3.12
        around_it = file.parents[node]
        node = around_it if isinstance(around_it, ast.JoinedStr) else node
    node = _enclosing_call(file, node)
    if node is None:
        around = file.statement_at(place.span)
        loops = () if around is None else file.loops_around(around)
        return Role("", place.text, None, None, loops)
    several = is_containment(node) or (isinstance(node, ast.Call) and name_of_call(node) in SEVERAL)
    kind, text, loop = _classify(file, node)
    heads = None if loop is None else file.loop(loop)
    tested = _while_around(file, node)
    tests = None if tested is None else file.loop(tested)
    loops = file.loops_around(node)
    return Role(kind, text, heads, tests, loops, isinstance(node, ast.Subscript), several)


def _enclosing_call(file: SourceFile, node: ast.expr | None) -> ast.expr | None:
    """Return the call of `any(...)` where its name alone stands for it.

    Since Python 3.14, the compiler puts loops over generators into the place of `any`, `all`,
    `tuple` and others, and ascribes them to the name.
    """
    parent = None if node is None else file.parents[node]
    is_call = isinstance(node, ast.Name) and isinstance(parent, ast.Call) and parent.func is node
    return parent if is_call else node  # type: ignore[return-value]


@functools.cache
def generator_iterable(place: InstructionPlace) -> Span | None:
    """Return the iterable of a generator, created at `place`, which asks for the iterator."""
    node = source_file(place.file).expressions.get(place.span)
    return span_of(node.generators[0].iter) if isinstance(node, ast.GeneratorExp) else None


@functools.cache
def subscript_text(place: InstructionPlace) -> str:
    """Return the source of the subscript around `place`: `x.shape[0]` for `x.shape`."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    parent = None if node is None else file.parents[node]
    taken = isinstance(parent, ast.Subscript) and parent.value is node
    return file.text(parent) if taken and parent is not None else place.text


@functools.cache
def compares_containers(place: InstructionPlace) -> bool:
    """Return whether the comparison at `place` looks like one of containers."""
    node = source_file(place.file).expressions.get(place.span)
    return isinstance(node, ast.Compare) and any(
        isinstance(operand, (ast.Tuple, ast.List, ast.Set, ast.Dict))
        or (isinstance(operand, ast.Attribute) and operand.attr == "shape")
        or (isinstance(operand, ast.Call) and _gives_container(operand))
        for operand in (node.left, *node.comparators)
    )


@functools.cache
def is_compared(place: InstructionPlace) -> bool:
    """Return whether code only compares what an expression gives: `random() < 0.5`."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    parent = None if node is None else file.parents[node]
    return isinstance(parent, ast.Compare) and all(isinstance(o, _ORDER) for o in parent.ops)


_ORDER = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _gives_container(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr == "Size" or (call.func.attr == "size" and not call.args)
    return name_of_call(call) in ("tuple", "list", "set", "dict")


@functools.cache
def is_under_handler(place: InstructionPlace) -> bool:
    """Return whether the same function might continue after an error at `place`.

    Call this only for places that the exception table of their code covers. Of these, the source
    can only rule out blocks under torch's own context managers.
    """
    return any(True for _ in _handlers(place))


@functools.cache
def asks_for_error(place: InstructionPlace) -> bool:
    """Return whether code that continues after an error at `place` might inspect the error."""
    return any(
        not isinstance(handler, ast.ExceptHandler) or handler.name is not None
        for handler in _handlers(place)
    )


def _handlers(place: InstructionPlace) -> Iterator[ast.AST | None]:
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
def decides(place: InstructionPlace, outcome: bool) -> bool | None:
    """Return the value of a `while` test as far as the expression at `place` decides it.

    None if it is not part of such a test, or does not decide it alone.
    """
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return None
    if is_chained_test(node) and outcome is needs_all(node):
        return None
    test, value = conclude_truth(file, node, outcome)
    return value if isinstance(test.parent, ast.While) and _is_statement_test(test) else None


@functools.cache
def dependent_source(place: InstructionPlace, outcome: bool) -> tuple[Span, ...]:
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
def leaves_loop(place: InstructionPlace, outcome: bool) -> tuple[Span, ...]:
    """Return the rest of the innermost loop that still runs, if `outcome` ends the loop."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return ()
    test, value = conclude_truth(file, node, outcome)
    if isinstance(test.parent, ast.If) and _is_statement_test(test):
        taken = test.parent.body if value else test.parent.orelse
        if taken and isinstance(taken[-1], ast.Break):
            # Unless the test has more to ask.
            return (*spans_of(taken), *([place.span] if is_chained_test(node) else []))
    return ()


def _is_statement_test(test: TruthChain) -> bool:
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
    if _is_statement_test(test):
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
        if not (isinstance(parent, ast.Call) and name_of_call(parent) in WALKERS):
            break
        if child not in parent.args:
            break
    if isinstance(node, ast.Subscript):
        return "index", file.text(node), None
    return (name_of_call(node) if isinstance(node, ast.Call) else ""), file.text(node), None


# The syntax trees of source files: spans, blocks, and the flow of truth values.

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
class SourceLoop:
    """A loop of the source; each `for` of a comprehension is one."""

    kind: str  # "for", "while" or "comprehension"
    span: Span  # the whole statement or expression
    text: str  # the iterable (`range(n)`), or the condition of a while
    # True if it can end before its bound: through its own break, return or raise, or because a
    # generator is not exhausted.
    leaves_early: bool
    head: ast.expr | None = field(repr=False)  # the iterable expression; None for a while

    @property
    def header(self) -> Span:
        """The span of the iterable; for a while, the span of the loop."""
        return self.span if self.head is None else span_of(self.head)

    def length(self, taken: Mapping[Span, Sequence[int]]) -> int | None:
        """Return the number of iterations according to the header, or None if unknown.

        It has consumed the traced sizes, in order, by the consuming expression.
        """
        if self.head is None:
            return None
        return _length(self.head, {span: iter(values) for span, values in taken.items()})


def _leaves_early(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    return any(ends_block(statement, False) for statement in loop.body)


def _length(node: ast.expr, taken: Mapping[Span, Iterator[int]]) -> int | None:
    """Return how many items walking an expression gives, as far as traced sizes tell."""
    called = name_of_call(node) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or called not in WALKERS or not node.args:
        return next(taken.get(span_of(node), iter(())), None)
    if called == "range":
        arguments = [_literal_number(argument, node, taken) for argument in node.args]
        whole = [argument for argument in arguments if argument is not None]
        return len(range(*whole)) if len(whole) == len(arguments) else None
    walked = node.args[1:] if called == "map" else node.args if called == "zip" else node.args[:1]
    lengths = []
    for item in walked:
        if isinstance(item, ast.Call) and name_of_call(item) in WALKERS:
            lengths.append(_length(item, taken))
        else:  # a tensor is walked by the call that it is handed to
            by_call = next(taken.get(span_of(node), iter(())), None)
            lengths.append(_length(item, taken) if by_call is None else by_call)
    sizes = [length for length in lengths if length is not None]
    return min(sizes) if sizes and len(sizes) == len(lengths) else None


def _literal_number(
    node: ast.expr, call: ast.Call, taken: Mapping[Span, Iterator[int]]
) -> int | None:
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

    def loops_around(self, node: ast.AST) -> tuple[SourceLoop, ...]:
        """Return the loops whose body an expression is in, outermost first."""
        found: list[SourceLoop] = []
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
    def loop(self, node: ast.AST) -> SourceLoop:
        """Describe a loop."""
        if isinstance(node, ast.While):
            text = self.text(node.test)
            return SourceLoop("while", span_of(node), text, _leaves_early(node), None)
        if isinstance(node, ast.comprehension):
            owner = self.parents[node]
            assert isinstance(owner, ast.expr)
            early = isinstance(owner, ast.GeneratorExp) and not self._is_exhausted(owner)
            return SourceLoop(
                "comprehension", span_of(owner), self.text(node.iter), early, node.iter
            )
        assert isinstance(node, (ast.For, ast.AsyncFor))
        return SourceLoop(
            "for", span_of(node), self.text(node.iter), _leaves_early(node), node.iter
        )

    def _is_exhausted(self, generator: ast.GeneratorExp) -> bool:
        caller = self.parents[generator]
        return isinstance(caller, ast.Call) and name_of_call(caller) in _EXHAUSTING

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        return span_of(node).text(self.file)


@functools.cache
def source_file(file: str) -> SourceFile:
    """Return the tree of a file; empty for one that cannot be read."""
    return SourceFile(file)


@dataclass
class TruthChain:
    """The expressions around a truth value that pass it on, unchanged or negated."""

    decider: ast.AST  # the outermost expression with this value, negations excluded
    child: ast.AST  # the expression in which it ends up
    parent: ast.AST | None  # the node that consumes that expression
    inverted: bool  # whether an odd number of `not` is in between


def follow_truth(file: SourceFile, node: ast.AST, outcome: bool | None = None) -> TruthChain:
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
        elif not (isinstance(parent, ast.Call) and name_of_call(parent) == "bool"):
            break
        child = parent
    return TruthChain(decider, child, parent, inverted)


def conclude_truth(file: SourceFile, node: ast.AST, outcome: bool) -> tuple[TruthChain, bool]:
    """Return where a truth value ends up, and its value there."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn):
        outcome = not outcome  # what was compared is an item
    test = follow_truth(file, node, outcome)
    return test, outcome is not test.inverted


def is_chained_test(node: ast.expr) -> bool:
    """Return whether an expression tests several values in turn."""
    return any_or_all(node) != "" or (
        isinstance(node, ast.Compare) and (is_containment(node) or len(node.ops) > 1)
    )


def needs_all(node: ast.expr) -> bool:
    """Return whether such an expression is true only if all of them are."""
    return any_or_all(node) == "all" or not (isinstance(node, ast.Call) or is_containment(node))


def any_or_all(node: ast.expr) -> str:
    """Return which of the two an expression calls; "" if neither."""
    called = name_of_call(node) if isinstance(node, ast.Call) else ""
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


def spans_of_item(file: SourceFile, generator: ast.comprehension, filters: int) -> tuple[Span, ...]:
    """Return the source that each item of a comprehension's `for` leads to after some filters."""
    owner = file.parents[generator]
    assert isinstance(owner, COMPREHENSIONS)
    nodes = generator.ifs[filters:]
    for later in owner.generators[owner.generators.index(generator) + 1 :]:
        nodes += [later.iter, *later.ifs]
    elements = [owner.key, owner.value] if isinstance(owner, ast.DictComp) else [owner.elt]
    return spans_of([*nodes, *elements])


def rest_of_block(file: SourceFile, statement: ast.AST) -> tuple[Span, ...]:
    """Return the code after a statement in its block, and in the blocks that this block ends."""
    spans: tuple[Span, ...] = ()
    for child, block in file.ancestors(statement):
        spans += spans_after(child, block)
        # Leaving an `if` nested in another skips the rest of that one's block too.
        if not isinstance(block, (ast.If, ast.With, ast.AsyncWith, ast.match_case)):
            break
    return spans


def spans_after(statement: ast.AST, block: ast.AST) -> tuple[Span, ...]:
    """Return the code after a statement in the block of another that it stands in."""
    blocks = (getattr(block, name, None) for name in ("body", "orelse", "finalbody"))
    for one in blocks:
        if isinstance(one, list) and statement in one:
            return spans_of(one[one.index(statement) + 1 :])
    return ()


def span_of(node: ast.AST) -> Span:
    """Return the span of a node."""
    assert isinstance(node, (ast.expr, ast.stmt, ast.pattern))
    return Span(
        node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0
    )


def spans_of(nodes: Sequence[ast.stmt | ast.expr]) -> tuple[Span, ...]:
    """Return the spans of several nodes."""
    return tuple(span_of(node) for node in nodes)


def name_of_call(call: ast.Call) -> str:
    """Return the name that a call uses; "" if it is not a plain name."""
    return call.func.id if isinstance(call.func, ast.Name) else ""


def callee_keys(frame: FrameType, owner: object) -> list[tuple[str | int, bool]]:
    """Return the keys that lead from an object to what a frame calls, as in `self.layers[i](x)`.

    With each key stands whether it is an item, and no attribute. There are none if the callee is no
    such expression on a variable that holds the object.
    """
    place = place_at(frame.f_code, frame.f_lasti)
    node: Any = source_file(place.file).expressions.get(place.span)
    node, variables = getattr(node, "func", None), frame.f_locals
    keys: list[tuple[str | int, bool]] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        key: Any = node.attr if isinstance(node, ast.Attribute) else node.slice
        if isinstance(key, ast.Name):
            key = variables.get(key.id)
        elif isinstance(key, ast.expr):
            with suppress(ValueError):
                key = ast.literal_eval(key)
        if type(key) not in (str, int):
            return []
        keys.append((key, isinstance(node, ast.Subscript)))
        node = node.value
    is_of_owner = isinstance(node, ast.Name) and variables.get(node.id) is owner
    return keys[::-1] if is_of_owner else []
