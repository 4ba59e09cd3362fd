"""Comparison and output of the benchmarks: interleaved in one run, so that other load affects all
variants equally.
"""

import csv
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


def alternate(contestants: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Return the results of each variant in each turn.

    Each turn begins with another variant, and every other turn goes backwards, so no variant is
    always first or in the middle.
    """
    results: dict[str, list[float]] = {name: [] for name in contestants}
    names = sorted(contestants)
    for turn in range(turns):
        first = turn // 2 % len(names)
        order = names[first:] + names[:first]
        for name in reversed(order) if turn % 2 else order:
            results[name].append(contestants[name]())
    return results


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median over the turns, with the lower and upper quartile."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def thousands(values: Sequence[float]) -> str:
    """The median."""
    return f"{statistics.median(values):,.0f}"


def write_csv(file: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to a file, in the form that the results pages read."""
    with file.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([columns, *rows])


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, width=110)
    console.print(table)
    threads = torch.get_num_threads()
    console.print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, {threads} of its threads in each"
        " process"
    )
