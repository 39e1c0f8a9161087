"""Models and inputs on another device."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["moved", "tensors_in"]

T = TypeVar("T")
_OWN = frozenset(vars(nn.Module()))


def moved(value: T, device: str) -> T:
    """Return a value with all tensors in it on a device, as far as it is not there already.

    Modules are moved in place, with the tensors that they have as plain attributes. Tensors that
    are one object stay one; views that share memory do not. Functions are left as they are.
    """
    return value if torch.device(device).type == "cpu" else _moved(value, device, {})


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors of what a model gives, also of what transformers' models give."""
    plain = dict(output) if hasattr(output, "items") else output
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]


def _moved(value: Any, device: str, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)][1]
    made = value
    if isinstance(value, nn.Module):
        made = value.to(device)
        for module in made.modules():
            for name, attribute in vars(module).items():
                if name not in _OWN and isinstance(attribute, (Tensor, list, tuple, dict)):
                    vars(module)[name] = _moved(attribute, device, seen)
    elif isinstance(value, Tensor):
        made = value.detach().to(device).requires_grad_(value.requires_grad)
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, value.requires_grad)
    elif type(value) is list:
        made = [_moved(item, device, seen) for item in value]
    elif isinstance(value, tuple):
        items = [_moved(item, device, seen) for item in value]
        made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif type(value) is dict:
        made = {key: _moved(item, device, seen) for key, item in value.items()}
    seen[id(value)] = value, made  # held, so that no other gets its id
    return made
