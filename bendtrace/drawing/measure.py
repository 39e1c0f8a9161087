"""How wide text is, before anything is drawn."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

__all__ = ["MONO", "SANS", "cut", "printable", "width"]

SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# Advance widths of Helvetica, in thousandths of the font size, from the space (32) on. The fonts
# that stand in for it elsewhere (Arial, Liberation Sans) have the same.
_HELVETICA = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 "
    "556 556 556 556 556 556 556 556 556 556 278 278 584 584 584 556 "
    "1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 "
    "667 778 722 667 611 722 667 944 667 667 611 278 278 278 469 556 "
    "333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 "
    "556 556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_WIDTHS = {chr(32 + i): int(w) / 1000 for i, w in enumerate(_HELVETICA.split())}
_WIDTHS |= {"\N{MULTIPLICATION SIGN}": 0.584, "\N{MIDDLE DOT}": 0.333}
_MONO = 0.602
_BOLD = 1.06
_OTHER = 0.75  # letters that the table does not know; full-width ones take 1.05


def width(text: str, size: float, *, mono: bool = False, bold: bool = False) -> float:
    """Return the width of a line of text.

    Args:
        text: the line.
        size: font size, in pixels.
        mono: whether it is set in a monospace font.
        bold: whether it is set in bold.

    Returns:
        Its width in pixels.

    Example:
        >>> width("conv2d", 10)
        32.24
    """
    return round(_ems(text, mono) * size * (_BOLD if bold and not mono else 1.0), 2)


@lru_cache(maxsize=20_000)
def _ems(text: str, mono: bool) -> float:
    total = 0.0
    for letter in text:
        if unicodedata.combining(letter):
            continue
        if unicodedata.east_asian_width(letter) in "WF":
            total += 2 * _MONO if mono else 1.05
        else:
            total += _MONO if mono else _WIDTHS.get(letter, _OTHER)
    return total


def printable(text: str) -> str:
    """Return a text on one line: white space folded, control characters replaced."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def cut(text: str, most: int) -> str:
    """Return a text on one line, shortened in its middle to so many letters.

    Names differ at their ends, and expressions at both: so the middle goes.

    Example:
        >>> cut("encoder.layers.0.attention", 16)
        'encoder.…tention'
    """
    text = printable(text)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - tail :]}"
