"""Load the user's own images, a folder per class."""

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ashl.data.dataset import Data, Dataset, Split, missing_data_error, resolve_root
from ashl.errors import AshlError, DataMissingError
from ashl.option import Count, Natural, option

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, customary for photographs
IMAGE_SUFFIXES = (
    ".bmp",
    ".gif",
    ".jfif",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
SIXTEEN_BITS = ("PNG", "PPM")  # formats whose integers Pillow may return in 32 bits
SYSTEM_FILES = ("__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir")
MAX_NAMES = 5  # most names in a message
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
    """Return an image as 8-bit RGB; of 16 bits the upper eight, of float values 0 … 1 times 255.

    Raises: ValueError for values of another range: their meaning is unknown.
    """
    if file.mode.startswith("I;16") or (file.mode == "I" and file.format in SIXTEEN_BITS):
        values = np.asarray(file).astype(np.int64)
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if file.mode == "F":
        levels = np.asarray(file)
        if not (np.isfinite(levels).all() and levels.min() >= 0 and levels.max() <= 1):
            raise ValueError(
                f"its float values go from {levels.min():g} to {levels.max():g}, and should from 0"
                " to 1"
            )
        return Image.fromarray(np.round(levels * 255).astype(np.uint8)).convert("RGB")
    if file.mode == "I":
        raise ValueError("it has 32-bit integers; save it with 8 or 16 bits")
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
        if not ((root / "train").is_dir() and (root / "test").is_dir()):
            raise missing_data_error("image_folder", root, EXPECTED, download=False)
        unused = Counter[str]()
        train, test = (list_classes(root / half, unused) for half in ("train", "test"))
        if train.keys() != test.keys():
            differing = ", ".join(sorted(train.keys() ^ test.keys()))
            raise DataMissingError(
                f"{root}/train and {root}/test must hold the same classes; they differ in"
                f" {differing}."
            )
        kinds = ", ".join(f"{count} {kind}" for kind, count in unused.most_common(MAX_NAMES))
        notes = (
            (f"dataset: files in the folders of classes that are not used: {kinds}",)
            if kinds
            else ()
        )
        shape = (3, self.image_size, self.image_size)
        return Data(
            self._split(train),
            self._split(test),
            shape,
            len(train),
            augment=self.augment,
            notes=notes,
        )

    def _split(self, paths: dict[str, list[str]]) -> Split:
        """Return one half from its images by class."""
        targets = [number for number, files in enumerate(paths.values()) for _ in files]
        every = [path for files in paths.values() for path in files]
        return Split(
            Decoder(every, self.image_size, self.cache_mb), torch.tensor(targets), MEAN, STD
        )


def list_classes(folder: Path, unused: Counter[str]) -> dict[str, list[str]]:
    """Return the images of each class of one half, classes and images by name, and count other
    files.

    Hidden folders, for example of notebooks and archives, are no classes.

    Raises: DataMissingError.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(
        place.name for place in folder.iterdir() if place.is_dir() and not is_hidden(place.name)
    ):
        found[name], others = list_images(folder / name)
        if not found[name]:
            held = (
                f"only files of the kinds {', '.join(sorted(others)[:MAX_NAMES])}"
                if others
                else "and no other file"
            )
            raise DataMissingError(
                f"{folder / name} has no image, {held}; images are {' '.join(IMAGE_SUFFIXES)}. Add"
                " some, or delete the folder in train and test."
            )
        unused += others
    if not found:
        raise missing_data_error("image_folder", folder.parent, EXPECTED, download=False)
    return found


def list_images(folder: Path) -> tuple[list[str], Counter[str]]:
    """Return the images of a class and its subfolders, in torchvision's order, and counts of other
    files.

    Other files are counted by kind. Hidden files are left out. Links are followed, each folder
    once.
    """
    seen, found = set[str](), list[tuple[str, list[str]]]()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        new = real not in seen
        seen.add(real)
        folders[:] = [name for name in folders if new and not is_hidden(name)]
        found += [(root, names)] if new else []
    images, others = list[str](), Counter[str]()
    for root, names in sorted(found):
        for name in sorted(name for name in names if not is_hidden(name)):
            kind = os.path.splitext(name)[1].lower()
            if kind in IMAGE_SUFFIXES:
                images.append(os.path.join(root, name))
            else:
                others[kind or name] += 1
    return images, others


def is_hidden(name: str) -> bool:
    """Return True for files that programs put next to a user's own files."""
    return name.startswith(".") or name in SYSTEM_FILES
