"""What an outer optimizer is: a pure function on flat vectors [d], with its moments passed and
returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from ashl.option import Contract, Positive

Layers = Sequence[tuple[str, tuple[int, ...]]]  # name and shape
Moments = tuple[Any, ...]  # tensors and numbers, as a checkpoint can hold them
Rate = Annotated[Positive, Field(le=1e38)]  # of what float32 can hold


class Outer(Contract, group="outer", strict=True):
    """Steps on what the workers' optimizers made, once it is merged."""

    linear: ClassVar[bool] = (
        False  # whether steps on parts of an update add up to that on the whole
    )

    def for_layers(self, layers: Layers) -> Outer:
        """The outer optimizer of this model, where it has to know its layers."""
        return self

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        """(new moments, new parameters) of the merged update Σ c_i·Δ_i; the arguments stay as they
        are.

        Moments are None at first. `inner_lr` is the workers' learning rate as of the samples
        applied before this merge.
        """
        raise NotImplementedError
