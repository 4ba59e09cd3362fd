"""Run a plan in virtual time, in this process, from its beginning or from a checkpoint."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from ashl.cluster.network import make_network
from ashl.cluster.speed import speed_of
from ashl.device import claim_generators
from ashl.errors import AshlError
from ashl.plan.plan import Plan
from ashl.planning.instantiate import Job
from ashl.run import checkpoints
from ashl.run.checkpoints import RESCALED, VIRTUAL, Checkpoint
from ashl.run.monitor import Monitor
from ashl.runtime import rank_checkpoint
from ashl.runtime.churn import Churn
from ashl.runtime.contended_sim import simulator
from ashl.runtime.effects import PeerFailedError, Save
from ashl.runtime.parallel_sim import use_cores
from ashl.runtime.plain_state import decode, encode
from ashl.runtime.rank_checkpoint import RANKS, capture_rank, next_due_ns
from ashl.runtime.rank_context import Observer
from ashl.runtime.sim import Begin, Sim, restore_ranks
from ashl.stage.program import peers_of, run_stages

FAULTS = "faults.safetensors"  # file of the injected faults of a checkpoint


class Saving(NamedTuple):
    """The checkpoints that a run takes."""

    identity: str = ""  # hash of the configuration, see `ashl.run.train.identity`
    every_s: float | None = None  # run time between two; None = no checkpoints


def simulate(
    plan: Plan, job: Job, monitor: Monitor, saving: Saving, saved: Checkpoint | None = None
) -> Sim:
    """Run the plan to its end, and return the simulation.

    Args: saved, the checkpoint to resume from; None = the beginning.
    Raises: AshlError if a checkpoint cannot be written, or if a worker failed in a stage that needs
    all workers.
    """
    cluster = job.parts.cluster
    sim = make_simulation(plan, job, monitor)
    sim.worker_states = job.learner if job.parts.runtime.gradients else None
    monitor.read_heartbeats = lambda: [ctx.heartbeat() for ctx in sim.contexts]
    number = 0 if saved is None else saved.number + 1

    def save(saves: Mapping[int, Save]) -> float:
        """Write a checkpoint; return the time of the next one in nanoseconds."""
        nonlocal number
        folder = rank_checkpoint.folder_of(monitor.recorder.run_dir, number)
        times = {"time_ns": sim.now_ns, "lead_ns": sim.now_ns}
        about = {"how": VIRTUAL, **times, "ranks_ns": [sim.now_ns] * plan.num_ranks}
        about["absent"] = []  # `RANKS` and `FAULTS` have the state of failed workers, too
        ranks = [capture_rank(ctx, saves.get(ctx.rank), sim.speed) for ctx in sim.contexts]
        contents = {RANKS: encode(ranks)}
        if churn is not None:
            contents[FAULTS] = encode(churn.save_state())
        try:
            files = {
                name: rank_checkpoint.write(folder / name, content)
                for name, content in contents.items()
            }
            number += checkpoints.complete_checkpoint(
                folder, saving.identity, monitor, files, about
            )
        except (OSError, RuntimeError) as error:
            text = (
                f"cannot write the checkpoint {folder}; free some space or choose another run.dir"
            )
            raise AshlError(text) from error
        return next_due_ns(sim.now_ns, saving.every_s)

    if saved is not None:
        monitor.resume_from(checkpoints.read_monitor_state(saved, plan.limits))
    sim.save = save
    sim.checkpoint_due_ns = next_due_ns(saved.time_ns if saved else 0, saving.every_s)
    play = partial(run_stages, stages=job.stages)
    churn = None
    if cluster.fault_kinds:
        stage = job.stages[0]
        peers = partial(peers_of, job.stages)
        regroups = stage.topology.regroups
        churn = Churn(sim, cluster, plan.seed, stage.min_workers, peers, play, regroups)
    try:
        runtime = job.parts.runtime
        cores = runtime.cores if runtime.gradients else 1
        with (
            use_cores(sim, cores, plan.num_workers, job.learner),
            claim_generators(job.learner.device),
        ):
            sim.run(play, monitor.draw_progress, saved and make_restorer(plan, job, saved, churn))
    except PeerFailedError as loss:
        raise AshlError(
            f"worker {loss.rank} failed ({loss.why}), and the stage needs all workers, as profiling"
            " does: the run ends here; let it fail later, or give profile=FILE"
        ) from loss
    return sim


def observe(plan: Plan, job: Job, observer: Observer) -> None:
    """Run a plan without injected faults to its end; the observer receives all records."""
    sim = make_simulation(plan, job, observer)
    sim.run(partial(run_stages, stages=job.stages), tick=lambda: None)


def make_simulation(plan: Plan, job: Job, observer: Observer) -> Sim:
    """Make a simulation with the step times and links that the cluster declares."""
    cluster, stage = job.parts.cluster, job.stages[0]
    return simulator(
        plan.num_ranks,
        speed_of(cluster, stage.plan.workers[0].batch, plan.seed),
        make_network(cluster, stage.trainer.dense_bytes, stage.topology.algorithm),
        observer,
        overlaps=any(stage.computes_during_collectives for stage in job.stages),
    )


def make_restorer(plan: Plan, job: Job, saved: Checkpoint, churn: Churn | None) -> Begin:
    """Make the function that sets a simulation to a checkpoint."""
    packages = ("ashl", *plan.allow_targets)
    device = job.stages[0].trainer.device
    ranks = rank_checkpoint.read_ranks(saved.folder, range(plan.num_ranks), packages, device)
    epoch = None
    if churn is not None and saved.how == RESCALED:
        churn.begin_after(saved.time_ns)
    elif churn is not None:
        epoch = churn.restore(decode((saved.folder / FAULTS).read_bytes()))
    return partial(restore_ranks, ranks=[*ranks.values()], time_ns=saved.time_ns, epoch=epoch)
