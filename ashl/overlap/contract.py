"""What an overlap is: how a step's gradient is cut into messages, or what is computed while it is
exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ashl.option import Contract
from ashl.overlap.timeline import Bucket, StepTimeline


class Overlap(Contract, group="overlap", strict=True):
    """Sends a gradient in parts while backward goes on."""

    serial: ClassVar[bool] = False  # whether the gradient goes in one piece, once backward is over
    compresses: ClassVar[bool] = (
        False  # whether a codec works in each message by itself, instead of not at all
    )
    ratio: ClassVar[tuple[float, ...] | str | None] = (
        None  # the density of each message; None = compression.ratio
    )
    overlaps_next_forward: ClassVar[bool] = (
        False  # whether the next forward pass begins before all sums are in
    )
    reduce_scatter_all_gather: ClassVar[bool] = (
        False  # ... and sums are scattered during backward, and gathered during that
    )
    pulls: ClassVar[bool] = False  # ... at a parameter server, whose model comes back in parts
    by_slice: ClassVar[bool] = (
        False  # ... which merges each slice once it has come from all, and sends it back at once
    )
    fragments: ClassVar[int] = (
        0  # into how many the model is cut, each exchanged by itself; 0 = it is exchanged whole
    )
    share: ClassVar[float | None] = (
        None  # of the elements, that each exchange draws anew as its fragment
    )
    untimed: ClassVar[str] = (
        "plan=bytes"  # what to take where its plan would follow from costs, and none are known
    )

    @property
    def timed(self) -> bool:
        """Whether its plan follows from costs, so that they have to be known."""
        return False

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The density of each message as planned; None = of all that of the whole update."""
        return self.ratio if isinstance(self.ratio, tuple) else None

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        """How many layer groups each message holds, in the order in which backward comes to them.
        Raises UsageError.
        """
        raise NotImplementedError

    def cuts(self, message: Bucket) -> list[tuple[int, int]]:
        """Which elements of a message travel together, as (start, stop) within it."""
        return [(0, message.stop - message.start)]

    @property
    def most_committed(self) -> int:
        """How many slices may be committed at once, none of which is overtaken."""
        return 0

    def step_ns(self, timeline: StepTimeline) -> int:
        """How long a step and its exchange take in the long run."""
        return timeline.end_ns(self.messages(timeline), self.shares) + timeline.answer_ns

    def with_plan(self, timeline: StepTimeline) -> Overlap:
        """The same with its plan made, as it stands in plan.json: alike on all ranks."""
        return self


class Delayed(Overlap, contract=True):
    """The exchange of one piece of work goes on while the next one is computed: another algorithm,
    in other time.

    A piece is a gradient, or the steps between two exchanges. A round takes max(compute, exchange).
    Gradients are of the model that had landed when they were begun; where steps are taken locally,
    `border` says on what.
    """

    serial: ClassVar[bool] = True
    needs_steps: ClassVar[bool] = (
        False  # whether it makes sense of local steps only, and not of gradients
    )
    steps_ahead: ClassVar[bool] = (
        False  # whether workers take outer steps of their own on what has not landed
    )

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return (len(timeline.ready_ns),)

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Between two pieces of local steps: (what is exchanged of the one that is done, the model
        that the next one starts from).

        `landed` is the model with all exchanges that are over, alike for all; the piece went from
        `start` to `start + progress`. Exchanged updates are weighed and added to `landed`, or
        stepped on by the outer optimizer. With `steps_ahead`, `ahead()` is `landed` after such a
        step on the worker's own part, by moments of its own.
        """
        raise NotImplementedError

    def overlapped_steps(self, steps: int) -> int:
        """How many of so many local steps an exchange has before it lands."""
        return steps
