"""Statements: assignments, writing in place, control flow, containers, state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .scalars import small
from .tensors import DTYPES, broadcast
from .writer import WIDTH, Dict, Function, List, Maybe, Tensor, Var, Writer

__all__ = ["body", "function", "returned"]


class _Rule(NamedTuple):
    write: Callable[[Writer], None]
    when: Callable[[Writer], Any]
    weight: int
    effect: bool


_RULES: list[_Rule] = []


def statement(
    when: Callable[[Writer], Any] = lambda w: True, weight: int = 1, effect: bool = False
) -> Callable[[Callable[[Writer], None]], Callable[[Writer], None]]:
    def register(write: Callable[[Writer], None]) -> Callable[[Writer], None]:
        _RULES.append(_Rule(write, when, weight, effect))
        return write

    return register


def body(w: Writer, effect: bool = False) -> None:
    """Write some statements; the first one, if so wanted, with an effect outside of them."""
    inside = w.depth > 0
    w.depth += 1
    while effect or (w.budget > 0 and w.below(4 if inside else 20)):
        w.budget -= 1
        rules = [rule for rule in _RULES if rule.when(w) and (rule.effect or not effect)]
        effect = False
        weights = [rule.weight * (3 if inside and rule.effect else 1) for rule in rules]
        if rules:
            choices = [rule for rule, n in zip(rules, weights, strict=True) for _ in range(n)]
            w.pick(choices).write(w)
    w.depth -= 1


def function(w: Writer, header: str, parameters: list[Var], result: Tensor) -> None:
    """Write a function that returns a tensor of a type."""
    before = w.scope, w.loops, w.result, w.depth
    w.scope, w.loops, w.result, w.depth = [*w.scope, *parameters], 0, result, 0
    w.line(header)
    w.indent += 1
    body(w)
    w.line(f"return {w.statement_expression(result)}")
    w.indent -= 1
    w.scope, w.loops, w.result, w.depth = before


def returned(w: Writer) -> str:
    """What the program returns: most of what there is."""
    parts = []
    for var in w.scope:
        if isinstance(var.kind, Function) or (isinstance(var.kind, Maybe) and w.below(2)):
            continue
        if w.below(8):
            parts.append(var.name)
    if not parts or w.chance(3):
        parts.append(w.statement_expression(w.type("f")))
    if w.chance(4):
        return "{" + ", ".join(f'"{i}": {part}' for i, part in enumerate(parts)) + "}"
    if len(parts) == 1:
        return parts[0]
    return f"[{', '.join(parts)}]" if w.chance(4) else ", ".join(parts)


def wrote(w: Writer) -> list[Var]:
    return [var for var in w.tensors("fi") if var.writable]


# Assignments


@statement(weight=6)
def define(w: Writer) -> None:
    kind = w.type()
    text = w.statement_expression(kind)
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors(), weight=4, effect=True)
def assign(w: Writer) -> None:
    var = w.pick(w.tensors())
    w.line(f"{var.name} = {w.statement_expression(var.kind)}")


@statement(weight=3)
def define_number(w: Writer) -> None:
    kind = w.pick((int, float, bool))
    text = w.statement_expression(kind)
    if kind is int and text not in "01234":
        text = f"({text}) % 7"
    w.line(f"{w.define(kind, {int: 'n', float: 's', bool: 'c'}[kind])} = {text}")


@statement(lambda w: w.of_kind(int), weight=2, effect=True)
def count(w: Writer) -> None:
    name = w.pick(w.of_kind(int))
    if name[0] != "k":
        w.line(w.pick((f"{name} += 1", f"{name} -= 1", f"{name} = ({w.write(int)}) % 5")))


@statement(lambda w: w.tensors("f", rank=1), weight=3)
def slice_(w: Writer) -> None:
    """A part of a tensor, of a size of its own."""
    var = w.pick(w.tensors("f", rank=1))
    bound = small(w)
    text = w.pick(
        (
            f"{var.name}[:{bound}]", f"{var.name}[{bound}:]", f"{var.name}[::2]", f"{var.name}[-{bound}:]",
            f"{var.name}[slice(0, {bound})]", f"{var.name}.narrow(0, 0, min({bound}, len({var.name})))",
            f"{var.name}[: {var.name}.shape[0] // 2]", f"{var.name}[1:]",
            f"{var.name}[torch.arange(min({bound}, len({var.name})))]",
            f"{var.name}.chunk(2)[0]", f"{var.name}.repeat_interleave(2, 0)",
            f"torch.cat([{var.name}, {var.name}])", f"{var.name}.tensor_split(2)[-1]",
            f"F.pad({var.name}, {(0, 0) * (len(var.kind.dims) - 1) + (1, 0)})",
            f"{var.name}.split(2)[-1]", f"{var.name}.unfold(0, 1, 1)[..., 0]",
        )
    )  # fmt: skip
    kind = Tensor("f", (w.fresh("S"), *var.kind.dims[1:]))
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors("f", rank=1), weight=2)
def select(w: Writer) -> None:
    """Those rows for which something holds."""
    var = w.pick(w.tensors("f", rank=1))
    mask = w.statement_expression(Tensor("b", var.kind.dims[:1]))
    kind = Tensor("f", (w.fresh("S"), *var.kind.dims[1:]))
    text = w.pick((f"{var.name}[{mask}]", f"{var.name}[({mask}).nonzero().squeeze(1)]",
                   f"{var.name}[torch.where({mask})]"))  # fmt: skip
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors("f"))
def flattened(w: Writer) -> None:
    var = w.pick(w.tensors("f"))
    kind = Tensor("f", (w.fresh("S"),))
    text = w.pick(
        (f"{var.name}.reshape(-1)", f"{var.name}[{var.name} > 0]", f"{var.name}.flatten()",
         f"{var.name}.masked_select({var.name} < 0.5)", f"{var.name}.unique()", f"{var.name}.view(-1)",
         f"torch.tensor({var.name}.reshape(-1).tolist())")
    )  # fmt: skip
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors("f", rank=1), weight=2)
def unpack(w: Writer) -> None:
    var = w.pick(w.tensors("f", rank=1))
    rest = var.kind.dims[1:]
    a, b = w.fresh("v"), w.fresh("v")
    form = w.below(4)
    if form == 0:
        w.line(f"{a}, {b} = {w.statement_expression(Tensor('f', (2, *rest)))}")
        kinds = Tensor("f", rest), Tensor("f", rest)
    elif form == 1:
        w.line(f"{a}, {b} = {var.name}.{w.pick(('max', 'sort', 'cummax'))}(0)")
        own = rest if ".max(" in w.lines[-1] else var.kind.dims
        kinds = Tensor("f", own), Tensor("i", own)
    elif form == 2:
        w.line(f"{a}, {b} = {w.write(var.kind)}, {w.write(Tensor('i', ()))}")
        kinds = var.kind, Tensor("i", ())
    else:
        w.line(f"{a}, *{b} = {var.name}")
        w.scope += [Var(a, Tensor("f", rest)), Var(b, List(Tensor("f", rest)))]
        return
    w.scope += [Var(a, kinds[0]), Var(b, kinds[1])]


@statement(lambda w: len(w.tensors("f", rank=1)) > 0)
def top(w: Writer) -> None:
    var = w.pick(w.tensors("f", rank=1))
    a, b = w.fresh("v"), w.fresh("v")
    count = w.fresh("S")
    dims = (*var.kind.dims[:-1], count)
    w.line(f"{a}, {b} = {var.name}.topk(min({small(w)}, {var.name}.shape[-1]))")
    w.scope += [Var(a, Tensor("f", dims)), Var(b, Tensor("i", dims))]


# Writing in place


@statement(wrote, weight=5, effect=True)
def in_place(w: Writer) -> None:
    var = w.pick(wrote(w))
    t = var.kind
    forms = ["{v} += {b}", "{v}.add_({b})", "{v} *= {n}", "{v}.copy_({b})", "{v}.zero_()", "{v}.sub_({n})",
             "torch.add({v}, {n}, out={v})", "{v}[...] = {b}", "{v}.mul_({n})", "{v} -= {b}"]  # fmt: skip
    if t.dtype == "f":
        forms += ["{v}.relu_()", "{v}.clamp_(-1, 1)", "{v}.masked_fill_({v} > 1, 0.5)", "F.relu({v}, inplace=True)",
                  "{v}.uniform_()", "{v}.normal_(0, 0.5)", "{v}.bernoulli_(0.5)", "{v}.mul_(0.5).add_({b})",
                  "{v}.data.mul_(0.5)", "{v}.detach().add_(1)", "nn.init.constant_({v}, 0.5)",
                  "{v}.fill_({n})", "{v}.tanh_()"]  # fmt: skip
    form = w.pick(forms)
    parts = {"v": var.name}
    if "{b}" in form:
        parts["b"] = w.statement_expression(broadcast(w, t))
    if "{n}" in form:
        parts["n"] = w.statement_expression(int if t.dtype == "i" else w.pick((float, int)))
    if "out=" in form:
        w.line("with torch.no_grad():")
        form = "    " + form
    w.line(form.format(**parts))


@statement(lambda w: [v for v in wrote(w) if v.kind.dims], weight=5, effect=True)
def in_place_part(w: Writer) -> None:
    var = w.pick([v for v in wrote(w) if v.kind.dims])
    t = var.kind
    row = Tensor(t.dtype, t.dims[1:])
    index = w.pick(("0", "-1", ""))
    if not index:
        index = f"{w.statement_expression(int)} % {w.size(t.dims[0])}"
    forms = ["{v}[{i}] = {r}", "{v}[{i}] += {r}", "{v}[{i}].mul_(2)", "{v}[{i}].zero_()", "{v}[1:] = 1", "{v}[:1] += {r}",
             "{v}[{m}] = 0", "{v}.index_fill_(0, torch.tensor([0]), 1)", "{v}[::2].add_(1)",
             "{v}.select(0, {i}).copy_({r})", "{v}.transpose(0, -1).add_(1)", "{v}.view(-1)[{i}] = 2",
             "{v}.index_add_(0, torch.zeros({s}, dtype=torch.long), {w})", "{v}[torch.arange({s} // 2)] *= 2",
             "{v}[..., {i0}] = 1", "del {v}[{i}]"]  # fmt: skip
    form = w.pick(forms[:-1])
    parts = {"v": var.name, "i": index, "s": w.size(t.dims[0]), "i0": "0"}
    if "{r}" in form:
        parts["r"] = w.statement_expression(row)
    if "{w}" in form:
        parts["w"] = w.statement_expression(t)
    if "{m}" in form:
        parts["m"] = w.statement_expression(Tensor("b", w.pick((t.dims, t.dims[:1]))))
    w.line(form.format(**parts))


@statement(lambda w: [v for v in wrote(w) if v.kind.dims], weight=3)
def view(w: Writer) -> None:
    """Another name for a part of a tensor, to be written to later on."""
    var = w.pick([v for v in wrote(w) if v.kind.dims])
    dims = var.kind.dims
    forms = [("{v}[0]", dims[1:]), ("{v}.select(0, -1)", dims[1:]), ("{v}[None]", (1, *dims)),
             ("{v}.transpose(0, -1)", (dims[-1], *dims[1:-1], dims[0]) if len(dims) > 1 else dims),
             ("{v}.view_as({v})", dims), ("{v}[...]", dims), ("{v}.unbind(0)[-1]", dims[1:]),
             ("{v}.detach()", dims), ("{v}.unsqueeze(-1)", (*dims, 1)), ("{v}.diagonal()" , None),
             ("{v}.expand_as({v})", dims), ("{v}.view(-1)[0]", ())]  # fmt: skip
    text, result = w.pick([form for form in forms if form[1] is not None])
    w.line(f"{w.define(Tensor(var.kind.dtype, result))} = {text.format(v=var.name)}")


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
        for case in (w.pick(("0", "1 | 2", "int(m) if m > 2")), "_"):
            with w.block(f"case {case}:"):
                body(w, effect=True)


@statement(lambda w: w.result is not None)
def check(w: Writer) -> None:
    condition = w.statement_expression(bool)
    number = w.statement_expression(w.pick((int, float)))
    if w.below(2):
        w.line(f"assert {condition} or {w.write(bool)} or True, str({number})")
    else:
        with w.block(f"if {condition} and {w.write(bool)} and {w.write(bool)}:"):
            w.line(f"raise ValueError('no %s' % ({number}))")


@statement(weight=2)
def attempt(w: Writer) -> None:
    error = w.pick(
        (
            ("RuntimeError", "torch.zeros(2, 3) @ {t}"), ("RuntimeError", "{t}.view(3, -1)"),
            ("IndexError", "{t}[2]"), ("ZeroDivisionError", "3 // {n}"), ("KeyError", "{{0: 1}}[{n}]"),
            ("ValueError", "[0, 1, 2].index({n})"), ("IndexError", "[1, 2][{n}]"), ("RuntimeError", "bool({t})"),
            ("Exception", "int({t})"), ("RuntimeError", "{t} + torch.ones(3)"), ("TypeError", "len({t}.sum())"),
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
                ([Var(row, kind), Var(item, kind)], f"for {row}, {item} in zip({var.name}, {var.name}.flip(0)):"),
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
                ([Var(item, int), Var(row, var.kind.of)], f"for {item}, {row} in enumerate({var.name}[:3]):"),
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
        (f"while {bound} and {condition}:", f"while ({condition}) and {bound}:", f"while {bound}:"))  # fmt: skip
    with _loop(w, header):
        w.line(f"{counter} += 1")
        if forever:
            with w.block(f"if {counter} > 2 or {condition}:"):
                w.line("break")
        w.scope.append(Var(counter, int))
        body(w, effect=True)
    if not forever:
        _otherwise(w)


# Containers


@statement(weight=2)
def new_list(w: Writer) -> None:
    kind = w.type("f")
    first = w.statement_expression(kind)
    item, turns = w.fresh("i"), small(w)
    rows = [v for v in w.tensors("f", 1) if v.kind.dims[1:] == kind.dims]
    forms = ["[{a}]", "[{a}, {a}]", "list(({a},))"]
    if rows:
        forms.append(f"list({w.pick(rows).name})")
        forms.append(f"[*{w.pick(rows).name}.unbind()]")
    text = w.pick(forms).format(a=first)
    if w.chance(4):
        with w.local(Var(item, int)):
            text = f"[{w.write(kind)} for {item} in range({turns})] + [{first}]"
    w.line(f"{w.define(List(kind), 'l')} = {text}")


@statement(lambda w: w.of_class(List), weight=6, effect=True)
def change_list(w: Writer) -> None:
    var = w.pick(w.of_class(List))
    t = var.kind.of
    a = w.statement_expression(t)
    form = w.pick(
        (
            "{l}.append({a})", "{l}.append({a})", "{l}.insert(0, {a})", "{l}[0] = {a}", "{l} += [{a}]",
            "{l}.extend([{a}, {a}])", "{l}.reverse()", "{l}[-1] = {l}[0]", "{l} = {l}[-2:]",
            "{l} = [e * 2 for e in {l}]", "{l} = [e for e in {l} if e.sum() > 0] or [{a}]", "{l}[0].add_(1)",
            "{l} = sorted({l}, key=lambda e: e.sum().item())", "{l}.append({l}.pop(0))",
        )
    )  # fmt: skip
    w.line(form.format(l=var.name, a=a))


@statement(lambda w: w.of_class(List), weight=3)
def use_list(w: Writer) -> None:
    var = w.pick(w.of_class(List))
    t = var.kind.of
    if t.dims:
        text, kind = w.pick(
            (
                ("torch.cat({l})", Tensor(t.dtype, (w.fresh("S"), *t.dims[1:]))),
                ("torch.stack({l})", Tensor(t.dtype, (w.fresh("S"), *t.dims))),
                ("sum({l})", t), ("torch.stack({l}).sum(0)", t), ("max({l}, key=torch.sum)", t),
                ("torch.stack({l}, dim=1)", Tensor(t.dtype, (t.dims[0], w.fresh("S"), *t.dims[1:]))),
            )
        )  # fmt: skip
    else:
        text, kind = w.pick((("torch.stack({l})", Tensor(t.dtype, (w.fresh("S"),))),
                             ("sum({l})", t), ("max({l})", t), ("sorted({l})[0]", t)))  # fmt: skip
    if len(kind.dims) <= 3:
        w.line(f"{w.define(kind)} = {text.format(l=var.name)}")


@statement()
def new_dict(w: Writer) -> None:
    kind = w.type("f")
    key = w.write(int)
    text = w.pick(("{{'a': {a}}}", "dict(a={a})", "{{'a': {a}, {k}: {a}}}", "{{'b': {a}, 'a': {a}}}"))
    text = text.format(a=w.statement_expression(kind), k=key)
    w.line(f"{w.define(Dict(kind), 'd')} = {text}")


@statement(lambda w: w.of_class(Dict), weight=3, effect=True)
def change_dict(w: Writer) -> None:
    var = w.pick(w.of_class(Dict))
    a = w.statement_expression(var.kind.of)
    key = w.statement_expression(int)
    form = w.pick(
        (
            "{d}['a'] = {a}", "{d}[{k}] = {a}", "{d}.setdefault({k}, {a})", "{d}.update(b={a})", "{d}['a'].add_(1)",
            "{d} = {{k: v * 2 for k, v in {d}.items()}}", "{d} = {{**{d}, 'c': {a}}}", "{d}.pop('b', None)",
            "{d}[str({k})] = {a}", "{d}[{k} > 1] = {a}",
        )
    )  # fmt: skip
    w.line(form.format(d=var.name, a=a, k=key))


# State


@statement(lambda w: w.in_method, weight=5, effect=True)
def state(w: Writer) -> None:
    vector = w.statement_expression(Tensor("f", (WIDTH,)))
    forms = [
        ("{count} += 1", "count"), ("{buf}.add_({v})", "buf"), ("{buf} = {v}", "buf"), ("{h} = {v}", "h"),
        ("{steps} += 1", "steps"), ("{h} = ({v}).detach()", "h"), ("{buf}.mul_(0.9).add_(({v}).detach())", "buf"),
        ("{count} = {n}", "count"), ("{scale} = {s}", "scale"), ("{steps} = {steps} + {n}", "steps"),
        ("{h} = {h} + {v}", "h"), ("{h}[0] = 1", "h"), ("{buf}[{n} % 4] += 1", "buf"), ("{log}.append({n})", "log"),
        ("{log}.append({v})", "log"), ("{table}[{n} % 3] = {v}", "table"), ("{log} = [{n}]", "log"),
        ("{h} = {buf}", "h"), ("{buf}.copy_({v})", "buf"), ("{table}['x'] = {n}", "table"),
    ]  # fmt: skip
    form = w.pick(forms)[0]
    made = {
        "count": "0", "buf": 'register_buffer("buf", torch.zeros(4))', "h": "torch.zeros(4)", "scale": "0.75",
        "steps": 'register_buffer("steps", torch.tensor(0))', "log": "[]", "table": "{}",
    }  # fmt: skip
    parts = {name: w.attribute(name, text) for name, text in made.items() if "{" + name in form}
    if "{n}" in form:
        parts["n"] = w.write(int)
    if "{s}" in form:
        parts["s"] = w.write(float)
    line = form.format(v=vector, **parts)
    if ".add_" in line or ".copy_" in line or "] +=" in line or "[0] = 1" in line:
        if w.below(4):
            with w.block("with torch.no_grad():"):
                w.line(line)
            return
    w.line(line)


@statement(lambda w: w.in_method, effect=True)
def setting(w: Writer) -> None:
    """Things of the model and its parts that are not tensors."""
    lin = w.attribute("lin", "nn.Linear(4, 4)")
    drop = w.attribute("drop", "nn.Dropout(0.5)")
    bn = w.attribute("bn", "nn.BatchNorm1d(4)")
    form = w.pick(
        ("{drop}.p = {s}", "{bn}.eval()", "{bn}.train({c})", "{lin}.calls = getattr({lin}, 'calls', 0) + 1",
         "self.mode = 'a' if {c} else 'b'", "self.seen = (*getattr(self, 'seen', ())[-2:], {n})",
         "self.pair = Pair({lin}.bias, {n})", "self.box = {{'t': {lin}.bias * 2, 'n': [{n}]}}",
         "self.__dict__.setdefault('extra', []).append({n})", "setattr(self, 'x' + str({n} % 2), {n})",
         "self.mode = getattr(self, 'mode', 'a') + 'b' if {c} else 'a'", "{bn}.momentum = 0.5",
         "{bn}.num_batches_tracked.add_(1)", "self.best = max(getattr(self, 'best', 0), {n})",
         "self.sizes = getattr(self, 'sizes', set()) | {{{n}}}")
    )  # fmt: skip
    w.line(
        form.format(
            lin=lin, drop=drop, bn=bn, s=w.pick(("0.25", "0.0")), c=w.write(bool) if "{c}" in form else "",
            n=w.write(int) if "{n}" in form else "",
        )
    )  # fmt: skip


@statement(lambda w: w.tensors("f", rank=1))
def sizes(w: Writer) -> None:
    """Sizes that are taken apart and put together."""
    var = w.pick(w.tensors("f", rank=1))
    a, b = w.fresh("n"), w.fresh("n")
    rest = ", ".join([a, *(f"*{b}" for _ in var.kind.dims[1:2])])
    w.line(f"{rest}{',' if rest == a else ''} = {w.pick((f'{var.name}.shape', f'{var.name}.size()'))}")
    w.scope.append(Var(a, int))
    if len(var.kind.dims) > 1:
        kind = Tensor("f", (w.fresh("S"), var.kind.dims[0]))
        text = w.pick((f"torch.zeros(math.prod({b}), {a})", f"{var.name}.reshape({a}, -1).t()",
                       f"{var.name}.reshape({a}, math.prod({b})).mT * 2"))  # fmt: skip
        w.line(f"{w.define(kind)} = {text}")


@statement(weight=1)
def seeding(w: Writer) -> None:
    form = w.pick(("torch.manual_seed({n})", "{g} = torch.Generator().manual_seed(3)"))
    if "{g}" not in form:
        w.line(form.format(n=w.pick(("3", f"{w.write(int)} % 5"))))
        return
    name = w.fresh("g")
    w.line(form.format(g=name))
    kind = w.type("f")
    if kind.dims:
        text = f"torch.rand({w.shape(kind.dims)}, generator={name})"
        w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.result is not None)
def recover(w: Writer) -> None:
    """Errors of one's own, passed on, and what was done before them."""
    with w.block("try:"):
        body(w, effect=True)
        with w.block(f"if {w.statement_expression(bool)}:"):
            w.line(f"raise {w.pick(('Stop', 'KeyError', 'RuntimeError'))}({w.write(int)})")
        body(w)
    with w.block(f"except {w.pick(('Stop', '(Stop, KeyError)', 'RuntimeError', 'Exception'))} as error:"):
        body(w, effect=True)
        again = w.below(16)
        if again == 4:
            w.line("raise")
        elif again == 5:
            w.line("raise ValueError(*error.args) from error")


