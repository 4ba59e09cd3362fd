"""What a `Compute` of a worker runs: the learner on the worker's next batch, then the optimizer."""

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
from ashl.data.partition import handed
from ashl.learn.device import HOST, at_home, numbers, to_device
from ashl.learn.learner import Learner, named, place_of
from ashl.learn.pieces import Pieces
from ashl.optimizer.absent import kept_where_absent, marks, plus, some_absent
from ashl.optimizer.contract import Optimizer
from ashl.optimizer.plain import PlainOptimizer
from ashl.size_only import SizeOnly

Moments = tuple[Any, ...]


class Trainer:
    """Pure functions over flat vectors [d]; arguments are never changed. Batches are counted per
    worker from 0.
    """

    def __init__(
        self,
        learner: Learner,
        optimizer: Optimizer,
        deal: Callable[[Sequence[float]], list[Batches]],
        shares: Sequence[float],
        in_rounds: bool = False,
    ) -> None:
        """`deal` gives each worker its batches, from everybody's share of the data; with
        `in_rounds` all workers are at the same step.
        """
        self.learner, self.optimizer, self.deal, self.in_rounds = (
            learner,
            optimizer,
            deal,
            in_rounds,
        )
        self.batches = deal(shares)
        made = optimizer.make if isinstance(optimizer, PlainOptimizer) else type(optimizer)
        self._of_step = (("optimizer", named(made)),)
        self._last: tuple[Any, float] = (
            None,
            1.0,
        )  # the mean density of the last step that was asked for
        self.epoch_samples = learner.epoch_samples
        self.num_params = learner.num_params
        self.dense_bytes = 4 * learner.num_params

    def reshard(self, shares: Sequence[float]) -> Trainer:
        """The same with other shares of the data."""
        return Trainer(self.learner, self.optimizer, self.deal, shares, self.in_rounds)

    def handed(self, gone: frozenset[int]) -> Trainer:
        """The same while these workers are away, and their samples are with the others."""
        other = copy.copy(self)
        shards = handed([batches.shard for batches in self.batches], gone)
        other.batches = [own.over(shard) for own, shard in zip(self.batches, shards, strict=True)]
        other._last = (None, 1.0)
        return other

    @property
    def weighs(self) -> bool:
        """Return True if some samples have more targets that count than others."""
        return self.learner.counts is not None

    def share(self, worker: int, steps: range, weights: Sequence[float] | None = None) -> float:
        """Return the density of the targets that count in these minibatches over its mean over all
        workers.

        A mean loss times its share, weighted by samples, is the mean over all targets that count.
        In rounds, densities are those of the same steps; else those of the whole shards. `weights`
        are those of the workers, by default their batch sizes. Returns 1 where every sample counts
        alike.
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
        """The share of one minibatch; of one of another size than planned, that of the shard."""
        size = self.batches[worker].size
        planned = span is None or span == range(step * size, (step + 1) * size)
        return self.share(worker, range(step, step + 1) if planned else range(0))

    def worker_state(self, worker: int) -> Any:
        """Return what forward passes have changed of the module for this worker, beside its
        parameters.
        """
        return self.learner.worker_state(worker)

    def set_worker_state(self, worker: int, state: Any) -> None:
        """Let a worker go on with this state; None is that of the beginning."""
        self.learner.set_worker_state(worker, state)

    def blank(self, size: float) -> Tensor:
        """A body of this share of the model's size, to measure with."""
        return to_device(torch.zeros(max(1, round(size * self.learner.num_params))), self.device)

    def init(self) -> tuple[Tensor, Moments]:
        """The initial model, the same on every rank, and empty optimizer moments."""
        return self.learner.init(), self.moments()

    def moments(self) -> Moments:
        """Empty, on the device; what the optimizer counts stays with the host."""
        own = (
            self.optimizer.shaped(self.learner.layers)
            if self.statistics
            else self.optimizer.init(self.num_params)
        )
        return tuple(to_device(x, self.device) if x.is_floating_point() else x for x in own)

    @property
    def device(self) -> str:
        """Where vectors lie."""
        return self.learner.device

    @property
    def statistics(self) -> int:
        """How many elements workers exchange for an optimizer that needs something else than
        gradients; else 0.
        """
        return self.optimizer.statistics(self.learner.layers)

    def sweep(
        self, params: Tensor, moments: Moments, blocks: Any, worker: int
    ) -> tuple[float, Any, Tensor]:
        """(loss, blocks, statistics) of all samples of a worker, for such an optimizer."""
        inputs, targets = self.learner.samples(self.batches[worker].shard)
        return self.optimizer.sweep(params, moments, blocks, inputs, targets)

    def gradient(
        self, params: Tensor, worker: int, step: int, span: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss, still on the device, and gradient on batch `step` of a worker, or on what lies at
        `span` in its stream of samples.
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
        """The loss on what lies at `span` in the worker's stream of samples; slices of the gradient
        are handed out as soon as they are there, see `Learner.gradient_in_parts`.
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
        """A gradient that is timed, see `Learner.passes_in_parts`."""
        indices = self.batches[worker].indices(step)
        return self.learner.passes_in_parts(params, indices, worker, step, parts, hand_out)

    def shard_size(self, worker: int) -> int:
        """The samples that a worker has."""
        return len(self.batches[worker].shard)

    def full_gradient(self, params: Tensor, worker: int, batch: int) -> tuple[float, Tensor]:
        """Loss and gradient over all of a worker's samples, added up over parts of at most about
        `batch`, always the same parts in the same order and with the same augmentation: a fixed
        function of `params`.
        """
        shard = self.batches[worker].shard
        losses, sizes, total = [], [], torch.full_like(params, -0.0)
        whole, share = self._counted(shard), self.share(worker, range(0))
        for step, part in enumerate(np.array_split(shard, -(-len(shard) // batch))):
            loss, grad = self.learner.gradient(params, part, worker, step, share)
            losses.append(loss)
            sizes.append(self._counted(part))
            total.add_(grad, alpha=sizes[-1] / whole)
        mean = 0.0
        for loss, size in zip(numbers(losses), sizes, strict=True):
            mean += loss * size / whole
        return mean, total

    def _counted(self, indices: np.ndarray) -> float:
        """The targets of these samples that count, at least 1; the number of samples where all
        count alike.
        """
        counts = self.learner.counts
        return len(indices) if counts is None else max(1.0, float(counts[indices].sum()))

    def reduced_gradient(
        self, params: Tensor, anchor: Tensor, worker: int, step: int, span: range
    ) -> tuple[Tensor, Tensor]:
        """g(params) − g(anchor) on the same minibatch: what the gradient over all samples at
        `anchor` lacks.
        """
        loss, grad = self.gradient(params, worker, step, span)
        return loss, plus(grad, -self.gradient(anchor, worker, step, span)[1])

    def spread_gradient(
        self, params: Tensor, worker: int, step: int, span: range, parts: int
    ) -> tuple[float, Tensor, Tensor]:
        """Loss, gradient g and Σ_p (share_p·g_p)², coordinate by coordinate, over parts of the
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
            shares.append(self._counted(part) / self._counted(indices))
            grad = grad * shares[-1]
            total += grad
            squares.addcmul_(grad, grad)
        mean = 0.0
        for loss, share in zip(numbers(losses), shares, strict=True):
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
        """One optimizer step on one minibatch, or on the shard where that is what the optimizer
        needs: (loss, moments, params). The loss is still on the device (`numbers` reads it), so
        that steps follow each other unseen.
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
        """Return what the optimizer steps from after a gradient at `params`, see
        `Learner.stepped_from`.
        """
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
        """Make the optimizer's step on a gradient, or on a weighted sum of several; leave elements
        without one alone.

        `exact`: whether the gradient came without loss, so that −0.0 marks those elements.
        `starts`: where tensors begin in the vector, if it is not that of the whole model.
        """
        with Guard(self._of_step, place):
            after, moved = self.optimizer.step(moments, params, grad, lr)
        if not exact or self.statistics:
            return after, moved
        if starts is None and len(grad) == self.num_params:
            starts = self.learner.starts
        if self._none_absent(grad, starts):
            return after, moved
        *after, moved = kept_where_absent(grad, starts, (*moments, params), (*after, moved))
        return tuple(after), moved

    def _none_absent(self, grad: Tensor, starts: np.ndarray | None) -> bool:
        """Return True if each element has a gradient. A vector on an accelerator is not read where
        all gradients computed in this process were complete: a look at it would wait for the
        device.
        """
        if at_home(grad):
            return not some_absent(grad, starts)
        return bool(self.learner.complete) or not numbers([marks(grad).any()])[0]

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
        """The same of the elements [start, stop) alone, of an optimizer that goes element by
        element.
        """
        own = tuple(moment[start:stop] if moment.dim() else moment for moment in moments)
        begun = self.learner.starts
        inside = (
            begun[(begun > start) & (begun < stop)] - start
        )  # the slice may begin within a tensor
        return self.apply(params[start:stop], own, grad, lr, exact, starts=np.array([0, *inside]))

    def joined(self, slices: Sequence[tuple[Moments, Tensor]]) -> tuple[Moments, Tensor]:
        """The moments and the model of their slices, in order."""
        vectors = [params for _, params in slices]
        moments = (
            put_together(parts, vectors) for parts in zip(*(m for m, _ in slices), strict=True)
        )
        return tuple(moments), torch.cat(vectors)

    @property
    def warmup_samples(self) -> int:
        """The samples after which the rate has warmed up."""
        return math.ceil(self.optimizer.warmup_epochs * self.epoch_samples)

    def rate(self, samples: int) -> float:
        """The learning rate after `samples` applied samples."""
        return self.optimizer.rate(samples, self.epoch_samples)


def put_together(parts: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """Return a moment of consecutive slices as one; a number that all slices have in common stays
    one.
    """
    if not any(part.dim() for part in parts) and len({part.item() for part in parts}) == 1:
        return parts[0]
    return torch.cat([part.expand_as(vector) for part, vector in zip(parts, vectors, strict=True)])


def density(counts: np.ndarray, batches: Batches, steps: range) -> float:
    """Targets that count per sample in these minibatches of a worker; in its whole shard where
    there are none.
    """
    parts = [batches.indices(step) for step in steps] or [batches.shard]
    return float(np.mean([counts[part].mean() for part in parts]))


class SizeOnlyTrainer:
    """Nothing inside: for timing thousands of workers without gradients. Vectors are sizes."""

    warmup_samples = 0
    device = HOST
    weighs = False

    def __init__(
        self, num_params: int, epoch_samples: int, num_workers: int = 1, statistics: int = 0
    ) -> None:
        self.statistics = statistics
        self.epoch_samples = epoch_samples
        self.num_workers = num_workers
        self.num_params = num_params
        self.dense_bytes = 4 * num_params
        self._size_only = SizeOnly(self.dense_bytes)

    def reshard(self, shares: Sequence[float]) -> SizeOnlyTrainer:
        return self

    def handed(self, gone: frozenset[int]) -> SizeOnlyTrainer:
        return self

    def worker_state(self, worker: int) -> None:
        """There is none."""

    def set_worker_state(self, worker: int, state: Any) -> None:
        """There is none."""

    def blank(self, size: float) -> SizeOnly:
        return SizeOnly(max(4, round(size * self.dense_bytes / 4) * 4))

    def init(self) -> tuple[SizeOnly, Moments]:
        return self._size_only, ()

    def moments(self) -> Moments:
        return ()

    def sweep(
        self, params: SizeOnly, moments: Moments, blocks: Any, worker: int
    ) -> tuple[float, Any, SizeOnly]:
        return 0.0, None, SizeOnly(4 * self.statistics)

    def gradient(
        self, params: SizeOnly, worker: int, step: int, span: range | None = None
    ) -> tuple[float, SizeOnly]:
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

    def full_gradient(self, params: SizeOnly, worker: int, batch: int) -> tuple[float, SizeOnly]:
        return 0.0, params

    def reduced_gradient(
        self, params: SizeOnly, anchor: SizeOnly, worker: int, step: int, span: range
    ) -> tuple[float, SizeOnly]:
        return 0.0, params

    def spread_gradient(
        self, params: SizeOnly, worker: int, step: int, span: range, parts: int
    ) -> tuple[float, SizeOnly, SizeOnly]:
        return 0.0, params, params

    def local_step(
        self,
        params: SizeOnly,
        moments: Moments,
        worker: int,
        step: int,
        lr: float,
        span: range | None = None,
    ) -> tuple[float, Moments, SizeOnly]:
        return 0.0, (), params

    def stepped_from(self, params: SizeOnly) -> SizeOnly:
        return params

    def share(self, worker: int, steps: range, weights: Sequence[float] | None = None) -> float:
        return 1.0

    def apply(
        self,
        params: SizeOnly,
        moments: Moments,
        grad: SizeOnly,
        lr: float,
        exact: bool = True,
        place: str = "",
    ) -> tuple[Moments, SizeOnly]:
        return (), params

    def apply_slice(
        self,
        params: SizeOnly,
        moments: Moments,
        start: int,
        stop: int,
        grad: SizeOnly,
        lr: float,
        exact: bool = True,
    ) -> tuple[Moments, SizeOnly]:
        return (), grad

    def joined(self, slices: Sequence[tuple[Moments, SizeOnly]]) -> tuple[Moments, SizeOnly]:
        return (), self._size_only

    def rate(self, samples: int) -> float:
        return 0.0


AnyTrainer = Trainer | SizeOnlyTrainer
