"""The run as a timeline in Chrome's trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One track per rank; a round is a slice around its spans (compute, compress, push, wait, pull). The bytes are a pure
function of the events: no host times, no file name and no date, so equal runs have equal traces.
"""

import gzip
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from ashl.tracking import jsonl

# Chrome's own names of colours, so that waiting stands out on every track.
COLOR = {
    "compute": "good",
    "compress": "yellow",
    "push": "thread_state_iowait",
    "pull": "thread_state_runnable",
    "wait": "terrible",
}
ROUND_ARGS = ("stage", "staleness", "loss")


def write(events: Path, trace: Path, num_workers: int | None = None, end_s: float | None = None) -> None:
    """Turn `events` (JSONL) into `trace` (gzipped JSON), whole or not at all. Ranks >= `num_workers` are servers; what
    lies past `end_s`, when the run had ended and not every worker knew it yet, is cut off. Raises OSError.
    """
    part = trace.with_name(trace.name + ".part")
    try:
        with (
            open(part, "wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="utf-8", newline="") as text,
        ):
            text.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            encode = json.JSONEncoder(separators=(",", ":")).encode
            for index, entry in enumerate(entries(events, num_workers, end_s)):
                text.write((",\n" if index else "") + encode(entry))
            text.write("\n]}\n")
        os.replace(part, trace)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def entries(events: Path, num_workers: int | None = None, end_s: float | None = None) -> Iterator[dict]:
    """Yield the entries of the trace, times in microseconds, each track's name ahead of its first slice."""
    named, end_s = set(), math.inf if end_s is None else end_s
    for record in jsonl.read(events):
        rank = record.get("rank") or 0
        if rank not in named:
            named.add(rank)
            name = "server" if num_workers is not None and rank >= num_workers else f"worker {rank}"
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}
        if record.get("kind") == "round":
            if record["start_s"] >= end_s:
                continue
            args = {key: record[key] for key in ROUND_ARGS if record.get(key) is not None}
            name = f"round {record.get('round')}"
            yield {"name": name, "args": args} | _slice(rank, record["start_s"], min(record["end_s"], end_s))
            for kind, first_s, last_s in record.get("spans") or ():
                if first_s < end_s:
                    yield {"name": kind, "cname": COLOR.get(kind, "grey")} | _slice(rank, first_s, min(last_s, end_s))
        else:
            at_s = next((record[key] for key in ("time_s", "end_s", "start_s") if record.get(key) is not None), 0.0)
            at_s = min(at_s, end_s)
            args = {key: value for key, value in record.items() if key not in ("kind", "rank", "spans")}
            entry = {"ph": "i", "s": "t", "pid": 0, "tid": rank, "ts": round(at_s * 1e9) / 1000}
            yield {"name": record.get("kind", "event"), "args": args} | entry


def _slice(rank: int, start_s: float, end_s: float) -> dict:
    # Both ends are rounded to nanoseconds before the difference is taken: neighbours then touch instead of overlapping.
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {"ph": "X", "pid": 0, "tid": rank, "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
