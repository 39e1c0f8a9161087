"""The location of an insertion, in every accepted form, and its calls and rows."""

from __future__ import annotations

import builtins
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError, NodePathError, PatchError
from bendtrace.insert.gates import of_this_run
from bendtrace.insert.interjection import Inputs, Interjection, NodePass, Passes, PassNumbers
from bendtrace.insert.plan import Location, StateTensor
from bendtrace.insert.resolver import NamedRuns, Resolution, node_name_of, resolve_meaning
from bendtrace.log.entries import LayerEntry, ModuleEntry
from bendtrace.log.nodes import TreeNode, dotted
from bendtrace.log.path_views import (
    Candidate,
    CandidateGraph,
    Node,
    NodeSelector,
    OneSelectable,
    Tree,
    dug,
    find_node,
)
from bendtrace.log.run import near_names
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import place_text
from bendtrace.record.op_names import NodeRef
from bendtrace.watch.functions import SHAPES, VALUES
from bendtrace.watch.owners import module_of, module_tree, modules_in

if TYPE_CHECKING:
    from bendtrace.insert import selector_naming as naming
else:
    naming = LazyModule("bendtrace.insert.selector_naming")

# Interjections that work in some calls of the model only, or on some rows of a batch.

Rows: TypeAlias = int | slice | Iterable[int] | None


class Restricted(Interjection):
    """Has another interjection called under a condition, or with a part of the value."""

    def __init__(self, what: Interjection) -> None:
        self.what: Interjection = what
        for name in ("observes", "wants_inputs", "blind", "late", "self_contained", "needs_paths"):
            setattr(self, name, getattr(what, name))

    @property
    def label(self) -> str:
        """The label of the interjection."""
        return self.what.label

    def _forms(self) -> frozenset[str]:
        return self.what._forms()

    def __repr__(self) -> str:
        return repr(self.what)


class InCalls(Restricted):
    """Has an interjection called in some calls of the model, of those that reach it.

    They are selected by their numbers, from 0, or by a predicate.
    """

    def __init__(self, what: Interjection, calls: PassNumbers) -> None:
        super().__init__(what)
        self._calls = Passes(calls, option="calls")
        if self._calls.needs_total:
            raise InputError(f"calls= counts from 0, since nobody knows the last call: {calls!r}")
        self._numbers = itertools.count()

    def _is_on(self) -> bool:
        kept = of_this_run()
        if id(self) not in kept:
            kept[id(self)] = self._calls.admits(next(self._numbers), None)
        return bool(kept[id(self)])

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Call the interjection in the calls that are chosen."""
        return self.what.before(at, inputs) if self._is_on() else None

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the interjection in the calls that are chosen, and otherwise the node."""
        if self._is_on():
            return self.what.instead(at, call, inputs)
        return call(*inputs, **inputs.kwargs)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the interjection in the calls that are chosen."""
        return self.what.after(at, inputs, output) if self._is_on() else None

    def _backward_of_call(self) -> Callable[..., Any]:
        return self.what._backward_of_call() if self._is_on() else super().backward

    def backward(self, at: NodePass, grad_input: Any, grad_output: Any) -> Any:
        """Call the interjection in the calls that are chosen."""
        return self._backward_of_call()(at, grad_input, grad_output)


class OfRows(Restricted):
    """Has an interjection called with some rows of the first axis, which its result replaces."""

    def __init__(self, what: Interjection, rows: Rows) -> None:
        super().__init__(what)
        self._rows: Any = rows
        if not isinstance(rows, slice):
            self._rows = list(rows) if isinstance(rows, Iterable) else [rows]
            if not self._rows or any(type(row) is not int for row in self._rows):
                raise InputError(f"rows= takes indices of rows, or a slice, not {rows!r}")

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the interjection with the rows."""
        if not isinstance(output, Tensor) or not output.dim():
            raise PatchError(
                f"{self.label} at {at.path!r}: rows= needs a tensor with rows, not "
                f"{'a scalar' if isinstance(output, Tensor) else type(output).__name__}",
                path=at.path,
            )
        every = torch.arange(len(output), device=output.device)
        if not isinstance(self._rows, slice) and not all(
            -len(output) <= row < len(output) for row in self._rows
        ):
            raise PatchError(
                f"{self.label} at {at.path!r}: rows={self._rows}, but the value has "
                f"{len(output)} rows",
                path=at.path,
            )
        index = every[self._rows]
        part = output.index_select(0, index)
        made = self.what.after(at, inputs, part)
        if made is None or self.observes:
            return None
        if not isinstance(made, Tensor) or made.shape != part.shape or made.dtype != part.dtype:
            raise PatchError(
                f"{self.label} at {at.path!r}: with rows=, the new value has to have the shape and "
                f"dtype of the rows, {tuple(part.shape)} {part.dtype}",
                path=at.path,
            )
        return output.index_copy(0, index, made)


