"""Delayed Nesterov: momentum at the server that moves only with every N-th push.

Rule: with x = scale·Δ_i / n (what `uniform` adds) and a the sum of the x since the last N-th push: at each push w ← w
+ c·β·m + x; at every N-th first m ← β·m + a and a ← 0, then w ← w + (1 − c·N + c)·β·m + x. The paper's
pseudo-gradient is g = −Δ and its step lr·g / N, hence with N = n its lr is `scale`. Momentum taken at every push of
an asynchronous run would count each stale direction again and again; here N pushes make one step of it. Pushes of one
merge (a barrier) count once.

Limit: β = 0 is `uniform`. Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv
2401.09135 (delayed Nesterov).
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import Field

from ashl.aggregate.uniform import Uniform
from ashl.errors import UsageError
from ashl.optimizer.schedule import Decay
from ashl.option import Count, option


class Momentum(NamedTuple):
    """What the rule remembers; None = 0."""

    momentum: Any = None
    buffer: Any = None
    count: int = 0  # merges in the buffer


@option
class DelayedNesterov(Uniform):
    """Uniform, with outer momentum."""

    buffer: Count
    beta: Decay
    spread: Annotated[float, Field(ge=0, le=1)]

    def __post_init__(self) -> None:
        if self.spread * self.buffer > 1:
            raise UsageError(
                f"aggregate.spread={self.spread} takes more than the whole momentum in aggregate.buffer={self.buffer} "
                f"pushes; take at most {1 / self.buffer:g}"
            )

    def outer(self, memory: Momentum | None, total: Any) -> tuple[Momentum, Any]:
        m, buffer, count = memory or Momentum()
        buffer = total if buffer is None else buffer + total
        share, count = self.spread, count + 1
        if count == self.buffer:
            m = buffer if m is None else m * self.beta + buffer
            share, buffer, count = 1 - self.spread * self.buffer + self.spread, None, 0
        step = share * self.beta
        update = total if m is None or step == 0 else total + m * step
        return Momentum(m, buffer, count), update