@statement(lambda w: w.tensors("f", rank=1) and w.indent < 6)
def recursion(w: Writer) -> None:
    var = w.pick(w.tensors("f", rank=1))
    name = w.fresh("f")
    with w.block(f"def {name}(t, depth):"):
        w.scope = [*w.scope, Var("t", var.kind), Var("depth", int)]
        with w.block(f"if depth <= 0 or {w.statement_expression(bool)}:"):
            w.line("return t")
        w.line(f"return {name}({w.statement_expression(var.kind)}, depth - 1)")
    text = f"{name}({var.name}, {small(w)})"
    w.line(f"{w.define(var.kind)} = {text}")


@statement(lambda w: w.in_method and w.tensors("f"), effect=True)
def remember(w: Writer) -> None:
    var = w.pick(w.tensors("f"))
    last = w.attribute("last", "None")
    with w.block(f"if {last} is not None and {last}.shape == {var.name}.shape:"):
        w.line(f"{var.name} = {var.name} + {last}")
        body(w)
    w.line(f"{last} = {var.name}{w.pick(('.detach()', '', '.detach().clone()'))}")


@statement()
def global_state(w: Writer) -> None:
    form = w.below(3)
    if form == 0:
        w.globals["SEEN"] = "[]"
        w.line(f"SEEN.append({w.statement_expression(int)})")
    elif form == 1:
        w.globals["TABLE"] = "torch.linspace(-1, 1, 4)"
        w.line("TABLE.mul_(0.5)")
    else:
        w.globals["OPTIONS"] = '{"power": 2}'
        w.line(f"{w.define(int, 'n')} = OPTIONS['power']")


