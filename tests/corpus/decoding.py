"""Decoders: greedy, beam and speculative search, CTC, Viterbi, constrained output."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, randn, register


@register(
    length_limit=lambda: call(ints(1, 2), 3),
    other_prompt=lambda: call(ints(3, 1, 4), 5),
    long_budget=lambda: call(ints(2), 12),
)
class GreedyWithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 6)

    def step(self, token: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        q, k, v = self.qkv(self.embed(token)).chunk(3)
        cache.append((k, v))
        keys, values = (torch.stack(column) for column in zip(*cache, strict=True))
        return self.head((keys @ q).softmax(0) @ values)

    def forward(self, prompt: Tensor, budget: int) -> list[int]:
        cache: list[tuple[Tensor, Tensor]] = []
        for token in prompt:
            logits = self.step(token, cache)
        tokens = prompt.tolist()
        while len(tokens) < len(prompt) + budget:
            token = logits.argmax()
            if token == 0:
                break
            tokens.append(token.item())
            logits = self.step(token, cache)
        return tokens


@register(
    both_stop=lambda: call(ints(2, 2), 0.1),
    one_stops=lambda: call(ints(0, 3), 0.1),
    none_stop=lambda: call(ints(0, 1), -9.0),
)
def batch_decoding_until_all_finished(start: Tensor, bias: float) -> Tensor:
    token, finished, columns = start, torch.zeros_like(start, dtype=torch.bool), [start]
    for _ in range(6):
        finished = finished | (token + bias > 3)
        if finished.all():
            break
        token = torch.where(finished, token, token + 1)
        columns.append(token)
    return torch.stack(columns, 1)


@register(
    narrow=lambda: call(ints(1), 1),
    wide=lambda: call(ints(1), 3),
    other_start=lambda: call(ints(4), 2),
)
class BeamSearch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, start: Tensor, width: int) -> tuple[list[int], Tensor]:
        beams = [([start.item()], torch.zeros(()))]
        for _ in range(4):
            grown = []
            for tokens, score in beams:
                if tokens[-1] == 0:
                    grown.append((tokens, score))
                    continue
                logp = self.table(torch.tensor(tokens[-1])).log_softmax(-1)
                values, indices = logp.topk(width)
                for value, index in zip(values, indices.tolist(), strict=True):
                    grown.append(([*tokens, index], score + value))
            grown.sort(key=lambda beam: beam[1].item(), reverse=True)
            beams = grown[:width]
        return beams[0]


@register(
    repeats=lambda: call(ints(1, 1, 0, 1, 2, 2)),
    blanks=lambda: call(ints(0, 0, 0)),
    distinct=lambda: call(ints(1, 2, 3)),
)
def ctc_collapse(path: Tensor) -> list[int]:
    out, previous = [], None
    for symbol in path:
        s = int(symbol)
        if s != previous and s != 0:
            out.append(s)
        previous = s
    return out


@register(
    short=lambda: call(randn(2, 3)),
    long=lambda: call(randn(5, 3)),
    pruned=lambda: call(randn(5, 3) * 9),
)
class Viterbi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transition = nn.Parameter(torch.randn(3, 3))

    def forward(self, emission: Tensor) -> tuple[list[int], Tensor]:
        score, back = emission[0], []
        for t in range(1, len(emission)):
            best, source = (score[:, None] + self.transition).max(0)
            score = best + emission[t]
            if score.max() - score.min() > 8:
                score = score.clamp(min=score.max().item() - 8)
            back.append(source)
        state = int(score.argmax())
        path = [state]
        for source in reversed(back):
            state = int(source[state])
            path.append(state)
        return path[::-1], score.max()


@register(
    all_accepted=lambda: call(ints(1, 2, 3), ints(1, 2, 3, 4)),
    first_rejected=lambda: call(ints(9, 2, 3), ints(1, 2, 3, 4)),
    last_rejected=lambda: call(ints(1, 2, 9), ints(1, 2, 3, 4)),
)
def speculative_acceptance(draft: Tensor, target: Tensor) -> Tensor:
    accepted = 0
    for d, t in zip(draft, target, strict=False):
        if d != t:
            break
        accepted += 1
    return torch.cat([draft[:accepted], target[accepted : accepted + 1]])


@register(peaked=lambda: call(floats(9, 0, 0, 0)), flat=lambda: call(floats(1, 1, 1, 1)))
def nucleus_set(logits: Tensor) -> Tensor:
    p, order = logits.softmax(-1).sort(descending=True)
    kept, mass = [], 0.0
    for i in range(len(p)):
        kept.append(order[i])
        mass += p[i].item()
        if mass >= 0.9:
            break
    return torch.stack(kept)


@register(
    fresh=lambda: call(ints(1, 2, 3), randn(5)), blocked=lambda: call(ints(1, 2, 1), randn(5))
)
def bigram_blocking(tokens: Tensor, logits: Tensor) -> Tensor:
    history = tokens.tolist()
    for a, b in itertools.pairwise(history):
        if a == history[-1]:
            logits = logits.index_fill(0, torch.tensor([b]), -1e9)
    return logits.softmax(-1)


@register(
    digits=lambda: call(ints(1, 1, 2)),
    letters=lambda: call(ints(3, 3)),
    switch=lambda: call(ints(1, 3, 1, 3)),
)
def finite_state_mask(tokens: Tensor) -> Tensor:
    state, masks = "number", []
    for token in tokens.tolist():
        if state == "number" and token > 2:
            state = "word"
        elif state == "word" and token <= 2:
            state = "number"
        masks.append(torch.ones(3) if state == "word" else torch.eye(3)[token % 3])
    return torch.stack(masks)
