"""Statements of control flow: branches, errors, loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .scalars import small
from .statements import body, statement
from .writer import WIDTH, List, Maybe, Tensor, Var, Writer

# Branches


@statement(weight=7)
def branch(w: Writer) -> None:
    condition, name = w.statement_expression(bool), ""
    if w.chance(6):
        name = w.fresh("n")
        condition = f"({name} := {w.write(int)}) {w.pick(('> 1', '== 2', 'in (0, 3)'))}"
    with w.block(f"if {condition}:"):
        if name:
            w.scope.append(Var(name, int))
        body(w, effect=True)
    form = w.below(4)
    if form == 2:
        with w.block(f"elif {w.statement_expression(bool)}:"):
            body(w, effect=True)
    if form:
        with w.block("else:"):
            body(w, effect=True)


@statement(lambda w: w.indent < 6 and w.result is not None)
def early(w: Writer) -> None:
    with w.block(f"if {w.statement_expression(bool)}:"):
        body(w)
        if w.loops and w.below(2):
            w.line(w.pick(("break", "continue")))
        else:
            assert w.result is not None
            w.line(f"return {w.statement_expression(w.result)}")


@statement(lambda w: w.loops, weight=3)
def leave(w: Writer) -> None:
    with w.block(f"if {w.statement_expression(bool)}:"):
        body(w)
        w.line(w.pick(("break", "continue")))


@statement(lambda w: w.of_class(Maybe), weight=2)
def optional(w: Writer) -> None:
    var = w.pick(w.of_class(Maybe))
    with w.block(f"if {var.name} is not None:"):
        w.scope.append(Var(var.name, var.kind.of, var.writable))
        body(w, effect=True)


@statement()
def match(w: Writer) -> None:
    with w.block(f"match {w.statement_expression(int)}:"):
        for case in (w.pick(("0", "1 | 2", "int(found) if found > 2")), "_"):
            with w.block(f"case {case}:"):
                body(w, effect=True)


@statement(lambda w: w.result is not None)
def check(w: Writer) -> None:
    condition = w.statement_expression(bool)
    number = w.statement_expression(w.pick((int, float)))
    if w.below(2):
        w.line(f"assert ({condition}) or {w.write(bool)} or True, str({number})")
    else:
        with w.block(f"if ({condition}) and {w.write(bool)} and {w.write(bool)}:"):
            w.line(f"raise ValueError('no %s' % ({number}))")


@statement(weight=2)
def attempt(w: Writer) -> None:
    error = w.pick(
        (
            ("RuntimeError", "torch.zeros(2, 3) @ {t}"), ("RuntimeError", "{t}.view(3, -1)"),
            ("IndexError", "{t}[2]"), ("ZeroDivisionError", "3 // {n}"), ("KeyError",
            "{{0: 1}}[{n}]"),
            ("ValueError", "[0, 1, 2].index({n})"), ("IndexError", "[1, 2][{n}]"),
            ("RuntimeError", "bool({t})"),
            ("Exception", "int({t})"), ("RuntimeError", "{t} + torch.ones(3)"), ("TypeError",
            "len({t}.sum())"),
            ("(RuntimeError, IndexError)", "{t}.select(0, 1)"), ("AssertionError", "assert {c}"),
            ("RuntimeError", "torch.cat([{t}, torch.ones(2, 4)])"), ("IndexError", "{t}.sum(1)"),
        )
    )  # fmt: skip
    risky = error[1].format(
        t=w.write(w.type("f")) if "{t}" in error[1] else "",
        n=w.write(int) if "{n}" in error[1] else "",
        c=w.write(bool) if "{c}" in error[1] else "",
    )
    with w.block("try:"):
        body(w)
        w.line(risky)
        body(w)
    with w.block(f"except {error[0]}{w.pick((' as error', ''))}:"):
        if w.lines[-1].endswith("as error:") and w.below(2):
            w.line(f"{w.define(int, 'n')} = len(str(error))")
        body(w)
    form = w.below(4)
    if form == 2:
        with w.block("else:"):
            body(w)
    elif form == 3:
        with w.block("finally:"):
            loops, w.loops, result, w.result = w.loops, 0, w.result, None
            body(w)
            w.loops, w.result = loops, result


@statement(lambda w: w.result is not None)
def recover(w: Writer) -> None:
    """Errors of one's own, passed on, and what was done before them."""
    with w.block("try:"):
        body(w, effect=True)
        with w.block(f"if {w.statement_expression(bool)}:"):
            w.line(f"raise {w.pick(('Stop', 'KeyError', 'RuntimeError'))}({w.write(int)})")
        body(w)
    with w.block(
        f"except {w.pick(('Stop', '(Stop, KeyError)', 'RuntimeError', 'Exception'))} as error:"
    ):
        body(w, effect=True)
        again = w.below(16)
        if again == 4:
            w.line("raise")
        elif again == 5:
            w.line("raise ValueError(*error.args) from error")


