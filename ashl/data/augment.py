"""Augment training batches."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4  # pixels at each edge


def draw_crops(count: int, generator: np.random.Generator) -> Tensor:
    """Draw how each of `count` images is moved: down, right, and mirrored or not; int64 [3,
    count, 1].
    """
    shift = generator.integers(0, 2 * PADDING + 1, (2, count, 1))
    return torch.from_numpy(np.concatenate([shift, generator.random((1, count, 1)) < 0.5]))


def crop_flip(images: Tensor, moves: Tensor) -> Tensor:
    """Shift each image by up to four pixels and mirror it or not.

    The gap has the mean colour.

    Args: images [b, c, h, w]; moves as from `draw_crops`, on the same device.
    Source: the customary augmentation of 32x32 images, He et al., "Deep residual learning", 2015,
    section 4.2.
    """
    (count, _, height, width), place = images.shape, images.device
    down, right, mirrored = moves
    columns = torch.arange(width, device=place)
    rows = torch.arange(height, device=place) + down
    columns = torch.where(mirrored > 0, columns.flip(0), columns) + right
    # Channels last: one gather moves whole pixels.
    padded = functional.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)
    sample = torch.arange(count, device=place)[:, None, None]
    return padded[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
