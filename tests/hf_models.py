"""Tiny, randomly initialised Hugging Face models, with inputs for them.

`transformers` is imported only when a model is made, so that a test file can import this one
before it decides whether to skip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCAB = 99
SPECIAL_TOKENS = 3  # padding (0), beginning (1) and end (2); random tokens are none of them
IMAGE = 16
MEL_BINS = 16
MEL_FRAMES = 40
AUDIO_STRIDE = 20  # samples between two frames of the Wav2Vec2 below

Inputs = dict[str, Any]
MakeInputs = Callable[..., Inputs]


@dataclass(frozen=True)
class TinyModel:
    """A small model in eval mode and the arguments to call it with.

    Attributes:
        name: Name of the architecture, usable as a test id.
        make: Builds the model; every call gives the same weights.
        inputs: `inputs(batch, length, seed)` gives keyword arguments of forward. All three have
            defaults. Attention masks, where there are any, are all ones.
        padded: Like `inputs`, with the end of the last row padded and masked; None for a model
            that takes no attention mask.
        other_sizes: Sizes to pass to `inputs` or `padded`, none of them the default one.
        sizes_replay: Whether a trace made at one size should replay at the others.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: MakeInputs
    padded: MakeInputs | None
    other_sizes: tuple[dict[str, int], ...]
    sizes_replay: bool


def _tiny(architecture: str, **config: Any) -> Callable[[], nn.Module]:
    """Returns a function that builds `architecture`, a class of `transformers`."""

    def make() -> nn.Module:
        import transformers

        model_class = getattr(transformers, architecture)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model_class(model_class.config_class(**config)).eval()

    return make


def _tokens(batch: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SPECIAL_TOKENS, VOCAB, (batch, length), generator=generator)


def _text(batch: int = 2, length: int = 12, seed: int = 0) -> Inputs:
    ids = _tokens(batch, length, seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _long_text(batch: int = 2, length: int = 32, seed: int = 0) -> Inputs:
    return _text(batch, length, seed)


def _text_pair(batch: int = 2, length: int = 12, seed: int = 0) -> Inputs:
    """Text for an encoder, and half as much for a decoder."""
    return _text(batch, length, seed) | {"decoder_input_ids": _tokens(batch, length // 2, seed + 1)}


def _image(batch: int = 2, length: int = 12, seed: int = 0) -> Inputs:
    """Images of one fixed size: `length` is accepted for uniformity and ignored."""
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)}


def _speech_and_text(batch: int = 2, length: int = 12, seed: int = 0) -> Inputs:
    """Spectrograms of one fixed size, and `length` tokens for the decoder."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(batch, MEL_BINS, MEL_FRAMES, generator=generator),
        "decoder_input_ids": _tokens(batch, length, seed + 1),
    }


def _audio(batch: int = 2, length: int = 12, seed: int = 0) -> Inputs:
    """Raw audio, `length` strides of the feature extractor long."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, length * AUDIO_STRIDE, generator=generator)
    return {"input_values": values, "attention_mask": torch.ones_like(values, dtype=torch.long)}


def _padded(inputs: MakeInputs, data: str = "input_ids") -> MakeInputs:
    """Returns `inputs` with the last third of the last row padded with zeros and masked."""

    def make_padded(**size: int) -> Inputs:
        made = inputs(**size)
        mask = made["attention_mask"]
        mask[-1, -(mask.shape[1] // 3) :] = 0
        return made | {data: made[data].masked_fill(mask == 0, 0)}

    return make_padded


_TOKEN_IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# The usual 0.02 would leave so narrow a model nearly blind to its inputs.
_TRANSFORMER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
_POSITIONS = {"max_position_embeddings": 64}

_SIZES = ({"batch": 3, "length": 12}, {"batch": 2, "length": 17})
_LONG_SIZES = ({"batch": 3, "length": 32}, {"batch": 2, "length": 37})

MODELS = (
    TinyModel(
        "gpt2",
        _tiny(
            "GPT2LMHeadModel",
            **_TOKEN_IDS,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            initializer_range=0.2,
        ),
        _text,
        _padded(_text),
        _SIZES,
        sizes_replay=True,
    ),
    TinyModel(
        "llama",
        _tiny(
            "LlamaForCausalLM", **_TOKEN_IDS, **_TRANSFORMER, **_POSITIONS, num_key_value_heads=2
        ),
        _text,
        _padded(_text),
        _SIZES,
        sizes_replay=True,
    ),
    TinyModel(
        "mixtral",
        _tiny(
            "MixtralForCausalLM",
            **_TOKEN_IDS,
            **_TRANSFORMER,
            **_POSITIONS,
            num_key_value_heads=2,
            num_local_experts=4,
        ),
        _text,
        _padded(_text),
        _SIZES,
        sizes_replay=False,
    ),
    TinyModel(
        "bert",
        _tiny("BertModel", **_TOKEN_IDS, **_TRANSFORMER, **_POSITIONS),
        _text,
        _padded(_text),
        _SIZES,
        sizes_replay=True,
    ),
    TinyModel(
        "t5",
        _tiny(
            "T5ForConditionalGeneration",
            vocab_size=VOCAB,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=0,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
        ),
        _text_pair,
        _padded(_text_pair),
        _SIZES,
        sizes_replay=True,
    ),
    TinyModel(
        "vit",
        _tiny("ViTModel", **_TRANSFORMER, image_size=IMAGE, patch_size=4),
        _image,
        None,
        ({"batch": 3}, {"batch": 5}),
        sizes_replay=True,
    ),
    TinyModel(
        "mamba",
        _tiny(
            "MambaForCausalLM",
            **_TOKEN_IDS,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            initializer_range=0.2,
        ),
        _text,
        _padded(_text),
        _SIZES,
        sizes_replay=False,
    ),
    TinyModel(
        "whisper",
        _tiny(
            "WhisperModel",
            **_TOKEN_IDS,
            decoder_start_token_id=1,
            begin_suppress_tokens=None,
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            num_mel_bins=MEL_BINS,
            max_source_positions=MEL_FRAMES // 2,
            max_target_positions=64,
            init_std=0.2,
        ),
        _speech_and_text,
        None,
        _SIZES,
        sizes_replay=True,
    ),
    TinyModel(
        # Pads itself to a multiple of the window: not at the default length, but at the other.
        "longformer",
        _tiny(
            "LongformerModel",
            **_TOKEN_IDS,
            **_TRANSFORMER,
            **_POSITIONS,
            sep_token_id=2,
            attention_window=4,
        ),
        _text,
        _padded(_text),
        _SIZES,
        sizes_replay=False,
    ),
    TinyModel(
        # At 28 tokens, 7 blocks, and below, it would fall back to full attention, for good.
        "big_bird",
        _tiny(
            "BigBirdModel",
            **_TOKEN_IDS,
            **_TRANSFORMER,
            **_POSITIONS,
            sep_token_id=2,
            block_size=4,
            num_random_blocks=1,
        ),
        _long_text,
        _padded(_long_text),
        _LONG_SIZES,
        sizes_replay=False,
    ),
    TinyModel(
        # The variant with layer norm in its feature extractor, which wants an attention mask.
        "wav2vec2",
        _tiny(
            "Wav2Vec2Model",
            **_TOKEN_IDS,
            **_TRANSFORMER,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            conv_dim=(32, 32, 32),
            conv_kernel=(10, 3, 3),
            conv_stride=(5, 2, 2),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
        ),
        _audio,
        _padded(_audio, "input_values"),
        _SIZES,
        sizes_replay=False,
    ),
)
