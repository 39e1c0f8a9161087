"""What cannot be relied on with this Python and this torch, as probes have found out.

The tracer reads instructions of Python and steps in at parts of torch that are nobody's interface.
Both move between versions without a word. `probes.py` asks at the first trace whether they are as
the tracer takes them to be; what is not is switched off here, one feature at a time.
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
        reason: a sentence that says what is done instead.
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
    """Return the names whose use cannot be seen, and why; "" stands for all code."""
    return _names


def reasons() -> Iterator[str]:
    """Yield what is switched off, a sentence each."""
    yield from _off.values()
