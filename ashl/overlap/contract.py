"""The contract of an overlap: how a gradient is partitioned into messages, or what a worker
computes during an exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ashl.option import Contract
from ashl.overlap.timeline import ALL_STEPS, Bucket, StepTimeline, merge_buckets


class Overlap(Contract, group="overlap", strict=True):
    """An overlap; the defaults are those of gradient messages during the backward pass."""

    # True if the gradient is one message after the backward pass
    serial: ClassVar[bool] = False
    # True if a codec encodes each message by itself; otherwise messages are not compressed
    compresses: ClassVar[bool] = False
    # density of each message, None = compression.ratio
    ratio: ClassVar[tuple[float, ...] | str | None] = None
    # True if the next forward pass begins before all sums have arrived
    overlaps_next_forward: ClassVar[bool] = False
    # True if sums are scattered during backward and gathered during the next forward pass
    reduce_scatter_all_gather: ClassVar[bool] = False
    # True if a parameter server returns the model in parts during the next forward pass
    pulls: ClassVar[bool] = False
    # True if a parameter server merges and returns each slice once it has it from all workers
    by_slice: ClassVar[bool] = False
    # number of fragments of the model that are exchanged in turn, 0 = the whole model
    fragments: ClassVar[int] = 0
    # fraction of the elements that each exchange draws at random as its fragment
    share: ClassVar[float | None] = None
    # settings to suggest if the plan needs costs and none are known
    costless_choice: ClassVar[str] = "plan=bytes"

    @property
    def needs(self) -> dict[str, str]:
        needs = dict.fromkeys(("overlap", "own_loop", "gradients", "plain_messages"), "")
        one_way = self.compresses or self.reduce_scatter_all_gather
        codec = "codec_by_message" if self.compresses else "lossless"
        needs |= {"no_server": ""} if one_way else {}
        needs |= {"server": ""} if self.pulls else {}
        needs |= {"merges_of_slices": ""} if self.by_slice else {}
        needs |= dict.fromkeys((codec, "gradient_steps"), "")
        if self.overlaps_next_forward:
            needs["fixed_rounds"] = ""
        needs["no_clipping"] = ""
        if self.by_slice or (self.overlaps_next_forward and not self.pulls):
            needs["elementwise"] = ""
        if self.ratio is not None:
            needs["density"] = "ratio"
        return needs

    @property
    def needs_costs(self) -> bool:
        """Return True if the plan follows from costs, which then have to be known."""
        return False

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        """Return the number of layer groups in each message, in backward order. Raises:
        UsageError.
        """
        raise NotImplementedError

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        """Return the buckets of the model, in the order in which backward computes them; slices of
        one layer group are in ascending order.
        """
        merged = merge_buckets(timeline.groups, self.messages(timeline))
        return [bucket._replace(needed=1.0) for bucket in merged]

    def step_ns(self, timeline: StepTimeline) -> int:
        """Return the time of a step with its exchange in the long run, in nanoseconds."""
        return timeline.end_ns(self.messages(timeline)) + timeline.answer_ns

    def with_plan(self, timeline: StepTimeline) -> Overlap:
        """Return this overlap with its plan made, as plan.json holds it, the same on all ranks."""
        return self


class Delayed(Overlap, contract=True):
    """An overlap in which a piece of work is exchanged while the next one is computed.

    A piece is a gradient, or the local steps between two exchanges. A round takes max(compute,
    exchange). Unlike the other overlaps, this changes the learned model: a gradient is computed on
    the model of all exchanges that were applied when its computation began. For local steps
    `at_boundary` defines the model.
    """

    serial: ClassVar[bool] = True
    # True if it supports local steps only, and not gradients
    needs_steps: ClassVar[bool] = False
    # True if workers take outer steps of their own on work that is not applied yet
    steps_ahead: ClassVar[bool] = False

    # local steps of the next piece that workers take before an exchange is applied
    delay: ClassVar[float] = ALL_STEPS

    @property
    def needs(self) -> dict[str, str]:
        basic = ("delay", "own_loop", "plain_messages", "fixed_rounds", "gradient_steps")
        needs = dict.fromkeys((*basic, "even_staleness"), "")
        if self.needs_steps:
            needs["differences"] = ""
        if self.steps_ahead:
            needs |= dict.fromkeys(("rounds", "linear_outer"), "")
        if self.fragments:
            needs["merges_of_fragments"] = ""
        if self.share is not None:
            needs |= dict.fromkeys(("lossless", "average"), "share")
        return needs

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return (len(timeline.ready_ns),)

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        return [Bucket(0, timeline.groups[0].stop, delay=self.delay)]

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Return (the part of a finished piece that is exchanged, the model that the next piece
        starts from).

        Args: `landed` is the model with all finished exchanges, the same on all workers. The piece
        went from `start` to `start + progress`. `ahead()` returns `landed` after an outer step on
        the worker's own part, with moments of its own; only with `steps_ahead`.
        Exchanged updates are weighed and added to `landed`, or the outer optimizer steps on their
        sum.
        """
        raise NotImplementedError

    def mix(self, own: Any, landed: Any, sent: Any) -> Any:
        """Return the parameters with which a worker continues a piece in the fragment of a finished
        exchange.

        Args: the worker's parameters now (`own`) and when it sent them (`sent`); `landed` is the
        exchanged fragment.
        """
        return own


def overlapped_steps(overlap: Delayed, steps: int) -> int:
    """Return how many of `steps` local steps a worker takes before an exchange is applied."""
    return steps if overlap.delay == ALL_STEPS else min(int(overlap.delay), steps - 1)
