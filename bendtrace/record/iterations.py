"""The iteration of a loop in which each record of a tape was made.

Nothing counts iterations during the run. They follow from the order of the records: a record at an
instruction that is not after the previous one, in the same loop of the same running function,
belongs to the loop's next iteration.

This is exact for loops whose header is on the tape (over a tensor, or a traced range), and for a
single loop over other iterables in which each iteration leaves a record. For nested loops over
other iterables, the records alone show when an outer one continues.
"""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType

from bendtrace.python.bytecode import asking_comparisons, cache_by_code, has, single_steps
from bendtrace.python.computations import row_at
from bendtrace.python.sites import PACKAGE, InstructionPlace, Site, Span, first_offset
from bendtrace.python.statements import (
    Role,
    SourceLoop,
    compares_containers,
    decides,
    generator_iterable,
    leaves_loop,
    role_of,
)
from bendtrace.tape.guards import ContentGuard, TruthGuard
from bendtrace.tape.tape import Guard, ModuleCall, Op, OpKind, Ref, Tape, Use
from bendtrace.watch.functions import is_gate, name_of

Order = tuple[int, int]
_OF_RESULTS = (Use.RESULT, Use.METADATA)  # guards on what an op gives, not on what was asked of it
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


@dataclass(frozen=True, eq=False, slots=True)
class RecordMark:
    """A record of the tape, as seen from the user's code that led to it."""

    order: Order  # sorts marks chronologically: an op before the guards on its value
    record: Op | Guard  # the op or guard
    place: InstructionPlace  # the innermost instruction that is not torch's own
    role: Role  # the role of its expression in the statements around it
    activation: object  # the same for marks of one running function
    outer: object  # for code that the compiler made from a comprehension, the function around it
    scope: ModuleCall  # the module call whose forward contains the place
    # For an op that takes an element out of a result, the number of the op that returned the
    # result. It happens where the element is first used, under the other's place.
    element_of: int | None
    # For ops added to the model's own, whether that was "before" the op at the same place or
    # "after" it; "" for all others.
    beside: str


def user_code(scope: ModuleCall, site: Site) -> tuple[InstructionPlace, object, ModuleCall]:
    """Find the user's own code that led to a site, looking outwards through module calls.

    Return the place, a key of the running function, and the module call that it belongs to.
    """
    found, level, owner = _user_site(scope, site)
    return _test_place(found, level), (id(owner), found.chain[level + 1 :]), owner


def is_inside_comparison(record: Op | Guard, tape: Tape) -> bool:
    """Return whether Python asked for a truth while comparing containers, item by item.

    Such a truth decides nothing by itself: `(n, 2) != (3, 2)` asks whether n == 3, and a search for
    an item continues until one is equal.
    """
    assert record.site is not None
    found, level, _ = _user_site(record.scope, record.site)
    code, offset = found.chain[level]
    asking = asking_comparisons(code).get(offset)
    if asking is None:
        return dis.opname[code.co_code[offset]] in ("COMPARE_OP", "CONTAINS_OP")
    if asking.symbol == "==":
        is_item = isinstance(record, Guard) and record.use is Use.ITEM
        return is_item or compares_containers(found.places[level])
    op = tape.ops[record.index]
    if _asks_for_truth(op):
        op = tape.ops[op.args[0].index]
    return name_of(op.target).strip("_") == "eq"  # which is what is asked of items


def _asks_for_truth(op: Op) -> bool:
    """Return whether an op is the `bool` of another's result."""
    return name_of(op.target) == "__bool__" and type(op.args[0]) is Ref


def _user_site(scope: ModuleCall, site: Site) -> tuple[Site, int, ModuleCall]:
    """Return the site whose chain has the user's code in it, at which level, and its scope."""
    found: Site | None = site
    owner: ModuleCall | None = scope
    while found is not None and owner is not None:
        level = next((i for i, place in enumerate(found.places) if _is_users(place)), None)
        if level is not None:
            return found, level, owner
        found, owner = owner.site, owner.parent
    return site, site.level, scope


def _is_users(place: InstructionPlace) -> bool:
    # The tracer itself runs those of torch's functions that it looks inside of.
    return not place.in_torch and not place.file.startswith(PACKAGE)