# Other names for activations: those of TransformerLens's hooks, and the user's own.


@dataclass(frozen=True)
class Alias:
    """The location that an alias names.

    Attributes:
        where: a module's path with `.output` or `.input`, or a node path.
        pick: a function from the value there to the named value; None for the value itself.
        why: why the two are equal.
        put: a function from the value there, and another named value, to the value with that in
            it; None if the named value can only be read.
        heads: the axis of the named value along which each index is a head; `heads=` of the
            workflows uses it.

    Wherever `interject` takes a location, it takes an alias, too: an insertion there receives the
    named value, which its result replaces.

    Example:
        >>> import torch, bendtrace as bt
        >>> first = bt.workflows.Alias("0.output", pick=lambda value: value[0])
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> x = torch.ones(1, 2)
        >>> _, cache = bt.workflows.run_with_cache(model, x, aliases={"first": first})
        >>> cache["0.output"].shape, cache["first"].shape
        (torch.Size([1, 2]), torch.Size([2]))
        >>> bended = bt.BendedModule(model)
        >>> last = bt.workflows.Alias(
        ...     "0.output", pick=lambda value: value[:, 1:],
        ...     put=lambda value, new: torch.cat([value[:, :1], new], 1),
        ... )
        >>> with bended.interject(last, torch.zeros_like):
        ...     bended(x)
        tensor([[0.7616, 0.0000]])
    """

    where: str
    pick: Callable[[Any], Any] | None = field(default=None, repr=False)
    why: str = ""
    put: Callable[[Any, Any], Any] | None = field(default=None, repr=False)
    heads: int | None = None

    def around(self, what: Interjection) -> Interjection:
        """Return an interjection for the value there, which calls one for the named value.

        Raises:
            InputError: the named value can only be read, or the interjection works around a node.
        """
        if self.pick is None:
            return what
        if what._forms() - {"after"}:
            raise InputError(
                f"{what.label} works around a node, but an alias of a part of a value, such as at "
                f"{self.where!r}, has only a value"
            )
        if self.put is None and not what.observes:
            raise InputError(
                f"the alias at {self.where!r} can only be read: pass Alias(put=...), which puts a "
                "new value into the one that it was picked from"
            )
        return _OfPart(what, self)


class _OfPart(Restricted):
    def __init__(self, what: Interjection, alias: Alias) -> None:
        super().__init__(what)
        self._alias = alias

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        pick, put = self._alias.pick, self._alias.put
        assert pick is not None
        part = pick(output)
        made = self.what.after(at, inputs, part)
        if made is None or made is part or self.observes:
            return None if self.observes or made is None else output
        assert put is not None
        return put(output, made)


@dataclass(frozen=True)
class Stream:
    """The residual stream of a model, by TransformerLens's names."""

    layers: int  # the number of layers
    positions: str | None  # the node path of the embeddings of positions; None if there are none
    norms: tuple[tuple[nn.Module, nn.Module], ...]  # of each layer, before attention and MLP
    final: nn.Module  # the norm after all layers
    unembed: nn.Module | None  # the module that makes logits of the stream; None if there is none

    def key(self, layer: int, is_mid: bool) -> tuple[str, int]:
        """Return the short name of the stream before a layer, or before its MLP."""
        if layer == self.layers:
            return "resid_post", layer - 1
        return "resid_mid" if is_mid else "resid_pre", layer


_Pick: TypeAlias = Callable[[Any], Any]
_OF_LAYER = re.compile(r"blocks\.(\d+)\.(?:(\w+)\.)?hook_(\w+)")


