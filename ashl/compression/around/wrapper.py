"""A codec around a codec: on the wire they are the same, only what is encoded differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ashl.compression.contract import Codec, Flags


@dataclass(frozen=True)
class Wrapper:
    """What every wrapper leaves to the codec inside. What a codec has beyond the contract is found through it, too."""

    codec: Codec

    @property
    def flags(self) -> Flags:
        return self.codec.flags

    def decode(self, receiver: Any, body: Any, d: int) -> tuple[Any, Any]:
        return self.codec.decode(receiver, body, d)

    def undo(self, sender: Any, body: Any) -> Any:
        return self.codec.undo(sender, body)

    def payload(self, ratio: float | None, d: int) -> int:
        return self.codec.payload(ratio, d)

    def add(self, out: Any, body: Any, scale: float = 1.0) -> None:
        self.codec.add(out, body, scale)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.codec.bound(ratio, d)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "codec":
            raise AttributeError(name)
        return getattr(self.codec, name)


def inwards(codec: Any) -> Iterator[Any]:
    """What is around a codec, from the outside in, and then the codec itself."""
    while isinstance(codec, Wrapper):
        yield codec
        codec = codec.codec
    yield codec


def innermost(codec: Any) -> Any:
    """The codec without anything around it."""
    return list(inwards(codec))[-1]
