"""The residual networks for small images."""

from torch import Tensor, nn
from torch.nn import functional

from ashl.errors import UsageError
from ashl.model.shape import image_shape
from ashl.option import Count, option

WIDTHS = (16, 32, 64)  # channels of the three stages


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters (the paper's option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.widening = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.widening:  # every second pixel, and zeros in the new channels
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widening))
        return functional.relu(out + x)


@option
class ResNet:
    """The network of `depth` 6n + 2 for 32x32 images: He et al., "Deep residual learning", 2015, section 4.2.

    With three channels and ten classes depth 8 has 75,290 parameters, depth 20 has 269,722 (the paper's 0.27 million).
    """

    depth: Count

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Raises UsageError unless samples are images of at least 4x4, and `depth` is 8, 14, 20, …"""
        blocks, odd = divmod(self.depth - 2, 6)
        if odd or blocks < 1:
            raise UsageError(f"model.depth={self.depth} is not of the form 6n + 2; take 8, 14, 20, 32, 44, 56 or 110.")
        channels, _, _ = image_shape(f"resnet{self.depth}", sample_shape, at_least=4)
        layers: list[nn.Module] = [
            nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTHS[0]),
            nn.ReLU(),
        ]
        before = WIDTHS[0]
        for width in WIDTHS:
            for _ in range(blocks):
                layers.append(Block(before, width, stride=1 if before == width else 2))
                before = width
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return model
