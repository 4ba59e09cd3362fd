"""What a data set is to the rest of the house: two splits, in memory or decoded on demand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ashl.errors import DataMissingError, NoEffectError, UsageError
from ashl.option import Count, Positive, option


class Samples(Protocol):
    """A tensor [n, *sample_shape], or what answers an index tensor [b] with [b, *sample_shape] as
    one would.
    """

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Split:
    """One half of a data set.

    `inputs` are float32 as the model wants them, or uint8 pixels, which are normalised batch by
    batch to `(pixel / 255 - mean) / std` per channel: a quarter of the memory, and the same
    numbers.
    """

    inputs: Samples
    targets: Tensor  # int64 classes [n] or tokens [n, length], or float32 values [n, outputs]
    mean: tuple[float, ...] = ()  # per channel, for uint8 only
    std: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def labels(self) -> np.ndarray:
        """Class of each sample, int64 [n]; all zeros where it has none."""
        return self.targets.numpy() if self.has_classes else np.zeros(len(self), np.int64)

    @property
    def has_classes(self) -> bool:
        """Whether each sample is of one class: no values, and no tokens."""
        return not self.targets.is_floating_point() and self.targets.ndim == 1

    def batch(self, indices: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Inputs float32 [b, *sample_shape] and targets of the samples named, where all of these
        lie.
        """
        index = torch.from_numpy(indices) if isinstance(indices, np.ndarray) else indices
        inputs, targets = _rows(self.inputs, index), _rows(self.targets, index)
        if inputs.dtype == torch.uint8:
            shift, scale = self._normal
            inputs = torch.addcmul(shift, inputs.float(), scale)
        return inputs, targets

    def channels_last(self, most: int) -> Split:
        """With the channels of its images last in the host's memory, so that no batch has to be
        turned over; itself where they are more bytes than that.
        """
        there = isinstance(self.inputs, Tensor) and self.inputs.is_cpu and self.inputs.ndim == 4
        if not there or self.inputs.nbytes > most:
            return self
        return replace(self, inputs=self.inputs.contiguous(memory_format=torch.channels_last))

    @cached_property
    def _normal(self) -> tuple[Tensor, Tensor]:
        """What normalises pixels, by channel: −mean/std and 1/(255·std)."""
        mean, std = torch.tensor([self.mean, self.std], device=self.targets.device)[
            :, :, None, None
        ]
        return -mean / std, 1 / (255 * std)


def _rows(samples: Samples, index: Tensor) -> Tensor:
    """`samples[index]`, in a tenth of the time where they are a tensor of uint8 pixels and a
    quarter for float ones; of images whose channels lie last, in that order.
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
    num_classes: int  # number of outputs of the model: classes, values or the vocabulary
    augment: Literal["none", "crop_flip"] = "none"  # applied to training batches by the learner
    source: str = ""  # dotted name of the user's own that made it, where it is plain torch
    notes: tuple[str, ...] = ()  # what its user should know before the run


@option
class Dataset:
    """The fields that every data set's option has."""

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


def resolve(root: str) -> Path:
    """The absolute path of a data root as a user writes it."""
    return Path(root).expanduser().resolve()


def missing(name: str, searched: Path, expected: str, *, download: bool) -> DataMissingError:
    """The one sentence about data that is not there: what, where it was looked for, and every way
    out.
    """
    ways = "dataset.download=true to fetch it, " if download else ""
    return DataMissingError(
        f"Data set {name} is not, or not whole, in {searched} (expected: {expected}); take"
        f" {ways}ASHL_DATA=DIR or dataset.root=DIR to name the folder that holds it, or"
        " dataset=digits, which is always there."
    )
