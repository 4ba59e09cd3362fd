"""What the weighted rules share: coefficients, and three optional guards against stale or large
updates.

Rule: update = Σ_i c_i·s(τ_i)·x_i with c_i = scale·w_i. At a barrier the sum runs over its members
in rank order and w_i is renormalised over them; one at a time it is each push as it comes, with Σ
w_i = 1 over all workers. The discount is s(τ) = (1 + τ)^−a for a push of staleness τ; a push with τ
≥ max_staleness is dropped. A worker shortens what it computed to `clip_norm` before anything is
done with it, on every topology: what a codec keeps and sends is of that.

Source: discount, Xie et al., "Asynchronous Federated Optimization", arXiv 1903.03934; delay
cut-off, Maranjyan et al., "Ringmaster ASGD", ICML 2025; clipping, "Clipped ASGD", ICML 2026.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ashl.learn.device import numbers
from ashl.option import Contract, Count, Positive, option
from ashl.plan.plan import WorkerPlan
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly


class Push(NamedTuple):
    """What a worker pushed, decoded."""

    worker: int
    body: Any
    steps: int
    samples: int
    staleness: int
    loss: float
    step_s: float  # what a local step took
    push_s: float
    pull_s: float  # of the pull before


@option
class Weighted(Contract, group="aggregate", strict=True):
    """The fields and the fold that every weighted rule has; each says how it weighs."""

    normalised: ClassVar[bool] = True  # whether Σ w_i = 1
    scale: Positive
    staleness_discount: Positive | None
    clip_norm: Positive | None
    max_staleness: Count | None

    def accepts(self, staleness: int) -> bool:
        return self.max_staleness is None or staleness < self.max_staleness

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        raise NotImplementedError

    def fold(self, members: Sequence[Push], weights: Sequence[float]) -> Any:
        """The update of the members of a merge, in rank order, so that the order of arrival plays
        no part.
        """
        if self.staleness_discount is not None:
            weights = [
                w * (1.0 + p.staleness) ** -self.staleness_discount
                for p, w in zip(members, weights, strict=True)
            ]
        return sum_in_rank_order([p.body * w for p, w in zip(members, weights, strict=True)])

    def clip(self, body: Any) -> Any:
        """What a worker computed, shortened to `clip_norm` where it is longer."""
        if self.clip_norm is None or isinstance(body, SizeOnly):
            return body
        (length,) = numbers([torch.linalg.vector_norm(body, dtype=torch.float64)])
        return body if length <= self.clip_norm else body * (self.clip_norm / length)
