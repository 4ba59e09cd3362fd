"""Set up a process: its standard streams, its log and its exit code."""

import io
import logging
import multiprocessing as mp
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from ashl.errors import UsageError

# Exit codes of a rank, beside those of a command.
EXIT_ORPHANED = 75  # its parent has ended
EXIT_DECLARED_FAILURE = 77  # a worker that fails as cluster.events declares
LOG_LEVEL = "ASHL_LOG"  # the environment variable that sets how much is logged
LEVELS = ("debug", "info", "warning", "error")


def replace_unknown_letters() -> None:
    """Make the standard streams print `?` for a letter that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # no notebook's stream, and not None
            stream.reconfigure(errors="replace")


def redirect(path: Path) -> None:
    """Send everything that this process and its libraries print to a file."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if stream := getattr(sys, name):
            stream.flush()
        os.dup2(out, number)
        stream = open(  # noqa: SIM115
            number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )
        setattr(sys, name, stream)
    os.close(out)


def die_with_parent() -> None:
    """End this process when its parent ends: a thread watches the parent.

    The operating system does not do so for children of Python's fork server.
    """
    parent = mp.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def guard() -> None:
        wait([sentinel])
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=guard, daemon=True, name="guard").start()


# --- the log of a process


logger = logging.getLogger("ashl")
logger.addHandler(logging.NullHandler())  # a process without a log of its own prints no log


def log_level() -> str:
    """Return the level that `ASHL_LOG` sets, info by default. Raises UsageError if it is
    no level.
    """
    level = os.environ.get(LOG_LEVEL, "info").lower()
    if level not in LEVELS:
        raise UsageError(f"{LOG_LEVEL}={level}: unknown level; set one of {', '.join(LEVELS)}")
    return level


def start_log(handler: logging.Handler, name: str) -> None:
    """Log to this handler from now on, each line with time, level and the name of the process."""
    # on a full disk the log is cut short, and the run continues
    handler.handleError = lambda record: None
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s"))
    logger.setLevel(log_level().upper())
    logger.propagate = False
    logger.addHandler(handler)


@contextmanager
def logging_to(path: Path, name: str) -> Generator[None]:
    """Append the log of this process to a file until the context ends."""
    try:
        handler: logging.Handler = logging.FileHandler(path, encoding="utf-8")
    except OSError:  # the disk may be full, which the records report
        handler = logging.NullHandler()
    start_log(handler, name)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        handler.close()
