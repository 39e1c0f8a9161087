"""Models with data-dependent branches and loops, which are exported and taken out of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

D = 8


class Gated(nn.Module):
    """Layers that are each skipped where a test says so."""

    def __init__(self, layers: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            h = h - h.mean() * 0.97
            if h[0, 0] > 0:
                x = x + h.relu()
            else:
                x = x - h.tanh() * 0.5
        return x


class Solver(nn.Module):
    """A fixed point, looked for until a residual is small."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(D, D)
        with torch.no_grad():
            self.f.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.f(x) - x
        while residual.norm() > 1e-3:
            x = x + 0.5 * residual
            residual = self.f(x) - x
        return x


class EarlyExit(nn.Module):
    """Layers that are left as soon as the answer is sure."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu() * 0.5 + x
            p = self.head(x).softmax(-1)
            if p.max(-1).values.min() > 0.5:
                return p, number
        return p, len(self.layers)


class TopOne(nn.Module):
    """A mixture of experts of which one is asked, picked by an index in Python."""

    def __init__(self, layers: int = 2, experts: int = 4) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(D, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(D, D) for _ in range(experts)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            scores = router(x.mean(0)).softmax(-1)
            index = int(scores.argmax())
            x = x + experts[index](x) * scores[index]
        return x


class TopTwo(nn.Module):
    """A mixture of experts with two for each token: each expert is given its tokens."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(D, experts)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                share = (weights * mask).sum(-1, keepdim=True)
                out = out + expert(x) * share
        return out


class TopTwoGathered(TopTwo):
    """The same, with the tokens of an expert gathered."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Matcher(nn.Module):
    """Matches two sets of points in rounds, stops early, and masks points out."""

    def __init__(self, rounds: int = 4) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(D, D) for _ in range(rounds))
        self.sure = nn.Linear(D, 1)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        keep_a = torch.ones(a.shape[0], dtype=torch.bool)
        keep_b = torch.ones(b.shape[0], dtype=torch.bool)
        for mix in self.mix:
            scores = (mix(a) @ mix(b).T).masked_fill(~keep_b, -1e4)
            a = a + scores.softmax(-1) @ b * 0.5
            sure_a = self.sure(a).squeeze(-1).sigmoid()
            if (sure_a > 0.45).float().mean() > 0.9:
                break
            if bool((sure_a < 0.2).any()):
                keep_a = keep_a & (sure_a >= 0.2)
        similarity = (a @ b.T).masked_fill(~keep_a[:, None], -1e4)
        return {"match": similarity.argmax(-1), "kept": keep_a, "score": similarity.max(-1).values}


class Greedy(nn.Module):
    """Decodes token by token until an end token, with a cache of a fixed length."""

    def __init__(self, vocabulary: int = 11, longest: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, D)
        self.out = nn.Linear(D, vocabulary)
        self.longest = longest

    def forward(self, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.zeros((), dtype=torch.int64)
        slots = torch.arange(self.longest)
        cache = torch.zeros(self.longest, D)
        tokens = torch.zeros(self.longest, dtype=torch.int64)
        token = token.reshape(())
        while length < self.longest:
            query = self.embed(token) + memory
            cache = torch.where((slots == length)[:, None], query, cache)
            weights = (cache @ query).masked_fill(slots > length, -1e4).softmax(-1)
            token = self.out(weights @ cache * 3).argmax()
            tokens = torch.where(slots == length, token, tokens)
            length = length + 1
            if token == 0:
                break
        return tokens, length


class Ponder(nn.Module):
    """Adaptive computation time: it thinks until it has halted for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.GRUCell(D, D)
        self.halt = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.zeros_like(x)
        halted = torch.zeros(x.shape[0])
        out = torch.zeros_like(x)
        steps = torch.zeros(x.shape[0])
        while bool((halted < 0.99).any()):
            state = self.step(x, state)
            p = self.halt(state).squeeze(-1).sigmoid() * 0.6
            running = (halted < 0.99).float()
            p = torch.minimum(p, 1.0 - halted) * running + (steps > 6).float() * running
            halted = halted + p
            steps = steps + running
            out = out + p[:, None] * state
        return out, steps


