"""Plain columns for `list` and `doctor`; in a pipe they are wide, so that grep finds whole
lines.
"""

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FULL_LINE = 96  # characters of a docstring's line from which on it continues on the next one
NARROW_COLUMN = 40  # characters below which the last column is written below the others
# The part of a line before its second column, in a list within a docstring.
COLUMN = re.compile(r" +\S+( \S+)* {2,}(?=\S)")


def console() -> "Console":
    """Return a console with the width of the terminal or of COLUMNS, or 200 columns in a pipe."""
    from rich.console import Console

    known = "COLUMNS" in os.environ or (sys.stdout and sys.stdout.isatty())
    return Console(highlight=False, width=None if known else 200)


def wrap_text(text: str) -> str:
    """Return a text without lines wider than the screen; continuation lines keep their indent."""
    width = console().width
    whole = text.split("\n")
    if max(map(len, whole)) <= width:
        return text
    lines: list[str] = []
    insets: list[int] = []  # indent of each line's continuation: its own, or its second column
    for before, line in zip(["", *whole], whole, strict=False):
        words, inset = line.split(), len(line) - len(line.lstrip())
        went_on = words and not words[0].endswith(":") and len(before) + len(words[0]) >= FULL_LINE
        if went_on and inset == insets[-1]:
            lines[-1] += " " + line.strip()
        else:
            column = COLUMN.match(line)
            lines.append(line)
            insets.append(column.end() if column else inset)
    fill = partial(textwrap.wrap, width=width, break_on_hyphens=False)
    found = zip(lines, insets, strict=True)
    return "\n".join(
        part for line, inset in found for part in fill(line, subsequent_indent=" " * inset) or [""]
    )


def show_rows(title: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a title and rows of two or more columns; the first is bold.

    The last one may wrap. On a narrow screen it has lines of its own.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    rows, out = list(rows), console()
    if title:
        out.print(Text(title, style="bold"))
    shared = sum(max(map(len, cells)) + 2 for cells in list(zip(*rows, strict=True))[:-1])
    below = out.width - shared < NARROW_COLUMN and any(
        shared + len(row[-1]) > out.width for row in rows
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)  # a key is one word
    for row in rows:
        cells = [Text(row[0], style="bold cyan"), *map(Text, row[1:])]
        if not below:
            table.add_row(*cells)
            continue
        out.print(Text("  ").join(cells[:-1]))
        if row[-1]:
            out.print(Padding(cells[-1], (0, 0, 0, 4)))
    if not below:
        out.print(table)
