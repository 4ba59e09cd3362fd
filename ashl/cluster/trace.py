"""Recorded traces: speeds and bandwidths of the workers over time, from a CSV file.

The first line names the columns. `time_s` is the moment from which a line holds; `worker` is a
rank, or empty for all workers. At least one of `compute` and `link` (slowdown factors), `step_s`
(seconds of a step) and `mbit_s` (bandwidth of the worker's link) follows. An empty cell changes
nothing. The last line holds until the end. A trace is converted to `cluster.events`, so that a plan
contains all of it.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from textwrap import shorten
from typing import Any

from ashl.config.override import path_of
from ashl.errors import UsageError

FACTORS = {"compute": "compute", "step_s": "compute", "link": "link", "mbit_s": "link"}
COLUMNS = ("time_s", "worker", *FACTORS)


def with_trace_events(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cluster's spec with its trace converted to events.

    Raises: UsageError if the file is not a trace of this cluster.
    """
    path = spec.get("trace")
    cluster = dict(spec)
    if path is None:
        return cluster
    name = f"cluster.trace={path}"
    try:
        with open(path_of(str(path)), encoding="utf-8-sig", newline="") as file:
            events = list(read_events(csv.DictReader(file, strict=True), cluster, name))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no CSV text ({error})"
        raise UsageError(f"{name} cannot be read: {reason}") from error
    return {**cluster, "trace": None, "events": [*cluster["events"], *events]}


def read_events(
    lines: csv.DictReader, cluster: Mapping[str, Any], name: str
) -> Iterator[dict[str, Any]]:
    """Yield the events of each line.

    Raises: UsageError, naming the line.
    """
    columns = lines.fieldnames or ()
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown or "time_s" not in columns or not set(FACTORS) & set(columns):
        found = f"it has {shorten(', '.join(map(repr, columns)), 80)}" if columns else "it is empty"
        raise UsageError(
            f"{name}: the first line names the columns, time_s and any of {', '.join(COLUMNS[1:])},"
            f" and {found}"
        )
    n = len(cluster["compute"])
    units = {"step_s": cluster.get("step_s"), "mbit_s": cluster.get("bandwidth_mbit_s")}
    for column, unit in units.items():
        if column in columns and unit is None:
            key = "step_s" if column == "step_s" else "bandwidth_mbit_s"
            raise UsageError(
                f"{name}: column {column} needs cluster.{key} as its factor 1, which is not"
                f" declared; set cluster.{key}"
            )
    for line in lines:
        at = f"{name}, line {lines.line_num}"
        if None in line or None in line.values():
            raise UsageError(
                f"{at}: the number of cells differs from the first line; give {len(columns)} cells"
            )
        time_s = parse_number(line["time_s"], "time_s", at)
        factors: dict[str, float] = {}
        for column in columns:
            if column in FACTORS and line[column].strip():
                value = parse_number(line[column], column, at)
                if value <= 0:
                    raise UsageError(
                        f"{at}: {column}={value:g} is not positive; give a positive number, and"
                        " cluster.events with link_down for a link that is down"
                    )
                unit = units.get(column)
                factors[FACTORS[column]] = (
                    value if unit is None else value / unit if column == "step_s" else unit / value
                )
        for worker in parse_workers(line.get("worker", ""), n, at) if factors else ():
            yield {"time_s": time_s, "worker": worker, **factors}


def parse_workers(text: str, n: int, at: str) -> range:
    """Return the workers of a line. Raises: UsageError."""
    if not text.strip():
        return range(n)
    if not (rank := text.strip()).isdecimal() or len(rank) > len(str(n)) or int(rank) >= n:
        raise UsageError(
            f"{at}: worker={rank[:20]} is not one of the workers 0 to {n - 1}; take one of them, or"
            " leave it empty for all"
        )
    return range(int(rank), int(rank) + 1)


def parse_number(text: str, column: str, at: str) -> float:
    """Return a cell as a finite number. Raises: UsageError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (column == "time_s" and value < 0):
        raise UsageError(
            f"{at}: {column}={text.strip() or '(nothing)'} is not a valid number; correct the line"
        )
    return value
