"""Fields of all codecs that wrappers may be put around.

Rule: the steps of a message, in order. If x is longer than clip_norm/√n (n workers), it is
shortened to that. It is added to the velocity (`momentum`) or to the residual (`error_feedback`).
The sum is encoded. The sender keeps the part that was not sent. `ashl.compression.wrappers.compose`
builds the wrappers.

Source: error feedback: Seide et al., Interspeech 2014; ECQ-SGD: Wu et al., ICML 2018; momentum
correction, factor masking, clipping and warm-up: Lin et al., "Deep Gradient Compression", ICLR
2018.
"""

from typing import Any

from ashl.compression.contract import Codec
from ashl.option import Fraction, Positive, option


@option
class Wrappers(Codec):
    """Fields of the wrappers; see `conf/compression/_wrappers.yaml`."""

    error_feedback: bool
    feedback_gain: Fraction
    feedback_decay: Fraction
    momentum: Fraction | None
    masking: bool
    clip_norm: Positive | None


# Fields of a codec inside another codec: the outer one keeps the residual and clips.
PLAIN: dict[str, Any] = {
    "error_feedback": False,
    "feedback_gain": 1.0,
    "feedback_decay": 1.0,
    "momentum": None,
    "masking": True,
    "clip_norm": None,
}
