"""Sizes and counts in human-readable form."""

from __future__ import annotations

__all__ = ["counted", "listed", "number_text", "size_text"]


def size_text(nbytes: int) -> str:
    """Return a size in bytes as text: `253.5 KB`, with 1024 bytes to the KB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KB", "MB", "GB", "TB"):
        size /= 1024
        if size < 1024 or unit == "TB":
            break
    return f"{size:.1f} {unit}"


def number_text(value: object) -> str:
    """Return a value as Python prints it, with six digits for long floats.

    Example:
        >>> number_text(0.30000001192092896), number_text(0.5), number_text("a")
        ('0.3', '0.5', "'a'")
    """
    text = repr(value)
    return f"{value:.6g}" if isinstance(value, float) and len(text) > 8 else text


def counted(number: int, noun: str) -> str:
    """Return `1 branch`, `2 branches`, `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'sh', 'ch', 'x')) else 's'}"


def listed(names: list[str], most: int = 8) -> str:
    """Return names joined by commas, with the number of omitted ones."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
