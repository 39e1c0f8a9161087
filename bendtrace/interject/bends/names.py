"""Names of activations and weights, and which of them a pattern means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.graph.fold import is_leaf_module
from bendtrace.interject.selector import NodeSelector
from bendtrace.paths.candidates import Candidate
from bendtrace.recording.owners import module_of

__all__ = [
    "NamedActivations",
    "compiled",
    "is_bendable_dtype",
    "is_inside",
    "leaves_of",
    "level_of",
    "names_of",
    "near",
    "states_of",
    "weights_named",
]

Level = Literal["whole", "around", "inside"]
# What no pattern means by name.
_NAMELESS = "\0"
# They are of torch.nn, and yet what is inside is what one wants to bend.
_OPEN = (
    nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


@dataclass(frozen=True)
class NamedActivations(NodeSelector):
    r"""The activations that patterns mean.

    A pattern means an activation if it matches one of its names from the beginning: its node
    path (`blocks.sub_0.relu`), its qualified name (`blocks.0.relu`), or that with underscores
    (`blocks_0_relu`). Activations are calls of leaf modules, and of functions outside these.
    A module around others is meant only by a pattern that ends with its name (`blocks\.0$`),
    and a node inside a leaf module only by its own path. What gives no floating or complex
    tensor is none.

    Attributes:
        patterns: the patterns.
        leaves: qualified names of the leaf modules.
        without: node paths that are not meant after all.
    """

    needs_output = True

    patterns: tuple[re.Pattern[str], ...]
    leaves: frozenset[str]
    without: frozenset[str] = frozenset()

    def matches(self, node: Candidate) -> bool:
        """Whether a node is meant."""
        if not node.path or not is_bendable_dtype(node.dtype) or node.path in self.without:
            return False
        return self.means(level_of(node, self.leaves), names_of(node))

    def means(self, level: Level, names: Iterable[str]) -> bool:
        """Whether something by some names is meant."""
        return any(means(pattern, level, name) for pattern in self.patterns for name in names)

    def __repr__(self) -> str:
        return " or ".join(f"/{pattern.pattern}/" for pattern in self.patterns)


def means(pattern: re.Pattern[str], level: Level, name: str) -> bool:
    """Whether a pattern means something by a name.

    Args:
        pattern: the pattern.
        level: "whole" for activations, "around" for modules that have some inside, "inside" for
            what is inside an activation.
        name: one of its names.
    """
    if level == "whole":
        return pattern.match(name) is not None
    if level == "inside":
        return pattern.pattern == name
    ends = pattern.fullmatch(name) is not None
    return ends and not any(pattern.match(name + sign + _NAMELESS) for sign in "._")


def names_of(node: Candidate) -> tuple[str, ...]:
    """Return the names of a node: path, qualified name, and that with underscores."""
    qualified = node.qualified_name
    return tuple(dict.fromkeys((node.path, qualified, qualified.replace(".", "_"))))


def level_of(node: Candidate, leaves: frozenset[str]) -> Level:
    """Say whether a node is an activation, around activations or inside one."""
    around = node.scope_path
    if node.is_module:
        if node.module_path in leaves:
            return "whole"
        around = node.module_path
    if is_inside(around, leaves):
        return "inside"
    return "around" if node.is_module else "whole"


def is_inside(path: str, leaves: frozenset[str]) -> bool:
    """Whether a module is a leaf module or in one."""
    while path:
        if path in leaves:
            return True
        path = path.rpartition(".")[0]
    return False


def leaves_of(model: Callable[..., Any]) -> frozenset[str]:
    """Return the qualified names of the modules that are one activation each.

    They are those that torch.fx keeps whole: of torch.nn, but for containers; and here also but
    for transformers and their layers.
    """
    owner = module_of(model)
    if owner is None:
        return frozenset()
    return frozenset(
        path
        for path, module in owner.named_modules(remove_duplicate=False)
        if path and is_leaf_module(module) and not isinstance(module, _OPEN)
    )


def weights_named(
    model: Callable[..., Any], patterns: Iterable[re.Pattern[str]], weights: bool | None
) -> list[str]:
    """Return the parameters and buffers that patterns mean, as the state dict calls them.

    Args:
        model: the model.
        patterns: the patterns.
        weights: None for those that a pattern names: it matches all of the name, and with
            another last part it would not. True for these, and the parameters that a pattern
            matches from the beginning. False for none.
    """
    if weights is False:
        return []
    found = {
        name: None
        for name, tensor in states_of(model)
        if is_bendable_dtype(tensor.dtype)
        and any(
            _names_weight(p, name)
            or (weights is True and isinstance(tensor, nn.Parameter) and p.match(name))
            for p in patterns
        )
    }
    return list(found)


def states_of(model: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model, under all their names."""
    owner = module_of(model)
    if owner is not None:
        yield from owner.named_parameters(remove_duplicate=False)
        yield from owner.named_buffers(remove_duplicate=False)


def _names_weight(pattern: re.Pattern[str], name: str) -> bool:
    if pattern.fullmatch(name) is None:
        return False
    around, dot, _ = name.rpartition(".")
    return pattern.fullmatch(around + dot + _NAMELESS) is None


def compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern that can be matched.

    Raises:
        InputError: it is no regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{pattern!r} is no regular expression: {error}") from None


def is_bendable_dtype(dtype: torch.dtype | None) -> bool:
    """Whether tensors of a dtype can be bent."""
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def near(pattern: str, names: Iterable[str]) -> str:
    """Say what there is that looks like what a pattern was meant for."""
    known = list(dict.fromkeys(names))
    plain = re.sub(r"[\\^$]", "", pattern)
    close = get_close_matches(plain, known, n=5, cutoff=0.5)
    ends: dict[str, str] = {}
    for name in known:
        ends.setdefault(name.rpartition(".")[2], name)
    close += [ends[end] for end in get_close_matches(plain, list(ends), n=3, cutoff=0.6)]
    if close:
        return "did you mean " + ", ".join(map(repr, dict.fromkeys(close))) + "?"
    if not known:
        return "nor anything else"
    return "there are " + ", ".join(map(repr, known[:10])) + (", ..." if len(known) > 10 else "")
