"""Inputs for a model of `transformers`, guessed from what its forward takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
BATCH = 2
LENGTH = 8
FIRST_TOKEN, LAST_TOKEN = 4, 24  # fits small vocabularies, and has no special tokens
FRAMES = 64
SAMPLES = 8000  # 25 frames of most feature extractors


class Guess:
    """Makes inputs for one model; the same for the same seed.

    Args:
        model: the model.
        seed: of the values.
        batch: how many samples.
        length: how many tokens.
    """

    def __init__(self, model: Any, seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> None:
        self.model = model
        self.config = model.config
        self.batch = batch
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)
        self.takes = set(inspect.signature(model.forward).parameters)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def tokens(self, length: int | None = None) -> Tensor:
        most = min(LAST_TOKEN, self.found("vocab_size", 99) - 1)
        shape = (self.batch, self.length if length is None else length)
        return torch.randint(min(FIRST_TOKEN, most - 1), most, shape, generator=self.generator)

    def found(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the configuration, or of the parts of it."""
        return _found(self.config, name, default)

    def image_size(self) -> tuple[int, int]:
        size = self.found("image_size") or self.found("img_size") or self.found("crop_size") or 32
        if isinstance(size, (list, tuple)):
            return int(size[0]), int(size[-1])
        return (size, size) if isinstance(size, int) else (32, 32)

    def image(self, size: int | None = None) -> Tensor:
        height, width = self.image_size() if size is None else (size, size)
        channels = self.found("num_channels") or self.found("in_chans") or 3
        return self.randn(self.batch, channels, height, width)

    def text(self) -> Inputs:
        ids = self.tokens()
        made: Inputs = {"input_ids": ids}
        if "attention_mask" in self.takes:
            made["attention_mask"] = torch.ones_like(ids)
        if "bbox" in self.takes:
            made["bbox"] = torch.tensor([1, 2, 8, 9]).expand(self.batch, self.length, 4)
        return made

    def pair(self) -> Inputs:
        return self.text() | {"decoder_input_ids": self.tokens(self.length // 2)}

    def features(self) -> Inputs:
        """Spectrograms, in the layout that the type of the model has."""
        bins = self.found("num_mel_bins") or self.found("input_feat_per_channel") or 80
        frames = 2 * (self.found("max_source_positions") or FRAMES // 2)
        return {"input_features": self.randn(self.batch, bins, frames)}

    def features_in_rows(self) -> Inputs:
        bins = (
            self.found("num_mel_bins") or self.found("feature_projection_input_dim")
            or self.found("input_dim") or 80
        )  # fmt: skip
        return {"input_features": self.randn(self.batch, FRAMES, bins)}

    def masked(self, made: Inputs) -> Inputs:
        frames = max(made["input_features"].shape[1:])
        return made | {"input_features_mask": torch.ones(self.batch, frames, dtype=torch.long)}

    def grid(self) -> Inputs:
        """Patches of images of four by four each, as the Qwen models have them."""
        channels = self.found("in_channels") or self.found("in_chans") or 3
        patch = self.found("patch_size") or 8
        time = self.found("temporal_patch_size") or self.found("patch_temporal") or 1
        return {
            "hidden_states": self.randn(16 * self.batch, channels * time * patch * patch),
            "grid_thw": torch.tensor([[1, 4, 4]] * self.batch),
        }

    def patches(self, name: str) -> Inputs:
        made = self.grid()
        patches: Inputs = {"pixel_values": made["hidden_states"], name: made["grid_thw"]}
        if "merge_sizes" in self.takes:
            patches["merge_sizes"] = torch.ones(self.batch, dtype=torch.long)
        return patches

    def series(self) -> Inputs:
        lags = max(self.found("lags_sequence") or [0])
        past = (self.found("context_length") or 8) + lags
        size = self.found("num_input_channels")  # patches of several series, each a channel
        shape = (self.batch, past) if size is None else (self.batch, past, size)
        values = self.randn(*shape)
        features = self.found("num_time_features") or 0
        made: Inputs = {
            "past_values": values,
            "past_time_features": self.randn(self.batch, past, features),
            "past_observed_mask": torch.ones(shape),
            "past_values_padding": torch.zeros(self.batch, past, dtype=torch.long),
            "freq": torch.zeros(self.batch, 1, dtype=torch.long),
        }
        return self.taken(made)

    def taken(self, made: Inputs) -> Inputs:
        return {name: value for name, value in made.items() if name in self.takes}

    def candidates(self) -> Iterator[tuple[str, Callable[[], Inputs]]]:
        """Yield kinds of inputs with makers of them, the most telling ones first."""
        takes = self.takes
        special = BY_TYPE.get(self.config.model_type)
        if special is not None:
            yield "special", lambda: special(self)
        if "hidden_states" in takes and "grid_thw" in takes:
            yield "patches", self.grid
        if "pixel_values" in takes and "grid_thw" in takes:
            yield "patches", lambda: self.patches("grid_thw")
        if "pixel_values" in takes and "image_grid_thw" in takes and "input_ids" not in takes:
            yield "patches", lambda: self.patches("image_grid_thw")
        if "past_values" in takes:
            yield "series", self.series
        if "pixel_values" in takes and "input_ids" in takes:
            yield "image and text", lambda: self.text() | {"pixel_values": self.image()}
            yield "image and text pair", lambda: self.pair() | {"pixel_values": self.image()}
            yield (
                "image and its tokens",
                lambda: self.with_image_tokens({"pixel_values": self.image()}),
            )
            yield "image grid and its tokens", lambda: self.with_image_tokens(self.gridded())
            yield "film and text", lambda: self.text() | {"pixel_values": self.video(8)}
        if "pixel_values_videos" in takes and "input_ids" in takes:
            yield "video and text", lambda: self.text() | {"pixel_values_videos": self.video(4)}
        if "input_features_mask" in takes and "input_ids" not in takes:
            yield "masked speech", lambda: self.masked(self.features())
            yield "masked speech rows", lambda: self.masked(self.features_in_rows())
        if "input_features" in takes and "decoder_input_ids" in takes:
            made = {"decoder_input_ids": self.tokens(self.length // 2)}
            yield "speech and text", lambda: self.features() | made
            yield "speech rows and text", lambda: self.features_in_rows() | made
        if "input_values" in takes and "decoder_input_ids" in takes:
            yield (
                "audio and text",
                lambda: {
                    "input_values": self.randn(self.batch, SAMPLES),
                    "decoder_input_ids": self.tokens(self.length // 2),
                },
            )
        if "input_features" in takes and "input_ids" in takes:
            yield "spectrogram and text", lambda: self.text() | self.features()
            yield "spectrogram rows and text", lambda: self.text() | self.features_in_rows()
        if "decoder_input_ids" in takes and "input_ids" in takes:
            yield "text pair", self.pair
        if "input_values" in takes:
            yield "audio", lambda: {"input_values": self.randn(self.batch, SAMPLES)}
            yield "audio channel", lambda: {"input_values": self.randn(self.batch, 1, SAMPLES // 5)}
            bins = self.found("num_mel_bins") or 16
            length = self.found("max_length") or 64
            yield "spectrogram", lambda: {"input_values": self.randn(self.batch, length, bins)}
        if "input_features" in takes:
            yield "speech", self.features
            yield "speech rows", self.features_in_rows
        if "pixel_values_videos" in takes:
            frames = self.found("frames_per_clip") or self.found("num_frames") or 4
            yield "video", lambda: {"pixel_values_videos": self.video(frames)}
        if "pixel_values" in takes:
            yield "image", lambda: {"pixel_values": self.image()}
            for size in (64, 128, 224):
                yield f"image of {size}", lambda size=size: {"pixel_values": self.image(size)}
            frames = self.found("num_frames") or 4
            yield "film", lambda: {"pixel_values": self.video(frames)}
        if "input_ids" in takes:
            yield "text", self.text
            yield "ids", lambda: {"input_ids": self.tokens()}
        for name in ("latents", "inputs_embeds", "inputs"):
            if name in takes:
                width = self.found("hidden_size") or self.found("d_model") or 32
                yield name, lambda name=name, width=width: {name: self.randn(2, self.length, width)}
        if "latents" in takes:
            yield "latents", lambda: {"latents": self.randn(2, self.found("hidden_size", 32), 8)}

    def video(self, frames: int) -> Tensor:
        height, width = self.image_size()
        return self.randn(self.batch, frames, self.found("num_channels") or 3, height, width)

    def gridded(self) -> Inputs:
        made = self.grid()
        return {"pixel_values": made["hidden_states"], "image_grid_thw": made["grid_thw"]}

    def with_image_tokens(self, image: Inputs) -> Inputs:
        """Return a text with as many image tokens as the model says that it has features."""
        token = self.found("image_token_id")
        token = self.found("image_token_index") if token is None else token
        if not isinstance(token, int):
            raise ValueError("no image token is known")
        most = 1
        for _ in range(3):
            ids = torch.full((self.batch, most + 4), token)
            ids[:, :2] = self.tokens(2)
            ids[:, -2:] = self.tokens(2)
            made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **image}
            if "mm_token_type_ids" in self.takes:
                made["mm_token_type_ids"] = (ids == token).long()
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    self.model(**made)
            except Exception as error:
                wanted = _features(str(error))
                if wanted is None or wanted % self.batch or wanted // self.batch == most:
                    raise
                most = wanted // self.batch
            else:
                return made
        raise ValueError("the model wants another number of image tokens each time")


def guessed(model: Any, seed: int = 0, **sizes: int) -> tuple[str, Inputs]:
    """Return the first inputs that the model runs on, and their kind.

    Raises:
        ValueError: it runs on none; the message has what it said about each.
    """
    said = []
    for kind, make in Guess(model, seed, **sizes).candidates():
        try:
            made = make()
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model(**made)
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            said.append(f"{kind}: {type(error).__name__}: {text[0][:110]}")
        else:
            return kind, made
    raise ValueError(" | ".join(said) or "no inputs are known for it")


def _features(message: str) -> int | None:
    found = re.search(r"tokens: \(?(\d+).*?features:? \(?(\d+)", message, re.S)
    if found is None:
        found = re.search(r"tokens.*?(\d+).*?features.*?(\d+)", message, re.S)
    return None if found is None else int(found.group(2))


def _found(config: Any, name: str, default: Any, depth: int = 0) -> Any:
    value = getattr(config, name, None)
    if value is not None:
        return value
    if depth < 3:
        for key in getattr(config, "sub_configs", None) or ():
            part = getattr(config, key, None)
            if part is not None:
                value = _found(part, name, None, depth + 1)
                if value is not None:
                    return value
    return default


def _decision(guess: Guess) -> Inputs:
    steps = 4
    return {
        "states": guess.randn(2, steps, guess.config.state_dim),
        "actions": guess.randn(2, steps, guess.config.act_dim),
        "rewards": guess.randn(2, steps, 1),
        "returns_to_go": guess.randn(2, steps, 1),
        "timesteps": torch.arange(steps).expand(2, steps),
        "attention_mask": torch.ones(2, steps),
    }


def _points(guess: Guess) -> Inputs:
    return {
        "pixel_values": guess.image(),
        "input_points": torch.tensor([[[[4.0, 5.0]]]]).expand(2, 1, 1, 2),
    }


def _regions(guess: Guess) -> Inputs:
    width = guess.config.visual_feat_dim
    return guess.text() | {
        "visual_feats": guess.randn(2, 5, width),
        "visual_pos": torch.rand(2, 5, 4, generator=guess.generator),
    }


def _questions(guess: Guess) -> Inputs:
    return guess.text() | {"pixel_values": guess.image(), "qformer_input_ids": guess.tokens()}


def _flat_patches(guess: Guess) -> Inputs:
    patch = guess.found("patch_size")
    return {
        "pixel_values": guess.randn(2, 16, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }


def _image_pair(guess: Guess) -> Inputs:
    return {"pixel_values": torch.rand(1, 2, 3, 64, 64, generator=guess.generator)}


def _mel(guess: Guess) -> Inputs:
    return {
        "audio_mel": guess.randn(2, FRAMES, guess.found("input_feat_size", 128)),
        "audio_mel_mask": torch.zeros(2, FRAMES, dtype=torch.bool),
    }


def _square_patches(guess: Guess) -> Inputs:
    patch = guess.found("patch_size")
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return {"pixel_values": guess.randn(32, 3, patch, patch), "grid_thw": grid}


BY_TYPE: dict[str, Callable[[Guess], Inputs]] = {
    "decision_transformer": _decision,
    "sam": _points,
    "sam_hq": _points,
    "sam2": _points,
    "lxmert": _regions,
    "instructblip": _questions,
    "siglip2_vision_model": _flat_patches,
    "siglip2": lambda guess: guess.text() | _flat_patches(guess),
    "lightglue": _image_pair,
    "efficientloftr": _image_pair,
    "superglue": _image_pair,
    "gemma3n_audio": _mel,
    "kimi_k25_vision": _square_patches,
}
