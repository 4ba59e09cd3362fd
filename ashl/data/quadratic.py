"""Make a linear regression with a known optimum, to check methods against mathematics."""

import numpy as np
import torch
from torch import Tensor

from ashl.data.dataset import Data, Dataset, Split
from ashl.data.rng import Purpose, stream
from ashl.option import Count, Natural, NonNegative, Size, option


@option
class Quadratic(Dataset):
    """Samples y = x·w + b + noise with x ~ N(0, C); with model=linear the loss is a convex
    quadratic.

    The eigenvalues of C are spaced evenly in the logarithm from 1 down to 1/condition, in a random
    basis.
    """

    num_samples: Size
    num_features: Size
    condition: Count
    noise: NonNegative
    seed: Natural

    def load(self) -> Data:
        """Return the samples, a function of the fields alone; never fails."""
        generator = stream(self.seed, Purpose.SAMPLES)
        basis, _ = np.linalg.qr(generator.standard_normal((self.num_features, self.num_features)))
        factor = basis * np.sqrt(np.geomspace(1, 1 / self.condition, self.num_features))
        weight, bias = (
            generator.standard_normal((self.num_features, 1)),
            generator.standard_normal(),
        )

        def split(count: int) -> Split:
            inputs = generator.standard_normal((count, self.num_features)) @ factor.T
            targets = inputs @ weight + bias + self.noise * generator.standard_normal((count, 1))
            return Split(torch.from_numpy(inputs).float(), torch.from_numpy(targets).float())

        train, test = split(self.num_samples), split(max(self.num_samples // 4, 1))
        return Data(train, test, sample_shape=(self.num_features,), num_classes=1)


def optimum(data: Data) -> tuple[Tensor, float]:
    """Return the linear model's optimal parameters and their training loss.

    The parameters are flat: weight [outputs, features], then bias. They are computed by least
    squares in double precision; the gradient there is zero.
    """
    inputs, targets = (
        part.double().flatten(1) for part in data.train.batch(np.arange(len(data.train)))
    )
    design = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.double)], dim=1)
    solution = torch.linalg.lstsq(design, targets).solution  # [features + 1, outputs]
    loss = 0.5 * (design @ solution - targets).square().mean()
    return torch.cat([solution[:-1].T.flatten(), solution[-1]]).float(), float(loss)
