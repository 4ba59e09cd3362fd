"""Show the progress of a long preparation on standard error: in place, or as lines in a pipe."""

import time

from rich.console import Console
from rich.status import Status

LINE_S = 2.0  # between two lines


class Counting:
    """A context in which `update` shows what is in progress; with `quiet` it shows nothing."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._status = Status(what, console=self._console)
        self._due_s = time.monotonic() + LINE_S

    def __enter__(self) -> "Counting":
        if self._console.is_terminal and not self._console.quiet:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def update(self, done: int, size: int, name: str = "") -> None:
        """Show that `done` of `size` items are ready and that `name` is next."""
        line = f"{self._what}: {done} of {size}" + f" ({name})" * bool(name)
        self._status.update(line)
        if not self._console.is_terminal and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + LINE_S
            self._console.print(f"ashl: {line}", markup=False, soft_wrap=True)
