"""The code that a module ran, as Python expressions with the names of its nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.paths.body import kept_name
from bendtrace.recording.names import target_name
from bendtrace.tape.captured import Captured
from bendtrace.tape.structure import Existing, Instance, Made
from bendtrace.tape.tape import Op, Ref, refs_in
from bendtrace.torch_rules.functions import name_of

__all__ = ["call_text", "module_expression", "value_text"]

Name = Callable[[Ref], str]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "floordiv": "//", "mod": "%",
    "matmul": "@", "pow": "**", "lshift": "<<", "rshift": ">>", "and": "&", "or": "|",
    "xor": "^", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_PREFIX = {"neg": "-", "invert": "~"}
_LONG = 60  # characters of a constant that are written out
_LONG_OBJECT = 200  # characters of what an object holds
_KEPT = re.compile(r"(\w+)_passes\[-(\d+)\](.*)")
_FEW = 3  # so many values of one variable are written out


def value_text(value: Any, name: Name) -> str:
    """Return recorded arguments as source text.

    Args:
        value: the recorded object.
        name: returns the text for a value of the run.
    """
    kind = type(value)
    if kind is Ref:
        return name(value)
    if kind is tuple:
        inner = _joined([value_text(item, name) for item in value])
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if kind is list:
        return f"[{_joined([value_text(item, name) for item in value])}]"
    if isinstance(value, dict):
        items = (f"{_plain(key)}: {value_text(item, name)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if kind is slice:
        return f"slice({', '.join(value_text(part, name) for part in _bounds(value))})"
    if kind is Instance:
        return _instance_text(value, name)
    if kind is Made:
        refs = list(refs_in(value))
        return name(refs[0]) if len(refs) == 1 else f"<{value.maker.__name__}>"
    if kind is Existing:
        return str(value.part.label)
    return _plain(value)


def _joined(texts: list[str]) -> str:
    """Join items; a run of the values of one variable becomes a slice of what is kept of it."""
    found: list[str] = []
    position = 0
    while position < len(texts):
        match = _KEPT.fullmatch(texts[position])
        end = position + 1
        if match is not None:
            name, lag, access = match[1], int(match[2]), match[3]
            while end < len(texts) and lag > 1:
                lag -= 1
                older = f"{kept_name(name)}[-{lag}]{access}"
                if texts[end] != (older if lag > 1 else name + access):
                    lag += 1
                    break
                end += 1
            if end - position > _FEW:
                stop = "" if lag == 1 else str(1 - lag)
                held = f"{kept_name(name)}[-{match[2]}:{stop}]"
                found.append(f"*[each{access} for each in {held}]" if access else f"*{held}")
                position = end
                continue
        found.append(texts[position])
        position += 1
    return ", ".join(found)


def call_text(op: Op, name: Name) -> str:
    """Return the expression for an op."""
    target, args = op.target, op.args
    if isinstance(target, Captured) or target is None:
        return "<unknown>" if target is None else str(target.label)
    word = name_of(target)
    bare = word.strip("_") if word.startswith("__") else word
    setter = getattr(target, "__name__", "")
    if setter == "__get__" and args:
        return f"{value_text(args[0], name)}.{word}"
    if setter == "__set__" and len(args) == 2:
        return f"{value_text(args[0], name)}.{word} = {value_text(args[1], name)}"
    if bare in ("getitem", "setitem") and len(args) >= 2:
        item = f"{value_text(args[0], name)}[{_index_text(args[1], name)}]"
        return item if bare == "getitem" else f"{item} = {value_text(args[2], name)}"
    is_python = getattr(target, "__module__", "") == "_operator" or word.startswith("__")
    is_method = _is_method(target, word) and bool(args) and type(args[0]) is Ref
    if len(args) == 2 and not op.kwargs and (is_python or is_method):
        left, right = (_operand(value, name) for value in args)
        if bare in _INFIX:
            return f"{left} {_INFIX[bare]} {right}"
        if bare[0] in "ri" and bare[1:] in _INFIX and is_python | (bare[0] == "r"):
            swap = bare[0] == "r"
            first, second = (right, left) if swap else (left, right)
            return f"{first} {_INFIX[bare[1:]]}{'' if swap else '='} {second}"
    if len(args) == 1 and is_python and bare in _PREFIX:
        return f"{_PREFIX[bare]}{_operand(args[0], name)}"
    given = [value_text(value, name) for value in (args[1:] if is_method else args)]
    given += [
        f"{key}={value_text(value, name)}"
        if key.isidentifier() and not iskeyword(key)
        else f"**{{{key!r}: {value_text(value, name)}}}"
        for key, value in op.kwargs.items()
    ]
    if is_method:
        return f"{value_text(args[0], name)}.{word}({', '.join(given)})"
    return f"{target_name(target)}({', '.join(given)})"


def _operand(value: Any, name: Name) -> str:
    text = value_text(value, name)
    return f"({text})" if text.startswith("-") else text


def _is_method(target: Any, word: str) -> bool:
    return getattr(Tensor, word, None) is target or getattr(target, "__objclass__", None) in (
        Tensor, torch._C.TensorBase,
    )  # fmt: skip


def _bounds(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _index_text(value: Any, name: Name) -> str:
    if isinstance(value, slice):
        start, stop, step = (
            "" if bound is None else value_text(bound, name) for bound in _bounds(value)
        )
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
    if type(value) is tuple and value:
        inner = ", ".join(_index_text(item, name) for item in value)
        return f"{inner}," if len(value) == 1 else inner
    return "..." if value is ... else value_text(value, name)


def _instance_text(value: Instance, name: Name) -> str:
    if isinstance(value.items, dict):
        given = [f"{key}={value_text(item, name)}" for key, item in value.items.items()]
    elif value.items is not None:
        given = [value_text(item, name) for item in value.items]
    else:
        held = value.attributes.items()
        given = [f"{key}={value_text(item, name)}" for key, item in held]
        if sum(map(len, given)) > _LONG_OBJECT:
            return f"<{value.cls.__name__}>"
    return f"{value.cls.__name__}({', '.join(given)})"


def _plain(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (type, type(_plain), type(len))):
        return getattr(value, "__qualname__", repr(value))
    text = " ".join(repr(value).split())
    if len(text) > _LONG or " at 0x" in text:
        return f"<{type(value).__qualname__}>"
    return text


def module_expression(relative: str, module: nn.Module | None = None) -> str:
    """Return the expression for a submodule, parameter or buffer in the code of a module.

    Args:
        relative: its name in that module.
        module: the module whose code it is.

    Example:
        >>> [module_expression(name) for name in ("linear", "layers.8", "0", "a b")]
        ['self.linear', 'self.layers[8]', 'self[0]', "getattr(self, 'a b')"]
        >>> module_expression("0", nn.ModuleDict({"0": nn.ReLU()}))
        "self['0']"
    """
    text = "self"
    for part in filter(None, relative.split(".")):
        if isinstance(module, nn.ModuleDict) and part in module:
            text += f"[{part!r}]"
        elif part.isdigit() and (module is None or hasattr(type(module), "__getitem__")):
            text += f"[{part}]"
        elif part.isidentifier() and not iskeyword(part):
            text += f".{part}"
        else:
            text = f"getattr({text}, {part!r})"
        module = getattr(module, part, None)
    return text
