"""Convolutional networks of the kinds that torchvision and timm have, written for the tests."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Two stages of two blocks; any size of image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Dense(nn.Module):
    """A layer that is given all features so far, as a list."""

    def __init__(self, inside: int, growth: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inside)
        self.conv = nn.Conv2d(inside, growth, 3, padding=1)
        self.drop = drop

    def forward(self, features: list[Tensor]) -> Tensor:
        new = self.conv(F.relu(self.norm(torch.cat(features, 1))))
        return F.dropout(new, self.drop, self.training) if self.drop > 0 else new


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 8, 3, 2, 1)
        self.block = nn.ModuleDict({f"layer{n}": Dense(8 + 4 * n, 4, 0.2) for n in range(3)})
        self.norm = nn.BatchNorm2d(20)
        self.classifier = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.conv0(x)]
        for _, layer in self.block.items():
            features.append(layer(features))
        x = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.hardsigmoid(self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True)))))
        return scale * x


class StochasticDepth(nn.Module):
    """Leaves rows out, or all of a batch, while training."""

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        survival = 1.0 - self.p
        size = [x.shape[0]] + [1] * (x.ndim - 1) if self.mode == "row" else [1] * x.ndim
        noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(survival)
        if survival > 0.0:
            noise.div_(survival)
        return x * noise


class Inverted(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, p: float) -> None:
        super().__init__()
        width = 2 * inside
        self.use_res = stride == 1 and inside == outside
        self.expand = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True)
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False),
            nn.BatchNorm2d(width), nn.Hardswish(inplace=True),
        )  # fmt: skip
        self.se = Squeeze(width)
        self.project = nn.Sequential(nn.Conv2d(width, outside, 1), nn.BatchNorm2d(outside))
        self.stochastic_depth = StochasticDepth(p, "row")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.project(self.se(self.depthwise(self.expand(x))))
        if self.use_res:
            result = self.stochastic_depth(result)
            result += x
        return result


class MobileNet(nn.Module):
    """Inverted residuals without leaving any out."""

    depth_p = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), Inverted(8, 8, 1, self.depth_p),
            Inverted(8, 12, 2, self.depth_p), Inverted(12, 12, 1, self.depth_p),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class EfficientNet(MobileNet):
    depth_p = 0.5


Outputs = namedtuple("Outputs", ["logits", "aux_logits2", "aux_logits1"])


class Inception(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.branch1 = nn.Conv2d(inside, 4, 1)
        self.branch2 = nn.Sequential(nn.Conv2d(inside, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1))
        self.branch3 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), nn.Conv2d(inside, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x)], 1)


class Head(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(inside, 4, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(F.adaptive_avg_pool2d(x, (2, 2))), inplace=True)
        return self.fc(F.dropout(torch.flatten(x, 1), 0.7, training=self.training))


class GoogLeNet(nn.Module):
    """Gives the logits of two more heads, as a named tuple, while training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        self.a, self.b, self.c = Inception(8), Inception(12), Inception(12)
        self.aux1, self.aux2 = Head(12), Head(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.unsqueeze(x[:, 0], 1) * 0.5 + x
        x = self.a(self.conv(x))
        aux1 = self.aux1(x) if self.training else None
        x = self.b(x)
        aux2 = self.aux2(x) if self.training else None
        logits = self.fc(F.adaptive_avg_pool2d(self.c(x), 1).flatten(1))
        return Outputs(logits, aux2, aux1) if self.training else logits


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))
        self.drop_path = StochasticDepth(p, "row")

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.gamma * self.pwconv2(F.gelu(self.pwconv1(x)))
        return shortcut + self.drop_path(x.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8))
        self.stages = nn.Sequential(
            *(ConvNeXtBlock(8, rate) for rate in rates), LayerNorm2d(8), nn.Conv2d(8, 12, 2, 2)
        )
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x)).mean([-2, -1])))


def partition(x: Tensor, size: int) -> Tensor:
    batch, height, width, channels = x.shape
    x = x.view(batch, height // size, size, width // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels)


def reverse(windows: Tensor, size: int, height: int, width: int) -> Tensor:
    batch = int(windows.shape[0] / (height * width / size / size))
    x = windows.view(batch, height // size, width // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, -1)


class SwinBlock(nn.Module):
    """Attention within windows, which every other block moves; images are padded to fit."""

    def __init__(self, width: int, window: int, shift: int, p: float) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, 2
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, self.heads))
        places = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", apart[..., 0] * (2 * window - 1) + apart[..., 1])
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop_path = StochasticDepth(p, "row")

    def mask(self, height: int, width: int) -> Tensor | None:
        if not self.shift or (height <= self.window and width <= self.window):
            return None
        regions = torch.zeros(1, height, width, 1)
        cuts = slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None)
        count = 0
        for rows in cuts:
            for columns in cuts:
                regions[:, rows, columns, :] = count
                count += 1
        windows = partition(regions, self.window).squeeze(-1)
        apart = windows.unsqueeze(1) - windows.unsqueeze(2)
        return apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        count, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        bias = self.table[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)
        scores = scores + bias.unsqueeze(0)
        if mask is not None:
            of = mask.shape[0]
            scores = scores.view(count // of, of, self.heads, tokens, tokens)
            scores = (scores + mask.unsqueeze(1).unsqueeze(0)).view(-1, self.heads, tokens, tokens)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(count, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        shortcut, size = x, self.window
        x = self.norm1(x)
        bottom, right = (size - height % size) % size, (size - width % size) % size
        if bottom or right:
            x = F.pad(x, (0, 0, 0, right, 0, bottom))
        tall, wide = height + bottom, width + right
        mask = self.mask(tall, wide)
        if mask is not None:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = reverse(self.attend(partition(x, size), mask), size, tall, wide)
        if mask is not None:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        x = shortcut + self.drop_path(x[:, :height, :width].contiguous())
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList([SwinBlock(8, 4, 0, 0.0), SwinBlock(8, 4, 2, 0.5)])
        self.merge, self.norm = nn.Linear(32, 8, bias=False), nn.LayerNorm(32)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        if x.shape[1] % 2 or x.shape[2] % 2:
            x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        parts = [x[:, a::2, b::2, :] for b in range(2) for a in range(2)]
        return self.head(self.merge(self.norm(torch.cat(parts, -1))).mean((1, 2)))


class ViT(nn.Module):
    """Attention of torch's own, a class token, and positions resized for other images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 17, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.drop_path = StochasticDepth(0.3, "batch")
        self.head = nn.Linear(8, 5)

    def embedded(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        batch, _, height, width = x.shape
        positions = self.positions
        if height * width != positions.shape[1] - 1 or height != width:
            grid = positions[:, 1:].reshape(1, 4, 4, 8).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, size=(height, width), mode="bicubic", align_corners=False)
            positions = torch.cat([positions[:, :1], grid.flatten(2).transpose(1, 2)], 1)
        return torch.cat([self.cls_token.expand(batch, -1, -1), x.flatten(2).mT], 1) + positions

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded(x)
        for layer in self.layers:
            x = x + self.drop_path(layer(x) - x)
        return self.head(x[:, 0])


NETWORKS: Iterable[type[nn.Module]] = (
    ResNet, DenseNet, MobileNet, EfficientNet, GoogLeNet, ConvNeXt, Swin, ViT,
)  # fmt: skip
