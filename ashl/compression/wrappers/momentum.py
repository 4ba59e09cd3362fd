"""Momentum correction: the sender accumulates velocities before selection, instead of the
optimizer.

Rule: u ← m·u + x, v ← v + u, send C(v), v ← v − C(v). With factor masking, u ← 0 for each element
that was sent, so that an old velocity does not move an element again that has just moved. If a
message is dropped, its content returns to v, and u returns to its previous value.

Limits: C(v) = v without masking is momentum SGD.
Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, EncodeContext, State, Traits
from ashl.compression.wrappers.feedback import rescale, restore_error
from ashl.compression.wrappers.wrapper import Wrapper


class Velocity(NamedTuple):
    """The sender's state: u and v (None = 0), and the learning rate of v.

    `before` is u before masking; `inner` is the state of the inner codec.
    """

    velocity: Tensor | None = None
    error: Tensor | None = None
    before: Tensor | None = None
    inner: State = None
    lr: float = 1.0


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Wrapper that keeps u and v around a codec."""

    decay: float
    masking: bool

    @property
    def traits(self) -> Traits:
        return self.codec.traits._replace(unbiased=False, lossless=False)

    def encode(
        self, sender: Velocity | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Velocity, Tensor]:
        state = sender or Velocity()
        velocity = state.velocity
        if state.lr * context.lr < 0:  # gradients and model differences: the stage has changed
            velocity = rescale(velocity, state.lr, context.lr)
        u = x.clone() if velocity is None else x + velocity * self.decay
        error = rescale(state.error, state.lr, context.lr)
        v = u.clone() if error is None else u + error
        inner, payload = self.codec.encode(state.inner, v, context)
        sent = torch.zeros_like(v)
        self.codec.add(sent, payload)
        masked = torch.where(sent == 0, u, 0) if self.masking else u
        return Velocity(masked, v - sent, u if self.masking else None, inner, context.lr), payload

    def restore_dropped(self, sender: Velocity, payload: Tensor) -> Velocity:
        velocity = sender.velocity if sender.before is None else sender.before
        whole = restore_error(self.codec, sender.error, payload)
        return Velocity(
            velocity, whole, None, self.codec.restore_dropped(sender.inner, payload), sender.lr
        )

    def residual(self, sender: Velocity | None) -> Tensor | None:
        return sender and sender.error

    def import_state(self, kept: State) -> State:
        return kept if isinstance(kept, Velocity) else None