# Loops


@statement(lambda w: w.loops < 3, weight=6)
def for_loop(w: Writer) -> None:
    turns = small(w)
    item = w.fresh("i")
    variables = [Var(item, int)]
    vectors = w.tensors("fi", rank=1)
    lists = w.of_class(List)
    forms = [f"for {item} in range({turns}):", f"for {item} in range(1, {turns} + 1):",
             f"for {item} in reversed(range({turns})):", f"for {item} in [0, 2, 1]:"]  # fmt: skip
    form = w.below(4)
    header = w.pick(forms)
    if form == 1 and vectors:
        var = w.pick(vectors)
        row = w.fresh("r")
        kind = Tensor(var.kind.dtype, var.kind.dims[1:])
        variables, header = w.pick(
            (
                ([Var(row, kind)], f"for {row} in {var.name}:"),
                ([Var(item, int), Var(row, kind)], f"for {item}, {row} in enumerate({var.name}):"),
                ([Var(row, kind)], f"for {row} in {var.name}.unbind(0):"),
                ([Var(item, int)], f"for {item} in range({var.name}.size(0)):"),
                ([Var(item, int)], f"for {item} in range(len({var.name})):"),
                ([Var(row, kind)], f"for {row} in reversed({var.name}):"),
                (
                    [Var(row, kind), Var(item, kind)],
                    f"for {row}, {item} in zip({var.name}, {var.name}.flip(0)):",
                ),
            )
        )  # fmt: skip
        if var.kind == Tensor("i", var.kind.dims[:1]) and w.chance(2):
            variables, header = [Var(item, int)], f"for {item} in {var.name}.tolist():"
    elif form == 2 and lists:
        var = w.pick(lists)
        row = w.fresh("r")
        variables, header = w.pick(
            (
                ([Var(row, var.kind.of)], f"for {row} in list({var.name}):"),
                (
                    [Var(item, int), Var(row, var.kind.of)],
                    f"for {item}, {row} in enumerate({var.name}[:3]):",
                ),
                ([Var(item, int)], f"for {item} in range(len({var.name})):"),
            )
        )  # fmt: skip
    elif form == 3 and w.in_method:
        made = "nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])"
        layers = w.attribute("layers", made)
        fitting = [v for v in w.tensors("f") if v.kind.dims[-1:] == (WIDTH,)]
        if fitting:
            name = w.pick(fitting).name
            with _loop(w, f"for {item} in {layers}:"):
                w.line(f"{name} = {item}({name})")
                body(w)
            return
    with _loop(w, header):
        w.scope += variables
        body(w, effect=True)
    _otherwise(w)


@contextmanager
def _loop(w: Writer, header: str) -> Iterator[None]:
    w.loops += 1
    with w.block(header):
        yield
    w.loops -= 1


def _otherwise(w: Writer) -> None:
    if w.chance(6):
        with w.block("else:"):
            body(w, effect=True)


@statement(lambda w: w.loops < 2, weight=4)
def while_loop(w: Writer) -> None:
    counter = w.fresh("k")
    w.line(f"{counter} = 0")
    condition = w.statement_expression(bool)
    bound = f"{counter} < {2 + w.below(2)}"
    forever = w.chance(4)
    header = "while True:" if forever else w.pick(
        (f"while {bound} and ({condition}):", f"while ({condition}) and {bound}:",
        f"while {bound}:"))  # fmt: skip
    with _loop(w, header):
        w.line(f"{counter} += 1")
        if forever:
            with w.block(f"if {counter} > 2 or {condition}:"):
                w.line("break")
        w.scope.append(Var(counter, int))
        body(w, effect=True)
    if not forever:
        _otherwise(w)
