"""Order the samples of one worker into batches."""

from __future__ import annotations

import numpy as np

from ashl.data.rng import Purpose, permutation


class Batches:
    """Minibatches of one shard, each a pure function of (seed, worker, step).

    The shard is read epoch after epoch, in a new order each time. A batch that reaches the end of
    an epoch continues in the next. So every batch is full and every sample is visited once per
    epoch. Without `shuffle`, each epoch has the shard's own order.
    """

    def __init__(
        self, shard: np.ndarray, batch: int, seed: int, worker: int, shuffle: bool = True
    ) -> None:
        if not 1 <= batch <= len(shard):
            raise ValueError(f"a batch of {batch} does not fit a shard of {len(shard)} samples")
        self._shard, self._batch, self._seed, self._worker, self._shuffle = (
            shard,
            batch,
            seed,
            worker,
            shuffle,
        )
        self._epochs: dict[int, np.ndarray] = {}  # a cache that no result depends on

    def with_shard(self, shard: np.ndarray) -> Batches:
        """Return the same worker's batches over another shard."""
        return (
            self
            if shard is self._shard
            else Batches(shard, self._batch, self._seed, self._worker, self._shuffle)
        )

    @property
    def size(self) -> int:
        """The planned number of samples in a minibatch."""
        return self._batch

    @property
    def shard(self) -> np.ndarray:
        """All samples of the worker, in a fixed order."""
        return self._shard

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of batch number `step`, int64 [batch]."""
        return self.span(step * self._batch, self._batch)

    def span(self, first: int, size: int) -> np.ndarray:
        """Return `size` samples from number `first` of the stream on, int64 [size].

        It serves batches whose size changes.
        """
        epoch, start = divmod(first, len(self._shard))
        head = self._epoch(epoch)[start : start + size]
        if len(head) == size:
            return head
        return np.concatenate([head, self.span(first + len(head), size - len(head))])

    def _epoch(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return self._shard
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a batch touches at most two epochs
                self._epochs.pop(next(iter(self._epochs)))
            order = permutation(len(self._shard), self._seed, Purpose.ORDER, self._worker, epoch)
            self._epochs[epoch] = self._shard[order]
        return self._epochs[epoch]
