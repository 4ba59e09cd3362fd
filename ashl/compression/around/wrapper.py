"""A codec around a codec: on the wire they are the same, only what is encoded differs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ashl.compression.contract import Codec, Flags, State, Turn


@dataclass(frozen=True)
class Wrapper(Codec):
    """What every wrapper leaves to the codec inside. A protocol over all workers, and what bodies are together, is the
    `innermost` codec's matter."""

    codec: Codec

    @property
    def flags(self) -> Flags:
        return self.codec.flags

    @property
    def on_host(self) -> bool:
        return self.codec.on_host

    @property
    def ratio(self) -> float | None:
        return self.codec.ratio

    @property
    def estimator(self) -> str:
        return self.codec.estimator

    def decode(self, receiver: State, body: Tensor, d: int) -> tuple[State, Tensor]:
        return self.codec.decode(receiver, body, d)

    def undo(self, sender: State, body: Tensor) -> State:
        return self.codec.undo(sender, body)

    def residual(self, sender: State) -> Tensor | None:
        return self.codec.residual(sender)

    def adopt(self, kept: State) -> State:
        return self.codec.adopt(kept)

    def payload(self, ratio: float | None, d: int) -> int:
        return self.codec.payload(ratio, d)

    def share(self, turn: Turn) -> float | None:
        return self.codec.share(turn)

    def add(self, out: Tensor, body: Tensor, scale: float = 1.0) -> None:
        self.codec.add(out, body, scale)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.codec.bound(ratio, d)


class Stateful(Wrapper):
    """A wrapper that keeps something, in a named tuple whose `inner` is what the codec inside keeps."""

    state: ClassVar[Callable[..., State]]

    def undo(self, sender: State, body: Tensor) -> State:
        return sender._replace(inner=self.codec.undo(sender.inner, body))

    def residual(self, sender: State) -> Tensor | None:
        return sender and self.codec.residual(sender.inner)

    def adopt(self, kept: State) -> State:
        inner = self.codec.adopt(kept)
        return None if inner is None else self.state(inner=inner)


def inwards(codec: Codec) -> Iterator[Codec]:
    """What is around a codec, from the outside in, and then the codec itself."""
    while isinstance(codec, Wrapper):
        yield codec
        codec = codec.codec
    yield codec


def innermost(codec: Codec) -> Codec:
    """The codec without anything around it."""
    return list(inwards(codec))[-1]
