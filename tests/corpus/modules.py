"""Module containers, sharing, normalisation and attention under Python control flow."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, negative, positive, randn, register, register_factory


@register(
    never=lambda: call(randn(2, 3), ints(0)),
    once=lambda: call(randn(2, 3), ints(1)),
    thrice=lambda: call(randn(2, 3), ints(3)),
)
class SharedModuleCalledTracedTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for _ in range(n.item()):
            x = self.cell(x)
        return x


@register(shallow=lambda: call(positive(2, 3)), deep=lambda: call(negative(2, 3)))
class ModuleListLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        depth = 2 if x.sum() > 0 else len(self.layers)
        skips = []
        for layer in self.layers[:depth]:
            x = layer(x).relu()
            skips.insert(0, x)
        return torch.cat(skips, -1)


@register(
    text=lambda: call({"text": randn(3)}),
    both=lambda: call({"text": randn(3), "image": randn(2, 2)}),
)
class ModuleDictOverModalities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(
            {"text": nn.Linear(3, 2), "image": nn.Sequential(nn.Flatten(0), nn.Linear(4, 2))}
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return sum(enc(batch[name]) for name, enc in self.encoders.items() if name in batch)


@register(stops=lambda: call(negative(2, 3) * 99), completes=lambda: call(positive(2, 3)))
class SequentialLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.ReLU(), nn.Linear(3, 3), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        for module in self.stack:
            x = module(x)
            if not x.any():
                return x
        return x


@register(first=lambda: call(randn(2, 3), ints(1)), all=lambda: call(randn(2, 3), ints(3)))
class SequentialSlicedByTracedInt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.LayerNorm(3))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.stack[: n.item()](x)


@register(positive=lambda: call(positive(2, 3)), negative=lambda: call(negative(2, 3)))
class NoOpModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.drop = nn.Dropout(0.0)
        self.empty = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        y = self.empty(self.norm(x))
        return self.drop(y) if x[0, 0] > 0 else y


@register(identity=lambda: call(randn(3), "identity"), linear=lambda: call(randn(3), "linear"))
class SubmoduleByAttributeName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.path_identity = nn.Identity()
        self.path_linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, which: str) -> Tensor:
        return getattr(self, f"path_{which}")(x)


@register(spread=lambda: call(randn(8, 3) * 5), narrow=lambda: call(randn(8, 3) * 1e-4))
class BatchNormInTrainModeThenBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if y.var(0, unbiased=False).mean() > 0.9:
            return y * 2
        return y - self.norm.running_mean


class _NormedBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1 or self.norm.training:
            return self.norm(x) + 1
        return self.norm(x)


@register_factory(one_row=lambda: call(randn(1, 3)), rows=lambda: call(randn(4, 3)))
def batch_norm_in_eval_mode() -> nn.Module:
    return _NormedBranches().eval()


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        mask = None
        if lengths is not None and lengths.min() < x.shape[1]:
            mask = torch.arange(x.shape[1]) >= lengths[:, None]
        return self.layer(x, src_key_padding_mask=mask)


@register_factory(
    plain=lambda: call(randn(2, 3, 8)),
    full=lambda: call(randn(2, 3, 8), ints(3, 3)),
    padded=lambda: call(randn(2, 3, 8), ints(3, 1)),
)
def transformer_encoder_layer() -> nn.Module:
    return _Encoder().eval()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            return self.attention(x, x, x, need_weights=False)[0]
        y, weights = self.attention(x, memory, memory)
        return y * weights.max() if weights.max() < 0.9 else y


@register_factory(
    self_attention=lambda: call(randn(2, 3, 4)),
    cross_attention=lambda: call(randn(2, 3, 4), randn(2, 5, 4)),
)
def multihead_attention() -> nn.Module:
    return _Attention().eval()


@register(encode=lambda: call(ints(1, 2)), decode=lambda: call(randn(2, 3)))
class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if x.is_floating_point() else self.embed(x)


@register(two=lambda: call(floats(1, 1)), three=lambda: call(floats(1, 1, 1)))
class ParameterListZip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([v * s for v, s in zip(x, self.scales, strict=False)])


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.register_forward_hook(self.clip)

    @staticmethod
    def clip(_: nn.Module, __: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        return y.clamp(-1, 1) if y.abs().max() > 5 else None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2


@register_factory(
    clipped=lambda: call(randn(2, 3) * 100), untouched=lambda: call(randn(2, 3) * 0.1)
)
def forward_hook_branches() -> nn.Module:
    return _Hooked()


def _frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


@register_factory(
    plain=lambda: call(randn(2, 3, 8)), padded=lambda: call(randn(2, 3, 8), ints(3, 1))
)
def transformer_encoder_layer_fast_path() -> nn.Module:
    return _frozen(_Encoder())


@register_factory(
    self_attention=lambda: call(randn(2, 3, 4)),
    cross_attention=lambda: call(randn(2, 3, 4), randn(2, 5, 4)),
)
def multihead_attention_fast_path() -> nn.Module:
    return _frozen(_Attention())
