"""torchbend: `BendedModule` with its `trace` and `graph()`, and all bending callbacks by name.

>>> import torch, bendtrace as bt
>>> tb = bt.compat.torchbend
>>> bended = tb.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
>>> graph, out = bended.trace(torch.tensor([-1.0, 0.0]), _return_out=True)
>>> print(out[0], [node.name for node in bended.graph().nodes])
tensor([0., 0.]) ['input_1', '_0', '_1', 'output']
>>> _ = bended.bend(tb.Bias(1.0), "1$")
>>> bended(torch.zeros(2))
tensor([1., 1.])
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bendtrace import bends
from bendtrace import module as core
from bendtrace.bends import *  # noqa: F403
from bendtrace.compat import _torchbend_callbacks
from bendtrace.compat._torchbend_bending import BendingModule
from bendtrace.compat._torchbend_callbacks import *  # noqa: F403
from bendtrace.compat._torchbend_callbacks import flat_callbacks, further_arguments, running
from bendtrace.errors import BendShapeError, InputError
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.where import Where, near_misses
from bendtrace.log.nodes import NodePath
from bendtrace.python.internals import pytree

__all__ = ["BendShapeError", "BendedModule", "BendedWrapper", "BendingError", "compare_outs"]
__dir__ = __all__.copy
__all__ += {*bends.__all__, *_torchbend_callbacks.__all__}
__all__.sort()

_OPTIONS = {"allow_none", "args", "bended", "detach", "kwargs", "passes", "return_output"}


def compare_outs(
    out1: Any, out2: Any, allow_subclasses: bool = False, allow_almost_equal: bool = False
) -> bool:
    """Return whether two outputs are alike, as `torch.allclose` says of their tensors.

    Args:
        out1: one output: tensors, distributions, numbers, and lists, tuples and dicts of these.
        out2: the other one.
        allow_subclasses: whether the type of `out1` may be a subclass of the type of `out2`.
        allow_almost_equal: whether they may differ by 1e-5.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.compat.torchbend.compare_outs([torch.ones(2)], [torch.ones(2)])
        True
    """
    options = allow_subclasses, allow_almost_equal
    kind = dict if isinstance(out2, dict) else type(out2)
    is_alike = isinstance(out1, kind) if kind is dict or allow_subclasses else type(out1) is kind
    if not is_alike:
        return False
    if isinstance(out1, Distribution):
        names = out1.arg_constraints
        return all(compare_outs(getattr(out1, n), getattr(out2, n), *options) for n in names)
    if isinstance(out1, (list, tuple, dict)):
        if len(out1) != len(out2) or (isinstance(out1, dict) and out1.keys() != out2.keys()):
            return False
        pairs = (
            [(v, out2[k]) for k, v in out1.items()]
            if isinstance(out1, dict)
            else zip(out1, out2, strict=True)
        )
        return all(compare_outs(one, other, *options) for one, other in pairs)
    if isinstance(out1, Tensor):
        near_by = 1e-5 if allow_almost_equal else 1e-8
        return out1.shape == out2.shape and torch.allclose(out1, out2, atol=near_by)
    return bool(out1 == out2 or (allow_almost_equal and abs(out1 - out2) <= 1e-5))


class BendedModule(BendingModule):
    """A `bendtrace.BendedModule` with torchbend's conventions.

    Calls with other inputs are right, while torchbend's graph follows one example. Methods that
    were traced or bent, and those that the class lists in `__bended_methods__`, are called along
    their own recorded paths. They share the weights and the bends of weights; activations are
    bent in each method by itself. A pattern bends all activations and weights whose names it
    matches from the start.

    Args:
        model: a module, a function, or an object that holds modules and has methods.
        _wrapped_methods: further methods to bend.
        **options: those of `bendtrace.BendedModule`.

    Attributes:
        version: the version of the weights in use; "_default" for the model's own.
        config: the name of the bends in use; "_default" for those without one.

    Raises:
        InputError: `model` can neither be called nor holds modules, or an option is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Coder:
        ...     def __init__(self):
        ...         self.inner = torch.nn.Identity()
        ...     def encode(self, x):
        ...         return self.inner(x) * x.shape[0]
        >>> tb = bt.compat.torchbend
        >>> bended = tb.BendedModule(Coder())
        >>> graph, out = bended.trace("encode", x=torch.ones(3), _return_out=True)
        >>> out
        (tensor([3., 3., 3.]),)
        >>> _ = bended.bend(tb.Bias(1.0), "inner", fn="encode")
        >>> bended.encode(torch.ones(2))
        tensor([4., 4.])
    """

    # Activations

    def get_activations(
        self,
        *names: Where,
        fn: str = "forward",
        _return_graph: bool = False,
        _save_as_method: str | None = None,
        _filter_bended: bool = False,
        **inputs: Any,
    ) -> Any:
        """Call a method, and return some of its activations, by name.

        Args:
            *names: patterns. `conv` matches the activation before its bends, and `conv_bended`
                after them.
            fn: the method, which was traced; `_save_as_method` is a name to call this by again.
            **inputs: keyword arguments of the method. With an option of
                `bendtrace.BendedModule.get_activations` among them, it does what that does.

        Raises:
            InputError: the method was not traced, or has no such activation.
        """
        patterns = [name for name in names if isinstance(name, str)]
        if inputs.keys() & _OPTIONS or len(patterns) < len(names):
            return super().get_activations(*names, **inputs)
        part, known = self._traced(fn), self._names(fn)
        wanted: dict[str, str] = {}  # paths by name
        after: dict[str, str] = {}
        bent = {} if _filter_bended else self.bended_activations(fn)
        for name in patterns:
            found = dict(known.matching(name))
            wanted |= {key: activation.name for key, activation in found.items()}
            over = [k for k in bent if re.match(name, f"{k}_bended") and k in known.by_name]
            after |= {f"{key}_bended": known.by_name[key].name for key in over}
            if not found and not over:
                raise InputError(
                    f"{fn} has no activation {name!r}; {near_misses(name, known.by_name)}"
                )
        seen, paths = _ValueRecorder(), list(map(NodePath, dict.fromkeys(wanted.values())))
        with running(fn), ExitStack() as stack:
            for path in after.values():
                stack.enter_context(part.interject(NodePath(path), seen))
            every = paths or list(map(NodePath, after.values()))
            values = core.BendedModule.get_activations(part, *every, kwargs=inputs, bended=False)
        outs: dict[str, Any] = {}
        for key, path in wanted.items():
            outs |= {
                key + at.removeprefix(path): value
                for at, value in values.items()
                if at == path or re.fullmatch(rf"{re.escape(path)}:\d+", at)
            }
        for key, path in after.items():
            passes = seen.kept.get(path, [])
            several = len(passes) > 1
            outs |= {f"{key}:{n}" if several else key: v for n, v in enumerate(passes, 1)}
        self._save(_save_as_method, "get_activations", names, fn)
        return (outs, self.graph(fn)) if _return_graph else outs

    def from_activations(
        self,
        *names: Any,
        callbacks: Sequence[bends.Bend] | None = None,
        fn: str = "forward",
        _return_graph: bool = False,
        _save_as_method: str | None = None,
        **inputs: Any,
    ) -> Any:
        """Run the rest of a method from given activations, and return its output.

        Args:
            *names: the activations, whose values are among the inputs. Their bends apply to these
                values. Or what `bendtrace.BendedModule.from_activations` takes, first a dict.
            callbacks: the callbacks that bend the activations, instead of names.
            fn: the method, which was traced.
            **inputs: the values by name; keyword arguments of the method, as far as the rest needs
                them; and further arguments of the callbacks, by name. Of several activations,
                `conv_weights` is the argument `weights` at `conv`. Of several callbacks with the
                same argument, a list has one value each.

        Raises:
            InputError: the method was not traced, has no such activation, or an input is missing or
                unknown.
        """
        part, known = self._traced(fn), self._names(fn)
        if names and isinstance(names[0], Mapping):
            with running(fn):
                return core.BendedModule.from_activations(part, *names, **inputs)
        bent = self.bended_activations(fn)
        if not names:
            names = tuple(n for n, over in bent.items() if any(c in over for c in callbacks or ()))
        places = known.aliases | {a.name: a for a in known.by_name.values()} | known.by_name
        for name in names:
            if name not in places or name not in inputs:
                what = "has no activation" if name not in places else "is given no value for"
                raise InputError(f"{fn} {what} {name!r}; {near_misses(str(name), known.by_name)}")
        values = {NodePath(places[name].name): inputs.pop(name) for name in names}
        given: dict[tuple[int, str], dict[str, Any]] = {}
        used = set[str]()
        for name in names:
            path, counts = places[name].name, dict[str, int]()
            over = [c for one in bent.get(known.by_path[path], ()) for c in flat_callbacks(one)]
            wanted = [(c, a) for c in over for a in further_arguments(c)]
            for callback, argument in wanted:
                key = f"{name}_{argument}" if f"{name}_{argument}" in inputs else argument
                number = counts[argument] = counts.get(argument, -1) + 1
                if key in inputs:
                    shared = sum(a == argument for _, a in wanted) > 1
                    value = inputs[key][number] if shared else inputs[key]
                    given.setdefault((id(callback), path), {})[argument] = value
                    used.add(key)
        method = part._signature.parameters
        foreign = inputs.keys() - used - method - known.by_name.keys() - known.aliases.keys()
        foreign = {n for n in foreign if n.removesuffix("_bended") not in known.by_name}
        if foreign:
            raise InputError(f"neither {fn} nor a callback takes {sorted(foreign)[0]!r}")
        rest = {key: value for key, value in inputs.items() if key in method}
        with running(fn, given):
            output = core.BendedModule.from_activations(part, values, _bended=False, **rest)
        self._save(_save_as_method, "from_activations", names, fn)
        return (output, self.graph(fn)) if _return_graph else output

    def _save(self, name: str | None, call: str, names: tuple[Any, ...], fn: str) -> None:
        if name is None:
            return
        if not name.isidentifier() or hasattr(type(self), name) or hasattr(self.module, name):
            raise InputError(f"a method cannot be saved as {name!r}, which is taken or no name")
        self._state["saved"][name] = call, names, fn


class _ValueRecorder(Interjection):
    """Keeps the values of nodes after all earlier insertions."""

    observes = True
    self_contained = True

    def __init__(self) -> None:
        self.kept: dict[str, list[Any]] = {}

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Keep a value."""
        with torch.inference_mode(False), torch.no_grad():
            kept = pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), output)
        for path in (at.path, f"{at.path}:{at.number + 1}"):
            self.kept.setdefault(path, []).append(kept)


BendedWrapper = BendedModule
compare_state_dict_tensors = compare_outs
bending: types.ModuleType = sys.modules[__name__]  # where torchbend has its callbacks
BendingError = InputError
