"""Render letters and digits from the fonts of matplotlib: real shapes without a download.

Rule: each sample is a character in a random font, moved, turned, scaled and sheared at random, as
dark or light as another, with noise. The numbers depend on `seed` alone. Training and test samples
are different draws; both have all fonts.

Some classes have nearly equal shapes in some fonts (`0`, `O` and `o`; `1`, `I` and `l`), so no
model reaches 100 %.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from string import ascii_letters, digits
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ashl.data.dataset import Data, Dataset, Split
from ashl.data.rng import Purpose, stream
from ashl.errors import DataMissingError
from ashl.option import Natural, Size, option

CHARACTERS = digits + ascii_letters
FONTS = (
    *(
        f"DejaVu{family}{style}"
        for family in ("Sans", "SansMono", "Serif")
        for style in ("", "-Bold")
    ),
    *(f"DejaVu{family}" for family in ("Sans-Oblique", "SansMono-Oblique", "Serif-Italic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10"),
)
CANVAS = 40  # pixels a side of a rendered character
HEIGHT = 34  # pixels of a line of text on the canvas
TURN, SHEAR, SHIFT = 0.35, 0.25, 0.12  # largest angle (radians), shear, and shift (of the side)
SCALE = (0.75, 1.15)  # range of the factors of width and height, drawn separately
CONTRAST = (0.45, 1.0)  # range of the factor of all grey levels
BATCH = 2048  # samples that are distorted at once
# mean and deviation of the grey levels, in 0 … 1, at the defaults
MEAN, STD = 0.11, 0.20


@option
class Glyphs(Dataset):
    """62 classes: digits, capital and small letters in 17 fonts, as grey levels of any size.

    Source: the fonts DejaVu, STIX and Computer Modern as matplotlib ships them; distortions as in
    Simard, Steinkraus and Platt, "Best Practices for Convolutional Neural Networks", ICDAR 2003,
    without elastic ones.
    """

    side: Annotated[Size, Field(ge=8, le=96)]
    num_train: Size
    num_test: Size
    noise: Annotated[float, Field(ge=0, le=1)]
    seed: Natural

    def load(self) -> Data:
        """Return the samples.   Raises: DataMissingError without matplotlib."""
        shapes = torch.from_numpy(render_all())
        generator = stream(self.seed, Purpose.SAMPLES)

        def split(count: int) -> Split:
            classes = torch.from_numpy(generator.integers(0, len(CHARACTERS), count))
            fonts = torch.from_numpy(generator.integers(0, len(FONTS), count))
            pixels = torch.empty((count, 1, self.side, self.side), dtype=torch.uint8)
            for start in range(0, count, BATCH):
                part = slice(start, start + BATCH)
                pixels[part] = self.distort(shapes[classes[part], fonts[part]], generator)
            return Split(pixels, classes, (MEAN,), (STD,))

        train, test = split(self.num_train), split(self.num_test)
        shape = (1, self.side, self.side)
        return Data(train, test, sample_shape=shape, num_classes=len(CHARACTERS))

    def distort(self, characters: Tensor, generator: np.random.Generator) -> Tensor:
        """Return distorted characters, uint8 [n, 1, side, side], of rendered ones [n, CANVAS,
        CANVAS] in 0 … 1.
        """
        n = len(characters)
        turn, shear, x, y = (
            torch.from_numpy(generator.uniform(-most, most, n))
            for most in (TURN, SHEAR, 2 * SHIFT, 2 * SHIFT)
        )
        wide, high, contrast = (
            torch.from_numpy(generator.uniform(*bounds, n)) for bounds in (SCALE, SCALE, CONTRAST)
        )
        cos, sin = torch.cos(turn), torch.sin(turn)
        rows = torch.stack([cos / wide, (shear * cos - sin) / high, x], 1)
        columns = torch.stack([sin / wide, (shear * sin + cos) / high, y], 1)
        grid = torch.nn.functional.affine_grid(
            torch.stack([rows, columns], 1), [n, 1, self.side, self.side], align_corners=False
        )
        moved = torch.nn.functional.grid_sample(
            characters[:, None], grid, mode="bilinear", align_corners=False
        )
        noise = torch.from_numpy(generator.standard_normal(tuple(moved.shape)))
        grey = moved * contrast[:, None, None, None] + self.noise * noise
        return (grey.clamp(0, 1) * 255).round().to(torch.uint8)


@cache
def render_all() -> np.ndarray:
    """Return every character in every font, float64 [62, fonts, CANVAS, CANVAS] in 0 … 1."""
    package = find_spec("matplotlib")
    if package is None or package.origin is None:
        raise DataMissingError(
            "dataset=glyphs: matplotlib, which brings the fonts, is not installed; run"
            " `pip install matplotlib`"
        )
    from matplotlib.ft2font import FT2Font

    folder = Path(package.origin).parent / "mpl-data/fonts/ttf"
    shapes = np.zeros((len(CHARACTERS), len(FONTS), CANVAS, CANVAS))
    for place, name in enumerate(FONTS):
        font = FT2Font(str(folder / f"{name}.ttf"))
        font.set_size(HEIGHT, 72)
        for number, character in enumerate(CHARACTERS):
            font.set_text(character)
            font.draw_glyphs_to_bitmap()
            image = np.asarray(font.get_image())[:CANVAS, :CANVAS] / 255
            top, left = ((CANVAS - length) // 2 for length in image.shape)
            shapes[number, place, top : top + len(image), left : left + image.shape[1]] = image
    return shapes
