"""Ranks and spectra of weights, without running the model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod

from bendtrace.errors import InputError
from bendtrace.insert.interjection import Inputs, NodePass
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.selector_naming import outside
from bendtrace.insert.where import near_misses
from bendtrace.module import BendedModule
from bendtrace.python.checks import several
from bendtrace.python.internals import Never, internal
from bendtrace.research.analyser import Analyser
from bendtrace.research.spectra import Spectrum, check_tolerances, epsilon
from bendtrace.research.streaming import Statistic
from bendtrace.rewriting import unrun_modules

# Deprecated; torch has parametrizations that do the same.
SpectralNorm: Any = internal("torch.nn.utils.spectral_norm.SpectralNorm", Never)
WeightNorm: Any = internal("torch.nn.utils.weight_norm.WeightNorm", Never)


@dataclass(frozen=True, eq=False)
class WeightRank:
    """The spectrum of one weight.

    Attributes:
        name: the name of the weight: `layers.0.weight`.
        module: the class of the module that it belongs to; "" if unknown.
        shape: shape of the weight.
        groups: the number of matrices along the first axis; 1 except for grouped convolutions.
        spectrum: the singular values; `samples` and `features` are the rows and columns of the
            matrix.
        shared_with: other names of the same parameter.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(torch.eye(3, 4))
        >>> found = bt.analysis.weight_ranks(model)["0.weight"]
        >>> found, found.module, found.shape
        (WeightRank('0.weight', 3 x 4, rank=3), 'Linear', (3, 4))
        >>> found.to_dict()["singular_values"]
        tensor([1., 1., 1.], dtype=torch.float64)
    """

    name: str
    module: str
    shape: tuple[int, ...]
    groups: int
    spectrum: Spectrum = field(repr=False)
    shared_with: tuple[str, ...] = ()

    @property
    def rank(self) -> float:
        """The numerical rank: an integer; NaN for weights that are not finite."""
        return self.spectrum.rank

    def __repr__(self) -> str:
        rows, columns = self.spectrum.samples, self.spectrum.features
        return f"WeightRank({self.name!r}, {rows} x {columns}, rank={self.rank})"

    def to_dict(self) -> dict[str, Any]:
        """Return ranks, norms and sizes, which are numbers, and the singular values, a tensor."""
        spectrum = self.spectrum
        values = spectrum.singular_values
        return {
            **spectrum.measures(),
            "spectral_norm": float(values[0]) if len(values) else 0.0,
            "frobenius_norm": float(values.norm()),
            "rows": spectrum.samples,
            "columns": spectrum.features,
            "singular_values": values,
        }


def weight_ranks(
    model: nn.Module | BendedModule | Mapping[str, Tensor],
    where: Any = None,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
) -> dict[str, WeightRank]:
    """Return rank and spectrum of the weights of a model, by name.

    Each weight is treated as the matrix that it multiplies by: `(out, in)` for linear layers and
    embeddings, `(out, in * kernel)` for convolutions. A convolution with several groups is their
    block-diagonal matrix; a transposed one has `(in, out * kernel)`. Other parameters are
    flattened from their second axis on; parameters with one axis are left out.

    Computed weights have the values that the next call of the module would compute:
    parametrizations, `weight_norm`, `spectral_norm` and both kinds of pruning. The model is not
    changed, including the vectors of `spectral_norm` and the random numbers. The parameters that
    they are computed from are listed if `where` names them. For layers with low-rank adapters
    (those of PEFT) the base weight and the factors are listed, and the product that each adapter
    adds, as `name.delta.adapter`.

    Args:
        model: a module; or weights by name, such as a state dict.
        where: the modules, including nested ones: the name of a module or of one weight, a module,
            a class of modules, a regular expression for names of weights, a selector or predicate
            of a `Candidate` that needs no run, or a list of these. None: all.
        rtol: singular values up to this fraction of the largest count as zero. None: `max(rows,
            columns)` times the machine epsilon of the dtype (at least the one of float32), as in
            `numpy.linalg.matrix_rank`; 0 if there is an `atol`.
        atol: singular values up to this count as zero.

    Returns:
        A `WeightRank` for each. A parameter with several names is listed once, under the first that
        matches.

    Raises:
        InputError: a weight does not exist or cannot be read, or a tolerance is negative.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Conv2d(2, 4, 3, groups=2))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(torch.ones(3, 4))
        >>> bt.analysis.weight_ranks(model)
        {'0.weight': WeightRank('0.weight', 3 x 4, rank=1),
         '1.weight': WeightRank('1.weight', 4 x 18, rank=4)}
    """
    check_tolerances(rtol, atol)
    weights = _choose(model, where)
    return {weight.name: _rank(weight, tensor, rtol, atol) for weight, tensor in weights}


class LayerWeightRank(Analyser):
    """Ranks and spectra of weights over the steps of a training.

    `measure(model)` records them, without running the model. Inserted at nodes, it records the
    weights of the modules that are called there, once for each `step`, under the paths of the
    nodes.

    For each weight and step, results contain the output of `WeightRank.to_dict`. They grow with the
    number of steps, by the singular values.

    Args:
        rtol: as for `weight_ranks`.
        atol: as for `weight_ranks`.

    Attributes:
        step: the number of the step that results are kept under. Set it as training proceeds.

    Raises:
        InputError: a tolerance is negative.

    Example:
        >>> import torch, bendtrace as bt
        >>> model, ranks = torch.nn.Linear(3, 3), bt.analysis.LayerWeightRank()
        >>> for step in (1, 2):
        ...     with torch.no_grad():
        ...         _ = model.weight.copy_(torch.eye(3))[:step].zero_()
        ...     ranks.measure(model, step=step)
        >>> [(step, found["rank"]) for step, found in ranks.to_dict()["weight"].items()]
        [(1, 2), (2, 1)]
    """

    def __init__(self, *, rtol: float | None = None, atol: float = 0.0) -> None:
        super().__init__()
        check_tolerances(rtol, atol)
        self.rtol = rtol
        self.atol = atol
        self._step = 0
        self._taken: set[tuple[str, int]] = set()  # at which nodes, in which steps

    @property
    def step(self) -> int:
        """The number of the step."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if type(step) is not int:
            raise InputError(f"step= has to be an integer, not {step!r}")
        self._step = step

    @property
    def levels(self) -> tuple[str, ...]:
        """The kinds of keys of the results."""
        return ("weight", "training_step")

    def measure(
        self,
        model: nn.Module | BendedModule | Mapping[str, Tensor],
        where: Any = None,
        *,
        step: int | None = None,
    ) -> None:
        """Record the weights of a model. Does nothing while not `enabled`.

        Args:
            model: as for `weight_ranks`.
            where: as for `weight_ranks`.
            step: the number of the step; None for `self.step`. Its earlier record is replaced.

        Raises:
            InputError: as for `weight_ranks`.
        """
        if not self.enabled:
            return
        found = weight_ranks(model, where, rtol=self.rtol, atol=self.atol)
        if step is not None:
            self.step = step
        self._take_down("", found)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Record the weights of a called module, unless they are recorded already."""
        if not self.enabled or at.module is None:
            return
        if (at.path, self._step) in self._taken:
            return
        prefix = f"{at.path}." if at.path else ""
        self._take_down(prefix, weight_ranks(at.module, rtol=self.rtol, atol=self.atol))
        self._taken.add((at.path, self._step))

    def reset(self) -> None:
        """Forget all records."""
        super().reset()
        self._taken.clear()

    def start(self, key: str) -> _History:
        """Return a state without steps."""
        return _History()

    def update_state(self, state: _History, value: Tensor, batch: Any) -> None:
        """Record a weight."""
        weight = _Weight("weight", None, "", lambda: value, None)
        found = _rank(weight, _check_weight(weight, value), self.rtol, self.atol)
        state.found[self._step] = found.to_dict()

    def result(self, state: _History) -> dict[Any, Any]:
        """Return the records, by step."""
        return state.result()

    def _take_down(self, prefix: str, ranks: Mapping[str, WeightRank]) -> None:
        for name, rank in ranks.items():
            state = self._states.setdefault(prefix + name, _History())
            state.found[self._step] = rank.to_dict()
            self._calls[prefix + name] = len(state.found)


class _History(Statistic):
    """The records of one weight, by step."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, Any]] = {}

    def merge(self, other: Self) -> None:
        """Add the records of another one; those of one step have to be the same."""
        for step in self.found.keys() & other.found.keys():
            mine, theirs = self.found[step]["singular_values"], other.found[step]["singular_values"]
            if not torch.equal(mine.view(torch.int64), theirs.view(torch.int64)):  # NaN too
                raise InputError(f"the weight was different in step {step} there")
        self.found = dict(sorted({**other.found, **self.found}.items()))

    def result(self) -> dict[int, dict[str, Any]]:
        return {step: dict(found) for step, found in sorted(self.found.items())}


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight that can be read."""

    name: str
    owner: nn.Module | None  # the module that it belongs to; None in a state dict
    inside: str  # qualified name of that module
    read: Callable[[], Tensor]
    key: object  # equal for two names of the same weight
    is_part: bool = False  # whether another weight is computed from it
    shared_with: tuple[str, ...] = ()  # its other names


def _rank(weight: _Weight, tensor: Tensor, rtol: float | None, atol: float) -> WeightRank:
    is_convolution = isinstance(weight.owner, nn.modules.conv._ConvNd)
    groups = int(weight.owner.groups) if is_convolution else 1  # type: ignore[union-attr, arg-type]
    flat = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    # Not -1, which cannot be told for tensors without elements.
    blocks = flat.to("cpu", torch.float64).reshape(groups, len(flat) // groups, flat.shape[1])
    rows, columns = flat.shape[0], flat.shape[1] * groups
    if bool(blocks.isfinite().all()):
        values = torch.linalg.svdvals(blocks).flatten().sort(descending=True).values
    else:
        values = torch.full((min(rows, columns),), math.nan, dtype=torch.float64)
    if rtol is None:
        rtol = 0.0 if atol else max(rows, columns) * epsilon(tensor.dtype)
    tolerance = max(atol, rtol * (float(values[0]) if len(values) else 0.0))
    owner = "" if weight.owner is None else type(weight.owner).__name__
    found = Spectrum(values, rows, columns, tolerance)
    return WeightRank(weight.name, owner, tuple(tensor.shape), groups, found, weight.shared_with)


def _choose(model: Any, where: Any) -> list[tuple[_Weight, Tensor]]:
    """Return the chosen weights, and their tensors."""
    root = model.model if isinstance(model, BendedModule) else model
    if isinstance(root, nn.Module):
        weights = list(_weights_of(root))
    elif isinstance(root, Mapping):
        weights = [
            _Weight(str(name), None, "", partial(_itself, tensor), id(tensor))
            for name, tensor in root.items()
        ]
        for name, tensor in root.items():
            if not isinstance(tensor, Tensor):
                raise InputError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    else:
        raise InputError(
            f"weights are read from modules and mappings of tensors, not from {root!r}"
        )
    items = several(where)
    named = {item for item in items if isinstance(item, str)}
    chosen = [weight for weight in weights if not weight.is_part]
    if where is not None:
        names = {weight.name for item in items for weight in _weights_matching(item, weights, root)}
        chosen = [weight for weight in weights if weight.name in names]
    first: dict[object, _Weight] = {}
    for weight in chosen:
        first_weight = first.setdefault(weight.key, weight)
        others = [w.name for w in weights if w.key == weight.key and w.name != first_weight.name]
        first[weight.key] = replace(first_weight, shared_with=tuple(others))
    found = []
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    for weight in first.values():
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.no_grad():
            tensor = weight.read()
        if nn.parameter.is_lazy(tensor):
            raise InputError(f"{weight.name!r} is not initialized: call the model once")
        if weight.name in named or (tensor.dim() > 1 and tensor.is_floating_point()):
            found.append((weight, _check_weight(weight, tensor)))
    return found


def _weights_matching(where: Any, weights: list[_Weight], root: Any) -> list[_Weight]:
    """Return the weights that one item of `where` matches."""
    own = [weight for weight in weights if not weight.is_part]
    found: list[_Weight] = []
    if isinstance(where, re.Pattern):
        found = [weight for weight in own if where.search(weight.name)]
    elif isinstance(where, str) and (named := [w for w in weights if w.name == where]):
        return named
    elif isinstance(root, nn.Module):
        selector = outside(where, root, ())
        if selector.looks_ahead or selector.needs_output:
            raise InputError(f"{selector!r} needs a run, and weights have no run")
        modules = {node.module_path for node in unrun_modules(root) if selector.matches(node)}
        found = [weight for weight in own if _is_inside(weight.inside, modules)]
    if not found:
        text = where if isinstance(where, str) else getattr(where, "pattern", "")
        hint = near_misses(text, [weight.name for weight in own])
        raise InputError(f"{describe_where(where)} matches no weight; {hint}")
    return found


def _is_inside(name: str, modules: set[str]) -> bool:
    while name not in modules:
        if not name:
            return False
        name = name.rpartition(".")[0]
    return True


def _weights_of(root: nn.Module) -> Iterator[_Weight]:
    """Yield all weights of a model, under all their names."""
    parts: set[int] = set()
    for module in root.modules():
        if isinstance(module, ParametrizationList):
            parts |= {id(inner) for inner in module.modules()}
    for inside, module in root.named_modules(remove_duplicate=False):
        prefix = f"{inside}." if inside else ""
        computed = _derived_tensors(module)
        for name, read in computed.items():
            yield _Weight(prefix + name, module, inside, read, (id(module), name))
        sources = {f"{name}_{end}" for name in computed for end in ("g", "v", "orig")}
        for name, parameter in module._parameters.items():
            if parameter is not None:
                is_part = id(module) in parts or name in sources
                read = partial(_itself, parameter)
                yield _Weight(prefix + name, module, inside, read, id(parameter), is_part)
        for adapter, read in _adapters(module):
            name = f"{prefix}delta.{adapter}"
            yield _Weight(name, None, inside, read, (id(module), "delta", adapter))


def _itself(parameter: Tensor) -> Tensor:
    return parameter


def _derived_tensors(module: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return the tensors that a module computes from parameters before it is called, by name."""
    found: dict[str, Callable[[], Tensor]] = {}
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        for name, chain in parametrizations.items():
            if isinstance(chain, ParametrizationList):
                found[name] = partial(_apply_parametrization, chain)
    # The attribute itself is as old as the last call.
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            found[hook.name] = partial(hook.compute_weight, module)
        elif isinstance(hook, SpectralNorm):
            found[hook.name] = partial(_spectrally_normed, hook, module)
        elif isinstance(hook, BasePruningMethod):
            found[hook._tensor_name] = partial(hook.apply_mask, module)
    return found


