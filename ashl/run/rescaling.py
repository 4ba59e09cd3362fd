"""Resume a run with another number of workers, in a run folder of its own.

Rule: checkpoint 0 of the new run is made from the newest valid checkpoint of the run to resume (the
origin). `ashl.topology.rescaling` makes the states of the new ranks. From there on the run is
resumed as any other. Evaluations are copied. The origin's folder is not changed.

Recorded counts of a rank (steps and bytes) are divided equally: each new worker has the sum over
the old workers, divided by the number of new ones and rounded down. Its time by class is the mean
of theirs. Servers and coordinators share theirs likewise. Failed workers of the origin have no
part in this, and all new workers run.
"""

from pathlib import Path
from typing import Any, NamedTuple

from ashl.cluster.spec import Cluster
from ashl.errors import AshlError, UsageError
from ashl.learn.module_state import mean_of
from ashl.plan.plan import Plan
from ashl.planning.instantiate import Job
from ashl.run import checkpoints
from ashl.run.checkpoints import RESCALED, Checkpoint
from ashl.run.evaluation import make_model_set
from ashl.run.metrics import CompressionStats
from ashl.run.monitor import Monitor
from ashl.run.virtual import Saving
from ashl.runtime import rank_checkpoint
from ashl.runtime.plain_state import encode
from ashl.runtime.rank_checkpoint import ABSENT, SavedRank
from ashl.runtime.time_accounting import KINDS, TimeAccounting
from ashl.topology.rescaling import rescale_states
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS, writing

RESUMED = "resumed"  # configuration key that holds the folder of the origin


class Origin(NamedTuple):
    """The run to resume from, at its newest checkpoint."""

    run_dir: Path
    saved: Checkpoint
    num_workers: int
    # the rank that counts progress: the lead rank, or the lowest other one if it has failed
    lead: SavedRank
    ranks: dict[int, SavedRank]  # by rank, without failed workers

    @property
    def note(self) -> str:
        """Return the note of the new plan that names the origin and says what is reset."""
        return (
            f"resumes from {self.run_dir}, which had {self.num_workers} workers, at"
            f" {self.saved.time_ns / 1e9:.4g} s and step {self.lead.state.progress.steps:,}; each"
            " worker's own momentum and the state of compression are reset"
        )


def rescales(config: dict[str, Any], run_dir: Path | None) -> bool:
    """Return True if this configuration resumes the run in `run_dir` with another number of
    workers.
    """
    return run_dir is not None and config.get(RESUMED) == str(run_dir.resolve())


def origin_of(run_dir: Path, identity: str, plan: Plan, job: Job) -> Origin:
    """Read the newest checkpoint of a run, to resume it with the number of workers of this plan.

    Args: identity, the hash that the checkpoint's configuration must have (`train.identity`).
    Raises: UsageError in five cases: there is no valid checkpoint; it is of another configuration;
    it was made on the other kernel; the number of workers is the same; or the run is planned from
    measurements, which exist only for its own workers. AshlError while another process writes the
    records.
    Limits: a process that resumes the run in its own folder right after this check is not noticed.
    """
    # raises AshlError if another process holds a lock
    with writing(run_dir, begins=True), jsonl.hold_lock(run_dir / METRICS):
        pass
    saved = checkpoints.find_newest(run_dir, identity)
    checkpoints.refuse_other_kernel(run_dir, saved, virtual=job.parts.runtime.name == "sim")
    before = checkpoints.plan_of(saved)
    if before.num_workers == plan.num_workers:
        raise UsageError(
            f"the run in {run_dir} has {plan.num_workers} workers already; drop the keys that set"
            " their number"
        )
    present = sorted({*range(before.num_ranks)}.difference(saved.absent))
    packages = ("ashl", *plan.allow_targets)
    found = rank_checkpoint.read_ranks(
        saved.folder, present, packages, job.stages[0].trainer.device
    )
    # in virtual time the file of all ranks has absent ones, too
    ranks = {rank: part for rank, part in found.items() if part.stage != ABSENT}
    lead = ranks.get(before.lead_rank, ranks[min(ranks)])
    cluster = job.parts.cluster
    is_declared = isinstance(cluster, Cluster) and not cluster.missing_costs()
    if lead.state.assigned is not None and not is_declared:
        raise UsageError(
            f"{run_dir} is planned from measurements of its {before.num_workers} workers, and there"
            " are none of others; start a new run from its weights, which measures them:"
            f" run.start_from={run_dir}"
        )
    return Origin(run_dir, saved, before.num_workers, lead, ranks)


