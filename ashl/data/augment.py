"""Augmentation of training batches."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4  # pixels at each border


def crop_flip(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Images [b, c, h, w], each shifted by up to four pixels (the gap has the mean colour) and mirrored or not.

    The customary augmentation of 32x32 images: He et al., "Deep residual learning", 2015, section 4.2.
    """
    count, _, height, width = images.shape
    shift = torch.from_numpy(generator.integers(0, 2 * PADDING + 1, (2, count, 1)))
    mirrored = torch.from_numpy(generator.random((count, 1)) < 0.5)
    columns = torch.arange(width)
    rows = torch.arange(height) + shift[0]
    columns = torch.where(mirrored, columns.flip(0), columns) + shift[1]
    padded = functional.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)  # channels last: one gather moves whole pixels
    sample = torch.arange(count)[:, None, None]
    return padded[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
