"""Delayed Nesterov: momentum at the server that moves only with every N-th push.

Rule: with x = Σ c_i·Δ_i of a merge (one push: scale·Δ_i / n with `aggregate=uniform`) and a the sum
of the x since the last N-th merge: at each merge w ← w + c·β·m + x; at every N-th first m ← β·m + a
and a ← 0, then w ← w + (1 − c·N + c)·β·m + x. The paper's pseudo-gradient is g = −Δ and its step
lr·g / N, hence with `aggregate=uniform` and N = n its lr is `aggregate.scale`. Momentum taken at
every push of an asynchronous run would count each stale direction again and again; here N pushes
make one step of it. Pushes of one merge (a barrier) count once.

Limit: β = 0 is `average`. Source: Liu et al., "Asynchronous Local-SGD Training for Language
Modeling", arXiv
2401.09135 (delayed Nesterov).
"""

from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor

from ashl.errors import UsageError
from ashl.optimizer.schedule import Decay
from ashl.option import Count, option
from ashl.outer.contract import Moments, Outer


class Momentum(NamedTuple):
    """What the rule remembers; None = 0."""

    momentum: Tensor | None = None
    buffer: Tensor | None = None
    count: int = 0  # merges in the buffer


@option
class DelayedNesterov(Outer):
    """Nesterov momentum, every N-th time."""

    buffer: Count
    beta: Decay
    spread: Annotated[float, Field(ge=0, le=1)]

    def __post_init__(self) -> None:
        if self.spread * self.buffer > 1:
            raise UsageError(
                f"outer.spread={self.spread} takes more than the whole momentum in"
                f" outer.buffer={self.buffer} pushes; take at most {1 / self.buffer:g}"
            )

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Momentum, Tensor]:
        m, buffer, count = Momentum(*(moments or ()))
        buffer = update if buffer is None else buffer + update
        share, count = self.spread, count + 1
        if count == self.buffer:
            m = buffer if m is None else m * self.beta + buffer
            share, buffer, count = 1 - self.spread * self.buffer + self.spread, None, 0
        ahead = share * self.beta
        return Momentum(m, buffer, count), params + (
            update if m is None or ahead == 0 else update + m * ahead
        )
