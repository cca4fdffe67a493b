"""Tables, sizes and ages for people (spec/cli.md §4.1 and §4.7)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_age", "format_size", "format_table"]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A box with an upper-case header in the middle of its columns, cells on the left; ends with a newline."""
    widths = [max(len(name), *(len(row[column]) for row in rows), 0) for column, name in enumerate(header)]

    def rule(left: str, cross: str, right: str) -> str:
        return left + cross.join("─" * (width + 2) for width in widths) + right

    def line(cells: Sequence[str]) -> str:
        return "│ " + " │ ".join(cells) + " │"

    out = [
        rule("┌", "┬", "┐"),
        line([name.upper().center(width) for name, width in zip(header, widths, strict=True)]),
        rule("├", "┼", "┤"),
        *(line([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]) for row in rows),
        rule("└", "┴", "┘"),
    ]
    return "\n".join(out) + "\n"


def format_size(length_bytes: int) -> str:
    """`18 B`, `2.3 KiB`, `128 KiB`, `1.0 GiB`."""
    if length_bytes < 1024:
        return f"{length_bytes} B"
    power = (length_bytes.bit_length() - 1) // 10
    size = length_bytes / 1024**power
    unit = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[power - 1]
    return f"{size:.1f} {unit}" if size < 10 else f"{size:.0f} {unit}"


def format_age(age_s: float) -> str:
    """`now`, `1 second ago`, `8 minutes ago`, `2 days ago`."""
    if age_s < 1:
        return "now"
    for unit, length_s in (("second", 60), ("minute", 60), ("hour", 24), ("day", 7), ("week", 1 << 40)):
        if age_s < length_s:
            count = int(age_s)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
        age_s /= length_s
    raise AssertionError("weeks have no end")
