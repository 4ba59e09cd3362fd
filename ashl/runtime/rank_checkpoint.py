"""Write and read the ranks' parts of a checkpoint.

At a pause for a checkpoint nothing is in flight between the ranks (`ashl.topology.ending`). So the
saved ranks, together with the monitor's state, are the whole run. In virtual time one file holds
all ranks. On processes each rank saves a part of its own in a thread, and continues at once: it
writes the part, or sends it to the controller if it does not share the run folder. The controller
(`ashl.run.checkpoints`) completes the checkpoint once it knows the hashes of all parts.

Numbers: the checkpoint of pause k in epoch e has the number e·`PAUSES` + k. All members of an epoch
agree on k, and a later epoch has greater numbers. A resumed run continues with these numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ashl.cluster.speed import Speed
from ashl.learn.learner import Learner
from ashl.runtime.effects import Save
from ashl.runtime.plain_state import decode, encode_tensors, replace_file, split_tensors
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import CheckpointPartSaved
from ashl.runtime.transport import first_line

MANIFEST = "manifest.json"
RANKS = "ranks.safetensors"  # file of all ranks, in virtual time
ABSENT = -1  # stage of a rank that has failed, or that waits to be admitted
PAUSES = 10**6  # checkpoint numbers that each epoch has
WRITE_S = 60.0  # longest wait in seconds at a pause, until the part of the previous one is written


def next_due_ns(now_ns: int, every_s: float | None) -> float:
    """Return the run time of the next checkpoint, the next multiple of `every_s`; infinity without
    checkpoints.
    """
    if every_s is None:
        return float("inf")
    every_ns = max(1, round(every_s * 1e9))
    return (now_ns // every_ns + 1) * every_ns


class RankCheckpointWriter:
    """Writes one rank's parts of checkpoints in a thread, and reports them to the controller."""

    def __init__(
        self,
        rank: int,
        run_dir: Path | None,
        emit: Callable[[CheckpointPartSaved, bytes | None], None],
        every_s: float | None,
    ) -> None:
        """Set up the writer.

        Args: run_dir, None if this process does not share the run folder with the controller, which
        then writes the part; emit, reports a part, with its bytes if the controller writes it;
        every_s, run time between two checkpoints, None = no checkpoints.
        """
        self._rank = rank
        self._run_dir = run_dir
        self._emit = emit
        self._thread: threading.Thread | None = None  # writes the latest part
        self.every_s = every_s

    def save(self, ctx: RankContext, save: Save, speed: Speed | None, number: int) -> None:
        """Save this rank at a pause: capture its state, and write it in a thread.

        It first waits until the part of the previous checkpoint is written, up to `WRITE_S`. Then
        it reports an error instead of a part. The thread shares the tensors in the host's memory
        with the state: no step changes a tensor in place.
        """
        previous = self._thread
        if previous is not None:
            previous.join(WRITE_S)
        # Resume removes the rounds that end after the checkpoint's time. So this time is later than
        # the end of every round that is recorded already.
        time_ns = max(ctx.now_ns, ctx.time_accounting.cursor + 2)
        ctx.time_accounting.attribute_until("wait", time_ns)
        part = CheckpointPartSaved(self._rank, number, time_ns)
        if previous is not None and previous.is_alive():
            reason = f"its previous part is not written after {WRITE_S:g} s; is the disk too slow?"
            return self._emit(part._replace(error=reason), None)
        document = split_tensors(capture_rank(ctx, save, speed))
        # Not a daemon thread, so Python waits for it at exit. `os._exit` does not wait: then this
        # part of the checkpoint is missing.
        self._thread = threading.Thread(
            target=self._write, args=(document, part), name="checkpoint-writer"
        )
        self._thread.start()

    def _write(self, document: Any, part: CheckpointPartSaved) -> None:
        """Write or send a part, and report it or the error."""
        try:
            content = encode_tensors(document)
            if self._run_dir is None:
                return self._emit(part, content)
            path = part_of(folder_of(self._run_dir, part.number), self._rank)
            self._emit(part._replace(sha256=write(path, content)), None)
        except Exception as error:  # the controller would await this part forever
            self._emit(part._replace(error=first_line(error)), None)


def write(path: Path, content: bytes) -> str:
    """Write a file in one step; return its hash. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda part: part.write_bytes(content))
    return hashlib.sha256(content).hexdigest()


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_of(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoint" / str(number)


def list_checkpoints(run_dir: Path) -> list[int]:
    """Return the numbers of all checkpoints with a manifest, oldest first."""
    found = (path.parent.name for path in run_dir.glob(f"checkpoint/*/{MANIFEST}"))
    return sorted(int(name) for name in found if name.isdigit())


def part_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's part of a checkpoint."""
    return folder / f"rank{rank}.safetensors"


class SavedRank(NamedTuple):
    """All that a rank needs to continue from a checkpoint."""

    stage: int  # index of its stage, or ABSENT
    state: Any  # the algorithm's own state
    context: dict[str, Any]  # counters of its context
    time_ns: int  # run time at which it was saved
    jitter_draws: int = 0  # random numbers that its declared step times have used
    module_state: Any = None  # all that forward passes change beside the parameters


def capture_rank(ctx: RankContext, save: Save | None, speed: Speed | None) -> SavedRank:
    """Return the present state of a rank, for a checkpoint.

    Args: save, the algorithm's state, None for an absent rank; speed, the declared step times, None
    without.
    """
    save = save or Save(ABSENT, None)
    drawn = speed.count_draws(ctx.rank) if speed else 0
    return SavedRank(
        save.stage, save.state, capture_counters(ctx), ctx.now_ns, drawn, ctx.module_state
    )


def read_ranks(
    folder: Path, present: Sequence[int], packages: tuple[str, ...], device: str
) -> dict[int, SavedRank]:
    """Read the ranks of a checkpoint: those of `present` from their parts, or all from the one file
    of a run in virtual time.

    Args: packages, the packages whose classes a state may contain.
    """
    if (folder / RANKS).exists():
        return dict(enumerate(decode((folder / RANKS).read_bytes(), packages, device)))
    parts = {rank: part_of(folder, rank).read_bytes() for rank in present}
    return {rank: decode(part, packages, device) for rank, part in parts.items()}


# saved fields of a context, beside its time accounting
CONTEXT_FIELDS = ("steps", "staleness", "loss", "measures")


def capture_counters(ctx: RankContext) -> dict[str, Any]:
    """Return the counters of a context."""
    time_accounting = {
        name: getattr(ctx.time_accounting, name) for name in ctx.time_accounting.__slots__
    }
    return {"time_accounting": time_accounting} | {
        name: getattr(ctx, name) for name in CONTEXT_FIELDS
    }


def restore_rank(
    ctx: RankContext,
    known: SavedRank,
    time_ns: int,
    speed: Speed | None,
    worker_states: Learner | None,
) -> None:
    """Set a fresh context to a saved rank; the run resumes at `time_ns`.

    The time from the rank's save to `time_ns` counts as waiting.
    """
    for name, value in known.context["time_accounting"].items():
        setattr(ctx.time_accounting, name, value)
    for name in CONTEXT_FIELDS:
        setattr(ctx, name, known.context[name])
    ctx.time_accounting.attribute_until("wait", time_ns)
    if worker_states is not None:
        worker_states.set_worker_state(ctx.rank, known.module_state)
    if speed is not None:
        speed.skip_draws(ctx.rank, known.jitter_draws)
