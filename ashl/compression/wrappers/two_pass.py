"""Run a collective protocol inside the wrappers of a link.

A wrapper usually learns from `encode` which part of a vector was sent. A collective protocol knows
that only at its end. So the wrappers run twice, with a `RecordingCodec` in place of the codec. The
first pass records the input of the protocol. The second pass tells the wrappers which part was
sent. Wrappers are pure, so the first pass has no side effect.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ashl.compression.contract import (
    ENCODE_CONTEXT,
    Codec,
    CodecInput,
    EncodeContext,
    Outcome,
    State,
)
from ashl.compression.wrappers.wrapper import Wrapper, innermost


@dataclass(frozen=True)
class RecordingCodec(Wrapper):
    """Replacement of a codec that records its input and reports `sent` as its output.

    Its payload is a vector or None.
    """

    inputs: list[CodecInput]
    inner: State = None  # state of the codec after the protocol
    sent: Tensor | None = None

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Any]:
        self.inputs.append(CodecInput(sender, x, context))
        return self.inner, self.sent

    def add(self, out: Tensor, payload: Tensor | None, scale: float = 1.0) -> None:
        if payload is not None:
            out.add_(payload, alpha=scale)


def capture_codec_input(
    codec: Codec, sender: State, x: Tensor, context: EncodeContext
) -> CodecInput:
    """Return the input that the innermost codec receives from its wrappers."""
    inputs: list[CodecInput] = []
    replace_innermost(codec, RecordingCodec(innermost(codec), inputs)).encode(sender, x, context)
    return inputs[0]


def update_sender(
    codec: Codec, sender: State, x: Tensor, context: EncodeContext, outcome: Outcome
) -> State:
    """Return the sender's state after the protocol."""
    stand_in = RecordingCodec(innermost(codec), [], outcome.inner, outcome.sent)
    return replace_innermost(codec, stand_in).encode(sender, x, context)[0]


def replace_innermost(codec: Codec, other: Codec) -> Codec:
    """Return the same wrappers around another codec."""
    if isinstance(codec, Wrapper):
        return replace(codec, codec=replace_innermost(codec.codec, other))
    return other
