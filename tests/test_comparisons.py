"""Our lines of the comparisons run, and give what native hooks give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.workflows import run_with_cache
from tests.lens_models import hooked, same

ROOT = Path(__file__).parent.parent
pytest.importorskip("transformers", reason="needs the test extra")


@pytest.mark.more
def test_the_patched_gpt2_is_that_of_hooks() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    clean, corrupt = torch.randint(3, 99, (2, 1, 6))
    kept: list[Tensor] = []
    with hooked(model.transformer.h[0], lambda m, a, out: kept.append(out)):
        model(clean)

    def patched(module: nn.Module, args: object, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 3] = kept[0][:, 3]
        return out

    with hooked(model.transformer.h[0], patched):
        wanted = model(corrupt).logits
    bended = bt.BendedModule(model)
    _, cache = run_with_cache(bended, clean, "blocks.0.hook_resid_post")
    at = (slice(None), 3)
    patch = bt.patches.ReplacePatch(value=cache["blocks.0.hook_resid_post"][at], slice=at)
    with bended.patch({"transformer.h_0.output": patch}):
        same(bended(corrupt).logits.detach(), wanted.detach())


def test_the_page_names_the_versions_that_were_run() -> None:
    text = (ROOT / "docs" / "comparisons.md").read_text()
    for version in ("4.3.0", "0.8.1", "2.36.1"):
        assert version in text
