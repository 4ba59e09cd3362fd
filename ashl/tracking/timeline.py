"""The run as a timeline in Chrome's trace format, for Perfetto (ui.perfetto.dev) and
chrome://tracing.

One track per rank; a round is a slice around its spans (compute, compress, push, wait, pull). Where
a gradient travels in parts, a track below has the parts of each step, and another one their
messages. The bytes are a pure function of the events: no host times, no file name and no date, so
equal runs have equal traces.
"""

import gzip
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ashl.tracking import jsonl

# Chrome's own names of colours, so that waiting stands out on every track.
COLOR = {
    "compute": "good",
    "compress": "yellow",
    "push": "thread_state_iowait",
    "pull": "thread_state_runnable",
    "wait": "terrible",
    "down": "black",
}
ROUND_ARGS = ("stage", "staleness", "loss")
LINES = ("", "parts", "messages")  # of a rank, one below the other
# from one line of a rank to the next, in the numbers of tracks: more than there are ranks
ASIDE = 1_000_000


def write(
    events: Path, trace: Path, num_workers: int | None = None, end_s: float | None = None
) -> None:
    """Turn `events` (JSONL) into `trace` (gzipped JSON), whole or not at all. Ranks >=
    `num_workers` are servers; what lies past `end_s`, when the run had ended and not every worker
    knew it yet, is cut off. Raises OSError.
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


def entries(
    events: Path, num_workers: int | None = None, end_s: float | None = None
) -> Iterator[dict]:
    """Yield the entries of the trace, times in microseconds, each track's name ahead of its first
    slice.
    """
    named, lost = set[tuple[int, str]](), dict[int, float]()
    end_s = math.inf if end_s is None else end_s
    for record in jsonl.read(events):
        rank = record.get("rank") or 0
        server = num_workers is not None and rank >= num_workers
        for line, what in enumerate(LINES):
            if (not what or record.get(what)) and (rank, what) not in named:
                named.add((rank, what))
                track = {"ph": "M", "pid": 0, "tid": rank + ASIDE * line}
                name = ("server" if server else f"worker {rank}") + (f" {what}" if what else "")
                yield track | {"name": "thread_name", "args": {"name": name}}
                yield track | {
                    "name": "thread_sort_index",
                    "args": {"sort_index": len(LINES) * rank + line},
                }
        if record.get("kind") == "round":
            if record["start_s"] >= end_s:
                continue
            args = {key: record[key] for key in ROUND_ARGS if record.get(key) is not None}
            name = f"round {record.get('round')}"
            yield {"name": name, "args": args} | _slice(
                rank, record["start_s"], min(record["end_s"], end_s)
            )
            for kind, first_s, last_s in record.get("spans") or ():
                if first_s < end_s:
                    yield {"name": kind, "cname": COLOR.get(kind, "grey")} | _slice(
                        rank, first_s, min(last_s, end_s)
                    )
            for line, what, spans in (
                (1, "part", parts_of(record)),
                (2, "message", record.get("messages") or ()),
            ):
                for k, (first_s, last_s) in enumerate(spans):
                    if first_s < end_s:
                        yield {"name": f"{what} {k}"} | _slice(
                            rank + ASIDE * line, first_s, min(last_s, end_s)
                        )
        else:
            if record.get("kind") in ("worker_failed", "worker_rejoined"):
                lost[rank] = record["time_s"] if record["kind"] == "worker_failed" else math.inf
            at_s = next(
                (
                    record[key]
                    for key in ("time_s", "end_s", "start_s")
                    if record.get(key) is not None
                ),
                0.0,
            )
            at_s = min(at_s, end_s)
            args = {
                key: value for key, value in record.items() if key not in ("kind", "rank", "spans")
            }
            entry = {"ph": "i", "s": "t", "pid": 0, "tid": rank, "ts": round(at_s * 1e9) / 1000}
            yield {"name": record.get("kind", "event"), "args": args} | entry
    for rank, since_s in lost.items():  # and did not come back
        if since_s < end_s < math.inf:
            yield {"name": "down", "cname": COLOR["down"]} | _slice(rank, since_s, end_s)


def parts_of(record: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """From when to when each part of a round's steps was computed: from the part before, or from
    where computing began, until it was there.
    """
    begun = [first_s for kind, first_s, _ in record.get("spans") or () if kind == "compute"]
    start_s = -math.inf
    for ready_s in record.get("parts") or ():
        start_s = max([start_s, *(at_s for at_s in begun if at_s < ready_s)])
        if math.isfinite(start_s):
            yield start_s, ready_s
        start_s = ready_s


def _slice(rank: int, start_s: float, end_s: float) -> dict:
    # Both ends are rounded to nanoseconds before the difference is taken: neighbours then touch
    # instead of overlapping.
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }
