"""Block coordinate descent: send one of B blocks in each round, the same block on all workers.

Use when: encoding must cost nothing, and blocks may take turns.
Avoid when: momentum is high, or few rounds are left: a block waits for its turn.
Alternatives: `random_mask`, which changes its elements in each round.

Rule: C(x) = x on block b, elements ⌊b·d/B⌋ … ⌊(b + 1)·d/B⌋ − 1, else 0. b is the number of the
round mod B (cyclic), or drawn from a shared seed (random). `scaled` multiplies the block by B. A
scaled random block is unbiased, with E‖C(x) − x‖² = (B − 1)‖x‖². An unscaled one is a contraction
by 1 − 1/B on average over the blocks.
Bits: 32·d/B and 32 for the block; no indices. Linear: an all-reduce sums payloads in flight.

Limits: B = 1 is no compression. A sweep of B rounds sends each element once, with the gradient of
its round; the classic method discards the gradients of the other blocks. With error feedback
(unscaled only), a block sends all that it has accumulated. Cyclic order may cycle with momentum.
The block depends on the version of the model. If B asynchronous workers push in turn, the version
grows by B between two pushes of a worker, so each would always send the same block; set
order=random.

Source: Nesterov, "Efficiency of Coordinate Descent Methods on Huge-Scale Optimization Problems",
2012; Richtárik and Takáč, "Iteration Complexity of Randomized Block-Coordinate Descent Methods",
2014.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from ashl.compression.contract import Elements, EncodeContext, Linear, Traits, Wrappable
from ashl.compression.payload import HEADER, Parts, PayloadError, typed_part
from ashl.device import to_host
from ashl.option import Count, option


@option
class BlockCoordinate(Linear, Wrappable):
    """Sends one block per round."""

    code: ClassVar[int] = 60
    unsummed_bytes: ClassVar[int] = 4
    on_host: ClassVar[bool] = False
    blocks: Count
    order: Literal["cyclic", "random"]
    scaled: bool

    @property
    def traits(self) -> Traits:
        random = self.order == "random"
        return Traits(
            unbiased=self.scaled and random,
            contraction=random and not self.scaled,
            drains=not (self.scaled or random),
            linear=True,
            variable=True,
        )

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        count = self.num_blocks(len(x))
        if self.order == "cyclic":
            block = context.common % count
        else:
            block = int(context.shared_stream().integers(count))
        values = x[self.block_slice(block, len(x))]
        if self.scaled and count > 1:
            values = values * float(count)
        return Parts(len(values), values, scales=torch.tensor([block], dtype=torch.int32))

    def unpack(self, parts: Parts, d: int) -> Elements:
        block = int(to_host(typed_part(parts.scales, torch.int32, 1, "scales"))[0])
        if not 0 <= block < self.num_blocks(d) or parts.form or len(parts.indices):
            raise PayloadError(f"received block {block}; there are {self.num_blocks(d)}")
        place = self.block_slice(block, d)
        values = typed_part(parts.values, torch.float32, place.stop - place.start, "values")
        return Elements(place, values)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + 4 * -(-d // self.num_blocks(d))

    def bound(self, ratio: float | None, d: int) -> float:
        count = self.num_blocks(d)
        if self.order == "random":
            return count - 1 if self.scaled else 1 - 1 / count
        # Worst case of one message: x is 0 on the block, or 0 everywhere else.
        return max(1.0, (count - 1.0) ** 2) if self.scaled else 1.0

    def num_blocks(self, d: int) -> int:
        """Return B, at most the number of elements."""
        return min(self.blocks, d)

    def block_slice(self, block: int, d: int) -> slice:
        """Return the elements of a block."""
        count = self.num_blocks(d)
        return slice(block * d // count, (block + 1) * d // count)
