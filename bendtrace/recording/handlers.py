"""What the model does about an error that an op raises."""

from __future__ import annotations

from collections.abc import Iterator

from bendtrace.recording.sites import Place, Site
from bendtrace.recording.statements import asks_for_error, is_under_handler
from bendtrace.recording.tape import ModuleCall, Op, Raised

__all__ = ["is_handled", "raised_by"]


def is_handled(op: Op) -> bool:
    """Whether the model might go on after an error of the op."""
    return any(map(is_under_handler, _covered(op)))


def raised_by(op: Op, error: Exception) -> Raised:
    """Describe an error as far as handlers of the model can tell it from others."""
    seen = any(map(asks_for_error, _covered(op)))
    return Raised(type(error), str(error) if seen else None)


def _covered(op: Op) -> Iterator[Place]:
    """Yield the places from the op up to the model's forward that a handler might cover."""
    site: Site | None = op.site
    scope: ModuleCall | None = op.scope
    while site is not None:
        # Most code has no exception table at all, which saves looking any further.
        if any(code.co_exceptiontable for code, _ in site.chain):
            yield from site.guarded
        site, scope = (scope.site, scope.parent) if scope is not None else (None, None)
