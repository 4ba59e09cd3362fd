"""A protocol over all workers inside the wrappers of a link: what it is given, and what is kept once it has ended.

What a codec sends is known to the wrappers around it when it has encoded; what a protocol has brought of a worker's
vector into the sum is known only at its end. So the wrappers run twice, with a stand-in for the codec: once for what
they give it, and once more to learn what of that was sent. They are pure, hence the first run leaves nothing behind.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ashl.compression.around.wrapper import Wrapper, innermost
from ashl.compression.contract import TURN, Codec, CodecInput, Outcome, State, Turn


@dataclass(frozen=True)
class StandIn(Wrapper):
    """In the place of a codec: notes what it is given, and says what of it was sent. Its body is a vector or None."""

    seen: list[CodecInput]
    inner: State = None  # the codec's state afterwards
    sent: Tensor | None = None

    def encode(self, sender: State, x: Tensor, turn: Turn = TURN) -> tuple[State, Any]:
        self.seen.append(CodecInput(sender, x, turn))
        return self.inner, self.sent

    def add(self, out: Tensor, body: Tensor | None, scale: float = 1.0) -> None:
        if body is not None:
            out.add_(body, alpha=scale)


def before(codec: Codec, sender: State, x: Tensor, turn: Turn) -> CodecInput:
    """What the codec inside these wrappers is given."""
    seen: list[CodecInput] = []
    inside(codec, StandIn(innermost(codec), seen)).encode(sender, x, turn)
    return seen[0]


def after(codec: Codec, sender: State, x: Tensor, turn: Turn, outcome: Outcome) -> State:
    """The sender's state once the protocol has ended."""
    stand_in = StandIn(innermost(codec), [], outcome.inner, outcome.sent)
    return inside(codec, stand_in).encode(sender, x, turn)[0]


def inside(codec: Codec, other: Codec) -> Codec:
    """These wrappers around another codec."""
    return replace(codec, codec=inside(codec.codec, other)) if isinstance(codec, Wrapper) else other