class Suppress(nn.Module):
    """Non-maximum suppression in Python, on masks."""

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        alive = torch.ones_like(scores, dtype=torch.bool)
        kept = torch.zeros_like(scores, dtype=torch.bool)
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        while alive.any():
            best = scores.masked_fill(~alive, -1.0).argmax()
            kept = kept.index_fill(0, best, True)
            box = boxes[best]
            low = torch.maximum(boxes[:, :2], box[:2])
            high = torch.minimum(boxes[:, 2:], box[2:])
            shared = (high - low).clamp(min=0).prod(-1)
            overlap = shared / (area + area[best] - shared)
            alive = alive & (overlap < 0.5)
        return kept


class Transducer(nn.Module):
    """Greedy decoding of an RNN-T: each frame gives tokens until it gives a blank."""

    def __init__(self, vocabulary: int = 7, longest: int = 10) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, D), nn.Linear(D, vocabulary)
        self.cell = nn.GRUCell(D, D)
        self.longest = longest

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        slots = torch.arange(self.longest)
        tokens = torch.zeros(self.longest, dtype=torch.int64)
        at, count = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        state = torch.zeros(1, D)
        while (at < frames.shape[0]) & (count < self.longest):
            token = self.out((frames[at] + state[0]).tanh() * 2).argmax()
            if token == 0:
                at = at + 1
            else:
                tokens = torch.where(slots == count, token, tokens)
                state = self.cell(self.embed(token)[None], state)
                count = count + 1
        return tokens, count


class Collapse(nn.Module):
    """Greedy decoding of CTC: repeated tokens and blanks are left out."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        best, last = logits.argmax(-1), torch.zeros((), dtype=torch.int64)
        tokens, count = torch.zeros(6, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        for step in range(6):
            token = best[step]
            if token != 0 and token != last:
                tokens = torch.where(torch.arange(6) == count, token, tokens)
                count = count + 1
            last = token
        return tokens, count


class Beam(nn.Module):
    """Beam search until all beams have ended."""

    def __init__(self, vocabulary: int = 9, width: int = 3, longest: int = 8) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, D), nn.Linear(D, vocabulary)
        self.width, self.longest = width, longest

    def forward(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(self.width, self.longest, dtype=torch.int64)
        scores = torch.tensor([0.0, -9.0, -9.0])
        step, ended = torch.zeros((), dtype=torch.int64), torch.zeros(self.width).bool()
        while not ended.all() and step < self.longest:
            last = tokens.gather(1, (step - 1).clamp(min=0).expand(self.width, 1))[:, 0]
            ahead = self.out(self.embed(last) + memory).mul(3).log_softmax(-1)
            ended_row = torch.where(torch.arange(ahead.shape[1]) == 0, 0.0, -torch.inf)
            ahead = torch.where(ended[:, None], ended_row, ahead)
            scores, chosen = (scores[:, None] + ahead).flatten().topk(self.width)
            beam, token = chosen // ahead.shape[1], chosen % ahead.shape[1]
            slot = torch.arange(self.longest) == step
            tokens = torch.where(slot, token[:, None], tokens[beam])
            ended = ended[beam] | (token == 0)
            step = step + 1
        return tokens, scores


class March(nn.Module):
    """Sphere tracing: rays go on until all have hit something, or left."""

    def forward(self, origin: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        way = direction / direction.norm(dim=-1, keepdim=True)
        depth = torch.zeros(way.shape[0])
        alive = torch.ones(way.shape[0], dtype=torch.bool)
        while alive.any():
            here = origin + depth[:, None] * way
            gap = torch.minimum(here.norm(dim=-1) - 1, (here - 2).norm(dim=-1) - 0.5)
            depth = torch.where(alive, depth + gap, depth)
            alive = alive & (gap > 1e-2) & (depth < 10)
        return depth, depth < 10


class LineSearch(nn.Module):
    """Gradient descent with backtracking: a loop in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        slope = 4 * x * (x * x - 1)
        while slope.norm() > 1e-2:
            value, rate = ((x * x - 1) ** 2).sum(), torch.ones(())
            while (
                ((x - rate * slope) ** 2 - 1) ** 2
            ).sum() > value - 0.3 * rate * slope.norm() ** 2:
                rate = rate * 0.5
            x = x - rate * slope
            slope = 4 * x * (x * x - 1)
        return x


