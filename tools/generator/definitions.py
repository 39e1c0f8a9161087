"""Statements that define functions, and blocks under a context."""

from __future__ import annotations

import re

from .scalars import small
from .statements import body, function, statement
from .writer import Function, List, Tensor, Var, Writer

# Contexts, functions


@statement(weight=2)
def context(w: Writer) -> None:
    header = w.pick(
        ("torch.no_grad()", "torch.no_grad()", "torch.enable_grad()",
        "torch.set_grad_enabled(bool({c}))",
         "torch.autocast('cpu', dtype=torch.bfloat16, enabled=bool({c}))",
         "contextlib.nullcontext()")
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
