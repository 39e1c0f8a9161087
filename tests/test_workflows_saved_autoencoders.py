"""Sparse autoencoders from the folders of SAE-Lens and dictionary_learning."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, LoadError
from bendtrace.insert.purity import lift_tensors, why_not_pure
from bendtrace.workflows import load_autoencoder, splice_autoencoder
from tests.lens_models import Transformer, hooked, made, same, tokens

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra sae")

INPUTS, LATENTS, K = 8, 20, 4
PARTS = {
    "W_enc": (INPUTS, LATENTS), "W_dec": (LATENTS, INPUTS), "b_dec": (INPUTS,),
    "b_enc": (LATENTS,), "b_gate": (LATENTS,), "b_mag": (LATENTS,), "r_mag": (LATENTS,),
    "threshold": (LATENTS,),
}  # fmt: skip


def drawn(*names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(shape, generator=generator) for name, shape in PARTS.items()}
    found["threshold"] = found["threshold"].abs()
    return {name: found[name] for name in ("W_enc", "W_dec", "b_dec", *names)}


def sae_lens(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    safetensors.save_file(tensors, folder / "sae_weights.safetensors")
    told = {"d_in": INPUTS, "d_sae": LATENTS, "dtype": "float32", **config}
    (folder / "cfg.json").write_text(json.dumps(told))
    return folder


def dictionary_learning(
    folder: Path, tensors: dict[str, Any], dict_class: str, **more: Any
) -> Path:
    torch.save(tensors, folder / "ae.pt")
    (folder / "config.json").write_text(json.dumps({"trainer": {"dict_class": dict_class, **more}}))
    return folder


# The formulas, number by number


def latents(x: list[float], t: dict[str, Any], kind: str, subtracts: bool) -> list[float]:
    given = [a - b for a, b in zip(x, t["b_dec"], strict=True)] if subtracts else x
    h = [sum(a * row[j] for a, row in zip(given, t["W_enc"], strict=True)) for j in range(LATENTS)]
    if kind == "gated":
        return [
            max(0.0, h[j] * math.exp(t["r_mag"][j]) + t["b_mag"][j])
            if h[j] + t["b_gate"][j] > 0
            else 0.0
            for j in range(LATENTS)
        ]
    pre = [h[j] + t["b_enc"][j] for j in range(LATENTS)]
    if kind == "jumprelu":
        return [max(0.0, v) if v > t["threshold"][j] else 0.0 for j, v in enumerate(pre)]
    if kind == "topk":
        kept = sorted(range(LATENTS), key=lambda j: -pre[j])[:K]
        return [max(0.0, v) if j in kept else 0.0 for j, v in enumerate(pre)]
    return [max(0.0, v) for v in pre]


def decoded(z: list[float], t: dict[str, Any]) -> list[float]:
    return [
        sum(z[j] * t["W_dec"][j][i] for j in range(LATENTS)) + t["b_dec"][i] for i in range(INPUTS)
    ]


def check(sae: Any, tensors: dict[str, Tensor], kind: str, subtracts: bool) -> None:
    x = torch.randn(2, 3, INPUTS, generator=torch.Generator().manual_seed(2))
    plain = {name: tensor.double().tolist() for name, tensor in tensors.items()}
    z = [[latents(row, plain, kind, subtracts) for row in rows] for rows in x.double().tolist()]
    made = [[decoded(row, plain) for row in rows] for rows in z]
    given = sae.encode(x)
    torch.testing.assert_close(given, torch.tensor(z), rtol=1e-4, atol=1e-5)
    assert 0 < (given > 0).float().mean() < 1
    torch.testing.assert_close(sae.decode(given), torch.tensor(made), rtol=1e-4, atol=1e-4)
    same(sae(x), sae.decode(given))


KINDS = {
    "standard": ("b_enc",), "gated": ("b_gate", "b_mag", "r_mag"),
    "jumprelu": ("b_enc", "threshold"), "topk": ("b_enc",),
}  # fmt: skip


@pytest.mark.parametrize("subtracts", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_architectures_of_sae_lens_follow_their_formulas(
    kind: str, subtracts: bool, tmp_path: Path
) -> None:
    tensors = drawn(*KINDS[kind])
    config = {"architecture": kind, "apply_b_dec_to_input": subtracts, "k": K}
    sae = load_autoencoder(sae_lens(tmp_path, tensors, **config, metadata={"hook_name": "h"}))
    check(sae, tensors, kind, subtracts)
    assert json.loads(sae.config)["metadata"] == {"hook_name": "h"}
    assert repr(sae).startswith(f"SparseAutoencoder({kind}, ") or kind == "topk"


def of_linear(tensors: dict[str, Tensor], **names: str) -> dict[str, Tensor]:
    """The tensors under the names of dictionary_learning, whose weights are those of nn.Linear."""
    called = {"W_enc": "encoder.weight", "W_dec": "decoder.weight", "b_enc": "encoder.bias"} | names
    return {
        called.get(name, name): tensor.T.clone() if name.startswith("W_") else tensor
        for name, tensor in tensors.items()
    }


NUMBER = {"k": torch.tensor(K)}
CLASSES: dict[str, Any] = {
    "AutoEncoderNew": ("standard", False, lambda t: of_linear(t, b_dec="decoder.bias")),
    "GatedAutoEncoder": (
        "gated", True,
        lambda t: of_linear(t, b_dec="decoder_bias", b_gate="gate_bias", b_mag="mag_bias"),
    ),
    "AutoEncoderTopK": ("topk", True, lambda t: of_linear(t) | NUMBER),
    "BatchTopKSAE": ("jumprelu", True, lambda t: of_linear(t) | NUMBER),
    "MatryoshkaBatchTopKSAE": (
        "jumprelu", True, lambda t: t | NUMBER | {"group_sizes": torch.tensor([5, 15])},
    ),
    "JumpReluAutoEncoder": ("jumprelu", False, dict),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_classes_of_dictionary_learning_follow_their_formulas(
    name: str, tmp_path: Path
) -> None:
    kind, subtracts, called = CLASSES[name]
    tensors = drawn(*KINDS[kind])
    if name == "BatchTopKSAE":
        tensors["threshold"] = torch.tensor(0.5)
    sae = load_autoencoder(dictionary_learning(tmp_path, called(tensors), name, k=K))
    if name == "BatchTopKSAE":
        tensors["threshold"] = torch.full((LATENTS,), 0.5)
    check(sae, tensors, kind, subtracts)


def test_a_decoder_that_is_not_normalised_becomes_so(tmp_path: Path) -> None:
    tensors = drawn("b_enc")
    called = of_linear(tensors, b_dec="bias")
    sae = load_autoencoder(dictionary_learning(tmp_path, called, "AutoEncoder"))
    norms = tensors["W_dec"].norm(dim=1)
    wanted = {
        "W_dec": tensors["W_dec"] / norms[:, None], "W_enc": tensors["W_enc"] * norms,
        "b_enc": tensors["b_enc"] * norms, "b_dec": tensors["b_dec"],
    }  # fmt: skip
    check(sae, wanted, "standard", True)
    called = of_linear(wanted, b_dec="bias")
    unit = load_autoencoder(dictionary_learning(tmp_path, called, "AutoEncoder"))
    same(unit.W_enc.detach(), wanted["W_enc"])  # which has length 1 already, and stays


def test_latents_compared_by_the_norms_of_the_decoder(tmp_path: Path) -> None:
    tensors = drawn("b_enc")
    folder = sae_lens(
        tmp_path, tensors, architecture="topk", k=K, rescale_acts_by_decoder_norm=True
    )
    norms = tensors["W_dec"].norm(dim=1)
    check(load_autoencoder(folder), {
        "W_dec": tensors["W_dec"] / norms[:, None], "W_enc": tensors["W_enc"] * norms,
        "b_enc": tensors["b_enc"] * norms, "b_dec": tensors["b_dec"],
    }, "topk", True)  # fmt: skip


@pytest.mark.parametrize("scaling", ["layer_norm", "constant_norm_rescale"])
def test_inputs_are_normalised_and_outputs_scaled_back(scaling: str, tmp_path: Path) -> None:
    tensors = drawn("b_enc")
    folder = sae_lens(tmp_path, tensors, normalize_activations=scaling)
    sae, plain = load_autoencoder(folder), load_autoencoder(sae_lens(tmp_path, tensors))
    x = torch.randn(3, INPUTS) * 4 + 1
    if scaling == "layer_norm":
        mean, scale = x.mean(-1, keepdim=True), x.var(-1, keepdim=True).sqrt()
        z = plain.encode((x - mean) / (scale + 1e-5))
    else:
        mean, scale = torch.zeros(1), x.square().mean(-1, keepdim=True).sqrt()
        z = plain.encode(x / scale)
    with pytest.raises(InputError, match="call encode first"):
        sae.decode(z)
    torch.testing.assert_close(sae.encode(x), z)
    torch.testing.assert_close(sae(x), plain.decode(z) * scale + mean)
    # Latents that are changed are decoded a second time, with the same scale.
    bended = bt.BendedModule(nn.Sequential(nn.Identity()))
    with splice_autoencoder(bended, "0", sae, error_term=True) as spliced, spliced.ablate(3):
        zeroed = z.index_fill(-1, torch.tensor([3]), 0.0)
        change = (plain.decode(zeroed) - plain.decode(z)) * scale
        torch.testing.assert_close(bended(x), x + change)


def test_folders_of_before_version_6(tmp_path: Path) -> None:
    tensors = drawn("b_enc")
    old = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}, "hook_point": "h"}
    given = tensors | {"scaling_factor": torch.ones(LATENTS)}
    check(load_autoencoder(sae_lens(tmp_path, given, **old)), tensors, "topk", True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, None])
def test_the_dtype_and_that_of_the_value(dtype: torch.dtype | None, tmp_path: Path) -> None:
    folder = sae_lens(tmp_path, drawn("b_enc"), dtype="torch.float64")
    sae = load_autoencoder(folder)
    sae = sae if dtype is None else sae.to(dtype)
    assert sae.W_enc.dtype == sae.encode(torch.ones(INPUTS)).dtype == (dtype or torch.float64)
    bended = bt.BendedModule(nn.Sequential(nn.Identity()))
    with splice_autoencoder(bended, "0", sae):
        assert bended(torch.ones(1, INPUTS)).dtype == torch.float32


def test_spliced_into_a_model_it_takes_the_value_s_place(tmp_path: Path) -> None:
    model, sae = made(Transformer), load_autoencoder(sae_lens(tmp_path, drawn("b_enc")))
    x = tokens()
    with hooked(model.get_submodule("blocks.0"), lambda m, a, out: sae.decode(sae.encode(out))):
        wanted = model(x)
    with splice_autoencoder(bt.BendedModule(model), "blocks.0", sae) as spliced:
        for _ in range(2):
            same(spliced(x), wanted)
        assert spliced.latent.shape == (2, 5, LATENTS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_does_can_be_compiled(kind: str, tmp_path: Path) -> None:
    config = {"architecture": kind, "k": K}
    sae = load_autoencoder(sae_lens(tmp_path, drawn(*KINDS[kind]), **config))
    for function, size in ((sae.encode, INPUTS), (sae.decode, LATENTS)):
        found = lift_tensors(function)
        assert not isinstance(found, str), found
        assert why_not_pure(function, torch.ones(2, size)) is None


WRONG: dict[str, Any] = {
    "neither cfg.json and": lambda p: p,
    "'transcoder' is not known, only standard, gated, jumprelu, topk": lambda p: sae_lens(
        p, drawn("b_enc"), architecture="transcoder"
    ),
    "save_inference_model writes a jumprelu": lambda p: sae_lens(
        p, drawn("b_enc"), architecture="batchtopk"
    ),
    "as 'jumprelu', it lacks 'threshold'$": lambda p: sae_lens(
        p, drawn("b_enc"), architecture="jumprelu"
    ),
    "it lacks 'b_enc' and it holds 'b_mag', which is unknown": lambda p: sae_lens(
        p, drawn("b_mag")
    ),
    "it holds 'scaling_factor'": lambda p: sae_lens(
        p, drawn("b_enc") | {"scaling_factor": torch.full((LATENTS,), 2.0)}
    ),
    "'tanh-relu' is not known": lambda p: sae_lens(p, drawn("b_enc"), activation_fn="tanh-relu"),
    "normalize_activations is 'expected_average_only_in'": lambda p: sae_lens(
        p, drawn("b_enc"), normalize_activations="expected_average_only_in"
    ),
    "normalize_activations is True": lambda p: sae_lens(
        p, drawn("b_enc"), normalize_activations=True
    ),
    "'topk' keeps is None": lambda p: sae_lens(p, drawn("b_enc"), architecture="topk"),
    "shapes of its tensors do not fit": lambda p: sae_lens(
        p, drawn("b_enc") | {"b_enc": torch.zeros(1)}
    ),
    "says no trainer.dict_class; known are AutoEncoder,": lambda p: (
        dictionary_learning(p, {}, "AutoEncoder"),
        (p / "config.json").write_text("{}"),
        p,
    )[-1],
    "says dict_class 'CrossCoder'": lambda p: dictionary_learning(p, {}, "CrossCoder"),
    "as 'AutoEncoder', it lacks 'encoder.bias'": lambda p: dictionary_learning(
        p, of_linear(drawn(), b_dec="bias"), "AutoEncoder"
    ),
    "it holds 'more', which is unknown": lambda p: dictionary_learning(
        p, of_linear(drawn("b_enc"), b_dec="bias") | {"more": torch.ones(1)}, "AutoEncoder"
    ),
    "it may be damaged: Weights only load failed": lambda p: dictionary_learning(
        p, {"bias": Path("x")}, "AutoEncoder"
    ),
    "no JSON file": lambda p: (
        dictionary_learning(p, {}, "AutoEncoder"),
        (p / "config.json").write_text("{"),
        p,
    )[-1],
    "may be damaged": lambda p: (
        sae_lens(p, drawn("b_enc")),
        (p / "sae_weights.safetensors").write_bytes(b"123"),
        p,
    )[-1],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_loaded_is_named(message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        load_autoencoder(WRONG[message](tmp_path))
