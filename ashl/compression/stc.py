"""Sparse ternary compression: of the k largest elements the signs and the mean magnitude are sent.

Rule: C(x)_j = μ·sign(x_j) for the k largest |x_j|, μ the mean of their magnitudes, else 0, with
error feedback; the pull is compressed alike with `topology.pull_ratio`. ‖C(x) − x‖² = ‖x‖² − k·μ²,
and μ is at least the largest |x_j|/k.
Bits: k·(b̄ + 1) + 32, b̄ those of a place by Golomb's code. Workers that come late to a pull get
the difference to the model they hold, which is the sum of what they missed.

It is top-k → mean → golomb: any other value or index code gives another chain. Limit: ratio = 1 is
the sign of every element, scaled by the mean magnitude, as in EF-signSGD.

Source: Sattler, Wiedemann, Müller and Samek, "Robust and Communication-Efficient Federated Learning
from Non-IID Data",
2019.
"""

from typing import ClassVar

from ashl.compression.topk import TopK
from ashl.option import option


@option
class STC(TopK):
    """Top-k of which only signs are kept."""

    code: ClassVar[int] = 56
