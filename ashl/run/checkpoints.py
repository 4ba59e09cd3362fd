"""Checkpoints of runs: a folder each, with a manifest that says what is in it.

All ranks pause every `run.checkpoint_s` s, at a moment at which nothing is in flight
(`ashl.topology.ending`). In virtual time the run writes one file with all ranks. On processes each
rank writes its part (`ashl.runtime.rank_checkpoint`) or sends it to the controller, and continues.
Once all parts are there, the controller writes its own state and, last, a manifest with the hash of
every file. A folder without a manifest, or with a file of another hash, is no checkpoint. The
newest valid checkpoint counts, and two are kept. A checkpoint is not completed if a part could not
be written, if the run was about to stop, or after the end of its time budget.

No part is awaited of a worker that has failed, or that takes part only in later pauses after its
rejoin: a resumed run begins with its rejoin. A pause that a failure has ended lacks other parts. It
is discarded once a later checkpoint is complete.

On resume, records of later moments than the checkpoint are removed and written again. A checkpoint
is resumed on the kernel that made it. A checkpoint that `ashl.run.rescaling` has made, for another
number of workers, can be resumed on both kernels.

Source: coordinated checkpoints, Elnozahy et al., "A survey of rollback-recovery protocols in
message-passing systems", ACM Computing Surveys 2002.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ashl.errors import UsageError, load_json
from ashl.plan.plan import Limits, Plan
from ashl.run.evaluation import Target, best_of, scores_of
from ashl.run.monitor import Monitor, MonitorState
from ashl.runtime import rank_checkpoint
from ashl.runtime.effects import Epoch
from ashl.runtime.plain_state import decode, encode
from ashl.runtime.rank_checkpoint import MANIFEST, PAUSES, list_checkpoints
from ashl.runtime.records import CheckpointPartSaved, Heartbeat, WorkerFailed, WorkerRejoined
from ashl.tracking import jsonl
from ashl.tracking.events import EVENTS
from ashl.tracking.recorder import METRICS, writing

logger = logging.getLogger(__name__)

SCHEMA = 19
TRUNCATED = "truncated"  # manifest key: True once later records than the checkpoint are removed
# manifest keys, in the order of the fields of `Checkpoint`
CHECKPOINT_KEYS = ("how", "time_ns", "sizes", "ranks_ns", "lead_ns", "absent")
# values of `how`: a run in virtual time made the checkpoint, a run on processes, or
# `ashl.run.rescaling`
VIRTUAL, PROCESSES, RESCALED = "virtual", "processes", "rescaled"
MONITOR = "monitor.safetensors"  # file of the monitor's state
KEPT_CHECKPOINTS = 2  # checkpoints that are kept
MEMBERSHIP = EVENTS[WorkerFailed], EVENTS[WorkerRejoined]  # kinds of lines in events.jsonl


@dataclass
class CheckpointManager:
    """The controller's part of checkpoints on processes: it completes those whose parts are all
    there.
    """

    run_dir: Path
    num_ranks: int
    every_s: float | None = None  # run time between two checkpoints; None = no checkpoints
    identity: str = ""  # hash of the configuration, see `ashl.run.train.identity`
    # the rank by whose clock evaluations count; None = the rank that saved last
    lead_rank: int | None = None
    # the parts that are there, by number of the checkpoint and by rank
    parts: dict[int, dict[int, CheckpointPartSaved]] = field(default_factory=dict)
    # why the latest checkpoint that failed could not be written, which the user reads after the
    # run; None if none has failed
    warning: str | None = None

    def add_part(self, record: CheckpointPartSaved, content: bytes | None = None) -> None:
        """Add a rank's part of a checkpoint.

        Args: content, the part's bytes if the rank has sent it; None if it has written it.
        """
        if content is not None:
            record = self.write_part(record, content)
        self.parts.setdefault(record.number, {})[record.rank] = record

    def complete_checkpoints(self, absent: Collection[int], monitor: Monitor) -> None:
        """Complete the checkpoints of which all parts are there. No part is awaited of ranks in
        `absent`, and of workers that joined after the pause.
        """
        first_pauses = {rank: beat.first_pause or 0 for rank, beat in monitor.heartbeats.items()}
        present = {*range(self.num_ranks)}.difference(absent)
        for number, parts in sorted(self.parts.items()):
            if all(rank in parts or first_pauses.get(rank, 0) > number for rank in present):
                self.parts = {k: own for k, own in self.parts.items() if k > number}
                self.write_checkpoint(number, parts, monitor)

    def write_part(self, record: CheckpointPartSaved, content: bytes) -> CheckpointPartSaved:
        """Write a part that a rank has sent.

        Returns: its record, with the hash of the file or with the error.
        """
        folder = rank_checkpoint.folder_of(self.run_dir, record.number)
        try:
            digest = rank_checkpoint.write(rank_checkpoint.part_of(folder, record.rank), content)
        except OSError as error:
            return record._replace(error=str(error))
        return record._replace(sha256=digest)

    def write_checkpoint(
        self, number: int, parts: Mapping[int, CheckpointPartSaved], monitor: Monitor
    ) -> None:
        """Complete a checkpoint of which all parts are there.

        If a part could not be written, or if writing fails now, the checkpoint is deleted and
        `warning` says why.
        """
        folder = rank_checkpoint.folder_of(self.run_dir, number)
        times = {rank: part.time_ns for rank, part in parts.items()}
        time_ns = max(times.values())
        rejoins = {outage.worker: outage.rejoined_ns for outage in monitor.run_state.outages}
        about = {
            "how": PROCESSES,
            "time_ns": time_ns,
            "ranks_ns": [times.get(rank, rejoins.get(rank)) for rank in range(self.num_ranks)],
            "absent": sorted({*range(self.num_ranks)} - parts.keys()),
            # the lowest worker takes the place of a failed lead rank
            "lead_ns": (
                time_ns if self.lead_rank is None else times.get(self.lead_rank, times[min(times)])
            ),
        }
        files = {f"rank{rank}.safetensors": part.sha256 for rank, part in parts.items()}
        try:
            for part in parts.values():
                if part.error is not None:
                    raise OSError(f"rank {part.rank} could not write its part ({part.error})")
            if complete_checkpoint(folder, self.identity, monitor, files, about):
                logger.info(
                    "took checkpoint %d of ranks %s at %.3f s", number, [*times], time_ns / 1e9
                )
        except (OSError, RuntimeError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            self.warning = f"no checkpoint was made: {error}"
            logger.error("checkpoint %d is not written: %s", number, error)


def complete_checkpoint(
    folder: Path,
    identity: str,
    monitor: Monitor,
    files: Mapping[str, str],
    about: Mapping[str, Any],
) -> bool:
    """Write the monitor's state and the manifest of a checkpoint. Then delete older folders, except
    the newest complete checkpoints: `KEPT_CHECKPOINTS` with this one.

    Args: files, the hash by name of the files that are there already; about, the manifest keys of
    `CHECKPOINT_KEYS` except `sizes`.
    Returns: True if the checkpoint is complete. False if the run is about to stop, if its time is
    over, or if a stage has ended since; then the checkpoint is deleted.
    Raises: OSError, or RuntimeError (torch's error for a full disk), after this checkpoint is
    deleted.
    """
    budget_s = monitor.plan.limits.seconds
    is_over = budget_s is not None and about["time_ns"] > budget_s * 1e9
    # the last part may arrive after the end of its stage, which the monitor's state would hold
    stage_ended = any(stage.end_ns > about["time_ns"] for stage in monitor.run_state.stages)
    if is_over or stage_ended or monitor.stop_reason is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    try:
        state = encode(monitor.state())
        files = {MONITOR: rank_checkpoint.write(folder / MONITOR, state), **files}
        sizes = monitor.recorder.sizes()
        manifest = {"schema": SCHEMA, "run": identity, "files": files, "sizes": sizes, **about}
        jsonl.write_json(folder / MANIFEST, manifest)
    except (OSError, RuntimeError):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    kept = list_checkpoints(folder.parent.parent)[-KEPT_CHECKPOINTS:]
    for name in {path.name for path in folder.parent.iterdir()}.difference(map(str, kept)):
        if name.isdigit() and int(name) < int(folder.name):
            shutil.rmtree(folder.parent / name, ignore_errors=True)
    return True


class Checkpoint(NamedTuple):
    """A checkpoint to resume from."""

    number: int  # see `ashl.runtime.rank_checkpoint`
    folder: Path
    how: str  # `VIRTUAL`, `PROCESSES` or `RESCALED`: what made it
    time_ns: int  # run time
    sizes: dict[str, int]  # bytes of each file of records at that time
    # by rank: run time of its part, or of the rejoin of an absent worker; None = not rejoined yet
    ranks_ns: list[int | None]
    lead_ns: int  # run time up to which evaluations count
    absent: list[int]  # workers without a part, which join when the run is resumed
    broken: str | None  # why a newer checkpoint cannot be used

    def saved_ns(self, rank: int) -> float:
        """Return the run time up to which events of a rank count. A failed worker that has not
        rejoined has no later ones.
        """
        time_ns = self.ranks_ns[rank]
        return math.inf if time_ns is None else time_ns


def find_newest(run_dir: Path, identity: str) -> Checkpoint:
    """Find the newest valid checkpoint of a run.

    Args: identity, the hash that its configuration must have (`ashl.run.train.identity`).
    Raises: UsageError if there is no valid checkpoint, or if the newest one has another identity.
    """
    broken: str | None = None
    for number in reversed(list_checkpoints(run_dir)):
        folder = rank_checkpoint.folder_of(run_dir, number)
        try:
            manifest = load_json((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["schema"] != SCHEMA:
                raise ValueError(f"schema {manifest['schema']}")
            for name, digest in manifest["files"].items():
                if Path(name).name != name or rank_checkpoint.hash_of(folder / name) != digest:
                    raise ValueError(f"{name} is not what was written")
            found = Checkpoint(number, folder, *(manifest[key] for key in CHECKPOINT_KEYS), broken)
            if manifest["run"] != identity:
                raise UsageError(
                    f"the checkpoint in {run_dir} is of another run; only stop.*, runtime and the"
                    " number of workers may change when a run is resumed"
                )
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            broken = f"{folder} cannot be resumed from ({error})"
    if broken:
        raise UsageError(f"{broken}; run this setting again")
    raise UsageError(
        f"{run_dir} holds no checkpoint; a run takes checkpoints with run.checkpoint_s=SECONDS"
    )


class RestorePoint(NamedTuple):
    """The point that a rank of a run on processes starts from."""

    since_ns: int = 0  # run time
    number: int = 0  # number of the next checkpoint; 0 = the beginning of the run
    absent: tuple[int, ...] = ()  # workers that have no part of the checkpoint, and join
    # its part of the checkpoint; of a worker that joins, the totals of its earlier incarnations
    content: bytes = b""


def restore_point_of(saved: Checkpoint | None, rank: int, totals: Heartbeat | None) -> RestorePoint:
    """Return the point that a rank starts from: the beginning of the run without a checkpoint.

    Args: totals, of earlier incarnations, if the rank has failed before the checkpoint.
    Raises: OSError if the rank's part cannot be read.
    """
    if saved is None:
        return RestorePoint()
    if rank in saved.absent:
        content = encode(totals)
    else:
        content = rank_checkpoint.part_of(saved.folder, rank).read_bytes()
    return RestorePoint(saved.time_ns, saved.number + 1, (*saved.absent,), content)


def first_epoch(number: int, absent: Collection[int], num_workers: int) -> Epoch:
    """Return the epoch with which a run begins, or is resumed. Its members are all workers, in
    their first incarnation.

    Args: number, the number of the checkpoint, or of the next one (0 = a new run); absent, workers
    without a part, which join. If there are any, the epoch is the one after that of the checkpoint.
    """
    workers = tuple(range(num_workers))
    return Epoch(number // PAUSES + bool(absent), workers, (0,) * num_workers)


def refuse_other_kernel(run_dir: Path, saved: Checkpoint, *, virtual: bool) -> None:
    """Raise UsageError if the checkpoint was made on the other kernel than that which resumes it. A
    checkpoint that `ashl.run.rescaling` made fits both.

    Args: virtual, True to resume in virtual time, False on processes.
    """
    if saved.how == (PROCESSES if virtual else VIRTUAL):
        began = "in virtual time" if saved.how == VIRTUAL else "on processes"
        raise UsageError(
            f"{run_dir} began {began}, and a checkpoint is resumed where it was made; drop runtime"
        )


def truncate_records(run_dir: Path, saved: Checkpoint) -> dict[str, int]:
    """Remove records of later moments than the checkpoint's.

    The manifest holds the new sizes afterwards, since a run may be resumed from it more than once.
    If this function is interrupted it can be repeated. The shortened files lie in the checkpoint's
    folder until the manifest has their sizes; then they replace the records.
    Returns: the size in bytes of each file. If a file is shorter than at the checkpoint, nothing is
    removed, and the sizes are those at the checkpoint; opening the records with them fails.
    Raises: AshlError while another process writes the records; UsageError if a file is damaged.
    """
    with writing(run_dir, begins=True), jsonl.hold_lock(run_dir / METRICS):
        manifest = json.loads((saved.folder / MANIFEST).read_text(encoding="utf-8"))
        if not manifest.get(TRUNCATED):
            shortened = {
                name: shorten_records(run_dir / name, size, saved)
                for name, size in saved.sizes.items()
            }
            if None in shortened.values():
                return saved.sizes
            contents = {name: text for name, text in shortened.items() if text is not None}
            for name, text in contents.items():
                (saved.folder / name).write_bytes(text)
            sizes = {name: len(text) for name, text in contents.items()}
            manifest |= {"sizes": sizes, TRUNCATED: True}
            jsonl.write_json(saved.folder / MANIFEST, manifest)
        for name in manifest["sizes"]:
            if (saved.folder / name).exists():
                os.replace(saved.folder / name, run_dir / name)
        return manifest["sizes"]


def shorten_records(path: Path, size: int, saved: Checkpoint) -> bytes | None:
    """Shorten a file of records: return its first `size` bytes, without records of later moments;
    None if the file is shorter.

    Raises: UsageError if the file is damaged.
    """
    try:
        return jsonl.filter_lines(path, size, partial(is_up_to, saved, path.name))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged, so the run cannot be resumed; start a new one from its weights:"
            f" run.start_from={path.parent}"
        ) from error


def is_up_to(saved: Checkpoint, name: str, record: Mapping[str, Any]) -> bool:
    """Return True if a line of the file `name` is not later than the checkpoint, so that it stays.

    Metrics count up to `lead_ns`, and rounds, failures and rejoins up to the time of their rank's
    part. Events of other kinds stay.
    """
    if name == METRICS:
        return record["time_s"] * 1e9 <= saved.lead_ns + 1
    if record["kind"] not in ("round", *MEMBERSHIP):
        return True
    # on processes the first round after the pause may end at the very moment of the pause
    slack_ns = -1 if saved.how == PROCESSES else 1
    time_s = record["end_s"] if record["kind"] == "round" else record["time_s"]
    return time_s * 1e9 <= saved.saved_ns(record["rank"]) + slack_ns


def plan_of(saved: Checkpoint) -> Plan:
    """Return the plan that the run had at the checkpoint."""
    return Plan.from_json(decode((saved.folder / MONITOR).read_bytes())["plan"])


def read_monitor_state(saved: Checkpoint, limits: Limits) -> dict[str, Any]:
    """Read the monitor's state at the checkpoint, without evaluations, failures and rejoins of
    later moments.
    """
    state = decode((saved.folder / MONITOR).read_bytes())
    run_state: MonitorState = state["run_state"]
    if run_state.parts is not None:
        run_state.parts.discard_later(saved.saved_ns)
    run_state.discard_later_outages(saved.saved_ns)
    run_state.reopen_outages(saved.absent)
    until_s = (saved.lead_ns + 1) / 1e9
    found = [one for one in run_state.evaluations if one.time_s <= until_s]
    if len(found) < len(run_state.evaluations):
        target = Target()
        for count in range(1, len(found) + 1):
            target.judge(limits, found[:count])
        best = run_state.best if best_of(found) is best_of(run_state.evaluations) else None
        state["run_state"] = replace(
            run_state, evaluations=found, scores=scores_of(found), best=best, target=target
        )
    return state
