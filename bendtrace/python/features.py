"""Features that are unreliable with this Python and this torch, according to the probes.

The tracer reads Python's instructions, and intercepts parts of torch that are not public
interfaces. Both change between versions without notice. When a module is imported, `internals.py`
looks up the parts of torch that it reads; at the first trace, `probes.py` checks that they behave
as the tracer expects. Features that lack something are switched off here, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

_off: dict[str, str] = {}
_names: dict[str, str] = {}
_unreported: list[str] = []


def switch_off(feature: str, reason: str, names: frozenset[str] = frozenset()) -> None:
    """Switch a feature off.

    Args:
        feature: "identity", "truth", "handlers", "places", "iterations", or a part of torch.
        reason: a sentence that says what happens instead.
        names: code that uses one of these runs live from now on.
    """
    _off[feature] = reason
    _names.update(dict.fromkeys(names, reason))


def switch_on(feature: str) -> None:
    """Switch a feature on again."""
    reason = _off.pop(feature, None)
    for name in [name for name, why in _names.items() if why == reason]:
        del _names[name]


def miss(feature: str, path: str, names: frozenset[str]) -> None:
    """Switch a feature off that needs a part of torch which is not there.

    Args:
        feature: as for `switch_off`.
        path: the missing part.
        names: code that uses one of these runs live from now on.
    """
    reason = f"{feature}: torch has no {path}"
    if names:
        reason += ", all calls run live" if "" in names else ", code that uses it runs live"
    if feature not in _off:
        _unreported.append(reason)
    switch_off(feature, reason, names)


def missing_features() -> list[str]:
    """Return the reasons of the features that were missed since the last call."""
    found = _unreported.copy()
    _unreported.clear()
    return found


def is_off(feature: str) -> bool:
    """Return whether a feature is switched off."""
    return feature in _off


def names_off() -> dict[str, str]:
    """Return the names whose use cannot be observed, and why; "" covers all code."""
    return _names


def reasons() -> Iterator[str]:
    """Yield the reasons of the features that are switched off, a sentence each."""
    yield from _off.values()