def running_code(scope: ModuleCall, site: Site) -> Iterator[tuple[InstructionPlace, object]]:
    """Yield the places outside torch that led to a site, innermost first.

    Each place comes with the key of its running function (see `user_code`). For code that the
    compiler made from a comprehension, the function around it follows as well.
    """
    owner: ModuleCall | None = scope
    found: Site | None = site
    while found is not None and owner is not None:
        for level, place in enumerate(found.places):
            if _is_users(place):
                yield place, (id(owner), found.chain[level + 1 :])
                if place.function in _COMPREHENSIONS:
                    yield place, (id(owner), found.chain[level + 2 :])
        found, owner = owner.site, owner.parent


# The compiler attributes asking for a truth value, or for an iterator, to the statement around it,
# or to all of `a and b`. The instruction that computed the value is attributed to its expression.
_BETWEEN = ("STORE_", "COPY", "TO_BOOL")  # of a walrus, and such


def _walks_by_statement() -> bool:
    """Return whether asking for an iterator is attributed to the statement (up to Python 3.12)."""
    steps = single_steps(compile("for i in x: y", "<bendtrace>", "exec"))
    at = next(step.positions for step in steps if step.name == "GET_ITER")
    return at is None or (at.col_offset, at.end_col_offset) != (9, 10)


# Since Python 3.15, a generator asks for the iterator itself, when it is created.
_GENERATORS_ASK = has(compile("(i for i in x)", "<bendtrace>", "eval").co_consts[0], "GET_ITER")
_WALKING = ("GET_ITER",) if _walks_by_statement() else ()
_ASKING = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL", *_WALKING)


def _test_place(site: Site, level: int) -> InstructionPlace:
    """Return a place of a site; if it asks for a truth value, the place of the value."""
    place = site.places[level]
    code = site.chain[level][0]
    span = _question_spans(code).get(place.offset)
    if _GENERATORS_ASK and span is None:
        span = generator_iterable(place)
    return place if span is None else place._replace(span=span)


@cache_by_code
def _question_spans(code: CodeType) -> dict[int, Span]:
    return dict(_find_asked(code))


def _find_asked(code: CodeType) -> Iterator[tuple[int, Span]]:
    source: dis.Positions | None = None
    for step in single_steps(code):
        if step.name.startswith(_ASKING) and source is not None:
            line, end_line, column, end_column = source
            if None not in (line, end_line, column, end_column):
                yield step.offset, Span(line, column, end_line, end_column)  # type: ignore[arg-type]
        if not step.name.startswith(_BETWEEN):
            source = step.positions  # None of the combined instructions


def marks_of(tape: Tape) -> Iterator[RecordMark]:
    """Yield a mark for each op and guard that has a place in the source, in order."""
    records: list[tuple[Order, Op | Guard]] = [((op.index, 0), op) for op in tape.ops]
    records += [((g.position - 1, 1 + number), g) for number, g in enumerate(tape.guards)]
    items = {guard.index for guard in tape.guards if guard.use is Use.ITEM}
    for order, record in sorted(records, key=lambda item: item[0]):
        if record.site is not None and record.index not in tape.counters:
            place, activation, scope = user_code(record.scope, record.site)
            outer = None
            if place.function in _COMPREHENSIONS:
                found, level, owner = _user_site(record.scope, record.site)
                outer = (id(owner), found.chain[level + 2 :])
            role = role_of(place)
            place = _once(place, record, tape, items)
            yield RecordMark(
                order, record, place, role, activation, outer, scope,
                _element_of(tape, record), _beside(tape, record),
            )  # fmt: skip


def _once(
    place: InstructionPlace, record: Op | Guard, tape: Tape, items: set[int]
) -> InstructionPlace:
    """Return a place with its offset in source order, even for code compiled twice.

    Up to Python 3.13, the test of a `while` is compiled twice. Since 3.13, a comparison may ask for
    the truth of its result itself; that is placed after the comparison, at an odd offset.
    """
    assert record.site is not None
    found, level, _ = _user_site(record.scope, record.site)
    code, offset = found.chain[level]
    asks = offset in asking_comparisons(code) and _record_asks(record, items)
    asks = asks and not is_inside_comparison(record, tape)
    return place._replace(offset=first_offset(code, offset) + asks)


def _record_asks(record: Op | Guard, items: set[int]) -> bool:
    """Return whether a record asks for a truth, other than of an item of containers."""
    if isinstance(record, Guard):
        return isinstance(record, TruthGuard) and record.use not in _OF_RESULTS
    return _asks_for_truth(record) and record.index not in items


