"""Aligning two sequences of keys: what is the same, in the same order."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

__all__ = ["align", "increasing", "match"]

Pair = tuple[int, int]

# Up to so many cells a stretch without anchors is compared in full.
_CELLS = 40_000
# Beyond, a key is told apart by so many keys that follow it.
_COMPANY = (2, 4, 8, 16, 32)
_DEPTH = 32


def match(
    a: Sequence[Sequence[Hashable]], b: Sequence[Sequence[Hashable]], single: int = 0
) -> dict[int, int]:
    """Pair the items of two sequences, by keys that are weaker in each round.

    In the first round a key that is unique on both sides makes a pair wherever it stands. In
    those that follow, the items left over between two pairs are aligned in their order. An item
    whose key is None sits a round out.

    Args:
        a: for each round, the key of each item of one sequence.
        b: the same for the other.
        single: so many of the last rounds pair only what is left over once on either side.

    Returns:
        For positions in `a` their partner's in `b`.

    Example:
        >>> match([["x", "f", "y"], [0, 1, 2]], [["new", "x", "g", "y"], [9, 0, 1, 2]])
        {0: 1, 2: 3, 1: 2}
    """
    partners = dict(_unique_pairs(a[0], b[0]))
    for round_, (keys_a, keys_b) in enumerate(zip(a, b, strict=True)):
        only_single = round_ >= len(a) - single
        taken = set(partners.values())
        anchors = increasing(sorted(partners.items()))
        for part_a, part_b in _gaps(anchors, len(keys_a), len(keys_b)):
            free_a = [i for i in part_a if i not in partners and keys_a[i] is not None]
            free_b = [j for j in part_b if j not in taken and keys_b[j] is not None]
            if not free_a or not free_b:
                continue
            inner_a, inner_b = [keys_a[i] for i in free_a], [keys_b[j] for j in free_b]
            found = (
                increasing(_unique_pairs(inner_a, inner_b))
                if only_single
                else align(inner_a, inner_b)
            )
            partners.update((free_a[i], free_b[j]) for i, j in found)
    return partners


def align(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """Pair equal keys of two sequences, keeping their order.

    Keys that are unique on both sides are anchors (the patience method); what lies between
    two anchors is aligned in the same way, and short stretches without any are compared in full.
    The time is about linear in the length of the sequences.

    Example:
        >>> align("abcab", "xabab")
        [(0, 1), (1, 2), (3, 3), (4, 4)]
    """
    pairs: list[Pair] = []
    stretches = [(0, len(a), 0, len(b), 0)]
    while stretches:
        a0, a1, b0, b1, depth = stretches.pop()
        while a0 < a1 and b0 < b1 and a[a0] == b[b0]:
            pairs.append((a0, b0))
            a0, b0 = a0 + 1, b0 + 1
        while a0 < a1 and b0 < b1 and a[a1 - 1] == b[b1 - 1]:
            a1, b1 = a1 - 1, b1 - 1
            pairs.append((a1, b1))
        if a0 == a1 or b0 == b1:
            continue
        part_a, part_b = a[a0:a1], b[b0:b1]
        anchors = increasing(_unique_pairs(part_a, part_b))
        if not anchors and len(part_a) * len(part_b) <= _CELLS:
            pairs += [(a0 + i, b0 + j) for i, j in _longest_common(part_a, part_b)]
            continue
        if not anchors and depth < _DEPTH:
            anchors = _by_company(part_a, part_b)
        pairs += [(a0 + i, b0 + j) for i, j in anchors]
        if anchors:
            stretches += [
                (a0 + gap_a.start, a0 + gap_a.stop, b0 + gap_b.start, b0 + gap_b.stop, depth + 1)
                for gap_a, gap_b in _gaps(anchors, len(part_a), len(part_b))
            ]
    return sorted(pairs)


def increasing(pairs: Sequence[Pair]) -> list[Pair]:
    """Return a longest choice of pairs that goes up on both sides.

    Args:
        pairs: sorted by their first items.
    """
    ends: list[int] = []  # the smallest second item that ends a choice of each length
    last: list[int] = []  # and which pair that is
    before: list[int] = []
    for number, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        last[length : length + 1] = [number]
    chosen: list[Pair] = []
    number = last[-1] if last else -1
    while number >= 0:
        chosen.append(pairs[number])
        number = before[number]
    return chosen[::-1]


def _unique_pairs(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    often_a, often_b = Counter(a), Counter(b)
    places = {key: j for j, key in enumerate(b)}
    return [
        (i, places[key])
        for i, key in enumerate(a)
        if key is not None and often_a[key] == 1 and often_b[key] == 1
    ]


def _by_company(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """Return anchors of two long stretches in which no key is unique on both sides."""
    for length in _COMPANY:
        anchors = increasing(_unique_pairs(_runs(a, length), _runs(b, length)))
        if anchors:
            return anchors
    # All much the same: what comes the n-th time is what comes the n-th time over there.
    return increasing(_unique_pairs(_numbered(a), _numbered(b)))


def _runs(keys: Sequence[Hashable], length: int) -> list[Hashable]:
    return [tuple(keys[i : i + length]) for i in range(len(keys) - length + 1)]


def _numbered(keys: Sequence[Hashable]) -> list[Hashable]:
    seen: Counter[Hashable] = Counter()
    numbered: list[Hashable] = []
    for key in keys:
        numbered.append((key, seen[key]))
        seen[key] += 1
    return numbered


def _gaps(anchors: Sequence[Pair], length_a: int, length_b: int) -> Iterator[tuple[range, range]]:
    i, j = 0, 0
    for next_i, next_j in [*anchors, (length_a, length_b)]:
        if next_i > i and next_j > j:
            yield range(i, next_i), range(j, next_j)
        i, j = next_i + 1, next_j + 1


def _longest_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """Return a longest common subsequence; of several, the one that begins earliest."""
    lengths = [[0] * (len(b) + 1)]
    for key in reversed(a):
        row, below = [0] * (len(b) + 1), lengths[-1]
        for j in range(len(b) - 1, -1, -1):
            row[j] = below[j + 1] + 1 if key == b[j] else max(below[j], row[j + 1])
        lengths.append(row)
    lengths.reverse()
    pairs: list[Pair] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs
