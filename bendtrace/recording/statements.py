"""What kind of statement consumed a value, read off the syntax tree of the source file."""

from __future__ import annotations

import ast
import functools
import linecache
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bendtrace.recording.sites import Place, Span

__all__ = [
    "Loop",
    "Role",
    "asks_for_error",
    "decides",
    "governed",
    "is_under_handler",
    "leaves_loop",
    "part_taken",
    "role_of",
]

# What takes the items of its arguments in step with the loop around it.
_WALKERS = frozenset({"enumerate", "iter", "list", "map", "range", "reversed", "tuple", "zip"})
_EXHAUSTING = frozenset(
    {"dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple"}
)
_SEVERAL = _WALKERS | _EXHAUSTING | {"all", "any", "dict", "filter"}
# CPython 3.11 counts the depth of what it parses per process (gh-106905).
_parsing = threading.Lock()
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BRANCHES = (ast.If, ast.IfExp, ast.While)
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Loop:
    """A loop of the source; each `for` of a comprehension is one.

    Attributes:
        kind: "for", "while" or "comprehension".
        span: the whole statement or expression.
        text: what is walked (`range(n)`), or the condition of a while.
        leaves_early: whether it can end before its bound: by a break, return or raise of its
            own, or because nothing asks a generator for more.
        head: the expression walked; None for a while.
    """

    kind: str
    span: Span
    text: str
    leaves_early: bool
    head: ast.expr | None = field(repr=False)

    @property
    def header(self) -> Span:
        """Where the expression walked stands; for a while, the loop."""
        return self.span if self.head is None else _span(self.head)

    def length(self, taken: Mapping[Span, Sequence[int]]) -> int | None:
        """Return how many iterations the header provides for, or None if that is not known.

        Args:
            taken: the traced sizes that the header consumed, in order, by the expression that
                consumed them.
        """
        if self.head is None:
            return None
        return _length(self.head, {span: iter(values) for span, values in taken.items()})


@dataclass(frozen=True)
class Role:
    """What an expression is to the statements around it.

    Attributes:
        kind: "if", "while", "conditional expression", "and", "or", "not", "assert",
            "comprehension filter", "match", "in", "for", "comprehension", "index", the name of
            a called builtin, or "" where none of these fits. What decides a condition has the
            kind of the condition; "and" and "or" are operands after which others may follow,
            "not" is one whose inverse is a value of its own.
        text: source of the expression that decides.
        heads: the `for` that the expression is the header of, or a part of its header.
        tests: the `while` in whose test the expression stands.
        loops: the loops of the same function around it, outermost first.
        is_subscript: whether the expression itself is `a[...]`.
        several: whether carrying it out once can ask for many values: `any(...)`, `a in b`.
    """

    kind: str
    text: str
    heads: Loop | None
    tests: Loop | None
    loops: tuple[Loop, ...]
    is_subscript: bool = False
    several: bool = False


class _File:
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
                self.expressions.setdefault(_span(node), node)
            elif isinstance(node, ast.stmt):
                self.statements.setdefault(_span(node), node)

    def statement_at(self, span: Span) -> ast.stmt | None:
        """Return the innermost statement that holds a stretch of source."""
        holding = [node for around, node in self.statements.items() if around.holds(span)]
        return max(holding, key=lambda node: _span(node)[:2], default=None)

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (child, parent) from `node` outwards."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def loops_around(self, node: ast.AST) -> tuple[Loop, ...]:
        found: list[Loop] = []
        for child, parent in self.ancestors(node):
            if isinstance(parent, _FUNCTIONS):
                break
            if isinstance(parent, _LOOPS):
                # The iterable of a for is evaluated once, before the loop; a test each time.
                if child is not getattr(parent, "iter", None) and child not in parent.orelse:
                    found.append(self.loop(parent))
            elif isinstance(parent, ast.comprehension):
                if child is not parent.iter:
                    found.append(self.loop(parent))
                owner = self.parents[parent]
                assert isinstance(owner, _COMPREHENSIONS)
                before = owner.generators[: owner.generators.index(parent)]
                found += map(self.loop, reversed(before))
            elif isinstance(parent, _COMPREHENSIONS) and not isinstance(child, ast.comprehension):
                found += map(self.loop, reversed(parent.generators))
        return tuple(reversed(found))

    @functools.cache  # noqa: B019 - files are few and kept for the life of the process anyway
    def loop(self, node: ast.AST) -> Loop:
        if isinstance(node, ast.While):
            text = self.text(node.test)
            return Loop("while", _span(node), text, _leaves_early(node), None)
        if isinstance(node, ast.comprehension):
            owner = self.parents[node]
            assert isinstance(owner, ast.expr)
            early = isinstance(owner, ast.GeneratorExp) and not self._is_exhausted(owner)
            return Loop("comprehension", _span(owner), self.text(node.iter), early, node.iter)
        assert isinstance(node, (ast.For, ast.AsyncFor))
        return Loop("for", _span(node), self.text(node.iter), _leaves_early(node), node.iter)

    def _is_exhausted(self, generator: ast.GeneratorExp) -> bool:
        caller = self.parents[generator]
        return isinstance(caller, ast.Call) and _called(caller) in _EXHAUSTING

    def text(self, node: ast.AST) -> str:
        return _span(node).text(self.file)