def _beside(tape: Tape, record: Op | Guard) -> str:
    op = tape.ops[record.index]
    if isinstance(record, Guard):
        if isinstance(record, ContentGuard) and record.use not in _OF_RESULTS:
            return ""  # Python has asked for the value, wherever it is from
        while op.kind is OpKind.SCALAR and _takes_element(op):
            op = tape.ops[op.args[0].index]
    return (getattr(op.target, "role", "") or "after") if is_gate(op) else ""


def _element_of(tape: Tape, record: Op | Guard) -> int | None:
    found: int | None = None
    while isinstance(record, Op) and record.kind is OpKind.SCALAR and _takes_element(record):
        found = record.args[0].index
        record = tape.ops[record.args[0].index]
    return found


def _takes_element(op: Op) -> bool:
    takes = op.target is row_at or getattr(op.target, "__name__", "") == "getitem"
    return takes and type(op.args[0]) is Ref


@dataclass
class _FunctionProgress:
    """The state of a running function while its marks are followed."""

    # The iteration of each loop that the latest mark was in, outermost first.
    at: dict[SourceLoop, int] = field(default_factory=dict)
    before: RecordMark | None = None  # the latest mark
    around: tuple[int, ...] = ()  # iterations of loops around the comprehension, if it is one
    comprehensions: set[object] = field(default_factory=set)  # those that it ran
    bodies: set[SourceLoop] = field(default_factory=set)  # the while loops whose test has passed
    # A loop that was left early, and its remaining code.
    leaving: tuple[SourceLoop, tuple[Span, ...]] | None = None


class Iterations:
    """Counts iterations over the marks of a tape."""

    def __init__(self, marks: Sequence[RecordMark]) -> None:
        self._at: dict[Order, tuple[int, ...]] = {}
        self._counts: dict[Order, int] = {}
        self._begun: set[Order] = set()
        self._running: dict[object, _FunctionProgress] = defaultdict(_FunctionProgress)
        self._heads: dict[tuple[object, SourceLoop], Order] = {}
        self._entered: set[tuple[object, SourceLoop]] = set()
        waiting: dict[object, list[Order]] = defaultdict(list)
        for mark in marks:
            if mark.element_of is not None:
                self._at[mark.order] = self._at.get((mark.element_of, 0), ())
            elif mark.beside:
                state = self._running[mark.activation]
                self._at[mark.order] = (*state.around, *state.at.values())
                if mark.beside == "before":  # the iteration is that of the op to come
                    waiting[mark.activation].append(mark.order)
            else:
                self._follow(mark)
                for order in waiting.pop(mark.activation, ()):
                    self._at[order] = self._at[mark.order]

    def at(self, order: Order) -> tuple[int, ...]:
        """Return the iteration of each loop around a mark, outermost first, from 0."""
        return self._at[order]

    def begins_while(self, order: Order) -> bool:
        """Return whether the mark is the first test of a `while` that was just entered."""
        return order in self._begun

    def count(self, order: Order) -> int:
        """Return how often the body of a loop, by its header's mark, began as records show."""
        return self._counts[order]

    def _follow(self, mark: RecordMark) -> None:
        state = self._running[mark.activation]
        outer, own = _split_loops(mark)
        around: tuple[int, ...] = ()
        if mark.outer is not None:
            enclosing = self._running[mark.outer]
            enclosing.comprehensions.add(mark.activation)
            around = tuple(enclosing.at.get(loop, 0) for loop in outer)
        if around != state.around:  # the comprehension is evaluated once more
            state = self._running[mark.activation] = _FunctionProgress(around=around)
        at = self._advance(state, mark, own)
        for loop in own:
            if loop not in at:
                state.bodies.discard(loop)
                self._entered.add((mark.activation, loop))
        state.at = {loop: at.get(loop, 0) for loop in own}
        state.before = mark
        self._at[mark.order] = (*around, *state.at.values())
        self._count(state, mark)

    def _advance(
        self, state: _FunctionProgress, mark: RecordMark, own: tuple[SourceLoop, ...]
    ) -> dict[SourceLoop, int]:
        """Return the iterations of the loops still running, including the one of this mark."""
        at = dict(state.at)
        if state.leaving is not None:
            loop, rest = state.leaving
            if not any(span.holds(mark.place.span) for span in rest):
                state.leaving = None
                at.pop(loop, None)
        tests = mark.role.tests
        if tests is not None and tests in at and tests in own and tests in state.bodies:
            at[tests] += 1
            state.bodies.discard(tests)
            return {loop: at[loop] for loop in own[: own.index(tests) + 1]}
        common = [loop for loop in own if loop in at]
        tested = common and (mark.activation, common[-1]) in self._heads
        if state.before is None or not common or not _is_back(state.before, mark):
            return at
        if common[-1].kind == "while" and tested:
            return at
        while common:
            loop = common.pop()
            at[loop] += 1
            if at[loop] != loop.length({}) or not common:
                break
            del at[loop]  # it is over: an outer one continues
        return at

    def _count(self, state: _FunctionProgress, mark: RecordMark) -> None:
        """Record headers of loops, tests of whiles, and the progress of each loop."""
        role, guard, activation = mark.role, mark.record, mark.activation
        for loop in state.at:
            if loop.kind == "while":
                if role.tests is not loop:
                    self._begin_body(state, activation, loop)
                continue
            head = self._heads.get((activation, loop)) or self._heads.get((mark.outer, loop))
            if head is not None:
                self._counts[head] = max(self._counts[head], state.at[loop] + 1)
        if not isinstance(guard, Guard) or guard.use in _OF_RESULTS:
            return
        if role.heads is not None:
            self._heads[activation, role.heads] = mark.order
            self._counts[mark.order] = 0
            for entered in (activation, *state.comprehensions):
                self._running[entered].at.pop(role.heads, None)
        if not isinstance(guard, TruthGuard):
            return
        outcome = guard.answer
        tests = role.tests
        if tests is not None and tests in state.at:
            if (activation, tests) in self._entered:
                self._entered.discard((activation, tests))
                self._heads[activation, tests] = mark.order
                self._begun.add(mark.order)
                self._counts[mark.order] = 0
            decided = decides(mark.place, outcome)
            if decided:
                self._begin_body(state, activation, tests)
            elif decided is False:
                state.leaving = (tests, ())
        rest = leaves_loop(mark.place, outcome)
        if rest and state.at:
            state.leaving = (list(state.at)[-1], rest)

    def _begin_body(self, state: _FunctionProgress, activation: object, loop: SourceLoop) -> None:
        head = self._heads.get((activation, loop))
        if loop not in state.bodies and head is not None:
            state.bodies.add(loop)
            self._counts[head] += 1


