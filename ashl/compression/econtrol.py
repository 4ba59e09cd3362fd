"""EControl: EF21 that also keeps its compression errors, and adds a fraction η to each message.

Use when: shards differ, and error feedback should neither oscillate nor lag.
Avoid when: shards are equal: plain error feedback is simpler.
Alternatives: `ef21`; `topk` with error feedback.

Rule: both ends keep h_i, and worker i keeps e_i, 0 at first. The worker sends Δ = C(η·e_i + x_i −
h_i). Then e_i ← e_i + x_i − h_i − Δ, and h_i ← h_i + Δ at both ends is merged. As with error
feedback, no error is lost for good. η limits how much of the old errors each message contains, so
that they do not arrive all at once. EF21 forgets its errors, and its bias with noisy gradients
remains.
Bits: those of C; if these are not fewer than 32·d, η·e_i + x_i itself is sent.

Limits: η → 0 is EF21; C = identity (`ratio=1`) is no compression, bit for bit.

Source: Gao, Islamov and Stich, "EControl: Fast Distributed Optimization with Compression and Error
Control", ICLR 2024, arXiv 2311.05645, Algorithm 1.
"""

from ashl.compression.ef21 import EF21
from ashl.option import Ratio, option


@option
class EControl(EF21):
    """Compresses changes, with control of the errors."""

    eta: Ratio

    @property
    def _gain(self) -> float:
        return self.eta
