"""Adam and AdamW."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from ashl.optimizer.contract import Moments
from ashl.optimizer.schedule import Decay, Scheduled
from ashl.option import Positive, option


@option
class Adam(Scheduled):
    """Adam, as in torch.optim.Adam: weight decay is added to the gradient.

    Rule: m ← β1 m + (1 − β1) g;  v ← β2 v + (1 − β2) g²;  w ← w − η m̂ / (√v̂ + ε), where m̂ and v̂
    are m and v with the bias removed.
    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    elementwise: ClassVar[bool] = True
    beta1: Decay
    beta2: Decay
    eps: Positive

    def init(self, num_params: int) -> Moments:
        """Return the number of steps (a scalar; [d] once elements differ in it) and the two
        means, zeros [d].
        """
        return torch.zeros((), dtype=torch.int64), torch.zeros(num_params), torch.zeros(num_params)

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Return new moments and new parameters after one step on flat vectors [d]; arguments
        are unchanged.
        """
        if self.weight_decay:
            grad = torch.add(grad, params, alpha=self.weight_decay)
        return self._descend(moments, params, grad, lr)

    def _descend(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        count, first, second = moments[0] + 1, moments[1], moments[2]
        first = torch.lerp(first, grad, 1 - self.beta1)
        second = torch.mul(second, self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        moved = adam_step(params, first, second, lr, count, self.beta1, self.beta2, self.eps)
        return (count, first, second), moved


def adam_step(
    params: Tensor,
    first: Tensor,
    second: Tensor,
    lr: float,
    count: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """Return w − η·m̂/(√v̂ + ε), new, with the bias of `count` steps removed from both means."""
    if not count.dim():
        steps = int(count)
        scale = second.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(eps)
        return torch.addcdiv(params, first, scale, value=-lr / (1 - beta1**steps))
    steps = count.clamp(min=1).double()  # before the first step, both means are zero
    scale = second.sqrt().div_((1 - beta2**steps).sqrt().to(second.dtype)).add_(eps)
    return torch.addcdiv(params, first / (1 - beta1**steps).to(first.dtype), scale, value=-lr)


@option
class AdamW(Adam):
    """Adam with decoupled weight decay: w ← (1 − ηλ) w before each step.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Return new moments and new parameters after one step on flat vectors [d]; arguments
        are unchanged.
        """
        return self._descend(moments, params * (1 - lr * self.weight_decay), grad, lr)
