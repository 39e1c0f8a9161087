"""A recurrent, a graph, a diffusion and a detection model, written for the tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Packed(nn.Module):
    """Texts of different lengths, packed for a recurrent network."""

    def __init__(self, kind: str = "LSTM", bidirectional: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.rnn = getattr(nn, kind)(
            6, 5, num_layers=2, batch_first=True, bidirectional=bidirectional, dropout=0.2
        )
        self.head = nn.Linear(5 * (1 + bidirectional), 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = self.rnn(packed)
        out, sizes = pad_packed_sequence(out, batch_first=True)
        last = out[torch.arange(len(sizes)), sizes - 1]
        inside = torch.arange(out.shape[1])[None] < sizes[:, None]
        mean = (out * inside[..., None]).sum(1) / sizes[:, None]
        return self.head(last + mean), out


class Convolution(nn.Module):
    """Messages along edges, gathered by sum, maximum or attention."""

    def __init__(self, inside: int, outside: int, how: str) -> None:
        super().__init__()
        self.lin, self.own = nn.Linear(inside, outside), nn.Linear(inside, outside)
        self.score = nn.Linear(2 * outside, 1)
        self.how = how

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.lin(x)
        messages = h[source]
        if self.how == "sum":
            degree = torch.zeros(x.shape[0]).index_add_(0, target, torch.ones(target.shape[0]))
            scale = degree.clamp(min=1).rsqrt()
            messages = messages * (scale[source] * scale[target]).unsqueeze(-1)
            gathered = torch.zeros_like(h).index_add_(0, target, messages)
        elif self.how == "max":
            index = target.unsqueeze(-1).expand_as(messages)
            gathered = torch.zeros_like(h).scatter_reduce(
                0, index, messages, "amax", include_self=False
            )
        else:
            scores = F.leaky_relu(self.score(torch.cat([messages, h[target]], -1))).squeeze(-1)
            most = torch.full((x.shape[0],), -1e9).scatter_reduce(0, target, scores, "amax")
            weights = (scores - most[target]).exp()
            total = torch.zeros(x.shape[0]).scatter_add_(0, target, weights)
            weights = weights / total[target].clamp(min=1e-9)
            gathered = torch.zeros_like(h).index_add_(0, target, weights.unsqueeze(-1) * messages)
        return self.own(x) + gathered


class Graphs(nn.Module):
    """Nodes, edges and which graph each node is in; a graph without edges goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [Convolution(4, 6, "sum"), Convolution(6, 6, "max"), Convolution(6, 6, "attention")]
        )
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        if edges.numel() == 0:
            edges = torch.arange(x.shape[0]).expand(2, -1)
        for number, conv in enumerate(self.convs):
            x = conv(x, edges)
            if number == 0:
                x = self.norm(x)
            x = F.dropout(F.relu(x), 0.2, self.training)
        graphs = int(batch.max()) + 1
        sums = torch.zeros(graphs, x.shape[1]).index_add_(0, batch, x)
        counts = torch.bincount(batch, minlength=graphs).clamp(min=1)
        return self.head(sums / counts.unsqueeze(-1))


class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, 1, 1)
        self.time = nn.Linear(16, outside)
        self.norm2, self.conv2 = nn.GroupNorm(2, outside), nn.Conv2d(outside, outside, 3, 1, 1)
        self.skip = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(2, width), nn.Conv1d(width, 3 * width, 1)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        q, k, v = self.qkv(self.norm(flat)).chunk(3, 1)
        weights = torch.einsum("bct,bcs->bts", q, k).div(math.sqrt(q.shape[1])).softmax(-1)
        return (flat + self.out(torch.einsum("bts,bcs->bct", weights, v))).reshape(x.shape)


