"""The kept share as training goes on: a warm-up, and a share that follows how fast gradients change.

Warm-up: in epoch e of E the share is ratio^((e + 1)/(E + 1)), then ratio; for 0.1 % and E = 4 it is 25, 6.3, 1.6, 0.4
and 0.1 %. Source: Lin et al., "Deep Gradient Compression", ICLR 2018.

Accordion: G is the sum of a worker's updates in an epoch; where |‖G_before‖ − ‖G‖| ≥ η·‖G_before‖, the next epoch is a
critical one, in which the larger share is kept; so is the first. Here each worker judges for itself and for the whole
model at once, in the paper for each layer. Source: Agarwal et al., "Accordion: Adaptive Gradient Communication via
Critical Learning Regime Identification", MLSys 2021, with its η = 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ashl.compression.around.wrapper import Wrapper, innermost, inwards
from ashl.compression.contract import TURN, Turn
from ashl.size_only import SizeOnly

CHANGE = 0.5  # η


@dataclass(frozen=True)
class WarmUp(Wrapper):
    """Sends much at first, around a codec that knows a share."""

    epochs: int

    def encode(self, sender: Any, x: Any, turn: Turn = TURN) -> tuple[Any, Any]:
        return self.codec.encode(sender, x, turn._replace(ratio=self.share(turn)))

    def share(self, turn: Turn) -> float:
        """What is kept of this message."""
        ratio = innermost(self.codec).ratio if turn.ratio is None else turn.ratio
        return ratio ** min(1.0, (int(turn.epoch) + 1) / (self.epochs + 1))


def scheduled(codec: Any, turn: Turn) -> float | None:
    """The kept share of a message after the warm-up around a codec, where there is one."""
    return next((part.share(turn) for part in inwards(codec) if isinstance(part, WarmUp)), turn.ratio)


class Regime(NamedTuple):
    """The sender's state: the epoch, the sum of its updates, the norm of the sum of the epoch before, and whether the
    epoch is critical."""

    epoch: int = 0
    total: Any = None
    before: float | None = None
    critical: bool = True
    inner: Any = None


@dataclass(frozen=True)
class Accordion(Wrapper):
    """Sends more in critical epochs, around a codec that knows a share."""

    critical_ratio: float

    def encode(self, sender: Regime | None, x: Any, turn: Turn = TURN) -> tuple[Regime, Any]:
        state = sender or Regime(epoch=int(turn.epoch))
        if int(turn.epoch) > state.epoch and state.total is not None:
            norm = float(torch.linalg.vector_norm(state.total, dtype=torch.float64))
            critical = state.before is None or abs(state.before - norm) >= CHANGE * state.before
            state = Regime(int(turn.epoch), None, norm, critical, state.inner)
        elif state.total is None:  # the first update of a stage
            state = state._replace(epoch=int(turn.epoch))
        total = None if isinstance(x, SizeOnly) else x if state.total is None else state.total + x
        if state.critical:
            turn = turn._replace(ratio=self.critical_ratio)
        inner, body = self.codec.encode(state.inner, x, turn)
        return state._replace(total=total, inner=inner), body

    def undo(self, sender: Regime, body: Any) -> Regime:
        return sender._replace(inner=self.codec.undo(sender.inner, body))
