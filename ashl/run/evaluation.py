"""Evaluations of a run's model: what is evaluated, the scores, and whether the run reached a target
or has diverged.

If each worker has a model of its own, the mean of all models is evaluated, with their consensus
distance. If several servers hold a shard each, the shards are concatenated (`ModelSet`).

Mean: x̄ = (1/n)·Σ_i x_i, in double precision and rank order, so that the mean of equal models is
that model bit for bit; consensus distance (1/n)·Σ_i ‖x_i − x̄‖².

A run has diverged if its last model, or a worker's own, is noise:
- its training loss is not finite;
- the square of a parameter overflows float32;
- the workers' models are farther from their mean than as many unrelated models would be;
- its training loss is above that of the untrained model, and the model fits its samples hardly
  better than samples that were paired at random;
- the workers' minibatch losses are far above the untrained model's loss.
In the first epoch a loss may rise before it falls, so only a rise by the factor `FAR` counts there.

Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021 (the distance).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ashl.learn.learner import Learner
from ashl.plan.plan import Limits
from ashl.runtime.records import Counts, Snapshot
from ashl.runtime.sums import concatenate
from ashl.size_only import SizeOnly, Vector
from ashl.stage.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of one model."""

    time_s: float  # on the run's clock
    merges: int | None  # merges before it; a model with the same number is the same model
    train_loss: float
    test_loss: float
    test_accuracy: float | None
    test_metric: float | None = None
    higher_is_better: bool = True  # of the metric
    consensus_distance: float | None = None  # if each worker has a model of its own

    @property
    def merit(self) -> float:
        """Return the metric, negated if lower is better; 0 for every model without a metric."""
        if self.test_metric is None:
            return 0.0
        return (
            (self.test_metric if self.higher_is_better else -self.test_metric)
            if math.isfinite(self.test_metric)
            else -math.inf
        )

    def reaches(self, bound: float | None) -> bool:
        """Return True if the metric is at least as good as `bound`; False if `bound` is None."""
        lower, higher = (
            (bound, self.test_metric) if self.higher_is_better else (self.test_metric, bound)
        )
        return at_least(higher, lower)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.train_loss)


@dataclass
class Target:
    """The run's targets: one is reached when it held for `stop.target_consecutive_evals`
    evaluations in a row.

    Each target is counted by itself. The time at which it is reached is that of its last
    evaluation.
    """

    held: dict[str, int] = field(default_factory=dict)  # evaluations in a row, by target
    reached_s: float | None = None  # run time of the first target that was reached

    def judge(self, limits: Limits, found: Evaluation) -> str | None:
        """Return the name of the target that this evaluation reaches; None for all later ones."""
        met = {
            "target_accuracy": at_least(found.test_accuracy, limits.target_accuracy),
            "target_loss": at_least(limits.target_loss, found.train_loss),
            "target_metric": found.reaches(limits.target_metric),
        }
        self.held = {name: self.held.get(name, 0) + 1 if hit else 0 for name, hit in met.items()}
        reached = [
            name for name, held in self.held.items() if held >= limits.target_consecutive_evals
        ]
        if not reached or self.reached_s is not None:
            return None
        self.reached_s = found.time_s
        return reached[0]


def rises(losses: Sequence[float]) -> float:
    """Return how often the training loss was above that of the previous evaluation."""
    return float(sum(after > before for before, after in pairwise(losses)))


def scores_of(evaluations: Sequence[Evaluation]) -> dict[str, float | None] | None:
    """Return what schedules and sync modes may read: the latest scores, and how often the training
    loss has risen.
    """
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
    """Return True if the last `stop.patience` evaluations or more brought no new best, as `best_of`
    judges.
    """
    best = best_of(evaluations)
    if limits.patience is None or best is None:
        return False
    since = len(evaluations) - 1 - next(i for i, one in enumerate(evaluations) if one is best)
    return since >= limits.patience


def best_of(evaluations: list[Evaluation]) -> Evaluation | None:
    """Return the evaluation with the best metric, and of equal ones that with the lowest test loss.

    Limits: evaluations whose test loss is not finite do not count.
    """
    scored = [found for found in evaluations if math.isfinite(found.test_loss)]
    return max(scored, key=lambda found: (found.merit, -found.test_loss), default=None)


class EvaluatedModel(NamedTuple):
    """A model to evaluate, with the counts of the run at that time."""

    snapshot: Snapshot  # the one with the counts
    params: Vector | None
    distance: float | None = None  # consensus distance, if each worker has a model of its own


def mean_of(models: Sequence[Vector]) -> tuple[Vector, float | None]:
    """Return (x̄, consensus distance); vectors without values have no distance."""
    tensors = [model for model in models if not isinstance(model, SizeOnly)]
    if not tensors:
        return models[0], None
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for model in tensors:
        total += model
    mean: Tensor = (total / len(tensors)).to(tensors[0].dtype)
    squares = [
        float(torch.linalg.vector_norm(model - mean, dtype=torch.float64)) ** 2 for model in tensors
    ]
    return mean, sum(squares) / len(tensors)


