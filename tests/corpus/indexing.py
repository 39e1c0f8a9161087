"""Indexing and slicing by traced values: lists, dicts, masks, splits, gathers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._case import call, floats, ints, negative, positive, randn, register


@register(
    first=lambda: call(torch.tensor(0), randn(3)), second=lambda: call(torch.tensor(1), randn(3))
)
def list_indexed_by_tensor(t: Tensor, x: Tensor) -> Tensor:
    lst = [x * 2, x - 1, x.exp()]
    return lst[t]


@register(
    front=lambda: call(floats(5, 1, 1)),
    middle=lambda: call(floats(1, 5, 1)),
    back=lambda: call(floats(1, 1, 5)),
)
def list_indexed_by_argmax(x: Tensor) -> Tensor:
    branches = [torch.sin, torch.cos, torch.tanh]
    return branches[int(x.argmax())](x)


@register(
    known=lambda: call(ints(3), randn(2)),
    other=lambda: call(ints(7), randn(2)),
    missing=lambda: call(ints(5), randn(2)),
)
def dict_keyed_by_traced_int(key: Tensor, x: Tensor) -> Tensor:
    table = {3: x.abs(), 7: x.square()}
    return table.get(key.item(), x)


@register(
    diagonal=lambda: call(ints(1, 1), randn(2)),
    off=lambda: call(ints(0, 1), randn(2)),
    absent=lambda: call(ints(5, 5), randn(2)),
)
def dict_keyed_by_tuple(key: Tensor, x: Tensor) -> Tensor:
    table = {(1, 1): 2.0, (0, 1): -1.0}
    pair = tuple(key.tolist())
    return x * table[pair] if pair in table else x


@register(
    inner=lambda: call(ints(1, 3)), all=lambda: call(ints(0, 4)), empty=lambda: call(ints(2, 2))
)
class ListSlicedByTracedInts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2) for _ in range(4)]
        self.owned = nn.ModuleList(self.layers)

    def forward(self, bounds: Tensor) -> Tensor:
        start, stop = int(bounds[0]), int(bounds[1])
        x = torch.ones(1, 2)
        for layer in self.layers[start:stop]:
            x = layer(x).relu()
        return x


@register(
    prefix=lambda: call(randn(6), ints(0, 2)),
    suffix=lambda: call(randn(6), ints(-3, 6)),
    empty=lambda: call(randn(6), ints(4, 4)),
)
def tensor_sliced_by_traced_ints(x: Tensor, bounds: Tensor) -> Tensor:
    start, stop = bounds.tolist()
    part = x[start:stop]
    if start < 0:
        return part.flip(0)
    return part.mean() if len(part) else x.sum()


@register(
    none=lambda: call(negative(5)), some=lambda: call(randn(5)), all=lambda: call(positive(5))
)
def boolean_mask_length(x: Tensor) -> Tensor:
    kept = x[x > 0]
    if kept.numel() == 0:
        return x
    return kept / kept.sum() if len(kept) < len(x) else kept


@register(
    none=lambda: call(torch.zeros(2, 2)),
    corner=lambda: call(torch.eye(2)),
    full=lambda: call(torch.ones(2, 2)),
)
def nonzero_coordinates(x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for i, j in x.nonzero().tolist():
        total = total + x[i, j] * (10 * i + j + 1)
    return total


@register(
    one=lambda: call(ints(4, 4, 4)),
    three=lambda: call(ints(1, 2, 3)),
    two=lambda: call(ints(1, 2, 1)),
)
def unique_values(x: Tensor) -> Tensor:
    values, counts = x.unique(return_counts=True)
    if len(values) == 1:
        return values
    return values[counts == counts.max()]


@register(hit=lambda: call(floats(0, 3, 0)), miss=lambda: call(floats(0, 0, 0)))
def where_indices(x: Tensor) -> Tensor:
    (index,) = torch.where(x > 1)
    return x[index[0] :] if index.numel() else x


@register(two=lambda: call(randn(5), ints(2, 3)), three=lambda: call(randn(5), ints(1, 1, 3)))
def split_by_traced_sizes(x: Tensor, sizes: Tensor) -> Tensor:
    return torch.stack([part.logsumexp(0) for part in x.split(sizes.tolist())])


@register(one=lambda: call(randn(5), ints(1)), three=lambda: call(randn(5), ints(3)))
def topk_of_traced_k(x: Tensor, k: Tensor) -> Tensor:
    n = k.item()
    values = x.topk(n).values
    return values if n == 1 else values.diff()


@register(early=lambda: call(randn(6), ints(1, 2)), late=lambda: call(randn(6), ints(4, 1)))
def narrow_by_traced_ints(x: Tensor, where: Tensor) -> Tensor:
    start, length = (int(v) for v in where)
    part = x.narrow(0, start, length)
    return part.cumsum(0) if start < 3 else part.flip(0)


@register(plain=lambda: call(ints(1, 2), randn(2)), zero=lambda: call(ints(0, 3), randn(2)))
def repeat_interleave_by_traced_counts(counts: Tensor, x: Tensor) -> Tensor:
    y = x.repeat_interleave(counts)
    return y[1:] if counts[0] > 0 else y


@register(three=lambda: call(ints(0, 2)), five=lambda: call(ints(4, 1, 3)))
def one_hot_of_traced_width(x: Tensor) -> Tensor:
    width = int(x.max()) + 1
    encoded = F.one_hot(x, num_classes=width).float()
    return encoded.sum(0) if width > 3 else encoded


@register(balanced=lambda: call(ints(0, 1, 2)), skewed=lambda: call(ints(2, 2, 2)))
def bincount_loop(x: Tensor) -> Tensor:
    out = []
    for value, count in enumerate(x.bincount().tolist()):
        if count:
            out.append(torch.full((count,), float(value)))
    return torch.cat(out)


@register(
    positive=lambda: call(ints(1), randn(4, 2)),
    negative=lambda: call(ints(-1), randn(4, 2)),
    swap=lambda: call(ints(3), randn(4, 2)),
)
def row_at_traced_index(i: Tensor, x: Tensor) -> Tensor:
    n = i.item()
    row = x[n]
    if n < 0:
        return row
    return row + x[-n - 1] if n < 2 else row - x[n // 2]


@register(
    loop=lambda: call(ints(1, 2, 0)),
    chain=lambda: call(ints(1, 2, 3, 3)),
    fixed=lambda: call(ints(0, 0, 0)),
)
def pointer_chasing(succ: Tensor) -> list[int]:
    seen, node = [], 0
    while node not in seen:
        seen.append(node)
        node = succ[node].item()
    return [*seen, node]


@register(sorted=lambda: call(floats(1, 2, 3)), unsorted=lambda: call(floats(2, 3, 1)))
def gather_after_argsort(x: Tensor) -> Tensor:
    order = x.argsort()
    if torch.equal(order, torch.arange(len(x))):
        return x
    return x.gather(0, order) * order


@register(
    ellipsis=lambda: call(randn(2, 3, 4), ...), slice=lambda: call(randn(2, 3, 4), slice(0, 1))
)
def index_given_as_argument(x: Tensor, index: object) -> Tensor:
    return x[index, 0] if index is ... else x[index].sum(0)
