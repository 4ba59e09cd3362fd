"""Error feedback: what a codec left out is kept at the sender and added to what is sent next.

Rule: p = x + α·e, send C(p), e ← β·e + (x − C(p)), with e = 0 at first. α = β = 1 is plain error
feedback, e ← p − C(p): what was sent and the residual e add up to the sum of all x, so that nothing
is lost, only late. Smaller ones are ECQ-SGD, which forgets old errors. A dropped message returns
its content to e.

e is kept in units of the model: where x is a gradient, it is rescaled when the learning rate
changes, and where a stage of differences between models follows one of gradients, or the other way
round, it becomes one. C has to be a contraction. Source: Seide et al., "1-Bit Stochastic Gradient
Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019; Wu et al., "Error Compensated Quantized SGD", ICML 2018.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, Codec, EncodeContext, State, Traits
from ashl.compression.wrappers.wrapper import Wrapper


class Residual(NamedTuple):
    """The sender's state: e (None = 0), the state of the codec inside, and the learning rate that e
    goes with.
    """

    error: Tensor | None = None
    inner: State = None
    lr: float = 1.0


@dataclass(frozen=True)
class Feedback(Wrapper):
    """Keeps e around a codec."""

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
    """What was kept, with the content of a body that was dropped."""
    assert error is not None
    whole = error.clone()
    codec.add(whole, payload)
    return whole


def rescale(vector: Tensor | None, before: float, now: float) -> Tensor | None:
    """What is kept in units of a gradient, so that lr · vector stays what it was; unchanged where
    either rate is 0.
    """
    if vector is None or before == now or not before or not now:
        return vector
    return vector * (before / now)
