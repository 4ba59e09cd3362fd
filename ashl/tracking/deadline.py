"""A budget of host seconds, and the part of it that remains."""

import time


class Deadline:
    """A budget that begins when the object is made."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._began = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s