@functools.cache
def _file(file: str) -> _File:
    return _File(file)


@dataclass
class _Test:
    """How far a truth value is handed on, as it is or inverted, by the expressions around it.

    Attributes:
        decider: the outermost expression that it is the value of, inversions left out.
        child: the expression in which it ends up.
        parent: what consumes that one.
        inverted: whether an odd number of `not` lies between.
    """

    decider: ast.AST
    child: ast.AST
    parent: ast.AST | None
    inverted: bool


def _follow(file: _File, node: ast.AST, outcome: bool | None = None) -> _Test:
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
        elif not (isinstance(parent, ast.Call) and _called(parent) == "bool"):
            break
        child = parent
    return _Test(decider, child, parent, inverted)


def _conclude(file: _File, node: ast.AST, outcome: bool) -> tuple[_Test, bool]:
    """Return where a truth value ends up, and what it has become there."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn):
        outcome = not outcome  # what was compared is an item
    test = _follow(file, node, outcome)
    return test, outcome is not test.inverted


@functools.cache
def role_of(place: Place) -> Role:
    """Find what the expression at `place` is to the statements around it."""
    file = _file(place.file)
    node = file.expressions.get(place.span)
    if node is None:  # code that a tool made of a statement, as pytest does of `assert`
        statement = file.statements.get(place.span)
        node = statement.test if isinstance(statement, ast.Assert) else None
    if node is None:
        around = file.statement_at(place.span)
        loops = () if around is None else file.loops_around(around)
        return Role("", place.text, None, None, loops)
    several = _is_containment(node) or (isinstance(node, ast.Call) and _called(node) in _SEVERAL)
    kind, text, loop = _classify(file, node)
    heads = None if loop is None else file.loop(loop)
    tested = _while_around(file, node)
    tests = None if tested is None else file.loop(tested)
    loops = file.loops_around(node)
    return Role(kind, text, heads, tests, loops, isinstance(node, ast.Subscript), several)


@functools.cache
def part_taken(place: Place) -> str:
    """Return the source of the subscript around `place`: `x.shape[0]` for `x.shape`."""
    file = _file(place.file)
    node = file.expressions.get(place.span)
    parent = None if node is None else file.parents[node]
    taken = isinstance(parent, ast.Subscript) and parent.value is node
    return file.text(parent) if taken and parent is not None else place.text


@functools.cache
def is_under_handler(place: Place) -> bool:
    """Whether the same function might go on after what is raised at `place`.

    Asked for places that the exception table of their code covers. Of these, the source can
    only rule out blocks under torch's own context managers.
    """
    return any(True for _ in _handlers(place))


@functools.cache
def asks_for_error(place: Place) -> bool:
    """Whether code that goes on after what is raised at `place` might look at the error."""
    return any(
        not isinstance(handler, ast.ExceptHandler) or handler.name is not None
        for handler in _handlers(place)
    )


def _handlers(place: Place) -> Iterator[ast.AST | None]:
    """Yield what might stop an error: handlers, other blocks, None where there is no source."""
    file = _file(place.file)
    node: ast.AST | None = file.expressions.get(place.span) or file.statements.get(place.span)
    if node is None:
        yield None
        return
    for child, parent in file.ancestors(node):
        if isinstance(parent, _FUNCTIONS):
            return
        if isinstance(parent, (ast.Try, ast.TryStar)):
            if child in parent.body:
                yield from parent.handlers
            # A finally block can leave the function, or the loop, and so drop the error.
            if any(_ends(statement, False) for statement in parent.finalbody):
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
    """Return what the test of a `while` comes to because of the expression at `place`.

    None if it is no part of such a test, or if that depends on more.
    """
    file = _file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return None
    if _is_one_of_several(node) and outcome is _needs_all(node):
        return None
    test, value = _conclude(file, node, outcome)
    return value if isinstance(test.parent, ast.While) and _is_test(test) else None


@functools.cache
def governed(place: Place, outcome: bool) -> tuple[Span, ...]:
    """Return the source that runs because the expression at `place` came out as it did.

    For the header of a loop, its body; for a branch, the side taken, which goes on to the end
    of the block where the other side leaves it.
    """
    file = _file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return ()
    loop = _classify(file, node)[2]
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        return _spans(loop.body)
    if isinstance(loop, ast.comprehension):
        return _of_generator(file, loop, 0)
    if isinstance(file.parents[node], ast.pattern):
        case = next(p for _, p in file.ancestors(node) if isinstance(p, ast.match_case))
        return _of_case(file, case, outcome)
    test, value = _conclude(file, node, outcome)
    child, parent = test.child, test.parent
    if isinstance(parent, ast.BoolOp):
        position = next(i for i, operand in enumerate(parent.values) if operand is child)
        return _spans(parent.values[position + 1 :])
    if isinstance(parent, _BRANCHES) and child is parent.test:
        return _side(file, parent, value)
    if isinstance(parent, ast.match_case):
        return _of_case(file, parent, value)
    if isinstance(parent, ast.comprehension) and child in parent.ifs and value:
        position = next(i for i, condition in enumerate(parent.ifs) if condition is child)
        return _of_generator(file, parent, position + 1)
    return ()


@functools.cache
def leaves_loop(place: Place, outcome: bool) -> tuple[Span, ...]:
    """Return what is still run of the innermost loop, if `outcome` makes it break off."""
    file = _file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return ()
    test, value = _conclude(file, node, outcome)
    if isinstance(test.parent, ast.If) and _is_test(test):
        taken = test.parent.body if value else test.parent.orelse
        if taken and isinstance(taken[-1], ast.Break):
            # Unless the test has more to ask.
            return (*_spans(taken), *([place.span] if _is_one_of_several(node) else []))
    return ()


def _is_test(test: _Test) -> bool:
    return test.child is getattr(test.parent, "test", None)


def _is_one_of_several(node: ast.expr) -> bool:
    """Whether an expression asks for the truth of several things in turn."""
    return _called_any_or_all(node) != "" or (
        isinstance(node, ast.Compare) and (_is_containment(node) or len(node.ops) > 1)
    )


def _needs_all(node: ast.expr) -> bool:
    """Whether such an expression is true only if all of them are."""
    return _called_any_or_all(node) == "all" or not (
        isinstance(node, ast.Call) or _is_containment(node)
    )


def _called_any_or_all(node: ast.expr) -> str:
    called = _called(node) if isinstance(node, ast.Call) else ""
    return called if called in ("any", "all") else ""


def _is_containment(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn))


def _side(file: _File, branch: ast.If | ast.IfExp | ast.While, outcome: bool) -> tuple[Span, ...]:
    if isinstance(branch, ast.IfExp):
        return (_span(branch.body if outcome else branch.orelse),)
    taken, other = (branch.body, branch.orelse) if outcome else (branch.orelse, branch.body)
    spans = _spans(taken)
    if isinstance(branch, ast.If) and _closes(other):
        spans += _rest_of_block(file, branch)
    return spans


def _closes(block: list[ast.stmt]) -> bool:
    """Whether what follows a block is only reached on the other side."""
    if not block:
        return False
    last = block[-1]
    if isinstance(last, ast.If):
        return _closes(last.body) and _closes(last.orelse)
    return isinstance(last, _LEAVING)


def _rest_of_block(file: _File, statement: ast.AST) -> tuple[Span, ...]:
    """Return what follows a statement in its block, and in those that its block ends."""
    spans: tuple[Span, ...] = ()
    for child, block in file.ancestors(statement):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(block, name, None)
            if isinstance(statements, list) and child in statements:
                spans += _spans(statements[statements.index(child) + 1 :])
        # Leaving an `if` nested in another skips the rest of that one's block too.
        if not isinstance(block, (ast.If, ast.With, ast.AsyncWith, ast.match_case)):
            break
    return spans


def _of_case(file: _File, case: ast.match_case, outcome: bool) -> tuple[Span, ...]:
    if outcome:
        return _spans([*([case.guard] if case.guard else []), *case.body])
    match = file.parents[case]
    assert isinstance(match, ast.Match)
    spans: tuple[Span, ...] = ()
    for other in match.cases[match.cases.index(case) + 1 :]:
        guard = [other.guard] if other.guard else []
        spans += (_span(other.pattern), *_spans([*guard, *other.body]))
    return spans + (_rest_of_block(file, match) if _closes(case.body) else ())


def _of_generator(file: _File, generator: ast.comprehension, passed: int) -> tuple[Span, ...]:
    """Return what each item of a comprehension's `for` leads to, having passed some filters."""
    owner = file.parents[generator]
    assert isinstance(owner, _COMPREHENSIONS)
    nodes = generator.ifs[passed:]
    for later in owner.generators[owner.generators.index(generator) + 1 :]:
        nodes += [later.iter, *later.ifs]
    elements = [owner.key, owner.value] if isinstance(owner, ast.DictComp) else [owner.elt]
    return _spans([*nodes, *elements])


