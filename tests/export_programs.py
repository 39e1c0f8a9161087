"""Random programs of branches and loops on the values of tensors, as source text."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["made", "source_of"]

_CONDITIONS = (
    "{a}.sum() > {c}", "{a}[0] > {b}[1]", "{a}.max() < {c}", "int({a}.argmax()) == {n}",
    "{a}.sum().item() * 2 > {c}", "bool(({a} > {b}).any())", "not ({b} > {c}).all()",
)  # fmt: skip
_STATEMENTS = (
    "{a} = {a} + {b}", "{a} = {a} * {c} - 1", "{a} = {b}.tanh() + {c}", "{a} = {b}",
    "{a} = {a}.flip(0)", "{a} = torch.where({a} > {b}, {a}, {b} * 0.5)", "n = n + 1",
    "{a} = {a}.clone(); {a}[{n}] = {b}[0]", "{a} = {a} * 1; {a}.add_({b})",
    "{a} = {a} + {b}[int({a}.argmax())]", "{a} = {a} * {b}.mean().item()",
    "{a} = {a}.clone(); {a}[1:].mul_(0.5)", "{a} = {a} - n",
)  # fmt: skip


class _Writer:
    def __init__(self, seed: int, zero: str) -> None:
        self._random = random.Random(seed)
        self._zero = zero
        self.lines: list[str] = []

    def text(self, form: str) -> str:
        r = self._random
        a, b = r.choice("xyz"), r.choice("xyz")
        c = r.choice([-1.0, -0.5, 0.25, 0.5, 1.5])
        return form.format(a=a, b=b, c=c, n=r.randrange(3))

    def block(self, indent: int, depth: int, in_loop: bool) -> None:
        r = self._random
        for _ in range(r.randint(1, 3)):
            pad, kind = "    " * indent, r.random()
            if kind < 0.3 and depth:
                self.lines.append(f"{pad}if {self.text(r.choice(_CONDITIONS))}:")
                self.block(indent + 1, depth - 1, in_loop)
                if r.random() < 0.6:
                    self.lines.append(f"{pad}else:")
                    self.block(indent + 1, depth - 1, in_loop)
            elif kind < 0.45 and depth:
                steps = f"k{len(self.lines)}"
                self.lines.append(f"{pad}{steps} = {self._zero}")
                self.lines.append(f"{pad}while {steps} < 4 and {self.text(r.choice(_CONDITIONS))}:")
                self.lines.append(f"{pad}    {steps} = {steps} + 1")
                self.block(indent + 1, depth - 1, True)
            elif kind < 0.5 and in_loop:
                self.lines.append(f"{pad}if {self.text(r.choice(_CONDITIONS))}:")
                self.lines.append(f"{pad}    {r.choice(['break', 'continue'])}")
            elif kind < 0.53:
                self.lines.append(f"{pad}if {self.text(r.choice(_CONDITIONS))}:")
                self.lines.append(f"{pad}    return x, y - z, n")
            else:
                self.lines.append(f"{pad}{self.text(r.choice(_STATEMENTS))}")


def source_of(seed: int, is_counted: bool = False) -> str:
    """Return the source of a function of two tensors of three elements.

    Args:
        seed: which program.
        is_counted: whether it counts with Python's ints, and not with tensors.
    """
    zero = "0" if is_counted else "torch.zeros(())"
    writer = _Writer(seed, zero)
    for _ in range(2):
        writer.block(1, 3, False)
    head = ["def model(x, y):", "    z = x * y", f"    n = {zero}"]
    return "\n".join([*head, *writer.lines, "    return x, y - z, n"]) + "\n"


def made(seed: int, is_counted: bool = False) -> Callable[[Tensor, Tensor], Any]:
    """Return the function."""
    source, name = source_of(seed, is_counted), f"export_program_{seed}_{is_counted}.py"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(source, name, "exec"), namespace)
    found: Callable[[Tensor, Tensor], Any] = namespace["model"]
    return found
