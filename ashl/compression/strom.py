"""Strom's fixed threshold: send each element beyond ±τ as ±τ, index and sign in one word.

Use when: a fixed threshold is known for the task, and messages should be words.
Avoid when: the scale of gradients changes: the number of sent elements then drifts.
Alternatives: `topk`; `dryden`.

Rule: with v = x + e of error feedback, C(v)_j = τ·sign(v_j) if |v_j| > τ, else 0.
Bits: 32 for the scale, and 32 for each element sent: 31 for its index and 1 for its sign. If 2
bits for every element are fewer, each element is sent as 0, τ or −τ, which is the form of MXNet.

Limits: ‖C(x) − x‖ ≤ ‖x‖, but it is not a contraction: if all |x_j| ≤ τ, no element is sent. With
error feedback, |e_j| ≤ τ while |x_j| ≤ τ: the residual stays bounded, and everything is sent in the
end. An element whose updates exceed τ drains by only τ per message, and lags behind. τ has the unit
of the exchanged vectors, gradients or differences between models, and depends on the model. If an
element is NaN or infinite, all elements that are sent become NaN.

Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
2015; dense form: MXNet's 2-bit gradient compression, 2017.
"""

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import check_ascending
from ashl.compression.contract import Elements, EncodeContext, Traits, Wrappable
from ashl.compression.kernels import (
    allocate,
    as_native,
    as_tensor,
    convert,
    is_true,
    look_up,
    magnitudes_above,
    pack,
    packed_bytes,
    to_device_of,
    unpack,
)
from ashl.compression.payload import HEADER, Parts, PayloadError, typed_part
from ashl.device import to_host
from ashl.option import Positive, option

WORDS, DENSE = 0, 2  # forms of a payload
SIGN = 1 << 31  # bit of the sign in a word


@option
class Strom(Wrappable):
    """Sends ±τ."""

    code: ClassVar[int] = 30
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(drains=True, variable=True)
    threshold: Positive

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        found = magnitudes_above(x, float(np.float32(self.threshold)))
        k, d, indices = len(found), len(x), as_native(found)
        sent = as_native(x)[indices]
        finite = is_true((abs(sent) < math.inf).all())
        scales = torch.tensor([self.threshold if finite else math.nan])
        negative = sent < 0
        if 4 * k >= packed_bytes(d, 2):
            codes = allocate(sent, d, dtype=torch.uint8)
            codes[:] = 0
            codes[indices] = convert(negative, torch.uint8) + 1
            return Parts(d, pack(codes, 2), scales=scales, form=DENSE)
        return Parts(k, pack(indices | negative * SIGN, 32), scales=scales, form=WORDS)

    def unpack(self, parts: Parts, d: int) -> Elements:
        tau = float(to_host(typed_part(parts.scales, torch.float32, 1, "scales"))[0])
        k, form = parts.count, parts.form
        if len(parts.indices) or not (form == WORDS or (form == DENSE and k == d)):
            raise PayloadError(
                f"expected elements of ±τ; received form {form} with {k} values of {d}"
            )
        if form == DENSE:
            stream = typed_part(parts.values, torch.uint8, packed_bytes(d, 2), "elements")
            codes = as_tensor(unpack(stream, 2, d))
            if not is_true(codes.max() <= 2):
                raise PayloadError("received an element of 3; elements of two bits are 0, 1 or 2")
            return Elements(slice(None), look_up(torch.tensor([0, tau, -tau]), codes))
        words = typed_part(parts.values, torch.int32, k, "words")
        indices = words & SIGN - 1
        check_ascending(indices, k, d)
        bits = to_device_of(words, torch.tensor([tau]).view(torch.int32))
        return Elements(indices, (words & -SIGN ^ bits).view(torch.float32))

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + packed_bytes(d, 2)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1.0
