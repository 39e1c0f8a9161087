"""Outputs and intermediates in containers whose structure depends on data."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, negative, positive, randn, register


@register(plain=lambda: call(negative(3)), detailed=lambda: call(positive(3)))
def dict_output_keys(x: Tensor) -> dict[str, Tensor]:
    out = {"mean": x.mean()}
    if x.max() > 0:
        out["max"] = x.max()
        out["rest"] = {"values": x.sort().values}
    return out


@register(
    none=lambda: call(negative(3)),
    one=lambda: call(floats(-1, 2, -1)),
    all=lambda: call(positive(3)),
)
def list_output_length(x: Tensor) -> list[Tensor]:
    out = []
    for v in x:
        if v > 0:
            out.append(v.sqrt())
    return out


@register(tensor=lambda: call(floats(1, 1)), pair=lambda: call(floats(1, -1)))
def tensor_or_tuple_output(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    if x.min() < 0:
        return x.relu(), x.neg().relu()
    return x


@register(absent=lambda: call(negative(4)), present=lambda: call(positive(4)))
def none_in_output(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return x * 2, (x.log() if x[0] > 0 else None)


@register(short=lambda: call(ints(2, 1)), long=lambda: call(ints(3, 9)))
def python_values_in_output(x: Tensor) -> dict[str, Any]:
    n = int(x[1])
    return {"x": x, "count": n, "label": "long" if n > 5 else "short", "big": n > 5}


@register(twice=lambda: call(positive(3)), distinct=lambda: call(negative(3)))
def one_tensor_twice_in_output(x: Tensor) -> list[Tensor]:
    y = x + 1
    return [y, y] if x[0] > 0 else [y, y.clone()]


@register(input=lambda: call(positive(3)), view=lambda: call(negative(3)))
def input_returned_in_output(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x, x[1:]) if x.sum() > 0 else (x[1:], x * 2)


@register(forward=lambda: call(floats(1, 2)), backward=lambda: call(floats(2, 1)))
def ordered_dict_output(x: Tensor) -> OrderedDict[str, Tensor]:
    names = ["a", "b"] if x[0] < x[1] else ["b", "a", "c"]
    return OrderedDict((name, x * i) for i, name in enumerate(names))


@register(
    one_group=lambda: call(ints(2, 2, 2), randn(3)),
    two_groups=lambda: call(ints(2, 0, 2), randn(3)),
    three_groups=lambda: call(ints(0, 1, 2), randn(3)),
)
def group_by_traced_label(labels: Tensor, x: Tensor) -> dict[int, Tensor]:
    groups: defaultdict[int, list[Tensor]] = defaultdict(list)
    for label, v in zip(labels.tolist(), x, strict=True):
        groups[label].append(v)
    return {label: torch.stack(vs).sum() for label, vs in sorted(groups.items())}


@register(majority=lambda: call(ints(1, 1, 0)), tie=lambda: call(ints(0, 1, 2)))
def vote_counter(votes: Tensor) -> Tensor:
    (label, count), *_ = Counter(votes.tolist()).most_common()
    if count == 1:
        return votes
    return torch.full_like(votes, label)


@register(distinct=lambda: call(ints(1, 2, 3)), repeated=lambda: call(ints(4, 4, 3)))
def set_of_traced_ints(x: Tensor) -> Tensor:
    seen: set[int] = set()
    out = x.clone()
    for i, n in enumerate(x.tolist()):
        if n in seen:
            out[i] = -1
        seen.add(n)
    return out


@register(
    line=lambda: call(randn(3, 2), [(0, 1), (1, 2)]),
    star=lambda: call(randn(3, 2), [(0, 1), (0, 2)]),
)
class BreadthFirstQueue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(2, 2)

    def forward(self, x: Tensor, edges: list[tuple[int, int]]) -> Tensor:
        state, queue = {0: x[0]}, deque([0])
        while queue:
            node = queue.popleft()
            for a, b in edges:
                if a == node and b not in state:
                    state[b] = self.step(state[a]).tanh() + x[b]
                    queue.append(b)
        return torch.stack([state[i] for i in sorted(state)])


@register(ascending=lambda: call(floats(1, 2, 4, 8)), equal=lambda: call(floats(3, 3, 3, 3)))
def huffman_with_heapq(weights: Tensor) -> Tensor:
    heap = [(w, i, torch.zeros(1)) for i, w in enumerate(weights.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        (w, i, a), (v, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (w + v, i, torch.cat([a + 1, b + 1])))
    return heap[0][2]


@register(
    balanced=lambda: call(ints(1, 1, 2, 2)),
    nested=lambda: call(ints(1, 1, 1, 2)),
    stray=lambda: call(ints(2, 1)),
)
def stack_machine(tokens: Tensor) -> list[Tensor]:
    stack: list[Tensor] = []
    for i, token in enumerate(tokens):
        if token == 1:
            stack.append(tokens[: i + 1].sum())
        elif stack:
            stack.append(-stack.pop())
    return stack


@register(
    flat=lambda: call([randn(2)]), nested=lambda: call({"a": [randn(2), (randn(1),)], "b": None})
)
def same_structure_as_input(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: same_structure_as_input(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(same_structure_as_input(value) for value in tree)
    return None if tree is None else tree.sigmoid()


@register(ragged=lambda: call(randn(5), ints(2, 3)), one=lambda: call(randn(5), ints(5)))
def torch_return_types_output(x: Tensor, sizes: Tensor) -> list[Any]:
    return [part.max(dim=0) for part in x.split(sizes.tolist())]