# Contexts, functions


@statement(weight=2)
def context(w: Writer) -> None:
    header = w.pick(
        ("torch.no_grad()", "torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(bool({c}))",
         "torch.autocast('cpu', dtype=torch.bfloat16, enabled=bool({c}))", "contextlib.nullcontext()")
    )  # fmt: skip
    condition = w.statement_expression(bool) if "{c}" in header else ""
    with w.block(f"with {header.format(c=condition)}:"):
        body(w, effect=True)


@statement(lambda w: w.indent < 4 and w.result is not None, weight=2)
def inner_function(w: Writer) -> None:
    result = w.type("f")
    parameters = tuple(w.type("f") for _ in range(1 + w.below(2)))
    name = w.fresh("f")
    names = [w.fresh("p") for _ in parameters]
    if w.chance(3):
        with w.local(*(Var(n, kind) for n, kind in zip(names, parameters, strict=True))):
            text = w.statement_expression(result)
        w.line(f"{name} = lambda {', '.join(names)}, n=1, flag=False: {text}")
    else:
        own = [Var(n, kind) for n, kind in zip(names, parameters, strict=True)]
        own += [Var("n", int), Var("flag", bool)]
        outer = [var for var in w.scope if var.name not in ("n", "flag")]
        read_only, w.scope = w.scope, outer
        _closed_function(w, f"def {name}({', '.join(names)}, n=1, flag=False):", own, result)
        w.scope = read_only
    w.scope.append(Var(name, Function(parameters, result)))


