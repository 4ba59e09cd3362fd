"""How an update travels: the contract of a codec.

A codec is an option whose functions are pure: arguments are never changed, state is passed and returned.

    encode(sender, x, turn)       -> (sender, body)     a flat vector [d] becomes what goes on the wire
    decode(receiver, body, d)     -> (receiver, x)      ... and a vector again, of the d elements that are expected
    undo(sender, body)            -> sender             body was dropped on the way: what the sender takes back
    payload(ratio, d)             -> bytes              exactly those of a body; an upper bound where `flags.variable`
    add(out, body, scale=1.0)                           out += scale · content, in place; not where decoding has state
    bound(ratio, d)               -> b                  E‖C(x) − x‖² ≤ b·‖x‖²; infinite where nothing is promised
    flags                                               what may be relied on

and, where it has more to say,

    reduce(memory, bodies, weights, d) -> (memory, x)   `flags.reduces`: what the bodies of one merge are together,
                                                        where that is not Σ weight · decode
    summand(body) -> t, summed(body, t) -> body         `flags.linear`: the flat tensor that an all-reduce may sum, and
                                                        the body whose content is that of the sum
    summed_bytes(ratio, d) -> bytes                     ... and those of such a tensor
    shaped(layout) -> codec                             the codec for a model's layers, where it treats them as such
    collective(...)                                     a protocol of its own over all workers: see `topology.exchange`
    links(stage, rank) -> ranks                         with whom that protocol exchanges messages, where it does

A codec that is for other gradients than those of a minibatch has `estimator`, see `ashl.topology.estimate`.

`sender` and `receiver` are the codec's state at the two ends of one link, None at first; they belong to the link, so
that drops, stage borders and replies to many clients have one place to be right. A body says itself all that decoding
needs. It is one flat tensor of its own (a lossless codec may send x itself); its bytes are what is counted and paid
for. Where a run is only timed, x is `SizeOnly`, and the body one of `payload`.

Most codecs have no state: they are two functions on arrays, see `ashl.compression.base.code`. What is kept between
messages, clipped or scheduled around any of them is in `ashl.compression.around.wrapped`.

A body of another program, version or length raises `BodyError`; nothing of it is believed before it is checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from ashl.data.rng import Purpose, quick
from ashl.errors import AshlError

ALL = 2**32 - 1  # in place of a worker, where all draw alike


class Flags(NamedTuple):
    """What a codec promises of C; rules and collectives are chosen by it."""

    unbiased: bool = False  # E C(x) = x
    contraction: bool = False  # E‖C(x) − x‖² ≤ (1 − δ)‖x‖² with δ > 0: error feedback may be used
    drains: bool = False  # ‖C(x) − x‖ ≤ ‖x‖, equal where x is small; what feedback keeps stays bounded: it may be used
    linear: bool = False  # the sum of bodies decodes to the sum: an all-reduce may carry it
    lossless: bool = False  # C(x) = x
    variable: bool = False  # the size of a body depends on x
    full_gradient: bool = False  # needs the gradient over all samples, not over a minibatch
    reduces: bool = False  # has `reduce`
    scale_free: bool = False  # the length of x is lost: makes sense of gradients, not of differences between models


class Turn(NamedTuple):
    """What one message is encoded for. (seed, worker, round, layer) name its random streams.

    `ratio` is the kept share of this message, in (0, 1]; None is the option's own, and codecs without one ignore it. It
    may change from message to message. `lr` is what x will be multiplied with on its way into the model: 1 where x is a
    difference between models, minus the learning rate where it is a gradient. `weight` is what x was multiplied with
    already.
    """

    ratio: float | None = None
    seed: int = 0
    worker: int = 0
    round: int = 0
    layer: int = 0
    workers: int = 1
    epoch: float = 0.0  # of the run so far
    lr: float = 1.0
    weight: float = 1.0
    params: Any = None  # the model that x was computed on
    squares: Any = None  # with `estimator = "moments"`: Σ (share · gradient)² over parts of the minibatch, [d]

    def stream(self) -> np.random.Generator:
        """This worker's own random numbers for this message."""
        return quick(self.seed, Purpose.CODEC, self.worker, self.round, self.layer)

    def shared(self) -> np.random.Generator:
        """Random numbers that all workers draw alike in this round."""
        return quick(self.seed, Purpose.CODEC, ALL, self.round, self.layer)


TURN = Turn()


class Codec(Protocol):
    """The contract as types."""

    @property
    def flags(self) -> Flags: ...

    def encode(self, sender: Any, x: Any, turn: Turn = TURN) -> tuple[Any, Any]: ...

    def decode(self, receiver: Any, body: Any, d: int) -> tuple[Any, Any]: ...

    def undo(self, sender: Any, body: Any) -> Any: ...

    def payload(self, ratio: float | None, d: int) -> int: ...

    def add(self, out: Any, body: Any, scale: float = 1.0) -> None: ...

    def bound(self, ratio: float | None, d: int) -> float: ...


class BodyError(AshlError):
    """What came is no body of the codec that was to read it."""
