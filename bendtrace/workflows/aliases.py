"""Other names for activations: those of TransformerLens's hooks, and names of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from bendtrace.errors import InputError

__all__ = ["Alias", "Aliases", "transformer_lens_aliases"]


@dataclass(frozen=True)
class Alias:
    """What another name stands for.

    Attributes:
        where: a module's path with `.output` or `.input`, or a node path.
        pick: makes of that value the one that is meant; None for the value as it is.
        why: why the two are the same.

    Example:
        >>> import torch, bendtrace as bt
        >>> first = bt.workflows.Alias("0.output", pick=lambda value: value[0])
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> x = torch.ones(1, 2)
        >>> _, cache = bt.workflows.run_with_cache(model, x, aliases={"first": first})
        >>> cache["0.output"].shape, cache["first"].shape
        (torch.Size([1, 2]), torch.Size([2]))
    """

    where: str
    pick: Callable[[Any], Any] | None = None
    why: str = ""


class Aliases(Mapping[str, Alias]):
    r"""Other names for what nodes give.

    Args:
        names: what each name stands for: an `Alias`, or just its `where`.
        unequal: names that people may look for but that stand for nothing here, as regular
            expressions that match them in full, and why.

    Raises:
        InputError: something given is no name.

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
                    f"an alias is a name for a path or an Alias, not {name!r}: {alias!r}"
                )
            self._names[name] = Alias(alias) if isinstance(alias, str) else alias
        self._unequal = dict(unequal or {})

    def __getitem__(self, name: str) -> Alias:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def why_not(self, name: str) -> str:
        """Return why a name stands for nothing here; "" if nothing is known of it."""
        if name in self._names:
            return ""
        for pattern, reason in self._unequal.items():
            if re.fullmatch(pattern, name):
                return reason
        return ""

    def __or__(self, other: Mapping[str, str | Alias]) -> Aliases:
        unequal = {**self._unequal, **(other._unequal if isinstance(other, Aliases) else {})}
        return Aliases({**self._names, **other}, unequal)

    def __repr__(self) -> str:
        return f"<Aliases: {len(self)} names>"

    def __str__(self) -> str:
        wide = max(map(len, self._names), default=0)
        return "\n".join(f"{name:<{wide}}  {alias.where}" for name, alias in self._names.items())


