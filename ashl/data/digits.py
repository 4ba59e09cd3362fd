"""Load handwritten digits, 8x8 pixels, that scikit-learn contains: real data without a download."""

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

FILE = "datasets/data/digits.csv.gz"
NUM_TRAIN = 1437  # of 1,797
LARGEST = 16  # grey levels are 0 to 16
MEAN, STD = 0.305, 0.376  # of the grey levels, scaled to 0 … 1


@option
class Digits(Dataset):
    """1,797 handwritten digits of 8x8 grey levels: a fixed 1,437 for training and 360 for testing.

    Source: E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI Machine
    Learning Repository, 1998.
    """

    def load(self) -> Data:
        """Read the file directly, because importing scikit-learn takes ten times as long.

        Raises: DataMissingError.
        """
        package = find_spec("sklearn")
        path = (
            Path(package.origin).parent / FILE
            if package and package.origin
            else Path("sklearn") / FILE
        )
        if not path.is_file():
            raise DataMissingError(
                f"The digits are not in {path}; run `pip install scikit-learn`, which brings them."
            )
        table = read(path)
        pixels = torch.from_numpy((table[:, :-1] / LARGEST - MEAN) / STD).reshape(-1, 1, 8, 8)
        classes = torch.from_numpy(table[:, -1].astype(np.int64))
        order = torch.from_numpy(permutation(len(table), 0, Purpose.SPLIT))
        train, test = (
            Split(pixels[part], classes[part]) for part in (order[:NUM_TRAIN], order[NUM_TRAIN:])
        )
        return Data(train, test, sample_shape=(1, 8, 8), num_classes=10)


@cache
def read(path: Path) -> np.ndarray:
    """Return the file's table with 64 grey levels and the digit in each row; it is read once per
    process.
    """
    with gzip.open(path, "rt", encoding="ascii") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32)
