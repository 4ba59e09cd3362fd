"""Layer-wise compression: each message is compressed by itself, with its own residual, and sent
during the backward pass.

Use when: a compressed exchange still takes a large part of the backward pass.
Avoid when: latency is most of the exchange: then merge.
Alternatives: `merged` without compression; `none` with compression.

Rule: group l is encoded as soon as backward reaches it, before backward continues. So it is ready
at R_l = Σ_{j ≥ l} (b_j + t_select(j)). Its payload of k elements takes t_c(k) and travels during
backward. A step takes F + max_l (R_l + Σ_{j ≤ l} t_c(j)), as without compression. The codec selects
within each message. That is another algorithm than the codec on the whole gradient, except with
`compression.per_layer=true`, which selects in every tensor anyway. `plan` decides what a message
holds:
    none     one layer group (LAGS-SGD)
    greedy   group l joins l − 1 if waiting for it costs less than its own message (OMGS-SGD): as
             selection takes equally long per element, this is MG-WFBP's rule with R and t_c as
             above
    optimal  the exact minimum over all partitions
    [2, 3]   as listed: the number of layer groups in each message, last layers first
Adaptive density: with `ratio=adaptive` the density of a message is as large as the next group's
backward pass can hide. It is the largest k ≤ max_ratio·s with max(R_l, end of the message before) +
t_c(k) ≤ R_{l−1}, and at least `compression.ratio`. Nothing hides the last message, so its density
is `compression.ratio`. A step takes as long as with `compression.ratio` in all messages.
Failures: survivors repeat the round in which a worker failed. They encode all messages again, from
the residuals before it.

Limits: a single message is `none`. Without compression this is `merged`.
Source: Shi et al., "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with
Convergence Guarantees", ECAI 2020; Shi et al., "Communication-Efficient Distributed Deep Learning
with Merged Gradient Sparsification on GPUs", INFOCOM 2020.
Differs: the paper's condition is t_select(l) + t_c(k) ≤ b_{l−1}. Here t_select(l) is over when the
message begins, and the selection of group l − 1 also hides it. The papers' released code uses a
constant density of 0.001 instead.
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
from ashl.overlap.timeline import Bucket, StepTimeline


@option
class Layerwise(Overlap):
    """A codec in each message."""

    compresses: ClassVar[bool] = True
    costless_choice: ClassVar[str] = "plan=none overlap.ratio=null"
    plan: Literal["none", "greedy", "optimal"] | Counts
    ratio: Literal["adaptive"] | tuple[Ratio, ...] | None
    max_ratio: Ratio

    @property
    def needs_costs(self) -> bool:
        return self.plan in ("greedy", "optimal") or self.ratio == "adaptive"

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        if not isinstance(self.plan, str):
            return plan_as_listed(self.plan, len(timeline.ready_ns))
        if self.plan == "none":
            return (1,) * len(timeline.ready_ns)
        return {"greedy": plan_greedily, "optimal": plan_optimally}[self.plan](timeline)

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        merged = super().plan_buckets(timeline)
        ratios = self.ratio if isinstance(self.ratio, tuple) else [None] * len(merged)
        pairs = zip(merged, ratios, strict=True)
        return [bucket._replace(ratio=ratio) for bucket, ratio in pairs]

    def step_ns(self, timeline: StepTimeline) -> int:
        ratios = self.ratio if isinstance(self.ratio, tuple) else None
        return timeline.end_ns(self.messages(timeline), ratios) + timeline.answer_ns

    def with_plan(self, timeline: StepTimeline) -> Layerwise:
        messages = self.messages(timeline)
        ratio = self.ratio
        if ratio == "adaptive":
            assert timeline.ratio is not None
            if timeline.ratio > self.max_ratio:
                raise UsageError(
                    f"compression.ratio={timeline.ratio:g}: above"
                    f" overlap.max_ratio={self.max_ratio:g}, and overlap.ratio=adaptive needs a"
                    " density between the two; take a smaller compression.ratio"
                )
            ratio = hidden_ratios(timeline, messages, timeline.ratio, self.max_ratio)
        elif ratio is not None and len(ratio) != len(messages):
            raise UsageError(
                f"overlap.ratio={list(ratio)}: lists {len(ratio)} densities for"
                f" {len(messages)} messages; give one for each message, last layers first, or"
                " overlap.ratio=adaptive"
            )
        return replace(self, plan=messages, ratio=ratio)


def hidden_ratios(
    timeline: StepTimeline, messages: Sequence[int], least: float, most: float
) -> tuple[float, ...]:
    """Return the density of each message, in [least, most], with which it ends before the next one
    is ready.
    """
    ratios = []
    end = 0  # end of the previous message, ns
    bounds = [0, *accumulate(messages)]
    for place, (first, last) in enumerate(pairwise(bounds)):
        begin = max(end, timeline.ready_ns[last - 1])
        elements = sum(timeline.nbytes[first:last]) // 4
        ratio = least
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
