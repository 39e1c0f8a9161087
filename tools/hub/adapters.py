"""Language models with adapters, and in pieces, as PEFT and accelerate make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.hub.building import build, quiet

KINDS = (
    "LoRA", "LoRA with dropout", "DoRA", "IA3", "prefix", "prompt", "P-tuning", "LoHa", "OFT",
    "VeRA", "LLaMA-Adapter",
)  # fmt: skip


def language_model(model_type: str = "llama", **config: Any) -> Any:
    return build(model_type, auto="AutoModelForCausalLM", **config)


def texts(batch: int = 2, length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 24, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def config_of(kind: str) -> Any:
    """Return a configuration of PEFT whose adapter does something from the start."""
    import peft

    task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    some = {**task, "target_modules": ["q_proj", "v_proj"]}
    lora = {**some, "r": 4, "init_lora_weights": False}
    tokens = {**task, "num_virtual_tokens": 3}
    made = {
        "LoRA": lambda: peft.LoraConfig(**lora),
        "LoRA with dropout": lambda: peft.LoraConfig(**lora, lora_dropout=0.3),
        "DoRA": lambda: peft.LoraConfig(**lora, use_dora=True),
        "IA3": lambda: peft.IA3Config(**task, init_ia3_weights=False),
        "prefix": lambda: peft.PrefixTuningConfig(**tokens),
        "prompt": lambda: peft.PromptTuningConfig(**tokens),
        "P-tuning": lambda: peft.PromptEncoderConfig(**tokens, encoder_hidden_size=16),
        "LoHa": lambda: peft.LoHaConfig(**some, r=4, init_weights=False),
        "OFT": lambda: peft.OFTConfig(**some, r=4, oft_block_size=0, init_weights=False),
        "VeRA": lambda: peft.VeraConfig(**some, r=4, init_weights=False),
        "LLaMA-Adapter": lambda: peft.AdaptionPromptConfig(**task, adapter_len=3, adapter_layers=1),
    }
    return made[kind]()


def adapted(kind: str) -> Any:
    """Return a small Llama with one adapter, always the same."""
    import peft

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(language_model(), config_of(kind)).eval()


def several() -> Any:
    """Return a small Llama with three adapters, "a" in use."""
    import peft

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(language_model(), config_of("LoRA"), adapter_name="a")
        other = {"task_type": "CAUSAL_LM", "r": 2, "init_lora_weights": False}
        model.add_adapter("b", peft.LoraConfig(**other, target_modules=["k_proj", "o_proj"]))
        model.add_adapter("c", config_of("LoRA"))
        return model.eval()


def in_pieces(how: str, folder: Path) -> Any:
    """Return a small Llama whose modules accelerate has put on devices; all of them are the CPU.

    Args:
        how: "dispatched", "partly on disk", "offloaded" or "offloaded to disk".
        folder: for weights on disk.
    """
    import accelerate

    model = language_model(tie_word_embeddings=False)
    places = dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm",
         "model.rotary_emb", "lm_head"), "cpu",
    )  # fmt: skip
    with quiet():
        if how == "dispatched":
            return accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
        if how == "partly on disk":
            places["model.layers.0"] = "disk"
            return accelerate.dispatch_model(
                model, places, main_device="cpu", offload_dir=folder, force_hooks=True
            )
        if how == "offloaded":
            return accelerate.cpu_offload(model, torch.device("cpu"))
        return accelerate.disk_offload(model, folder, torch.device("cpu"))
