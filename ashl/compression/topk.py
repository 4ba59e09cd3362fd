"""Top-k: send the k elements of largest magnitude and their indices.

Use when: links are slow, and the topology is a server: the first codec to try, with error feedback.
Avoid when: `optimizer.momentum=0.9` at low density, or all-reduce with many workers.
Alternatives: `power_sgd` by all-reduce; `sign` and `qsgd` if all elements should travel.

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

from torch import Tensor

from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.kernels import largest_indices
from ashl.compression.payload import Parts
from ashl.compression.sparse import Sparsifier
from ashl.option import option


@option
class TopK(Sparsifier):
    """Sends the largest elements."""

    code: ClassVar[int] = 2
    promises: ClassVar[Traits] = Traits(contraction=True)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        k = self.num_selected(context.ratio, len(x))
        return self.format.pack(x, k, lambda: largest_indices(x, k), context)
