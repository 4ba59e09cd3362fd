"""Check that a model can read the samples of a data set."""

from ashl.errors import UsageError


def image_shape(model: str, sample_shape: tuple[int, ...], at_least: int) -> tuple[int, int, int]:
    """Return channels, height and width of a sample.

    Raises: UsageError if samples are not images, or have a side of fewer than `at_least` pixels.
    """
    text = "x".join(map(str, sample_shape))
    if len(sample_shape) != 3:
        raise UsageError(
            f"Model {model} needs images (channels, height, width), but a sample of this data set"
            f" has shape {text}; take model=mlp or model=linear, or model=gpt for text."
        )
    channels, height, width = sample_shape
    if min(height, width) < at_least:
        fits_cnn = model != "cnn" and min(height, width) >= 4
        others = "model=cnn or model=mlp" if fits_cnn else "model=mlp"
        raise UsageError(
            f"Model {model} needs images of at least {at_least}x{at_least} pixels, but a sample of"
            f" this data set has shape {text}; take {others}."
        )
    return channels, height, width
