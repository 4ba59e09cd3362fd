"""A run goes on with another number of workers, in a run folder of its own.

Rule: the newest whole checkpoint of the run becomes the first one of the new run, with the state of
each of its ranks as if these had been at it (`ashl.topology.rescaling`): all stand at the top of
their loops at one moment, and nothing is on its way, whatever the mode. From there on it is resumed
as any other. What was on its way is lost, and computed again. What evaluations found comes along;
times and bytes are dealt out over the workers, each being given the mean, so that sums and shares
are those of the whole run. The folder that it came from stays as it is.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ashl.cluster.spec import Cluster
from ashl.errors import AshlError, UsageError
from ashl.learn.module_state import mean_of
from ashl.plan.plan import Plan
from ashl.planning.compatibility import check_other_worker_count
from ashl.planning.instantiate import Job
from ashl.run import checkpoints
from ashl.run.checkpoints import ANEW, LOCKSTEP, STATE, VIRTUAL, Checkpoint
from ashl.run.metrics import CompressionStats
from ashl.run.monitor import Monitor
from ashl.run.virtual import Saving
from ashl.runtime import rank_checkpoint
from ashl.runtime.plain_state import from_plain, to_plain
from ashl.runtime.time_accounting import KINDS, TimeAccounting
from ashl.topology.rescaling import rescale_states
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS, writing

RESUMED = "resumed"  # in the configuration: the folder of the run that it goes on with


class Origin(NamedTuple):
    """What another run had come to: the checkpoint, the plan, where it stood, and what its nodes
    had counted.
    """

    run_dir: Path
    saved: Checkpoint
    plan: Plan
    stage: int
    state: Any  # that all agree on
    time_ns: int  # ... at this moment
    nodes: list[dict[str, Any]]  # by rank
    drawn: list[int]
    own: Any  # what the workers' modules keep beside the parameters, in the mean

    @property
    def note(self) -> str:
        progress = self.state.progress
        return (
            f"goes on from {self.run_dir}, which had {self.plan.num_workers} workers, at"
            f" {self.time_ns / 1e9:.4g} s and step {progress.steps:,}: model, moments of merged"
            " gradients, counts and clock are kept; each worker's own momentum and what"
            " compression keeps begin anew"
        )


def rescales(config: dict[str, Any], run_dir: Path | None) -> bool:
    """Whether this configuration is to go on with that run, with other workers."""
    return run_dir is not None and config.get(RESUMED) == str(run_dir.resolve())


def origin_of(run_dir: Path, identity: str, plan: Plan, job: Job) -> Origin:
    """What this plan is to go on from. Raises UsageError where that has no meaning for other
    workers, and AshlError while another process goes on with it.
    """
    check_other_worker_count(job.parts, run_dir)
    with writing(run_dir), jsonl.alone(run_dir / METRICS):
        pass
    saved = checkpoints.newest(run_dir, identity)
    if saved.how != ANEW:
        checkpoints.refuse_other_kernel(run_dir, saved, virtual=job.parts.runtime.name == "sim")
    before = checkpoints.plan_of(saved)
    if before.num_workers == plan.num_workers:
        raise UsageError(
            f"the run in {run_dir} has {plan.num_workers} workers already; drop what is said of"
            " them"
        )
    packages, device = ("ashl", *plan.allow_targets), job.stages[0].trainer.device
    if saved.how == VIRTUAL:
        document = torch.load(saved.folder / STATE, weights_only=True)
        mark, drawn = (
            document["safe_points"][before.lead_rank],
            [mark["drawn"] for mark in document["safe_points"]],
        )
        stage, state, time_ns = (
            mark["stage"],
            from_plain(mark["state"], packages, device),
            mark["time_ns"],
        )
        nodes = from_plain(document["contexts"])
        states = [from_plain(mark["own"], packages, device) for mark in document["safe_points"]]
    else:
        ranks = [
            rank_checkpoint.read(rank_checkpoint.part_of(saved.folder, r), packages, device)
            for r in range(before.num_ranks)
        ]
        home = ranks[before.lead_rank]
        state, time_ns, states = home.state, home.time_ns, [rank.own for rank in ranks]
        stage, nodes, drawn = (
            home.stage,
            [rank.context for rank in ranks],
            [rank.drawn for rank in ranks],
        )
    there = [state for state in states[: before.num_workers] if state is not None]
    own = mean_of(there) if there else None
    cluster = job.parts.cluster
    if state.assigned is not None and not (isinstance(cluster, Cluster) and not cluster.missing()):
        raise UsageError(
            f"{run_dir} is planned by what it has measured of its {before.num_workers} workers, and"
            " nothing is known of others; a new run takes its weights along, and measures them:"
            f" run.start_from={run_dir}"
        )
    return Origin(run_dir, saved, before, stage, state, time_ns, nodes, drawn, own)


def begin(origin: Origin, plan: Plan, monitor: Monitor, saving: Saving) -> Checkpoint:
    """The first checkpoint of the new run, with what its monitor knows by then. Raises AshlError
    where it cannot be written.
    """
    take_over(origin, plan, monitor)
    folder = rank_checkpoint.folder_of(monitor.recorder.run_dir, 0)
    try:
        write(folder, origin, plan, monitor, saving)
    except (OSError, RuntimeError) as error:
        text = f"cannot write the checkpoint {folder}; free some space or choose another run.dir"
        raise AshlError(text) from error
    return checkpoints.newest(monitor.recorder.run_dir, saving.identity)


def write(folder: Path, origin: Origin, plan: Plan, monitor: Monitor, saving: Saving) -> None:
    """What each rank goes on from, and what home knows."""
    stage, time_ns, n = monitor.job.stages[origin.stage], origin.time_ns, origin.plan.num_workers
    states, files = rescale_states(stage, origin.state, time_ns / 1e9), {}
    for rank, state in enumerate(states):
        peers = origin.nodes[:n] if rank < plan.num_workers else origin.nodes[n:]
        node = taken_over(
            peers, rank % len(peers), plan.num_workers if rank < plan.num_workers else 1, time_ns
        )
        document = {
            "stage": origin.stage,
            "state": to_plain(state),
            "context": to_plain(node),
            "time_ns": time_ns,
        }
        drawn = origin.drawn[rank] if rank < n else 0  # of jitter
        document |= {"own": to_plain(origin.own if rank < plan.num_workers else None)}
        path = rank_checkpoint.part_of(folder, rank)
        files[path.name] = rank_checkpoint.write(path, {**document, "drawn": drawn})
    about = {"how": ANEW, "version": origin.state.version, "time_ns": time_ns, "home_ns": time_ns}
    checkpoints.complete(
        folder, saving.identity, monitor, files, {**about, "ranks_ns": [time_ns] * len(states)}
    )


def take_over(origin: Origin, plan: Plan, monitor: Monitor) -> None:
    """What home knew by then, and the lines of the metrics. Of a border that came right after that,
    nothing.
    """
    time_ns, n = origin.time_ns, plan.num_workers
    known = checkpoints.monitor_of(
        origin.saved._replace(how=LOCKSTEP, home_ns=time_ns), plan.limits
    )
    run_state = known["books"]
    run_state.compression, run_state.outages = CompressionStats(4 * plan.num_params), []
    run_state.stages = [end for end in run_state.stages if end.stage < origin.stage]
    run_state.boundaries = [
        dict.fromkeys(range(n), mean([*of.values()])) for of in run_state.boundaries[: origin.stage]
    ]
    monitor.resume_from({**known, "plan": plan.to_json()})
    try:
        lines = [
            line
            for line in jsonl.read(origin.run_dir / METRICS)
            if line["time_s"] * 1e9 <= time_ns + 1
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{origin.run_dir / METRICS} is missing or damaged, so the run cannot be resumed"
        ) from error
    for line in lines:
        monitor.recorder.metric(line)


def taken_over(nodes: list[dict[str, Any]], first: int, n: int, time_ns: int) -> dict[str, Any]:
    """What one of n nodes has counted, in the place of these."""
    ledgers = [TimeAccounting() for _ in nodes]
    for ledger, node in zip(ledgers, nodes, strict=True):
        for name, value in node["time_accounting"].items():
            setattr(ledger, name, value)
    sent, own = [ledger.bytes_so_far() for ledger in ledgers], TimeAccounting()
    own.totals = mean([ledger.totals_until(time_ns) for ledger in ledgers])
    own.bytes_up, own.bytes_down = (sum(nbytes) // n for nbytes in zip(*sent, strict=True))
    own.collective_ns = sum(ledger.collective_ns for ledger in ledgers) // len(nodes)
    own.start_at(sum(own.totals.values()))  # what is lost by rounding was waiting
    steps = sum(node["steps"] for node in nodes) // n
    return {
        **nodes[first],
        "steps": steps,
        "time_accounting": {name: getattr(own, name) for name in own.__slots__},
    }


def mean(totals_ns: list[dict[str, int]]) -> dict[str, int]:
    """Of what ranks' time went into."""
    return {kind: sum(totals[kind] for totals in totals_ns) // len(totals_ns) for kind in KINDS}
