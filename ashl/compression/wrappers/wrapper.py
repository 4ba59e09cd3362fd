"""Base classes of wrappers: codecs that change the input of another codec, but not its payloads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ashl.compression.contract import Codec, EncodeContext, State, Traits


@dataclass(frozen=True)
class Wrapper(Codec):
    """Wrapper that delegates everything to the codec inside.

    Collective protocols and joint decoding (`Collective`, `Reduces`) are methods of the `innermost`
    codec only.
    """

    codec: Codec

    @property
    def traits(self) -> Traits:
        return self.codec.traits

    @property
    def on_host(self) -> bool:
        return self.codec.on_host

    @property
    def ratio(self) -> float | None:
        return self.codec.ratio

    @property
    def estimator(self) -> str:
        return self.codec.estimator

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        return self.codec.decode(receiver, payload, d)

    def restore_dropped(self, sender: State, payload: Tensor) -> State:
        return self.codec.restore_dropped(sender, payload)

    def residual(self, sender: State) -> Tensor | None:
        return self.codec.residual(sender)

    def import_state(self, kept: State) -> State:
        return self.codec.import_state(kept)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.codec.encoded_nbytes(ratio, d)

    def share(self, context: EncodeContext) -> float | None:
        return self.codec.share(context)

    def add(self, out: Tensor, payload: Tensor, scale: float = 1.0) -> None:
        self.codec.add(out, payload, scale)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.codec.bound(ratio, d)


class Stateful(Wrapper):
    """Wrapper with a state: a named tuple whose field `inner` is the state of the codec inside."""

    state: ClassVar[Callable[..., State]]

    def restore_dropped(self, sender: State, payload: Tensor) -> State:
        return sender._replace(inner=self.codec.restore_dropped(sender.inner, payload))

    def residual(self, sender: State) -> Tensor | None:
        return sender and self.codec.residual(sender.inner)

    def import_state(self, kept: State) -> State:
        inner = self.codec.import_state(kept)
        return None if inner is None else self.state(inner=inner)


def inwards(codec: Codec) -> Iterator[Codec]:
    """Yield the wrappers of a codec from the outside in, and then the codec itself."""
    while isinstance(codec, Wrapper):
        yield codec
        codec = codec.codec
    yield codec


def innermost(codec: Codec) -> Codec:
    """Return the codec inside all wrappers."""
    return list(inwards(codec))[-1]
