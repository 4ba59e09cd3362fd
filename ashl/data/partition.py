"""Partition the training set: decide which worker gets which sample."""

from collections.abc import Collection, Sequence

import numpy as np

from ashl.data.dataset import Data
from ashl.data.rng import Purpose, permutation, stream
from ashl.errors import UsageError

MAX_DRAWS = 100  # most draws of Dirichlet shares, until every shard holds a batch


def make_shards(
    data: Data,
    partition: str,
    shares: Sequence[float],
    alpha: float | None,
    seed: int,
    batch: Sequence[int],
) -> list[np.ndarray]:
    """Return disjoint shards that cover the training set: sorted sample numbers, int64, one per
    worker.

    - `plan`: random parts in proportion to `shares` (any positive numbers), but at least a batch.
    - `iid`: equal random parts.
    - `dirichlet`: each class is divided by shares of its own, drawn from Dir(alpha). The smaller
      alpha, the fewer classes a worker sees.
    - `interleaved`: worker i of n takes every n-th sample from i on, for exact comparisons; its
      batches must not be shuffled.

    Args: batch is each worker's batch size.
    Raises: UsageError if a batch is larger than its shard.
    Source: Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution", 2019.
    """
    total, num_workers = len(data.train), len(shares)
    if partition == "interleaved":
        parts = [np.arange(worker, total, num_workers) for worker in range(num_workers)]
    elif partition == "dirichlet":
        if alpha is None or not data.train.has_classes:
            raise UsageError(
                "dataset.partition=dirichlet needs class labels and dataset.alpha; take another"
                " one."
            )
        parts = _dirichlet(data, num_workers, alpha, seed, batch)
    else:
        sizes = (
            apportion_with_minimum(total, shares, batch)
            if partition == "plan"
            else apportion(total, [1.0] * num_workers)
        )
        order = permutation(total, seed, Purpose.PARTITION)
        parts = [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]
    check_sizes([len(part) for part in parts], batch, total)
    return parts


def redistribute_shards(parts: Sequence[np.ndarray], gone: Collection[int]) -> list[np.ndarray]:
    """Return the shards while the workers `gone` have failed.

    Their samples are dealt to the others one by one, after each one's own samples. The shards of
    failed workers stay unchanged, for their rejoin.
    """
    here = [rank for rank in range(len(parts)) if rank not in gone]
    dealt = np.concatenate([parts[rank] for rank in sorted(gone)])
    found = list(parts)
    for place, rank in enumerate(here):
        found[rank] = np.concatenate([parts[rank], dealt[place :: len(here)]])
    return found


def check_sizes(sizes: Sequence[int], batch: Sequence[int], total: int) -> None:
    """Raise UsageError if a shard does not fill a batch; the message is about the smallest
    shard.
    """
    if all(size >= wanted for size, wanted in zip(sizes, batch, strict=True)):
        return
    least = min(sizes)
    worker = sizes.index(least)
    if not least:
        raise UsageError(
            f"Worker {worker}'s shard is empty: {total} samples do not go round {len(sizes)}"
            " workers like this; take fewer workers, or dataset.partition=iid."
        )
    raise UsageError(
        f"Worker {worker}'s shard holds {least} samples, fewer than its batch of {batch[worker]};"
        f" take dataset.batch_size={least} or less, fewer workers, or a more even"
        " dataset.partition."
    )


def apportion(total: int, shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return whole numbers that add up to `total`, in proportion to `shares` by largest remainder.

    Ties go to the lower rank.
    """
    ideal = np.asarray(shares, float) / np.sum(shares) * total
    sizes = np.floor(ideal).astype(np.int64)
    late = np.argsort(-(ideal - sizes), kind="stable")[: total - int(sizes.sum())]
    sizes[late] += 1
    return sizes


def apportion_with_minimum(total: int, shares: Sequence[float], batch: Sequence[int]) -> np.ndarray:
    """Apportion `total` by `shares`, but at least a batch per worker if there are enough samples.

    So no replan of the shares can end a run.
    """
    share_of, least = np.asarray(shares, float), np.asarray(batch)
    short = np.zeros(len(share_of), bool)
    while True:
        sizes = np.where(short, least, 0)
        sizes[~short] = apportion(total - int(sizes.sum()), share_of[~short])
        if (sizes >= least).all() or least.sum() > total:
            return sizes
        short |= sizes < least  # never all of them: the rest is enough for the others


def _dirichlet(
    data: Data, num_workers: int, alpha: float, seed: int, batch: Sequence[int]
) -> list[np.ndarray]:
    labels = data.train.labels
    for draw in range(MAX_DRAWS):
        generator = stream(seed, Purpose.PARTITION, step=draw)
        parts: list[list[np.ndarray]] = [[] for _ in range(num_workers)]
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            cuts = np.round(
                np.cumsum(generator.dirichlet([alpha] * num_workers)) * len(members)
            ).astype(np.int64)
            for worker, piece in enumerate(np.split(members, cuts[:-1])):
                parts[worker].append(piece)
        shard = [np.sort(np.concatenate(pieces)) for pieces in parts]
        if all(len(part) >= size for part, size in zip(shard, batch, strict=True)):
            break
    return shard