class Aliases(Mapping[str, Alias]):
    r"""Other names for the values of nodes.

    Args:
        names: an `Alias` for each name, or just its `where`.
        unequal: names without an equal value here, as regular expressions that match them in full,
            with the reasons.

    Attributes:
        stream: the residual stream that the names are about; None if it is unknown.

    Raises:
        InputError: a name or an alias is of another type.

    Example:
        >>> import bendtrace as bt
        >>> mine = bt.workflows.Aliases(
        ...     {"residual": "layers.0.output"}, {r"residual_\d+": "there is one"}
        ... )
        >>> mine["residual"].where
        'layers.0.output'
        >>> mine.why_not("residual_7")
        'there is one'
        >>> sorted(mine | {"logits": "head.output"})
        ['logits', 'residual']
    """

    def __init__(
        self,
        names: Mapping[str, str | Alias] | None = None,
        unequal: Mapping[str, str] | None = None,
    ) -> None:
        self._names: dict[str, Alias] = {}
        for name, alias in (names or {}).items():
            if not isinstance(name, str) or not isinstance(alias, (str, Alias)):
                raise InputError(
                    f"an alias maps a name to a path or an Alias, not {name!r} to {alias!r}"
                )
            self._names[name] = Alias(alias) if isinstance(alias, str) else alias
        self._unequal = dict(unequal or {})
        self.stream: Stream | None = None

    def __getitem__(self, name: str) -> Alias:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def why_not(self, name: str) -> str:
        """Return why a name has no equal value here; "" if there is no entry."""
        reasons = (why for pattern, why in self._unequal.items() if re.fullmatch(pattern, name))
        return "" if name in self._names else next(reasons, "")

    def full_name(self, short: Any) -> str | None:
        """Return the name for one of TransformerLens's short names; None if it is none of them.

        Args:
            short: `"embed"` for `hook_embed`; or the name, the layer (from the end if negative),
                and the part of the layer, which can be left out if only one part has the name.

        Example:
            >>> import bendtrace as bt
            >>> aliases = bt.workflows.Aliases({"blocks.3.attn.hook_q": "layers.3.q.output"})
            >>> aliases.full_name(("q", 3)), aliases.full_name(("q", -1, "attn"))
            ('blocks.3.attn.hook_q', 'blocks.3.attn.hook_q')
        """
        if isinstance(short, str):
            name = f"hook_{short}"
            return name if name in self._names and short not in self._names else None
        if not isinstance(short, tuple) or not 2 <= len(short) <= 3:
            return None
        found: dict[int, list[str]] = {}
        for name in self._names:
            parts = _OF_LAYER.fullmatch(name)
            if (
                parts is not None
                and parts[3] == short[0]
                and parts[2] in (short[2:] or (parts[2],))
            ):
                found.setdefault(int(parts[1]), []).append(name)
        layer = short[1]
        if isinstance(layer, int) and layer < 0:
            layer += 1 + max(found, default=0)
        names = found.get(layer, [])
        return names[0] if len(names) == 1 else None

    def __or__(self, other: Mapping[str, str | Alias]) -> Aliases:
        unequal = {**self._unequal, **(other._unequal if isinstance(other, Aliases) else {})}
        made = Aliases({**self._names, **other}, unequal)
        made.stream = self.stream
        return made

    def __repr__(self) -> str:
        return f"<Aliases: {len(self)} names>"

    def __str__(self) -> str:
        wide = max(map(len, self._names), default=0)
        return "\n".join(f"{name:<{wide}}  {alias.where}" for name, alias in self._names.items())


def transformer_lens_aliases(model: Any) -> Aliases:
    """Return TransformerLens's names of hooks for equal values in a Hugging Face model.

    There are tables for GPT-2 and Llama (and those built like it: Mistral, Qwen 2), chosen by the
    configuration and the names of modules; they were compared with TransformerLens 4.3.0 on models
    with random weights. They name the values of a TransformerLens model with the original weights:
    folding and centring (`enable_compatibility_mode`, once `from_pretrained`) change the values.

    Args:
        model: the model. For models of other kinds no names are known.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.workflows.transformer_lens_aliases(torch.nn.Linear(2, 2))
        <Aliases: 0 names>
    """
    if not isinstance(model, nn.Module):
        return Aliases()
    modules = dict(model.named_modules())
    # Others have modules of the same names and mean other things: Gemma 2, Granite, GPTBigCode.
    kind = getattr(getattr(model, "config", None), "model_type", None)
    for family in _FAMILIES:
        for name in modules if kind in family.kinds else ():
            found = re.fullmatch(rf"((?:.+\.)?){family.block}\.0", name)
            if found and all(f"{name}.{part}" in modules for part in family.parts):
                shape = family.heads(modules, f"{name}.{family.attention}")
                if shape is not None:
                    return _family_aliases(family, modules, found[1], shape)
    return Aliases()


def alias_of(where: Any, model: Any) -> Alias | None:
    """Return the alias that a location is, or names in TransformerLens's words; None for others.

    Raise `NodePathError` if it is such a name, and the model has no equal value.
    """
    return _alias_in(transformer_lens_aliases(model), where) if _may_be_alias(where) else None


