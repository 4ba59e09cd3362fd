"""A fragment of the model that is exchanged like a model of its own.

It holds some of the layer groups, or elements that are drawn again for each exchange, or one
server's shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from ashl.compression.coding import indices_of_seed, new_seed
from ashl.compression.contract import ENCODE_CONTEXT, Codec, Layout, size_of
from ashl.device import to_device
from ashl.outer.contract import Outer
from ashl.runtime.sums import concatenate, slice_vector
from ashl.size_only import SizeOnly, Vector


@dataclass(frozen=True)
class Fragment:
    """A part of the flat vector, as runs [start, stop), with the layout, codec and outer optimizer
    of its exchanges.
    """

    runs: tuple[tuple[int, int], ...]
    layout: Layout
    codec: Codec
    outer: Outer
    indices: Tensor | None = None  # indices of its elements, if they are drawn at random
    first: int = 0  # number of its first layer, which seeds a codec's draws

    @cached_property
    def size(self) -> int:
        return size_of(self.layout)

    def with_drawn_indices(self, seed: int, version: int) -> Fragment:
        """Return the fragment with the indices that all workers draw for the merge after this
        version.
        """
        return replace(self, indices=draw_indices(seed, version, self.size, self.runs[-1][1]))

    def extract(self, whole: Vector) -> Any:
        """Return the fragment's elements of a whole vector."""
        if isinstance(whole, SizeOnly):
            return SizeOnly(4 * self.size)
        if self.indices is not None:
            return whole[to_device(self.indices, str(whole.device))]
        return concatenate([slice_vector(whole, start, stop) for start, stop in self.runs])

    def insert(self, whole: Vector, values: Vector) -> Vector:
        """Return the whole vector with `values` as the fragment's elements."""
        if isinstance(whole, SizeOnly) or isinstance(values, SizeOnly):
            return whole
        changed, at = whole.clone(), 0
        if self.indices is not None:
            changed[to_device(self.indices, str(whole.device))] = values
            return changed
        for start, stop in self.runs:
            changed[start:stop] = values[at : at + stop - start]
            at += stop - start
        return changed


@lru_cache(maxsize=2)  # cached, because every worker asks twice for the same draw
def draw_indices(seed: int, version: int, size: int, whole: int) -> Tensor:
    """Return the sorted indices of a fragment, drawn for the merge after this version."""
    context = ENCODE_CONTEXT._replace(seed=seed, version=version)
    return indices_of_seed(new_seed(context.shared_stream()), size, whole)
