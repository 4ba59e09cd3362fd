"""Streaming DiLoCo: fragments of the model are exchanged in turn, while local steps continue.

Use when: DiLoCo over a thin link that would idle between exchanges of the whole model.
Avoid when: links are fast: fragments are staler and gain nothing.
Alternatives: `loscar`; `delayed`; `none`.

Rule: the model is partitioned into P = `fragments` fragments. Every H steps the next fragment p is
exchanged, so each fragment is exchanged every P·H steps. Worker i sends Δ_p = θ_p^i − θ_p, with θ^i
its own model and θ the model of all finished exchanges. The outer optimizer, with a momentum per
fragment, steps on Σ c_i·Δ_p^i. After τ = `delay` more local steps each worker sets θ_p^i ← α·θ_p^i
+ (1 − α)·θ_p. H is `sync.local_steps`, τ ≤ H − 1, and one exchange is in flight at a time. So a
link carries one P-th of the model within τ steps. The evaluated model is θ. It lacks the progress
in each fragment since its last exchange, which is lost when the run ends.
Fragments: each one holds whole layer groups, with nearly equal sizes. The largest group is placed
first, each into the fragment with fewest elements so far; of equal groups, every P-th is in one
fragment.
Waiting: a worker waits for an exchange if it takes longer than the τ steps. The exchange is an
all-reduce, or goes through a server at which all workers wait for each other.

Limits: one fragment with delay = 0 and alpha = 0 is local SGD with this outer optimizer (DiLoCo),
to the bit and the nanosecond. With a codec each fragment has a residual of its own.
Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, 2025.
Its H is P·H here.
Differs: the paper's fragments are whole transformer blocks; here the groups of a block may be in
several fragments. Its 4-bit floats are not implemented; `compression=uniform` or `grid` have as few
bits. α = 0.5 and τ = 1 are recalled from the paper and not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ashl.option import Count, Natural, Number, option
from ashl.overlap.contract import Delayed
from ashl.overlap.timeline import Bucket, StepTimeline


@option
class Fragmented(Delayed, contract=True):
    """Base of overlaps that exchange one fragment at a time and apply it `delay` local steps
    later.
    """

    needs_steps: ClassVar[bool] = True
    delay: Natural

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        return start - landed + progress, start + progress


@option
class Streaming(Fragmented):
    """Mixes the worker's own parameters with an exchanged fragment."""

    fragments: Count
    alpha: Annotated[float, Number, Field(ge=0, lt=1)]

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        one = Bucket(0, timeline.groups[0].stop, every=self.fragments, delay=self.delay)
        fragments = balance_fragments(timeline.groups, self.fragments)
        return [one._replace(runs=tuple(runs), offset=k) for k, runs in enumerate(fragments)]

    def mix(self, own: Any, landed: Any, sent: Any) -> Any:
        return own * self.alpha + landed * (1 - self.alpha) if self.alpha else landed


def balance_fragments(groups: Sequence[Bucket], count: int) -> list[list[tuple[int, int]]]:
    """Return the layer groups as `count` fragments of nearly equal size, each as runs of elements.

    Groups are assigned in descending size, each to the fragment with the fewest elements. If all
    groups have one size, each fragment has every P-th group.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    held = [0] * count
    for group in sorted(groups, key=lambda group: (group.start - group.stop, group.start)):
        k = held.index(min(held))
        held[k] += group.stop - group.start
        found[k].append((group.start, group.stop))
    return sorted(sorted(runs) for runs in found)