def aliased(where: Any, model: Any) -> tuple[Any, Alias | None]:
    """Return a location in the model's own names, and the alias that it is or names.

    Several locations have the alias of the first, which picks and puts the same as the others.
    Raise `InputError` if several locations name values of different kinds.
    """
    if not isinstance(where, (list, tuple, set, frozenset)):
        alias = alias_of(where, model)
        return (where, None) if alias is None else (alias.where, alias)
    if not any(map(_may_be_alias, where)):
        return where, None
    names = transformer_lens_aliases(model)
    found = {one: _alias_in(names, one) for one in where}
    kinds = {(alias.pick, alias.put) if alias else (None, None) for alias in found.values()}
    if len(kinds) > 1:
        raise InputError(
            f"{', '.join(map(repr, found))} name values of several kinds, which one insertion does "
            "not serve: make an insertion for each kind"
        )
    alias = next(filter(None, found.values()), None)
    return [one if it is None else it.where for one, it in found.items()], alias


def _may_be_alias(where: Any) -> bool:
    return isinstance(where, Alias) or (isinstance(where, str) and "hook_" in where)


def _alias_in(names: Aliases, where: Any) -> Alias | None:
    if not isinstance(where, str):
        return where if isinstance(where, Alias) else None
    require_equal(names, where)
    return names.get(where)


def require_equal(aliases: Aliases, name: str) -> None:
    """Raise a `NodePathError` that says why if a name is known to have no equal in a model."""
    if why := aliases.why_not(name):
        raise NodePathError(f"{name!r} has no equal value in this model: {why}", name)


class _Family(NamedTuple):
    """The names of a family of models."""

    kinds: frozenset[str]  # `model_type` of their configurations
    block: str  # the list of blocks
    parts: tuple[str, ...]  # modules that each block has
    attention: str  # the module of attention in a block
    # Returns the shape that an axis of all heads has as (heads, size); None if unknown.
    heads: Callable[[Mapping[str, nn.Module], str], tuple[int, int] | None]
    embed: str  # the module of the embedding of tokens
    positions: str  # the module of the embedding of positions; "" if there is none
    norms: tuple[str, str, str]  # the modules of the norms in a block, and after all blocks
    # For each hook of a block its place in the block, which part of the value there, and why the
    # two are equal.
    names: Mapping[str, tuple[str, str, str]]
    final: Mapping[str, str]  # hooks after all blocks, and their places
    unequal: Mapping[str, str]  # as for `Aliases`, with the prefix of the modules for `{prefix}`


def _family_aliases(
    family: _Family, modules: Mapping[str, nn.Module], prefix: str, shape: tuple[int, int]
) -> Aliases:
    def split(value: Any) -> Any:
        return value.unflatten(-1, shape)

    def third(number: int) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
        def put(value: Any, new: Any) -> Any:
            parts = list(value.chunk(3, -1))
            parts[number] = new.flatten(-2)
            return torch.cat(parts, -1)

        return lambda value: split(value.chunk(3, -1)[number]), put

    def scores_put(value: Any, new: Any) -> Any:
        return torch.where((new == -torch.inf) & _is_masked(value), value, new)

    def results_of(projection: nn.Module) -> Callable[[Any], Any]:
        def results(value: Any) -> Any:
            weight: Any = projection.weight.detach().to(value)  # type: ignore[operator]
            weight = weight.T if isinstance(projection, nn.Linear) else weight
            return torch.einsum("...hd,hdm->...hm", split(value), weight.unflatten(0, shape))

        return results

    def first_put(value: Any, new: Any) -> Any:
        return type(value)((new, *value[1:])) if isinstance(value, (tuple, list)) else new

    # How a value is picked and put, and the axis of its heads.
    picks: dict[str, tuple[_Pick | None, Callable[[Any, Any], Any] | None, int | None]] = {
        "": (None, None, None),
        "first": (lambda v: v[0] if isinstance(v, (tuple, list)) else v, first_put, None),
        "heads": (split, lambda value, new: new.flatten(-2), 2),
        "swapped": (lambda v: v.transpose(1, 2), lambda value, new: new.transpose(1, 2), 2),
        "pattern": (None, None, 1),
        "scores": (lambda v: v.masked_fill(_is_masked(v), -torch.inf), scores_put, 1),
        **{name: (*third(number), 2) for number, name in enumerate("qkv")},
    }
    names: dict[str, str | Alias] = {"hook_embed": f"{prefix}{family.embed}.output"}
    layers = len(modules[f"{prefix}{family.block}"])  # type: ignore[arg-type]
    unequal = {name: why.replace("{prefix}", prefix) for name, why in family.unequal.items()}
    for i in range(layers):
        at = f"{prefix}{family.block}.{i}"
        node = re.sub(r"\.(\d+)", r"_\1", at)  # node paths join numbers to the name before
        for name, (where, pick, why) in family.names.items():
            is_module = where.rpartition(".")[2] in ("input", "output")
            place = f"{at if is_module else node}.{where}"
            if pick == "results":
                projection = modules[f"{at}.{where.removesuffix('.input')}"]
                if type(projection).__name__ in ("Linear", "Conv1D"):  # nothing that wraps one
                    names[f"blocks.{i}.{name}"] = Alias(place, results_of(projection), why, None, 2)
                continue
            part, put, axis = picks[pick]
            names[f"blocks.{i}.{name}"] = Alias(place, part, why, put, axis)
    names |= {name: f"{prefix}{where}" for name, where in family.final.items()}
    made = Aliases(names, {**unequal, **_UNEQUAL})
    first, second, final = family.norms
    norms = ((modules[f"{at}.{first}"], modules[f"{at}.{second}"]) for at in (
        f"{prefix}{family.block}.{i}" for i in range(layers)
    ))  # fmt: skip
    made.stream = Stream(
        layers, f"{prefix}{family.positions}.output" if family.positions else None, tuple(norms),
        modules[f"{prefix}{final}"], modules.get("lm_head"),
    )  # fmt: skip
    return made


