"""A multi-layer perceptron."""

import math
from itertools import pairwise

from torch import nn

from ashl.option import Count, option


@option
class MLP:
    """Fully connected layers with ReLU between them.

    Source: Rumelhart, Hinton and Williams, Nature 323, 1986.
    """

    hidden: list[Count]

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network for samples of any shape."""
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise([math.prod(sample_shape), *self.hidden]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        last = self.hidden[-1] if self.hidden else math.prod(sample_shape)
        return nn.Sequential(*layers, nn.Linear(last, num_classes))
