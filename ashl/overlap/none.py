"""No overlap: the gradient is one message after the backward pass.

Use when: exchanges are short, or a codec needs the whole update.
Avoid when: an exchange takes 0.05 of a step or more, in a model of several layers.
Alternatives: `merged`; `delayed`.

Rule: a step takes F + B, then one exchange.

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
    """Computes first, then communicates."""

    serial: ClassVar[bool] = True

    @property
    def needs(self) -> dict[str, str]:
        return {}

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return (len(timeline.ready_ns),)
