"""What a `Compute` of a worker runs: the learner on the worker's next batch, then the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ashl.data.batches import Batches
from ashl.learner import Learner
from ashl.runtime.effects import Hollow

Moments = tuple[Any, ...]


class Trainer:
    """Pure functions over flat vectors [d]; arguments are never changed. Batches are counted per worker from 0."""

    def __init__(self, learner: Learner, optimizer: Any, batches: Sequence[Batches], epoch_samples: int) -> None:
        self.learner, self.optimizer, self.batches = learner, optimizer, batches
        self.epoch_samples = epoch_samples
        self.dense_bytes = 4 * learner.num_params

    def init(self) -> tuple[Tensor, Moments]:
        """The initial model, the same on every rank, and empty optimizer moments."""
        return self.learner.init(), self.moments()

    def moments(self) -> Moments:
        return self.optimizer.init(self.learner.num_params)

    def gradient(self, params: Tensor, worker: int, step: int) -> tuple[float, Tensor]:
        """Loss and gradient on batch `step` of a worker."""
        return self.learner.gradient(params, self.batches[worker].indices(step), worker, step)

    def local_step(
        self, params: Tensor, moments: Moments, worker: int, step: int, lr: float
    ) -> tuple[float, Moments, Tensor]:
        """One optimizer step on one minibatch: (loss, moments, params)."""
        loss, grad = self.gradient(params, worker, step)
        return (loss, *self.optimizer.step(moments, params, grad, lr))

    def apply(self, params: Tensor, moments: Moments, grad: Tensor, lr: float) -> tuple[Moments, Tensor]:
        """The optimizer's step on an averaged gradient."""
        return self.optimizer.step(moments, params, grad, lr)

    def rate(self, samples: int) -> float:
        """The learning rate after `samples` applied samples."""
        return self.optimizer.rate(samples, self.epoch_samples)


class HollowTrainer:
    """Nothing inside: for timing thousands of workers without gradients. Vectors are sizes."""

    def __init__(self, num_params: int) -> None:
        self.dense_bytes = 4 * num_params
        self._hollow = Hollow(self.dense_bytes)

    def init(self) -> tuple[Hollow, Moments]:
        return self._hollow, ()

    def moments(self) -> Moments:
        return ()

    def gradient(self, params: Hollow, worker: int, step: int) -> tuple[float, Hollow]:
        return 0.0, params

    def local_step(
        self, params: Hollow, moments: Moments, worker: int, step: int, lr: float
    ) -> tuple[float, Moments, Hollow]:
        return 0.0, (), params

    def apply(self, params: Hollow, moments: Moments, grad: Hollow, lr: float) -> tuple[Moments, Hollow]:
        return (), params

    def rate(self, samples: int) -> float:
        return 0.0
