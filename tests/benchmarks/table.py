"""How the benchmarks print, and how they compare: turn about in one run, so that a busy machine is unfair to all alike."""

import os
import statistics
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, width=110)
    console.print(table)
    console.print(f"{os.cpu_count()} cores, torch {torch.__version__}, one thread of torch in each process")


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the turns' ratios and their range."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def thousands(values: Sequence[float]) -> str:
    """The median."""
    return f"{statistics.median(values):,.0f}"
