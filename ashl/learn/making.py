"""Make a model and a data set under generators that are seeded from the run's seed.

Code of users draws first weights and splits from the global generators of torch, numpy and Python.
Every process of a run makes both for itself, so each of them must draw the same numbers.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ashl.data.dataset import Data
from ashl.data.plain import PlainDataset
from ashl.data.rng import Purpose, torch_seed
from ashl.device import HOST, seed_generators
from ashl.learn.weights import load_file

SAMPLES = 4  # of each half that are compared


def make_module(
    option: Any,
    sample_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    start: str | None = None,
) -> nn.Module:
    """Return the module with its first weights and buffers: those of the file `start`, else a
    function of the seed.

    Raises: UsageError if the file cannot be read or does not fit.
    """
    with seed_generators(torch_seed(seed, Purpose.INIT), HOST):
        module = option.build(sample_shape, num_classes)
    return module if start is None else load_file(module, Path(start))


def load_data(dataset: Any, seed: int) -> Data:
    """Return the data set as a function of the seed.

    A class that is called once for each half draws the same numbers in both calls. So a split that
    it draws itself is one split, and the halves are disjoint. If it draws samples instead, both
    halves begin with equal samples; then the test half is made from another seed.

    Raises: UsageError and DataMissingError.
    """

    def seed_draws(attempt: int = 0) -> AbstractContextManager[Any]:
        return seed_generators(torch_seed(seed, Purpose.DATA, attempt), HOST)

    if not (isinstance(dataset, PlainDataset) and dataset.makes_halves):
        with seed_draws():
            return dataset.load()
    halves = []
    for train in (True, False):
        with seed_draws():
            halves.append(dataset.make_half(train=train))
    with seed_draws():
        data = dataset.data_of(*halves)
        if not has_equal_starts(data):
            return data
    with seed_draws(1):
        halves[1] = dataset.make_half(train=False)
    with seed_draws():
        return dataset.data_of(*halves)


def has_equal_starts(data: Data) -> bool:
    """Return True if the first samples of both halves are equal."""
    first = np.arange(min(SAMPLES, len(data.train), len(data.test)))
    train, test = (half.batch(first)[0] for half in (data.train, data.test))
    return train.dtype == test.dtype and torch.equal(train, test)
