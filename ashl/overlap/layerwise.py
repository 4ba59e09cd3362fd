"""Layer-wise compression: each message is compressed by itself, with its own residual, and sent
while backward goes on.

Rule: group l is encoded when backward has come to it, in line with backward, so it is there at R_l
= Σ_{j ≥ l} (b_j + t_select(j)); its body of k elements, which takes t_c(k), goes out while backward
goes on. So a step ends as without compression, at max_l (R_l + Σ_{j ≤ l} t_c(j)). What is selected
is selected within each message: another algorithm than the codec on the whole gradient, but with
`compression.per_layer=true`, which selects in every tensor anyhow. By `plan`:
    none     a message for each layer group (LAGS-SGD)
    greedy   l is merged into l − 1 where waiting for it costs less than its message alone
             (OMGS-SGD): as selecting
             takes as long per element, this is MG-WFBP's rule with R and t_c as above
    optimal  the exact minimum over all cuts
    [2, 3]   as given: how many groups each message holds, the last layers first
With `ratio=adaptive` a message keeps as much as is hidden: the largest k ≤ max_ratio·s with which
it has ended when the next one is ready, max(R_l, end of the one before) + t_c(k) ≤ R_{l−1}, but no
less than `compression.ratio`, which is all that is left to the last message: nothing hides it. A
step takes as long as with `compression.ratio` in all. A round in which a worker is lost is done
once more without it: all messages are encoded anew, from what was kept before.

Limits: a single message is `none`, and without compression this is `merged`. The paper's condition
is t_select(l) + t_c(k) ≤ b_{l−1}; as t_select(l) is over when the message begins, it is that of l −
1 that hides it here. The code that came with the papers keeps a constant 0.001 instead.
Source: Shi et al., "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with
Convergence Guarantees", ECAI 2020; Shi et al., "Communication-Efficient Distributed Deep Learning
with Merged Gradient Sparsification on GPUs", INFOCOM 2020.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

from ashl.errors import UsageError
from ashl.option import Ratio, option
from ashl.overlap.contract import Overlap
from ashl.overlap.merged import Counts, plan_as_listed, plan_greedily, plan_optimally
from ashl.overlap.timeline import CompressedTimeline, StepTimeline


@option
class Layerwise(Overlap):
    """A codec in each message by itself."""

    compresses: ClassVar[bool] = True
    untimed: ClassVar[str] = "plan=none overlap.ratio=null"
    plan: Literal["none", "greedy", "optimal"] | Counts
    ratio: Literal["adaptive"] | tuple[Ratio, ...] | None
    max_ratio: Ratio

    @property
    def timed(self) -> bool:
        return self.plan in ("greedy", "optimal") or self.ratio == "adaptive"

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        if not isinstance(self.plan, str):
            return plan_as_listed(self.plan, len(timeline.ready_ns))
        each = (1,) * len(timeline.ready_ns)
        return (
            each
            if self.plan == "none"
            else {"greedy": plan_greedily, "optimal": plan_optimally}[self.plan](timeline)
        )

    def with_plan(self, timeline: StepTimeline) -> Layerwise:
        messages, ratio = self.messages(timeline), self.ratio
        if ratio == "adaptive":
            assert isinstance(timeline, CompressedTimeline)
            assert timeline.ratio is not None
            if timeline.ratio > self.max_ratio:
                raise UsageError(
                    f"compression.ratio={timeline.ratio:g} is the least that overlap.ratio=adaptive"
                    f" keeps, and overlap.max_ratio={self.max_ratio:g} the most; give the least"
                    " first"
                )
            ratio = hidden_ratios(timeline, messages, timeline.ratio, self.max_ratio)
        elif ratio is not None and len(ratio) != len(messages):
            raise UsageError(
                f"overlap.ratio lists {len(ratio)} and there are {len(messages)} messages; give a"
                " density for each, the last layers first, or overlap.ratio=adaptive"
            )
        return replace(self, plan=messages, ratio=ratio)


def hidden_ratios(
    timeline: StepTimeline, messages: Sequence[int], least: float, most: float
) -> tuple[float, ...]:
    """How much of each message is kept, so that it has ended when the next one is ready."""
    ratios, end, bounds = [], 0, [0, *accumulate(messages)]
    for place, (first, last) in enumerate(pairwise(bounds)):
        begin, ratio, elements = (
            max(end, timeline.ready_ns[last - 1]),
            least,
            sum(timeline.nbytes[first:last]) // 4,
        )
        if last < bounds[-1]:
            due = timeline.ready_ns[bounds[place + 2] - 1]
            counts = range(max(1, round(least * elements)), int(most * elements) + 1)
            fit = bisect_right(
                counts, due, key=lambda k: begin + timeline.cost(first, last, k / elements)
            )
            ratio = counts[fit - 1] / elements if fit else least
        ratios.append(ratio)
        end = begin + timeline.cost(first, last, ratio)
    return tuple(ratios)
