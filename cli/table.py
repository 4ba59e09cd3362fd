"""How `list` and `doctor` print: plain columns, wide in a pipe so that grep finds whole lines."""

import sys
from collections.abc import Iterable, Sequence


def show(title: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a title and rows of two or more columns, of which the first is set off and the last may wrap."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(Text(row[0], style="bold cyan"), *map(Text, row[1:]))
    console = Console(highlight=False, width=None if sys.stdout and sys.stdout.isatty() else 200)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
