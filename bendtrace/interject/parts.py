"""Insertions where only a part of a model is called: a module of it, or a method."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from bendtrace.environment.code_facts import names_in
from bendtrace.environment.provenance import is_torchs
from bendtrace.errors import InputError
from bendtrace.interject.plan import Plan
from bendtrace.paths.candidates import Candidate
from bendtrace.paths.naming import identifier
from bendtrace.torch_rules.owners import named_modules

__all__ = ["Within", "is_meant_within", "refuse_reading"]


class Within(NamedTuple):
    """The position in a model of a part that is run separately.

    Attributes:
        model: the model.
        name: qualified name of the part.
        path: its node path.
    """

    model: Callable[..., Any]
    name: str
    path: str


def refuse_reading(plan: Plan, method: MethodType) -> None:
    """Raise if a method of the model reads a weight itself at which something is inserted.

    Raises:
        InputError: it does, and what is inserted there would not be called.
    """
    code: Any = getattr(method.__func__, "__code__", None)
    is_users = code is not None and not is_torchs(getattr(method, "__module__", None))
    names = names_in(code) if is_users else frozenset()
    for slot in plan.slots:
        weight = slot.place.matcher.name if slot.place.role == "state" else ""
        if weight and names.issuperset(weight.split(".")):
            raise InputError(
                f"{method.__name__} reads {weight} itself, and what is inserted there is called "
                "in calls of the model and of its modules only: use "
                f"bended.trace(fn={method.__name__!r}, ...).output, or remove the insertion"
            )


def is_meant_within(plan: Plan, module: nn.Module, within: Within) -> bool:
    """Whether insertions of a plan apply, or may apply, to the calls of a part of a model."""
    for slot in plan.slots:
        matcher = slot.place.matcher
        if slot.place.role == "state":
            if matcher.name.startswith(f"{within.name}."):
                return True
            continue
        paths = getattr(matcher, "paths", (getattr(matcher, "path", None),))
        if getattr(matcher, "is_broad", False) or any(
            path is not None and f"{path}.".startswith(f"{within.path}.") for path in paths
        ):
            return True
        for name, inner in named_modules(module, within.name):
            path = ".".join(map(identifier, name.split(".")))
            base = path.rpartition(".")[2]
            scope = name.rpartition(".")[0]
            if matcher.matches(Candidate(path, base, inner, name, None, None, scope)):
                return True
    return False
