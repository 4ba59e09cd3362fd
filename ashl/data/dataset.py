"""Define a data set: a training and a test split, in memory or decoded on demand."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ashl.config.override import path_of
from ashl.errors import DataMissingError, NoEffectError, UsageError
from ashl.option import Count, Positive, option


class Samples(Protocol):
    """Samples by index: a tensor [n, *sample_shape], or an object that is indexed like one.

    It returns [b, *sample_shape] for an index tensor [b].
    """

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Split:
    """The training or the test half of a data set.

    `inputs` are float32 as the model reads them, or uint8 pixels. Pixels are normalised batch by
    batch to `(pixel / 255 - mean) / std` per channel, which takes a quarter of the memory and gives
    the same numbers.
    """

    inputs: Samples
    targets: Tensor  # int64 classes [n] or tokens [n, length], or float32 values [n, outputs]
    mean: tuple[float, ...] = ()  # per channel, for uint8 only
    std: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def labels(self) -> np.ndarray:
        """Class of each sample, int64 [n]; all zeros if samples have no class."""
        return self.targets.numpy() if self.has_classes else np.zeros(len(self), np.int64)

    @property
    def has_classes(self) -> bool:
        """True if each sample has one class: no values, and no tokens."""
        return not self.targets.is_floating_point() and self.targets.ndim == 1

    def batch(self, indices: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs, float32 [b, *sample_shape], and the targets of these samples, on
        their device.
        """
        index = torch.from_numpy(indices) if isinstance(indices, np.ndarray) else indices
        inputs, targets = _select_rows(self.inputs, index), _select_rows(self.targets, index)
        if inputs.dtype == torch.uint8:
            shift, scale = self._normal
            inputs = torch.addcmul(shift, inputs.float(), scale)
        return inputs, targets

    def channels_last(self, most: int) -> Split:
        """Return the split with the channels of its images last in memory, so that no batch is
        reordered.

        Returns the split itself if its images have more than `most` bytes.
        """
        there = isinstance(self.inputs, Tensor) and self.inputs.is_cpu and self.inputs.ndim == 4
        if not there or self.inputs.nbytes > most:
            return self
        return replace(self, inputs=self.inputs.contiguous(memory_format=torch.channels_last))

    @cached_property
    def _normal(self) -> tuple[Tensor, Tensor]:
        """Shift and scale that normalise pixels, by channel: −mean/std and 1/(255·std)."""
        mean, std = torch.tensor([self.mean, self.std], device=self.targets.device)[
            :, :, None, None
        ]
        return -mean / std, 1 / (255 * std)


def _select_rows(samples: Samples, index: Tensor) -> Tensor:
    """Return `samples[index]`, by `index_select` for a tensor.

    It takes a tenth of the time for uint8 pixels, and a quarter for floats. Images with channels
    last keep this order.
    """
    if not isinstance(samples, Tensor):
        return samples[index]
    if (
        samples.ndim == 4
        and not samples.is_contiguous()
        and samples.is_contiguous(memory_format=torch.channels_last)
    ):
        return samples.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return samples.index_select(0, index)


@dataclass(frozen=True)
class Data:
    """A loaded data set."""

    train: Split
    test: Split
    sample_shape: tuple[int, ...]
    num_classes: int  # outputs of the model: classes, values or words of the vocabulary
    augment: Literal["none", "crop_flip"] = "none"  # applied to training batches by the learner
    source: str = ""  # dotted name of a user's own maker of plain torch
    notes: tuple[str, ...] = ()  # notes for the user before the run


@option
class Dataset:
    """The fields of every data set's option."""

    batch_size: Count
    partition: Literal["iid", "dirichlet", "plan", "interleaved"]
    alpha: Positive | None
    epochs: Positive

    def __post_init__(self) -> None:
        if self.partition == "dirichlet" and self.alpha is None:
            raise UsageError(
                "dataset.partition=dirichlet needs dataset.alpha; add for example"
                " dataset.alpha=0.5."
            )
        if self.partition != "dirichlet" and self.alpha is not None:
            text = (
                f"dataset.alpha={self.alpha} has no effect with dataset.partition={self.partition};"
                " leave it out or take dataset.partition=dirichlet."
            )
            raise NoEffectError(text, "dataset.alpha")


def resolve_root(root: str) -> Path:
    """Return the absolute path of a data root as a user writes it."""
    return Path(os.path.realpath(path_of(root)))


def missing_data_error(
    name: str, searched: Path, expected: str, *, download: bool
) -> DataMissingError:
    """Return the error for missing data: what is missing, where it was expected, and the fixes."""
    ways = "dataset.download=true to fetch it, " if download else ""
    return DataMissingError(
        f"Data set {name} is missing or incomplete in {searched} (expected: {expected}); take"
        f" {ways}ASHL_DATA=DIR or dataset.root=DIR to name the folder that holds it, or"
        " dataset=digits, which is always there."
    )
