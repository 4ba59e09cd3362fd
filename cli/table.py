"""How `list` and `doctor` print: plain columns, wide in a pipe so that grep finds whole lines."""

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console() -> "Console":
    """As wide as the terminal or as COLUMNS says; else, in a pipe, so wide that grep finds whole lines."""
    from rich.console import Console

    known = "COLUMNS" in os.environ or (sys.stdout and sys.stdout.isatty())
    return Console(highlight=False, width=None if known else 200)


def folded(text: str) -> str:
    """The text with no line wider than the screen; what goes on is set in as its line is. A paragraph that is wider is
    filled anew; what is set in, and what begins with a word and a colon, keeps its own line."""
    width = console().width
    paragraphs = ["\n".join(_filled(part)) if _wider(part, width) else part for part in text.split("\n\n")]
    lines = []
    for line in "\n\n".join(paragraphs).split("\n"):
        inset = " " * (len(line) - len(line.lstrip()))
        whole = len(line) <= width
        lines += [line] if whole else textwrap.wrap(line, width, subsequent_indent=inset, break_on_hyphens=False)
    return "\n".join(lines)


def _wider(text: str, width: int) -> bool:
    return any(len(line) > width for line in text.split("\n"))


def _filled(paragraph: str) -> list[str]:
    """Its lines, with those joined that were only broken where the source ends."""
    lines: list[str] = []
    for line in paragraph.split("\n"):
        if lines and not re.match(r"\s|[A-Z]\w*( \w+)?: |- ", line) and not lines[-1].startswith(" "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return lines


def show(title: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a title and rows of two or more columns, of which the first is set off and the last may wrap."""
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
