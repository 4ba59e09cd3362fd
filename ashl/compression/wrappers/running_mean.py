"""Momentum before the codec: what is sent is a running mean of what was to be sent, as Signum has
it.

Rule: u ← β·u + (1 − β)·x with u = 0 at first; send C(u). Unlike momentum correction nothing of u is
taken away by sending it. A dropped message changes nothing of it either: u is what the worker has
seen, not what it has sent.

Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, EncodeContext, State
from ashl.compression.wrappers.wrapper import Stateful


class Average(NamedTuple):
    """The sender's state: u (None = 0), and the state of the codec inside."""

    mean: Tensor | None = None
    inner: State = None


@dataclass(frozen=True)
class RunningMean(Stateful):
    """Keeps u in front of a codec."""

    state: ClassVar[Callable[..., State]] = Average
    decay: float

    def encode(
        self, sender: Average | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Average, Tensor]:
        mean, inner = sender or Average()
        mean = (
            x * (1 - self.decay)
            if mean is None
            else (mean * self.decay).add_(x, alpha=1 - self.decay)
        )
        inner, payload = self.codec.encode(inner, mean, context)
        return Average(mean, inner), payload
