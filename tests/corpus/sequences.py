"""Recurrent cells, trees and ragged batches walked by Python loops."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from ._case import call, floats, ints, negative, positive, randn, register


@register(
    equal=lambda: call(randn(2, 3, 2), ints(3, 3)),
    ragged=lambda: call(randn(2, 3, 2), ints(3, 1)),
    short=lambda: call(randn(2, 3, 2), ints(1, 1)),
)
class GruCellWithPackedLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 3)
        for t in range(int(lengths.max())):
            alive = int((lengths > t).sum())
            h = torch.cat([self.cell(x[:alive, t], h[:alive]), h[alive:]])
        return h


@register(
    no_reset=lambda: call(randn(3, 2), ints(0, 0, 0)),
    reset=lambda: call(randn(3, 2), ints(0, 1, 0)),
)
class LstmCellWithResets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 3)

    def forward(self, xs: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        state = None
        for x, d in zip(xs, done, strict=True):
            if d:
                state = None
            state = self.cell(x[None], state)
        return state


@register(
    ragged=lambda: call(randn(2, 4, 2), ints(4, 2)),
    cropped=lambda: call(randn(2, 4, 2), ints(2, 1)),
)
class PackedGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        y, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return F.pad(y, (0, 0, 0, x.shape[1] - y.shape[1])) if y.shape[1] < x.shape[1] else y


@register(
    leaf=lambda: call(2),
    pair=lambda: call((0, 1)),
    left=lambda: call(((0, 1), 2)),
    full=lambda: call(((0, 1), (2, 3))),
)
class TreeLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.gates = nn.Linear(6, 15)

    def forward(self, tree: int | tuple) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            h = self.embed(torch.tensor(tree))
            return h.tanh(), h
        (hl, cl), (hr, cr) = (self.forward(child) for child in tree)
        i, o, u, fl, fr = self.gates(torch.cat([hl, hr])).chunk(5)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


@register(
    exact=lambda: call(randn(2, 4, 2)),
    small=lambda: call(randn(2, 3, 2)),
    large=lambda: call(randn(2, 6, 2)),
)
class BucketedPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        n, bucket = x.shape[1], 4
        while bucket < n:
            bucket *= 2
        if bucket != n:
            x = F.pad(x, (0, 0, 0, bucket - n))
        return self.conv(x.transpose(1, 2))[..., :n]


@register(
    equal=lambda: call([randn(2, 3), randn(2, 3, seed=1)]),
    ragged=lambda: call([randn(1, 3), randn(4, 3), randn(2, 3)]),
    single=lambda: call([randn(2, 3)]),
)
class RaggedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 2)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        lengths = [len(s) for s in sequences]
        if len(set(lengths)) == 1:
            return self.proj(torch.stack(sequences)).mean(1)
        padded = self.proj(pad_sequence(sequences, batch_first=True))
        return torch.stack([row[:n].mean(0) for row, n in zip(padded, lengths, strict=True)])


@register(constant=lambda: call(ints(3, 3, 3)), varied=lambda: call(ints(1, 1, 2, 1)))
def run_length_encoding(x: Tensor) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for v in x.tolist():
        if runs and runs[-1][0] == v:
            runs[-1] = (v, runs[-1][1] + 1)
        else:
            runs.append((v, 1))
    return runs


@register(
    aligned=lambda: call(randn(6, 2)),
    remainder=lambda: call(randn(7, 2)),
    short=lambda: call(randn(2, 2)),
)
class OverlappingWindows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for start in range(0, len(x), 2):
            window = x[start : start + 3]
            if len(window) < 3 and out:
                break
            out.append(self.score(window).amax(0))
        return torch.stack(out)


@register(both=lambda: call(positive(3, 2), True), forward=lambda: call(negative(3, 2), False))
class BidirectionalByArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.RNNCell(2, 2) for _ in range(2))

    def forward(self, xs: Tensor, both: bool) -> Tensor:
        ends = []
        for cell, order in zip(self.cells, (1, -1), strict=True):
            if order < 0 and not both:
                continue
            h = torch.zeros(1, 2)
            for x in list(xs)[::order]:
                h = cell(x[None], h)
            ends.append(h)
        return torch.cat(ends, -1)


@register(
    one=lambda: call(randn(5), ints(0, 0, 0, 0, 0)),
    three=lambda: call(randn(5), ints(0, 1, 1, 2, 2)),
)
def segment_pooling(x: Tensor, segment: Tensor) -> Tensor:
    pooled = []
    for s in range(int(segment[-1]) + 1):
        pooled.append(x[segment == s].amax())
    return torch.stack(pooled)


@register(
    same=lambda: call(ints(1, 2, 3), ints(1, 2, 3)),
    different=lambda: call(ints(1, 2, 3), ints(2, 4)),
)
def edit_distance(a: Tensor, b: Tensor) -> Tensor:
    row = list(torch.arange(len(b) + 1))
    for i, x in enumerate(a):
        diagonal, row[0] = row[0], torch.tensor(i + 1)
        for j, y in enumerate(b):
            keep = diagonal if x == y else 1 + min(diagonal, row[j], row[j + 1])
            diagonal, row[j + 1] = row[j + 1], keep
    return row[-1]


@register(filled=lambda: call(randn(4, 2), 2), open=lambda: call(randn(3, 2), 8))
class BoundedMemoryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2, 6)

    def forward(self, xs: Tensor, capacity: int) -> Tensor:
        memory: list[tuple[Tensor, Tensor]] = []
        for x in xs:
            q, k, v = self.qkv(x).chunk(3)
            memory.append((k, v))
            if len(memory) > capacity:
                memory.pop(0)
            weight = torch.stack([k @ q for k, _ in memory]).softmax(0)
            out = sum(w * v for w, (_, v) in zip(weight, memory, strict=True))
        return out


@register(quiet=lambda: call(floats(0.1, 0.2, 0.1)), spikes=lambda: call(floats(0.9, 0.8, 0.1)))
def spiking_neuron(current: Tensor) -> tuple[Tensor, list[int]]:
    v, spikes = torch.zeros(()), []
    for t, i in enumerate(current):
        v = 0.9 * v + i
        if v > 0.85:
            spikes.append(t)
            v = torch.zeros(())
    return v, spikes
