"""A fragment of the model that is exchanged like a model of its own.

It holds some of the layer groups, or elements that are drawn again for each exchange, or one
server's shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.seeded import new_seed, places_of
from ashl.compression.contract import ENCODE_CONTEXT, Codec, Layout, size_of
from ashl.outer.contract import Outer
from ashl.runtime.sums import concatenate, slice_vector
from ashl.size_only import SizeOnly, Vector


@dataclass(frozen=True)
class Fragment:
    """Where it lies in the flat vector, as runs [start, stop), and what its exchanges need to know
    of its layers.
    """

    runs: tuple[tuple[int, int], ...]
    layout: Layout
    codec: Codec
    outer: Outer
    places: Tensor | None = None  # of its elements, where they are drawn
    first: int = 0  # the number of its first layer, by which a codec draws

    @cached_property
    def size(self) -> int:
        return size_of(self.layout)

    def with_drawn_indices(self, seed: int, version: int) -> Fragment:
        """The same at the places that all draw alike for the merge after this version."""
        return replace(self, places=draw_indices(seed, version, self.size, self.runs[-1][1]))

    def of(self, whole: Vector) -> Any:
        """Its elements."""
        if isinstance(whole, SizeOnly):
            return SizeOnly(4 * self.size)
        if self.places is not None:
            return whole[self.places.to(whole.device)]
        return concatenate([slice_vector(whole, start, stop) for start, stop in self.runs])

    def put(self, whole: Vector, values: Vector) -> Vector:
        """The vector with these as its elements."""
        if isinstance(whole, SizeOnly) or isinstance(values, SizeOnly):
            return whole
        changed, at = whole.clone(), 0
        if self.places is not None:
            changed[self.places.to(whole.device)] = values
            return changed
        for start, stop in self.runs:
            changed[start:stop] = values[at : at + stop - start]
            at += stop - start
        return changed


@lru_cache(maxsize=2)  # each is asked for by every worker, and twice
def draw_indices(seed: int, version: int, size: int, whole: int) -> Tensor:
    context = ENCODE_CONTEXT._replace(seed=seed, version=version)
    return torch.from_numpy(places_of(new_seed(context.shared()), size, whole).astype(np.int64))