def transformer_lens_aliases(model: Any) -> Aliases:
    """Return TransformerLens's names of hooks for what is the same in a Hugging Face model.

    There are tables for GPT-2 and Llama (and those built like it: Mistral, Qwen 2), told by the
    configuration and the names of modules; they were compared with TransformerLens 4.3.0 on models
    with random weights. What is meant are the values of a TransformerLens model whose weights are
    as they were: folding and centring (`enable_compatibility_mode`, once `from_pretrained`) give
    other ones.

    Args:
        model: the model. For others than those, no name is known.

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
    for table in _TABLES:
        for name in modules if kind in table.kinds else ():
            found = re.fullmatch(rf"((?:.+\.)?){table.block}\.0", name)
            if found and all(f"{name}.{part}" in modules for part in table.parts):
                made = table.make(modules, found[1])
                if made is not None:
                    return made
    return Aliases()


_NOT_IN_FRONT = (
    "TransformerLens can split the input of a layer into one for each head; here there is one "
    "tensor: take blocks.{i}.hook_resid_pre, or hook_resid_mid"
)
_UNEQUAL = {
    r"blocks\.\d+\.(attn\.)?hook_(q_input|k_input|v_input|mlp_in|attn_in)": _NOT_IN_FRONT,
    r"blocks\.\d+\.attn\.hook_result": (
        "no tensor of the model holds what each head adds by itself: it is "
        "hook_z @ W_O, head by head"
    ),
    r"blocks\.\d+\.attn\.hook_attn_scores": (
        "what is masked holds other numbers there (-inf) than here; take attn.hook_pattern, or the "
        "node in front of the softmax"
    ),
    r".*\.hook_scale": "the norm's scale is inside one operation, and no tensor of the model",
    r"hook_tokens": "that is what the model is given",
}


def _heads(count: int) -> Callable[[Any], Tensor]:
    """Take the last axis apart into heads: (..., heads, size of a head)."""

    def split(value: Tensor) -> Tensor:
        made: Tensor = value.unflatten(-1, (count, -1))
        return made

    return split


def _third(number: int, count: int) -> Callable[[Any], Tensor]:
    """Take queries, keys or values out of what gives all three, by heads."""

    def split(value: Tensor) -> Tensor:
        made: Tensor = value.chunk(3, -1)[number].unflatten(-1, (count, -1))
        return made

    return split


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) else value


_STREAM = "both are the residual stream: the sum of the embeddings and of all layers before"
_EAGER = "the softmax is an operation by itself only with attn_implementation='eager'"


def _shared(prefix: str, block: str, attention: str) -> dict[str, str | Alias]:
    return {
        "hook_resid_pre": Alias(f"{prefix}{block}.input", None, _STREAM),
        "hook_resid_post": Alias(f"{prefix}{block}.output", _first, _STREAM),
        "hook_attn_out": Alias(
            f"{prefix}{block}.{attention}.output", _first, "what attention adds to the stream"
        ),
        "hook_mlp_out": Alias(f"{prefix}{block}.mlp.output", None, "what the MLP adds"),
        "attn.hook_pattern": Alias(
            f"{_node_path(f'{prefix}{block}')}.{attention}.softmax", None, _EAGER
        ),
    }


def _node_path(name: str) -> str:
    """Return the node path of a module: numbers are joined to the name before."""
    return re.sub(r"\.(\d+)", r"_\1", name)


def _gpt2(modules: Mapping[str, nn.Module], prefix: str) -> Aliases | None:
    heads = getattr(modules[f"{prefix}h.0.attn"], "num_heads", None)
    if not isinstance(heads, int):
        return None
    names: dict[str, str | Alias] = {"hook_embed": f"{prefix}wte.output"}
    for i in range(len(modules[f"{prefix}h"])):  # type: ignore[arg-type]
        block = f"h.{i}"
        at = f"{prefix}{block}"
        own = _shared(prefix, block, "attn")
        own |= {
            "ln1.hook_normalized": Alias(f"{at}.ln_1.output", None, "the norm with its weights"),
            "attn.hook_q": Alias(f"{at}.attn.c_attn.output", _third(0, heads), "by heads"),
            "attn.hook_k": Alias(f"{at}.attn.c_attn.output", _third(1, heads), "by heads"),
            "attn.hook_v": Alias(f"{at}.attn.c_attn.output", _third(2, heads), "by heads"),
            "attn.hook_z": Alias(f"{at}.attn.c_proj.input", _heads(heads), "by heads"),
            "hook_resid_mid": Alias(f"{at}.ln_2.input", None, _STREAM),
            "ln2.hook_normalized": Alias(f"{at}.ln_2.output", None, "the norm with its weights"),
            "mlp.hook_pre": Alias(f"{at}.mlp.c_fc.output", None, "before the activation"),
            "mlp.hook_post": Alias(f"{at}.mlp.c_proj.input", None, "after the activation"),
        }
        names |= {f"blocks.{i}.{name}": alias for name, alias in own.items()}
    names["ln_final.hook_normalized"] = f"{prefix}ln_f.output"
    unequal = {
        "hook_pos_embed": (
            "here there is one row for all examples: take "
            f"{prefix}wpe.output, which has no axis of its own for them"
        ),
        r"blocks\.\d+\.attn\.hook_rot_[qk]": "GPT-2 rotates nothing",
        r"blocks\.\d+\.mlp\.hook_pre_linear": "GPT-2's MLP has no gate",
    }
    return Aliases(names, {**unequal, **_UNEQUAL})


def _llama(modules: Mapping[str, nn.Module], prefix: str) -> Aliases | None:
    attention = modules[f"{prefix}layers.0.self_attn"]
    size = getattr(attention, "head_dim", None)
    if not isinstance(size, int) or f"{prefix}layers.0.self_attn.q_norm" in modules:
        return None  # with norms of queries and keys the names would mean something else

    def by_size(value: Any) -> Tensor:
        heads: Tensor = value.unflatten(-1, (-1, size))
        return heads

    names: dict[str, str | Alias] = {"hook_embed": f"{prefix}embed_tokens.output"}
    for i in range(len(modules[f"{prefix}layers"])):  # type: ignore[arg-type]
        block = f"layers.{i}"
        at = f"{prefix}{block}"
        own = _shared(prefix, block, "self_attn")
        own |= {
            "attn.hook_q": Alias(f"{at}.self_attn.q_proj.output", by_size, "before the rotation"),
            "attn.hook_k": Alias(f"{at}.self_attn.k_proj.output", by_size, "before the rotation"),
            "attn.hook_v": Alias(f"{at}.self_attn.v_proj.output", by_size, "by heads"),
            "attn.hook_z": Alias(f"{at}.self_attn.o_proj.input", by_size, "by heads"),
            "hook_resid_mid": Alias(f"{at}.post_attention_layernorm.input", None, _STREAM),
            "mlp.hook_pre": Alias(f"{at}.mlp.gate_proj.output", None, "the gate"),
            "mlp.hook_pre_linear": Alias(f"{at}.mlp.up_proj.output", None, "what is gated"),
            "mlp.hook_post": Alias(f"{at}.mlp.down_proj.input", None, "gated"),
        }
        names |= {f"blocks.{i}.{name}": alias for name, alias in own.items()}
    unequal = {
        r"blocks\.\d+\.attn\.hook_rot_[qk]": (
            "the rotated queries and keys are no module's: take the nodes self_attn.add and "
            "self_attn.add_1, whose axes are in another order"
        ),
        r"(blocks\.\d+\.ln[12]|ln_final)\.hook_normalized": (
            "TransformerLens means what the norm gives before it is multiplied with its weights; "
            "the module here gives it afterwards: take the node in front of the last `mul`"
        ),
        "hook_pos_embed": "Llama has rotations in place of embeddings of positions",
    }
    return Aliases(names, {**unequal, **_UNEQUAL})


class _Table(NamedTuple):
    """What is known of a family of models.

    Attributes:
        kinds: `model_type` of their configurations.
        block: what the list of blocks is called.
        parts: modules that a block has.
        make: makes the names.
    """

    kinds: frozenset[str]
    block: str
    parts: tuple[str, ...]
    make: Callable[[Mapping[str, nn.Module], str], Aliases | None]


_TABLES = (
    _Table(
        frozenset({"gpt2"}), "h", ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc"), _gpt2
    ),
    _Table(
        frozenset({"llama", "mistral", "qwen2"}), "layers",
        ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"), _llama,
    ),
)  # fmt: skip
