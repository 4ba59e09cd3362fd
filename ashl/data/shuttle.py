"""Load sensor readings of the space shuttle, which the package river contains: real data without a
download, and classes of unequal size.

Rule: each of the nine readings is shifted and scaled to mean 0 and standard deviation 1 over the
training samples. The order, and so the split, is fixed.
"""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ashl.data.dataset import Data, Dataset, Split
from ashl.data.rng import Purpose, permutation
from ashl.errors import DataMissingError
from ashl.option import option

FILE = "datasets/shuttle.csv.gz"
TEST = 5  # one of so many samples is for testing


@option
class Shuttle(Dataset):
    """49,097 samples of nine readings in two classes: 93 % normal, 7 % anomalies.

    Source: Statlog (Shuttle), UCI Machine Learning Repository, without its second-largest class,
    as in the ODDS benchmark. A model that always answers *normal* is right in 93 % of the samples.
    """

    def load(self) -> Data:
        """Return the samples.   Raises: DataMissingError without river."""
        package = find_spec("river")
        path = Path(package.origin).parent / FILE if package and package.origin else None
        if path is None or not path.is_file():
            raise DataMissingError(
                "dataset=shuttle: river, which brings the data, is not installed; run"
                " `pip install 'ashl[river]'`"
            )
        table = read(path)
        order = permutation(len(table), 0, Purpose.SPLIT)
        held_out = len(table) // TEST
        train, test = table[order[held_out:]], table[order[:held_out]]
        mean, deviation = train[:, :-1].mean(0), train[:, :-1].std(0)

        def split(rows: np.ndarray) -> Split:
            readings = (rows[:, :-1] - mean) / deviation
            return Split(torch.from_numpy(readings), torch.from_numpy(rows[:, -1].astype(np.int64)))

        return Data(split(train), split(test), sample_shape=(9,), num_classes=2)


@cache
def read(path: Path) -> np.ndarray:
    """Return the file's table, float32 [n, 10], with the class in the last column."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.float32)
