"""What code does that neither the function mode nor a boundary sees, told by the names it uses."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator

from bendtrace.recording.features import names_off
from bendtrace.recording.reach import place_naming

__all__ = ["unseen_in"]

_GENERATORS = "reads or sets the state of a random generator past the tracer"
_NAMES = {
    "set_flush_denormal": "changes a setting of torch's that cannot be asked for",
    **dict.fromkeys(("initial_seed", "default_generator"), _GENERATORS),
    **dict.fromkeys(
        ("DisableTorchFunction", "DisableTorchFunctionSubclass"), "switches function modes off"
    ),
}  # fmt: skip
_STATES = frozenset(
    {"get_state", "set_state", "clone_state", "graphsafe_set_state", "seed", "manual_seed"}
)


def unseen_in(
    names: frozenset[str],
    stores: frozenset[str],
    functions: Iterable[types.FunctionType],
    has_generator: bool,
) -> Iterator[str]:
    """Yield a reason for each thing that a replay would not do as the code does.

    Args:
        names: the names that the code uses.
        stores: names of the attributes that it assigns.
        functions: the code.
        has_generator: whether it holds, or is given, a random generator.
    """
    functions = tuple(functions)
    off = names_off()
    if "" in off:
        yield off[""]
    for name in sorted(names & off.keys()):
        yield f"{name} (see {place_naming(name, functions)}): {off[name]}"
    for name in sorted(names & _NAMES.keys()):
        yield f"{name} (see {place_naming(name, functions)}) {_NAMES[name]}"
    if has_generator or "Generator" in names:
        for name in sorted(names & _STATES):
            yield f"{name} (see {place_naming(name, functions)}) {_GENERATORS}"
    for name in sorted(stores & {"real", "imag"}):
        yield f"an assignment to .{name} (see {place_naming(name, functions)}) is not seen"
