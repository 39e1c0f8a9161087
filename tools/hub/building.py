"""Models of `transformers` at random initialisation, by their type."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tools.hub.shrinking import shrunk

MOST_PARAMETERS = 60_000_000

# Of each kind some: how attention, positions, caches, routing, states and inputs are written.
CHOSEN = [
    # encoders
    "albert", "deberta-v2", "longformer", "modernbert",
    # decoders
    "bloom", "falcon", "gemma3_text", "gpt_neo", "qwen3",
    # mixtures of experts
    "deepseek_v3", "gpt_oss", "granitemoe", "qwen3_moe",
    # state spaces, recurrences and mixtures of these
    "falcon_mamba", "jamba", "mamba2", "qwen3_next", "rwkv",
    # encoders with decoders
    "bart", "pegasus", "switch_transformers",
    # images
    "convnext", "dinov2", "resnet", "segformer", "swin",
    # detection and segmentation
    "detr", "maskformer-swin", "sam", "yolos",
    # audio
    "encodec", "hubert", "wav2vec2", "whisper",
    # several kinds of inputs
    "clip", "idefics3", "llava", "qwen2_vl",
    # series and decisions
    "autoformer", "decision_transformer", "patchtst",
]  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """What the library says about a configuration is not about this one."""
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def types() -> list[str]:
    """Return all types of models that have a class in `AutoModel`."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES)


def build(model_type: str, *, auto: str = "AutoModel", seed: int = 0, **config: Any) -> Any:
    """Return a small model in eval mode, always with the same weights.

    Args:
        model_type: the type, a name in `AutoConfig`.
        auto: which of the classes for it, by the name of its Auto class.
        seed: of the weights.
        config: goes before the rules.
    """
    import transformers

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        small = shrunk(transformers.CONFIG_MAPPING[model_type](), **config)
        auto_class = getattr(transformers, auto)
        chosen = auto_class._model_mapping[type(small)]
        # Some types have several classes; the first one is what their checkpoints mean.
        chosen = chosen[0] if isinstance(chosen, tuple) else chosen
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in chosen(small).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"is not small: {size} parameters")
        model = chosen(small).eval()
        if getattr(model.config, "decoder_start_token_id", None) is None:
            model.config.decoder_start_token_id = 1  # a checkpoint would say
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.decoder_start_token_id = 1
        return model