def _is_masked(scores: Any) -> Any:
    """Return where scores are masked: by the smallest number here, by -inf in TransformerLens."""
    return scores <= torch.finfo(scores.dtype).min / 2


_UNEQUAL = {
    r"blocks\.\d+\.(attn\.)?hook_(q_input|k_input|v_input|mlp_in|attn_in)": (
        "TransformerLens can split the input of a layer into one for each head; here there is "
        "one tensor: use blocks.{i}.hook_resid_pre, or hook_resid_mid"
    ),
    r"blocks\.\d+\.attn\.hook_result": (
        "it is hook_z @ W_O, head by head, and the output projection is not a plain linear layer"
    ),
    r".*\.hook_scale": "the norm's scale is inside one operation, and no tensor of the model",
    r"hook_tokens": "that is the input of the model",
}
_STREAM = "both are the residual stream: the sum of the embeddings and of all layers before"
_NORM = "the norm with its weights"
_ROTATED = "after the rotation, where it consists of operations of torch"


def _common_aliases(attention: str, scores: str, out: str) -> dict[str, tuple[str, str, str]]:
    eager = "the softmax is an operation by itself only with attn_implementation='eager'"
    return {
        "hook_resid_pre": ("input", "", _STREAM),
        "hook_resid_post": ("output", "first", _STREAM),
        "hook_attn_out": (f"{attention}.output", "first", "the contribution of attention"),
        "hook_mlp_out": ("mlp.output", "", "the contribution of the MLP"),
        "attn.hook_pattern": (f"{attention}.softmax", "pattern", eager),
        "attn.hook_attn_scores": (f"{attention}.{scores}", "scores", eager),
        "attn.hook_result": (f"{attention}.{out}.input", "results", "hook_z @ W_O, by heads"),
    }


def _of_gpt2(modules: Mapping[str, nn.Module], attention: str) -> tuple[int, int] | None:
    heads = getattr(modules[attention], "num_heads", None)
    return (heads, -1) if isinstance(heads, int) else None


def _of_llama(modules: Mapping[str, nn.Module], attention: str) -> tuple[int, int] | None:
    size = getattr(modules[attention], "head_dim", None)
    # With norms of queries and keys the names would mean something else.
    return (-1, size) if isinstance(size, int) and f"{attention}.q_norm" not in modules else None


