"""Checkpoints of runs: a folder each, with a manifest that says what is in it.

On processes the controller names a version of the model that no rank has reached yet, every
`run.checkpoint_s` s. Each rank saves its state when it reaches that version
(`ashl.runtime.rank_checkpoint`) and reports it, or uploads it (`ashl.run.uploads`). Once all ranks
have, the controller writes its own state and, last, a manifest with the hash of every file. In
virtual time one file holds the state of all nodes (`ashl.runtime.sim`). A folder without a
manifest, or with a file of another hash, is no checkpoint. The newest valid checkpoint counts, and
two are kept. If a rank had passed the version when it heard of it, the next version lies further
ahead. The run never waits.

LOCKSTEP: all ranks go round by round. At one version nothing is in flight except what is sent from
there on or is retransmitted (`ashl.topology.gossip`), so the resumed run is bit-identical.
SERVER: workers are asynchronous. Each saves its state when it starts from that version or a newer
one, after the servers have saved theirs. What is in flight then is lost and computed again
(`ashl.topology.parameter_server`).
EACH: workers have their own models, meet in groups or pairs, and each saves its state when it hears
of the version (`topology.partial_all_reduce`, `topology.pairs`).
ROUND: as EACH, but at the start of one round of their own, which is the version. Every later
message shows that it is later.
ANEW: all ranks are at their safe points at one moment, and nothing is in flight: made from a run
with another number of workers (`ashl.run.rescaling`). It can be resumed in virtual time and on
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
CUT_BACK = "cut_back"  # in the manifest: the records hold nothing of later moments any more
PLACE = ("how", "time_ns", "sizes", "ranks_ns", "home_ns", "rounds")
LOCKSTEP, SERVER, EACH, ROUND, VIRTUAL, ANEW = (
    "lockstep",
    "server",
    "each",
    "round",
    "virtual",
    "anew",
)
MONITOR, STATE = "monitor.pt", "state.pt"
MAY_CHANGE = "only stop.*, runtime and the number of workers may change when a run is resumed"
LEAVE = "runs leave them with run.checkpoint_s=SECONDS"
AHEAD_S = 1.0  # of run time, for the news of a version to come to all before it does
LONGEST_S = 60.0
WHOLE = 2  # checkpoints that are kept


@dataclass
class CheckpointManager:
    """Home's side: names versions, and makes checkpoints of what the ranks have kept."""

    run_dir: Path
    num_ranks: int
    every_s: float | None = None  # None = never
    identity: str = ""  # what the run is, apart from when it stops
    how: str = LOCKSTEP
    lead_rank: int | None = (
        None  # whose clock evaluations go by; None: that of the last to give its model
    )
    servers: int = 1  # with SERVER: how many of the ranks, the last ones, are servers
    number: int = 0  # of the next one
    due_s: float | None = (
        None  # on the run's clock; None = as long after its beginning as between two
    )
    ahead_s: float = AHEAD_S
    wanted: tuple[int, int] | None = None
    kept: dict[int, CheckpointPartSaved] = field(default_factory=dict)
    seen: tuple[int, int] | None = None  # the last version that home's rank reported, and when
    warning: str | None = None

    def propose(self, beat: Heartbeat | None) -> tuple[int, int] | None:
        """The checkpoint to make, as of what home's rank says of itself; None where it is not time
        for a new one.
        """
        if self.every_s is None or beat is None or beat.counts is None:
            return None
        now = (max(beat.counts.commits) if self.how == ROUND else beat.counts.merges, beat.time_ns)
        before, self.seen = self.seen or now, now
        if before == now:  # nothing new was heard
            return None
        due_s = self.every_s if self.due_s is None else self.due_s
        if self.wanted is not None or beat.time_ns < due_s * 1e9:
            return None
        per_ns = (now[0] - before[0]) / (now[1] - before[1])
        self.kept = {}
        ahead = now[0] + 1 + math.ceil(per_ns * self.ahead_s * 1e9)
        self.wanted = self.number, 0 if self.how == EACH else ahead
        self.number += 1
        logger.info("asks all ranks for checkpoint %d at version %d", *self.wanted)
        return self.wanted

    def add_part(
        self, kept: CheckpointPartSaved, monitor: Monitor, part: Tensor | None = None
    ) -> None:
        """A rank has kept its part, which comes with that where it has not written it itself; or
        could not.
        """
        if self.wanted is None or kept.number != self.wanted[0]:
            return
        if part is not None:
            kept = self.write_part(kept, part.numpy().tobytes())
        self.kept[kept.rank] = kept
        if kept.error is not None:
            self.warning = (
                f"no checkpoint was made: rank {kept.rank} could not write its part ({kept.error})"
            )
        self.finish_if_complete(monitor)

    def write_part(self, kept: CheckpointPartSaved, content: bytes) -> CheckpointPartSaved:
        """Write a part that a rank has sent; returns how that went."""
        path = rank_checkpoint.part_of(
            rank_checkpoint.folder_of(self.run_dir, kept.number), kept.rank
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            return kept._replace(error=str(error))
        return (
            kept
            if rank_checkpoint.hash_bytes(content) == kept.sha256
            else kept._replace(error="other bytes came than it sent")
        )

    def finish_if_complete(self, monitor: Monitor) -> None:
        """Once all have kept their parts, and what they had shown before is evaluated: that is a
        checkpoint, or none. To be asked now and then.
        """
        if self.wanted is None or len(self.kept) < self.num_ranks:
            return
        if (
            self.how == LOCKSTEP
            and monitor.shown_ns(max(kept.version for kept in self.kept.values())) is None
        ):
            return
        folder = rank_checkpoint.folder_of(self.run_dir, self.wanted[0])
        self.plan_next(max(kept.time_ns for kept in self.kept.values()))
        if (
            monitor.stopping is None
            and all(k.error is None for k in self.kept.values())
            and self.is_consistent()
        ):
            self.write_checkpoint(folder, monitor)
        else:
            logger.warning(
                "discards checkpoint %d: a rank had passed its version, or could not save",
                self.wanted[0],
            )
            self.ahead_s, self.due_s = min(2 * self.ahead_s, LONGEST_S), 0.0
            shutil.rmtree(folder, ignore_errors=True)
        self.wanted = None

    def is_consistent(self) -> bool:
        """Whether what the ranks have kept goes together: one version of the model, or none older
        than the server's, so that what a worker had pushed before is merged.
        """
        versions = [self.kept[rank].version for rank in range(self.num_ranks)]
        together = self.how == EACH or min(versions) == max(versions)
        if self.how == ROUND:
            together = min(versions[:-1]) == max(versions[:-1])  # the coordinator has none
        elif self.how == SERVER:
            together = min(versions[: -self.servers]) >= max(versions[-self.servers :])
        return together and len({kept.stage for kept in self.kept.values()}) == 1

    def plan_next(self, now_ns: int) -> None:
        assert self.every_s is not None
        self.due_s = (now_ns // round(self.every_s * 1e9) + 1) * self.every_s

    def write_checkpoint(self, folder: Path, monitor: Monitor) -> None:
        """All parts are there: what home knows, then the manifest."""
        ranks = [self.kept[rank] for rank in range(self.num_ranks)]
        ranks_ns = [kept.time_ns for kept in ranks]
        version, home_ns = min(kept.version for kept in ranks), max(ranks_ns)
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
                {f"rank{kept.rank}.pt": kept.sha256 for kept in ranks},
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
    """All these files are there, of these hashes: what home knows, then the manifest. Older ones
    go. Raises OSError, or RuntimeError, which torch's writer makes of a full disk; then nothing is
    left of this one.
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
    """A checkpoint to go on from."""

    number: int
    folder: Path
    how: str
    time_ns: int
    sizes: dict[str, int]
    ranks_ns: list[int]  # of real ranks
    home_ns: int  # up to where evaluations count
    rounds: list[int] | None  # with SERVER: of each worker, as the server counts them
    broken: str | None  # what was the matter with a newer one


def newest(run_dir: Path, identity: str) -> Checkpoint:
    """The newest whole checkpoint of a run. Raises UsageError where there is none, or where it is
    of another run.
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
            found = Checkpoint(number, folder, *(manifest[k] for k in PLACE), broken)
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
    """Take back what the records hold of later moments than the checkpoint's; returns how much is
    left, by file, which its manifest says from then on: a run may go on from it more than once.
    Raises AshlError while another process writes them.

    Interrupted at any moment it can be done again: what is left lies in the checkpoint's folder
    until the manifest says that it counts, and only then takes the records' place.
    """
    if saved.how == VIRTUAL:
        return saved.sizes  # of that moment

    def earlier(name: str, record: Mapping[str, Any]) -> bool:
        if name == METRICS:
            return record["time_s"] * 1e9 <= saved.home_ns + 1
        if record["kind"] != "round":
            return True
        if (
            saved.rounds is not None
        ):  # one that the server has merged may have ended later, with its answer
            return record["round"] < saved.rounds[record["rank"]]
        return record["end_s"] * 1e9 <= saved.ranks_ns[record["rank"]] + 1

    with writing(run_dir), jsonl.alone(run_dir / METRICS):
        manifest = json.loads((saved.folder / MANIFEST).read_text(encoding="utf-8"))
        if not manifest.get(CUT_BACK):
            left: dict[str, bytes | None] = {}
            for name, size in saved.sizes.items():
                try:
                    left[name] = jsonl.kept(run_dir / name, size, partial(earlier, name))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise UsageError(
                        f"{run_dir / name} is damaged, so the run cannot be resumed; a new one"
                        f" takes its weights along with run.start_from={run_dir}"
                    ) from error
            for name, text in left.items():
                if text is None:
                    return saved.sizes  # more than there is, which is refused
                (saved.folder / name).write_bytes(text)
            sizes = {name: len(text) for name, text in left.items() if text is not None}
            manifest |= {"sizes": sizes, CUT_BACK: True}
            jsonl.write_json(saved.folder / MANIFEST, manifest)
        for name in manifest["sizes"]:
            if (saved.folder / name).exists():
                os.replace(saved.folder / name, run_dir / name)
        return manifest["sizes"]


def plan_of(saved: Checkpoint) -> Plan:
    """The plan that was under way."""
    return Plan.from_json(from_plain(torch.load(saved.folder / MONITOR, weights_only=True))["plan"])


def monitor_of(saved: Checkpoint, limits: Limits) -> dict[str, Any]:
    """What home knew, without what came later."""
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
