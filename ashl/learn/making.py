"""Make a model and a data set under generators that are seeded from the run's seed.

Code of users draws first weights and splits from the global generators of torch, numpy and Python.
Every process of a run makes both for itself, so each of them must draw the same numbers.
"""

from pathlib import Path
from typing import Any

from torch import nn

from ashl.data.dataset import Data
from ashl.data.plain import PlainDataset
from ashl.data.rng import Purpose, torch_seed
from ashl.device import HOST, generator_states, seed_generators
from ashl.learn.weights import load_file

# Attempts at the test half: with the seed of the training half, and with another one.
SPLIT, SAMPLES = 0, 1


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
    it draws itself is one split, and the halves are disjoint. If it draws samples instead, equal
    numbers make equal samples; then the test half is made from another seed.

    Raises: UsageError and DataMissingError.
    """
    if not (isinstance(dataset, PlainDataset) and dataset.makes_halves):
        with seed_generators(torch_seed(seed, Purpose.DATA), HOST):
            return dataset.load()
    train, _ = make_half(dataset, seed, SPLIT, train=True)
    test, draws = make_half(dataset, seed, SPLIT, train=False)
    if draws and (common := count_common(train, test)):
        other, _ = make_half(dataset, seed, SAMPLES, train=False)
        test = other if count_common(train, other) < common else test
    with seed_generators(torch_seed(seed, Purpose.DATA), HOST):
        return dataset.data_of(train, test)


def make_half(dataset: PlainDataset, seed: int, attempt: int, *, train: bool) -> tuple[Any, bool]:
    """Return one half as its class makes it, and True if that drew from a global generator."""
    with seed_generators(torch_seed(seed, Purpose.DATA, attempt), HOST):
        before = generator_states()
        half = dataset.make_half(train=train)
        return half, generator_states() != before


def count_common(train: Any, test: Any) -> int:
    """Return how many items of the test half are in the training half, too."""
    known = {content_of(train[number]) for number in range(len(train))}
    return sum(content_of(test[number]) in known for number in range(len(test)))


def content_of(item: Any) -> tuple[bytes, ...]:
    """Return the bytes of an item (input, target); unknown types count by their text."""
    arrays = (part.detach().numpy() if hasattr(part, "detach") else part for part in item)
    return tuple(
        part.tobytes() if hasattr(part, "tobytes") else repr(part).encode() for part in arrays
    )
