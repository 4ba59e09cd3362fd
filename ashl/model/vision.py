"""Provide torchvision's classification networks by name."""

from difflib import get_close_matches

from torch import nn

from ashl.data.vision import load_torchvision
from ashl.errors import UsageError
from ashl.model.shape import image_shape
from ashl.option import option

SMALLEST = 32  # pixels: these networks halve the image five times
SMALL = 64  # pixels: below, the flattened image of VGG is a single pixel, copied 49 times


@option
class Vision:
    """A network of torchvision.models, untrained: `resnet18`, `vgg16_bn`, `mobilenet_v2`, …

    The first convolution is adapted to the number of channels. For images under 64 pixels, VGG's
    three linear layers become one, as is customary on CIFAR: vgg16_bn then has 14.7 million
    parameters instead of 134.
    """

    name: str

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network.

        Raises: UsageError for an unknown name, and unless samples are images of at least 32x32.
        """
        models = load_torchvision().models
        known = models.list_models(module=models)
        if self.name not in known:
            nearest = get_close_matches(self.name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "take for example resnet18."
            raise UsageError(f"torchvision has no classification model {self.name!r}; {hint}")
        channels, height, width = image_shape(self.name, sample_shape, at_least=SMALLEST)
        model = models.get_model(self.name, num_classes=num_classes)
        if isinstance(model, models.VGG) and min(height, width) < SMALL:
            model.avgpool = nn.AdaptiveAvgPool2d(1)
            model.classifier = nn.Linear(512, num_classes)
        if channels != 3:
            _take_channels(model, channels)
        return model


def _take_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for another number of channels."""
    name, first = next(
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)
    )
    parent, _, child = name.rpartition(".")
    setattr(
        model.get_submodule(parent),
        child,
        nn.Conv2d(
            channels,
            first.out_channels,
            first.kernel_size,
            first.stride,
            first.padding,
            bias=first.bias is not None,
        ),
    )
