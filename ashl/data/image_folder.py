"""Load the user's own images, a folder per class."""

import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ashl.data.dataset import Data, Dataset, Split, missing_data_error, resolve_root
from ashl.data.vision import load_torchvision
from ashl.errors import AshlError, DataMissingError
from ashl.option import Count, Natural, option

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, customary for photographs
SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")
EXPECTED = "train/<class>/*.jpg and test/<class>/*.jpg"


class Decoder:
    """Images that are decoded at their first use, and kept as uint8 while the memory lasts.

    A kept image is never evicted. An epoch uses every image once, so that evicting the least
    recently used one would remove it just before its next use.
    """

    def __init__(self, paths: list[str], size: int, cache_mb: int) -> None:
        self._paths, self._size = paths, size
        capacity = min(len(paths), cache_mb * 10**6 // (3 * size * size))
        # The system gives memory pages only as they are filled.
        self._kept = torch.empty(capacity, 3, size, size, dtype=torch.uint8)
        self._slots: dict[int, int] = {}

    def __getitem__(self, index: Tensor, /) -> Tensor:
        return torch.stack([self._image(number) for number in index.tolist()])

    def _image(self, number: int) -> Tensor:
        if number in self._slots:
            return self._kept[self._slots[number]]
        image = self._decode(self._paths[number])
        if len(self._slots) < len(self._kept):
            slot = self._slots[number] = len(self._slots)
            self._kept[slot] = image
        return image

    def _decode(self, path: str) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, and of transparency in palettes
            try:
                with Image.open(path) as file:
                    image = ImageOps.fit(
                        to_rgb(file), (self._size, self._size), Image.Resampling.BILINEAR
                    )
            except MemoryError:
                raise
            except Exception as error:  # decoders raise many kinds of errors
                fault = " ".join(str(error).split()) or type(error).__name__
                raise AshlError(
                    f"{path} is not a readable image ({fault}); repair it, reduce it, or delete it."
                ) from error
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def to_rgb(file: Image.Image) -> Image.Image:
    """Return an image as 8-bit RGB. Raises ValueError for an image with more bits."""
    if file.mode.startswith(("I", "F")):
        raise ValueError("it has more than 8 bits for each value; save it with 8 bits")
    return file.convert("RGB")


@option
class ImageFolder(Dataset):
    """Images in `root`/train/<class>/ and `root`/test/<class>/, cropped to a centred square and
    scaled.
    """

    root: str
    image_size: Count
    cache_mb: Natural
    augment: Literal["none", "crop_flip"]

    def load(self) -> Data:
        """List the files; an image is decoded at its first use. Raises DataMissingError."""
        root = resolve_root(self.root)
        halves = root / "train", root / "test"
        train, test = (list_classes(half) if half.is_dir() else [] for half in halves)
        if not (train and test):
            raise missing_data_error("image_folder", root, EXPECTED, download=False)
        if train != test:
            differing = ", ".join(sorted(set(train) ^ set(test)))
            raise DataMissingError(
                f"{root}/train and {root}/test must hold the same classes; they differ in"
                f" {differing}."
            )
        numbers = {name: number for number, name in enumerate(train)}
        splits = (self._split(half, numbers) for half in halves)
        shape = (3, self.image_size, self.image_size)
        return Data(*splits, shape, len(train), augment=self.augment)

    def _split(self, folder: Path, numbers: dict[str, int]) -> Split:
        """Return one half, given the number of each class. Raises DataMissingError for a class
        without an image.
        """
        images = load_torchvision().datasets.folder

        def is_image(path: str) -> bool:
            within = Path(path).relative_to(folder).parts
            return images.is_image_file(path) and not any(map(is_hidden, within))

        try:
            found = images.make_dataset(str(folder), numbers, is_valid_file=is_image)
        except FileNotFoundError as error:
            raise DataMissingError(
                f"{folder}: {error}; images are {' '.join(images.IMG_EXTENSIONS)}. Add some, or"
                " delete the folder in train and test."
            ) from error
        decoder = Decoder([path for path, _ in found], self.image_size, self.cache_mb)
        return Split(decoder, torch.tensor([number for _, number in found]), MEAN, STD)


def list_classes(folder: Path) -> list[str]:
    """Return the names of a half's classes. Folders that programs leave are no classes."""
    return sorted(
        place.name for place in folder.iterdir() if place.is_dir() and not is_hidden(place.name)
    )


def is_hidden(name: str) -> bool:
    """Return True for files and folders that programs put next to a user's own."""
    return name.startswith(".") or name in SYSTEM_FOLDERS
