"""Models of kinds that people report as refused by torch.export, or as wrong in ONNX.

Each is exported from few inputs, and runs on 200 others in a process that has neither its source
nor this library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bendtrace.errors import ExportError
from tests.export_elsewhere import outcome
from tests.export_models import D, Example

WIDE = 2.0


class Spline(nn.Module):
    """A flow of a speech model: only what lies inside an interval is bent (piper1-gpl#148)."""

    def __init__(self) -> None:
        super().__init__()
        self.heights = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Any:
        inside = (x >= -WIDE) & (x <= WIDE)
        out = x.clone()
        if inside.any():
            steps = self.heights.softmax(0).cumsum(0) * 2 * WIDE - WIDE
            at = ((x[inside] + WIDE) / (2 * WIDE) * 4).long().clamp(0, 4)
            out[inside] = steps[at] + 0.1 * x[inside]
        return out


class Prompts(nn.Module):
    """Points of a segmenter, some of which only pad (pytorch/executorch#12732)."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.none = nn.Embedding(2, D), nn.Parameter(torch.randn(D))

    def forward(self, places: Tensor, labels: Tensor) -> Any:
        found = places @ torch.ones(2, D) + self.points(labels.clamp(0, 1))
        if (labels == -10).any():
            found = torch.where((labels == -10)[:, None], self.none, found)
        if (labels == 1).sum() > 2:
            found = found - found.mean(0)
        return found


class LongRope(nn.Module):
    """Rotary positions with other frequencies for long texts (pytorch/pytorch#163791)."""

    short: Tensor
    long: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("short", 1.0 / 10 ** torch.linspace(0, 1, D // 2))
        self.register_buffer("long", 1.0 / 99 ** torch.linspace(0, 1, D // 2))

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        length = torch.max(positions) + 1
        frequencies = self.long if length > 12 else self.short
        angles = positions[:, None] * frequencies
        one, other = x.chunk(2, -1)
        return torch.cat([one * angles.cos() - other * angles.sin(),
                          one * angles.sin() + other * angles.cos()], -1)  # fmt: skip


class Durations(nn.Module):
    """Speech: each sound lasts as long as a model says (adrianlyjak/kokoro-onnx-export#3)."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.out = nn.Linear(D, 1), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Any:
        counts = (self.length(x)[:, 0].exp() * 2).round().clamp(min=1, max=5).long()
        frames = torch.repeat_interleave(x, counts, dim=0)
        if counts.sum() > 12:
            frames = frames * 0.5
        return self.out(frames).tanh()


class Images(nn.Module):
    """Features of an image in the places that a text leaves for them (pytorch/pytorch#147096)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.image = nn.Embedding(6, D), nn.Linear(2, D)

    def forward(self, tokens: Tensor, pixels: Tensor) -> Any:
        text, features = self.embed(tokens), self.image(pixels)
        special = (tokens == 5)[:, None].expand_as(text)
        if text[special].numel() != features.numel():
            return text.masked_fill(special, 0.0)
        return text.masked_scatter(special, features)


class Guarded(nn.Module):
    """Depth: what is not finite is replaced, in some inputs (YvanYin/Metric3D#127)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).exp()
        if torch.isnan(y).any():
            y = torch.nan_to_num(y, nan=0.0)
        if torch.isinf(y).any():
            y = y.clamp(max=1e4)
        return y / y.sum(-1, keepdim=True)


class Useful(nn.Module):
    """A tracker: only the queries that see something attend (pytorch/pytorch#147672)."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, queries: Tensor, memory: Tensor, mask: Tensor) -> Any:
        useful = ~mask.all(1)
        if not useful.any():
            return queries
        keys = memory[useful]
        found, _ = self.attend(queries[useful][:, None], keys, keys, mask[useful])
        out = queries.clone()
        out[useful] = out[useful] + found[:, 0]
        return out


def is_scaled(x: Tensor) -> bool:
    return bool(x.min() >= 0) and bool(x.max() <= 1)


class Scaled(nn.Module):
    """An image that is brought to 0..255 if it is not yet (pytorch/pytorch#138689)."""

    def forward(self, x: Tensor) -> Any:
        if is_scaled(x):
            x = x * 255
        return x - x.mean(-1, keepdim=True)


class Refined(nn.Module):
    """Optical flow: refined until it moves no more (aeolusguan/BridgeDepth#10)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.delta = nn.GRUCell(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        state, flow, rounds = torch.zeros_like(x), torch.zeros(x.shape[0], 2), 0
        while rounds < 12:
            state = self.cell(x, state)
            move = self.delta(state) * 0.5**rounds
            flow, rounds = flow + move, rounds + 1
            if move.norm() < 0.05:
                break
        return flow, rounds


class Searched(nn.Module):
    """Cells whose inputs a code switches on, added in place (pytorch/pytorch#123972)."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, code: Tensor) -> Any:
        outs = torch.zeros(2, *x.shape)
        for number, cell in enumerate(self.cells):
            if code[number] > 0:
                outs[number % 2] += functional.relu(cell(x))
        return outs.sum(0)


def _rows() -> Tensor:
    return torch.randn(5, D)


def _masked() -> tuple[Any, ...]:
    mask = torch.rand(4, 3) < [0.2, 0.6, 1.0][torch.randint(3, ())]
    return torch.randn(4, D), torch.randn(4, 3, D), mask


def _image() -> Tensor:
    return [torch.rand(6), torch.rand(6) * 255, torch.randn(6)][torch.randint(3, ())]


def _positions() -> Tensor:
    return torch.arange(5) + torch.randint(20, ())


def _sometimes(value: float) -> Tensor:
    return torch.where(torch.rand(5, D) < 0.02, value, torch.randn(5, D))


REPORTED = {
    "spline": Example(Spline, lambda: (torch.randn(6) * 3 + 4 * torch.randint(3, ()),)),
    "prompts": Example(
        Prompts, lambda: (torch.randn(5, 2), torch.tensor([-10, 0, 1])[torch.randint(3, (5,))])
    ),
    "long positions": Example(LongRope, lambda: (_rows(), _positions())),
    "durations": Example(Durations, lambda: (_rows(),)),
    "images": Example(Images, lambda: (torch.randint(6, (7,)), torch.randn(2, 2))),
    "not finite": Example(
        Guarded, lambda: (_sometimes([1e3, float("nan")][torch.randint(2, ())]),)
    ),
    "useful queries": Example(Useful, _masked),
    "scaled": Example(Scaled, lambda: (_image(),)),
    "refined": Example(Refined, lambda: (_rows() * 3 * torch.rand(()),)),
    "searched": Example(Searched, lambda: (_rows(), torch.randint(2, (3,)))),
}


# torch bounds a number by 2**64 there, which is no int64.
REFUSED = {("useful queries", "onnx"): "ONNX cannot express it"}


@pytest.mark.all
@pytest.mark.parametrize("target", ["pt2", "onnx"])
@pytest.mark.parametrize("name", REPORTED)
def test_reported_models_are_equal_elsewhere(name: str, target: str, tmp_path: Path) -> None:
    if target == "onnx":
        pytest.importorskip("onnxscript", reason="needs the extra onnx")
    if (name, target) in REFUSED:
        with pytest.raises(ExportError, match=REFUSED[name, target]):
            outcome(REPORTED[name], target, tmp_path, 1)
        return
    found = outcome(REPORTED[name], target, tmp_path, 200)
    assert not found.wrong, found
    assert found.equal + found.refused == 200
    assert found.equal >= 190
