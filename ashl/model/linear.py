"""Linear (softmax) regression."""

import math

from torch import nn

from ashl.option import option


@option
class Linear:
    """One linear layer over the flattened sample: convex with every loss of this package."""

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network for samples of any shape.

        Its parameters are, in order: weight [num_classes, inputs], bias [num_classes].
        """
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(sample_shape), num_classes))
