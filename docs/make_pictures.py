"""Make the pictures and printed forms of docs/pictures.md.

`python docs/make_pictures.py` writes docs/pictures/*.svg and docs/texts/*.txt.

The same versions of torch and bendtrace give the same bytes, so a test can compare them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import bendtrace as bt

HERE = Path(__file__).parent


# A 12-layer GPT-2


class Attention(nn.Module):
    """Causal self-attention, as GPT-2 has it."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(size, 3 * size)
        self.c_proj = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each position gathers from those before it."""
        batch, length, size = x.shape
        shape = (batch, length, self.heads, size // self.heads)
        q, k, v = self.c_attn(x).split(size, dim=2)
        q = q.view(shape).transpose(1, 2)
        k = k.view(shape).transpose(1, 2)
        v = v.view(shape).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, size))


class MLP(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(size, 4 * size)
        self.c_proj = nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to each position."""
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """A block with two residual connections."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size)
        self.attn = Attention(size, heads)
        self.ln_2 = nn.LayerNorm(size)
        self.mlp = MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what goes on to the next block."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2, small in width."""

    def __init__(self, layers: int = 12, size: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(500, size)
        self.wpe = nn.Embedding(64, size)
        self.h = nn.ModuleList(Block(size, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, 500, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits for each position."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# A ResNet-18


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1 or inner != outer:
            shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both ways."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """ResNet-18, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for each image."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


# A loop


class Tagger(nn.Module):
    """An LSTM cell that walks along a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a prediction for each step."""
        h = c = x.new_zeros(x.shape[0], 16)
        outputs = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs, dim=1)


# A model that decides


class Refiner(nn.Module):
    """Takes another way for quiet inputs, and repeats itself until it is content."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(8, 8)
        self.quiet = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers for each row."""
        if x.abs().mean() > 0.5:
            x = torch.relu(self.loud(x))
        else:
            x = torch.tanh(self.quiet(x))
        while x.norm() > 1.0:
            x = x * 0.75
        return self.out(x)


# The model of the README


def refine(x: torch.Tensor) -> torch.Tensor:
    """Return what is left when the norm is at most 1."""
    while x.norm() > 1:
        x = x * x.sigmoid()
    return x


# The model of the pages on tracing and on the trace tree


class Refine(nn.Module):
    """Shortens what is too long, and repeats a step until the norm is small."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, tolerance: float = 1.0) -> torch.Tensor:
        """Return at most three rows, of a norm of at most the tolerance."""
        if x.shape[0] > 3:
            x = x[:3]
        while x.norm() > tolerance:
            x = x * self.step(x).sigmoid()
        return x


class Counted(Refine):
    """A Refine that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, tolerance: float = 1.0) -> torch.Tensor:
        """Return at most three rows, of a norm of at most the tolerance."""
        self.calls += 1
        if x.shape[0] > 3:
            x = x[:3]
        while x.norm() > tolerance:
            x = x * self.step(x).sigmoid()
        return x


# The model of the page on states


def halve(x: torch.Tensor) -> torch.Tensor:
    """Return what is left when the norm is at most 1."""
    while x.norm() > 1:
        x = x.clamp(min=-1) / 2 if x.min() < -1 else x / 2
    return x


def halved() -> bt.BendedModule:
    """Return a model whose paths join, after some calls."""
    bended = bt.BendedModule(halve)
    for x in torch.randn(100, 8, generator=torch.Generator().manual_seed(0)):
        bended(x)
    return bended


def refined() -> tuple[bt.Trace, bt.BendedModule]:
    """Return a run of Refine, and several of its paths."""
    torch.manual_seed(0)
    bended = bt.BendedModule(Counted())
    for factor in (1, 9, 9, 0.1, 30):
        bended(torch.ones(5, 4) * factor)
    torch.manual_seed(0)
    return bt.trace(Refine(), torch.ones(5, 4)), bended


def traces() -> dict[str, bt.Trace]:
    """Return a run of each model."""
    torch.manual_seed(0)
    return {
        "gpt2": bt.trace(GPT2().eval(), torch.arange(16)[None]),
        "resnet18": bt.trace(ResNet18().eval(), torch.ones(1, 3, 64, 64)),
        "lstm": bt.trace(Tagger(), torch.ones(2, 100, 8)),
        "refiner": bt.trace(refiner(), torch.full((3, 8), 2.0)),
    }


def refiner() -> Refiner:
    """Return a Refiner whose paths do not depend on chance."""
    model = Refiner()
    with torch.no_grad():
        model.loud.weight.copy_(torch.eye(8))
    return model


def pictures(made: dict[str, bt.Trace]) -> dict[str, str]:
    """Return the pictures as SVG, by the names of their files."""
    bended = bt.BendedModule(refiner())
    loud, quiet = torch.full((3, 8), 2.0), torch.full((3, 8), 0.1)
    for x in (loud, quiet, loud / 3, quiet):
        bended(x)
    gpt2, resnet = made["gpt2"], made["resnet18"]
    refined_run, refined_paths = refined()
    return {
        **{name: trace.draw().svg for name, trace in made.items()},
        "gpt2_overview": gpt2.draw(collapse=False, max_nodes=40).svg,
        "resnet18": resnet.draw(max_nodes=100).svg,
        "gpt2_block": gpt2.draw(within="h.3").svg,
        "resnet18_flops": resnet.draw(depth=1, overlay="flops").svg,
        "lstm_rolled": made["lstm"].draw(rolled=True).svg,
        "refiner_tree": bended.tree.draw().svg,
        "readme": bt.trace(refine, torch.ones(4)).draw(rolled=True).svg,
        "refine": refined_run.draw().svg,
        "refine_tree": refined_paths.tree.draw().svg,
        "states": halved().graph.draw().svg,
    }


def texts(made: dict[str, bt.Trace]) -> dict[str, str]:
    """Return the printed logs, rolled logs and trees, by the names of their files."""
    found = {}
    for name, trace in made.items():
        found[f"{name}_log"] = str(trace)
        found[f"{name}_rolled"] = trace.rolled()
        found[f"{name}_tree"] = trace.tree._show(flow=True)
    # White space at the ends of lines does not survive everywhere.
    return {
        name: "".join(f"{line.rstrip()}\n" for line in str(text).splitlines())
        for name, text in found.items()
    }


def main() -> None:
    """Write the pictures and the texts."""
    made = traces()
    for folder, suffix, contents in (
        ("pictures", "svg", pictures(made)),
        ("texts", "txt", texts(made)),
    ):
        (HERE / folder).mkdir(exist_ok=True)
        for name, content in contents.items():
            (HERE / folder / f"{name}.{suffix}").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
