"""Sparse ternary compression: send the signs of the k largest elements and their mean magnitude.

Use when: very slow links in both directions: signs of the largest elements, and one magnitude.
Avoid when: links are faster than 10 Mbit/s: values then cost little.
Alternatives: `sbc`; `topk` with `values=int8`.

Rule: C(x)_j = μ·sign(x_j) for the k largest |x_j|, with μ the mean of their magnitudes, else 0;
with error feedback. `topology.pull_ratio` compresses the pull in the same way. ‖C(x) − x‖² = ‖x‖² −
k·μ², and μ is at least the largest |x_j|/k.
Bits: k·(b̄ + 1) + 32, with b̄ the bits of an index in Golomb's code. A worker that missed pulls
receives the difference to its own model, which is the sum of the missed ones.

Limits: ratio = 1 is the sign of each element times the mean magnitude, as in EF-signSGD. The steps
are top-k, mean, golomb; any other value or index code gives another combination.

Source: Sattler, Wiedemann, Müller and Samek, "Robust and Communication-Efficient Federated Learning
from Non-IID Data", 2019.
"""

from typing import ClassVar

from ashl.compression.topk import TopK
from ashl.option import option


@option
class STC(TopK):
    """Top-k that sends signs only."""

    code: ClassVar[int] = 56
