"""A small convolutional network for images, which each block halves."""

from itertools import pairwise

from torch import nn

from ashl.model.shape import image_shape
from ashl.option import Count, option


@option
class CNN:
    """Blocks of 3x3 convolution, ReLU and 2x2 max pooling, one per entry of `channels`, then a
    linear layer.
    """

    channels: list[Count]

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network. Raises UsageError unless samples are images that can be halved
        once per block.
        """
        blocks = len(self.channels)
        first, height, width = image_shape("cnn", sample_shape, at_least=2**blocks)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([first, *self.channels]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        features = [first, *self.channels][-1] * (height >> blocks) * (width >> blocks)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, num_classes))
