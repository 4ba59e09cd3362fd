"""Metrics of a run: lines of metrics.jsonl, with the names that MLflow shows, and the workers'
compression metrics.

A codec is no contraction if the relative error of its messages is above 1; `CompressionStats` warns
of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ashl.run.evaluation import Evaluation
from ashl.runtime import records
from ashl.runtime.records import Counts, Measures


def metrics_line(
    counts: Counts,
    found: Evaluation,
    time_s: float,
    host_s: float,
    workers: Sequence[Mapping[str, Any]],
    extra: dict[str, float],
    *,
    has_server: bool,
) -> dict[str, Any]:
    """Return the line of one evaluation.

    Args: time_s, on the run's clock; host_s, host seconds; workers, by worker its `rank`, `wait_s`,
    `bytes_up` and `bytes_down`; extra, metrics beside those that every run has; has_server, True if
    a server holds the model (it decides the meaning of `commits`).
    """
    waited = sum(worker["wait_s"] for worker in workers)
    up = sum(worker["bytes_up"] for worker in workers)
    down = sum(worker["bytes_down"] for worker in workers)
    pushes = sum(counts.commits)
    distance = found.consensus_distance
    return {
        # experiment's clock and host time, seconds
        "time_s": time_s,
        "host_s": host_s,
        # totals up to the evaluation; `commits` counts as in `summary.json`
        "step": counts.steps,
        "commits": counts.count_commits(has_server),
        "samples": counts.samples,
        "bytes_up": up,
        "bytes_down": down,
        # accuracy and loss on the test set, and loss on up to 2,000 samples of the training set
        "test/acc": found.test_accuracy,
        "test/loss": found.test_loss,
        "train/loss": found.train_loss,
        # running mean of the losses of the workers' minibatches
        "train/batch_loss": counts.loss,
        # mean squared distance of the workers' models from their mean, if each has its own
        **({} if distance is None else {"consensus/distance": distance}),
        # samples per second since the start
        "perf/samples_per_s": counts.samples / time_s if time_s else None,
        # fraction of the workers' time in which they waited
        "perf/wait_share": waited / (len(workers) * time_s) if workers and time_s else None,
        # mean staleness of pushes, in merges
        "staleness/mean": sum(counts.stale_sum) / pushes if pushes else None,
        # traffic in MB (10^6 bytes)
        "comm/mb_up": up / 1e6,
        "comm/mb_down": down / 1e6,
        # the experiment's clock, again, as the axis of MLflow
        "time/s": time_s,
        **extra,
        # fraction of the time in which worker N waited
        **{
            f"wait/w{worker['rank']}": worker["wait_s"] / time_s if time_s else 0.0
            for worker in workers
        },
    }


def values_of(ranks: Iterable[Measures]) -> dict[str, float]:
    """Return for each measure the mean over the ranks' latest values, as a metric."""
    return {f"measure/{name}": found["last"] for name, found in aggregate_measures(ranks).items()}


def aggregate_measures(ranks: Iterable[Measures]) -> dict[str, dict[str, float]]:
    """Aggregate each measure over the ranks that have it, to `last` and `mean`.

    `last` is the mean of the ranks' latest values, `mean` that of all values of the run.
    """
    by_name: dict[str, list] = {}
    for measures in ranks:
        for name, found in measures.items():
            by_name.setdefault(name, []).append(found)
    return {
        name: {
            "last": fmean(found.last for found in all_found),
            "mean": (
                sum(found.total for found in all_found) / sum(found.count for found in all_found)
            ),
        }
        for name, all_found in sorted(by_name.items())
    }


WARN_AFTER = 3  # reports in a row with a relative error above 1, before the user is warned


@dataclass
class CompressionStats:
    """The workers' compression metrics, and the warning that a codec is no contraction."""

    dense_bytes: int  # bytes of the dense model
    latest: dict[int, records.CompressionReport] = field(default_factory=dict)  # by worker
    # reports in a row with a relative error above 1, by worker
    grown: dict[int, int] = field(default_factory=dict)
    warning: str | None = None

    def add(self, report: records.CompressionReport) -> None:
        """Add a worker's report on one of its messages."""
        rank, error = report.rank, report.relative_error
        self.latest[rank] = report
        grows = error is not None and error > 1 and not report.unbiased
        self.grown[rank] = self.grown.get(rank, 0) + 1 if grows else 0
        if self.grown[rank] == WARN_AFTER and self.warning is None:
            self.warning = (
                f"the codec is not a contraction: at worker {rank} the relative error of messages"
                f" is {error:.3g}, above 1; training may diverge. Take more bits, a larger"
                " ratio, or a codec that is a contraction"
            )

    def metrics(self) -> dict[str, float]:
        """Return the means over the workers' latest reports."""
        rows = self.latest.values()
        columns = {
            "relative_error": [
                row.relative_error for row in rows if row.relative_error is not None
            ],
            "residual": [row.residual for row in rows if row.residual is not None],
            "cosine": [row.cosine for row in rows if row.cosine is not None],
            "bits": [32 * fmean(row.nbytes for row in rows) / self.dense_bytes] if rows else [],
        }
        return {f"compress/{name}": fmean(values) for name, values in columns.items() if values}

    def report(self) -> dict[str, Any] | None:
        """Return the compression metrics of the summary, with the bytes of a message by their use;
        None without a report.
        """
        if not self.latest:
            return None
        rows = list(self.latest.values())
        names = ("headers", "scales", "values", "indices")
        return {
            **{key.removeprefix("compress/"): value for key, value in self.metrics().items()},
            "bytes": {name: fmean(row.split[i] for row in rows) for i, name in enumerate(names)},
            "warning": self.warning,
        }
