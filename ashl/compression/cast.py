"""Cast to 16 bits: round each element to the nearest number of a shorter floating-point type.

Use when: half of the bytes is enough and nothing else should change.
Avoid when: 16 bits are still too many: the exchange takes longer than a step.
Alternatives: `qsgd` for fewer bits; `none`.

Rule: C(x)_j is the nearest fp16 (11 significant bits, up to 65504) or bf16 (8 significant bits, the
range of float32). Ties go to the even one. ‖C(x) − x‖² ≤ 2⁻¹⁶·‖x‖² in bf16.
Bits: 16·d. Linear: an all-reduce sums the payloads in float32 and rounds the sum once.

Limits: fp16 turns elements beyond 65504 into infinity, which shows that the run diverges. It turns
elements below 3e-8 into 0, so it is not a contraction and takes no error feedback. A scale would
help, but a sum needs the same scale on all workers. Rounding is deterministic, so it is biased by
up to half a step. Numbers that are piggybacked on the sum, as the mean loss, are rounded, too.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; Kalamkar et al., "A Study of
BFLOAT16 for Deep Learning Training", 2019.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext, Linear, Traits, Wrappable
from ashl.compression.payload import HEADER, Parts, all_values, typed_part
from ashl.option import option

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@option
class Cast(Linear, Wrappable):
    """Rounds to the nearest 16-bit number."""

    code: ClassVar[int] = 10
    on_host: ClassVar[bool] = False
    dtype: Literal["fp16", "bf16"]

    @property
    def traits(self) -> Traits:
        return Traits(contraction=self.dtype == "bf16", linear=True)

    @property
    def sum_dtype(self) -> torch.dtype:
        return TYPES[self.dtype]

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        return Parts(len(x), x.to(self.sum_dtype))

    def unpack(self, parts: Parts, d: int) -> Tensor:
        typed_part(parts.scales, torch.uint8, 0, "scales")
        return typed_part(all_values(parts, d), self.sum_dtype, d, "values").float()

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 2 * d

    def bound(self, ratio: float | None, d: int) -> float:
        return 2.0**-16 if self.dtype == "bf16" else 1.0
