"""Random mask: all workers send the elements at the same random places, which travel in no message.

Rule: C(x)_j = x_j at k places that all workers draw alike in each round, else 0. E‖C(x) − x‖² = (1
− k/d)‖x‖². Bits: those of k values, and 64 for the seed. With values=fp32 the sum of bodies is the
body of the sum: an all-reduce adds them up on their way.

Limit: ratio = 1 is no compression. Unscaled, hence biased: it is for error feedback; `subsampling`
is its unbiased relative. Masks go by the version of the model: asynchronous workers share one as
long as they share that.

Source: Konečný et al., "Federated Learning: Strategies for Improving Communication Efficiency",
2016.
"""

from typing import ClassVar

from ashl.compression.common.seeded import Seeded
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.payload_format import Parts
from ashl.option import option


@option
class RandomMask(Seeded):
    """A random share of the elements, the same on all workers."""

    code: ClassVar[int] = 50

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True, linear=self.values == "fp32")

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        return self.draw_places(x, context.shared(), context)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.loss(self.kept(ratio, d), d)
