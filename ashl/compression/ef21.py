"""EF21: compress the change of a gradient since the last message; both ends keep the result.

Use when: shards differ, and the residual of error feedback would stay as large as their difference.
Avoid when: gradients are very noisy; then set `beta`.
Alternatives: `econtrol`; `topk` with error feedback.

Rule: worker i and its receiver both keep g_i, 0 at first. The worker sends c = C(x_i − g_i) with
any contraction C, and g_i ← g_i + c at both ends is merged. As gradients settle, x_i − g_i and the
error of C approach 0, even if the workers' shards differ; the residual of error feedback stays as
large as they differ. With `beta` it is EF21-SGDM: x_i is the running mean u ← β·u + (1 − β)·∇f_i of
the worker's gradients (η of the paper is 1 − β), which minibatches need. A dropped message is not
decoded, and g_i returns to its previous value at both ends, bit for bit.
Bits: those of C; if these are not fewer than 32·d, x_i itself is sent.

Limits: C = identity (`ratio=1`) is no compression, bit for bit. With `beta` and a learning rate of
lr/(1 − β) it is then momentum SGD at lr. The receiver keeps a vector for each worker, n² in all in
a gathered all-reduce.

Source: Richtárik, Sokolov and Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback", NeurIPS 2021, Algorithm 2; Fatkhullin, Tyurin and Richtárik,
"Momentum Provably Improves Error Feedback!", NeurIPS 2023 (EF21-SGDM).
Differs: in the papers u and g_i begin with a first gradient; here both are 0, so that the first
steps with `beta` are shorter.
"""

from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ashl.compression.coding import IndexCode, ValueCode
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    PLAIN,
    Codec,
    EncodeContext,
    Estimator,
    Traits,
)
from ashl.compression.natural import NaturalCompression
from ashl.compression.sign import Sign
from ashl.compression.topk import TopK
from ashl.option import Fraction, Ratio, option


class Known(NamedTuple):
    """The sender's state; None = 0.

    `h` is g, `error` is the sum of the errors of all messages; both also as before the last
    message.
    """

    h: Tensor | None = None
    error: Tensor | None = None
    before: Tensor | None = None
    error_before: Tensor | None = None


@option
class EF21(Codec):
    """Compresses changes."""

    _gain: ClassVar[float] = 0.0  # fraction of the accumulated error that is added to a message
    compressor: Literal["topk", "natural", "sign"]
    ratio: Ratio
    values: ValueCode
    indices: IndexCode
    beta: Fraction | None
    estimator: Estimator

    @cached_property
    def inner(self) -> Codec:
        """The contraction C."""
        if self.compressor == "natural":
            return NaturalCompression(**PLAIN)
        if self.compressor == "sign":
            return Sign(scale="mean", vote="mean", beta=None, per_layer=False, **PLAIN)
        own: dict[str, Any] = {"ratio": self.ratio, "values": self.values, "indices": self.indices}
        return TopK(**own, warmup_epochs=0, critical_ratio=None, per_layer=False, **PLAIN)

    @property
    def on_host(self) -> bool:
        return self.inner.on_host

    @property
    def traits(self) -> Traits:
        return Traits(variable=self.inner.traits.variable)

    def encode(
        self, sender: Known | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Known, Tensor]:
        known, error, *_ = sender or Known()
        target = x if error is None else x + error * self._gain
        if self._sends_whole(context.ratio, x.numel()):
            payload = target.clone().view(torch.uint8)
        else:
            change = target if known is None else target - known
            _, payload = self.inner.encode(None, change, context)
        after, _ = self.decode(known, payload, x.numel())
        rest = None
        if self._gain:
            rest = x - after if error is None else error + x - after
        return Known(after, rest, known, error), payload

    def decode(self, receiver: Tensor | None, payload: Tensor, d: int) -> tuple[Tensor, Tensor]:
        if payload.nbytes == 4 * d:  # x itself: payloads of C are shorter
            whole = payload.clone().view(torch.float32)
            return whole, whole
        _, change = self.inner.decode(None, payload, d)
        after = change if receiver is None else receiver + change
        return after, after

    def restore_dropped(self, sender: Known | None, payload: Tensor) -> Known | None:
        return sender and Known(sender.before, sender.error_before)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return 4 * d if self._sends_whole(ratio, d) else self.inner.encoded_nbytes(ratio, d)

    def bound(self, ratio: float | None, d: int) -> float:
        """Return the bound of C, relative to the change since the last message."""
        return self.inner.bound(ratio, d)

    def residual(self, sender: Known | None) -> Tensor | None:
        return sender and sender.error

    def _sends_whole(self, ratio: float | None, d: int) -> bool:
        return self.inner.encoded_nbytes(ratio, d) >= 4 * d
