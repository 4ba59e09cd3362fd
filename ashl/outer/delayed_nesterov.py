"""Delayed Nesterov: server momentum that changes only with every N-th merge.

Use when: pushes are merged one by one, and momentum at every stale push would overshoot.
Avoid when: there is a barrier: use `nesterov`.
Alternatives: `mla`; `heloco`.

Rule: x = Σ c_i·Δ_i of a merge (of a single push, scale·Δ_i/n with `aggregate=uniform`). a is the
sum of x since the last N-th merge, with N = `buffer`. At each merge w ← w + c·β·m + x. At every
N-th merge first m ← β·m + a and a ← 0, then w ← w + (1 − c·N + c)·β·m + x, with c = `spread`. The
paper's pseudo-gradient is g = −Δ and its step lr·g/N. So with `aggregate=uniform` and N = n its lr
is `aggregate.scale`.
Momentum that changes with every push of an asynchronous run would count each stale direction many
times. Here N pushes make one step of it. Several pushes that are merged together (a barrier) count
as one merge.

Limit: β = 0 is `average`.
Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135
(delayed Nesterov).
"""

from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor

from ashl.errors import UsageError
from ashl.optimizer.schedule import Decay
from ashl.option import Count, option
from ashl.outer.contract import Moments, Outer


class Momentum(NamedTuple):
    """Moments of the rule; None stands for zero."""

    momentum: Tensor | None = None  # m
    buffer: Tensor | None = None  # a
    count: int = 0  # merges in a


@option
class DelayedNesterov(Outer):
    """Nesterov momentum with every N-th merge."""

    buffer: Count
    beta: Decay
    spread: Annotated[float, Field(ge=0, le=1)]

    def __post_init__(self) -> None:
        if self.spread * self.buffer > 1:
            raise UsageError(
                f"outer.spread={self.spread}: takes more than the whole momentum in"
                f" outer.buffer={self.buffer} merges; take at most {1 / self.buffer:g}"
            )

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Momentum, Tensor]:
        m, buffer, count = Momentum(*(moments or ()))
        buffer = update if buffer is None else buffer + update
        share = self.spread
        count += 1
        if count == self.buffer:
            m = buffer if m is None else m * self.beta + buffer
            share = 1 - self.spread * self.buffer + self.spread
            buffer, count = None, 0
        ahead = share * self.beta
        if m is not None and ahead:
            update = update + m * ahead
        return Momentum(m, buffer, count), params + update
