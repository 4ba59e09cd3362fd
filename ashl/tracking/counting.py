"""Show the progress of a long preparation: in place on a terminal, else as lines on standard
error.
"""

import time

from rich.console import Console

LINE_S = 2.0  # between two lines


class Counting:
    """A context in which `update` shows what is in progress; with `quiet` it shows nothing."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what, self._due_s = what, time.monotonic() + LINE_S
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._status = (
            self._console.status(what) if self._console.is_terminal and not quiet else None
        )

    def __enter__(self) -> "Counting":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def update(self, done: int, size: int, name: str = "") -> None:
        """Show that `done` of `size` items are ready and that `name` is next."""
        line = f"{self._what}: {done} of {size}" + f" ({name})" * bool(name)
        if self._status:
            self._status.update(line)
        elif time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + LINE_S
            self._console.print(f"ashl: {line}", markup=False, soft_wrap=True)
