"""Leaf modules, whose inside is not selected, as in torch.fx."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bendtrace.errors import InputError
from bendtrace.interject.selectors.algebra import Selector, as_selector
from bendtrace.interject.selectors.naming import matches_path, matches_qualified_name
from bendtrace.paths.candidates import Candidate, CandidateGraph, NodeSelector
from bendtrace.torch_rules.owners import modules_in

__all__ = ["leaf_names", "leaves_in", "outside"]

# Other options of fx's tracers, which make no sense for a run on real inputs.
_NOT_NEEDED = frozenset(
    {"autowrap_functions", "autowrap_modules", "param_shapes_constant", "suppress_diff_warning"}
)


@dataclass(frozen=True, repr=False)
class Outside(Selector):
    """The nodes that a selector selects outside some modules.

    The calls of these modules themselves are included.
    """

    selector: NodeSelector
    names: frozenset[str]
    looks_ahead: bool = field(init=False, compare=False)
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "looks_ahead", self.selector.looks_ahead)
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return not self._is_inside(node) and self.selector.matches(node)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        nodes = {path: node for path, node in graph.nodes.items() if not self._is_inside(node)}
        return self.selector.select(CandidateGraph(nodes, graph.edges.subgraph(nodes)))

    def _is_inside(self, node: Candidate) -> bool:
        if node.path == "":
            return False
        scope = node.scope_path
        while scope not in self.names:
            if not scope:
                return False
            scope = scope.rpartition(".")[0]
        return True

    def __repr__(self) -> str:
        return f"{self.selector!r} outside {', '.join(sorted(self.names))}"


def outside(what: Any, model: Callable[..., Any], leaves: Iterable[Any]) -> NodeSelector:
    """Return a selector for the nodes that a selector selects outside some modules.

    Args:
        what: a selector, or any value that converts to one.
        model: the model.
        leaves: classes of modules, modules, or qualified names of modules.

    Raises:
        InputError: one of the leaves is invalid.
    """
    selector = _named(what) if isinstance(what, str) else as_selector(what)
    names = leaf_names(model, leaves)
    return Outside(selector, names) if names else selector


def leaf_names(model: Callable[..., Any], leaves: Iterable[Any]) -> frozenset[str]:
    """Return the qualified names of some modules (see `outside`).

    Raises:
        InputError: one of the leaves is invalid.
    """
    modules = list(modules_in(model).items())
    found = (name for leaf in leaves for name, module in modules if _is_leaf(leaf, name, module))
    return frozenset(found)


def leaves_in(tracer_kwargs: Mapping[str, Any] | None) -> list[Any]:
    """Return the `leaf_modules` of `tracer_kwargs`.

    Raises:
        InputError: there are unknown options.
    """
    options = dict(tracer_kwargs or {})
    leaves = options.pop("leaf_modules", None) or ()
    if unknown := options.keys() - _NOT_NEEDED:
        raise InputError(
            f"tracer_kwargs= has unknown options {', '.join(sorted(map(repr, unknown)))}; only "
            "'leaf_modules' is supported"
        )
    return list(leaves)


def _named(name: str) -> NodeSelector:
    try:
        return matches_qualified_name(name) | matches_path(name)
    except InputError:  # it can only be a qualified name: `layers.0`
        return matches_qualified_name(name)


def _is_leaf(leaf: Any, name: str, module: nn.Module) -> bool:
    if isinstance(leaf, type) and issubclass(leaf, nn.Module):
        return isinstance(module, leaf)
    if isinstance(leaf, nn.Module):
        return module is leaf
    if isinstance(leaf, str):
        return name == leaf
    raise InputError(
        f"leaf_modules have to be classes of modules, modules or qualified names, not {leaf!r}"
    )
