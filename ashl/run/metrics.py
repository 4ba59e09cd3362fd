"""A line of metrics.jsonl, under the names that MLflow shows, and what the ranks measured by themselves."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from ashl.run.evaluation import Evaluation
from ashl.runtime.records import Counts, Measures


class Waited(NamedTuple):
    """What a line says of a worker."""

    rank: int
    wait_s: float
    bytes_up: int
    bytes_down: int


def metrics_line(
    counts: Counts, found: Evaluation, time_s: float, host_s: float, workers: Sequence[Waited], extra: dict[str, float]
) -> dict[str, Any]:
    """One evaluation; `extra` are metrics beside those that every run has."""
    waited = sum(worker.wait_s for worker in workers)
    up, down = sum(worker.bytes_up for worker in workers), sum(worker.bytes_down for worker in workers)
    pushes = sum(counts.commits)
    distance = found.consensus_distance
    return {
        "time_s": time_s,
        "host_s": host_s,
        "step": counts.steps,
        "commits": pushes,
        "samples": counts.samples,
        "bytes_up": up,
        "bytes_down": down,
        "test/acc": found.test_accuracy,
        "test/loss": found.test_loss,
        "train/loss": found.train_loss,
        "train/batch_loss": counts.loss,
        **({} if distance is None else {"consensus/distance": distance}),
        "perf/samples_per_s": counts.samples / time_s if time_s else None,
        "perf/wait_share": waited / (len(workers) * time_s) if workers and time_s else None,
        "staleness/mean": sum(counts.stale_sum) / pushes if pushes else None,
        "comm/mb_up": up / 1e6,
        "comm/mb_down": down / 1e6,
        "time/s": time_s,
        **extra,
        **{f"wait/w{worker.rank}": worker.wait_s / time_s if time_s else 0.0 for worker in workers},
    }


def values_of(ranks: Iterable[Measures]) -> dict[str, float]:
    """Of each measure the mean over the ranks' latest values."""
    return {f"measure/{name}": found["last"] for name, found in summed_up(ranks).items()}


def summed_up(ranks: Iterable[Measures]) -> dict[str, dict[str, float]]:
    """Of each measure, over the ranks that have it: `last`, the mean of their latest values, and `mean`, that of all
    values of the run."""
    by_name: dict[str, list] = {}
    for measures in ranks:
        for name, found in measures.items():
            by_name.setdefault(name, []).append(found)
    return {
        name: {
            "last": fmean(found.last for found in all_found),
            "mean": sum(found.total for found in all_found) / sum(found.count for found in all_found),
        }
        for name, all_found in sorted(by_name.items())
    }