def _spans(nodes: Sequence[ast.stmt | ast.expr]) -> tuple[Span, ...]:
    return tuple(_span(node) for node in nodes)


def _classify(file: _File, node: ast.expr) -> tuple[str, str, ast.AST | None]:
    """Return the kind, the text that decides, and the loop that the expression heads."""
    # Whether an item is contained, any and all: the truth of many things, a plain answer.
    if _is_containment(node):
        return "in", file.text(node), None
    if called := _called_any_or_all(node):
        return called, file.text(node), None
    if isinstance(file.parents[node], ast.pattern):
        return "match", f"case {file.text(node)}", None
    test = _follow(file, node)
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


def _while_around(file: _File, node: ast.AST) -> ast.While | None:
    """Return the `while` in whose test an expression stands."""
    for child, parent in file.ancestors(node):
        if isinstance(parent, ast.While):
            return parent if child is parent.test else None
        if isinstance(parent, (ast.stmt, ast.Lambda)):
            return None
    return None


def _classify_walk(file: _File, node: ast.expr) -> tuple[str, str, ast.AST | None]:
    for child, parent in file.ancestors(node):
        if isinstance(parent, ast.comprehension) and child is parent.iter:
            return "comprehension", file.text(child), parent
        if isinstance(parent, (ast.For, ast.AsyncFor)) and child is parent.iter:
            return "for", file.text(child), parent
        if not (isinstance(parent, ast.Call) and _called(parent) in _WALKERS):
            break
        if child not in parent.args:
            break
    if isinstance(node, ast.Subscript):
        return "index", file.text(node), None
    return (_called(node) if isinstance(node, ast.Call) else ""), file.text(node), None


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _length(node: ast.expr, taken: Mapping[Span, Iterator[int]]) -> int | None:
    """Return how many items walking an expression gives, as far as traced sizes tell."""
    called = _called(node) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or called not in _WALKERS or not node.args:
        return next(taken.get(_span(node), iter(())), None)
    if called == "range":
        arguments = [_number(argument, node, taken) for argument in node.args]
        whole = [argument for argument in arguments if argument is not None]
        return len(range(*whole)) if len(whole) == len(arguments) else None
    walked = node.args[1:] if called == "map" else node.args if called == "zip" else node.args[:1]
    lengths = []
    for item in walked:
        if isinstance(item, ast.Call) and _called(item) in _WALKERS:
            lengths.append(_length(item, taken))
        else:  # a tensor is walked by the call that it is handed to
            by_call = next(taken.get(_span(node), iter(())), None)
            lengths.append(_length(item, taken) if by_call is None else by_call)
    known = [length for length in lengths if length is not None]
    return min(known) if known and len(known) == len(lengths) else None


def _number(node: ast.expr, call: ast.Call, taken: Mapping[Span, Iterator[int]]) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        by_itself = next(taken.get(_span(node), iter(())), None)  # len(x), int(n)
        return next(taken.get(_span(call), iter(())), None) if by_itself is None else by_itself
    return value if type(value) is int else None


def _leaves_early(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    return any(_ends(statement, False) for statement in loop.body)


def _ends(node: ast.AST, inner: bool) -> bool:
    """Whether a statement can end the loop, or function, around it."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return False
    if isinstance(node, (ast.Return, ast.Raise)):
        return True
    if isinstance(node, ast.Break):
        return not inner
    if isinstance(node, _LOOPS):  # a break in its else belongs to the loop around it
        return any(_ends(child, True) for child in node.body) or any(
            _ends(child, inner) for child in node.orelse
        )
    return any(_ends(child, inner) for child in ast.iter_child_nodes(node))


def _span(node: ast.AST) -> Span:
    assert isinstance(node, (ast.expr, ast.stmt, ast.pattern))
    return Span(
        node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0
    )
