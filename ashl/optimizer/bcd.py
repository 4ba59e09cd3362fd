"""Block coordinate descent without gradients, for multi-layer perceptrons: each block has a
closed-form minimum.

Rule: for every sample, each layer's input U_{l−1} and its sums V_l become variables of their own
(U_0 the inputs), coupled by penalties. There are N layers, and W_l has the biases as a last column,
for an input that is always 1.

    F = mean over samples of ½‖V_N − y‖² + γ/2 Σ_l ‖V_l − W_l·U_{l−1}‖²
        + ρ/2 Σ_{l<N} ‖U_l − max(0, V_l)‖²

y are values, or 0 and 1 by class. One step is a sweep: V_N, then U_l and V_l for l = N − 1 … 1,
each at the minimum of F given all others. Then all W_l ← (mean V_l·U_{l−1}ᵀ + λ·W_l)(mean
U_{l−1}·U_{l−1}ᵀ + λ·I)⁻¹ at once, the minimum of F + γλ/2·‖W_l − W_l before‖². F never grows. U and
V stay with the worker that has the samples. Workers sum the two means of each layer: ((in + 1)² +
out·(in + 1))·32 bits, independent of the number of samples. So several workers equal one worker
with all the data, up to rounding.

Limits: fully connected layers and ReLU only. Memory for U and V of every sample. The loss is
squared error, which also separates classes well enough, and the reported loss is F. There is no
learning rate.

Differs from Zeng et al.: all W_l follow the sweep instead of one after each layer, so that a step
is one exchange, and only they have a proximal term.

Source: Zeng et al., "Global Convergence of Block Coordinate Descent in Deep Learning", ICML 2019;
Lau et al., "A Proximal Block Coordinate Descent Algorithm for Deep Neural Network Training", ICLR
workshop 2018.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ashl.device import read_scalars, to_host
from ashl.optimizer.contract import Layers, Moments, Optimizer
from ashl.option import Positive, option


class Blocks(NamedTuple):
    """A worker's variables for its samples: V_1 … V_N and U_1 … U_{N−1}, each [width, samples]."""

    sums: list[Tensor]
    outputs: list[Tensor]