def _apply_parametrization(chain: ParametrizationList) -> Tensor:
    # Some write to their buffers whenever they are read, as spectral_norm does.
    buffers = {name: buffer.clone() for name, buffer in chain.named_buffers()}
    return functional_call(chain, buffers, ())  # type: ignore[no-any-return]


def _spectrally_normed(hook: Any, module: nn.Module) -> Tensor:
    # It writes to the vectors, and reads nothing else.
    vectors = {f"{hook.name}_{end}": getattr(module, f"{hook.name}_{end}").clone() for end in "uv"}
    source = {f"{hook.name}_orig": getattr(module, f"{hook.name}_orig")}
    copy: Any = SimpleNamespace(**vectors, **source)
    weight: Tensor = hook.compute_weight(copy, do_power_iteration=module.training)
    return weight


def _adapters(module: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the products that low-rank adapters add to a weight, by their names."""
    delta = getattr(module, "get_delta_weight", None)
    if not callable(delta):
        return
    for factors in ("lora_A", "lora_embedding_A"):
        for adapter in getattr(module, factors, {}):
            yield adapter, partial(delta, adapter)


def _check_weight(weight: _Weight, tensor: Tensor) -> Tensor:
    name = weight.name
    if tensor.is_meta:
        raise InputError(f"{name!r} is on the device 'meta', and has no values")
    if type(tensor).__module__.startswith("torch.distributed"):
        raise InputError(f"{name!r} is sharded: pass its full_tensor(), as {{name: tensor}}")
    if tensor.dim() < 2:
        raise InputError(f"{name!r} has the shape {tuple(tensor.shape)}, and is not a matrix")
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        raise InputError(
            f"{name!r} has {tensor.dtype} and layout {tensor.layout}; ranks are only supported "
            "for dense real numbers"
        )
    return tensor.detach()
