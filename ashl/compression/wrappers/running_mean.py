"""Momentum before the codec: the sender encodes a running mean of its updates, as in Signum.

Rule: u ← β·u + (1 − β)·x with u = 0 at first; send C(u). Sending takes nothing away from u, unlike
momentum correction. A dropped message does not change u either: u depends on the worker's updates,
not on its messages.

Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, EncodeContext, State
from ashl.compression.wrappers.wrapper import Stateful


class Average(NamedTuple):
    """The sender's state: u (None = 0), and the state of the inner codec."""

    mean: Tensor | None = None
    inner: State = None


@dataclass(frozen=True)
class RunningMean(Stateful):
    """Wrapper that keeps u in front of a codec."""

    state: ClassVar[Callable[..., State]] = Average
    decay: float

    def encode(
        self, sender: Average | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Average, Tensor]:
        mean, inner = sender or Average()
        if mean is None:
            mean = x * (1 - self.decay)
        else:
            mean = (mean * self.decay).add_(x, alpha=1 - self.decay)
        inner, payload = self.codec.encode(inner, mean, context)
        return Average(mean, inner), payload
