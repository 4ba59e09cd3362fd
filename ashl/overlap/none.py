"""No overlap: the gradient is one message, once backward is over.

Rule: a step of F + B, then one sum of C.

Source: synchronous SGD as in Chen et al., "Revisiting Distributed Synchronous SGD", ICLR workshop
2016.
"""

from __future__ import annotations

from typing import ClassVar

from ashl.option import option
from ashl.overlap.contract import Overlap
from ashl.overlap.timeline import StepTimeline


@option
class Serial(Overlap):
    """First computes, then communicates."""

    serial: ClassVar[bool] = True

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return (len(timeline.ready_ns),)
