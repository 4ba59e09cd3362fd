"""Write and read one rank's part of a checkpoint: its state at a safe point.

The controller (`ashl.run.checkpoints`) names the version of the model from which on each rank saves
its state, and assembles one checkpoint of all parts. In synchronous rounds no message is in flight
at a safe point, so the parts together are the whole run. A part is written by a thread, and its
record tells the controller the hash.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ashl.runtime.plain_state import from_plain, save, to_plain
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import CheckpointPartSaved
from ashl.runtime.throttle import Throttle
from ashl.runtime.transport import first_line

MANIFEST = "manifest.json"


class Due(NamedTuple):
    """A request of the controller for a checkpoint: its number, and the version of the model that
    it is to hold.
    """

    number: int
    version: int


class RankCheckpointWriter:
    """Writes one rank's state in a thread, and reports it to the controller."""

    def __init__(
        self,
        rank: int,
        put: Callable[[int, dict[str, Any]], tuple[str, int]],
        emit: Callable[[CheckpointPartSaved], None],
    ) -> None:
        """Set up the writer. `put(number, document)` stores a part and returns its hash, and the
        number of bytes that the controller has yet to write.
        """
        self._rank = rank
        self._put = put
        self._emit = emit
        self._done = -1  # number of the last saved checkpoint
        self.asked: Due | None = None  # latest request of the controller

    @property
    def wanted(self) -> Due | None:
        """Return the request that is not fulfilled yet, or None."""
        asked = self.asked
        return asked if asked is not None and asked.number > self._done else None

    def due(self, version: int) -> bool:
        """Return True if a state of this version has to be saved."""
        wanted = self.wanted
        return wanted is not None and version >= wanted.version

    def keep(self, ctx: RankContext, stage: int, state: Any, throttle: Throttle) -> bool:
        """Save the state at a safe point if a request asks for it; return whether it is saved."""
        wanted = self.wanted
        if wanted is None or state is None or state.version < wanted.version:
            return False
        self._done, number, time_ns = wanted.number, wanted.number, ctx.now_ns
        drawn = throttle.speed.drawn(ctx.rank) if throttle.speed else 0
        document = document_of(ctx, stage, state, time_ns, drawn)
        rounds = None if ctx.counter is None else ctx.counter.progress.rounds()
        kept = CheckpointPartSaved(self._rank, number, stage, state.version, time_ns, rounds=rounds)
        # not a daemon, so the process ends after it
        threading.Thread(
            target=self._write, args=(document, kept), name="checkpoint-writer"
        ).start()
        return True

    def _write(self, document: dict[str, Any], kept: CheckpointPartSaved) -> None:
        try:
            sha256, nbytes = self._put(kept.number, document)
            self._emit(kept._replace(sha256=sha256, nbytes=nbytes))
        except (OSError, RuntimeError) as error:
            self._emit(kept._replace(error=first_line(error)))


def write_to_folder(
    run_dir: Path, rank: int, number: int, document: dict[str, Any]
) -> tuple[str, int]:
    """Write a part into the run folder, for a rank that can access it; see
    `RankCheckpointWriter`.
    """
    return write(part_of(folder_of(run_dir, number), rank), document), 0


def write(path: Path, document: dict[str, Any]) -> str:
    """Write a file in one step; return its hash. Raises as `plain_state.save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, document)
    return hash_of(path)


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_bytes(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def folder_of(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoint" / str(number)


def list_checkpoints(run_dir: Path) -> list[int]:
    """Return the numbers of all checkpoints with a manifest, oldest first."""
    found = (path.parent.name for path in run_dir.glob(f"checkpoint/*/{MANIFEST}"))
    return sorted(int(name) for name in found if name.isdigit())


def part_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's part of a checkpoint."""
    return folder / f"rank{rank}.pt"


def document_of(
    ctx: RankContext, stage: int, state: Any, time_ns: int, drawn: int
) -> dict[str, Any]:
    """Return a rank's part of a checkpoint as plain values: the state at a safe point, the
    context's counters, and `drawn`, the number of jitter draws so far.
    """
    known = {"stage": stage, "state": to_plain(state), "context": to_plain(counters_of(ctx))}
    return known | {"time_ns": time_ns, "drawn": drawn, "own": to_plain(ctx.own_state)}


class Restored(NamedTuple):
    """A saved rank: its stage and state, the counters of its context, the clock, and the number of
    jitter draws.
    """

    stage: int
    state: Any
    context: dict[str, Any]
    time_ns: int
    drawn: int
    own: Any = None  # state of its module beside the parameters


def read(file: Path | BytesIO, packages: tuple[str, ...], device: str) -> Restored:
    """Return a saved rank. States may be of classes of these packages. Nothing is unpickled."""
    document = torch.load(file, weights_only=True)
    for name in ("state", "context", "own"):
        document[name] = from_plain(document[name], packages, device)
    return Restored(**document)


# saved fields of a context, beside its time accounting
KEPT = ("steps", "staleness", "loss", "measures")


def counters_of(ctx: RankContext) -> dict[str, Any]:
    """Return the counters of a context."""
    time_accounting = {
        name: getattr(ctx.time_accounting, name) for name in ctx.time_accounting.__slots__
    }
    return {"time_accounting": time_accounting} | {name: getattr(ctx, name) for name in KEPT}


def restore_counters(ctx: RankContext, known: dict[str, Any]) -> None:
    """Set a fresh context's counters."""
    for name, value in known["time_accounting"].items():
        setattr(ctx.time_accounting, name, value)
    for name in KEPT:
        setattr(ctx, name, known[name])
