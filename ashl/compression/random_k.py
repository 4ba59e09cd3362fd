"""Random-k: each worker sends k random elements of its own.

Use when: encoding must be cheap, and large elements need no preference.
Avoid when: all-reduce is used: indices differ between workers and are gathered.
Alternatives: `random_mask`, which can be summed; `topk`.

Rule: C(x)_j = x_j at k indices that each worker draws without replacement in each round, else 0.
E‖C(x) − x‖² = (1 − k/d)‖x‖².
Bits: those of k values, and 64 for the seed from which the receiver draws the indices; with another
`indices` code, those of the indices.

Limits: ratio = 1 is no compression. Unscaled and therefore biased, it is made for error feedback;
`subsampling` is its unbiased form.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from ashl.compression.coding import VARIABLE, IndexCode, draw_distinct
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.kernels import to_device_of
from ashl.compression.payload import Parts
from ashl.compression.sparse import Coded, Seed, Seeded, SparseFormat
from ashl.option import option


@option
class RandomK(Seeded):
    """Random elements, different on each worker."""

    code: ClassVar[int] = 51
    indices: Literal["seed"] | IndexCode

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True, variable=self.indices in VARIABLE)

    @property
    def format(self) -> SparseFormat:
        coded = Seed() if self.indices == "seed" else Coded(self.indices)
        return SparseFormat(self.values, coded)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        k, rng = self.num_selected(context.ratio, len(x)), context.stream()
        if self.indices == "seed":
            return self.pack_drawn(x, rng, context)

        def draw() -> Tensor:
            drawn = draw_distinct(rng, k, len(x)).astype("int64", copy=False)
            return to_device_of(x, torch.from_numpy(drawn))

        return self.format.pack(x, k, draw, context)
