"""Logs, entries and models as foldable text in treescope, if it shows them.

treescope calls `__treescope_repr__` of each object, so this code runs only with treescope.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bendtrace._trace import ModelHistory
    from bendtrace.log.entries import LayerEntry
    from bendtrace.module import BendedModule


def log(log: ModelHistory, path: str | None, subtree_renderer: Any) -> Any:
    """Return a log as nested calls of modules, with the entries that they computed."""
    inside: dict[str, list[Any]] = {"": []}
    calls = {call.label: call for call in log.modules}
    places: dict[str, tuple[str, ...]] = {}
    for one in log.entries:
        if one.kind == "state":
            continue
        for depth, label in enumerate(one.scopes):
            if label not in inside:
                inside[label] = []
                inside[one.scopes[depth - 1] if depth else ""].append(label)
        places[one.label] = one.scopes
        inside[one.scopes[-1] if one.scopes else ""].append(one)

    def rendered(item: Any) -> Any:
        if isinstance(item, str):
            call = calls[item]
            name = call.name if call.passes == 1 else call.label
            return _folded_node(f"{name}: {call.class_name}(", map(rendered, inside[item]), ")")
        place = None if path is None else f"{path}[{item.label!r}]"
        head = f"{item.label}: {_entry_type(item)}"
        return _folded_node(f"{head} = {item.function}(" if item.function else f"{head} (", [
            f"{name}={value}" for name, value in _facts(item)
        ], ")", place)  # fmt: skip

    return _folded_node(f"{repr(log)[:-1]}(", map(rendered, inside[""]), ")>", path)


def entry(entry: LayerEntry, path: str | None, subtree_renderer: Any) -> Any:
    """Return an entry with its unusual fields."""
    facts = [f"{name}={value}" for name, value in _facts(entry)]
    return _folded_node(f"{repr(entry)[:-1]}(", facts, ")>", path)


def bended_model(bended: BendedModule, path: str | None, subtree_renderer: Any) -> Any:
    """Return a model as its modules, with counts of calls and the insertions."""
    model = bended.model
    inner = _module_form("model", model) if isinstance(model, nn.Module) else f"model={model!r}"
    inserted = _folded_node("insertions=[", map(repr, bended.insertions), "]")
    return _folded_node("BendedModule(", [inner, f"stats={bended.stats}", inserted], ")", path)


def _module_form(name: str, module: nn.Module) -> Any:
    children = [_module_form(called, child) for called, child in module.named_children()]
    return _folded_node(f"{name}: {type(module).__name__}({module.extra_repr()}", children, ")")


def _facts(entry: LayerEntry) -> list[tuple[str, str]]:
    """Return the fields of an entry with unusual values, as texts."""
    found = []
    for field in fields(entry):
        value = getattr(entry, field.name)
        usual = field.default_factory() if callable(field.default_factory) else field.default
        if field.name in ("saved", "gradient"):
            if value is not None:
                name = "tensor_contents" if field.name == "saved" else "grad_contents"
                found.append((name, _value_text(getattr(entry, name))))
        elif usual is MISSING or value != usual:
            found.append((field.name, repr(value)))
    return found


def _entry_type(entry: LayerEntry) -> str:
    if entry.shape is None:
        return repr(entry.value)
    return f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"


def _value_text(value: Any) -> str:
    """Return a value as text; treescope's own form of tensors depends on what torch removes."""
    if not isinstance(value, Tensor):
        return repr(value)
    form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if not value.is_floating_point() or not value.numel() or value.is_meta:
        return form
    with torch.no_grad():
        plain = value.double()
        low, high = plain.min().item(), plain.max().item()
        return f"{form} from {low:.3g} to {high:.3g}, mean {plain.mean().item():.3g}"


def _folded_node(prefix: str, children: Any, suffix: str, path: str | None = None) -> Any:
    from treescope import rendering_parts  # type: ignore[import-not-found, import-untyped, unused-ignore]

    parts = [rendering_parts.text(c) if isinstance(c, str) else c for c in children]
    if not parts:
        return rendering_parts.text(prefix + suffix)
    return rendering_parts.build_foldable_tree_node_from_children(
        prefix, parts, suffix, comma_separated=True, path=path
    )
