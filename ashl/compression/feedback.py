"""Error feedback: what a codec left out is kept at the sender and added to what is sent next.

Rule: p = x + e, send C(p), e ← p − C(p), with e = 0 at first. Hence what was sent and the residual e add up to the sum
of all x: nothing is lost, only late. A dropped message returns its content to e.

x is an update, the learning rate inside it, so that e keeps its meaning when the rate changes. C has to be a
contraction. Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ashl.compression import Codec, Flags
from ashl.errors import UsageError
from ashl.runtime.effects import Hollow


class Residual(NamedTuple):
    """The sender's state: e (None = 0) and the state of the codec inside."""

    error: Any = None
    inner: Any = None


@dataclass(frozen=True)
class Feedback:
    """A codec around a codec; on the wire they are the same."""

    codec: Codec

    @property
    def flags(self) -> Flags:
        return self.codec.flags._replace(unbiased=False)

    def encode(self, sender: Residual | None, x: Any, ratio: float | None = None) -> tuple[Residual, Any]:
        error, inner = sender or Residual()
        p = x if error is None else x + error
        inner, body = self.codec.encode(inner, p, ratio)
        if isinstance(x, Hollow):
            return Residual(None, inner), body
        rest = p.clone() if p is x or p is body else p
        self.codec.add(rest, body, -1.0)
        return Residual(rest, inner), body

    def decode(self, receiver: Any, body: Any, d: int) -> tuple[Any, Any]:
        return self.codec.decode(receiver, body, d)

    def undo(self, sender: Residual, body: Any) -> Residual:
        error, inner = sender
        inner = self.codec.undo(inner, body)
        if isinstance(body, Hollow):
            return Residual(None, inner)
        restored = error.clone()
        self.codec.add(restored, body)
        return Residual(restored, inner)

    def payload(self, ratio: float | None, d: int) -> int:
        return self.codec.payload(ratio, d)

    def add(self, out: Any, body: Any, scale: float = 1.0) -> None:
        self.codec.add(out, body, scale)


def with_feedback(codec: Any) -> Any:
    """The codec as a link uses it: inside `Feedback` where its option says `feedback: true`. Raises UsageError."""
    if not getattr(codec, "feedback", False):
        return codec
    if not codec.flags.contraction:
        raise UsageError(
            f"compression.feedback=true needs a codec that never enlarges an update, and {type(codec).__name__} may; "
            "set compression.feedback=false"
        )
    return Feedback(codec)


def handed_over(sender: Any, codec: Any) -> Any:
    """What a sender keeps when a stage with another codec begins: its residual, where that codec takes it up."""
    if isinstance(sender, Residual) and isinstance(codec, Feedback):
        return sender._replace(inner=None)
    return None
