"""TernGrad: every element becomes −m, 0 or m at random, so that its mean is kept.

Rule: m = max|x_j| (of each layer with `layers`); C(x)_j = m·sign(x_j) with probability |x_j|/m, else 0. E C(x) = x,
E‖C(x) − x‖² ≤ (√d − 1)/2·‖x‖². With `clip_sigmas` = c, x_j is first cut at ±c·σ, with σ² the mean of x_j²: less noise,
but biased. Bits: 1.6·d, as five trits in a byte, and 32 for each m.

With `shared_scale`, under all-reduce, all workers round to the largest of their m, for which 24 bytes of each are
gathered beforehand. Ternaries then add up: what is summed on its way are integers of the ⌈log2(2n + 1)⌉ bits that n
workers need, rounded up to 2, 4, 8 or 16. That sum is also what every worker applies to its own model, and nobody sends
the model: the paper's «parameter localization», which every all-reduce has.

Limit: no contraction, hence nothing for feedback. A shared scale is a larger one: more noise, which the saved bytes pay
for up to some number of workers only. What is not finite makes its vector NaN.

Source: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.around.layers import Layout, size_of, slices
from ashl.compression.around.stand_in import before
from ashl.compression.around.wrapper import Wrapper
from ashl.compression.around.wrappers import Wrappers
from ashl.compression.base.code import Code, array_of
from ashl.compression.contract import TURN, Flags, Turn
from ashl.compression.wire.bits import BLOCK, blocks, pack, unpack
from ashl.compression.wire.body import HEADER, Parts, typed
from ashl.compression.wire.entropy_code import EntropyCode
from ashl.compression.wire.levels import ends_of, level_bytes, packed, unpacked, whole
from ashl.compression.wire.trits import read_ternary, ternary, trit_bytes, write_ternary
from ashl.option import Positive, option
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly

WIDTHS = (2, 4, 8, 16)  # of the sums of ternaries


@option
class TernGrad(Code, Wrappers):
    """Three values for each element."""

    code: ClassVar[int] = 16
    layers: bool
    clip_sigmas: Positive | None
    shared_scale: bool
    entropy: EntropyCode

    @property
    def flags(self) -> Flags:
        return Flags(unbiased=self.clip_sigmas is None, variable=self.entropy != "none")

    def shaped(self, layout: Layout) -> Any:
        """The codec for a model's layers; layers without a shared scale are told apart around it."""
        sizes = tuple(layer.size for layer in layout) if self.layers else (size_of(layout),)
        return SharedScale(self, sizes) if self.shared_scale else self

    def pack(self, x: np.ndarray, turn: Turn) -> Parts:
        top, rng = self.top(x), turn.stream()
        if self.entropy == "none":
            return Parts(x.size, write_ternary(x, top, rng), scales=top)
        numbers = (ternary(x[where], top, rng) for where in blocks(x.size))
        return Parts(x.size, packed(x.size, 2, numbers, self.entropy), scales=top)

    def unpack(self, parts: Parts, d: int) -> np.ndarray:
        top = typed(parts.scales, "<f4", 1, "scales")
        if self.entropy == "none":
            return read_ternary(whole(parts, d), top, d)

        def meant(_: slice, block: np.ndarray) -> None:
            block -= np.float32(1)
            block *= top

        return unpacked(whole(parts, d), d, min(BLOCK // 8, d), 2, meant, self.entropy)

    def payload(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + (trit_bytes(d) if self.entropy == "none" else level_bytes(d, 2, self.entropy))

    def bound(self, ratio: float | None, d: int) -> float:
        return (d**0.5 - 1) / 2 + (self.clip_sigmas is not None)

    def top(self, x: np.ndarray) -> np.ndarray:
        """m, float32 [1]."""
        top = np.abs(ends_of(x)).max(keepdims=True)
        if self.clip_sigmas is None or not 0 < top < np.inf:
            return top
        parts = (x[where] / top for where in blocks(x.size))
        sigma = top * np.sqrt(sum(float(np.dot(part, part)) for part in parts) / x.size)
        return np.minimum(top, self.clip_sigmas * sigma).astype(np.float32)


@dataclass(frozen=True)
class SharedScale(Wrapper):
    """The protocol of an all-reduce in which all round to the same m."""

    layers: ClassVar[bool] = False  # it sees to them itself
    codec: TernGrad
    sizes: tuple[int, ...]  # of the parts with an m each

    def encode(self, sender: Any, x: Any, turn: Turn = TURN) -> tuple[Any, Any]:
        return self.codec.encode(sender, x, turn)

    async def collective(
        self, node: Node, stage: Any, state: Any, x: Any, turn: Turn, weight: float, riders: tuple[float, float]
    ) -> tuple[Any, float, int]:
        """Σ c·C(x) over all, and what rode along."""
        group, x = stage.workers, before(stage.codec, state.sender, x, turn).x
        if isinstance(x, SizeOnly):
            told = await node.all_gather(SizeOnly(4 * len(self.sizes), int(riders[1])), group)
            words = SizeOnly(4 * -(-(x.nbytes // 4) * sum_width(len(group)) // 32))
            await node.all_reduce(words, group)
            return SizeOnly(x.nbytes), 0.0, sum(one.word for one in told)
        x = x * weight
        tops = await node.compute(partial(self.tops, x), work=0, kind="compress")
        own = np.concatenate([tops.view(np.uint8), np.array(riders, np.float64).view(np.uint8)])
        told = [one.numpy() for one in await node.all_gather(torch.from_numpy(own), group, riders=16)]
        loss, word = sum(one[-16:].copy().view(np.float64) for one in told)
        if math.isnan(loss):
            return torch.zeros_like(x), loss, int(word)
        tops = np.max([one[:-16].copy().view(np.float32) for one in told], axis=0)
        words = await node.compute(partial(self.words, x, tops, turn, len(group)), work=1, kind="compress")
        total = await node.all_reduce(words, group)
        update = await node.compute(partial(self.update, total, tops, len(group)), work=0, kind="compress")
        return update, float(loss), int(word)

    def tops(self, x: Tensor) -> np.ndarray:
        """m of each part."""
        return np.concatenate([self.codec.top(array_of(x[part])) for part in slices(self.sizes)])

    def words(self, x: Tensor, tops: np.ndarray, turn: Turn, workers: int) -> Tensor:
        """int32: the ternaries of all parts, as numbers 0, 1 and 2 with room for the sum over all workers."""
        array, rng = array_of(x), turn.stream()
        numbers = [ternary(array[part], tops[i : i + 1], rng) for i, part in enumerate(slices(self.sizes))]
        stream = pack(np.concatenate(numbers), sum_width(workers))
        return torch.from_numpy(np.concatenate([stream, np.zeros(-stream.size % 4, np.uint8)]).view(np.int32))

    def update(self, total: Tensor, tops: np.ndarray, workers: int) -> Tensor:
        """What the sum of all words stands for."""
        d = sum(self.sizes)
        sums = unpack(total.numpy().view(np.uint8), sum_width(workers), d).astype(np.float32)
        sums -= np.float32(workers)
        for part, top in zip(slices(self.sizes), tops, strict=True):
            sums[part] *= top
        return torch.from_numpy(sums)


def sum_width(workers: int) -> int:
    """Bits that hold the sum of so many numbers up to 2, such that words of them add up without a carry."""
    return next(width for width in WIDTHS if 2 * workers < 2**width)
