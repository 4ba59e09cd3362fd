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

    For images under 64 pixels, VGG's three linear layers become one, as is customary on CIFAR:
    vgg16_bn then has 14.7 million parameters instead of 134.
    """

    name: str

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network.

        Raises: UsageError for an unknown name, and unless samples are images of three channels and
        at least 32x32.
        """
        models = load_torchvision().models
        known = models.list_models(module=models)
        if self.name not in known:
            nearest = get_close_matches(self.name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "take for example resnet18."
            raise UsageError(f"torchvision has no classification model {self.name!r}; {hint}")
        channels, height, width = image_shape(self.name, sample_shape, at_least=SMALLEST)
        if channels != 3:
            raise UsageError(
                f"Model {self.name} needs images of 3 channels, and a sample here has {channels};"
                " take model=resnet18_small, or a model of your own"
            )
        model = models.get_model(self.name, num_classes=num_classes)
        if isinstance(model, models.VGG) and min(height, width) < SMALL:
            model.avgpool = nn.AdaptiveAvgPool2d(1)
            model.classifier = nn.Linear(512, num_classes)
        return model
