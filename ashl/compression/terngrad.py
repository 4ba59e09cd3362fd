"""TernGrad: round each element at random to −m, 0 or m, unbiased.

Use when: an unbiased codec with less than two bits per element is wanted.
Avoid when: elements have outliers, which scale all others up; then set `clip_sigmas`.
Alternatives: `qsgd` with more levels; `sign`, biased.

Rule: m = max|x_j|, of each layer with `per_layer`; C(x)_j = m·sign(x_j) with probability |x_j|/m,
else 0. E C(x) = x, E‖C(x) − x‖² ≤ (√d − 1)/2·‖x‖². With `clip_sigmas` = c, x_j is first clipped at
±c·σ, with σ² the mean of x_j²: less noise, but biased.
Bits: 1.6·d, as five ternary numbers in a byte, and 32 for each m.

With `shared_scale`, under all-reduce, all workers round to the largest of their m, after gathering
all m (32 bits each). Then ternary numbers can be summed in flight, as integers of the ⌈log2(2n +
1)⌉ bits that n workers need, rounded up to 2, 4, 8 or 16. Each worker applies the sum to its own
model, and no worker sends the model. That is the "parameter localization" of the paper, which every
all-reduce has, also with topology.algorithm=star, where one worker sums for all.

Limits: not a contraction, so error feedback is not supported. A shared scale is larger than the
worker's own, so it adds noise; its savings outweigh this only up to some number of workers. If an
element is not finite, its vector becomes NaN.

Source: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning", NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ashl.compression.coding import (
    EntropyCode,
    level_bytes,
    read_levels,
    read_ternary,
    write_levels,
    write_ternary,
)
from ashl.compression.contract import (
    Codec,
    CodecInput,
    Collective,
    EncodeContext,
    Layout,
    Outcome,
    OuterCodec,
    Team,
    Traits,
    Wrappable,
    as_float32,
    size_of,
    slices,
)
from ashl.compression.kernels import (
    BLOCK,
    Array,
    as_native,
    as_tensor,
    blocks,
    extremes_of,
    multiply_matrices,
    pack,
    pad_to,
    round_ternary,
    rounding_noise,
    ternary_nbytes,
    to_device_of,
    unpack,
)
from ashl.compression.payload import HEADER, Parts, all_values, typed_part
from ashl.device import read_scalars, to_host
from ashl.option import Positive, option
from ashl.size_only import SizeOnly

WIDTHS = (2, 4, 8, 16)  # bits of a sum of ternary numbers


@option
class TernGrad(Wrappable):
    """Three values for each element."""

    code: ClassVar[int] = 16
    on_host: ClassVar[bool] = False
    per_layer: bool
    clip_sigmas: Positive | None
    shared_scale: bool
    entropy: EntropyCode

    @property
    def needs(self) -> dict[str, str]:
        return super().needs | ({"all_reduce": "shared_scale"} if self.shared_scale else {})

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.clip_sigmas is None, variable=self.entropy != "none")

    def for_layout(self, layout: Layout) -> Codec:
        """Return the codec for the layers of a model.

        Without a shared scale, a wrapper encodes each layer separately.
        """
        sizes = tuple(layer.size for layer in layout) if self.per_layer else (size_of(layout),)
        return SharedScale(self, sizes) if self.shared_scale else self

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        d, top, row = len(x), self.top(x), min(BLOCK // 8, len(x))
        noise = rounding_noise(x, context.words(), 1)
        if self.entropy == "none":
            return Parts(d, write_ternary(x, top, noise, self.may_exceed_top), scales=top)

        def to_levels(where: slice, rows: Array) -> Array:
            return round_ternary(
                rows.reshape(-1), top, noise, where.start * row, self.may_exceed_top
            )

        return Parts(d, write_levels(x, row, d, 2, self.entropy, to_levels), scales=top)

    def unpack(self, parts: Parts, d: int) -> Tensor:
        top, stream = typed_part(parts.scales, torch.float32, 1, "scales"), all_values(parts, d)
        if self.entropy == "none":
            return read_ternary(stream, top, d)

        def to_values(_: slice, rows: Array) -> None:
            rows -= 1
            rows *= as_native(top)

        return read_levels(stream, min(BLOCK // 8, d), d, 2, self.entropy, to_values)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        stream = ternary_nbytes(d) if self.entropy == "none" else level_bytes(d, 2, self.entropy)
        return HEADER.size + 4 + stream

    def bound(self, ratio: float | None, d: int) -> float:
        return (d**0.5 - 1) / 2 + (self.clip_sigmas is not None)

    @property
    def may_exceed_top(self) -> bool:
        """True if elements may lie beyond ±m."""
        return self.clip_sigmas is not None

    def top(self, x: Tensor) -> Tensor:
        """Return m, float32 [1]."""
        top = extremes_of(x).abs().amax(0, keepdim=True)
        if self.clip_sigmas is None or not 0 < (most := read_scalars([top[0]])[0]) < float("inf"):
            return top
        array, unit = as_native(x), as_native(top)
        parts = (array[where] / unit for where in blocks(array))
        squares = sum(read_scalars([multiply_matrices(part, part)])[0] for part in parts)
        sigma = most * (squares / len(x)) ** 0.5
        return to_device_of(x, torch.tensor([min(most, self.clip_sigmas * sigma)]))


@dataclass(frozen=True)
class SharedScale(OuterCodec, Collective):
    """Protocol of an all-reduce in which all workers round to the same m."""

    codec: TernGrad
    sizes: tuple[int, ...]  # elements of each part with an m of its own

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Find the largest m of each part, then sum the ternary numbers."""
        x = as_float32(source.x * team.weight)
        own = await team.compute(partial(self.own_scales, x))
        all_tops = await team.all_gather(own.view(torch.uint8))
        if team.not_finite:
            return Outcome(torch.zeros_like(x))
        tops = torch.stack([one.clone().view(torch.float32) for one in all_tops]).amax(0)
        words = await team.compute(
            partial(self.to_words, x, tops, source.context, team.size), work=1
        )
        total = await team.all_reduce(words)
        return Outcome(await team.compute(partial(self.from_sums, total, tops, team.size)))

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        await team.all_gather(SizeOnly(4 * len(self.sizes)))
        await team.all_reduce(SizeOnly(4 * -(-d * sum_width(team.size) // 32)))

    def own_scales(self, x: Tensor) -> Tensor:
        """Return m of each part, in host memory."""
        return to_host(torch.cat([self.codec.top(x[part]) for part in slices(self.sizes)]))

    def to_words(self, x: Tensor, tops: Tensor, context: EncodeContext, workers: int) -> Tensor:
        """Return the ternary numbers 0, 1 and 2 of all parts, with bits for the sum over all
        workers: int32.
        """
        digits = []
        for i, part in enumerate(slices(self.sizes)):
            one, top = x[part], to_device_of(x, tops[i : i + 1])
            noise = rounding_noise(one, context.words(i), 1)
            digits.append(
                as_tensor(round_ternary(one, top, noise, beyond=self.codec.may_exceed_top))
            )
        return pad_to(pack(torch.cat(digits), sum_width(workers)), 4).view(torch.int32)

    def from_sums(self, total: Tensor, tops: Tensor, workers: int) -> Tensor:
        """Return the update from the sum of all words."""
        stream = total.view(torch.uint8)
        sums = as_tensor(unpack(stream, sum_width(workers), sum(self.sizes))).float()
        sums -= workers
        for part, top in zip(slices(self.sizes), tops.tolist(), strict=True):
            sums[part] *= top
        return sums


def sum_width(workers: int) -> int:
    """Return the number of bits in which the sums of `workers` numbers up to 2 have no carry."""
    return next(width for width in WIDTHS if 2 * workers < 2**width)
