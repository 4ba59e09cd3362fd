"""How `list` and `doctor` print: plain columns, wide in a pipe so that grep finds whole lines."""

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FULL = 110  # characters of a docstring's line that goes on below
COLUMN = re.compile(
    r" +\S+( \S+)* {2,}(?=\S)"
)  # of a list within one: what comes before the second column


def console() -> "Console":
    """As wide as the terminal or as COLUMNS says; else, in a pipe, so wide that grep finds whole
    lines.
    """
    from rich.console import Console

    known = "COLUMNS" in os.environ or (sys.stdout and sys.stdout.isatty())
    return Console(highlight=False, width=None if known else 200)


def folded(text: str) -> str:
    """The text with no line wider than the screen; what goes on is set in as it was."""
    width = console().width
    whole = text.split("\n")
    if max(map(len, whole)) <= width:
        return text
    lines: list[str] = []
    insets: list[int] = []  # where each goes on: below its beginning, or below its second column
    for before, line in zip(["", *whole], whole, strict=False):
        words, inset = line.split(), len(line) - len(line.lstrip())
        went_on = words and not words[0].endswith(":") and len(before) + len(words[0]) >= FULL
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


def show(title: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a title and rows of two or more columns, of which the first is set off and the last may
    wrap.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)  # a key is one word, however narrow the screen
    for row in rows:
        table.add_row(Text(row[0], style="bold cyan"), *map(Text, row[1:]))
    out = console()
    if title:
        out.print(Text(title, style="bold"))
    out.print(table)
