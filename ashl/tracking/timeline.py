"""Convert a run to a timeline in Chrome's trace format, for Perfetto (ui.perfetto.dev).

One track per rank; a round is a slice around its spans (compute, compress, push, wait, pull). If a
gradient travels in parts, further tracks have the parts of each step and their messages. The bytes
are a pure function of the events: no host times, no file name and no date, so that equal runs have
equal traces.
"""

import gzip
import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ashl.tracking import jsonl

# Chrome's own names of colours, chosen so that waiting is visible on every track.
COLOR = {
    "compute": "good",
    "compress": "yellow",
    "push": "thread_state_iowait",
    "pull": "thread_state_runnable",
    "wait": "terrible",
    "down": "black",
}
ROUND_ARGS = ("stage", "staleness", "loss")
LINES = ("", "parts", "messages")  # tracks of a rank, one below the other
# Distance of the track numbers of a rank's tracks: larger than any number of ranks.
ASIDE = 1_000_000


def write(
    events: Path, trace: Path, num_workers: int | None = None, end_s: float | None = None
) -> None:
    """Convert `events` (JSONL) to `trace` (gzipped JSON), as a whole or not at all.

    Args: ranks from num_workers on are servers; end_s cuts off what workers recorded after the end
    of the run, before they were notified of it.
    Raises: OSError.
    """
    with (
        jsonl.replacing(trace) as raw,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="") as text,
    ):
        text.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        encode = json.JSONEncoder(separators=(",", ":")).encode
        for index, entry in enumerate(entries(events, num_workers, end_s)):
            text.write((",\n" if index else "") + encode(entry))
        text.write("\n]}\n")


def entries(
    events: Path, num_workers: int | None = None, end_s: float | None = None
) -> Iterator[dict]:
    """Yield the entries of the trace, times in microseconds, each track's name ahead of its first
    slice.
    """
    named = set[tuple[int, str]]()
    failed_s = dict[int, float]()  # by rank: time of its latest failure, inf once it has rejoined
    end_s = math.inf if end_s is None else end_s
    for record in jsonl.read(events):
        rank = record.get("rank") or 0
        server = num_workers is not None and rank >= num_workers
        for line, what in enumerate(LINES):
            if (not what or record.get(what)) and (rank, what) not in named:
                named.add((rank, what))
                owner = "server" if server else f"worker {rank}"
                yield from name_track(rank, line, f"{owner} {what}".rstrip())
        if record.get("kind") == "round":
            yield from round_entries(record, rank, end_s)
            continue
        if record.get("kind") in ("worker_failed", "worker_rejoined"):
            failed_s[rank] = record["time_s"] if record["kind"] == "worker_failed" else math.inf
        yield event_entry(record, rank, end_s)
    for rank, since_s in failed_s.items():
        if since_s < end_s < math.inf:
            yield {"name": "down", "cname": COLOR["down"]} | _slice(rank, since_s, end_s)


def name_track(rank: int, line: int, name: str) -> Iterator[dict]:
    """Yield the entries that give a track its name and its position."""
    track = {"ph": "M", "pid": 0, "tid": rank + ASIDE * line}
    yield track | {"name": "thread_name", "args": {"name": name}}
    yield track | {"name": "thread_sort_index", "args": {"sort_index": len(LINES) * rank + line}}


def round_entries(record: Mapping[str, Any], rank: int, end_s: float) -> Iterator[dict]:
    """Yield the slices of a round, of its spans, parts and messages, as far as `end_s`."""
    if record["start_s"] >= end_s:
        return
    args = {key: record[key] for key in ROUND_ARGS if record.get(key) is not None}
    name = f"round {record.get('round')}"
    own = _slice(rank, record["start_s"], min(record["end_s"], end_s))
    yield {"name": name, "args": args} | own
    for kind, first_s, last_s in record.get("spans") or ():
        if first_s < end_s:
            span = _slice(rank, first_s, min(last_s, end_s))
            yield {"name": kind, "cname": COLOR.get(kind, "grey")} | span
    tracks = ((1, "part", parts_of(record)), (2, "message", record.get("messages") or ()))
    for line, what, spans in tracks:
        for k, (first_s, last_s) in enumerate(spans):
            if first_s < end_s:
                span = _slice(rank + ASIDE * line, first_s, min(last_s, end_s))
                yield {"name": f"{what} {k}"} | span


def event_entry(record: Mapping[str, Any], rank: int, end_s: float) -> dict:
    """Return the mark of an event that is no round, at the latest at `end_s`."""
    times = (record.get(key) for key in ("time_s", "end_s", "start_s"))
    at_s = min(next((time_s for time_s in times if time_s is not None), 0.0), end_s)
    args = {key: value for key, value in record.items() if key not in ("kind", "rank", "spans")}
    entry = {"ph": "i", "s": "t", "pid": 0, "tid": rank, "ts": round(at_s * 1e9) / 1000}
    return {"name": record.get("kind", "event"), "args": args} | entry


def parts_of(record: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Yield start and end of each part of a round's steps.

    A part starts at the end of the part before, or at the start of the computation.
    """
    begun = [first_s for kind, first_s, _ in record.get("spans") or () if kind == "compute"]
    start_s = -math.inf
    for ready_s in record.get("parts") or ():
        start_s = max([start_s, *(at_s for at_s in begun if at_s < ready_s)])
        if math.isfinite(start_s):
            yield start_s, ready_s
        start_s = ready_s


def _slice(rank: int, start_s: float, end_s: float) -> dict:
    # Both ends are rounded to nanoseconds before the subtraction, so that neighbours touch and do
    # not overlap.
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }
