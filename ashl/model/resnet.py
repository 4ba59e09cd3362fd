"""Residual networks for small images."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from ashl.errors import UsageError
from ashl.model.shape import image_shape
from ashl.option import Count, option

Norm = Literal["batch", "group"]
WIDTHS = (16, 32, 64)  # channels of the three stages
WIDE = (64, 128, 256, 512)  # channels of the four stages of ResNet-18
GROUPS, CHANNELS = 32, 4  # most groups of GroupNorm, and least channels in one


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """Return BatchNorm, or GroupNorm, which normalises each sample alone.

    Source: Wu and He, "Group normalization", ECCV 2018.
    """
    return (
        nn.BatchNorm2d(channels)
        if norm == "batch"
        else nn.GroupNorm(min(GROUPS, channels // CHANNELS), channels)
    )


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut.

    The shortcut has no parameters (option A of the paper). If it is `projected` and shapes differ,
    it is a 1x1 convolution (option B).
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Norm, projected: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, outputs)
        self.stride, self.widening, self.shortcut = stride, outputs - inputs, None
        if projected and self.widening:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm_layer(norm, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.widening:  # every second pixel, and zeros in the new channels
            x = functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widening)
            )
        return functional.relu(out + x)


def make_network(
    channels: int,
    widths: tuple[int, ...],
    blocks: int,
    num_classes: int,
    norm: Norm,
    projected: bool = False,
) -> nn.Module:
    """Return a 3x3 convolution, stages of `blocks` blocks each, and a mean over the remaining
    pixels.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
        norm_layer(norm, widths[0]),
        nn.ReLU(),
    ]
    before = widths[0]
    for width in widths:
        for _ in range(blocks):
            layers.append(Block(before, width, 1 if before == width else 2, norm, projected))
            before = width
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


@option
class ResNet:
    """The network of `depth` 6n + 2 for 32x32 images.

    With three channels and ten classes, depth 8 has 75,290 parameters and depth 20 has 269,722 (the
    paper's 0.27 million).

    Source: He et al., "Deep residual learning", 2015, section 4.2.
    """

    depth: Count
    norm: Norm

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network.

        Raises: UsageError unless samples are images of at least 4x4 and `depth` is 8, 14, 20, …
        """
        blocks, odd = divmod(self.depth - 2, 6)
        if odd or blocks < 1:
            raise UsageError(
                f"model.depth={self.depth} is not of the form 6n + 2; take 8, 14, 20, 32, 44, 56 or"
                " 110."
            )
        channels, _, _ = image_shape(f"resnet{self.depth}", sample_shape, at_least=4)
        return make_network(channels, WIDTHS, blocks, num_classes, self.norm)


@option
class ResNet18:
    """ResNet-18 in the form that is customary on 32x32 images: a 3x3 convolution first, without
    pooling.

    With three channels and ten classes it has 11,173,962 parameters.

    Source: He et al., "Deep residual learning", 2015.
    """

    norm: Norm

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network. Raises UsageError unless samples are images of at least 8x8."""
        channels, _, _ = image_shape("resnet18_small", sample_shape, at_least=8)
        return make_network(channels, WIDE, 2, num_classes, self.norm, projected=True)
