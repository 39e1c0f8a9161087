"""Peak memory of replays against eager: `python -m tools.benchmarks.memory`.

A second table is of replays with one node changed, against the same change by a native hook.
Counted are the bytes of all tensors that ops made and that are alive at once, op by op, so that
the numbers do not depend on an allocator and are the same in each run.
"""

from __future__ import annotations

import argparse
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bendtrace as bt
from tests.hf_models import MODELS, VOCAB
from tools.hub.checking import middle_module


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops make or free, while they live.

    A storage that was there before, such as a cache, counts if it is freed meanwhile: then it
    counts from the beginning.

    Attributes:
        freed: bytes that were freed of what was there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.freed = self._live = self._highest = 0
        # A storage has one Python object for as long as it lives, whoever holds it (torch 2.1).
        # Afterwards another may have its address. With each, its bytes, and whether an op made it.
        self._known: dict[int, tuple[weakref.ref[Any], int, bool]] = {}

    @property
    def live(self) -> int:
        """The bytes alive now, less those that were freed of what was there before."""
        self._forget()
        return self._live

    @property
    def peak(self) -> int:
        """The most bytes that were alive after an op."""
        self._forget()
        return self._highest + self.freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._forget()
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage(), is_made=False)
        out = func(*args, **(kwargs or {}))
        self._forget()
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage(), is_made=True)
        return out

    def _note(self, storage: torch.UntypedStorage, is_made: bool) -> None:
        if storage._cdata not in self._known:
            self._known[storage._cdata] = weakref.ref(storage), storage.nbytes(), is_made
            self._live += storage.nbytes() if is_made else 0
            self._highest = max(self._highest, self._live)

    def _forget(self) -> None:
        """Take off what has gone since."""
        # Without callbacks, which would run in the middle of what is measured.
        gone = [key for key, (storage, _, _) in self._known.items() if storage() is None]
        for key in gone:
            _, size, is_made = self._known.pop(key)
            self._live -= size
            self.freed += 0 if is_made else size


def peak_of(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the most bytes alive at once during a call, and those alive after it.

    Of what was there before the call, only what it frees counts, for the former from the
    beginning; the latter is what is alive more than before. The result counts for the former;
    nobody has it any more afterwards. The garbage collector waits, since it would come by at
    moments that differ from run to run.
    """
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as counted:
            result = call()
        del result
    finally:
        gc.enable()
    return counted.peak, counted.live


class Chain(nn.Module):
    """Layers without data guards; `first` puts one before them all, `each` one behind each."""

    def __init__(self, *, first: bool = False, each: bool = False, layers: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.first, self.each = first, each

    def forward(self, x: Tensor) -> Tensor:
        if self.first and x.isnan().any():
            x = x.nan_to_num()
        for layer in self.layers:
            x = layer(x).relu()
            if self.each and x.mean() < -1:
                return x
        return x


class Exits(nn.Module):
    """Three data guards at a third, two thirds and the end of a chain."""

    def __init__(self, layers: int = 7) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Chain(layers=layers) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
            if x.amax() > 1e6:
                return x
        return x


def cases() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Return the models to measure and their keyword arguments."""
    x = {"x": torch.randn(256, 64)}
    gpt2 = next(model for model in MODELS if model.name == "gpt2")
    return {
        "no data guard": (Chain(), x),
        "a data guard before all": (Chain(first=True), x),
        "3 data guards": (Exits(), x),
        "a data guard behind each layer": (Chain(each=True), x),
        "gpt2": (gpt2.make(), gpt2.inputs(batch=4, length=32)),
    }


def measure(
    model: nn.Module, inputs: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]
) -> tuple[int, int]:
    """Return the peak of eager and that of a replay."""
    bended = bt.BendedModule(model)
    with mode():
        bended(**inputs)
        peaks = peak_of(lambda: model(**inputs))[0], peak_of(lambda: bended(**inputs))[0]
        assert bended.stats.replays == 1
    return peaks


# Of transformers, with so many layers that what is kept too long shows.
_WIDE = {"hidden_size": 32, "num_hidden_layers": 12, "num_attention_heads": 4}
_LLAMA = {**_WIDE, "intermediate_size": 64, "num_key_value_heads": 2}
_BERT = {**_WIDE, "intermediate_size": 64, "max_position_embeddings": 64}
DEEP: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 12, "n_head": 4, "n_positions": 64}),
    "Qwen2": ("Qwen2ForCausalLM", _LLAMA),
    "OPT": ("OPTForCausalLM", {**_WIDE, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "RoBERTa": ("RobertaForMaskedLM", _BERT),
    "Gemma2": ("Gemma2ForCausalLM", {**_LLAMA, "head_dim": 8}),
    "Mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}),
}
KINDS = ("no mask", "padded", "with a cache")


def deep(name: str) -> nn.Module:
    """Return a model of `DEEP`."""
    import transformers

    architecture, config = DEEP[name]
    made = getattr(transformers, architecture)
    ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model: nn.Module = made(made.config_class(**ids, **config)).eval()
    return model


def arguments(kind: str) -> dict[str, Any]:
    """Return the arguments of one of `KINDS`."""
    ids = torch.randint(3, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    if kind == "no mask":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    if kind == "padded":
        mask[-1, -5:] = 0
        return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask, "use_cache": True}


def measure_changed(name: str, kind: str) -> tuple[int, int]:
    """Return the peak with a native hook on one module, and that of a replay with the same."""
    model, own, inputs = deep(name), deep(name), arguments(kind)
    if kind != "with a cache":
        model.config.use_cache = own.config.use_cache = False
    place = middle_module(model, inputs)
    assert place is not None

    def change(value: Tensor) -> Tensor:
        return value * 1.01

    model.get_submodule(place).register_forward_hook(lambda module, args, out: change(out))
    bended = bt.BendedModule(own)
    bended.interject(own.get_submodule(place), change)
    with torch.no_grad():
        bended(**inputs)
        bended(**inputs)
        peaks = peak_of(lambda: model(**inputs))[0], peak_of(lambda: bended(**inputs))[0]
        assert bended.stats.live == 0
        assert bended.stats.replays >= 1
    return peaks


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.memory", description="Peak memory of replays"
    )
    parser.add_argument("--quick", action="store_true", help="with one kind of input each")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    rows = []
    for name, (model, inputs) in cases().items():
        for mode in (torch.no_grad, torch.enable_grad):
            rows.append([name, mode.__name__, *_row(*measure(model, inputs, mode))])
    headers = ["model", "mode", "eager's peak", "replay's peak", "ratio"]
    print(tabulate(rows, headers, disable_numparse=True), end="\n\n")
    rows = [
        [name, kind, *_row(*measure_changed(name, kind))]
        for name in DEEP
        for kind in (KINDS[1:2] if quick else KINDS)
    ]
    print("One node changed, without gradients")
    headers = ["model", "inputs", "native hook's peak", "replay's peak", "ratio"]
    print(tabulate(rows, headers, disable_numparse=True))


def _row(wanted: int, found: int) -> list[str]:
    return [f"{wanted / 1024:.0f} KiB", f"{found / 1024:.0f} KiB", f"{found / wanted:.2f}x"]


if __name__ == "__main__":
    main()
