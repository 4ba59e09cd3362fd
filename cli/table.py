"""Plain columns for `list` and `doctor`; in a pipe they are wide, so that grep finds whole
lines.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console() -> "Console":
    """Return a console with the width of the terminal or of COLUMNS, or 200 columns in a pipe."""
    from rich.console import Console

    known = "COLUMNS" in os.environ or (sys.stdout and sys.stdout.isatty())
    return Console(highlight=False, width=None if known else 200)


def show_rows(title: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a title and rows of two or more columns; the first is bold, and the last one may
    wrap.
    """
    from rich.table import Table
    from rich.text import Text

    out = console()
    if title:
        out.print(Text(title, style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)  # a key is one word
    for first, *others in rows:
        table.add_row(Text(first, style="bold cyan"), *map(Text, others))
    out.print(table)