def _closed_function(w: Writer, header: str, own: list[Var], result: Tensor) -> None:
    """A function that reads the variables around it but assigns only its own."""
    start = len(w.lines)
    function(w, header, own, result)
    outer = {var.name for var in w.scope if not isinstance(var.kind, Function)}
    own_names = {var.name for var in own}
    text = "\n".join(w.lines[start + 1 :])
    assigned = set(re.findall(r"^\s*(\w+)(?:, \*?\w+)? [-+*]?= ", text, re.MULTILINE))
    names = sorted((assigned & outer) - own_names)
    if names:
        w.lines.insert(start + 1, "    " * (w.indent + 1) + "nonlocal " + ", ".join(names))


@statement(lambda w: w.indent < 5)
def generator(w: Writer) -> None:
    """A generator function that is used up at once."""
    kind = w.type("f")
    name, item, turns = w.fresh("g"), w.fresh("i"), small(w)
    with w.block(f"def {name}():"):
        with w.block(f"for {item} in range({turns}):"):
            w.scope.append(Var(item, int))
            w.line(f"yield {w.statement_expression(kind)}")
    use = w.pick(("list({g}())", "[{a}, *{g}()]", "[e.tanh() for e in {g}()]"))
    text = use.format(g=name, a=w.statement_expression(kind))
    text += f" or [{w.statement_expression(kind)}]"
    w.line(f"{w.define(List(kind), 'l')} = {text}")


@statement(lambda w: w.tensors("f"))
def to_dtype(w: Writer) -> None:
    var = w.pick(w.tensors("f"))
    kind = Tensor(w.pick("di"), var.kind.dims)
    w.line(f"{w.define(kind)} = {var.name}.nan_to_num().clamp(-3, 3).to({DTYPES[kind.dtype]})")
