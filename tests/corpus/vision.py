"""Detection, segmentation and image models that branch on what they see."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._case import call, floats, randn, register

BOXES = (floats(0, 0, 2, 2), floats(0, 0, 2, 1.9), floats(5, 5, 7, 7))


def _iou(box: Tensor, boxes: Tensor) -> Tensor:
    low = torch.maximum(box[:2], boxes[:, :2])
    high = torch.minimum(box[2:], boxes[:, 2:])
    overlap = (high - low).clamp(min=0).prod(1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return overlap / ((box[2:] - box[:2]).prod() + area - overlap)


@register(
    overlapping=lambda: call(torch.stack(BOXES), floats(0.5, 0.9, 0.7)),
    separate=lambda: call(torch.stack(BOXES[1:]), floats(0.9, 0.7)),
    none=lambda: call(torch.zeros(0, 4), torch.zeros(0)),
)
def non_maximum_suppression(boxes: Tensor, scores: Tensor) -> list[int]:
    order, kept = scores.argsort(descending=True), []
    while order.numel() > 0:
        best = order[0]
        kept.append(best.item())
        rest = order[1:]
        order = rest[_iou(boxes[best], boxes[rest]) <= 0.5]
    return kept


@register(
    small=lambda: call(randn(1, 2, 4, 4)),
    large=lambda: call(randn(1, 2, 12, 12)),
    wide=lambda: call(randn(1, 2, 4, 12)),
)
class PyramidUntilSmall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 2, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = [x]
        while min(levels[-1].shape[-2:]) > 3:
            levels.append(self.down(levels[-1]).relu())
        return levels


@register(even=lambda: call(randn(1, 1, 4, 4)), odd=lambda: call(randn(1, 1, 5, 7)))
class UnetWithCroppedSkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 2, 2, stride=2)
        self.up = nn.ConvTranspose2d(2, 1, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x).relu())
        dh, dw = x.shape[2] - y.shape[2], x.shape[3] - y.shape[3]
        if dh or dw:
            y = F.pad(y, (0, dw, 0, dh))
        return torch.cat([x, y], 1)


@register(
    none=lambda: call(torch.zeros(6, 6)), one=lambda: call(F.pad(torch.ones(2, 2), (1, 3, 1, 3)))
)
class CropsAroundPeaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 2)

    def forward(self, image: Tensor) -> list[Tensor]:
        out = []
        for y, x in (image > 0.5).nonzero().tolist():
            if 0 < y < image.shape[0] - 1 and 0 < x < image.shape[1] - 1:
                out.append(self.head(image[y - 1 : y + 2, x - 1 : x + 2].flatten()))
        return out


@register(
    one=lambda: call(F.pad(torch.ones(1, 3), (0, 0, 1, 1))),
    two=lambda: call(torch.eye(3).flip(0) * floats(1, 0, 1)),
)
def connected_components(image: Tensor) -> Tensor:
    labels, count = torch.zeros_like(image), 0
    for y, x in image.nonzero().tolist():
        if labels[y, x]:
            continue
        count += 1
        stack = [(y, x)]
        while stack:
            i, j = stack.pop()
            inside = 0 <= i < image.shape[0] and 0 <= j < image.shape[1]
            if inside and image[i, j] and not labels[i, j]:
                labels[i, j] = count
                stack += [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
    return labels


@register(
    gray=lambda: call(randn(1, 1, 4, 4)),
    colour=lambda: call(randn(1, 3, 4, 4)),
    alpha=lambda: call(randn(1, 4, 4, 4)),
)
class ChannelAdapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if (channels := x.shape[1]) == 1:
            x = x.expand(-1, 3, -1, -1)
        elif channels == 4:
            x, alpha = x.split([3, 1], 1)
            x = x * alpha.sigmoid()
        return self.conv(x)


@register(dark=lambda: call(randn(1, 4, 4) * 0.01), bright=lambda: call(randn(1, 4, 4).abs() * 200))
def exposure_correction(image: Tensor) -> Tensor:
    rounds = 0
    while not 0.2 < image.abs().mean() < 2.0 and rounds < 12:
        image = image * (2.0 if image.abs().mean() < 0.2 else 0.5)
        rounds += 1
    return image.clamp(-1, 1) if rounds else image
