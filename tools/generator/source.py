"""Whole programs: helper functions, submodules, the model, and the calls to make of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from . import assignments, definitions, flow, holding, scalars, tensors  # noqa: F401 - they register
from .inserted import KINDS, Inserted
from .program import Call, Program
from .statements import body, function, returned
from .world import add_world
from .writer import WIDTH, Dict, Function, List, Maybe, Tensor, Var, Writer

__all__ = ["programs"]

_WORLD = """\
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import logging
import math
import random
import types
import weakref

import numpy
import torch
from torch import nn
"""
_HEAD = """\
import collections
import contextlib
import copy
import functools
import math
import operator
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tools.generator.tools import Doubled, Pair, Stop, in_float64
"""


@st.composite
def programs(
    draw: Callable[[Any], Any], statements: int = 20, calls: int = 9, world: int = 3
) -> Program:
    """A random program and calls of it.

    Args:
        draw: given by hypothesis.
        statements: how many of them a function can have, those in it included.
        calls: how many at most.
        world: one in so many programs has a world around it (see `world.py`); 0 for none.
    """
    w = Writer(draw)
    around = add_world(w) if world and w.chance(world) else ("", "", [], [])
    parameters = _parameters(w)
    grads = {
        var.name: isinstance(var.kind, Tensor) and var.kind.dtype in "fd" and w.chance(3)
        for var in parameters
    }
    parameters = [var._replace(writable=not grads[var.name]) for var in parameters]
    known = [var for var in parameters if isinstance(var.kind, Tensor)]
    w.scope = list(known)
    helpers, methods, classes, functions = [], [], [], []
    init: dict[str, str] = {}
    for _ in range(w.pick((0, 0, 0, 1, 1, 2))):
        inputs = tuple(_public(w.type("f"), known) for _ in range(1 + w.below(2)))
        result = w.type("f")
        if not _resolves(Function((), result), [Var("", kind) for kind in inputs]):
            result = inputs[0]
        names = [w.fresh("p") for _ in inputs]
        own = [Var(n, kind) for n, kind in zip(names, inputs, strict=True)]
        own += [Var("n", int), Var("flag", bool)]
        signature = f"{', '.join(names)}, n=1, flag=False"
        w.scope, w.lines, w.budget = [], [], statements // 2
        form = w.pick(("method", "helper", "class"))
        if form == "helper":
            w.in_method, name = False, w.fresh("helper")
            function(w, f"def {name}({signature}):", own, result)
            helpers += ["", "", *w.lines]
        elif form == "method":
            w.in_method, w.indent, short = True, 1, w.fresh("method")
            w.attributes, name = init, f"self.{short}"
            function(w, f"def {short}(self, {signature}):", own, result)
            methods += ["", *w.lines]
        else:
            w.in_method, w.indent, w.attributes = True, 1, {}
            cls, short = w.fresh("Captured"), w.fresh("part")
            name = f"self.{short}"
            function(w, f"def forward(self, {signature}):", own, result)
            classes += ["", "", *_class(cls, w.attributes), "", *w.lines]
            init[short] = f"{cls}()"
        w.indent = 0
        functions.append(Var(name, Function(inputs, result)))
        w.scope = list(known)
    w.scope = [*parameters, *(f for f in functions if _resolves(f.kind, known))]
    w.lines, w.indent, w.in_method, w.attributes = [], 1, True, init
    w.budget = statements
    defaults = {bool: "=False", int: "=2", float: "=0.5"}
    texts = [
        var.name + (defaults.get(var.kind, "=None" if isinstance(var.kind, Maybe) else ""))
        for var in parameters
    ]
    w.result = w.type("f")
    w.line(f"def forward(self, {', '.join(texts)}):")
    w.indent += 1
    for position, var in enumerate(w.scope):
        if grads.get(var.name) and isinstance(var.kind, Tensor) and w.below(3):
            w.line(f"{var.name} = {var.name} {w.pick(('* 1.0', '+ 0.5'))}")
            w.scope[position] = var._replace(writable=True)
    body(w, effect=True)
    w.line(f"return {returned(w)}")
    model = ["", "", *_class("Model", init), *methods, "", *w.lines]
    globals_ = ["", *(f"{name} = {text}" for name, text in w.globals.items())] if w.globals else []
    lines = [*globals_, *helpers, *classes, *model]
    head = _HEAD.splitlines()
    if w.things or w.tensor_things:
        head += ["import random_world as world", *_WORLD.splitlines(), *around[1].splitlines()]
    lines = [*head, *lines]
    return Program(
        "\n".join(lines) + "\n",
        _calls(w, parameters, grads, init, calls, around[2]),
        f"{_WORLD}\n{around[0]}\n" if around[0] else "",
        tuple(around[3]),
        _inserted(w),
    )


def _inserted(w: Writer) -> Inserted | None:
    """What is inserted in every other program."""
    if not w.below(2):
        return None
    return w.pick(tuple(KINDS)), w.below(100), w.chance(4)


def _public(kind: Tensor, known: list[Var]) -> Tensor:
    return kind if _resolves(Function((), kind), known) else known[0].kind


def _resolves(kind: Function, known: list[Var]) -> bool:
    names = {d for var in known for d in var.kind.dims if isinstance(d, str)}
    used = {d for t in (*kind.parameters, kind.result) for d in t.dims if isinstance(d, str)}
    return used <= names


def _class(name: str, attributes: dict[str, str]) -> list[str]:
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    for attribute, made in attributes.items():
        if made.startswith("register"):
            lines.append(f"        self.{made}")
        else:
            lines.append(f"        self.{attribute} = {made}")
    return lines


def _parameters(w: Writer) -> list[Var]:
    first = w.pick((("B", WIDTH), ("N",), ("B", "N", WIDTH), ("B", "N"), (WIDTH,)))
    found = [Var("x", Tensor("f", first))]
    options = [
        Var("y", Tensor("f", first)),
        Var("y", Tensor("f", first[1:])),
        Var("y", Tensor("f", ("M", WIDTH))),
        Var("i", Tensor("i", (first[0],))),
        Var("m", Tensor("b", first)),
        Var("z", Tensor("d", first)),
        Var("xs", List(Tensor("f", first[1:]))),
        Var("o", Dict(Tensor("f", first))),
    ]
    for _ in range(w.pick((0, 0, 1, 1, 2))):
        var = w.pick(options)
        if all(var.name != other.name for other in found):
            found.append(var)
    optional = [Var("n", int), Var("flag", bool), Var("s", float), Var("mask", Maybe(Tensor("b",
    first))),
                Var("extra", Maybe(Tensor("f", first))), Var("j", int)]  # fmt: skip
    for var in optional:
        if w.chance(3):
            found.append(var)
    return found


def _calls(
    w: Writer, parameters: list[Var], grads: dict[str, bool], init: dict[str, str], most: int,
    steps: list[str],
) -> tuple[Call, ...]:  # fmt: skip
    calls: list[Call] = []
    forms: list[list[tuple[str, Any, dict[Any, int]]]] = []
    while len(calls) < 3 or (len(calls) < most and w.below(6)):
        if calls and w.chance(5):
            calls.append(w.pick(calls))
            continue
        if not forms or w.chance(3):
            forms.append(_form(w, parameters))
        step = _step(w, init) if calls and w.chance(12) else ""
        if calls and steps and w.chance(3):
            step = w.pick(steps)
        train, grad = not w.chance(8), not w.chance(10)
        arguments = ", ".join(
            name + (_tensors(w, given, sizes, grads) if isinstance(given, Var) else given)
            for name, given, sizes in w.pick(forms)
        )
        if w.chance(10):
            arguments = _shared(w, arguments, forms, init)
        calls.append(Call(arguments, train, grad, step, write=w.chance(8)))
    return tuple(calls)


def _shared(w: Writer, arguments: str, forms: Any, init: dict[str, str]) -> str:
    """Arguments of which one is another, a part of it, or a tensor of the model."""
    given = re.findall(r"normal\(.*?\)", arguments)
    one = w.pick(given)
    options = [name for name in ("w", "buf", "h") if name in init]
    if ", 4" in one and one.count(",") == 1 and options:
        return arguments.replace(one, f"model.{w.pick(options)}", 1)
    if len(given) < 2:
        return arguments
    same = len(re.findall(r", \d", given[0])) == len(re.findall(r", \d", given[1]))
    if not same and ("grad=" in arguments or ", 0" in given[0]):
        return arguments
    parts = iter((f"(a := {given[0]})", "a" if same else "a[0]"))
    return re.sub(r"normal\(.*?\)", lambda found: next(parts, found[0]), arguments)


def _step(w: Writer, init: dict[str, str]) -> str:
    options = [
        "for p in model.parameters(): p.mul_(0.5)", "model.zero_grad()",
        "model.zero_grad(set_to_none=False)",
        "for p in model.parameters(): p.grad = torch.ones_like(p)",
    ]  # fmt: skip
    changes = {
        "scale": "model.scale = 0.25", "count": "model.count = 5", "h": "model.h = torch.ones(4)",
        "w": "model.w = nn.Parameter(torch.ones(4))", "buf": "model.buf.fill_(0.5)",
        "last": "model.last = None",
        "lin": "model.lin.weight.requires_grad_(False)", "log": "model.log.clear()",
    }  # fmt: skip
    options += [text for name, text in changes.items() if name in init]
    return w.pick(options)


def _form(w: Writer, parameters: list[Var]) -> list[tuple[str, Any, dict[Any, int]]]:
    """Which arguments to give and how: a keyword, a text or a variable, and the sizes."""
    sizes: dict[Any, int] = {
        name: w.pick((2, 3, 1, 4, 1, 0) if w.chance(4) else (2, 3)) for name in "BNM"
    }
    form = []
    by_name = False
    literals: dict[Any, tuple[str, ...]] = {
        int: ("", "2", "1", "3", "0", "-1", "True"),
        bool: ("", "True"),
        float: ("", "0.5", "2.0", "-1.5", "2"),
    }
    for var in parameters:
        given: Any = var
        if var.kind in literals:
            given = w.pick(literals[var.kind])
        elif isinstance(var.kind, Maybe) and w.below(2):
            given = ""
        optional = var.kind in literals or isinstance(var.kind, Maybe)
        by_name |= given == "" or (optional and w.below(2) == 1)
        if given != "":
            form.append((f"{var.name}=" if by_name else "", given, sizes))
    return form


def _tensors(w: Writer, var: Var, sizes: dict[Any, int], grads: dict[str, bool]) -> str:
    kind = var.kind
    if isinstance(kind, List):
        items = [_tensor(w, kind.of, sizes, False) for _ in range(1 + w.below(3))]
        return f"[{', '.join(items)}]"
    if isinstance(kind, Dict):
        return f"{{'a': {_tensor(w, kind.of, sizes, False)}}}"
    if isinstance(kind, Maybe):
        return _tensor(w, kind.of, sizes, False)
    return _tensor(w, kind, sizes, grads[var.name])


def _tensor(w: Writer, kind: Tensor, sizes: dict[Any, int], grad: bool) -> str:
    dims = "".join(f", {sizes.get(d, d)}" for d in kind.dims)
    seed = w.below(6)
    if kind.dtype in "ib":
        return f"{'integers' if kind.dtype == 'i' else 'truths'}({seed}{dims})"
    plus = w.pick(("", "", "", ", plus=1.0", ", plus=-1.0", ", plus=3.0"))
    options = plus + (", grad=True" if grad else "") + (", turned=True" if w.chance(8) else "")
    text = f"normal({seed}{dims}{options})"
    return f"{text}.double()" if kind.dtype == "d" else text