def _split_loops(mark: RecordMark) -> tuple[tuple[SourceLoop, ...], tuple[SourceLoop, ...]]:
    """Return the loops around a mark that run in other code than its own, and its own."""
    loops = mark.role.loops
    if mark.outer is None:
        return (), loops
    inner = next((i for i, loop in enumerate(loops) if loop.span == loops[-1].span), 0)
    return loops[:inner], loops[inner:]


def _is_back(before: RecordMark, mark: RecordMark) -> bool:
    """Return whether a mark can only follow the previous one in another iteration."""
    if mark.place.offset != before.place.offset:
        return mark.place.offset < before.place.offset
    (call, inner), (call_before, inner_before) = (
        _module_or_torch_call(mark),
        _module_or_torch_call(before),
    )
    if call is not call_before:
        return True  # one module called twice
    if call is not None:
        return False
    for (code, offset), (code_before, offset_before) in zip(inner, inner_before, strict=False):
        if code is not code_before or offset != offset_before:
            return code is code_before and offset < offset_before
    if len(inner) != len(inner_before) or mark.role.several:
        return False
    record, last = mark.record, before.record
    if isinstance(record, Guard):  # on the value just computed, or on the next one
        return not isinstance(last, Op) or record.index != last.index
    # Comparing containers, or finding a key, asks for the truth of one comparison after another.
    return not (isinstance(last, Guard) and record.kind is OpKind.SCALAR)


def _module_or_torch_call(
    mark: RecordMark,
) -> tuple[ModuleCall | None, tuple[tuple[CodeType, int], ...]]:
    """Return the module call, or torch's code, that led from the user's code to a record."""
    site, scope = mark.record.site, mark.record.scope
    assert site is not None
    if scope is mark.scope:
        _, level, _ = _user_site(scope, site)
        return None, site.chain[:level][::-1]
    while scope.parent is not None and scope.parent is not mark.scope:
        scope = scope.parent
    return scope, ()
