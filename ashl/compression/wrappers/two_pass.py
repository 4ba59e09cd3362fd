"""A protocol over all workers inside the wrappers of a link: what it is given, and what is kept
once it has ended.

What a codec sends is known to the wrappers around it when it has encoded; what a protocol has
brought of a worker's vector into the sum is known only at its end. So the wrappers run twice, with
a stand-in for the codec: once for what they give it, and once more to learn what of that was sent.
They are pure, hence the first run leaves nothing behind.
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
    """In the place of a codec: notes what it is given, and says what of it was sent. Its body is a
    vector or None.
    """

    inputs: list[CodecInput]
    inner: State = None  # the codec's state afterwards
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
    """What the codec inside these wrappers is given."""
    inputs: list[CodecInput] = []
    replace_innermost(codec, RecordingCodec(innermost(codec), inputs)).encode(sender, x, context)
    return inputs[0]


def update_sender(
    codec: Codec, sender: State, x: Tensor, context: EncodeContext, outcome: Outcome
) -> State:
    """The sender's state once the protocol has ended."""
    stand_in = RecordingCodec(innermost(codec), [], outcome.inner, outcome.sent)
    return replace_innermost(codec, stand_in).encode(sender, x, context)[0]


def replace_innermost(codec: Codec, other: Codec) -> Codec:
    """These wrappers around another codec."""
    return (
        replace(codec, codec=replace_innermost(codec.codec, other))
        if isinstance(codec, Wrapper)
        else other
    )
