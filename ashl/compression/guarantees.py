"""Say in words what a codec guarantees, for its card.

The bounds hold for a weight matrix of 64 × 48 elements and its bias.
"""

import math

from ashl.compression.contract import Codec, Layer, size_of
from ashl.compression.wrappers import codec_for_layers

LAYOUT = (Layer("weight", (64, 48)), Layer("bias", (64,)))
D = size_of(LAYOUT)
MEANT = {
    "unbiased": "E C(x) = x: errors average out",
    "contraction": "E‖C(x) − x‖² < ‖x‖²: error feedback is allowed",
    "drains": "‖C(x) − x‖ ≤ ‖x‖: the residual of error feedback stays bounded, so it is allowed",
    "linear": "the sum of payloads decodes to the sum: an all-reduce adds them in flight",
    "lossless": "C(x) = x",
    "variable": "the size of a payload depends on x",
    "full_gradient": "needs the gradient over all samples",
    "reduces": "all payloads of a merge are decoded together",
    "scale_free": "does not preserve the norm of x: for gradients, not for model differences",
}


def list_guarantees(option: Codec) -> list[tuple[str, str]]:
    """Return the traits of an option that are on, each with its meaning, its size and its bound."""
    codec = codec_for_layers(option, LAYOUT)
    found = [(name, MEANT[name]) for name, on in codec.traits._asdict().items() if on]
    most = "at most " * codec.traits.variable
    found.append(("bits per element", f"{most}{8 * codec.encoded_nbytes(None, D) / D:.3g}"))
    if math.isfinite(bound := codec.bound(None, D)):
        found.append(("relative error", f"‖C(x) − x‖²/‖x‖² is at most {bound:.3g}"))
    return [(name.replace("_", " "), meaning) for name, meaning in found]
