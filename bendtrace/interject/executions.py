"""Single executions of nodes by name, as torchvision numbers the nodes of torch.fx's graphs.

What is repeated in the code of one module has a number: `relu_1` is the second relu there, in
another place of the source or in the second round of a loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bendtrace.interject.gates import of_this_run
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.selectors.algebra import Selector
from bendtrace.paths.candidates import Candidate
from bendtrace.paths.naming import identifier


def split_number(name: str) -> tuple[str, int]:
    """Return a name without its number, and the number."""
    found = re.fullmatch(r"(.+)_(\d+)", name, re.DOTALL)
    return (name, 0) if found is None else (found[1], int(found[2]))


def numbered_name(at: NodePass) -> tuple[str, int]:
    """Return the name of a node without its number among those of one kind, and the number."""
    name = at.qualified_name
    if at.module is None:
        return split_number(name)
    base = identifier(name.removeprefix(f"{at.scope}.") if at.scope else name)
    return name, split_number(f"x{at.path.rpartition('.')[2].removeprefix(base)}")[1]


@dataclass(frozen=True, repr=False)
class Repeated(Selector):
    """The nodes whose names differ from some name by a number at most."""

    stem: str
    leaves: frozenset[str]  # the modules that are nodes

    def matches(self, node: Candidate) -> bool:
        """Return whether a node is one of them."""
        if node.is_module:
            return (
                node.module_path in self.leaves and split_number(node.module_path)[0] == self.stem
            )
        return f"{node.scope_path}.{node.base}".removeprefix(".") == self.stem

    def __repr__(self) -> str:
        return repr(self.stem)


class Execution(Interjection):
    """Has an interjection called in one of several executions of nodes, under a name.

    Args:
        what: the interjection.
        name: the name.
        number: how many executions come before it in a call of the model.
    """

    def __init__(self, what: Interjection, name: str, number: int) -> None:
        self.what, self.name, self.number = what, name, number
        self.observes: bool = what.observes
        self.wants_inputs: bool = what.wants_inputs
        self.late: bool = what.late
        self.needs_paths: bool = what.needs_paths

    @property
    def label(self) -> str:
        """The label of the interjection."""
        return self.what.label

    def _forms(self) -> frozenset[str]:
        return self.what._forms() | {"after"}

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the interjection, if it is the execution."""
        calls: list[tuple[str, int]] = of_this_run().setdefault(id(self), [])
        calls.append((at.path, at.number))
        if len(calls) != self.number + 1 or "after" not in self.what._forms():
            return None
        return self.what.after(self._at(at), inputs, output)

    def _backward_of_call(self) -> Callable[..., Any]:
        calls: list[tuple[str, int]] = of_this_run().setdefault(id(self), [])
        backward = self.what._backward_of_call()

        def of_one(at: NodePass, grad_input: Any, grad_output: Any) -> Any:
            is_one = calls[self.number : self.number + 1] == [(at.path, at.number)]
            return backward(self._at(at), grad_input, grad_output) if is_one else None

        return of_one

    def backward(self, at: NodePass, grad_input: Any, grad_output: Any) -> Any:
        """Call the interjection."""
        return self._backward_of_call()(at, grad_input, grad_output)

    def _at(self, at: NodePass) -> NodePass:
        return replace(at, path=self.name, number=0, qualified_name="")
