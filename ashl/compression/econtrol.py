"""EControl: EF21 that also remembers what it left out, and adds a little of it to each message.

Rule: with h_i kept at both ends and e_i by worker i (0 at first), Δ = C(η·e_i + x_i − h_i) is sent;
e_i ← e_i + x_i − h_i − Δ, and h_i ← h_i + Δ at both ends is what is merged. Nothing is lost for
good, as with error feedback, and what is sent of old errors is held down by η, so that they do not
come all at once; EF21 forgets them, and its bias with noisy gradients stays. Bits: those of C;
where these are no fewer than 32·d, η·e_i + x_i itself is sent.

Limits: η → 0 is EF21; C = identity (`ratio=1`) is no compression, bit for bit. Source: Gao, Islamov
and Stich, "EControl: Fast Distributed Optimization with Compression and Error Control", ICLR 2024,
arXiv 2311.05645, Algorithm 1.
"""

from ashl.compression.ef21 import EF21
from ashl.option import Ratio, option


@option
class EControl(EF21):
    """Compresses changes, and controls errors."""

    eta: Ratio

    @property
    def _gain(self) -> float:
        return self.eta
