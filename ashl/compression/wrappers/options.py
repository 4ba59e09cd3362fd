"""What may be wrapped around a codec, as fields that every codec with a use for it has.

Rule, in the order of a message: x is shortened to clip_norm/√n where it is longer (n workers); it
is added to the velocity (`momentum`) or to what earlier messages left out (`error_feedback`); the
sum is encoded; what was not sent is kept. The wrappers that do it are made by
`ashl.compression.wrappers.compose`.

Source: error feedback, Seide et al., Interspeech 2014; ECQ-SGD, Wu et al., ICML 2018; momentum
correction, factor masking, clipping and warm-up, Lin et al., "Deep Gradient Compression", ICLR
2018.
"""

from typing import Any

from ashl.compression.contract import Codec
from ashl.option import Fraction, Positive, option


@option
class Wrappers(Codec):
    """The fields; see `conf/compression/_wrappers.yaml`."""

    error_feedback: bool
    feedback_gain: Fraction
    feedback_decay: Fraction
    momentum: Fraction | None
    masking: bool
    clip_norm: Positive | None


# of a codec inside another one, which keeps and clips by itself
PLAIN: dict[str, Any] = {
    "error_feedback": False,
    "feedback_gain": 1.0,
    "feedback_decay": 1.0,
    "momentum": None,
    "masking": True,
    "clip_norm": None,
}
