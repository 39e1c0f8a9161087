"""Which modules an environment has, if no more is installed than bendtrace and what is named."""

from __future__ import annotations

import functools
import tomllib
from collections import deque
from collections.abc import Collection, Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.documents import ROOT

__all__ = ["PROJECT", "modules_of", "modules_outside", "names_in"]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def names_in(extra: str) -> set[str]:
    """Return the packages that an extra has, also by other extras of ours."""
    found: set[str] = set()
    for text in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == "bendtrace":
            found.update(*map(names_in, requirement.extras))
        else:
            found.add(canonicalize_name(requirement.name))
    return found


@functools.cache
def _modules() -> dict[str, set[str]]:
    """Return which packages each module in this environment belongs to."""
    found = metadata.packages_distributions()
    return {module: set(map(canonicalize_name, names)) for module, names in found.items()}


def modules_of(package: str) -> set[str]:
    """Return the modules of a package that is installed here."""
    return {name for name, owners in _modules().items() if canonicalize_name(package) in owners}


def modules_outside(packages: Iterable[str]) -> set[str]:
    """Return the modules here that belong neither to some packages nor to what these, or we, need.

    Raises:
        PackageNotFoundError: one of the packages is not installed.
    """
    needed = _needed([*PROJECT["dependencies"], *packages])
    return {name for name, owners in _modules().items() if not owners & {*needed, "bendtrace"}}


def _needed(requirements: Collection[str]) -> set[str]:
    """Return the packages that are installed with some."""
    waiting = deque(map(Requirement, requirements))
    found: set[tuple[str, str]] = set()  # a package, and one of its extras or none
    while waiting:
        requirement = waiting.popleft()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                others = map(Requirement, metadata.requires(name) or ())
                waiting += [
                    one
                    for one in others
                    if one.marker is None or one.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in found}
