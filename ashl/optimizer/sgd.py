"""Stochastic gradient descent."""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.errors import NoEffectError
from ashl.optimizer.contract import Moments
from ashl.optimizer.schedule import Decay, Scheduled
from ashl.option import option


@option
class SGD(Scheduled):
    """SGD with momentum, as in torch.optim.SGD.

    Rule: g ← g + λw;  m ← μm + g;  w ← w − η m, or w ← w − η (g + μm) with Nesterov's look-ahead.
    Source: Polyak, 1964; Sutskever et al., "On the importance of initialization and momentum in
    deep learning", ICML 2013.
    """

    elementwise: ClassVar[bool] = True
    momentum: Decay
    nesterov: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            text = "optimizer.nesterov=true needs momentum; add for example optimizer.momentum=0.9."
            raise NoEffectError(text, "optimizer.nesterov")

    def init(self, num_params: int) -> Moments:
        """Return the momentum, zeros [d]; nothing without momentum."""
        return (torch.zeros(num_params),) if self.momentum else ()

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Return new moments and new parameters after one step on flat vectors [d]; arguments
        are unchanged.
        """
        if self.weight_decay:
            grad = torch.add(grad, params, alpha=self.weight_decay)
        if not self.momentum:
            return (), torch.add(params, grad, alpha=-lr)
        # The gradient may be overwritten if it is a temporary of this step.
        ours = self.weight_decay and not self.nesterov
        momentum = (grad.add_ if ours else grad.add)(moments[0], alpha=self.momentum)
        direction = torch.add(grad, momentum, alpha=self.momentum) if self.nesterov else momentum
        return (momentum,), torch.add(params, direction, alpha=-lr)
