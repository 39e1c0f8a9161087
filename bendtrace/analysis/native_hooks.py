"""Analysers at the calls of a plain module's submodules, by torch's own hooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from bendtrace.analysis.analyser import Analyser
from bendtrace.errors import InputError
from bendtrace.interject.native import Attached, Counts

__all__ = ["watched_natively"]


@contextmanager
def watched_natively(
    model: nn.Module, where: Any, analyser: Analyser, allow_none: bool = False
) -> Iterator[Counts]:
    """Have an analyser look at the calls of modules, without any tracing.

    Args:
        model: the model.
        where: qualified names of modules, modules, classes of modules, compiled expressions that
            find something in a qualified name, or several of these.
        analyser: what looks; the paths that it is told are the qualified names.
        allow_none: whether it is right that no module is meant.

    Yields:
        What counts the calls; have it begin anew where a new call of the model begins.

    Raises:
        InputError: no module is meant, or the analyser looks at gradients.
    """
    if type(analyser)._overrides("backward"):
        raise InputError(
            f"{analyser.label} looks at gradients, which hooks of modules do not tell apart by "
            "call: train the model as a BendedModule"
        )
    found: dict[str, nn.Module] = {}
    for item in _several(where):
        meant = dict(_meant(model, item))
        if not meant and not allow_none:
            raise InputError(
                f"the model has no module {item!r}. In a plain module calls of modules can be "
                "looked at; for all else train it as a BendedModule"
            )
        found.update(meant)
    counts = Counts()
    with ExitStack() as stack:
        begun = model.register_forward_pre_hook(counts.begin, prepend=True)
        stack.callback(begun.remove)
        for name, module in found.items():
            attached = Attached(module, analyser, name, counts)
            attached.install()
            stack.callback(attached.remove)
        yield counts


def _several(where: Any) -> Iterable[Any]:
    return where if isinstance(where, (list, tuple, set, frozenset)) else [where]


def _meant(model: nn.Module, item: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(item, str):
            is_meant = item in (name, name.replace(".", "_"))
        elif isinstance(item, re.Pattern):
            is_meant = item.search(name) is not None
        elif isinstance(item, type):
            is_meant = isinstance(module, item)
        else:
            is_meant = module is item
        if is_meant:
            yield name, module
