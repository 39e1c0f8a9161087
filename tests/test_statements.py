"""What the syntax tree says about the places of a small source file."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

import pytest

from bendtrace.python.sites import InstructionPlace, Span
from bendtrace.python.statements import (
    SourceLoop,
    decides,
    dependent_source,
    is_under_handler,
    leaves_loop,
    role_of,
    subscript_text,
)

Locate = Callable[[str, str], InstructionPlace]


@pytest.fixture
def locate(tmp_path: Path) -> Locate:
    """Write a source to a file and return the place of a stretch of it.

    Where the stretch occurs several times, `@` stands before the one that is meant.
    """

    def find(source: str, stretch: str) -> InstructionPlace:
        file = str(tmp_path / f"source_{abs(hash(source))}.py")
        where = source.index("@") if "@" in source else source.index(stretch)
        source = source.replace("@", "")
        with open(file, "w") as written:
            written.write(source)
        linecache.checkcache(file)
        before = source[:where]
        line = before.count("\n") + 1
        column = len(before.rpartition("\n")[2].encode())
        lines = stretch.split("\n")
        end = column + len(stretch.encode()) if len(lines) == 1 else len(lines[-1].encode())
        assert source[where:].startswith(stretch)
        return InstructionPlace(file, "f", Span(line, column, line + len(lines) - 1, end), 0)

    return find


def texts(place: InstructionPlace, spans: tuple[Span, ...]) -> list[str]:
    return [span.text(place.file) for span in spans]


# Roles


@pytest.mark.parametrize(
    ("source", "stretch", "kind", "text"),
    [
        ("if a > 0: b()", "a > 0", "if", "a > 0"),
        ("if a:\n    b()\nelif c:\n    d()", "c", "if", "c"),
        ("while a: b()", "a", "while", "a"),
        ("x = b if a else c", "a", "conditional expression", "a"),
        ("assert @a, b", "a", "assert", "a"),
        ("x = [b for b in y if b > 1]", "b > 1", "comprehension filter", "b > 1"),
        ("match x:\n    case @1: pass", "1", "match", "case 1"),
        ("match x:\n    case 1 | @2: pass", "2", "match", "case 2"),
        ("match x:\n    case y if y > 1: pass", "y > 1", "match", "y > 1"),
        ("if @a and b: c()", "a", "and", "a"),
        ("if a and @b: c()", "b", "if", "b"),
        ("x = @a or b", "a", "or", "a"),
        ("while not @a: b()", "a", "while", "a"),
        ("while not (@a or b): c()", "a", "or", "a"),
        ("while not (a or @b): c()", "b", "while", "b"),
        ("x = not @a", "a", "not", "a"),
        ("f(not @a)", "a", "not", "a"),
        ("if (n := @f(x)): pass", "f(x)", "if", "n := f(x)"),
        ("if bool(@a): pass", "a", "if", "a"),
        ("if bool(a): pass", "bool(a)", "if", "bool(a)"),
        ("if (@a if b else c): pass", "a", "if", "a if b else c"),
        ("if any(a): b()", "any(a)", "any", "any(a)"),
        ("if not all(a): b()", "all(a)", "all", "all(a)"),
        ("if a in (1, 2): b()", "a in (1, 2)", "in", "a in (1, 2)"),
        ("x = a not in b", "a not in b", "in", "a not in b"),
        ("for i in range(n): b()", "range(n)", "for", "range(n)"),
        ("for i in zip(@range(n), x): b()", "range(n)", "for", "zip(range(n), x)"),
        ("for i in f(@range(n)): b()", "range(n)", "range", "range(n)"),
        ("x = [i for i in range(n)]", "range(n)", "comprehension", "range(n)"),
        ("x = {i for j in y for i in @j}", "j", "comprehension", "j"),
        ("x = a[n]", "a[n]", "index", "a[n]"),
        ("x = int(n)", "int(n)", "int", "int(n)"),
        ("x = a.sum()", "a.sum()", "", "a.sum()"),
        ("x = a + b", "a + b", "", "a + b"),
        ("x = a < b < c", "a < b < c", "and", "a < b < c"),
        ("if a < b < c: d()", "a < b < c", "if", "a < b < c"),
        ("if max(a, b) > 1: c()", "max(a, b)", "max", "max(a, b)"),
        ("if (\n    a\n    > 0\n): b()", "a\n    > 0", "if", "a > 0"),
    ],
)
def test_each_expression_has_the_role_of_what_it_decides(
    locate: Locate, source: str, stretch: str, kind: str, text: str
) -> None:
    role = role_of(locate(source, stretch))
    assert (role.kind, role.text) == (kind, text)


def test_a_subscript_knows_that_it_is_one(locate: Locate) -> None:
    role = role_of(locate("for i in a[:n]: b()", "a[:n]"))
    assert (role.kind, role.is_subscript) == ("for", True)
    assert not role_of(locate("for i in a: b()", "a")).is_subscript


def test_what_asks_for_many_values_at_once_knows_it(locate: Locate) -> None:
    assert role_of(locate("x = any(y)", "any(y)")).several
    assert role_of(locate("x = a in b", "a in b")).several
    assert not role_of(locate("x = f(y)", "f(y)")).several
    assert not role_of(locate("x = y.any()", "y.any()")).several


def test_a_place_that_is_no_expression_has_no_role(locate: Locate) -> None:
    role = role_of(locate("for i in x:\n    pass", "for i in x:\n    pass"))
    assert (role.kind, role.text, role.heads, role.loops) == ("", "for i in x: pass", None, ())


def test_a_place_that_is_no_expression_has_loops_around_it(locate: Locate) -> None:
    assert around(locate("while a:\n    b /= 2", "b /= 2")) == [("while", "a")]
    assert around(locate("while a:\n    b, c = d", "b, c = d")) == [("while", "a")]
    # Not an expression of the tree either: a part of one.
    assert around(locate("for a in x:\n    b = c + d + e", "+ d")) == [("for", "x")]


def test_a_whole_assert_stands_for_its_test(locate: Locate) -> None:
    role = role_of(locate("assert a > 0, b", "assert a > 0, b"))
    assert (role.kind, role.text) == ("assert", "a > 0")


def test_a_file_that_is_not_python_has_no_roles(tmp_path: Path) -> None:
    file = tmp_path / "cell"
    file.write_text("%magic x\nif a: b()\n")
    role = role_of(InstructionPlace(str(file), "f", Span(2, 3, 2, 4), 0))
    assert (role.kind, role.text, role.loops) == ("", "a", ())


def test_a_file_that_is_not_there_has_neither_roles_nor_text() -> None:
    place = InstructionPlace("<nowhere>", "f", Span(1, 0, 1, 5), 0)
    assert role_of(place).kind == ""
    assert role_of(place).text == ""
    assert dependent_source(place, True) == ()
    assert decides(place, True) is None
    assert leaves_loop(place, True) == ()
    assert is_under_handler(place)  # for all one knows


def test_the_part_taken_of_a_shape_is_the_subscript_around_it(locate: Locate) -> None:
    assert subscript_text(locate("n = x.shape[0] + 1", "x.shape")) == "x.shape[0]"
    assert subscript_text(locate("a, b = x.shape", "x.shape")) == "x.shape"
    assert subscript_text(locate("y = z[x.shape]", "x.shape")) == "x.shape"


# Loops


def around(place: InstructionPlace) -> list[tuple[str, str]]:
    return [(loop.kind, loop.text) for loop in role_of(place).loops]


NESTED = """\
def f(x):
    for row in x:
        while row.any():
            y = [{0} for a in row for b in a if {1}]
        else:
            {2}
    return {3}