class UNet(nn.Module):
    """The noise in an image, given the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first, self.last = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 3, 3, 1, 1)
        self.down = nn.ModuleList([Block(4, 4), Block(4, 8)])
        self.middle, self.attention = Block(8, 8), Attention(8)
        self.up = nn.ModuleList([Block(16, 4), Block(8, 4)])

    def embedded(self, time: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(4) / 4)
        angles = time[:, None].float() * frequencies
        return self.time(torch.cat([angles.sin(), angles.cos()], -1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.embedded(time)
        h, skips = self.first(x), []
        for block in self.down:
            h = block(h, time)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.attention(self.middle(h, time))
        for block in self.up:
            skip = skips.pop()
            h = F.interpolate(h, size=skip.shape[-2:], mode="nearest")
            h = block(torch.cat([h, skip], 1), time)
        return self.last(h)


class Sampler(nn.Module):
    """Draws an image from noise in some steps, with new noise in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet()
        self.register_buffer("alphas", torch.linspace(0.99, 0.6, 10).cumprod(0))

    def forward(self, shape: tuple[int, ...], steps: int = 5, threshold: float = 3.0) -> Tensor:
        x = torch.randn(shape)
        times = torch.linspace(9, 0, steps).long()
        for number, time in enumerate(times):
            noise = self.unet(x, time.expand(shape[0]))
            alpha = self.alphas[time]
            clean = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()
            if clean.abs().max() > threshold:
                clean = clean.clamp(-threshold, threshold)
            if number == steps - 1:
                return clean
            after = self.alphas[times[number + 1]]
            x = after.sqrt() * clean + (1 - after).sqrt() * torch.randn_like(x)
        return x


def overlap(one: Tensor, others: Tensor) -> Tensor:
    """Return the intersection of a box with others over their union."""
    low = torch.maximum(one[:2], others[:, :2])
    high = torch.minimum(one[2:], others[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = (one[2:] - one[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(-1)
    return shared / (area - shared)


def suppress(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Return which boxes stay: the best ones, without those that lie on a better one."""
    kept: list[int] = []
    order = scores.argsort(descending=True)
    while order.numel() > 0:
        best = order[0]
        kept.append(int(best))
        if order.numel() == 1:
            break
        order = order[1:]
        order = order[overlap(boxes[best], boxes[order]) <= threshold]
    return kept


class Detector(nn.Module):
    """As many boxes as there are in each image; with targets, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)
        )
        self.classes, self.boxes = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor, targets: list[Tensor] | None = None) -> Any:
        features = F.relu(self.backbone(images))
        scores = self.classes(features).flatten(2).transpose(1, 2).softmax(-1)
        height, width = features.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres = torch.stack([columns, rows], -1).reshape(-1, 2).float()
        sizes = self.boxes(features).flatten(2).transpose(1, 2).exp().clamp(max=4)
        boxes = torch.cat([centres - sizes[..., :2], centres + sizes[..., 2:]], -1)
        if targets is not None:
            return self.loss(scores, boxes, targets)
        return [self.found(s, b) for s, b in zip(scores, boxes, strict=True)]

    def found(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        best, label = scores.max(-1)
        sure = torch.nonzero(best > 0.385).squeeze(-1)
        if sure.shape[0] == 0:
            return {"boxes": boxes[:0], "scores": best[:0], "labels": label[:0]}
        kept = sure[suppress(boxes[sure], best[sure], 0.2)]
        return {"boxes": boxes[kept], "scores": best[kept], "labels": label[kept]}

    def loss(self, scores: Tensor, boxes: Tensor, targets: list[Tensor]) -> dict[str, Tensor]:
        total, background = boxes.new_zeros(()), boxes.new_zeros(())
        for image, target in enumerate(targets):
            if len(target) == 0:
                background = background - scores[image, :, 0].log().mean()
                continue
            for box in target:
                near = overlap(box, boxes[image]).argmax()
                total = total + F.smooth_l1_loss(boxes[image, near], box)
                background = background - scores[image, near, 1].log()
        return {"boxes": total, "classes": background}
