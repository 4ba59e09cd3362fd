"""Density schedules: a warm-up, and a density that depends on how fast gradients change.

Warm-up: in epoch e of E the density is ratio^((e + 1)/(E + 1)), then ratio. For ratio = 0.1 % and E
= 4 it is 25, 6.3, 1.6, 0.4 and 0.1 %. Source: Lin et al., "Deep Gradient Compression", ICLR 2018.

Accordion: G is the sum of a worker's updates in an epoch. If |‖G_before‖ − ‖G‖| ≥ η·‖G_before‖, the
next epoch is critical and has the larger density. The first epoch is critical, too. Source: Agarwal
et al., "Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification",
MLSys 2021, with its η = 0.5. Differs: each worker decides for itself and for the whole model; the
paper decides for each layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, EncodeContext, State
from ashl.compression.wrappers.wrapper import Stateful, Wrapper
from ashl.learn.device import numbers

CHANGE = 0.5  # η of Accordion


@dataclass(frozen=True)
class WarmUp(Wrapper):
    """Wrapper that begins with a high density, around a codec with a density."""

    epochs: int

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        return self.codec.encode(sender, x, context._replace(ratio=self.share(context)))

    def share(self, context: EncodeContext) -> float:
        ratio = self.codec.ratio if context.ratio is None else context.ratio
        assert ratio is not None, "a codec without a density has no warm-up"
        return ratio ** min(1.0, (int(context.epoch) + 1) / (self.epochs + 1))


class Regime(NamedTuple):
    """The sender's state: the epoch, and whether it is critical.

    `total` is the sum of the updates of the epoch, `before` the norm of that sum in the epoch
    before.
    """

    epoch: int = 0
    total: Tensor | None = None
    before: float | None = None
    critical: bool = True
    inner: State = None


@dataclass(frozen=True)
class Accordion(Stateful):
    """Wrapper that sends more in critical epochs, around a codec with a density."""

    state: ClassVar[Callable[..., State]] = Regime
    critical_ratio: float

    def encode(
        self, sender: Regime | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Regime, Tensor]:
        state = sender or Regime(epoch=int(context.epoch))
        if int(context.epoch) > state.epoch and state.total is not None:
            norm = numbers([torch.linalg.vector_norm(state.total, dtype=torch.float64)])[0]
            critical = state.before is None or abs(state.before - norm) >= CHANGE * state.before
            state = Regime(int(context.epoch), None, norm, critical, state.inner)
        elif state.total is None:  # first update of the stage
            state = state._replace(epoch=int(context.epoch))
        total = x if state.total is None else state.total + x
        if state.critical:
            context = context._replace(ratio=self.critical_ratio)
        inner, payload = self.codec.encode(state.inner, x, context)
        return state._replace(total=total, inner=inner), payload

    def share(self, context: EncodeContext) -> float | None:
        """Return the density of a critical epoch, which is the largest."""
        return self.codec.share(context._replace(ratio=self.critical_ratio))
