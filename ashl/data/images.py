"""Load torchvision's small image data sets, held in memory as uint8."""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ashl.data.dataset import Data, Dataset, Split, missing_data_error, resolve_root
from ashl.data.vision import load_torchvision
from ashl.errors import DataMissingError, unwritable_path_error
from ashl.option import option


@dataclass(frozen=True)
class Known:
    """Known facts of a data set: its files, and mean and std of its training pixels, scaled to 0
    … 1.
    """

    files: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


IDX = "{train,t10k}-{images-idx3,labels-idx1}-ubyte"
KNOWN = {
    "MNIST": Known(f"MNIST/raw/{IDX}", (0.1307,), (0.3081,)),
    "FashionMNIST": Known(f"FashionMNIST/raw/{IDX}", (0.2860,), (0.3530,)),
    "CIFAR10": Known(
        "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}",
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "CIFAR100": Known(
        "cifar-100-python/{train,test,meta}", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    ),
}


@option
class Images(Dataset):
    """MNIST (LeCun et al., 1998), Fashion-MNIST (Xiao et al., 2017), CIFAR-10 or CIFAR-100
    (Krizhevsky, 2009).

    The files are torchvision's, in torchvision's layout below `root`.
    """

    name: Literal["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100"]
    root: str
    download: bool
    augment: Literal["none", "crop_flip"]

    def load(self) -> Data:
        """Read both halves, after a download if `download` is true.

        Raises: DataMissingError.
        """
        root = resolve_root(self.root)
        if self.download:
            with _lock_root(root):
                return self._read(root, download=True)
        return self._read(root, download=False)

    def _read(self, root: Path, *, download: bool) -> Data:
        known, datasets = KNOWN[self.name], load_torchvision().datasets
        try:
            both = [
                getattr(datasets, self.name)(root, train=train, download=download)
                for train in (True, False)
            ]
        # The errors depend on the data set and on what is missing, broken or out of reach.
        except Exception as error:
            if download:
                raise DataMissingError(
                    f"Data set {self.name} could not be fetched into {root}"
                    f" ({' '.join(str(error).split())}); copy {known.files} there from a machine"
                    " with a network, or take dataset=digits, which is always there."
                ) from error
            raise missing_data_error(self.name, root, known.files, download=True) from error
        pixels = [_to_pixels(half.data) for half in both]
        train, test = (
            Split(x, torch.as_tensor(half.targets), known.mean, known.std)
            for x, half in zip(pixels, both, strict=True)
        )
        shape = tuple(pixels[0].shape[1:])
        return Data(train, test, shape, len(both[0].classes), augment=self.augment)


def _to_pixels(data) -> torch.Tensor:
    pixels = torch.as_tensor(data)
    return pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()


@contextmanager
def _lock_root(root: Path) -> Generator[None]:
    """Allow one process of a machine to download; the others wait and then find the files."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".ashl.lock").open("wb")
    except OSError as error:
        fix = "take dataset.root=DIR to name another."
        raise unwritable_path_error(f"{root} cannot be written", error, fix) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