@dataclass
class ModelSet:
    """The snapshots of several ranks that make one evaluation together.

    Each worker sends its model with the evaluation's `tick` (None at the end). The lead rank, which
    may be a worker, sends the counts. A snapshot that a rank dropped (see `run.control_channel`)
    makes its evaluation incomplete: it is discarded. The model of a failed worker is not waited
    for. With `shards`, one snapshot per server is waited for.
    """

    num_workers: int  # with `shards`, the number of servers
    shards: bool = False
    # by tick, by rank
    _parts: dict[int | None, dict[int, tuple[Snapshot, Vector | None]]] = field(
        default_factory=dict
    )
    _failed: set[int] = field(default_factory=set)  # workers that have failed and not rejoined
    # by tick: workers whose snapshot is not waited for
    _without: dict[int | None, set[int]] = field(default_factory=dict)

    def add(self, snapshot: Snapshot, params: Vector | None) -> EvaluatedModel | None:
        """Add a rank's snapshot; return the model, with the counts and the latest time, once all of
        its snapshots are there.
        """
        tick, rank = snapshot.tick, snapshot.rank
        parts = self._parts.setdefault(tick, {})
        parts[rank] = snapshot, params
        for other in [t for t in self._parts if t is not None and (tick is None or t < tick)]:
            if rank not in self._parts[other]:
                # a rank's snapshots arrive in order, so the earlier one was dropped
                self._forget(other)
        self._without.setdefault(tick, set(self._failed)).update(snapshot.without)
        return self._whole(tick)

    def exclude_worker(self, rank: int) -> list[EvaluatedModel]:
        """Do not wait for the models of a failed worker; return those that are complete without it.

        Limits: no effect on shards, which only servers send.
        """
        if self.shards:
            return []
        self._failed.add(rank)
        for without in self._without.values():
            without.add(rank)
        return [whole for tick in [*self._parts] if (whole := self._whole(tick))]

    def restore_worker(self, rank: int) -> None:
        """Wait for the models of a rejoined worker again."""
        self._failed.discard(rank)

    def has_pending(self, merges: int) -> bool:
        """Return True if shards of a model after at most `merges` merges are missing."""
        return self.shards and any(tick is not None and tick <= merges for tick in self._parts)

    def discard_pending(self) -> None:
        """Discard all incomplete models."""
        self._parts.clear()
        self._without.clear()

    def _forget(self, tick: int | None) -> None:
        del self._parts[tick]
        del self._without[tick]

    def _whole(self, tick: int | None) -> EvaluatedModel | None:
        """Return the model of a tick, and forget its snapshots; None if it is incomplete."""
        parts, without = self._parts[tick], self._without[tick]
        models = [model for _, (_, model) in sorted(parts.items()) if model is not None]
        lead = next((part for part, _ in parts.values() if part.counts is not None), None)
        if (
            lead is None
            or not models
            or len(models) + len(without - parts.keys()) < self.num_workers
        ):
            return None
        self._forget(tick)
        time_ns = lead.time_ns if tick is None else max(part.time_ns for part, _ in parts.values())
        found = (concatenate(models), None) if self.shards else mean_of(models)
        return EvaluatedModel(lead._replace(time_ns=time_ns), *found)


def shard_sizes(stage: Stage) -> dict[int, int]:
    """Return the number of parameters by server rank, if several servers hold a shard each."""
    if stage.topology.servers == 1:
        return {}
    return {stage.server + k: held.size for k, held in enumerate(stage.fragments)}


def make_model_set(stage: Stage) -> ModelSet | None:
    """Return an empty model set if no rank holds the model that is evaluated, else None."""
    if stage.topology.servers > 1:
        return ModelSet(stage.topology.servers, shards=True)
    return ModelSet(stage.num_workers) if stage.replicas else None


LARGEST = math.sqrt(3.4028235e38)  # the square of a larger parameter overflows float32
RISE = 1.1  # a loss above this factor times the untrained model's loss is a rise
FAR = 10.0  # the factor for minibatches and within the first epoch, where losses vary more
# A loss above this fraction of the loss on samples paired at random: the model learned little.
UNRELATED = 0.5


def why_diverged(
    counts: Counts, found: Evaluation, params: Tensor, learner: Learner, num_workers: int
) -> str | None:
    """Return why the run with this last evaluation has diverged; None if it has not.

    Args: params float32 [d], the last model.
    """
    step = f"after step {counts.steps}"
    if counts.diverged:
        return counts.diverged
    if not found.finite:
        return f"the model's loss is {found.train_loss} {step}"
    if (largest := float(params.abs().max())) > LARGEST:
        return f"a parameter of the model is {largest:.3g} {step}"
    untrained = learner.untrained()
    if found.consensus_distance is not None:
        length = max(squared(params), squared(untrained))
        if not found.consensus_distance <= num_workers * length:
            return (
                f"the workers' models are unrelated {step}: their mean squared distance from their"
                f" mean is {found.consensus_distance:.3g}, and that mean's squared length is"
                f" {squared(params):.3g}"
            )
    before = learner.train_loss(untrained)
    if not math.isfinite(before):
        return None
    untrained_loss = f"{before:.3g}, the untrained model's"
    factor = FAR if counts.samples < learner.epoch_samples else RISE
    grown = risen(found.train_loss, before, factor)
    if grown and not risen(learner.train_loss(params, shift=1), found.train_loss, 1 / UNRELATED):
        return (
            f"the model's training loss is {found.train_loss:.3g} {step}, which is more than"
            f" {untrained_loss}"
        )
    if risen(counts.loss, before, FAR):
        return (
            f"the workers' training loss is {counts.loss:.3g} {step}, which is more than"
            f" {untrained_loss}"
        )
    return None


def risen(loss: float, before: float, factor: float) -> bool:
    """Return True if `loss` exceeds `before` by more than (factor − 1) · |before|.

    Limits: losses may be negative.
    """
    return loss > before + (factor - 1) * abs(before)


def squared(params: Tensor) -> float:
    """Return the squared length of a vector."""
    return float(params.double().square().sum())
