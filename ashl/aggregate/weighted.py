"""Base of the weighted rules: coefficients, and three optional guards against stale or large
updates.

Rule: update = Σ_i c_i·s(τ_i)·x_i with c_i = scale·w_i. At a barrier the sum is over the members of
the merge in rank order, with Σ w_i = 1 over them. One at a time it is each push at its arrival,
with Σ w_i = 1 over all workers. The staleness discount is s(τ) = (1 + τ)^−a for a push of staleness
τ; a push with τ ≥ max_staleness is dropped. Wherever updates are merged with weights, a worker
shortens its update to the norm `clip_norm` before a codec encodes it.

Source: discount, Xie et al., "Asynchronous Federated Optimization", arXiv 1903.03934; staleness
bound, Maranjyan et al., "Ringmaster ASGD", ICML 2025; clipping, "Clipped ASGD", ICML 2026.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ashl.device import read_scalars
from ashl.option import Contract, Count, Positive, option
from ashl.plan.plan import WorkerPlan
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly


class Push(NamedTuple):
    """A decoded push of a worker."""

    worker: int
    payload: Any
    steps: int
    samples: int
    staleness: int
    loss: float
    step_s: float  # seconds of a local step
    push_s: float  # seconds of this push
    pull_s: float  # seconds of the pull before it


@option
class Weighted(Contract, group="aggregate", strict=True):
    """Fields and fold of every weighted rule; a rule defines `weigh`."""

    normalised: ClassVar[bool] = True  # True if Σ w_i = 1
    scale: Positive
    staleness_discount: Positive | None
    clip_norm: Positive | None
    max_staleness: Count | None

    @property
    def needs(self) -> dict[str, str]:
        drops = {} if self.max_staleness is None else {"common_drops": "max_staleness"}
        return {"weights": ""} | drops

    def accepts(self, staleness: int) -> bool:
        return self.max_staleness is None or staleness < self.max_staleness

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        raise NotImplementedError

    def fold(self, members: Sequence[Push], weights: Sequence[float]) -> Any:
        """Return the update of the members of a merge, added in rank order, so that it does not
        depend on the order of arrival.
        """
        if self.staleness_discount is not None:
            weights = [
                w * (1.0 + p.staleness) ** -self.staleness_discount
                for p, w in zip(members, weights, strict=True)
            ]
        return sum_in_rank_order([p.payload * w for p, w in zip(members, weights, strict=True)])

    def clip(self, payload: Any) -> Any:
        """Return a worker's update, shortened to the norm `clip_norm` if it is longer."""
        if self.clip_norm is None or isinstance(payload, SizeOnly):
            return payload
        (length,) = read_scalars([torch.linalg.vector_norm(payload, dtype=torch.float64)])
        return payload if length <= self.clip_norm else payload * (self.clip_norm / length)
