"""Checkpoints of runs: a folder each, with a manifest that says what is in it.

On processes the controller names a version of the model that no rank has reached yet, every
`run.checkpoint_s` s. Each rank saves its state when it reaches that version
(`ashl.runtime.rank_checkpoint`) and reports it, or uploads it (`ashl.run.uploads`). Once all ranks
have, the controller writes its own state and, last, a manifest with the hash of every file. In
virtual time one file holds the state of all nodes (`ashl.runtime.sim`). A folder without a
manifest, or with a file of another hash, is no checkpoint. The newest valid checkpoint counts, and
two are kept. If a rank had passed the version before it received it, the checkpoint is discarded
and the next version lies further ahead. The run never waits.

Kinds of checkpoints (`how`):

LOCKSTEP: all ranks run synchronous rounds. At one version nothing is in flight except messages that
are sent after it or are retransmitted (`ashl.topology.gossip`). So the resumed run is
bit-identical. SERVER: workers are asynchronous. Each saves its state when it starts from that
version or a newer one, after the servers have saved theirs. Pushes that are in flight then are
computed again (`ashl.topology.parameter_server`).
EACH: workers have their own models and exchange in groups or pairs. Each saves its state when it
receives the request (`topology.partial_all_reduce`, `topology.pairs`).
ROUND: as EACH, but at the start of one round of their own, which is the version. Later messages
carry their round, so a receiver knows that they are later.
VIRTUAL: made in virtual time; it can be resumed there only.
RESCALED: made from a run with another number of workers (`ashl.run.rescaling`). All ranks are at
their safe points at one moment, and nothing is in flight. It can be resumed in virtual time and on
processes.

On resume, records of later moments than the checkpoint are removed and written again.

Source: coordinated checkpoints, Elnozahy et al., "A survey of rollback-recovery protocols in
message-passing systems", ACM Computing Surveys 2002.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.errors import UsageError, parsed
from ashl.plan.plan import Limits, Plan
from ashl.run.evaluation import Target, best_of, scores_of
from ashl.run.monitor import Monitor, MonitorState
from ashl.runtime import rank_checkpoint
from ashl.runtime.plain_state import from_plain, to_plain
from ashl.runtime.rank_checkpoint import MANIFEST, list_checkpoints
from ashl.runtime.records import CheckpointPartSaved, Heartbeat
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS, writing

logger = logging.getLogger(__name__)

SCHEMA = 11
CUT_BACK = "cut_back"  # manifest key: True once later records than the checkpoint are removed
PLACE = ("how", "time_ns", "sizes", "ranks_ns", "home_ns", "rounds")  # manifest keys
LOCKSTEP = "lockstep"
SERVER = "server"
EACH = "each"
ROUND = "round"
VIRTUAL = "virtual"
RESCALED = "rescaled"
MONITOR = "monitor.pt"  # file of the monitor's state
STATE = "state.pt"  # file of the simulation's state
MAY_CHANGE = "only stop.*, runtime and the number of workers may change when a run is resumed"
LEAVE = "a run takes checkpoints with run.checkpoint_s=SECONDS"
AHEAD_S = 1.0  # run time ahead of a version for its request to reach all ranks
LONGEST_S = 60.0  # limit of that time when it is doubled
WHOLE = 2  # checkpoints that are kept


@dataclass
class CheckpointManager:
    """The controller's part of checkpoints: it proposes versions, and completes checkpoints of what
    the ranks have saved.
    """

    run_dir: Path
    num_ranks: int
    every_s: float | None = None  # run time between two checkpoints; None = no checkpoints
    identity: str = ""  # hash of the configuration, see `ashl.run.train.identity`
    how: str = LOCKSTEP
    # the rank by whose clock evaluations count; None = the rank that saved last
    lead_rank: int | None = None
    servers: int = 1  # with SERVER: the number of servers, which are the last ranks
    number: int = 0  # number of the next checkpoint
    due_s: float | None = None  # run time of the next checkpoint; None = `every_s`
    ahead_s: float = AHEAD_S
    wanted: tuple[int, int] | None = None  # number and version of the checkpoint in progress
    saved: dict[int, CheckpointPartSaved] = field(default_factory=dict)  # its parts, by rank
    seen: tuple[int, int] | None = None  # latest version of the lead rank, and its run time in ns
    warning: str | None = None

    def propose(self, beat: Heartbeat | None) -> tuple[int, int] | None:
        """Return number and version of a checkpoint to request, if one is due, else None.

        Args: beat, the latest heartbeat of the lead rank.
        """
        if self.every_s is None or beat is None or beat.counts is None:
            return None
        now = (max(beat.counts.commits) if self.how == ROUND else beat.counts.merges, beat.time_ns)
        before, self.seen = self.seen or now, now
        if before == now:  # no new heartbeat
            return None
        due_s = self.every_s if self.due_s is None else self.due_s
        if self.wanted is not None or beat.time_ns < due_s * 1e9:
            return None
        versions_per_ns = (now[0] - before[0]) / (now[1] - before[1])
        self.saved = {}
        ahead = now[0] + 1 + math.ceil(versions_per_ns * self.ahead_s * 1e9)
        self.wanted = self.number, 0 if self.how == EACH else ahead
        self.number += 1
        logger.info("asks all ranks for checkpoint %d at version %d", *self.wanted)
        return self.wanted

    def add_part(
        self, record: CheckpointPartSaved, monitor: Monitor, content: Tensor | None = None
    ) -> None:
        """Add a rank's part of the checkpoint in progress, or its failure to save one.

        Args: content uint8, the part's bytes if the rank has uploaded it; None if it has written
        it.
        """
        if self.wanted is None or record.number != self.wanted[0]:
            return
        if content is not None:
            record = self.write_part(record, content.numpy().tobytes())
        self.saved[record.rank] = record
        if record.error is not None:
            self.warning = (
                f"no checkpoint was made: rank {record.rank} could not write its part"
                f" ({record.error})"
            )
        self.finish_if_complete(monitor)

    def write_part(self, record: CheckpointPartSaved, content: bytes) -> CheckpointPartSaved:
        """Write an uploaded part; return its record, with the error if that failed."""
        path = rank_checkpoint.part_of(
            rank_checkpoint.folder_of(self.run_dir, record.number), record.rank
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            return record._replace(error=str(error))
        if rank_checkpoint.hash_bytes(content) != record.sha256:
            return record._replace(error="the received bytes differ from the sent ones")
        return record

    def finish_if_complete(self, monitor: Monitor) -> None:
        """Complete or discard the checkpoint in progress, once all parts are there and all earlier
        models are evaluated.

        Call it after every pass of the controller's loop.
        """
        if self.wanted is None or len(self.saved) < self.num_ranks:
            return
        parts = self.saved.values()
        if self.how == LOCKSTEP and monitor.shown_ns(max(part.version for part in parts)) is None:
            return
        folder = rank_checkpoint.folder_of(self.run_dir, self.wanted[0])
        self.plan_next(max(part.time_ns for part in parts))
        if (
            monitor.stopping is None
            and all(part.error is None for part in parts)
            and self.is_consistent()
        ):
            self.write_checkpoint(folder, monitor)
        else:
            logger.warning(
                "discards checkpoint %d: a rank had passed its version, or could not save",
                self.wanted[0],
            )
            self.ahead_s = min(2 * self.ahead_s, LONGEST_S)
            self.due_s = 0.0
            shutil.rmtree(folder, ignore_errors=True)
        self.wanted = None

    def is_consistent(self) -> bool:
        """Return True if the ranks' parts are of one stage and of consistent versions.

        Rule: LOCKSTEP, one version; ROUND, one round of all workers (the coordinator has none);
        SERVER, no worker's version older than a server's, so that all earlier pushes are merged;
        EACH, any versions.
        """
        versions = [self.saved[rank].version for rank in range(self.num_ranks)]
        consistent = self.how == EACH or min(versions) == max(versions)
        if self.how == ROUND:
            consistent = min(versions[:-1]) == max(versions[:-1])
        elif self.how == SERVER:
            consistent = min(versions[: -self.servers]) >= max(versions[-self.servers :])
        return consistent and len({part.stage for part in self.saved.values()}) == 1

    def plan_next(self, now_ns: int) -> None:
        """Set the next checkpoint to the next multiple of `every_s` on the run's clock."""
        assert self.every_s is not None
        self.due_s = (now_ns // round(self.every_s * 1e9) + 1) * self.every_s

    def write_checkpoint(self, folder: Path, monitor: Monitor) -> None:
        """Write the monitor's state and the manifest of a checkpoint whose parts are all there."""
        ranks = [self.saved[rank] for rank in range(self.num_ranks)]
        ranks_ns = [part.time_ns for part in ranks]
        version = min(part.version for part in ranks)
        home_ns = max(ranks_ns)
        if self.lead_rank is not None:
            home_ns = ranks_ns[self.lead_rank]
        if self.how == LOCKSTEP:
            home_ns = max(home_ns, monitor.shown_ns(version) or 0)
        about = {
            "how": self.how,
            "version": version,
            "time_ns": max(ranks_ns),
            "ranks_ns": ranks_ns,
            "home_ns": home_ns,
        }
        if self.how == SERVER:
            about["rounds"] = ranks[-self.servers].rounds
        try:
            complete(
                folder,
                self.identity,
                monitor,
                {f"rank{part.rank}.pt": part.sha256 for part in ranks},
                about,
            )
        except (OSError, RuntimeError) as error:
            self.warning = f"no checkpoint was made: {error}"
            logger.error("checkpoint %s is not written: %s", folder.name, error)
        else:
            logger.info(
                "took checkpoint %s at version %d, %.3f s of the run",
                folder.name,
                version,
                max(ranks_ns) / 1e9,
            )


def complete(
    folder: Path,
    identity: str,
    monitor: Monitor,
    files: Mapping[str, str],
    about: Mapping[str, object],
) -> None:
    """Write the monitor's state and the manifest of a checkpoint, and delete old checkpoints.

    Args: files, the hash by name of the files that are there already; about, other manifest keys.
    Raises: OSError, or RuntimeError (torch's error for a full disk), after this checkpoint is
    deleted.
    """
    try:
        files = {
            MONITOR: rank_checkpoint.write(folder / MONITOR, to_plain(monitor.state())),
            **files,
        }
        sizes = monitor.recorder.sizes()
        manifest = {
            "schema": SCHEMA,
            "run": identity,
            "files": files,
            "sizes": sizes,
            "rounds": None,
            **about,
        }
        jsonl.write_json(folder / MANIFEST, manifest)
    except (OSError, RuntimeError):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    run_dir = folder.parent.parent
    for old in list_checkpoints(run_dir)[:-WHOLE]:
        shutil.rmtree(rank_checkpoint.folder_of(run_dir, old), ignore_errors=True)


class Checkpoint(NamedTuple):
    """A checkpoint to resume from."""

    number: int
    folder: Path
    how: str
    time_ns: int  # run time
    sizes: dict[str, int]  # bytes of each file of records at that time
    ranks_ns: list[int]  # run time by rank, on processes
    home_ns: int  # run time up to which evaluations count
    rounds: list[int] | None  # with SERVER: by worker, as the server counts them
    broken: str | None  # why a newer checkpoint cannot be used


def newest(run_dir: Path, identity: str) -> Checkpoint:
    """Return the newest valid checkpoint of a run.

    Raises: UsageError if there is none, or if it is of another run.
    """
    broken: str | None = None
    for number in reversed(list_checkpoints(run_dir)):
        folder = rank_checkpoint.folder_of(run_dir, number)
        try:
            manifest = parsed((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["schema"] != SCHEMA:
                raise ValueError(f"schema {manifest['schema']}")
            for name, digest in manifest["files"].items():
                if Path(name).name != name or rank_checkpoint.hash_of(folder / name) != digest:
                    raise ValueError(f"{name} is not what was written")
            found = Checkpoint(number, folder, *(manifest[key] for key in PLACE), broken)
            if manifest["run"] != identity:
                raise UsageError(f"the checkpoint in {run_dir} is of another run; {MAY_CHANGE}")
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            broken = f"{folder} cannot be resumed from ({error})"
    raise UsageError(
        f"{broken}; run this setting again" if broken else f"{run_dir} holds no checkpoint; {LEAVE}"
    )


def refuse_other_kernel(run_dir: Path, saved: Checkpoint, *, virtual: bool) -> None:
    """Raise UsageError unless the checkpoint was made where it is to be resumed: in virtual time,
    or on processes.
    """
    if (saved.how == VIRTUAL) != virtual:
        began = "in virtual time" if saved.how == VIRTUAL else "on processes"
        raise UsageError(
            f"{run_dir} began {began}, and a checkpoint is resumed where it was made; drop runtime"
        )


def truncate_records(run_dir: Path, saved: Checkpoint) -> dict[str, int]:
    """Remove records of later moments than the checkpoint's; return the size of each file after
    that.

    The manifest holds these sizes afterwards, since a run may be resumed from it more than once. If
    this is interrupted it can be repeated: the shortened files lie in the checkpoint's folder until
    the manifest says that they count, and only then replace the records.
    Raises: AshlError while another process writes the records; UsageError if a file is damaged.
    """
    if saved.how == VIRTUAL:
        return saved.sizes  # the records of virtual time were complete at that moment
    with writing(run_dir), jsonl.alone(run_dir / METRICS):
        manifest = json.loads((saved.folder / MANIFEST).read_text(encoding="utf-8"))
        if not manifest.get(CUT_BACK):
            shortened = {
                name: shorten(run_dir / name, size, saved) for name, size in saved.sizes.items()
            }
            if None in shortened.values():
                return saved.sizes  # larger than the file, which opening the records rejects
            contents = {name: text for name, text in shortened.items() if text is not None}
            for name, text in contents.items():
                (saved.folder / name).write_bytes(text)
            sizes = {name: len(text) for name, text in contents.items()}
            manifest |= {"sizes": sizes, CUT_BACK: True}
            jsonl.write_json(saved.folder / MANIFEST, manifest)
        for name in manifest["sizes"]:
            if (saved.folder / name).exists():
                os.replace(saved.folder / name, run_dir / name)
        return manifest["sizes"]


def shorten(path: Path, size: int, saved: Checkpoint) -> bytes | None:
    """Return the first `size` bytes of a file of records, without records of later moments; None if
    the file is shorter.

    Raises: UsageError if the file is damaged.
    """
    try:
        return jsonl.kept(path, size, partial(is_earlier, saved, path.name))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged, so the run cannot be resumed; start a new one from its weights:"
            f" run.start_from={path.parent}"
        ) from error


def is_earlier(saved: Checkpoint, name: str, record: Mapping[str, Any]) -> bool:
    """Return True if a record is not later than the checkpoint."""
    if name == METRICS:
        return record["time_s"] * 1e9 <= saved.home_ns + 1
    if record["kind"] != "round":
        return True
    if saved.rounds is not None:
        # a merged round may end after the checkpoint, with the server's answer
        return record["round"] < saved.rounds[record["rank"]]
    return record["end_s"] * 1e9 <= saved.ranks_ns[record["rank"]] + 1


def plan_of(saved: Checkpoint) -> Plan:
    """Return the plan that the run had at the checkpoint."""
    return Plan.from_json(from_plain(torch.load(saved.folder / MONITOR, weights_only=True))["plan"])


def monitor_of(saved: Checkpoint, limits: Limits) -> dict[str, Any]:
    """Return the monitor's state at the checkpoint, without evaluations of later moments."""
    state = from_plain(torch.load(saved.folder / MONITOR, weights_only=True))
    if saved.how == VIRTUAL:
        return state
    run_state: MonitorState = state["books"]
    if run_state.parts is not None:
        run_state.parts.discard_pending()
    until_s = (saved.home_ns + 1) / 1e9
    found = [one for one in run_state.evaluations if one.time_s <= until_s]
    if len(found) < len(run_state.evaluations):
        target = Target()
        for one in found:
            target.judge(limits, one)
        best = run_state.best if best_of(found) is best_of(run_state.evaluations) else None
        state["books"] = replace(
            run_state, evaluations=found, scores=scores_of(found), best=best, target=target
        )
    return state
