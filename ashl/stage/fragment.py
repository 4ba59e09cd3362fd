"""A fragment of a model: some of its layer groups, which are exchanged as a model of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ashl.compression.contract import Codec, Layout, size_of
from ashl.outer.contract import Outer
from ashl.runtime.sums import piece, together
from ashl.size_only import SizeOnly, Vector


@dataclass(frozen=True)
class Fragment:
    """Where it lies in the flat vector, as runs [start, stop), and what its exchanges need to know of its layers."""

    runs: tuple[tuple[int, int], ...]
    layout: Layout
    codec: Codec
    outer: Outer

    @cached_property
    def size(self) -> int:
        return size_of(self.layout)

    def of(self, whole: Vector) -> Any:
        """Its elements."""
        return together([piece(whole, start, stop) for start, stop in self.runs])

    def put(self, whole: Vector, values: Vector) -> Vector:
        """The vector with these as its elements."""
        if isinstance(whole, SizeOnly) or isinstance(values, SizeOnly):
            return whole
        changed, at = whole.clone(), 0
        for start, stop in self.runs:
            changed[start:stop] = values[at : at + stop - start]
            at += stop - start
        return changed
