"""Aligned tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.terminal.style import Style, printable

_GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, style: Style | None = None) -> str:
    """Return a table with its head, without a line end at the end.

    `align` has one letter a column: "l" for text, "r" for numbers. A cell is one line: line ends and tabs become
    spaces.
    """
    cells = [[" ".join(printable(cell).split()) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    if style is not None:
        lines[0] = style.bold(lines[0])
    return "\n".join(lines)