def begin_rescaled_run(origin: Origin, plan: Plan, monitor: Monitor, saving: Saving) -> Checkpoint:
    """Write checkpoint 0 of the new run, and restore its monitor and metrics from the origin.

    Returns: that checkpoint, from which the run is resumed.
    Raises: AshlError if the checkpoint cannot be written; UsageError if the origin's metrics are
    missing or damaged.
    """
    restore_monitor(origin, plan, monitor)
    folder = rank_checkpoint.folder_of(monitor.recorder.run_dir, 0)
    try:
        write_first_checkpoint(folder, origin, plan, monitor, saving)
    except (OSError, RuntimeError) as error:
        text = f"cannot write the checkpoint {folder}; free some space or choose another run.dir"
        raise AshlError(text) from error
    return checkpoints.find_newest(monitor.recorder.run_dir, saving.identity)


def write_first_checkpoint(
    folder: Path, origin: Origin, plan: Plan, monitor: Monitor, saving: Saving
) -> None:
    """Write a checkpoint into `folder`: the parts of all ranks, the monitor's state, the manifest.

    Raises: OSError, or RuntimeError (torch's error for a full disk).
    """
    index, time_ns = origin.lead.stage, origin.saved.time_ns
    before = {rank: saved.state for rank, saved in origin.ranks.items()}
    states = rescale_states(monitor.job.stages[index], before, origin.lead.state, time_ns / 1e9)
    workers, servers = list[SavedRank](), list[SavedRank]()
    for rank, saved in origin.ranks.items():
        (workers if rank < origin.num_workers else servers).append(saved)
    known = [saved.module_state for saved in workers if saved.module_state is not None]
    module_state = mean_of(known) if known else None
    num_workers, files = plan.num_workers, dict[str, str]()
    for rank, state in enumerate(states):
        if rank < num_workers:
            context = share_of_contexts(workers, num_workers, time_ns)
            made = SavedRank(index, state, context, time_ns, module_state=module_state)
        else:
            context = share_of_contexts(servers, len(states) - num_workers, time_ns)
            made = SavedRank(index, state, context, time_ns)
        path = rank_checkpoint.part_of(folder, rank)
        files[path.name] = rank_checkpoint.write(path, encode(made))
    about = {
        "how": RESCALED,
        "time_ns": time_ns,
        "lead_ns": time_ns,
        "ranks_ns": [time_ns] * len(states),
        "absent": [],
    }
    checkpoints.complete_checkpoint(folder, saving.identity, monitor, files, about)


def restore_monitor(origin: Origin, plan: Plan, monitor: Monitor) -> None:
    """Restore the monitor's state and the lines of metrics up to the origin's checkpoint.

    Stages that ended later are dropped, with their boundaries.
    Raises: UsageError if the origin's metrics are missing or damaged.
    """
    index = origin.lead.stage
    known = checkpoints.read_monitor_state(origin.saved, plan.limits)
    run_state = known["run_state"]
    run_state.compression = CompressionStats(4 * plan.num_params)
    run_state.parts = make_model_set(monitor.job.stages[0])
    run_state.outages = []
    run_state.stages = [end for end in run_state.stages if end.stage < index]
    run_state.boundaries = [
        dict.fromkeys(range(plan.num_workers), mean([*totals.values()]))
        for totals in run_state.boundaries[:index]
    ]
    monitor.resume_from({**known, "plan": plan.to_json()})
    try:
        for line in [*jsonl.read(origin.run_dir / METRICS)]:
            if line["time_s"] * 1e9 <= origin.saved.time_ns + 1:
                monitor.recorder.metric(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{origin.run_dir / METRICS} is missing or damaged, so the run cannot be resumed; start"
            f" a new one from its weights: run.start_from={origin.run_dir}"
        ) from error


def share_of_contexts(ranks: list[SavedRank], shares: int, time_ns: int) -> dict[str, Any]:
    """Return the saved context of a new rank: an equal share of the recorded steps and bytes of old
    ranks, and the mean of their times by class. The other values are those of the first old rank.

    Args: shares, number of new ranks among which steps and bytes are divided; time_ns, run time up
    to which the old ranks' time is attributed.
    """
    accounts = [TimeAccounting() for _ in ranks]
    for account, saved in zip(accounts, ranks, strict=True):
        for name, value in saved.context["time_accounting"].items():
            setattr(account, name, value)
    sent = [account.bytes_so_far() for account in accounts]
    share = TimeAccounting()
    share.totals = mean([account.totals_until(time_ns) for account in accounts])
    share.bytes_up, share.bytes_down = (sum(nbytes) // shares for nbytes in zip(*sent, strict=True))
    share.collective_ns = sum(account.collective_ns for account in accounts) // len(ranks)
    # the remainder of the divisions counts as waiting
    share.set_start(sum(share.totals.values()))
    return {
        **ranks[0].context,
        "steps": sum(saved.context["steps"] for saved in ranks) // shares,
        "time_accounting": {name: getattr(share, name) for name in share.__slots__},
    }


def mean(totals_ns: list[dict[str, int]]) -> dict[str, int]:
    """Return the mean of the totals of several ranks, by class of time, in nanoseconds."""
    return {kind: sum(totals[kind] for totals in totals_ns) // len(totals_ns) for kind in KINDS}
