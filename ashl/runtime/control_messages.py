"""Messages from the controller to every rank: the counterpart of records.

The controller publishes one `ControlUpdate` again and again. It holds a stop request, the latest
evaluation, the model version to save, the workers that have failed or may join, and at last the
exit code.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ashl.runtime.records import Text, validate


class End(NamedTuple):
    """How the run ended: exit code, and what to say of it (empty: nothing)."""

    code: int
    why: Text = ""


class ControlUpdate(NamedTuple):
    """What the process that keeps the records lets every rank know, again and again: that it is
    there, whether to stop, how the model was judged last, of which version of it the next
    checkpoint is to be (number, version), and at last how it all ended.
    """

    stopping: Text | None = None
    scores: dict[str, float | None] | None = None
    end: End | None = None
    wanted: tuple[int, int] | None = None
    taken: dict[str, int] | None = None  # how many vectors it has taken out of each queue
    lost: tuple[
        tuple[int, int], ...
    ] = ()  # workers without which the run goes on, and which life of theirs is over
    ready: tuple[tuple[int, int], ...] = ()  # a worker to let in, and in which life

    def dumps(self) -> str:
        return json.dumps(self)

    @staticmethod
    def loads(line: str | bytes) -> ControlUpdate:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        return validate(ControlUpdate, fields, "a control update")