"""


def test_loops_around_are_listed_outermost_first(locate: Locate) -> None:
    outer = [("for", "x"), ("while", "row.any()")]
    inner = [("comprehension", "row"), ("comprehension", "a")]
    assert around(locate(NESTED.format("g()", 1, 2, 3), "g()")) == outer + inner
    assert around(locate(NESTED.format(0, "g()", 2, 3), "g()")) == outer + inner
    assert around(locate(NESTED.format(0, 1, "g()", 3), "g()")) == [("for", "x")]
    assert around(locate(NESTED.format(0, 1, 2, "g()"), "g()")) == []


def test_the_header_of_a_for_is_outside_and_the_test_of_a_while_inside(locate: Locate) -> None:
    assert around(locate("for row in f(x): pass", "f(x)")) == []
    assert around(locate("while f(x): pass", "f(x)")) == [("while", "f(x)")]


def test_the_header_of_a_later_for_is_inside_those_before_it(locate: Locate) -> None:
    source = "y = [b for a in x for b in @f(a)]"
    assert around(locate(source, "f(a)")) == [("comprehension", "x")]


def test_loops_around_end_at_the_function(locate: Locate) -> None:
    assert around(locate("for a in x:\n    def f():\n        g()", "g()")) == []
    assert around(locate("for a in x:\n    y = lambda: g()", "g()")) == []
    assert around(locate("for a in x:\n    class C:\n        y = g()", "g()")) == [("for", "x")]


def test_a_header_knows_its_loop_and_a_test_its_while(locate: Locate) -> None:
    head = role_of(locate("for i in range(n): f(i)", "range(n)"))
    assert head.heads is not None
    assert head.tests is None
    assert (head.heads.kind, head.heads.text) == ("for", "range(n)")
    assert head.heads.span == Span(1, 0, 1, 23)
    assert head.heads.header == Span(1, 9, 1, 17)
    inside = role_of(locate("for i in range(n): f(i)", "f(i)"))
    assert inside.loops == (head.heads,)
    test = role_of(locate("while a and f(b): g()", "f(b)"))
    assert test.heads is None
    assert test.tests is not None
    assert test.tests.text == "a and f(b)"
    assert role_of(locate("while a and f(@b): g()", "b")).tests is not None
    assert role_of(locate("while a: g()", "g()")).tests is None


@pytest.mark.parametrize(
    ("source", "early"),
    [
        ("for a in @x:\n    g()", False),
        ("for a in @x:\n    if a: break", True),
        ("for a in @x:\n    if a: continue", False),
        ("def f():\n    for a in @x:\n        return a", True),
        ("for a in @x:\n    raise E", True),
        ("for a in @x:\n    for b in a:\n        break", False),
        ("for a in @x:\n    for b in a:\n        pass\n    else:\n        break", True),
        ("for a in @x:\n    def f():\n        return 1", False),
        ("for a in @x:\n    pass\nelse:\n    raise E", False),
        ("y = [a for a in @x if a]", False),
        ("y = sum(a for a in @x)", False),
        ("y = any(a for a in @x)", True),
        ("y = (a for a in @x)", True),
    ],
)
def test_loops_know_whether_they_can_end_before_their_bound(
    locate: Locate, source: str, early: bool
) -> None:
    loop = role_of(locate(source, "x")).heads
    assert loop is not None
    assert loop.leaves_early is early


def loop_over(locate: Locate, header: str) -> tuple[SourceLoop, Callable[[str], Span]]:
    source = f"for i in {header}: pass"
    place = locate(source, header)
    loop = role_of(place).heads
    if loop is None:  # the header asks for nothing itself: find it from the body
        (loop,) = role_of(locate(f"for i in {header}: g()", "g()")).loops
    return loop, lambda stretch: locate(source, stretch).span


@pytest.mark.parametrize(
    ("header", "taken", "length"),
    [
        ("range(n)", {"range(n)": [4]}, 4),
        ("range(n)", {}, None),
        ("range(2, n)", {"range(2, n)": [7]}, 5),
        ("range(-1, n, 3)", {"range(-1, n, 3)": [7]}, 3),
        ("range(n, m)", {"range(n, m)": [2, 7]}, 5),
        ("range(n, m)", {"range(n, m)": [2]}, None),
        ("range(n, 0, -1)", {"range(n, 0, -1)": [3]}, 3),
        ("range(5)", {}, 5),
        ("range(len(x))", {"len(x)": [3]}, 3),
        ("range(1, len(x))", {"len(x)": [3]}, 2),
        ("range(len(x) - 1)", {"len(x)": [3]}, None),
        ("enumerate(x)", {"enumerate(x)": [3]}, 3),
        ("zip(x, y)", {"zip(x, y)": [3, 2]}, 2),
        ("zip(x, y)", {"zip(x, y)": [3]}, None),
        ("enumerate(zip(x, y), 1)", {"zip(x, y)": [3, 4]}, 3),
        ("zip(range(n), x)", {"range(n)": [2], "zip(range(n), x)": [3]}, 2),
        ("reversed(range(n))", {"range(n)": [2]}, 2),
        ("map(f, x)", {"map(f, x)": [2]}, 2),
        ("x.split(2)", {"x.split(2)": [2]}, 2),
        ("x", {}, None),
    ],
)
def test_the_length_of_a_loop_follows_from_what_its_header_consumed(
    locate: Locate, header: str, taken: dict[str, list[int]], length: int | None
) -> None:
    loop, span = loop_over(locate, header)
    assert loop.length({span(stretch): values for stretch, values in taken.items()}) == length


def test_a_while_has_no_length(locate: Locate) -> None:
    loop = role_of(locate("while a: b()", "a")).tests
    assert loop is not None
    assert loop.length({}) is None
    assert loop.header == loop.span == Span(1, 0, 1, 12)


# What a test comes to


@pytest.mark.parametrize(
    ("source", "stretch", "if_true", "if_false"),
    [
        ("while a: b()", "a", True, False),
        ("while not a: b()", "a", False, True),
        ("while @a and b: c()", "a", None, False),
        ("while a and @b: c()", "b", True, False),
        ("while @a or b: c()", "a", True, None),
        ("while not (@a or b): c()", "a", False, None),
        ("while not (a and not @b): c()", "b", True, False),
        ("while any(a): b()", "any(a)", True, None),
        ("while all(a): b()", "all(a)", None, False),
        ("while not all(a): b()", "all(a)", None, True),
        ("while a in b: c()", "a in b", True, None),
        ("while a not in b: c()", "a not in b", False, None),
        ("while a < b < c: d()", "a < b < c", None, False),
        ("while not a < b < c: d()", "a < b < c", None, True),
        ("if a: b()", "a", None, None),
        ("while f(@a): b()", "a", None, None),
    ],
)
def test_operands_decide_the_test_of_a_while_or_leave_it_open(
    locate: Locate, source: str, stretch: str, if_true: bool | None, if_false: bool | None
) -> None:
    place = locate(source, stretch)
    assert (decides(place, True), decides(place, False)) == (if_true, if_false)


def test_a_side_that_breaks_leaves_the_loop(locate: Locate) -> None:
    source = "for a in x:\n    if @b:\n        c()\n        break\n    d()"
    place = locate(source, "b")
    assert texts(place, leaves_loop(place, True)) == ["c()", "break"]
    assert leaves_loop(place, False) == ()
    source = "for a in x:\n    if not @b: pass\n    else: break"
    place = locate(source, "b")
    assert texts(place, leaves_loop(place, True)) == ["break"]
    assert leaves_loop(locate("for a in x:\n    if @b: continue", "b"), True) == ()
    place = locate("for a in x:\n    if all(b): break", "all(b)")
    assert texts(place, leaves_loop(place, True)) == ["break", "all(b)"]  # it may go on asking


# What runs because of it


@pytest.mark.parametrize(
    ("source", "stretch", "if_true", "if_false"),
    [
        ("if @a:\n    b()\n    c()\nelse:\n    d()\ne()", "a", ["b()", "c()"], ["d()"]),
        ("if @a:\n    b()\ne()", "a", ["b()"], []),
        ("if not @a:\n    b()\nelse:\n    c()", "a", ["c()"], ["b()"]),
        ("if a:\n    b()\nelif @c:\n    d()\nelse:\n    e()", "c", ["d()"], ["e()"]),
        ("if @a:\n    b()\nelif c:\n    d()", "a", ["b()"], ["elif c: d()"]),
        ("def f():\n    if @a:\n        return 1\n    b()\n    c()", "a",
         ["return 1"], ["b()", "c()"]),
        ("def f():\n    if @a:\n        b()\n    else:\n        raise E\n    c()", "a",
         ["b()", "c()"], ["raise E"]),
        ("for i in x:\n    if @a: continue\n    b()\nc()", "a", ["continue"], ["b()"]),
        ("for i in x:\n    if @a: break\n    b()\nelse:\n    d()\nc()", "a", ["break"], ["b()"]),
        ("def f():\n    if a:\n        if @b:\n            return 1\n        c()\n    d()", "b",
         ["return 1"], ["c()", "d()"]),
        ("def f():\n    if @a:\n        if b: return 1\n        else: return 2\n    c()", "a",
         ["if b: return 1 else: return 2"], ["c()"]),
        ("x = @b if a else c", "b", [], []),
        ("x = b if @a else c", "a", ["b"], ["c"]),
        ("if @a and b and c: d()", "a", ["b", "c"], []),
        ("if @a and b: d()\nelse: e()", "a", ["b"], ["e()"]),
        ("if @a or b: d()\nelse: e()", "a", ["d()"], ["b"]),
        ("x = @a or b", "a", [], ["b"]),
        ("while @a: b()", "a", ["b()"], []),
        ("while @a:\n    b()\nelse:\n    c()", "a", ["b()"], ["c()"]),
        ("for i in @x: b()", "x", ["b()"], ["b()"]),
        ("for i in @range(n):\n    b()\nelse:\n    c()", "range(n)", ["b()"], ["b()"]),
        ("y = [f(a) for a in @x if g(a)]", "x", ["g(a)", "f(a)"], ["g(a)", "f(a)"]),
        ("y = [f(b) for a in @x for b in a]", "x", ["a", "f(b)"], ["a", "f(b)"]),
        ("y = [f(a) for a in x if @a if g(a)]", "a", ["g(a)", "f(a)"], []),
        ("y = {k(a): v(a) for a in x if @a}", "a", ["k(a)", "v(a)"], []),
        ("if any(a): b()\nelse: c()", "any(a)", ["b()"], ["c()"]),
        ("if a not in b: c()\nelse: d()", "a not in b", ["d()"], ["c()"]),
        ("if max(a, b) > 1: c()", "max(a, b)", [], []),
        ("assert @a\nb()", "a", [], []),
        ("match x:\n    case @1: a()\n    case y if g(y): b()\n    case _: c()\nd()", "1",
         ["a()"], ["y", "g(y)", "b()", "_", "c()"]),
        ("match x:\n    case y if @g(y): b()\n    case _: c()", "g(y)",
         ["g(y)", "b()"], ["_", "c()"]),
        ("def f():\n    match x:\n        case @1: return 1\n    c()", "1", ["return 1"], ["c()"]),
        ("f(@a)", "a", [], []),
    ],
)  # fmt: skip
def test_a_condition_governs_the_side_taken(
    locate: Locate, source: str, stretch: str, if_true: list[str], if_false: list[str]
) -> None:
    place = locate(source, stretch)
    assert texts(place, dependent_source(place, True)) == if_true
    assert texts(place, dependent_source(place, False)) == if_false


# Handlers


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("try:\n    g()\nexcept E:\n    pass", True),
        ("try:\n    if a:\n        x = g()\nexcept E:\n    pass", True),
        ("try:\n    pass\nexcept E:\n    g()", False),
        ("try:\n    pass\nexcept E:\n    pass\nelse:\n    g()", False),
        ("try:\n    g()\nfinally:\n    pass", False),
        ("try:\n    try:\n        g()\n    finally:\n        pass\nexcept E:\n    pass", True),
        ("try:\n    g()\nexcept* E:\n    pass", True),
        ("try:\n    def f():\n        g()\nexcept E:\n    pass", False),
        ("with suppress(E):\n    g()", True),
        ("with contextlib.suppress(E):\n    g()", True),
        ("with own_context():\n    g()", True),  # whatever that does
        ("with no_grad():\n    g()", False),
        ("with torch.autocast('cpu'):\n    g()", False),
        ("def f():\n    try:\n        g()\n    finally:\n        return 1", True),
        ("g()", False),
    ],
)
def test_what_a_handler_would_catch_is_known(locate: Locate, source: str, caught: bool) -> None:
    assert is_under_handler(locate(source, "g()")) is caught


def test_statements_are_under_handlers_too(locate: Locate) -> None:
    """Walking a tensor without dimensions raises, ascribed to the whole `for`."""
    loop = "for i in x:\n        pass"
    assert is_under_handler(locate(f"try:\n    {loop}\nexcept E:\n    pass", loop))
    branch = "if a:\n        pass"
    assert is_under_handler(locate(f"try:\n    {branch}\nexcept E:\n    pass", branch))
