"""DIANA: quantize the difference between a gradient and what the receiver has learned of it.

Use when: shards differ, and an unbiased quantizer should not add noise near the minimum.
Avoid when: memory for a state per worker is missing.
Alternatives: `qsgd` without a memory; `ef21` for biased codecs.

Rule: worker i and its receiver both keep h_i, 0 at first. The worker sends m = Q(g_i − h_i). The
receiver decodes ĝ_i = h_i + m, and both update h_i ← h_i + α·m, with α ≤ 1/(1 + ω) for E‖Q(x) − x‖²
≤ ω‖x‖² (`alpha=null`: equal). h_i approaches the gradient of worker i at the optimum, so g_i − h_i
approaches 0, and with it the noise of Q. With full gradients, convergence is linear; Q alone stalls
at a distance that grows with the difference between the workers' data. E ĝ_i = g_i. A dropped
message is not decoded, and h_i returns to its previous value at both ends, bit for bit.
Bits: those of Q; 2·d and 32 per bucket with the ternary code, which is that of the paper.

Limits: the receiver keeps a vector for each worker; in a gathered all-reduce each worker is a
receiver, with n² vectors in all. The noise of minibatches remains: set estimator=svrg or full.

Source: Mishchenko et al., "Distributed Learning with Compressed Gradient Differences", 2019, with
the ternary code in the ℓ2 or the largest norm; other Q: Horváth et al., "Stochastic Distributed
Learning with Gradient Quantization and Variance Reduction", 2019.
"""

from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from ashl.compression.coding import EntropyCode
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    PLAIN,
    Codec,
    EncodeContext,
    Estimator,
    Traits,
)
from ashl.compression.natural import NaturalCompression
from ashl.compression.qsgd import QSGD
from ashl.option import Count, Number, Ratio, option


class Learned(NamedTuple):
    """The sender's state: h, and h before the last message; None = 0."""

    h: Tensor | None = None
    before: Tensor | None = None


@option
class Diana(Codec):
    """Quantizes differences."""

    quantizer: Literal["ternary", "qsgd", "natural"]
    levels: Annotated[int, Number, Field(ge=1, le=127)]
    bucket: Count
    norm: Literal["l2", "max"]
    entropy: EntropyCode
    alpha: Ratio | None
    estimator: Estimator

    @cached_property
    def inner(self) -> Codec:
        """The quantizer Q."""
        if self.quantizer == "natural":
            return NaturalCompression(**PLAIN)
        levels = 1 if self.quantizer == "ternary" else self.levels
        return QSGD(
            levels=levels, bucket=self.bucket, norm=self.norm, entropy=self.entropy, **PLAIN
        )

    @property
    def on_host(self) -> bool:
        return self.inner.on_host

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, variable=self.inner.traits.variable)

    def encode(
        self, sender: Learned | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Learned, Tensor]:
        h = None if sender is None else sender.h
        _, payload = self.inner.encode(None, x if h is None else x - h, context)
        after, _ = self.decode(h, payload, x.numel())
        return Learned(after, h), payload

    def decode(self, receiver: Tensor | None, payload: Tensor, d: int) -> tuple[Tensor, Tensor]:
        _, m = self.inner.decode(None, payload, d)
        alpha = 1 / (1 + self.inner.bound(None, d)) if self.alpha is None else self.alpha
        return (m * alpha, m) if receiver is None else (receiver + m * alpha, receiver + m)

    def restore_dropped(self, sender: Learned | None, payload: Tensor) -> Learned | None:
        return sender if sender is None else Learned(sender.before)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.inner.encoded_nbytes(None, d)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.inner.bound(None, d)
