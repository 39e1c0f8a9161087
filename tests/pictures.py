"""What holds for every picture, whatever it shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from bendtrace.show.canvas import Canvas, Caption, Mark, Marks


def flat(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Yield marks, those in groups included."""
    for mark in marks:
        if isinstance(mark, Marks):
            yield from flat(mark.marks)
        else:
            yield mark


def apart(canvas: Canvas) -> list[str]:
    """Check that no text lies over another, or outside; return them in order."""
    texts = [mark for mark in flat(canvas.marks) if isinstance(mark, Caption)]
    assert texts
    places = []
    for text in texts:
        left = text.x - (text.width / 2 if text.centred else 0)
        places.append((left, text.y - 0.75 * text.size, left + text.width, text.y))
    for (x, y, right, low), (x2, y2, right2, low2) in combinations(places, 2):
        assert right <= x2 or right2 <= x or low <= y2 or low2 <= y
    for x, y, right, low in places:
        assert x >= 0
        assert y >= 0
        assert right <= canvas.width
        assert low <= canvas.height
    return [text.text for text in texts]
