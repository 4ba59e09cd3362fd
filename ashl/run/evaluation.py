"""Evaluations of a run's model: which model, its scores, targets, patience and divergence.

If each worker has its own model, the mean of all models is evaluated, with their consensus
distance. If several servers hold a shard each, the shards are concatenated (`ModelSet`).

Mean: x̄ = (1/n)·Σ_i x_i, in double precision and rank order, so that the mean of equal models is
that model bit for bit; consensus distance (1/n)·Σ_i ‖x_i − x̄‖².

A run has diverged if one of these conditions holds for its last model (`find_divergence`):
- a rank has recorded divergence during the run (`Counts.diverged`);
- the training loss is not finite;
- the square of a parameter overflows float32;
- the consensus distance exceeds n·max(‖x̄‖², ‖x_0‖²), with the untrained model x_0;
- the training loss exceeds `RISE` times that of the untrained model, and is at least `UNRELATED`
  times the loss on mispaired samples;
- the mean of the workers' minibatch losses exceeds `FAR` times the untrained model's loss.
A mispaired sample has the target of the sample before it. In the first epoch a loss may rise before
it falls, so `FAR` replaces `RISE` there.

Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021 (the distance).
"""

import math
from collections.abc import Callable, Sequence
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
from ashl.stage.contract import StageConfig


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of one model."""

    time_s: float  # on the run's clock
    # merges of the run before this evaluation; with an equal number the model is the same
    merges: int | None
    train_loss: float
    test_loss: float
    test_accuracy: float | None
    test_metric: float | None = None
    higher_is_better: bool = True  # direction of `test_metric`
    consensus_distance: float | None = None  # None unless each worker has its own model

    @property
    def merit(self) -> float:
        """Return the metric as a number of which higher is better.

        A metric that is not finite gives -inf. Without a metric the merit of every model is 0.
        """
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


@dataclass
class Target:
    """The time at which a run reached the first of its targets.

    A target is reached once the last `stop.target_consecutive_evals` evaluations have all met it.
    The time is that of the first of these evaluations: the later ones only confirm it, and a method
    that merges seldom would wait longer for them.
    """

    reached_s: float | None = None  # run time of the first target that was reached

    def judge(self, limits: Limits, evaluations: Sequence[Evaluation]) -> str | None:
        """Return the name of the target that the last evaluation is the first to confirm, else
        None.

        `target_loss` is a bound on the training loss. Once a target was reached, the result is
        always None.
        """
        last = evaluations[-limits.target_consecutive_evals :]
        if self.reached_s is not None or len(last) < limits.target_consecutive_evals:
            return None
        met = {
            "target_accuracy": [at_least(e.test_accuracy, limits.target_accuracy) for e in last],
            "target_loss": [at_least(limits.target_loss, e.train_loss) for e in last],
            "target_metric": [e.reaches(limits.target_metric) for e in last],
        }
        name = next((name for name, hits in met.items() if all(hits)), None)
        if name is not None:
            self.reached_s = last[0].time_s
        return name


def count_rises(losses: Sequence[float]) -> float:
    """Return the number of evaluations with a higher training loss than the previous one."""
    return float(sum(after > before for before, after in pairwise(losses)))


def scores_of(evaluations: Sequence[Evaluation]) -> dict[str, float | None] | None:
    """Return the values that schedules and sync modes may read; None before the first evaluation.

    These are the latest scores, and in `rises` the result of `count_rises`.
    """
    if not evaluations:
        return None
    last = evaluations[-1]
    return {
        "train_loss": last.train_loss,
        "test_loss": last.test_loss,
        "test_accuracy": last.test_accuracy,
        "test_metric": last.test_metric,
        "rises": count_rises([one.train_loss for one in evaluations]),
    }


def at_least(value: float | None, bound: float | None) -> bool:
    """Return True if value ≥ bound; False if one of them is None."""
    return value is not None and bound is not None and value >= bound


def is_out_of_patience(limits: Limits, evaluations: list[Evaluation]) -> bool:
    """Return True if `stop.patience` or more evaluations came after the best one (`best_of`)."""
    best = best_of(evaluations)
    if limits.patience is None or best is None:
        return False
    since = len(evaluations) - 1 - next(i for i, one in enumerate(evaluations) if one is best)
    return since >= limits.patience


def best_of(evaluations: list[Evaluation]) -> Evaluation | None:
    """Return the evaluation with the best metric.

    Among equal metrics the evaluation with the lowest test loss is the best.
    Limits: evaluations whose test loss is not finite do not count.
    """
    scored = [found for found in evaluations if math.isfinite(found.test_loss)]
    return max(scored, key=lambda found: (found.merit, -found.test_loss), default=None)


class EvaluatedModel(NamedTuple):
    """A model to evaluate, with the counts of the run at that time."""

    snapshot: Snapshot  # the lead rank's, which has the counts
    params: Vector | None
    distance: float | None = None  # consensus distance; None unless each worker has its own model


def mean_of(models: Sequence[Vector]) -> tuple[Vector, float | None]:
    """Return (mean of the models, consensus distance).

    Size-only vectors have no values: the result is then the first of them, and None.
    """
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

    Each worker sends its model with the `tick` that identifies the evaluation; the last one of a
    run has the tick None. The lead rank, which may be a worker, sends the counts. If a rank has
    dropped its snapshot (see `ashl.run.control_channel`), the evaluation stays incomplete. It is
    discarded once that rank sends a later snapshot. An evaluation does not wait for the model of a
    failed worker. With `shards` it waits for one snapshot of each server.
    """

    num_workers: int  # with `shards`, the number of servers
    shards: bool = False  # True if several servers hold a shard of one model each
    end_ns: float = math.inf  # end of the run, once it is decided; no evaluation is later
    # snapshots of incomplete evaluations, by tick and then by rank
    _parts: dict[int | None, dict[int, tuple[Snapshot, Vector | None]]] = field(
        default_factory=dict
    )
    _failed: set[int] = field(default_factory=set)  # workers that have failed and not rejoined
    # by tick: workers whose snapshot the evaluation does not wait for
    _without: dict[int | None, set[int]] = field(default_factory=dict)

    def add(self, snapshot: Snapshot, params: Vector | None) -> EvaluatedModel | None:
        """Add a rank's snapshot; return the model once all of its snapshots are there, else None.

        The snapshot returned has the lead rank's counts. Its time is the latest time among the
        parts, or the end of the run if that is sooner; for the last model, the lead rank's time.
        """
        tick, rank = snapshot.tick, snapshot.rank
        parts = self._parts.setdefault(tick, {})
        parts[rank] = snapshot, params
        for other in [t for t in self._parts if t is not None and (tick is None or t < tick)]:
            if rank not in self._parts[other]:
                # a rank's snapshots arrive in order, so this rank has dropped its earlier one
                self._forget(other)
        self._without.setdefault(tick, set(self._failed)).update(snapshot.without)
        return self._take_complete(tick)

    def exclude_worker(self, rank: int) -> list[EvaluatedModel]:
        """Stop waiting for the models of a failed worker; return the models that this completes.

        Limits: no effect on shards, which only servers send.
        """
        if self.shards:
            return []
        self._failed.add(rank)
        for without in self._without.values():
            without.add(rank)
        return [whole for tick in [*self._parts] if (whole := self._take_complete(tick))]

    def restore_worker(self, rank: int) -> None:
        """Wait for a rejoined worker again, in evaluations of which no snapshot has arrived yet."""
        self._failed.discard(rank)

    def discard_later(self, saved_ns: Callable[[int], float]) -> None:
        """Discard the snapshots that each rank has made after the run time `saved_ns(rank)`."""
        for parts in self._parts.values():
            for rank in [r for r, (own, _) in parts.items() if own.time_ns > saved_ns(r)]:
                del parts[rank]
        for tick in [tick for tick, parts in self._parts.items() if not parts]:
            self._forget(tick)

    def _forget(self, tick: int | None) -> None:
        """Remove the snapshots of a tick."""
        del self._parts[tick]
        del self._without[tick]

    def _take_complete(self, tick: int | None) -> EvaluatedModel | None:
        """Return the model of a tick and remove its snapshots; None if the model is incomplete."""
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
        latest_ns = max(part.time_ns for part, _ in parts.values())
        time_ns = lead.time_ns if tick is None else int(min(latest_ns, self.end_ns))
        found = (concatenate(models), None) if self.shards else mean_of(models)
        return EvaluatedModel(lead._replace(time_ns=time_ns), *found)


