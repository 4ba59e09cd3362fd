"""Make a model and a data set under generators that are seeded from the run's seed.

Code of users draws first weights and splits from the global generators of torch, numpy and Python.
Every process of a run makes both for itself, so each of them must draw the same numbers.
"""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ashl.data.dataset import Data
from ashl.data.plain import PlainDataset
from ashl.data.rng import Purpose, torch_seed
from ashl.device import HOST, seed_generators
from ashl.learn.weights import load_file


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
    it draws itself is one split, and the halves are disjoint.

    Raises: UsageError and DataMissingError.
    """
    seeded = partial(seed_generators, torch_seed(seed, Purpose.DATA), HOST)
    if not (isinstance(dataset, PlainDataset) and dataset.makes_halves):
        with seeded():
            return dataset.load()
    halves = []
    for train in (True, False):
        with seeded():
            halves.append(dataset.make_half(train=train))
    with seeded():
        return dataset.data_of(*halves)
