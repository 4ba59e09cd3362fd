"""Error feedback: the sender adds the compression error of earlier messages to the next message.

Rule: p = x + α·e, send C(p), e ← β·e + (x − C(p)), with e = 0 at first. α = β = 1 is plain error
feedback, e ← p − C(p): the sum of all x equals the sum of all messages plus e, so that nothing is
lost, only delayed. Smaller values are ECQ-SGD, which forgets old errors. If a message is dropped,
its content returns to e.

e has the unit of the model. If x is a gradient, e is rescaled when the learning rate changes. It is
also converted at a boundary between a stage of gradients and a stage of model differences.

Limits: C has to be a contraction, or its residual has to stay bounded.
Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019; Wu et al., "Error
Compensated Quantized SGD", ICML 2018.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, Codec, EncodeContext, State, Traits
from ashl.compression.wrappers.wrapper import Wrapper


class Residual(NamedTuple):
    """The sender's state: e (None = 0), the inner codec's state, and the learning rate of e."""

    error: Tensor | None = None
    inner: State = None
    lr: float = 1.0


@dataclass(frozen=True)
class Feedback(Wrapper):
    """Wrapper that keeps e around a codec."""

    gain: float = 1.0
    decay: float = 1.0

    @property
    def traits(self) -> Traits:
        return self.codec.traits._replace(unbiased=False)

    def encode(
        self, sender: Residual | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Residual, Tensor]:
        error, inner, lr = sender or Residual()
        error = rescale(error, lr, context.lr)
        p = x if error is None else x + (error if self.gain == 1 else error * self.gain)
        inner, payload = self.codec.encode(inner, p, context)
        if error is not None and self.gain != self.decay:
            p = x + error * self.decay
        rest = p.clone() if p is x or p is payload else p
        self.codec.add(rest, payload, -1.0)
        return Residual(rest, inner, context.lr), payload

    def restore_dropped(self, sender: Residual, payload: Tensor) -> Residual:
        return Residual(
            restore_error(self.codec, sender.error, payload),
            self.codec.restore_dropped(sender.inner, payload),
            sender.lr,
        )

    def residual(self, sender: Residual | None) -> Tensor | None:
        return sender and sender.error

    def import_state(self, kept: State) -> State:
        return kept if isinstance(kept, Residual) else None


def restore_error(codec: Codec, error: Tensor | None, payload: Tensor) -> Tensor:
    """Return the residual plus the content of a dropped message."""
    assert error is not None
    whole = error.clone()
    codec.add(whole, payload)
    return whole


def rescale(vector: Tensor | None, before: float, now: float) -> Tensor | None:
    """Return a vector in gradient units, rescaled so that lr · vector keeps its value.

    It is unchanged if one of the rates is 0.
    """
    if vector is None or before == now or not before or not now:
        return vector
    return vector * (before / now)
