"""Random mask: all workers send the same k random elements; no message contains their indices.

Use when: all-reduce over slow links with cheap encoding: no indices travel, and messages are
summed.
Avoid when: momentum is high: a masked element is then often stale.
Alternatives: `power_sgd`; `topk`.

Rule: C(x)_j = x_j at k indices that all workers draw from a shared seed in each round, else 0.
E‖C(x) − x‖² = (1 − k/d)‖x‖².
Bits: those of k values, and 64 for the seed. Linear with values=fp32: an all-reduce sums payloads
in flight.

Limits: ratio = 1 is no compression. Unscaled and therefore biased, it is made for error feedback;
`subsampling` is its unbiased form. The mask depends on the version of the model, so asynchronous
workers with the same version have the same mask.

Source: Konečný et al., "Federated Learning: Strategies for Improving Communication Efficiency",
2016.
"""

from typing import ClassVar

from torch import Tensor

from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.payload import Parts
from ashl.compression.sparse import Seeded
from ashl.option import option


@option
class RandomMask(Seeded):
    """Random elements, the same on all workers."""

    code: ClassVar[int] = 50

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True, linear=self.values == "fp32")

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        return self.pack_drawn(x, context.shared_stream(), context)
