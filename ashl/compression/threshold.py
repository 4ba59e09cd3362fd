"""Fixed threshold: what is at least as large as τ is sent as it is, however much that is.

Rule: C(x)_j = x_j where |x_j| ≥ τ, else 0; each |x_j − C(x)_j| < τ. Bits: those of the values that
pass and of their places. With error feedback every element is sent once what it has gathered
reaches τ.

Limit: τ → 0 is no compression; a τ above all elements sends nothing until residuals have grown.
Residuals inflate until about as much passes as comes in, so that the size is an outcome: it depends
on the model, the learning rate and the epoch, and what is declared beforehand is the dense size.
Nothing is promised of one message but that it enlarges nothing; feedback is sound all the same,
because the error stays below τ·√d.

Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
2015; with exact values Dutta et al., "On the Discrepancy between the Theoretical Analysis and
Practical Implementations of Compressed Communication", AAAI 2020, and Sahu et al., "Rethinking
Gradient Sparsification as Total Error Minimization", 2021.
"""

from typing import ClassVar

from ashl.compression.common.select import indices_reaching
from ashl.compression.common.sparsifier import Indexed
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.payload_format import Parts
from ashl.option import Positive, option


@option
class Threshold(Indexed):
    """Keeps what is large."""

    code: ClassVar[int] = 54
    promises: ClassVar[Traits] = Traits(drains=True, variable=True)
    threshold: Positive

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        places = indices_reaching(x, self.threshold)
        return self.pack_selected(x, len(places), places, context)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.room(d, d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1.0