def shard_sizes(stage: StageConfig) -> dict[int, int]:
    """Return the number of parameters by server rank; empty if there are not several servers."""
    if stage.topology.servers == 1:
        return {}
    return {stage.server + k: held.size for k, held in enumerate(stage.fragments)}


def make_model_set(stage: StageConfig) -> ModelSet | None:
    """Return an empty model set for models that are combined from several ranks.

    If one rank holds the model that is evaluated, the result is None.
    """
    if stage.topology.servers > 1:
        return ModelSet(stage.topology.servers, shards=True)
    return ModelSet(stage.num_workers) if stage.replicas else None


LARGEST = math.sqrt(3.4028235e38)  # the square of a larger parameter overflows float32
# Factor on the untrained model's loss; a larger training loss is a sign of divergence.
RISE = 1.1
FAR = 10.0  # this factor for minibatch losses and in the first epoch, where losses vary more
# Factor on the loss with mispaired samples; a model with a larger loss has learned little.
UNRELATED = 0.5


def find_divergence(
    counts: Counts, found: Evaluation, params: Tensor, learner: Learner, num_workers: int
) -> str | None:
    """Find the reason if the run has diverged, else None; the module head lists the conditions.

    Args: counts and found, of the last evaluation; params float32 [d], the last model.
    """
    step = f"after step {counts.steps}"
    if counts.diverged:
        return counts.diverged
    if not math.isfinite(found.train_loss):
        return f"the model's loss is {found.train_loss} {step}"
    if (largest := float(params.abs().max())) > LARGEST:
        return f"a parameter of the model is {largest:.3g} {step}"
    untrained = learner.init_untrained()
    if found.consensus_distance is not None:
        length = max(squared_length(params), squared_length(untrained))
        if not found.consensus_distance <= num_workers * length:
            return (
                f"the workers' models are unrelated {step}: their mean squared distance from their"
                f" mean is {found.consensus_distance:.3g}, and that mean's squared length is"
                f" {squared_length(params):.3g}"
            )
    before = learner.train_loss(untrained)
    if not math.isfinite(before):
        return None
    untrained_loss = f"{before:.3g}, the untrained model's"
    factor = FAR if counts.samples < learner.epoch_samples else RISE
    grown = exceeds(found.train_loss, before, factor)
    if grown and not exceeds(learner.train_loss(params, shift=1), found.train_loss, 1 / UNRELATED):
        return (
            f"the model's training loss is {found.train_loss:.3g} {step}, which is more than"
            f" {untrained_loss}"
        )
    if exceeds(counts.loss, before, FAR):
        return (
            f"the workers' training loss is {counts.loss:.3g} {step}, which is more than"
            f" {untrained_loss}"
        )
    return None


def exceeds(loss: float, before: float, factor: float) -> bool:
    """Return True if `loss` exceeds `before` by more than (factor − 1) · |before|.

    Limits: `before` may be negative; the bound is above it in any case.
    """
    return loss > before + (factor - 1) * abs(before)


def squared_length(params: Tensor) -> float:
    """Return ‖x‖² of a vector, in double precision."""
    return float(params.double().square().sum())
