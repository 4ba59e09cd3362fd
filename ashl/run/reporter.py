"""A rank's line to the monitor: records, heartbeats and snapshots out, the order to stop in.

One thread sends what has gathered a few times a second, through the job's key-value store, so that the experiment is
not disturbed and no message of the algorithm ever waits behind a record. Records are JSON; a snapshot is a file of raw
float32 next to the run's records, which the monitor evaluates and removes.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

EVERY_S = 0.2
CHUNK = 1_000_000  # characters in one item of the store, which refuses more than 8 MB
PENDING = 4  # snapshots of a rank that wait to be evaluated; beyond that, one that is not the last is skipped
RECORDS, STOPPING, SCORES = "records", "stopping", "scores"


class Reporter:
    """The observer of a rank in a process of its own."""

    def __init__(self, store: dist.Store, rank: int, run_dir: Path, rounds: bool) -> None:
        self.stopping: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.rounds = rounds
        self.skipped = 0
        self._store, self._dir = store, run_dir
        self._out: deque[tuple[dict, Any]] = deque()
        self._count = 0
        self._flush_lock = threading.Lock()
        self.beat: Callable[[], dict] = lambda: {"kind": "alive", "rank": rank}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="reporter")
        self._thread.start()

    def emit(self, record: dict) -> None:
        self._out.append((record, None))

    def snapshot(self, record: dict, params: Any) -> None:
        self._out.append(({"kind": "snapshot", **record}, params))

    def close(self) -> None:
        """Everything is sent when this returns."""
        self._end.set()
        self._thread.join()
        self._flush()

    def _loop(self) -> None:
        while not self._end.wait(EVERY_S):
            self._flush()

    def _flush(self) -> None:
        with self._flush_lock:
            lines = [json.dumps(self.beat())]
            size = 0
            while self._out:
                record, params = self._out.popleft()
                if params is not None and not self._write(record, params):
                    continue
                lines.append(json.dumps(record))
                size += len(lines[-1])
                if size > CHUNK:
                    self._push(lines)
                    lines, size = [], 0
            self._push(lines)
            if self.stopping is None and self._store.check([STOPPING]):
                self.stopping = self._store.get(STOPPING).decode()
            if self._store.check([SCORES]):
                self.scores = json.loads(self._store.get(SCORES))

    def _push(self, lines: list[str]) -> None:
        if lines:
            self._store.queue_push(RECORDS, "\n".join(lines))

    def _write(self, record: dict, params: Any) -> bool:
        """Put a snapshot where the monitor finds it; False when it has not kept up and this one can be spared."""
        waiting = list(self._dir.glob(f".snapshot-{record['rank']}-*"))
        if not record.get("final") and len(waiting) >= PENDING:
            self.skipped += 1
            return False
        self._count += 1
        record["file"] = f".snapshot-{record['rank']}-{self._count}.f32"
        path = self._dir / record["file"]
        partial = path.with_suffix(".part")
        params.numpy().tofile(partial)
        partial.rename(path)
        return True
