"""A plan in exact virtual time, in this process: from its beginning, or from a checkpoint on."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from ashl.cluster.network import network
from ashl.cluster.speed import speed_of
from ashl.errors import AshlError
from ashl.plan.plan import Plan
from ashl.planning.build import Job
from ashl.run.monitor import Monitor
from ashl.runtime import checkpoint
from ashl.runtime.churn import Churn
from ashl.runtime.cores import on_cores
from ashl.runtime.effects import PeerLostError
from ashl.runtime.packed import packed, unpacked
from ashl.runtime.sim import Sim
from ashl.stage.program import hearing, program


class Saving(NamedTuple):
    """Which checkpoints are left: every so many seconds of the run's clock. `identity` is written into them: what the
    run is, apart from when it stops."""

    identity: str = ""
    every_s: float | None = None


def simulate(
    plan: Plan,
    job: Job,
    monitor: Monitor,
    saving: Saving,
    saved: dict[str, Any] | None = None,
) -> Sim:
    """Run the plan, from its beginning or from what was saved."""
    cluster, stage = job.parts.cluster, job.stages[0]
    speed = speed_of(cluster, stage.plan.workers[0].batch, plan.seed)
    costs = network(cluster, stage.trainer.dense_bytes, stage.topology.algorithm)
    sim = Sim(plan.num_ranks, speed, costs, monitor)
    monitor.read_beats = lambda: [node.beat() for node in sim.nodes]
    run_dir = monitor.recorder.run_dir

    def keep(document: dict[str, Any]) -> int | None:
        if monitor.stopping is not None:  # ranks may know of it already
            return None
        about = {"run": saving.identity, "sizes": monitor.recorder.sizes(), "monitor": packed(monitor.state())}
        checkpoint.write(run_dir, {**document, **about})
        return following(document["time_ns"], saving.every_s)

    if saved is not None:
        monitor.go_on(unpacked(saved["monitor"]))
        saved = {**saved, "packages": ("ashl", *plan.allow_targets), "device": stage.trainer.device}
    if (due := following(saved["time_ns"] if saved else 0, saving.every_s)) is not None:
        sim.save_at(due, keep)
    play = partial(program, stages=job.stages)
    if cluster.befalls:
        Churn(sim, cluster, plan.seed, stage.min_workers, partial(hearing, job.stages), play)
    try:
        runtime = job.parts.runtime
        with on_cores(sim, runtime.cores if runtime.gradients else 1, plan.num_workers, job.learner):
            sim.run(play, monitor.tick, saved=saved)
    except PeerLostError as loss:
        raise AshlError(
            f"worker {loss.rank} is lost ({loss.why}), and what is under way needs it, as profiling does: the run ends "
            "here; let it fail later, or give profile=FILE"
        ) from loss
    return sim


def following(now_ns: int, every_s: float | None) -> int | None:
    """When the next checkpoint is due, in nanoseconds: whole ones, lest it be at this very moment."""
    if every_s is None:
        return None
    every_ns = max(1, round(every_s * 1e9))
    return (now_ns // every_ns + 1) * every_ns
