"""Make a synthetic classification task of any size and shape, for throughput, yet learnable."""

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from ashl.data.dataset import Data, Dataset, Split
from ashl.data.rng import Purpose, stream
from ashl.errors import UsageError
from ashl.option import Natural, Positive, Size, option

# Pixels per side of a patch of one colour, so that convolution and pooling keep an image's pattern.
PATCH = 4


@option
class Synthetic(Dataset):
    """One Gaussian cluster of unit variance per class; the centres have the distance `separation`.

    The difficulty is the same for every shape: the best possible classifier confuses two classes
    with probability Q(separation / 2), where Q is the tail of the normal distribution. Centres of
    images consist of patches of 4x4 pixels.
    """

    shape: Annotated[list[Size], Field(min_length=1, max_length=3)]
    num_classes: Annotated[Size, Field(ge=2)]
    num_train: Size
    num_test: Size
    separation: Positive
    seed: Natural

    def load(self) -> Data:
        """Return the samples.

        Raises: UsageError for a shape that is neither [features] nor [channels, height, width].
        """
        if len(self.shape) == 2:
            raise UsageError(
                "dataset.shape has two entries; take [features] or [channels, height, width]."
            )
        generator = stream(self.seed, Purpose.SAMPLES)
        centres = torch.from_numpy(self._centres(generator)).float()

        def split(count: int) -> Split:
            classes = torch.from_numpy(generator.integers(0, self.num_classes, count))
            noise = torch.from_numpy(
                generator.standard_normal((count, *self.shape), dtype=np.float32)
            )
            return Split(noise.add_(centres[classes]), classes)

        train, test = split(self.num_train), split(self.num_test)
        return Data(train, test, sample_shape=tuple(self.shape), num_classes=self.num_classes)

    def _centres(self, generator: np.random.Generator) -> np.ndarray:
        """Return random directions of equal length, nearly orthogonal, so that the distance of
        any two is `separation`.
        """
        if len(self.shape) == 3:
            channels, height, width = self.shape
            patches = (self.num_classes, channels, -(-height // PATCH), -(-width // PATCH))
            coarse = generator.standard_normal(patches)
            centres = coarse.repeat(PATCH, axis=2).repeat(PATCH, axis=3)[:, :, :height, :width]
        else:
            centres = generator.standard_normal((self.num_classes, *self.shape))
        length = np.sqrt(np.square(centres).reshape(self.num_classes, -1).sum(axis=1))
        return centres / length.reshape(-1, *[1] * len(self.shape)) * self.separation / math.sqrt(2)