@option
class BCD(Optimizer):
    """Block coordinate descent: solves for the weights instead of stepping."""

    gamma: Positive
    rho: Positive
    ridge: Positive

    def init_for_layers(self, layers: Layers) -> Moments:
        """Return (in, out) of each layer as the optimizer's state, int64 [N, 2]."""
        return (torch.tensor([shape[::-1] for _, shape in layers if len(shape) == 2]),)

    def statistics(self, layers: Layers) -> int:
        """Return the number of elements of the two means of all layers."""
        return sum((i + 1) * (i + 1 + o) for i, o in self.init_for_layers(layers)[0].tolist())

    def rate(self, samples: int, epoch_samples: int) -> float:
        return 1.0

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Return the state and the weights that follow from the means over all workers, flat [d].

        The arguments are unchanged.
        """
        solved, start = [], 0
        for weight in weights_of(moments, params):
            out, wide = weight.shape
            gram, cross = (
                grad[start : start + wide * (wide + out)].double().split([wide * wide, out * wide])
            )
            start += wide * (wide + out)
            right = cross.view(out, wide) + self.ridge * weight
            solved.append(
                torch.linalg.solve(
                    gram.view(wide, wide) + self.ridge * identity(weight), right, left=False
                )
            )
        return moments, flatten_layers(solved).to(params.dtype)

    def sweep(
        self,
        params: Tensor,
        moments: Moments,
        blocks: Blocks | None,
        inputs: Tensor,
        targets: Tensor,
    ) -> tuple[float, Blocks, Tensor]:
        """Return F, the V and U that minimise it, and the two means of all layers.

        Args: inputs [features, samples]; targets [values, samples]; blocks = None starts from a
        forward pass.
        """
        weights = [weight.to(inputs.dtype) for weight in weights_of(moments, params)]
        sums, outputs = blocks or forward(weights, inputs)
        sums, outputs = list(sums), list(outputs)
        gamma, rho, last = self.gamma, self.rho, len(weights) - 1
        sums[last] = (targets + gamma * (weights[last] @ append_ones([inputs, *outputs][last]))) / (
            1 + gamma
        )
        for k in reversed(range(last)):
            matrix, bias = weights[k + 1][:, :-1], weights[k + 1][:, -1:]
            left = gamma * matrix.T @ matrix + rho * identity(matrix)
            right = gamma * matrix.T @ (sums[k + 1] - bias) + rho * sums[k].relu()
            outputs[k] = torch.linalg.solve(left, right)
            sums[k] = self.minimize_sums(
                outputs[k], weights[k] @ append_ones([inputs, *outputs][k])
            )
        count, means = inputs.shape[1], []
        for below, above in zip([inputs, *outputs], sums, strict=True):
            wide = append_ones(below)
            means += [(wide @ wide.T).flatten() / count, (above @ wide.T).flatten() / count]
        found = Blocks(sums, outputs)
        return self.objective(weights, found, inputs, targets), found, torch.cat(means)

    def minimize_sums(self, output: Tensor, sums: Tensor) -> Tensor:
        """Return argmin_v ρ/2·(output − max(0, v))² + γ/2·(v − sums)², element by element.

        It is the better one of the two minima with v ≥ 0 and v ≤ 0.
        """
        above = ((self.rho * output + self.gamma * sums) / (self.rho + self.gamma)).clamp_(min=0)
        below = sums.clamp(max=0)
        cost = self.rho * (output - above) ** 2 + self.gamma * (above - sums) ** 2
        return torch.where(
            cost <= self.rho * output**2 + self.gamma * (below - sums) ** 2, above, below
        )

    def objective(
        self, weights: list[Tensor], blocks: Blocks, inputs: Tensor, targets: Tensor
    ) -> float:
        """Return F over these samples."""
        sums, outputs = blocks
        total = (sums[-1] - targets).square().sum()
        for weight, below, above in zip(weights, [inputs, *outputs], sums, strict=True):
            total += self.gamma * (above - weight @ append_ones(below)).square().sum()
        for output, above in zip(outputs, sums, strict=False):
            total += self.rho * (output - above.relu()).square().sum()
        return read_scalars([total])[0] / 2 / inputs.shape[1]


def forward(weights: list[Tensor], inputs: Tensor) -> Blocks:
    """Return the variables of a forward pass, in which every penalty is zero."""
    sums = [weights[0] @ append_ones(inputs)]
    for weight in weights[1:]:
        sums.append(weight @ append_ones(sums[-1].relu()))
    return Blocks(sums, [above.relu() for above in sums[:-1]])


def append_ones(x: Tensor) -> Tensor:
    """Return x [width, samples] with a last row of ones, for the biases."""
    return torch.cat([x, x.new_ones(1, x.shape[1])])


def identity(matrix: Tensor) -> Tensor:
    """Return the identity matrix for the columns of a matrix, on its device."""
    return torch.eye(matrix.shape[1], device=str(matrix.device))


def weights_of(moments: Moments, params: Tensor) -> list[Tensor]:
    """Return each layer's [out, in + 1], float64, the bias last."""
    weights, start = [], 0
    for wide, out in to_host(moments[0]).tolist():
        matrix, bias = params[start : start + out * (wide + 1)].double().split([out * wide, out])
        weights.append(torch.cat([matrix.view(out, wide), bias[:, None]], 1))
        start += out * (wide + 1)
    return weights


def flatten_layers(weights: list[Tensor]) -> Tensor:
    """Return the model's parameters in the learner's order."""
    return torch.cat([torch.cat([weight[:, :-1].flatten(), weight[:, -1]]) for weight in weights])
