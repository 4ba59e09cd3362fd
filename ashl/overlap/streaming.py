"""Streaming DiLoCo: the model in fragments, one of which is exchanged at a time, while local steps
go on.

Rule: every H steps the next of P fragments p is exchanged, so that each is every P·H: Δ_p = θ_p^i −
θ_p of each worker i, with θ the model as exchanges have landed in it. The outer optimizer, whose
momentum every fragment has by itself, steps on Σ c_i·Δ_p^i, and that lands after τ more local
steps: θ_p^i ← α·θ_p^i + (1 − α)·θ_p. Fragments hold whole layer groups, those of every other
overlap, and are balanced: the largest group first, each to the fragment that has the fewest
elements so far; of equal groups that is every P-th. H is `sync.local_steps`, τ = `delay` at most H
− 1, and one exchange is in flight at a time. So a link need carry but a P-th of the model within τ
steps. What is evaluated is θ; what was learned in fragments since their last exchange is not in it,
and is lost when the run ends. Under all-reduce, and through a server where all wait for all.

Limits: one fragment with delay = 0 and alpha = 0 is local SGD with this outer optimizer, DiLoCo, to
the bit and the nanosecond. With a codec each fragment has a residual of its own.
Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, 2025.
Its H is P·H here.
Differs: its fragments are whole transformer blocks, whose groups may be in several fragments here;
its 4-bit floats are not built, `compression=uniform` or `grid` have as few bits. α = 0.5 and τ = 1
are as recalled.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from ashl.option import Count, Natural, Number, option
from ashl.overlap.contract import Delayed


@option
class Fragmented(Delayed, contract=True):
    """One fragment of the model at a time, which lands `delay` local steps later."""

    needs_steps: ClassVar[bool] = True
    delay: Natural

    def overlapped_steps(self, steps: int) -> int:
        return min(self.delay, steps - 1)

    def mix(self, own: Any, landed: Any, sent: Any) -> Any:
        """What a worker goes on from in a fragment where the model has landed: of its own
        parameters there now, and when it sent them.
        """
        raise NotImplementedError


@option
class Streaming(Fragmented):
    """Mixes its own parameters with those that land."""

    fragments: Count
    alpha: Annotated[float, Number, Field(ge=0, lt=1)]

    def mix(self, own: Any, landed: Any, sent: Any) -> Any:
        return own * self.alpha + landed * (1 - self.alpha) if self.alpha else landed
