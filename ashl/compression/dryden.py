"""Adaptive quantization: send the same fraction of positive and of negative elements, at few
levels.

Use when: density must be exact and values short: few levels of either sign.
Avoid when: encoding time counts: 19 copies of the vector.
Alternatives: `stc`; `topk` with `values=int8`.

Rule: of the d⁺ positive elements, the k⁺ = max(1, round(ratio · d⁺)) largest are sent; τ⁺ is the
smallest of them. The d⁻ negative elements are treated in the same way. A side without elements
sends none. Each side decodes to its levels. `mean`: one level, the mean of the selected elements of
the side. `lloyd`: the `num_levels` levels of Lloyd and Max that fit these elements best, computed
for each message.
Bits: for each selected element its index, 1 for the side and ⌈log2 levels⌉ for the level; 32 for
each level. To add another way to learn levels, add a branch to `learn_centroids`.

Limits: ‖C(x) − x‖² ≤ (1 − δ)‖x‖², with δ about 1/k if one element dominates: error feedback carries
the rest. Thresholds are exact here; the paper takes them from a sample. If a side is not finite, it
decodes to values that are not finite.

Source: Dryden et al., "Communication Quantization for Data-Parallel Training of Deep Neural
Networks", MLHPC 2016; levels: Lloyd, "Least Squares Quantization in PCM", 1982; learned levels for
gradients: Faghri et al., "Adaptive Gradient Quantization for Data-Parallel SGD", NeurIPS 2020.
"""

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import (
    IndexCode,
    index_bytes,
    max_index_bytes,
    read_indices,
    write_indices,
)
from ashl.compression.contract import Elements, EncodeContext, Traits, WithDensity, selected_count
from ashl.compression.kernels import (
    as_tensor,
    count_where,
    extremes_of,
    largest_indices,
    look_up,
    negatives,
    pack,
    packed_bytes,
    positives,
    to_device_of,
    unpack,
)
from ashl.compression.payload import EMPTY, HEADER, Parts, PayloadError, typed_part
from ashl.compression.sparse import DENSE, SPARSE
from ashl.device import is_on_host, read_scalars, to_host
from ashl.option import Count, option

LevelsRule = Literal["mean", "lloyd"]
SWEEPS = 20  # iterations of Lloyd's algorithm; more hardly move the levels
SAMPLE = 1 << 14  # most magnitudes from which levels are learned