_FAMILIES = (
    _Family(
        frozenset({"gpt2"}),
        "h",
        ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc"),
        "attn",
        _of_gpt2,
        "wte",
        "wpe",
        ("ln_1", "ln_2", "ln_f"),
        {
            **_common_aliases("attn", "add", "c_proj"),
            "ln1.hook_normalized": ("ln_1.output", "", _NORM),
            "attn.hook_q": ("attn.c_attn.output", "q", "by heads"),
            "attn.hook_k": ("attn.c_attn.output", "k", "by heads"),
            "attn.hook_v": ("attn.c_attn.output", "v", "by heads"),
            "attn.hook_z": ("attn.c_proj.input", "heads", "by heads"),
            "hook_resid_mid": ("ln_2.input", "", _STREAM),
            "ln2.hook_normalized": ("ln_2.output", "", _NORM),
            "mlp.hook_pre": ("mlp.c_fc.output", "", "before the activation"),
            "mlp.hook_post": ("mlp.c_proj.input", "", "after the activation"),
        },
        {"ln_final.hook_normalized": "ln_f.output"},
        {
            "hook_pos_embed": (
                "here there is one row for all examples: use {prefix}wpe.output, which has no "
                "axis for them"
            ),
            r"blocks\.\d+\.attn\.hook_rot_[qk]": "GPT-2 rotates nothing",
            r"blocks\.\d+\.mlp\.hook_pre_linear": "GPT-2's MLP has no gate",
        },
    ),
    _Family(
        frozenset({"llama", "mistral", "qwen2"}),
        "layers",
        ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"),
        "self_attn",
        _of_llama,
        "embed_tokens",
        "",
        ("input_layernorm", "post_attention_layernorm", "norm"),
        {
            **_common_aliases("self_attn", "add_2", "o_proj"),
            "attn.hook_rot_q": ("self_attn.add", "swapped", _ROTATED),
            "attn.hook_rot_k": ("self_attn.add_1", "swapped", _ROTATED),
            "attn.hook_q": ("self_attn.q_proj.output", "heads", "before the rotation"),
            "attn.hook_k": ("self_attn.k_proj.output", "heads", "before the rotation"),
            "attn.hook_v": ("self_attn.v_proj.output", "heads", "by heads"),
            "attn.hook_z": ("self_attn.o_proj.input", "heads", "by heads"),
            "hook_resid_mid": ("post_attention_layernorm.input", "", _STREAM),
            "mlp.hook_pre": ("mlp.gate_proj.output", "", "the gate"),
            "mlp.hook_pre_linear": ("mlp.up_proj.output", "", "the gated values"),
            "mlp.hook_post": ("mlp.down_proj.input", "", "gated"),
        },
        {},
        {
            r"(blocks\.\d+\.ln[12]|ln_final)\.hook_normalized": (
                "in TransformerLens it is the output of the norm before the product with its "
                "weights, and the module's output here is that product: use the node in front "
                "of the last `mul`"
            ),
            "hook_pos_embed": "Llama has rotations instead of position embeddings",
        },
    ),
)


_Nodes: TypeAlias = OneSelectable | NodeRef | LayerEntry | ModuleEntry | Alias
# All that `BendedModule.interject` takes as a location.
Where: TypeAlias = _Nodes | Sequence[_Nodes] | AbstractSet[_Nodes]


@dataclass(frozen=True)
class AtPath:
    """The node with a path."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    path: str

    def matches(self, node: Candidate) -> bool:
        """Return whether a node has the path."""
        return node.path == self.path


@dataclass(frozen=True)
class AtPaths:
    """The nodes of some paths."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    paths: frozenset[str]

    def matches(self, node: Candidate) -> bool:
        """Return whether a node has one of the paths."""
        return node.path in self.paths


@dataclass(frozen=True, eq=False)
class OfModule:
    """The calls of one module."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    is_of_modules: ClassVar[bool] = True
    module: nn.Module

    def matches(self, node: Candidate) -> bool:
        """Return whether a node is a call of the module."""
        return node.module is self.module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfModule) and other.module is self.module

    def __hash__(self) -> int:
        return id(self.module)


@dataclass(frozen=True)
class Selected:
    """The nodes that a selector selects."""

    selector: NodeSelector
    is_broad: bool  # whether it can select any node: a selector, or a function of a node

    @property
    def needs_output(self) -> bool:
        """Return whether it depends on the output of the node."""
        return self.selector.needs_output

    @property
    def is_of_modules(self) -> bool:
        """Return whether it selects calls of modules only, by the module alone."""
        return self.selector.is_of_modules

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node."""
        return self.selector.matches(node)

    def __repr__(self) -> str:
        return repr(self.selector)


class ModelRuns(NamedRuns, Protocol):
    """The runs of a model that insertions are placed in."""

    def trees(self) -> Iterable[Tree]:
        """The trees of the runs without insertions, the preferred one first."""

    def hint(self, name: str) -> str:
        """Return the untaken branch that may contain a node with a name."""