class Components(nn.Module):
    """Messages in a graph until no node changes: its connected components."""

    def forward(self, edges: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        joined = edges | edges.T | torch.eye(edges.shape[0], dtype=torch.bool)
        label = torch.arange(edges.shape[0])
        changing = torch.ones((), dtype=torch.bool)
        while changing:
            new = torch.where(joined, label, edges.shape[0]).amin(-1)
            changing, label = (new != label).any(), new
        same = (label[:, None] == label).float()
        return label, same @ features / same.sum(-1, keepdim=True)


class Inverse(nn.Module):
    """A normalizing flow, inverted by bisection."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Linear(1, D)

    def flow(self, x: Tensor) -> Tensor:
        return x + 0.3 * (x[..., None] * 2 + self.raw.bias).tanh().sum(-1)

    def forward(self, y: Tensor) -> Tensor:
        low, high = y - 4, y + 4
        while (high - low).max() > 1e-3:
            middle = (low + high) / 2
            above = self.flow(middle) > y
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (low + high) / 2


class Sampler(nn.Module):
    """A diffusion sampler with a step that adapts to an estimate of its error."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        time, step = torch.zeros(()), torch.full((), 0.5)
        while time < 1:
            step = torch.minimum(step, 1 - time)
            first = self.score(x) - x
            second = self.score(x + step * first) - x - step * first
            error = (step * (second - first)).norm() / 2
            if error < 0.2:
                x, time = x + step * (first + second) / 2, time + step
                step = step * 1.5
            else:
                step = step * 0.5
        return x, time


class Attention(nn.Module):
    """A layer of a transformer that takes a shorter way where nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.projected, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.projected(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / D**0.5
        if not mask.all():
            scores = scores.masked_fill(~mask[:, None], -1e4)
        y = self.out(scores.softmax(-1) @ v)
        if (mask.sum(-1) == 0).any():
            y = y * mask[..., None]
        return x + y


class Speculative(nn.Module):
    """Speculative decoding: of a draft, the tokens before the first mistake are accepted."""

    def __init__(self, vocabulary: int = 5) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, D), nn.Linear(D, vocabulary)

    def forward(self, draft: Tensor) -> tuple[Tensor, Tensor]:
        wanted = self.out(self.embed(draft) * 3).argmax(-1)
        count = torch.zeros((), dtype=torch.int64)
        while count < draft.shape[0] - 1 and wanted[count] == draft[count + 1]:
            count = count + 1
        kept = torch.arange(draft.shape[0]) <= count
        return torch.where(kept, draft, -1), wanted[count]


class Detect(nn.Module):
    """Non-maximum suppression as detectors write it: what overlaps is dropped, round by round."""

    def overlap(self, box: Tensor, others: Tensor) -> Tensor:
        low = torch.maximum(box[:2], others[:, :2])
        high = torch.minimum(box[2:], others[:, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        return shared / ((box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(-1))

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        order, kept = scores.argsort(descending=True), torch.zeros_like(scores)
        while order.numel() > 0:
            best, rest = order[0], order[1:]
            kept[best] = scores[best]
            order = rest[self.overlap(boxes[best], boxes[rest]) <= 0.2]
        return kept


class DetectList(Detect):
    """The same, with what is kept in a Python list."""

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        order, kept = scores.argsort(descending=True), []
        while order.numel() > 0:
            kept.append(order[0])
            if order.numel() == 1:
                break
            rest = order[1:]
            order = rest[self.overlap(boxes[order[0]], boxes[rest]) <= 0.2]
        picked = torch.stack(kept)
        return boxes[picked], scores[picked]


class Pruned(nn.Module):
    """A transformer that drops tokens between its layers, if enough of them matter little."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.mixed = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))
        self.score = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        for mixed in self.mixed:
            x = x + (x @ x.T / D**0.5).softmax(-1) @ mixed(x)
            matter = self.score(x)[:, 0].sigmoid()
            if (matter > 0.4).any() and (matter < 0.4).float().mean() > 0.2:
                x = x[matter > 0.4]
        return x.mean(0)


class Conjugate(nn.Module):
    """Conjugate gradients until the residual is small, or the matrix turns out to be singular."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = a @ a.T + 0.1 * torch.eye(a.shape[0])
        x, r = torch.zeros_like(b), b
        way, size = r, r @ r
        while size > 1e-4:
            ahead = a @ way
            curve = way @ ahead
            if curve <= 1e-6:
                break
            x, r = x + size / curve * way, r - size / curve * ahead
            new = r @ r
            way, size = r + new / size * way, new
        return x


class Sinkhorn(nn.Module):
    """Optimal transport in rounds, until the marginals are met; differences are scaled if large."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        cost = (a[:, None] - b[None]).norm(dim=-1)
        if cost.max() > 6:
            cost = cost / cost.max() * 6
        kernel = (-cost).exp()
        u, v = torch.ones(a.shape[0]), torch.ones(b.shape[0])
        while (u * (kernel @ v) - 1 / a.shape[0]).abs().sum() > 1e-3:
            u = 1 / a.shape[0] / (kernel @ v)
            v = 1 / b.shape[0] / (kernel.T @ u)
        return u[:, None] * kernel * v


SIZES = 4, 8, 16


class Cascade(nn.Module):
    """Classifiers of growing size: the next one is asked if this one is not sure."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, 4)) for width in SIZES
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(x.shape[0], 4)
        for stage in self.stages:
            total = total + stage(x)
            p = total.softmax(-1)
            if -(p * p.log()).sum(-1).max() < 1.25:
                break
        return p.argmax(-1), p


class Messages(nn.Module):
    """A graph neural network with as many rounds as it takes to settle."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        state, change = torch.zeros_like(x), torch.ones(())
        degree = torch.ones(x.shape[0]).index_add(0, edges[1], torch.ones(edges.shape[1]))
        while change > 1e-2:
            sent = torch.zeros_like(state).index_add(0, edges[1], state[edges[0]])
            new = (self.own(x) + 0.5 * self.others(sent / degree[:, None])).tanh()
            change, state = (new - state).abs().max(), new
        return state


class Aligned(nn.Module):
    """Monotonic alignment: the best way through a matrix, back from its end."""

    def forward(self, scores: Tensor) -> Tensor:
        rows, columns = scores.shape
        total = scores.cumsum(1).cumsum(0)
        way = torch.zeros_like(scores)
        at, step = torch.tensor(rows - 1), torch.tensor(columns - 1)
        while step >= 0:
            way = way.index_put((at, step), torch.ones(()))
            before = (step - 1).clamp(min=0)
            if at > 0 and (step == at or total[at - 1, before] > total[at, before]):
                at = at - 1
            step = step - 1
        return way


class Nucleus(nn.Module):
    """Top-p: tokens are taken until their probabilities suffice; nothing is cut if one does."""

    def forward(self, logits: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        p, order = logits.softmax(-1).sort(descending=True)
        total, count = p[0], torch.ones((), dtype=torch.int64)
        while total < 0.8:
            total, count = total + p[count], count + 1
        p = torch.where(torch.arange(p.shape[0]) < count, p, 0.0)
        if count > 1:
            p = p / p.sum()
        at = (p.cumsum(0) < draw).sum().clamp(max=p.shape[0] - 1)
        return order[at], p


class Attended(nn.Module):
    """An LSTM that attends to a text and ends by itself."""

    def __init__(self, vocabulary: int = 9, longest: int = 8) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, D), nn.Linear(D, vocabulary)
        self.cell, self.longest = nn.LSTMCell(2 * D, D), longest

    def forward(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        token = torch.ones((), dtype=torch.int64)
        h = c = torch.zeros(1, D)
        out, count = (
            torch.zeros(self.longest, dtype=torch.int64),
            torch.zeros((), dtype=torch.int64),
        )
        while token != 0 and count < self.longest:
            seen = (memory @ h[0]).softmax(0) @ memory
            h, c = self.cell(torch.cat([self.embed(token), seen])[None], (h, c))
            token = self.out(h[0] * 4).argmax()
            out = torch.where(torch.arange(self.longest) == count, token, out)
            count = count + 1
        return out, count


@dataclass(frozen=True)
class Example:
    """A model, and how its inputs are made.

    Attributes:
        make: makes the model.
        inputs: makes random inputs.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()

    def stream(self, seed: int) -> Iterator[tuple[Any, ...]]:
        """Yield random inputs, which draw from torch's generator."""
        torch.manual_seed(seed)
        while True:
            yield self.inputs()


def _rows(scale: float = 3.0) -> tuple[Any, ...]:
    return (torch.randn(int(torch.randint(2, 6, ())), D) * scale * torch.rand(()),)


def _boxes(count: int = 9) -> tuple[Any, ...]:
    low = torch.rand(count, 2) * 4
    return torch.cat([low, low + 0.5 + torch.rand(count, 2) * 2], 1), torch.rand(count)


MODELS = {
    "gated": Example(Gated, _rows),
    "solver": Example(Solver, _rows),
    "early exit": Example(EarlyExit, _rows),
    "top-1 experts": Example(TopOne, _rows),
    "top-2 experts": Example(TopTwo, _rows),
    "top-2 experts, gathered": Example(TopTwoGathered, _rows),
    "matcher": Example(Matcher, lambda: (*_rows(), *_rows())),
    "greedy decoding": Example(Greedy, lambda: (torch.randint(11, (1,)), torch.randn(D))),
    "adaptive time": Example(Ponder, _rows),
    "suppression": Example(Suppress, _boxes),
    "RNN-T": Example(Transducer, lambda: (torch.randn(5, D) * 2,)),
    "CTC": Example(Collapse, lambda: (torch.randn(6, 3),)),
    "beam search": Example(Beam, lambda: (torch.randn(D),)),
    "ray marching": Example(March, lambda: (torch.randn(3) - 4, torch.randn(6, 3) + 2)),
    "line search": Example(LineSearch, lambda: (torch.randn(3) * 1.5,)),
    "components of a graph": Example(
        Components, lambda: (torch.rand(6, 6) < 0.15, torch.randn(6, 2))
    ),
    "inverse flow": Example(Inverse, lambda: (torch.randn(4) * 2,)),
    "diffusion sampler": Example(Sampler, lambda: (torch.randn(2, D) * 2 * torch.rand(()),)),
    "masked attention": Example(
        Attention,
        lambda: (
            torch.randn(2, 5, D),
            torch.rand(2, 5) < [0.0, 0.3, 0.8, 1.0][torch.randint(4, ())],
        ),
    ),
    "speculative decoding": Example(Speculative, lambda: (torch.randint(5, (6,)),)),
    "detector, shrinking": Example(Detect, _boxes),
    "detector, a list": Example(DetectList, lambda: _boxes(5)),
    "tokens dropped": Example(Pruned, lambda: (torch.randn(7, D) * 3 * torch.rand(()),)),
    "conjugate gradients": Example(Conjugate, lambda: (torch.randn(4, 4), torch.randn(4))),
    "optimal transport": Example(
        Sinkhorn, lambda: (torch.randn(5, 3), torch.randn(4, 3) * 6 * torch.rand(()))
    ),
    "cascade": Example(Cascade, _rows),
    "messages until settled": Example(
        Messages, lambda: (torch.randn(5, D), torch.randint(5, (2, 7)))
    ),
    "monotonic alignment": Example(Aligned, lambda: (torch.randn(4, 7),)),
    "top-p": Example(Nucleus, lambda: (torch.randn(9) * 2 * torch.rand(()), torch.rand(()))),
    "attention decoder": Example(Attended, lambda: (torch.randn(6, D),)),
}
