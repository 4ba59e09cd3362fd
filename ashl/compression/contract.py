"""How an update travels: the contract of a codec.

A codec is an option derived from `Codec`. Its functions are pure: arguments are never changed,
state is passed and returned. `sender` and `receiver` are its state at the two ends of one link,
None at first; they belong to the link (see `ashl.stage.compression_pipeline`), so that drops, stage
borders and replies to many clients have one place to be right. A body says itself all that decoding
needs. It is one flat tensor of its own (a lossless codec may send x itself); its bytes are what is
counted and paid for.

What comes with methods of its own is a class to derive from, too: `Reduces`, `Linear`,
`Collective`. Most codecs have no state: they are two functions on arrays, see
`ashl.compression.common.code`. Memory, clipping and schedules around them are in
`ashl.compression.wrappers.compose`. A run that is only timed asks no codec to encode:
`encoded_nbytes` is all that is needed, and of a `Collective` what it says in `timed`.

A body of another program, version or length raises `PayloadError`; nothing of it is believed before
it is checked.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from ashl.data.counter_rng import CounterRng, counter_rng
from ashl.data.rng import Purpose, quick
from ashl.errors import AshlError
from ashl.option import Contract

ALL = 2**32 - 1  # in place of a worker, where all draw alike
Estimator = Literal["minibatch", "full", "svrg"]
State = Any  # a codec's own, at one end of a link: tensors, numbers and named tuples of them
T = TypeVar("T")


class Layer(NamedTuple):
    """One parameter tensor: its name in the model and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)


Layout = tuple[Layer, ...]


def size_of(layout: Layout) -> int:
    """d, the elements of the flat vector."""
    return sum(layer.size for layer in layout)


class Traits(NamedTuple):
    """What a codec promises of C; rules and collectives are chosen by it."""

    unbiased: bool = False  # E C(x) = x
    contraction: bool = False  # E‖C(x) − x‖² ≤ (1 − δ)‖x‖² with δ > 0: error feedback may be used
    # ‖C(x) − x‖ ≤ ‖x‖, equal where x is small; what feedback keeps stays bounded: it may be used
    drains: bool = False
    linear: bool = False  # the sum of bodies decodes to the sum: an all-reduce may carry it
    lossless: bool = False  # C(x) = x
    variable: bool = False  # the size of a body depends on x
    full_gradient: bool = False  # needs the gradient over all samples, not over a minibatch
    reduces: bool = False  # what the bodies of one merge are together is for `reduce` to say
    # the length of x is lost: makes sense of gradients, not of differences between models
    scale_free: bool = False


class EncodeContext(NamedTuple):
    """What one message is encoded for. (seed, worker, round, layer) name its random streams, where
    `round` counts the worker's own messages. What all draw alike goes by `version` instead, that of
    the model that x was computed on: workers share it however many messages each has sent. None =
    all have sent as many.

    `ratio` is the density of this message, in (0, 1]; None is the option's own, and codecs without
    one ignore it. It may change from message to message. `lr` is what x will be multiplied with on
    its way into the model: 1 where x is a difference between models, minus the learning rate where
    it is a gradient. `weight` is what x was multiplied with already.
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
    params: Tensor | None = None  # the model that x was computed on
    version: int | None = None
    squares: Tensor | None = (
        None  # with `estimator = "moments"`: Σ (share · gradient)² over parts of the minibatch
    )

    def stream(self) -> np.random.Generator:
        """This worker's own random numbers for this message, drawn one after the other by
        the host.
        """
        return quick(self.seed, Purpose.CODEC, self.worker, self.round, self.layer)

    def words(self, *more: int) -> CounterRng:
        """The same by element, wherever it lies; `more` tells streams of one message apart."""
        return counter_rng(self.seed, Purpose.CODEC, self.worker, self.round, self.layer, *more)

    @property
    def common(self) -> int:
        """The number of the round that all workers are in."""
        return self.round if self.version is None else self.version

    def shared(self) -> np.random.Generator:
        """Random numbers that all workers draw alike in this round."""
        return quick(self.seed, Purpose.CODEC, ALL, self.common, self.layer)


ENCODE_CONTEXT = EncodeContext()


class Codec(Contract, group="compression"):
    """The contract, with what holds of a codec that has nothing to say of it. A field of the option
    may stand in for any of these.
    """

    code: ClassVar[int] = (
        0  # its number on the wire, one for each codec that writes `wire.payload_format`
    )
    parts: ClassVar[int] = 1  # of a minibatch, with `estimator = "moments"`
    per_layer: ClassVar[bool] = (
        False  # whether each layer is encoded by itself, by `wrappers.layers`
    )
    entropy: ClassVar[str] = "none"
    warmup_epochs: ClassVar[int] = 0
    critical_ratio: ClassVar[float | None] = None
    error_feedback: ClassVar[bool] = False
    feedback_gain: ClassVar[float] = 1.0
    feedback_decay: ClassVar[float] = 1.0
    momentum: ClassVar[float | None] = None
    masking: ClassVar[bool] = False
    clip_norm: ClassVar[float | None] = None
    beta: ClassVar[float | None] = None

    @property
    def ratio(self) -> float | None:
        """The density, where there is one."""
        return None

    @property
    def estimator(self) -> str:
        """Which gradient it is for, see `ashl.topology.estimate`."""
        return "minibatch"

    @property
    def traits(self) -> Traits:
        """What may be relied on."""
        return Traits()

    @property
    def on_host(self) -> bool:
        """Whether it works in the host's memory alone; else where x, or a body, lies."""
        return True

    # --- what goes on the wire

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        """(sender, body): a flat vector [d] becomes what goes on the wire."""
        raise NotImplementedError

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        """(receiver, x): ... and a vector again, of the d elements that are expected. Raises
        BodyError.
        """
        raise NotImplementedError

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        """Bytes of a body, exactly; an upper bound where `traits.variable`."""
        raise NotImplementedError

    def add(self, out: Tensor, payload: Tensor, scale: float = 1.0) -> None:
        """out += scale · content, in place; not where decoding has state."""
        _, x = self.decode(None, payload, out.numel())
        out.add_(x, alpha=scale)

    def bound(self, ratio: float | None, d: int) -> float:
        """b of E‖C(x) − x‖² ≤ b·‖x‖²; infinite where nothing is promised."""
        return math.inf

    # --- what the sender keeps

    def restore_dropped(self, sender: State, payload: Tensor) -> State:
        """The sender, once a body was dropped on the way."""
        return sender

    def residual(self, sender: State) -> Tensor | None:
        """What a sender keeps of x for later."""
        return None

    def import_state(self, kept: State) -> State:
        """The sender that takes up what another codec's `Residual` or `Velocity` kept; None where
        it has no use for it.
        """
        return None

    # --- other forms of the codec

    def for_layout(self, layout: Layout) -> Codec:
        """For a model's layers, where it treats them as such. Raises UsageError."""
        return self

    def for_pulls(self) -> Codec:
        """For pulls, which are differences between models."""
        return self

    def share(self, context: EncodeContext) -> float | None:
        """The density of a message, by whatever schedule there is around the codec."""
        return context.ratio