class LocationText(str):
    """A copy's replacement for a location that refers to the original model."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Target:
    """One location, as the user gave it."""

    original: Any  # as the user wrote it
    place: Location | None = None  # the resolved location, if it can be resolved without a run
    passes: tuple[int, ...] | None = None  # the passes that it names, counted from 0; None for all

    @property
    def is_ahead(self) -> bool:
        """Return whether a run without insertions has to resolve it, each time."""
        return isinstance(self.original, NodeSelector) and self.original.looks_ahead

    @property
    def is_open(self) -> bool:
        """Return whether it has to be looked up in the first run."""
        return self.place is None and not self.is_ahead

    def without_nodes(self) -> Target:
        """Return the same without tree nodes, which belong to one model."""
        return (
            replace(self, original=self.original._path) if isinstance(self.original, Node) else self
        )

    def ahead(self, graph: CandidateGraph) -> Location:
        """Return the location of a selector in a run."""
        return Location("node", AtPaths(frozenset(self.original.select(graph))))


def targets_of(
    where: Where | StateTensor, knowledge: ModelRuns, *, lenient: bool = False
) -> tuple[Target, ...]:
    """Parse a location. If `lenient`, a name without a match may match later.

    Raises:
        InputError: it is not a valid location.
        NodePathError: a name matches nothing.
    """
    if isinstance(where, (list, tuple, set, frozenset)):
        if not where:
            raise InputError("where= is empty: pass at least one node")
        return tuple(
            target for item in where for target in targets_of(item, knowledge, lenient=lenient)
        )
    try:
        return _targets(where, knowledge)
    except NodePathError:
        if not lenient:
            raise
        return (Target(where),)


def _targets(where: Any, knowledge: ModelRuns) -> tuple[Target, ...]:
    if isinstance(where, Node):
        _require_own(where, knowledge)
    name = node_name_of(where, knowledge)
    if name is not None:
        return _resolve_name(name, knowledge, where)
    if isinstance(where, StateTensor):
        return (Target(where, Location("state", where, shown=where.name)),)
    if isinstance(where, nn.Module):
        owner = module_of(knowledge.model)
        if owner is not None and all(where is not module for module in module_tree(owner)):
            raise InputError(
                f"the module {type(where).__name__} is not a submodule of the model: pass one "
                "of its own submodules, a path or a class"
            )
        return (Target(where, Location("node", OfModule(where))),)
    if isinstance(where, NodeSelector) and where.looks_ahead:
        return (Target(where),)
    if isinstance(where, type) and not issubclass(where, nn.Module):
        raise InputError(f"a class has to be a class of modules, not {where!r}")
    if not (isinstance(where, re.Pattern) or callable(where) or isinstance(where, NodeSelector)):
        raise InputError(
            "where= takes a node path, a node, a regular expression, a module, a class of modules, "
            "a selector, a torch function, a function of a node, a node of a mirror or an entry of "
            f"a log, or several of these; not {where!r}"
        )
    is_broad = not isinstance(where, (re.Pattern, type))
    return (Target(where, Location("node", Selected(naming.as_selector(where), is_broad))),)


def _require_own(node: Node, knowledge: ModelRuns) -> None:
    """Raise an `InputError` if the path of a node of a tree belongs to something else here."""
    data, model = node._data, module_of(knowledge.model)
    if data.kind == "graph" and data.module and model is not None:
        module = modules_in(model).get(data.module)
        if module is not None and type(module).__name__ != data.class_name:
            raise InputError(
                f"{data.path!r} is a {data.class_name} in the run of this node, and a "
                f"{type(module).__name__} in this model: pass a path, or a node of the model's "
                "own trees"
            )
    if data.role != "op" or not data.places:
        return
    others = []
    for tree in knowledge.trees():
        try:
            other = find_node(tree.data, data.path)[0]
        except NodePathError:
            continue
        if not other.places or _source_key(other) == _source_key(data):
            return
        others.append(other)
    if others:
        raise InputError(
            f"{data.path!r} is at {_place_label(data)} in the run of this node, and at "
            f"{_place_label(others[0])} in this model: pass a path, or a node of the model's own "
            "trees"
        )


def _source_key(node: TreeNode) -> tuple[Any, ...]:
    place = node.places[0]
    return place.file, place.function, place.line, place.text


def _place_label(node: TreeNode) -> str:
    place = node.places[0]
    return f"{place_text(place.file, place.line)} `{place.text}`"


def _resolve_name(text: str, knowledge: ModelRuns, original: Any) -> tuple[Target, ...]:
    """Resolve a string.

    The qualified name of a module selects all its calls, a parameter's name all its uses; other
    names select one place in the source, or the places of a layer.
    """
    resolution = resolve_meaning(text, knowledge)
    if resolution is not None:
        return _resolved_targets(resolution, text, original)
    errors: list[NodePathError] = []
    for tree in knowledge.trees():
        try:
            find_node(tree.data, text)
        except NodePathError as error:
            errors.append(error)
    if not errors:  # the first run shows it (see `registry.py`)
        return (Target(original),)
    path = knowledge.mirror_path(text)
    near = near_names(text, (name for names in knowledge.names() for name in names.listed()))
    at_root = all("." not in path for error in errors for path in error.completions)
    if near and at_root and not path and not any("did you mean" in str(error) for error in errors):
        similar = ", ".join(map(repr, near))
        raise NodePathError(
            f"no node {text!r} in the model; similar names: {similar}", text, tuple(near)
        )
    hint = f"the mirror has a node {text!r}: pass {path!r}, or NodeRef({text!r})" if path else ""
    raise _astray(errors, hint or _foreign(text) or knowledge.hint(text))


def targets_named(text: str, knowledge: ModelRuns) -> tuple[Target, ...]:
    """Resolve a string in the known part of a run; return nothing if it has no such name.

    Raise `NodePathError` if the string is ambiguous, or names something without a value.
    """
    resolution = resolve_meaning(text, knowledge)
    return () if resolution is None else _resolved_targets(resolution, text, text)


def _resolved_targets(resolution: Resolution, text: str, original: Any) -> tuple[Target, ...]:
    if resolution.is_whole_state:
        return (
            Target(
                original, Location("state", StateTensor(resolution.name), shown=resolution.name)
            ),
        )
    if resolution.module is not None:
        return (Target(original, Location("node", OfModule(resolution.module))),)
    if not resolution.places:
        raise NodePathError(
            f"{text!r} is a layer without a node in the tree: nothing can be inserted there; "
            "choose a node that uses it",
            text,
        )
    return tuple(
        Target(
            original, _node_location(root, node),
            None if chosen is None or node.role == "state" else tuple(chosen),
        )
        for root, node, chosen in resolution.places
    )  # fmt: skip


def _foreign(text: str) -> str:
    """Return a hint for a string that does not look like a name; otherwise ""."""
    if re.search(r"(^|\.)hook_\w+$", text):
        return (
            "bendtrace.workflows.transformer_lens_aliases(model) lists the names of "
            "TransformerLens's hooks that this model has"
        )
    if re.search(r"[\\^$*+?]", text):
        return f"for a regular expression, pass re.compile({text!r})"
    return ""


def _astray(errors: Sequence[NodePathError], hint: str) -> NodePathError:
    """Merge the errors of all runs into one: where the path got furthest, and what exists."""
    furthest = max(errors, key=_nearness)
    level = {path.rpartition(".")[0] for path in furthest.completions}
    more = dict.fromkeys(
        path
        for error in errors
        for path in error.completions
        if path not in furthest.completions and path.rpartition(".")[0] in level
    )
    messages = [str(furthest)]
    if more:
        names = ", ".join(repr(path.rpartition(".")[2]) for path in itertools.islice(more, 8))
        messages.append(f"in other runs there {'is' if len(more) == 1 else 'are'} {names}")
    message = "; ".join([*messages, hint] if hint else messages)
    return NodePathError(message, furthest.path, (*furthest.completions, *more))


def _nearness(error: NodePathError) -> tuple[int, float]:
    """Return how far a path got, and how similar the existing names are."""
    words = re.split(r"[.|:]", error.path)
    names = [path.split(".") for path in error.completions]
    alike = [
        SequenceMatcher(None, name[-1], words[len(name) - 1]).ratio()
        for name in names
        if len(name) <= len(words)
    ]
    return max(map(len, names), default=0), max(alike, default=0.0)


def _node_location(root: TreeNode, node: TreeNode) -> Location:
    shown = dug(root, node)
    if node.role == "call":
        return Location("node", AtPath(node.path), shown=shown)
    chain = [root]
    for name in node.path.split("."):
        chain.append(chain[-1].children[name])
    graph = max(i for i, item in enumerate(chain) if item.kind == "graph")
    holder, whole = chain[graph], chain[graph + 1]
    dig = tuple(item.key if item.key is not None else item.name for item in chain[graph + 2 :])
    if whole.role == "output":
        return Location("node", AtPath(holder.path), dig=dig, shown=shown)
    if whole.role == "input":
        return Location("input", AtPath(holder.path), whole.name, dig, shown)
    if whole.role == "state":
        key = str(whole.key)
        name = f"{holder.module}.{key}" if holder.module else key
        return Location("state", StateTensor(dotted(name), holder.path), shown=shown)
    if whole.kind == "number" and _is_taken(whole):
        raise NodePathError(
            f"{shown!r} is a Python number, which cannot be replaced; choose the tensor that "
            "it comes from",
            shown,
        )
    return Location("node", AtPath(whole.path), dig=dig, shown=shown)


_TAKEN = {"tolist", *SHAPES.values(), *dir(operator), *dir(builtins), *dir(math)}
_TAKEN |= {use.value for use in VALUES.values()}


def _is_taken(node: TreeNode) -> bool:
    """Return whether Python takes a number as soon as it exists."""
    base = re.sub(r"(_\d+)+$", "", node.label or node.name)
    return base in _TAKEN


_SHOWN = 8  # names in a message


def near_misses(text: str, names: Iterable[str]) -> str:
    """Return a text that suggests names similar to a name, or to a pattern for names."""
    distinct = list(dict.fromkeys(names))
    near = near_names(re.sub(r"[\\^$]", "", text), distinct, 3)
    if near:
        return f"did you mean {', '.join(map(repr, near))}?"
    listed = ", ".join(map(repr, distinct[:_SHOWN])) + (", ..." if len(distinct) > _SHOWN else "")
    return f"there are {listed or 'none'}"
