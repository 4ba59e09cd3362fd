"""The contract of an outer optimizer: a pure function on flat vectors [d] that takes and returns
its moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from ashl.option import Contract, Positive

Layers = Sequence[tuple[str, tuple[int, ...]]]  # name and shape of each tensor
Moments = tuple[Any, ...]  # tensors and numbers, as a checkpoint can hold them
Rate = Annotated[Positive, Field(le=1e38)]  # finite as a float32


class Outer(Contract, group="outer", strict=True):
    """An optimizer that steps on the merged update."""

    # True if steps on parts of an update add up to the step on the whole update
    linear: ClassVar[bool] = False

    @property
    def needs(self) -> dict[str, str]:
        return {"outer": ""}

    def for_layers(self, layers: Layers) -> Outer:
        """Return this optimizer for a model with these layers."""
        return self

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        """Return (new moments, new parameters) after the merged update Σ c_i·Δ_i; arguments are not
        changed.

        Args: `moments` is None at first; `inner_lr` is the workers' learning rate for the samples
        applied before this merge.
        """
        raise NotImplementedError
