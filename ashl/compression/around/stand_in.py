"""A protocol over all workers inside the aids of a link: what it is given, and what is kept once it has ended.

What a codec sends is known to the wrappers around it when it has encoded; what a protocol has brought of a worker's
vector into the sum is known only at its end. So the wrappers run twice, with a stand-in for the codec: once for what
they give it, and once more to be told what of that was sent. They are pure, hence the first run leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ashl.compression.around.wrapper import Wrapper, innermost
from ashl.compression.contract import TURN, Codec, Turn
from ashl.size_only import SizeOnly


class CodecInput(NamedTuple):
    """What a codec is given by the wrappers around it: its own state, the vector, and what it is sent for."""

    inner: Any
    x: Any
    turn: Turn


@dataclass(frozen=True)
class StandIn(Wrapper):
    """In the place of a codec: notes what it is given, and says what of it was sent."""

    seen: list[CodecInput]
    inner: Any = None  # the codec's state afterwards
    sent: Any = None  # a vector; None = nothing

    def encode(self, sender: Any, x: Any, turn: Turn = TURN) -> tuple[Any, Any]:
        self.seen.append(CodecInput(sender, x, turn))
        return self.inner, SizeOnly(0) if isinstance(x, SizeOnly) else self.sent

    def add(self, out: Any, body: Any, scale: float = 1.0) -> None:
        if body is not None:
            out.add_(body, alpha=scale)


def before(codec: Codec, sender: Any, x: Any, turn: Turn) -> CodecInput:
    """What the codec inside these wrappers is given."""
    seen: list[CodecInput] = []
    inside(codec, StandIn(innermost(codec), seen)).encode(sender, x, turn)
    return seen[0]


def after(codec: Codec, sender: Any, x: Any, turn: Turn, sent: Any, inner: Any = None) -> Any:
    """The sender's state after a message of which `sent` has come into the sum; `inner` is the codec's own part."""
    return inside(codec, StandIn(innermost(codec), [], inner, sent)).encode(sender, x, turn)[0]


def inside(codec: Codec, other: Codec) -> Codec:
    """These wrappers around another codec."""
    return replace(codec, codec=inside(codec.codec, other)) if isinstance(codec, Wrapper) else other
