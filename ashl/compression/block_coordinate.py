"""Block coordinate descent: in each round one of B blocks moves, the same on all workers.

Rule: C(x) = x on block b, elements ⌊b·d/B⌋ … ⌊(b + 1)·d/B⌋ − 1, else 0, with b the number of the
round mod B (cyclic) or drawn alike by all workers (random). `scaled` multiplies it by B: over a
random block it is then unbiased, with E‖C(x) − x‖² = (B − 1)‖x‖²; unscaled it is a contraction by 1
− 1/B on average over the blocks. Bits: 32·d/B and 32 for the block, no places. The sum of bodies is
the body of the sum: an all-reduce adds them up on their way.

Limit: B = 1 is no compression. A sweep of B rounds moves every element once, with the gradient of
its own round: the classic method keeps nothing of the others. With error feedback (unscaled) a
block sends at its turn what it gathered. Cyclic order with momentum can go in circles. Asynchronous
workers go by the version of their model: B of them in step would each be at the same block for
ever; take order=random.

Source: Nesterov, "Efficiency of Coordinate Descent Methods on Huge-Scale Optimization Problems",
2012; Richtárik and Takáč, "Iteration Complexity of Randomized Block-Coordinate Descent Methods",
2014.
"""

from typing import Any, ClassVar, Literal

import numpy as np

from ashl.compression.common.code import Sparse
from ashl.compression.common.linear import SummedValues
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, read
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Count, option


@option
class BlockCoordinate(Sparse, SummedValues, Wrappers):
    """One block at a time."""

    code: ClassVar[int] = 60
    on_host: ClassVar[bool] = False
    blocks: Count
    order: Literal["cyclic", "random"]
    scaled: bool

    @property
    def traits(self) -> Traits:
        random = self.order == "random"
        unbiased, contraction, drains = (
            self.scaled and random,
            not self.scaled and random,
            not (self.scaled or random),
        )
        return Traits(
            unbiased=unbiased, contraction=contraction, drains=drains, linear=True, variable=True
        )

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        count = self.number(len(x))
        block = (
            context.common % count
            if self.order == "cyclic"
            else int(context.shared().integers(count))
        )
        values = x[self.place(block, len(x))]
        if self.scaled and count > 1:
            values = values * float(count)
        return Parts(len(values), values, scales=np.array([block], "<u4"))

    def unpack(self, parts: Parts, d: int) -> Any:
        block = int(typed_part(read(parts.scales), "<u4", 1, "scales")[0])
        if block >= self.number(d) or parts.form or len(parts.indices):
            raise PayloadError(f"block {block} came of {self.number(d)}")
        place = self.place(block, d)
        return place, typed_part(parts.values, "<f4", place.stop - place.start, "values")

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + 4 * -(-d // self.number(d))

    def summed_bytes(self, ratio: float | None, d: int) -> int:
        """What an all-reduce sums of a body: its values alone."""
        return self.encoded_nbytes(ratio, d) - HEADER.size - 4

    def bound(self, ratio: float | None, d: int) -> float:
        count = self.number(d)
        if self.order == "random":
            return count - 1 if self.scaled else 1 - 1 / count
        return (
            max(1.0, (count - 1.0) ** 2) if self.scaled else 1.0
        )  # of one message; the block may be 0

    def number(self, d: int) -> int:
        """B, but no more than there are elements."""
        return min(self.blocks, d)

    def place(self, block: int, d: int) -> slice:
        """The elements of a block."""
        count = self.number(d)
        return slice(block * d // count, (block + 1) * d // count)
