"""Run a worker's `Compute` effects: the learner on the worker's next batch, then the optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ashl.config.faults import Guard
from ashl.data.batches import Batches
from ashl.data.partition import redistribute_shards
from ashl.device import HOST, is_on_host, read_scalars, to_device
from ashl.learn.learner import Learner, dotted_name, place_of
from ashl.learn.pieces import Pieces
from ashl.optimizer.absent import add_gradients, has_absent, is_absent, restore_absent
from ashl.optimizer.contract import Optimizer
from ashl.optimizer.plain import PlainOptimizer
from ashl.size_only import SizeOnly

Moments = tuple[Any, ...]
KEPT = 8  # trainers with redistributed samples that a trainer keeps


class Trainer:
    """Pure functions over flat vectors [d]; arguments are never changed.

    Batches are counted per worker from 0.
    """

    def __init__(
        self,
        learner: Learner,
        optimizer: Optimizer,
        deal: Callable[[Sequence[float]], list[Batches]],
        shares: Sequence[float],
        in_rounds: bool = False,
    ) -> None:
        """Args: deal returns each worker's batches, given all workers' shares of the data;
        in_rounds is True if all workers are at the same step.
        """
        self.learner, self.optimizer, self.deal, self.in_rounds = (
            learner,
            optimizer,
            deal,
            in_rounds,
        )
        self.batches = deal(shares)
        made = optimizer.make if isinstance(optimizer, PlainOptimizer) else type(optimizer)
        self._of_step = (("optimizer", dotted_name(made)),)
        # The mean density of the latest steps, with the steps and weights to which it belongs.
        self._last: tuple[Any, float] = (None, 1.0)
        # the last trainers of `redistribute`, by failed workers: all workers of a simulation ask
        self._redistributed: dict[frozenset[int], Trainer] = {}
        self.epoch_samples = learner.epoch_samples
        self.num_params = learner.num_params
        self.dense_bytes = 4 * learner.num_params

    def reshard(self, shares: Sequence[float]) -> Trainer:
        """Return a trainer with other shares of the data."""
        return Trainer(self.learner, self.optimizer, self.deal, shares, self.in_rounds)

    def redistribute(self, failed: frozenset[int]) -> Trainer:
        """Return the trainer with which survivors use the samples of failed workers, too."""
        known = self._redistributed
        if failed not in known:
            while len(known) >= KEPT:
                del known[next(iter(known))]
            other = known[failed] = copy.copy(self)
            shards = redistribute_shards([batches.shard for batches in self.batches], failed)
            other.batches = [
                own.with_shard(shard) for own, shard in zip(self.batches, shards, strict=True)
            ]
            other._last = (None, 1.0)
        return known[failed]

    @property
    def weighs(self) -> bool:
        """True if some samples have more targets that count than others."""
        return self.learner.counts is not None

    def share(self, worker: int, steps: range, weights: Sequence[float] | None = None) -> float:
        """Return the density of targets that count in these minibatches, divided by its mean over
        all workers.

        A mean loss times its share, weighted by samples, is the mean over all targets that count.
        In rounds, densities are those of the same steps, else those of the whole shards. Returns 1
        if all samples count equally.

        Args: weights are those of the workers; None = their batch sizes.
        """
        counts = self.learner.counts
        if counts is None:
            return 1.0

        steps = steps if self.in_rounds else range(0)
        own = density(counts, self.batches[worker], steps)
        asked = (steps, None if weights is None else tuple(weights))
        if self._last[0] != asked:
            weighed = (
                [float(batches.size) for batches in self.batches] if weights is None else weights
            )
            each = zip(weighed, self.batches, strict=True)
            mean = sum(weight * density(counts, batches, steps) for weight, batches in each) / sum(
                weighed
            )
            self._last = asked, mean
        return own / self._last[1] if self._last[1] else 1.0

    def _share_of(self, worker: int, step: int, span: range | None) -> float:
        """Return the share of one minibatch; if its size is not the planned one, that of the
        shard.
        """
        size = self.batches[worker].size
        planned = span is None or span == range(step * size, (step + 1) * size)
        return self.share(worker, range(step, step + 1) if planned else range(0))

    def worker_state(self, worker: int) -> Any:
        """Return the part of the module's state that this worker's forward passes have changed."""
        return self.learner.worker_state(worker)

    def set_worker_state(self, worker: int, state: Any) -> None:
        """Set the module state of a worker; None is the first one."""
        self.learner.set_worker_state(worker, state)

    def make_placeholder(self, size: float) -> Tensor:
        """Return a payload of this share of the model's size, for measurements."""
        return to_device(torch.zeros(max(1, round(size * self.learner.num_params))), self.device)

    def init(self) -> tuple[Tensor, Moments]:
        """Return the initial model, the same on every rank, and empty optimizer moments."""
        return self.learner.init(), self.moments()

    def moments(self) -> Moments:
        """Return empty moments on the device; integers that the optimizer counts stay on the
        host.
        """
        own = (
            self.optimizer.init_for_layers(self.learner.layers)
            if self.statistics
            else self.optimizer.init(self.num_params)
        )
        return tuple(to_device(x, self.device) if x.is_floating_point() else x for x in own)

    @property
    def device(self) -> str:
        """The device of all vectors."""
        return self.learner.device

    @property
    def statistics(self) -> int:
        """Elements that workers exchange for an optimizer that does not use gradients; else 0."""
        return self.optimizer.statistics(self.learner.layers)

    def sweep(
        self, params: Tensor, moments: Moments, blocks: Any, worker: int
    ) -> tuple[float, Any, Tensor]:
        """Return loss, blocks and statistics of all samples of a worker, for an optimizer with
        statistics.
        """
        inputs, targets = self.learner.samples(self.batches[worker].shard)
        return self.optimizer.sweep(params, moments, blocks, inputs, targets)

    def gradient(
        self, params: Tensor, worker: int, step: int, span: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return loss, still on the device, and gradient on batch `step` of a worker.

        Args: span, if given, is the range of its stream of samples to use instead.
        """
        batches = self.batches[worker]
        indices = batches.indices(step) if span is None else batches.span(span.start, len(span))
        return self.learner.gradient(
            params, indices, worker, step, self._share_of(worker, step, span)
        )

    def gradient_in_parts(
        self,
        params: Tensor | Pieces,
        worker: int,
        step: int,
        span: range,
        parts: Sequence[tuple[int, int]],
        hand_out: Callable[[int, Tensor], None],
    ) -> float:
        """Compute the gradient on the samples `span` part by part, and return the loss.

        See `Learner.gradient_in_parts`.
        """
        indices = self.batches[worker].span(span.start, len(span))
        share = self._share_of(worker, step, span)
        return self.learner.gradient_in_parts(
            params, indices, worker, step, parts, hand_out, share=share
        )

    def passes_in_parts(
        self,
        params: Tensor,
        worker: int,
        step: int,
        parts: Sequence[tuple[int, int]],
        hand_out: Callable[[int, Tensor], None],
    ) -> float:
        """Compute a gradient with marks for timing, see `Learner.passes_in_parts`."""
        indices = self.batches[worker].indices(step)
        return self.learner.passes_in_parts(params, indices, worker, step, parts, hand_out)

    def shard_size(self, worker: int) -> int:
        """Return the number of samples of a worker."""
        return len(self.batches[worker].shard)

    def full_gradient(self, params: Tensor, worker: int, batch: int) -> tuple[float, Tensor]:
        """Return loss and gradient over all of a worker's samples, summed over parts of about
        `batch` samples.

        The parts, their order and their augmentation are always the same: it is a fixed function of
        `params`.
        """
        shard = self.batches[worker].shard
        losses, sizes, total = [], [], torch.full_like(params, -0.0)
        whole, share = self._count_targets(shard), self.share(worker, range(0))
        for step, part in enumerate(np.array_split(shard, -(-len(shard) // batch))):
            loss, grad = self.learner.gradient(params, part, worker, step, share)
            losses.append(loss)
            sizes.append(self._count_targets(part))
            total.add_(grad, alpha=sizes[-1] / whole)
        mean = 0.0
        for loss, size in zip(read_scalars(losses), sizes, strict=True):
            mean += loss * size / whole
        return mean, total

    def _count_targets(self, indices: np.ndarray) -> float:
        """Return how many targets of these samples count, at least 1; the number of samples if
        all count equally.
        """
        counts = self.learner.counts
        return len(indices) if counts is None else max(1.0, float(counts[indices].sum()))

    def reduced_gradient(
        self, params: Tensor, anchor: Tensor, worker: int, step: int, span: range
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and g(params) − g(anchor) on the same minibatch.

        The difference corrects the gradient over all samples at `anchor`.
        """
        loss, grad = self.gradient(params, worker, step, span)
        return loss, add_gradients(grad, -self.gradient(anchor, worker, step, span)[1])

    def spread_gradient(
        self, params: Tensor, worker: int, step: int, span: range, parts: int
    ) -> tuple[float, Tensor, Tensor]:
        """Return loss, gradient g and Σ_p (share_p·g_p)² per coordinate, over parts p of the
        minibatch.
        """
        indices = self.batches[worker].span(span.start, len(span))
        losses, shares, total, squares = (
            [],
            [],
            torch.full_like(params, -0.0),
            torch.zeros_like(params),
        )
        share = self._share_of(worker, step, span)
        for part in np.array_split(indices, min(parts, len(indices))):
            loss, grad = self.learner.gradient(params, part, worker, step, share)
            losses.append(loss)
            shares.append(self._count_targets(part) / self._count_targets(indices))
            grad = grad * shares[-1]
            total += grad
            squares.addcmul_(grad, grad)
        mean = 0.0
        for loss, share in zip(read_scalars(losses), shares, strict=True):
            mean += loss * share
        return mean, total, squares

    def local_step(
        self,
        params: Tensor,
        moments: Moments,
        worker: int,
        step: int,
        lr: float,
        span: range | None = None,
    ) -> tuple[Tensor | float, Moments, Tensor]:
        """Make one optimizer step on one minibatch, and return loss, moments and parameters.

        An optimizer with statistics uses the whole shard. The loss is still on the device
        (`read_scalars` reads it), so that steps follow each other without waiting.
        """
        if self.statistics:
            loss, _, statistics = self.sweep(params, moments, None, worker)
            return (loss, *self.optimizer.step(moments, params, statistics, lr))
        batches = self.batches[worker]
        indices = batches.indices(step) if span is None else batches.span(span.start, len(span))
        loss, grad, lacks = self.learner.gradient_found(params, indices, worker, step, marked=False)
        return (
            loss,
            *self.apply(
                self.stepped_from(params), moments, grad, lr, lacks, place_of(worker, step)
            ),
        )

    def stepped_from(self, params: Tensor) -> Tensor:
        """Return the parameters from which the optimizer steps, see `Learner.stepped_from`."""
        return self.learner.stepped_from(params)

    def apply(
        self,
        params: Tensor,
        moments: Moments,
        grad: Tensor,
        lr: float,
        exact: bool = True,
        place: str = "at a merge",
        starts: np.ndarray | None = None,
    ) -> tuple[Moments, Tensor]:
        """Make the optimizer's step on a gradient or a weighted sum; elements without a gradient
        stay unchanged.

        Args: exact is True if the gradient was not encoded lossily, so that −0.0 marks these
        elements; starts has the first index of each tensor, if the vector is not that of the whole
        model.
        """
        with Guard(self._of_step, place):
            after, moved = self.optimizer.step(moments, params, grad, lr)
        if not exact or self.statistics:
            return after, moved
        if starts is None and len(grad) == self.num_params:
            starts = self.learner.starts
        if self._none_absent(grad, starts):
            return after, moved
        *after, moved = restore_absent(grad, starts, (*moments, params), (*after, moved))
        return tuple(after), moved

    def _none_absent(self, grad: Tensor, starts: np.ndarray | None) -> bool:
        """Return True if each element has a gradient.

        A vector on an accelerator is not read if all gradients computed in this process were
        complete, because a read would wait for the device.
        """
        if is_on_host(grad):
            return not has_absent(grad, starts)
        return bool(self.learner.complete) or not read_scalars([is_absent(grad).any()])[0]

    def apply_slice(
        self,
        params: Tensor,
        moments: Moments,
        start: int,
        stop: int,
        grad: Tensor,
        lr: float,
        exact: bool = True,
    ) -> tuple[Moments, Tensor]:
        """Make the step of the elements [start, stop) alone, with an element-wise optimizer."""
        own = tuple(moment[start:stop] if moment.dim() else moment for moment in moments)
        begun = self.learner.starts
        # The slice may begin within a tensor.
        inside = begun[(begun > start) & (begun < stop)] - start
        return self.apply(params[start:stop], own, grad, lr, exact, starts=np.array([0, *inside]))

    def join_slices(self, slices: Sequence[tuple[Moments, Tensor]]) -> tuple[Moments, Tensor]:
        """Return the moments and the model from consecutive slices."""
        vectors = [params for _, params in slices]
        moments = (
            join_moment(parts, vectors) for parts in zip(*(m for m, _ in slices), strict=True)
        )
        return tuple(moments), torch.cat(vectors)

    @property
    def warmup_samples(self) -> int:
        """Samples after which the warm-up of the learning rate ends."""
        return warmup_samples(self.optimizer, self.epoch_samples)

    def rate(self, samples: int) -> float:
        """Return the learning rate after `samples` applied samples."""
        return self.optimizer.rate(samples, self.epoch_samples)


def warmup_samples(optimizer: Optimizer, epoch_samples: int) -> int:
    """Return the samples after which the warm-up of the learning rate ends."""
    return math.ceil(optimizer.warmup_epochs * epoch_samples)


def join_moment(parts: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """Join a moment of consecutive slices; a scalar that all slices share stays a scalar."""
    if not any(part.dim() for part in parts) and len({part.item() for part in parts}) == 1:
        return parts[0]
    return torch.cat([part.expand_as(vector) for part, vector in zip(parts, vectors, strict=True)])


def density(counts: np.ndarray, batches: Batches, steps: range) -> float:
    """Return the targets that count per sample in these minibatches; without steps, in the whole
    shard.
    """
    parts = [batches.indices(step) for step in steps] or [batches.shard]
    return float(np.mean([counts[part].mean() for part in parts]))


class SizeOnlyTrainer:
    """A trainer without computation, for timing thousands of workers; its vectors are sizes only.

    Its methods have the results of `Trainer`, and ignore the arguments that these do not need.
    """

    device = HOST
    weighs = False

    def __init__(
        self,
        num_params: int,
        epoch_samples: int,
        num_workers: int = 1,
        statistics: int = 0,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Args: optimizer, which has the learning rate that H may follow; None = a rate of 0."""
        self.statistics = statistics
        self.optimizer = optimizer
        self.epoch_samples = epoch_samples
        self.num_workers = num_workers
        self.num_params = num_params
        self.dense_bytes = 4 * num_params
        self._size_only = SizeOnly(self.dense_bytes)

    def reshard(self, *_: Any) -> SizeOnlyTrainer:
        return self

    def redistribute(self, *_: Any) -> SizeOnlyTrainer:
        return self

    def worker_state(self, *_: Any) -> None:
        """Return None: there is no state."""

    def set_worker_state(self, *_: Any) -> None:
        """Ignore the state."""

    def make_placeholder(self, size: float) -> SizeOnly:
        return SizeOnly(max(4, round(size * self.dense_bytes / 4) * 4))

    def init(self) -> tuple[SizeOnly, Moments]:
        return self._size_only, ()

    def moments(self) -> Moments:
        return ()

    def sweep(self, *_: Any) -> tuple[float, Any, SizeOnly]:
        return 0.0, None, SizeOnly(4 * self.statistics)

    def gradient(self, params: SizeOnly, *_: Any) -> tuple[float, SizeOnly]:
        return 0.0, params

    def gradient_in_parts(
        self,
        params: SizeOnly | Pieces,
        worker: int,
        step: int,
        span: range,
        parts: Sequence[tuple[int, int]],
        hand_out: Callable[[int, SizeOnly], None],
    ) -> float:
        if isinstance(params, Pieces):
            for k in range(len(params.slices)):
                params.take(k)
        for k, (start, stop) in enumerate(parts):
            hand_out(k, SizeOnly(4 * (stop - start)))
        return 0.0

    def passes_in_parts(
        self,
        params: SizeOnly,
        worker: int,
        step: int,
        parts: Sequence[tuple[int, int]],
        hand_out: Callable[[int, SizeOnly], None],
    ) -> float:
        for k in range(2 * len(parts)):
            hand_out(k, SizeOnly(0))
        return 0.0

    def shard_size(self, worker: int) -> int:
        return max(1, (self.epoch_samples + self.num_workers - 1 - worker) // self.num_workers)

    def full_gradient(self, params: SizeOnly, *_: Any) -> tuple[float, SizeOnly]:
        return 0.0, params

    def reduced_gradient(self, params: SizeOnly, *_: Any) -> tuple[float, SizeOnly]:
        return 0.0, params

    def spread_gradient(self, params: SizeOnly, *_: Any) -> tuple[float, SizeOnly, SizeOnly]:
        return 0.0, params, params

    def local_step(self, params: SizeOnly, *_: Any) -> tuple[float, Moments, SizeOnly]:
        return 0.0, (), params

    def stepped_from(self, params: SizeOnly) -> SizeOnly:
        return params

    def share(self, *_: Any) -> float:
        return 1.0

    def apply(self, params: SizeOnly, *_: Any) -> tuple[Moments, SizeOnly]:
        return (), params

    def apply_slice(
        self, params: SizeOnly, moments: Moments, start: int, stop: int, grad: SizeOnly, *_: Any
    ) -> tuple[Moments, SizeOnly]:
        return (), grad

    def join_slices(self, *_: Any) -> tuple[Moments, SizeOnly]:
        return (), self._size_only

    @property
    def warmup_samples(self) -> int:
        return warmup_samples(self.optimizer, self.epoch_samples) if self.optimizer else 0

    def rate(self, samples: int) -> float:
        return self.optimizer.rate(samples, self.epoch_samples) if self.optimizer else 0.0


AnyTrainer = Trainer | SizeOnlyTrainer
