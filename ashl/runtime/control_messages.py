"""Messages from the controller to every rank: the counterpart of records.

The controller publishes one `ControlUpdate` repeatedly. It holds a stop request, the latest
evaluation, the model version to save, and the workers that have failed or may join. The last one
holds the exit code.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ashl.runtime.effects import Epoch
from ashl.runtime.records import Text, validate


class End(NamedTuple):
    """The end of the run: exit code, and the message to print (empty = none)."""

    code: int
    why: Text = ""


class ControlUpdate(NamedTuple):
    """The state that the controller publishes to every rank; it also shows that the controller is
    alive.
    """

    stopping: Text | None = None
    scores: dict[str, float | None] | None = None
    end: End | None = None
    # vectors that the controller has taken out of each queue, by queue
    taken: dict[str, int] | None = None
    # failed workers that the run tolerates, each with its incarnation that ended
    lost: tuple[tuple[int, int], ...] = ()
    # joining workers to connect to, each with its incarnation
    ready: tuple[tuple[int, int], ...] = ()
    # the members of a run whose workers regroup after a failure or a rejoin; None until then
    epoch: Epoch | None = None

    def dumps(self) -> str:
        return json.dumps(self)

    @staticmethod
    def loads(line: str | bytes) -> ControlUpdate:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        return validate(ControlUpdate, fields, "a control update")
