"""LeNet-5."""

from torch import nn

from ashl.model.shape import image_shape
from ashl.option import option


@option
class LeNet:
    """LeNet-5 in today's form (ReLU, max pooling).

    Two 5x5 convolutions, each pooled, and three linear layers. It has 61,706 parameters on 28x28
    and 62,006 on 3x32x32.

    Source: LeCun, Bottou, Bengio and Haffner, Proc. IEEE 86(11), 1998.
    """

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network; images under 32x32 are padded by two pixels on each side.

        Raises: UsageError unless samples are images of at least 28x28.
        """
        channels, height, width = image_shape("lenet", sample_shape, at_least=28)
        padding = 2 if min(height, width) < 32 else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )
