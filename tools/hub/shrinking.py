"""A configuration of `transformers` made small: the defaults of its class, scaled down."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from tools.hub.special import CONFIGS, Nested

WIDTH = 32
HEAD = 8
VOCAB = 99
IMAGE = 32
POSITIONS = 64

_BASES = (
    "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_size",
    "hidden_dim", "d_embed", "width", "embedding_dim", "encoder_hidden_size", "model_dim",
    "embed_dim_per_stage", "encoder_hidden_dim", "n_embed",
)  # fmt: skip
# What one part of a model takes from another: all are of one width.
_JOINED = re.compile(
    r"^(text|out|audio|backbone|encoder|vision|llm|lm|language|decoder|output|cross_attention|kv)"
    r"_hidden_size$|^condition_dim$|^hidden_size_(global|per_layer_input)$|^(text|llm|lm)_(hidden_)?dim$"
)
_LISTED_BASES = ("hidden_sizes", "embed_dims", "dims", "encoder_hidden_sizes", "channels")
_HEADS = re.compile(
    r"(^|_)(n_|num_)?(\w*_)?(heads?|key_value_heads|n_head_kv)$|num_kv_heads|n_head"
)
_LAYERS = re.compile(
    r"(^|_)(num_\w*layers|n_layers?|num_\w*blocks|depth|layers|num_layers|n_blocks|num_loops)$"
    r"|_layers$|_depth$|^num_hidden"
)
_WIDTH = re.compile(
    r"(dim|dims|d_model|d_ff|dff|n_embd|n_embed|n_inner|width|filters|units|d_inner|d_kv|rank"
    r"|hidden_size|hidden_sizes|intermediate_size|embedding_size|ffn_size|channels|mlp_size"
    r"|lora_r|projection_size|inner_size|proj_size|_features|out_features_dim|embed|codebook_size)$"
)
_NO_WIDTH = re.compile(
    r"num_channels|in_channels|in_chans|image_channels|n_channels|num_mel|mel_dim|input_dim|"
    r"position|out_features|output_features|_per_|in_features|audio_channels|input_channels|"
    r"state_dim|act_dim|model_in_dim|rope_dim|temporal_dim"
)
_TOKEN = re.compile(r"(_token_id|_token_index|_token_ids|_id|_token)$|_token_id$")
_POSITION = re.compile(
    r"max_position|n_positions|max_source_positions|max_target_positions|max_seq|n_ctx|"
    r"context_length|max_length|max_len|original_max|max_2d_position|max_sequence|seq_length$"
)
_EXPERTS = re.compile(r"(num_\w*experts|n_routed_experts|moe_num_experts|num_local_experts)$")
_CHOSEN = re.compile(r"(experts_per_tok(en)?|top_k_experts|moe_topk|moe_k|topk|top_k)$")
_IMAGE = re.compile(r"(image_size|img_size|input_size|tile_size|crop_size|resolution)$")
_IGNORED = {
    "transformers_version", "model_type", "architectures", "_name_or_path", "id2label", "label2id",
    "output_attentions", "dtype", "attribute_map", "_attn_implementation", "auto_map",
    "is_encoder_decoder", "output_hidden_states", "return_dict", "problem_type",
    "chunk_size_feed_forward", "stage_names", "out_features", "out_indices", "_out_features",
    "_out_indices", "per_layer_config", "stage_block_stride", "stage_block_out_channels",
    "stage_block_in_channels", "fine_fusion_dims", "feature_size", "qk_head_dim",
}  # fmt: skip


def shrunk(config: Any, **given: Any) -> Any:
    """Return a small configuration of the same class.

    What is in `special.CONFIGS` for its type, and then what is given, goes before the rules.
    """
    values = _small(config.to_dict(), config.model_type)
    values.update(given)
    return type(config)(**values)


def _small(values: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    special = CONFIGS.get(model_type, {})
    scale, heads = _scale(values)
    vocabulary = [v for k, v in values.items() if k.endswith("vocab_size") and isinstance(v, int)]
    tokens = iter(range(VOCAB - 2, 3, -1))
    kept = _kept_layers(values)
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key in _IGNORED or key in special:
            continue
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, list) and kept and len(value) == kept[0]:
            value = [value[index] for index in kept[1]]
        if isinstance(value, Mapping) and "model_type" in value:
            nested = _small(value, value["model_type"])
            made[key] = {**nested, "model_type": value["model_type"]}
        elif isinstance(value, Mapping):
            made[key] = _parameters(key, value)
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            made[key] = [
                _number(key, item, scale, heads, tokens, vocabulary, place)
                for place, item in enumerate(value)
            ]
        elif type(value) is int:
            made[key] = _number(key, value, scale, heads, tokens, vocabulary, None)
            if kept and _LAYERS.search(key) and value == kept[0]:
                made[key] = len(kept[1])
        else:
            # Heads want to know where a text ends.
            made[key] = 0 if key == "pad_token_id" and value is None else value
    for key, value in special.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, Nested) else value
    return made


def _parameters(key: str, value: Mapping[str, Any]) -> Any:
    """Return a mapping that is no configuration of a model."""
    if value.get("mrope_section"):
        return {**value, "mrope_section": [2, 1, 1]}
    return _small(value, key) if key.endswith("_config") else value


def _kept_layers(values: Mapping[str, Any]) -> tuple[int, list[int]] | None:
    """Return how many layers there are, and which to keep: one of each kind, at least two."""
    for key in ("layer_types", "layers_block_type", "mlp_layer_types", "attn_types"):
        kinds = values.get(key)
        if isinstance(kinds, list) and len(kinds) > 2:
            first = sorted({kind: kinds.index(kind) for kind in kinds}.values())[:4]
            if len(first) == 1:
                first.append(len(kinds) - 1)
            return len(kinds), first
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int) and layers > 2:
        return layers, [0, 1]
    return None


def _scale(values: Mapping[str, Any]) -> tuple[float, dict[int, int]]:
    if "depths" in values and type(values.get("embed_dim")) is int:
        listed = values.get("num_heads")
        first = listed[0] if isinstance(listed, (list, tuple)) and listed else 2
        return first * HEAD / values["embed_dim"], {}
    heads = {
        value: min(value, 4)
        for key, value in values.items()
        if type(value) is int and _HEADS.search(key) and "dim" not in key
    }
    for key in _BASES:
        base = values.get(key)
        if type(base) is int and base > 0:
            listed = next(
                (v for k, v in values.items() if _HEADS.search(k) and isinstance(v, list) and v),
                None,
            )
            target = WIDTH if not listed or type(listed[0]) is not int else listed[0] * HEAD
            return min(1.0, target / base), heads
        if isinstance(base, list) and base and type(base[0]) is int:
            return min(1.0, 16 / base[0]), heads
    for key in _LISTED_BASES:
        base = values.get(key)
        if isinstance(base, list) and base and type(base[0]) is int:
            return min(1.0, 16 / base[0]), heads
    return 1.0, heads


def _number(
    key: str, value: int, scale: float, heads: dict[int, int], tokens: Any, vocabulary: list[int],
    place: int | None,
) -> int:  # fmt: skip
    if value <= 0:
        return value
    if key.endswith("vocab_size"):
        return min(value, VOCAB)
    if key in ("num_feat_extract_layers", "num_codebooks", "num_conv_layers"):
        return value
    if _JOINED.search(key):
        return WIDTH
    if _CHOSEN.search(key):
        return min(value, 2)
    if _TOKEN.search(key):
        usual = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "unk": 3}
        name = key.removesuffix("_token_id")
        if name in usual:
            return usual[name]
        return next(tokens) if value >= VOCAB - 3 else value
    if _EXPERTS.search(key):
        return min(value, 4)
    if key in (
        "n_group",
        "topk_group",
        "num_expert_groups",
        "num_limited_groups",
        "num_expert_group",
        "first_k_dense_replace",
    ):
        return 1
    if _POSITION.search(key):
        return min(value, POSITIONS)
    if _IMAGE.search(key):
        return min(value, IMAGE)
    if key.endswith("patch_size"):
        return value if value <= 4 else 8
    if "window" in key and "pretrained" not in key:
        return min(value, 8 if "sliding" in key else 4)
    if "head_dim" in key or key in ("d_kv", "kv_channels"):
        return _even(value * HEAD / 64) if value != 128 else HEAD
    if _HEADS.search(key) and "dim" not in key:
        if place is not None:
            return value
        most = max(heads) if heads else value
        return value if most <= 4 else max(1, value * 4 // most)
    if _LAYERS.search(key) or key in ("depths", "num_layers", "layers", "depth"):
        return min(value, 2 if place in (None, 0) else 1)
    if "queries" in key or key in ("num_latents", "num_proposals", "num_query_tokens"):
        return min(value, 6)
    if _WIDTH.search(key) and not _NO_WIDTH.search(key):
        return value if scale == 1.0 and value <= WIDTH else _scaled(value, scale)
    return value


def _scaled(value: int, scale: float) -> int:
    if scale == 1.0:
        return min(value, 2 * WIDTH)
    return max(8, 8 * math.ceil(value * scale / 8))


def _even(value: float) -> int:
    return max(HEAD, 2 * math.ceil(value / 2))
