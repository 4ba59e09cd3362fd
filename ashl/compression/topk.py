"""Top-k: send the k elements of largest magnitude and their indices.

Rule: C(x)_j = x_j for the k largest |x_j| of the whole vector, else 0, with k = max(1, round(ratio
· d)). Of equal magnitudes, the first are sent. ‖C(x) − x‖² ≤ (1 − k/d)‖x‖².
Bits: those of k values and of their indices, k·(32 + ⌈log2 d⌉) with the defaults. If that is not
less than 32·d, the whole vector is sent, without error.

Limits: ratio = 1 with `values=fp32` is no compression. A NaN or an infinity counts as large and is
sent among the first, as in torch.topk. So the server sees that a run diverges, where a residual
would hide it, and the size of payloads does not change.

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; with
error feedback Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
"""

from typing import ClassVar

from ashl.compression.common.select import largest
from ashl.compression.common.sparsifier import SPARSE, Sparsifier
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.payload_format import Parts
from ashl.option import option


@option
class TopK(Sparsifier):
    """Sends the largest elements."""

    code: ClassVar[int] = 2
    promises: ClassVar[Traits] = Traits(contraction=True)

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        k = self.kept(context.ratio, len(x))
        return self.pack_selected(
            x, k, largest(x, k) if self.form(k, len(x)) == SPARSE else None, context
        )
