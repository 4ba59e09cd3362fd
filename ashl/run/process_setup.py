"""Set up a process: its standard streams, its title, its log and its exit code.

A daemon or a cron job may start with closed descriptors: then the next file that is opened takes
number 1 and receives what is printed. A terminal may show ASCII only, or close while the process
continues.
"""

import errno
import io
import logging
import multiprocessing as mp
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import setproctitle

from ashl.errors import UsageError

# Exit codes of a rank, beside those of a command.
EXIT_ORPHANED = 75  # its parent has ended
EXIT_EVICTED = 78  # a worker that missed heartbeats: the run continues without it
EXIT_DECLARED_FAILURE = 77  # a worker that fails as cluster.events declares
LOG_LEVEL = "ASHL_LOG"  # the environment variable that sets how much is logged
LEVELS = ("debug", "info", "warning", "error")
STREAMS = {1: "standard output", 2: "standard error"}  # by descriptor
REPLACE = "replace"  # error handler of a stream: `?` for a letter that its encoding lacks


class Output(io.FileIO):
    """A descriptor that survives the end of its reader, if it is a terminal or a pipe.

    The terminal may close, or the reader may end (`| head`). Then the descriptor becomes /dev/null
    at the first write that fails, and the command continues. Any other error names the stream.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                error.filename = STREAMS.get(self.fileno())
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)


def open_descriptors() -> None:
    """Open those of the descriptors 0 to 2 that are closed on /dev/null, for child processes,
    too.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)
            os.set_inheritable(number, True)


def replace_stream(stream: TextIO | None) -> TextIO:
    """Replace a stream by one that accepts any text, also once its reader has ended."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):  # a notebook's, or a test's
        return stream
    stream.flush()
    buffer = stream.buffer
    if not isinstance(buffer, io.BufferedWriter | io.FileIO):  # FileIO by `python -u`
        stream.reconfigure(errors=REPLACE)
        return stream
    raw = Output(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if isinstance(buffer, io.BufferedWriter) else raw,
        stream.encoding,
        REPLACE,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextmanager
def standard_streams() -> Generator[None]:
    """Replace the standard streams by ones that accept any text, until the context ends."""
    open_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(replace_stream, before)
    try:
        yield
    finally:
        for stream, own in zip(before, (sys.stdout, sys.stderr), strict=True):
            if stream is None:
                own.close()
            elif not own.closed:
                own.flush()
        sys.stdout, sys.stderr = before


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

    def guard() -> None:
        parent.join()
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


# --- the title of a process


def set_title(title: str) -> None:
    """Set the title of this process in ps, top and kill; its environment in /proc is unchanged."""
    os.environ["SPT_NOENV"] = "1"  # read at the first call
    setproctitle.setproctitle(title)


@contextmanager
def show_title(title: str) -> Generator[None]:
    """Set the title of this process until the context ends."""
    before = setproctitle.getproctitle()
    set_title(title)
    try:
        yield
    finally:
        set_title(before)
