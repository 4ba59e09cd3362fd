"""What a person sees of a run while it goes on."""

from collections.abc import Collection, Sequence
from statistics import fmean

from ashl.plan.plan import Limits, Plan
from ashl.run.evaluation import Evaluation
from ashl.runtime.records import Counts, Heartbeat
from ashl.tracking.console import Frame, WorkerFrame


def view(
    plan: Plan,
    ended: int,
    counts: Counts | None,
    beats: Sequence[Heartbeat],
    absent: Collection[int],
    epoch_samples: int,
    found: Evaluation | None,
    metric: tuple[str, float] | None,
    host_s: float,
    virtual: bool,
) -> Frame:
    """How the run stands, after so many stages that have ended; `found` and `metric`: by the last evaluation."""
    time_s = max((beat.time_ns for beat in beats), default=0) / 1e9
    done = share_done(plan.limits, counts, time_s, epoch_samples)
    passed_s = host_s if virtual else time_s  # processes took time to start
    waits = [waited(beat, time_s) for beat in beats]
    batches = [worker.batch for worker in plan.stages[0].workers]
    workers = [worker_frame(beat, batches[beat.rank], time_s, beat.rank in absent) for beat in beats]
    return Frame(
        time_s=time_s,
        host_s=host_s,
        stage=plan.stages[min(ended, len(plan.stages) - 1)].name,
        steps=counts.steps if counts else 0,
        commits=sum(counts.commits) if counts else 0,
        loss=counts.loss if counts else None,
        accuracy=found.test_accuracy if found else None,
        metric=metric,
        samples_per_s=counts.samples / time_s if counts and time_s else None,
        wait_share=fmean(waits) if waits else None,
        progress=done,
        eta_host_s=passed_s * (1 - done) / done if done else None,
        workers=workers,
    )


def worker_frame(beat: Heartbeat, batch: int, time_s: float, absent: bool) -> WorkerFrame:
    return WorkerFrame(
        rank=beat.rank,
        step=beat.steps,
        samples_per_s=beat.steps * batch / time_s if time_s else None,
        wait_share=waited(beat, time_s),
        staleness=beat.staleness,
        loss=beat.loss,
        down=absent,
    )


def waited(beat: Heartbeat, time_s: float) -> float:
    return beat.totals_ns["wait"] / 1e9 / time_s if time_s else 0.0


def share_done(limits: Limits, counts: Counts | None, time_s: float, epoch_samples: int) -> float:
    """The share of the run that is behind us, by whichever limit is nearest."""
    steps, samples = (counts.steps, counts.samples) if counts else (0, 0)
    shares = [
        samples / (limits.epochs * epoch_samples) if limits.epochs else 0.0,
        steps / limits.steps if limits.steps else 0.0,
        time_s / limits.seconds if limits.seconds else 0.0,
    ]
    return min(1.0, max(shares))
