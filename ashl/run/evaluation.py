"""What the evaluations of a run found, and when its target was reached."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ashl.plan.plan import Limits


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model that was evaluated. `merges` tells whether it has changed since; `consensus_distance` is that of the
    workers' models from their mean, where each has its own."""

    time_s: float
    merges: int | None
    train_loss: float
    test_loss: float
    test_accuracy: float | None
    test_metric: float | None = None
    higher_is_better: bool = True  # of the metric
    consensus_distance: float | None = None

    @property
    def merit(self) -> float:
        """The metric, negated where lower is better; the same for all where there is none."""
        if self.test_metric is None:
            return 0.0
        return (
            (self.test_metric if self.higher_is_better else -self.test_metric)
            if math.isfinite(self.test_metric)
            else -math.inf
        )

    def reaches(self, bound: float | None) -> bool:
        """Whether the metric is as good as this; no bound is never reached."""
        lower, higher = (bound, self.test_metric) if self.higher_is_better else (self.test_metric, bound)
        return at_least(higher, lower)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.train_loss)


@dataclass
class Target:
    """A target counts when it held for so many evaluations in a row, whatever another one did meanwhile; its time is
    that of the last of them."""

    held: dict[str, int] = field(default_factory=dict)
    reached_s: float | None = None

    def judge(self, limits: Limits, found: Evaluation) -> str | None:
        """The name of the target that was reached with this evaluation, once."""
        met = {
            "target_accuracy": at_least(found.test_accuracy, limits.target_accuracy),
            "target_loss": at_least(limits.target_loss, found.train_loss),
            "target_metric": found.reaches(limits.target_metric),
        }
        self.held = {name: self.held.get(name, 0) + 1 if hit else 0 for name, hit in met.items()}
        reached = [name for name, held in self.held.items() if held >= limits.target_consecutive_evals]
        if not reached or self.reached_s is not None:
            return None
        self.reached_s = found.time_s
        return reached[0]


def rises(losses: Sequence[float]) -> float:
    """How often the training loss was above that of the evaluation before."""
    return float(sum(after > before for before, after in pairwise(losses)))


def scores_of(evaluations: Sequence[Evaluation]) -> dict[str, float | None] | None:
    """What rules may know of them: the last one's scores, and how often the loss has risen."""
    if not evaluations:
        return None
    last = evaluations[-1]
    return {
        "train_loss": last.train_loss,
        "test_loss": last.test_loss,
        "test_accuracy": last.test_accuracy,
        "test_metric": last.test_metric,
        "rises": rises([one.train_loss for one in evaluations]),
    }


def at_least(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value >= bound


def is_out_of_patience(limits: Limits, evaluations: list[Evaluation]) -> bool:
    """Return True if the last `stop.patience` evaluations or more brought no new best, as `best_of` judges."""
    best = best_of(evaluations)
    if limits.patience is None or best is None:
        return False
    since = len(evaluations) - 1 - next(i for i, one in enumerate(evaluations) if one is best)
    return since >= limits.patience


def best_of(evaluations: list[Evaluation]) -> Evaluation | None:
    """The one with the best metric, of equal ones that with the lowest loss."""
    scored = [found for found in evaluations if math.isfinite(found.test_loss)]
    return max(scored, key=lambda found: (found.merit, -found.test_loss), default=None)
