"""A long real run that a test disturbs while it runs."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from ashl.tracking import jsonl
from tests.run_folders import adds_up

# standard error of a run that an interrupt ended
INTERRUPTED = "ashl: interrupted; the records are in run, without a checkpoint to resume from\n"
LONG = [  # two workers and a server, for a minute if nobody ends it
    "-q",
    "tracking=none",
    "tracking.events=all",
    "run.dir=run",
    "model.hidden=[8]",
    "cluster.compute=[1,1.5]",
    "cluster.link=null",
    "cluster.step_s=0.005",
    "stop.seconds=60",
]
PATIENCE_S = 60.0


def wait_for(what: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def under_way(run: Path) -> bool:
    """Return True if the run has recorded rounds."""
    return (run / "events.jsonl").is_file() and (run / "events.jsonl").stat().st_size > 0


def ranks_of(run: Path) -> dict[int, int]:
    """The processes of a run by rank: each writes to its own log."""
    found = {}
    for process in psutil.process_iter():
        with suppress(OSError, ValueError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.parent == run.absolute() and log.name.startswith("rank"):
                found[int(log.stem.removeprefix("rank"))] = process.pid
    return found


def check_records(run: Path, status: str) -> dict:
    """Check that the records until then are whole."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == status
    assert any(record["kind"] == "round" for record in jsonl.read(run / "events.jsonl"))
    assert (run / "trace.json.gz").is_file()
    assert adds_up(summary)
    return summary
