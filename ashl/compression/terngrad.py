"""TernGrad: round each element at random to −m, 0 or m, unbiased.

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

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.code import Code
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    Codec,
    CodecInput,
    Collective,
    EncodeContext,
    Layout,
    Outcome,
    State,
    Team,
    Traits,
    size_of,
)
from ashl.compression.wire.arrays import (
    Array,
    array_of,
    beside,
    bytes_of,
    concatenate,
    read,
    tensor_of,
)
from ashl.compression.wire.bits import BLOCK, blocks, pack, unpack
from ashl.compression.wire.entropy_code import EntropyCode
from ashl.compression.wire.levels import (
    all_levels,
    ends_of,
    level_bytes,
    pack_levels,
    unpack_levels,
)
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wire.stochastic_rounding import rounding_noise
from ashl.compression.wire.ternary_packing import (
    read_ternary,
    round_ternary,
    ternary_nbytes,
    write_ternary,
)
from ashl.compression.wrappers.layers import slices
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Positive, option

WIDTHS = (2, 4, 8, 16)  # bits of a sum of ternary numbers


@option
class TernGrad(Code, Wrappers):
    """Three values for each element."""

    code: ClassVar[int] = 16
    on_host: ClassVar[bool] = False
    per_layer: bool
    clip_sigmas: Positive | None
    shared_scale: bool
    entropy: EntropyCode

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.clip_sigmas is None, variable=self.entropy != "none")

    def for_layout(self, layout: Layout) -> Codec:
        """Return the codec for the layers of a model.

        Without a shared scale, a wrapper encodes each layer separately.
        """
        sizes = tuple(layer.size for layer in layout) if self.per_layer else (size_of(layout),)
        return SharedScale(self, sizes) if self.shared_scale else self

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        top, beyond = self.top(x), self.beyond
        noise = rounding_noise(x, context.words(), 1)
        if self.entropy == "none":
            return Parts(len(x), write_ternary(x, top, noise, beyond), scales=top)
        numbers = (round_ternary(x[where], top, noise, where.start, beyond) for where in pieces(x))
        return Parts(len(x), pack_levels(len(x), 2, numbers, self.entropy), scales=top)

    def unpack(self, parts: Parts, d: int) -> Array:
        top = typed_part(parts.scales, "<f4", 1, "scales")
        if self.entropy == "none":
            return read_ternary(all_levels(parts, d), top, d)

        def to_values(_: slice, block: Array) -> None:
            block -= 1
            block *= top

        return unpack_levels(
            all_levels(parts, d), d, min(BLOCK // 8, d), 2, to_values, self.entropy
        )

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        numbers = ternary_nbytes(d) if self.entropy == "none" else level_bytes(d, 2, self.entropy)
        return HEADER.size + 4 + numbers

    def bound(self, ratio: float | None, d: int) -> float:
        return (d**0.5 - 1) / 2 + (self.clip_sigmas is not None)

    @property
    def beyond(self) -> bool:
        """True if elements may lie beyond ±m."""
        return self.clip_sigmas is not None

    def top(self, x: Array) -> Array:
        """Return m, float32 [1]."""
        ends = ends_of(x)
        if isinstance(ends, Tensor):
            top = ends.abs().amax(0, keepdim=True)
        else:
            top = np.abs(ends).max(keepdims=True)
        if self.clip_sigmas is None or not 0 < (most := read(top)) < np.inf:
            return top
        parts = (x[where] / top for where in pieces(x))
        sigma = most * np.sqrt(sum(float(read((part @ part)[None])[0]) for part in parts) / len(x))
        return beside(x, np.minimum(most, self.clip_sigmas * sigma).astype(np.float32))


@dataclass(frozen=True)
class SharedScale(Collective):
    """Protocol of an all-reduce in which all workers round to the same m."""

    on_host: ClassVar[bool] = False
    codec: TernGrad
    sizes: tuple[int, ...]  # elements of each part with an m of its own

    @property
    def traits(self) -> Traits:
        return self.codec.traits

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        return self.codec.encode(sender, x, context)

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        return self.codec.decode(receiver, payload, d)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.codec.encoded_nbytes(ratio, d)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.codec.bound(ratio, d)

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Find the largest m of each part, then sum the ternary numbers."""
        x = source.x * team.weight
        own = await team.compute(partial(self.own_scales, x))
        all_tops = await team.all_gather(torch.from_numpy(own.view(np.uint8)))
        if team.not_finite:
            return Outcome(torch.zeros_like(x))
        tops = np.max([one.clone().numpy().view(np.float32) for one in all_tops], axis=0)
        words = await team.compute(
            partial(self.to_words, x, tops, source.context, team.size), work=1
        )
        total = await team.all_reduce(words)
        return Outcome(await team.compute(partial(self.from_sums, total, tops, team.size)))

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        await team.all_gather(team.blank(4 * len(self.sizes)))
        await team.all_reduce(team.blank(4 * -(-d * sum_width(team.size) // 32)))

    def own_scales(self, x: Tensor) -> np.ndarray:
        """Return m of each part."""
        return np.concatenate(
            [read(self.codec.top(array_of(x[part]))) for part in slices(self.sizes)]
        )

    def to_words(self, x: Tensor, tops: np.ndarray, context: EncodeContext, workers: int) -> Tensor:
        """Return the ternary numbers 0, 1 and 2 of all parts, with bits for the sum over all
        workers: int32.
        """
        array, numbers = array_of(x), []
        for i, part in enumerate(slices(self.sizes)):
            one = array[part]
            noise = rounding_noise(one, context.words(i), 1)
            numbers.append(
                round_ternary(one, beside(one, tops[i : i + 1]), noise, beyond=self.codec.beyond)
            )
        stream = pack(concatenate(numbers), sum_width(workers))
        return tensor_of(
            concatenate([stream, beside(stream, np.zeros(-len(stream) % 4, np.uint8))])
        ).view(torch.int32)

    def from_sums(self, total: Tensor, tops: np.ndarray, workers: int) -> Tensor:
        """Return the update from the sum of all words."""
        sums = tensor_of(
            unpack(bytes_of(total.view(torch.uint8)), sum_width(workers), sum(self.sizes))
        ).float()
        sums -= workers
        for part, top in zip(slices(self.sizes), tops.tolist(), strict=True):
            sums[part] *= top
        return sums


def pieces(x: Array) -> Iterable[slice]:
    """Return slices that fit the cache; one slice on a device."""
    return [slice(0, len(x))] if isinstance(x, Tensor) else blocks(x.size)


def sum_width(workers: int) -> int:
    """Return the number of bits in which the sums of `workers` numbers up to 2 have no carry."""
    return next(width for width in WIDTHS if 2 * workers < 2**width)
