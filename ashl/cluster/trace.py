"""A recorded trace: speeds and bandwidths of the workers as they were over time, from a CSV file.

Its first line names the columns: `time_s`, the moment from which on a line holds; `worker`, or
empty for all of them; and of `compute` and `link` (slowdown factors), `step_s` (seconds of a step)
and `mbit_s` (the bandwidth of the worker's link) those that were recorded. An empty cell changes
nothing. What the last line says holds until the end. A trace becomes `cluster.events`, so that a
plan holds all of it.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from ashl.errors import UsageError

FACTORS = {"compute": "compute", "step_s": "compute", "link": "link", "mbit_s": "link"}
COLUMNS = ("time_s", "worker", *FACTORS)


def with_trace_events(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster's spec with its trace among its events. Raises UsageError for a file that is no
    trace of it.
    """
    path = spec.get("trace")
    cluster = dict(spec)
    if path is None:
        return cluster
    name = f"cluster.trace={path}"
    try:
        with open(Path(str(path)).expanduser(), encoding="utf-8-sig", newline="") as file:
            events = list(read_events(csv.DictReader(file, strict=True), cluster, name))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no CSV text ({error})"
        raise UsageError(f"{name} cannot be read: {reason}") from error
    return {**cluster, "trace": None, "events": [*cluster["events"], *events]}


def read_events(
    lines: csv.DictReader, cluster: Mapping[str, Any], name: str
) -> Iterator[dict[str, Any]]:
    """Each line's events. Raises UsageError, naming the line."""
    columns = lines.fieldnames or ()
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown or "time_s" not in columns or not set(FACTORS) & set(columns):
        found = f"it has {shorten(', '.join(map(repr, columns)), 80)}" if columns else "it is empty"
        raise UsageError(
            f"{name}: the first line names the columns, time_s and any of {', '.join(COLUMNS[1:])},"
            f" and {found}"
        )
    n, units = (
        len(cluster["compute"]),
        {"step_s": cluster.get("step_s"), "mbit_s": cluster.get("bandwidth_mbit_s")},
    )
    for column, unit in units.items():
        if column in columns and unit is None:
            key = "step_s" if column == "step_s" else "bandwidth_mbit_s"
            raise UsageError(
                f"{name} has {column}, and cluster.{key}, which is factor 1, is not declared;"
                " declare it"
            )
    for line in lines:
        at = f"{name}, line {lines.line_num}"
        if None in line or None in line.values():
            raise UsageError(
                f"{at} has other columns than the first line; give {len(columns)} cells"
            )
        time_s = number(line["time_s"], "time_s", at)
        factors: dict[str, float] = {}
        for column in columns:
            if column in FACTORS and line[column].strip():
                value = number(line[column], column, at)
                if value <= 0:
                    raise UsageError(
                        f"{at}: {column}={value:g} is no factor; give a positive number, and"
                        " cluster.events with link_down for a link that is down"
                    )
                unit = units.get(column)
                factors[FACTORS[column]] = (
                    value if unit is None else value / unit if column == "step_s" else unit / value
                )
        for worker in workers(line.get("worker", ""), n, at) if factors else ():
            yield {"time_s": time_s, "worker": worker, **factors}


def workers(text: str, n: int, at: str) -> range:
    """Whom a line is about."""
    if not text.strip():
        return range(n)
    if not (rank := text.strip()).isdecimal() or len(rank) > len(str(n)) or int(rank) >= n:
        raise UsageError(
            f"{at}: worker={rank[:20]} is none of the workers 0 to {n - 1}; leave it empty for all"
        )
    return range(int(rank), int(rank) + 1)


def number(text: str, column: str, at: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (column == "time_s" and value < 0):
        raise UsageError(
            f"{at}: {column}={text.strip() or '(nothing)'} is no number that can be; mend the line"
        )
    return value
