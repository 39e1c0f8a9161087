"""Features that are unreliable with this Python and this torch, according to the probes.

The tracer reads Python's instructions, and intercepts parts of torch that are not public
interfaces. Both change between versions without notice. At the first trace, `probes.py` checks that
they behave as the tracer expects; features that do not are switched off here, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["is_off", "names_off", "reasons", "switch_off", "switch_on"]

_off: dict[str, str] = {}
_names: dict[str, str] = {}


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


def is_off(feature: str) -> bool:
    """Whether a feature is switched off."""
    return feature in _off


def names_off() -> dict[str, str]:
    """Return the names whose use cannot be observed, and why; "" covers all code."""
    return _names


def reasons() -> Iterator[str]:
    """Yield the reasons of the features that are switched off, a sentence each."""
    yield from _off.values()
