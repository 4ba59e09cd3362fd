"""How an update travels: the contract of a codec.

A codec is an option whose functions are pure: arguments are never changed, state is passed and returned.

    encode(sender, x, ratio=None) -> (sender, body)     a flat float32 vector [d] becomes what goes on the wire
    decode(receiver, body, d)     -> (receiver, x)      ... and a vector again, of the d elements that are expected
    undo(sender, body)            -> sender             body was dropped on the way: what the sender takes back
    payload(ratio, d)             -> bytes              exactly those of a body; an upper bound where `flags.variable`
    add(out, body, scale=1.0)                           out += scale · content, in place; not where decoding has state
    flags                                               what may be relied on

`sender` and `receiver` are the codec's state at the two ends of one link, None at first; they belong to the link, so
that drops, stage borders and replies to many clients have one place to be right. `ratio` is the kept share of this
message, in (0, 1]; None is the option's own, codecs without one ignore it. It may change from message to message: a
body says itself all that decoding needs. A body is one flat tensor of its own (a lossless codec may send x itself);
its bytes are what is counted and paid for. Where a run is only timed, x is `Hollow`, and the body one of `payload`.

A body of another program, version or length raises `BodyError`; nothing of it is believed before it is checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ashl.errors import AshlError


class Flags(NamedTuple):
    """What a codec promises of C; rules and collectives are chosen by it."""

    unbiased: bool = False  # E C(x) = x
    contraction: bool = False  # E‖C(x) − x‖² ≤ (1 − δ)‖x‖² with δ > 0: error feedback may be used
    linear: bool = False  # the sum of bodies decodes to the sum: an all-reduce may carry it
    lossless: bool = False  # C(x) = x
    variable: bool = False  # the size of a body depends on x
    full_gradient: bool = False  # needs the gradient over all samples, not over a minibatch


class Codec(Protocol):
    """The contract as types."""

    @property
    def flags(self) -> Flags: ...

    def encode(self, sender: Any, x: Any, ratio: float | None = None) -> tuple[Any, Any]: ...

    def decode(self, receiver: Any, body: Any, d: int) -> tuple[Any, Any]: ...

    def undo(self, sender: Any, body: Any) -> Any: ...

    def payload(self, ratio: float | None, d: int) -> int: ...

    def add(self, out: Any, body: Any, scale: float = 1.0) -> None: ...


class BodyError(AshlError):
    """What came is no body of the codec that was to read it."""