class Keeps(NamedTuple):
    """What goes over the border between two stages."""

    residual: bool = True
    momentum: bool = True


class Reduces(Codec, contract=True):
    """With `traits.reduces`: the bodies of one merge together are not Σ weight · decode."""

    def reduce(
        self, memory: State, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[State, Tensor]:
        """(memory, x): what they are; the memory is kept where the sum is. Raises BodyError."""
        raise NotImplementedError

    def convert_memory(self, memory: State, keeps: Keeps, worth: float) -> State:
        """The memory to begin a stage with, of the one that the stage before left, a unit of which
        is `worth` so many of this stage's; None where there is no use for it.
        """
        return None


class Linear(Codec, contract=True):
    """With `traits.linear`: an all-reduce may sum a part of the bodies."""

    def summand(self, payload: Tensor) -> Tensor:
        """The flat tensor to sum."""
        raise NotImplementedError

    def summed(self, payload: Tensor, total: Tensor) -> Tensor:
        """The body whose content is that of the sum."""
        raise NotImplementedError

    def summed_bytes(self, ratio: float | None, d: int) -> int:
        """Bytes of a summand."""
        raise NotImplementedError


class CodecInput(NamedTuple):
    """What a codec is given by the wrappers around it: its own state, the vector, and what it is
    sent for.
    """

    inner: State
    x: Tensor
    context: EncodeContext


class Outcome(NamedTuple):
    """What a protocol over all workers came to: the update, the same on all; what of this worker's
    vector is in it; and the codec's state afterwards.
    """

    update: Tensor
    sent: Tensor | None = None  # None = nothing is kept of what was not
    inner: State = None


class Team(Protocol):
    """The ranks that merge, as a protocol sees them. Places count from 0, in rank order. What else
    workers tell each other with a merge rides along unseen.
    """

    @property
    def size(self) -> int: ...

    @property
    def place(self) -> int:
        """Of this worker."""
        ...

    @property
    def weight(self) -> float:
        """c_j of this worker, what its vector is multiplied with in the sum."""
        ...

    @property
    def not_finite(self) -> bool:
        """Whether somebody's update was not finite, as far as is known: then there is no use in
        going on.
        """
        ...

    async def all_reduce(self, x: Tensor, weight: float = 1.0) -> Tensor:
        """Σ weight · x in rank order, the same on all."""
        ...

    async def all_gather(self, x: Tensor) -> list[Tensor]:
        """Everybody's bytes, uint8 of any lengths."""
        ...

    async def send(self, place: int, name: str, payload: Tensor, *numbers: float) -> None:
        """To one other; numbers cost nothing."""
        ...

    async def recv(
        self, place: int, name: str, final: bool = False
    ) -> tuple[Tensor, tuple[float, ...]]:
        """(body, numbers) from one other; `final` where it comes from who has everything."""
        ...

    def compute(self, fn: Callable[[], T], work: float = 0.0) -> Awaitable[T]:
        """fn(), as compression; 1 unit of work is an encoding."""
        ...

    def blank(self, nbytes: int) -> Tensor:
        """So many bytes of which nothing but the size counts, for `timed`."""
        ...


class Collective(Codec, contract=True):
    """Has a protocol of its own over all workers of an all-reduce."""

    def peers(self, place: int, size: int) -> tuple[int, ...]:
        """The places that `collective` exchanges messages with, other than by collectives."""
        return ()

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """All workers together come to Σ c·C(x), or to what stands for it."""
        raise NotImplementedError

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        """The same messages, by their sizes alone."""
        raise NotImplementedError


class PayloadError(AshlError):
    """What came is no body of the codec that was to read it."""