@option
class Dryden(WithDensity):
    """Two thresholds by proportion, with a set of levels for each side."""

    code: ClassVar[int] = 31
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(contraction=True, variable=True)
    levels: LevelsRule
    num_levels: Count
    indices: IndexCode
    per_layer: bool

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        share = self.ratio if context.ratio is None else context.ratio
        if math.isnan(read_scalars([extremes_of(x).sum()])[0]):
            # All NaNs become positive, so that one side has them.
            x = torch.where(x.isnan(), math.nan, x)
        not_above = count_where(x, lambda part: part <= 0)
        num_negative = count_where(x, lambda part: part < 0)
        sides = []
        for size, order in ((len(x) - not_above, positives), (num_negative, negatives)):
            indices = x[:0].long()
            if size:
                indices = largest_indices(x, selected_count(share, size), order)
            # The elements are few, so the host encodes them.
            values = to_host(x.index_select(0, indices)).abs().numpy()
            sides.append((to_host(indices), values))
        return self._write_sides(x, sides)

    def _write_sides(self, x: Tensor, sides: list[tuple[Tensor, np.ndarray]]) -> Parts:
        k, d = sum(len(indices) for indices, _ in sides), len(x)
        if self._sparse_bytes(k, d) >= 4 * d:
            return Parts(d, x, form=DENSE)
        scales, codes = [], []
        for side, (_, values) in enumerate(sides):
            levels = learn_centroids(self.levels, values, self.num_levels)
            chosen = nearest_levels(levels, values)
            scales.append(levels if self.levels == "mean" else centroids_of(levels, values, chosen))
            codes.append(chosen | side << self._width)
        indices = np.concatenate([indices.numpy() for indices, _ in sides])
        order = np.argsort(indices)  # in a quarter of the time of torch
        indices = torch.from_numpy(indices[order])
        values = pack(np.concatenate(codes)[order], self._width + 1)
        levels = torch.from_numpy(np.concatenate(scales)).float()
        coded = write_indices(self.indices, indices, d) if k else EMPTY
        return Parts(k, to_device_of(x, values), coded, levels, SPARSE)

    def unpack(self, parts: Parts, d: int) -> Elements:
        k, form, count = parts.count, parts.form, self._num_levels
        if form == DENSE and k == d and not (len(parts.scales) or len(parts.indices)):
            values = typed_part(parts.values, torch.float32, d, "values")
            return Elements(slice(None), values)
        if not is_on_host(parts.values):  # few elements: the host decodes
            few = Parts(k, *(to_host(part) for part in parts[1:4]), form)
            indices, values = self.unpack(few, d)
            return Elements(to_device_of(parts.values, indices), to_device_of(parts.values, values))
        scales = typed_part(parts.scales, torch.float32, 2 * count, "levels")
        if form != SPARSE or len(parts.values) != packed_bytes(k, self._width + 1):
            raise PayloadError(
                f"expected a vector of levels; received form {form} with {k} values in"
                f" {len(parts.values)} bytes"
            )
        codes = unpack(parts.values, self._width + 1, k)
        level = codes & (1 << self._width) - 1
        if k and int(level.max()) >= count:
            raise PayloadError(f"received level {int(level.max())}; there are {count}")
        indices = EMPTY.long()
        if k or len(parts.indices):
            indices = read_indices(self.indices, parts.indices, k, d)
        signed = torch.cat([scales[:count], -scales[count:]])
        return Elements(indices, look_up(signed, as_tensor(level + count * (codes >> self._width))))

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        share = self.ratio if ratio is None else ratio
        selected_count(share, d)
        most = min(d, int(share * d) + 2)  # each side is rounded separately
        indices = max_index_bytes(self.indices, most, d)
        return HEADER.size + min(
            4 * d, 8 * self._num_levels + packed_bytes(most, self._width + 1) + indices
        )

    def bound(self, ratio: float | None, d: int) -> float:
        # A side sends k of its n elements, with sum S. Their mean reduces the squared error by
        # S²/k, and the squares of the side sum to at most S²·max(1, n/k²).
        share = self.ratio if ratio is None else ratio
        return 1 - min(1 / max(1, int(share * d) + 1), 1 / min(d, 1.5 / share))

    @property
    def _num_levels(self) -> int:
        return 1 if self.levels == "mean" else self.num_levels

    @property
    def _width(self) -> int:
        return (self._num_levels - 1).bit_length()

    def _sparse_bytes(self, k: int, d: int) -> int:
        return (
            8 * self._num_levels
            + packed_bytes(k, self._width + 1)
            + (index_bytes(self.indices, k, d) if k else 0)
        )


def learn_centroids(rule: LevelsRule, magnitudes: np.ndarray, count: int) -> np.ndarray:
    """Return the ascending levels, float64, of the selected magnitudes of one side."""
    if rule == "mean" or not magnitudes.size or not np.isfinite(magnitudes).all():
        mean = magnitudes.mean(dtype=np.float64) if magnitudes.size else 0.0
        return np.full(1 if rule == "mean" else count, mean)
    return lloyd(magnitudes, count)


def lloyd(magnitudes: np.ndarray, count: int) -> np.ndarray:
    """Return levels that are each the mean of the magnitudes closest to it.

    It starts with the means of groups of equal size.
    """
    values = np.sort(magnitudes[:: -(-magnitudes.size // SAMPLE)]).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(count + 1) * values.size // count
    levels = np.full(count, values[0])
    for _ in range(SWEEPS):
        sizes = np.diff(ends)
        levels = np.where(sizes > 0, np.diff(sums[ends]) / np.maximum(sizes, 1), levels)
        levels = np.maximum.accumulate(levels)
        inner = np.searchsorted(values, (levels[1:] + levels[:-1]) / 2)
        ends = np.concatenate([[0], inner, [values.size]])
    return levels


def nearest_levels(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the number of the nearest level of each value."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values)


def centroids_of(levels: np.ndarray, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return each level as the mean of all values that decode to it.

    The levels were learned from a sample. A level far above the values outside the sample would
    enlarge these values.
    """
    counts = np.bincount(chosen, minlength=levels.size)
    sums = np.bincount(chosen, values, levels.size)
    return np.where(counts > 0, sums / np.maximum(counts, 1), levels)
