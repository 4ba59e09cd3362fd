"""Fixed threshold: send the exact value of each element that reaches τ, however many there are.

Use when: exact values above a known threshold are wanted, however many.
Avoid when: bytes must be bounded.
Alternatives: `topk`; `single_threshold`.

Rule: C(x)_j = x_j if |x_j| ≥ τ, else 0; each |x_j − C(x)_j| < τ. With error feedback, an element is
sent once its accumulated value reaches τ.
Bits: those of the sent values and of their indices.

Limits: τ → 0 is no compression; a τ above all elements sends nothing until residuals have grown.
Residuals grow until about as much is sent as is added. So the size is a result: it depends on the
model, the learning rate and the epoch, and the declared size is the dense one. The only bound of
one message is ‖C(x) − x‖ ≤ ‖x‖. Error feedback is sound anyway, because the error stays below τ·√d.

Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
2015; with exact values Dutta et al., "On the Discrepancy between the Theoretical Analysis and
Practical Implementations of Compressed Communication", AAAI 2020, and Sahu et al., "Rethinking
Gradient Sparsification as Total Error Minimization", 2021.
"""

from typing import ClassVar

from torch import Tensor

from ashl.compression.coding import IndexCode, ValueCode
from ashl.compression.contract import Elements, EncodeContext, Traits, Wrappable
from ashl.compression.kernels import indices_reaching
from ashl.compression.payload import Parts
from ashl.compression.sparse import Coded, SparseFormat, max_nbytes
from ashl.option import Positive, option


@option
class Threshold(Wrappable):
    """Sends the elements that reach τ."""

    code: ClassVar[int] = 54
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(drains=True, variable=True)
    threshold: Positive
    values: ValueCode
    indices: IndexCode
    per_layer: bool

    @property
    def format(self) -> SparseFormat:
        """The format of the payloads."""
        return SparseFormat(self.values, Coded(self.indices))

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        indices = indices_reaching(x, self.threshold)
        return self.format.pack(x, len(indices), lambda: indices, context)

    def unpack(self, parts: Parts, d: int) -> Elements:
        return self.format.unpack(parts, d, may_be_empty=True)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return max_nbytes(self.values, self.indices, d, d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1.0
