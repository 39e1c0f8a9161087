"""Sparse autoencoders in the folders of SAE-Lens and dictionary_learning."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace._lazy import imported, required
from bendtrace.errors import InputError, LoadError

_BOTH = ("W_enc", "W_dec", "b_dec")
# The tensors that each kind of encoder reads.
_READS = {
    "standard": (*_BOTH, "b_enc"),
    "gated": (*_BOTH, "b_gate", "b_mag", "r_mag"),
    "jumprelu": (*_BOTH, "b_enc", "threshold"),
    "topk": (*_BOTH, "b_enc"),
}
_LINEAR = {"encoder.weight": "W_enc", "encoder.bias": "b_enc", "decoder.weight": "W_dec"}


# The classes of dictionary_learning: which encoder they have, whether it subtracts `b_dec`, what
# they call its tensors, and which ones are not read.
_CLASSES: dict[str, tuple[str, bool, dict[str, str], tuple[str, ...]]] = {
    "AutoEncoder": ("standard", True, _LINEAR | {"bias": "b_dec"}, ()),
    "AutoEncoderNew": ("standard", False, _LINEAR | {"decoder.bias": "b_dec"}, ()),
    "GatedAutoEncoder": (
        "gated", True,
        _LINEAR | {"decoder_bias": "b_dec", "gate_bias": "b_gate", "mag_bias": "b_mag"}, (),
    ),
    "AutoEncoderTopK": ("topk", True, _LINEAR, ("k", "threshold")),
    # Outside of training, all that is above the threshold stays.
    "BatchTopKSAE": ("jumprelu", True, _LINEAR, ("k",)),
    "MatryoshkaBatchTopKSAE": ("jumprelu", True, {}, ("k", "group_sizes")),
    "JumpReluAutoEncoder": ("jumprelu", False, {}, ()),
}  # fmt: skip


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder that was loaded; `load_autoencoder` makes it.

    With `pre = (x - b_dec) @ W_enc + b_enc`, where `b_dec` is subtracted only if `subtracts`, the
    latents are:

    - "standard": `relu(pre)`
    - "jumprelu": `relu(pre)` where `pre > threshold`, else 0
    - "topk": `relu(pre)` at the `k` largest of each row, else 0
    - "gated": `relu(h * exp(r_mag) + b_mag)` where `h + b_gate > 0`, else 0; `h` is `pre` without
      `b_enc`

    and the reconstruction is `latents @ W_dec + b_dec`. Inputs are converted to the dtype of the
    weights.

    Attributes:
        architecture: one of these words.
        subtracts: whether `b_dec` is subtracted from the input.
        k: how many latents "topk" keeps; otherwise None.
        rescales: whether the latents of "topk" are multiplied by the norms of the rows of `W_dec`
            before they are compared, and divided by them when they are decoded.
        config: what the folder's `cfg.json` or `config.json` says, as JSON.
        W_enc: (inputs, latents).
        W_dec: (latents, inputs).
        b_dec: (inputs,).

    Example:
        >>> import torch, bendtrace as bt
        >>> tensors = {"W_enc": torch.eye(2), "W_dec": torch.eye(2)}
        >>> tensors |= {"b_enc": torch.zeros(2), "b_dec": torch.zeros(2)}
        >>> sae = bt.workflows.SparseAutoencoder("standard", tensors, {}, subtracts=True)
        >>> sae, sae.encode(torch.tensor([[-1.0, 2.0]])).detach()
        (SparseAutoencoder(standard, 2 inputs, 2 latents), tensor([[0., 2.]]))
    """

    W_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    b_enc: Tensor
    b_gate: Tensor
    b_mag: Tensor
    r_mag: Tensor
    threshold: Tensor

    def __init__(
        self,
        architecture: str,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        subtracts: bool,
        k: int | None = None,
        rescales: bool = False,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.subtracts = subtracts
        self.k = k
        self.rescales = rescales
        self.config: str = json.dumps(
            config
        )  # a text, since compiled code may depend on plain values only
        for name in _READS[architecture]:
            self.register_parameter(name, nn.Parameter(tensors[name]))

    def encode(self, x: Tensor) -> Tensor:
        """Return the latents: (..., inputs) to (..., latents)."""
        x = x.to(self.W_enc.dtype)
        pre = (x - self.b_dec if self.subtracts else x) @ self.W_enc
        if self.architecture == "gated":
            found = torch.relu(pre * self.r_mag.exp() + self.b_mag)
            return found * (pre + self.b_gate > 0).to(found.dtype)
        pre = pre + self.b_enc
        if self.architecture == "jumprelu":
            return torch.relu(pre) * (pre > self.threshold).to(pre.dtype)
        if self.k is None:
            return torch.relu(pre)
        if self.rescales:
            pre = pre * self.W_dec.norm(dim=-1)
        values, places = pre.topk(self.k, dim=-1)
        return torch.zeros_like(pre).scatter(-1, places, torch.relu(values))

    def decode(self, latents: Tensor) -> Tensor:
        """Return the reconstruction: (..., latents) to (..., inputs)."""
        if self.rescales:
            latents = latents / self.W_dec.norm(dim=-1)
        return latents @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction of a value."""
        return self.decode(self.encode(x))

    def __repr__(self) -> str:
        inputs, latents = self.W_enc.shape
        kept = f", k={self.k}" if self.k is not None else ""
        name = f"SparseAutoencoder({self.architecture}{kept}"
        return f"{name}, {inputs} inputs, {latents} latents)"


class _Normalised(SparseAutoencoder):
    """Scales each input; `decode` scales back what the thread encoded last."""

    def __init__(self, scaling: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scaling = scaling
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # mean and scale, by thread

    def encode(self, x: Tensor) -> Tensor:
        x = x.to(self.W_enc.dtype)
        if self.scaling == "layer_norm":
            mean = x.mean(-1, keepdim=True)
            x = x - mean
            scale = x.std(-1, keepdim=True)
            made = x / (scale + 1e-5)
        else:
            mean = x.new_zeros(())
            scale = x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
            made = x / scale
        self._last[threading.get_ident()] = mean, scale
        return super().encode(made)

    def decode(self, latents: Tensor) -> Tensor:
        if threading.get_ident() not in self._last:
            raise InputError("the scale of the input is not known: call encode first")
        mean, scale = self._last[threading.get_ident()]
        return super().decode(latents) * scale + mean


def load_autoencoder(folder: str | os.PathLike[str]) -> SparseAutoencoder:
    """Load a sparse autoencoder that SAE-Lens or dictionary_learning saved.

    SAE-Lens writes `cfg.json` and `sae_weights.safetensors`; the architectures "standard", "gated",
    "jumprelu" (as which BatchTopK is saved) and "topk" are known. dictionary_learning writes
    `config.json` and `ae.pt`; all its autoencoders are known. `ae.pt` is read with
    `weights_only=True`. The latents have the scale that the library's own loader gives them: the
    decoder of an `AutoEncoder` is normalised.

    Args:
        folder: the folder with both files.

    Returns:
        A module with `encode` and `decode`, for `splice_autoencoder`, on the CPU.

    Raises:
        LoadError: a file or tensor is missing or unexpected, or the architecture is unknown.
        ImportError: safetensors is not installed.

    Example:
        >>> import bendtrace as bt
        >>> sae = bt.workflows.load_autoencoder("trained")  # doctest: +SKIP
    """
    folder = os.fspath(folder)
    for load, files in (
        (_of_sae_lens, ("cfg.json", "sae_weights.safetensors")),
        (_of_dictionary_learning, ("config.json", "ae.pt")),
    ):
        config, weights = (os.path.join(folder, name) for name in files)
        if os.path.isfile(config) and os.path.isfile(weights):
            return load(_read(config), weights)
    raise LoadError(
        folder,
        "it holds neither cfg.json and sae_weights.safetensors (SAE-Lens) nor config.json and "
        "ae.pt (dictionary_learning)",
    )


def _of_sae_lens(config: dict[str, Any], path: str) -> SparseAutoencoder:
    safetensors = required("safetensors", f"reading {path!r}")
    try:
        tensors: dict[str, Tensor] = imported("safetensors.torch").load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise LoadError(path, f"it may be damaged: {error}") from None
    architecture = config.get("architecture", "standard")
    k = config.get("k")
    # Before version 6, the activation function was named separately.
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    if function == "topk" and architecture == "standard":
        architecture = "topk"
        k = (config.get("activation_fn_kwargs") or {}).get("k")
    elif function not in ("relu", "topk"):
        raise LoadError(path, f"its activation function {function!r} is not known, only 'relu'")
    if architecture not in _READS:
        note = " (of training; SAE-Lens's save_inference_model writes a jumprelu)"
        raise LoadError(
            path,
            f"its architecture {architecture!r}{note if 'batchtopk' in str(architecture) else ''} "
            f"is not known, only {', '.join(_READS)}",
        )
    scaling = config.get("normalize_activations")
    if scaling not in (None, False, "none", "layer_norm", "constant_norm_rescale"):
        raise LoadError(
            path,
            f"normalize_activations is {scaling!r}: it needs a factor that is not in the folder. "
            "Have SAE-Lens fold the factor into the weights, and save it again",
        )
    if torch.all(tensors.get("scaling_factor", torch.ones(1)) == 1):
        tensors.pop("scaling_factor", None)
    _check(tensors, {name: name for name in _READS[architecture]}, architecture, path)
    dtype = getattr(torch, str(config.get("dtype", "")).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    options: dict[str, Any] = {
        "subtracts": bool(config.get("apply_b_dec_to_input", True)),
        "k": _number(k, path) if architecture == "topk" else None,
        "rescales": architecture == "topk" and bool(config.get("rescale_acts_by_decoder_norm")),
    }
    if scaling in ("layer_norm", "constant_norm_rescale"):
        return _Normalised(scaling, architecture, tensors, config, **options)
    return SparseAutoencoder(architecture, tensors, config, **options)


def _of_dictionary_learning(config: dict[str, Any], path: str) -> SparseAutoencoder:
    trainer = config.get("trainer")
    name = trainer.get("dict_class") if isinstance(trainer, dict) else None
    if name not in _CLASSES:
        what = "says no trainer.dict_class" if name is None else f"says dict_class {name!r}"
        raise LoadError(path, f"its config.json {what}; known are {', '.join(_CLASSES)}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise LoadError(path, f"it may be damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise LoadError(path, "it holds no dict of tensors")
    architecture, subtracts, names, ignored = _CLASSES[name]
    called = {ours: theirs for theirs, ours in names.items()}
    ours = {called.get(wanted, wanted): wanted for wanted in _READS[architecture]}
    found = {theirs: tensor for theirs, tensor in state.items() if theirs not in ignored}
    _check(found, ours, name, path)
    tensors = {
        ours[theirs]: tensor.T.contiguous() if theirs.endswith(".weight") else tensor
        for theirs, tensor in found.items()
    }
    k = None
    if architecture == "topk":
        k = _number(state["k"].item() if "k" in state else config["trainer"].get("k"), path)
    if name == "AutoEncoder":
        _normalise(tensors)
    return SparseAutoencoder(architecture, tensors, config, subtracts=subtracts, k=k)


def _normalise(tensors: dict[str, Tensor]) -> None:
    """Give the rows of the decoder length 1, and the latents their lengths."""
    norms = tensors["W_dec"].norm(dim=1)
    if not torch.allclose(norms, torch.ones_like(norms)):
        norms = norms.where(norms > 0, 1.0)
        tensors["W_dec"] = tensors["W_dec"] / norms[:, None]
        tensors["W_enc"] = tensors["W_enc"] * norms
        tensors["b_enc"] = tensors["b_enc"] * norms


def _check(found: Mapping[str, Tensor], wanted: Mapping[str, str], what: str, path: str) -> None:
    """Raise an error that names tensors that are missing, unused or of a wrong shape."""
    missing = ", ".join(repr(name) for name in wanted if name not in found)
    others = ", ".join(repr(name) for name in found if name not in wanted)
    if missing or others:
        lacks = f"it lacks {missing}" if missing else ""
        holds = f"it holds {others}, which is unknown" if others else ""
        raise LoadError(path, f"as {what!r}, {' and '.join(filter(None, (lacks, holds)))}")
    shapes = {ours: tuple(found[name].shape) for name, ours in wanted.items()}
    turned = any(name.endswith(".weight") for name in wanted)
    if len(shapes["W_dec"]) == 2 and shapes["W_enc"] == shapes["W_dec"][::-1]:
        latents, inputs = shapes["W_dec"][::-1] if turned else shapes["W_dec"]
        each = {"W_enc": shapes["W_enc"], "W_dec": shapes["W_dec"], "b_dec": (inputs,)}
        if all(
            shape == each.get(name, (latents,)) or (name == "threshold" and shape == ())
            for name, shape in shapes.items()
        ):
            return
    raise LoadError(path, f"the shapes of its tensors do not fit: {shapes}")


def _number(k: Any, path: str) -> int:
    if type(k) is not int or k < 1:
        raise LoadError(path, f"the number k of latents that 'topk' keeps is {k!r}")
    return k


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise LoadError(path, f"it is no JSON file: {error}") from None
    if not isinstance(config, dict):
        raise LoadError(path, "it holds no JSON object")
    return config
