"""Define the errors of commands: each is one sentence for the user and one exit code for
scripts.
"""

import errno
import json
from typing import Any


def to_one_line(text: str) -> str:
    """Return text from outside as one line, without characters that a terminal would execute."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def load_json(text: str | bytes) -> Any:
    """Return the value of JSON text. Raises ValueError, also for brackets that are nested too
    deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None


class AshlError(Exception):
    """The run failed. The message is one sentence for the user, with the fix if there is one."""

    exit_code = 1


class UsageError(AshlError):
    """The command line or the configuration asks for something impossible."""

    exit_code = 2


class UnusedKeyError(UsageError):
    """The chosen option lacks a key that other options have.

    It is an error in a single run. A sweep leaves the key out.
    """

    def __init__(self, text: str, key: str) -> None:
        super().__init__(text)
        self.key = key


class NoEffectError(UnusedKeyError):
    """A key has no effect together with the others.

    It is an error in a single run. A sweep leaves the key out.
    """


# Errors of a path at which nothing can be written, however much space there is.
NO_PLACE = (
    errno.EACCES,
    errno.EBUSY,  # the place of a folder that is mounted, for example /
    errno.EEXIST,  # a file where a folder is to be
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


def unwritable_path_error(what: str, error: OSError, fix: str) -> AshlError:
    """Return the error of a path that cannot be written.

    It is a usage error, except if the disk is full or fails: then another try may succeed.
    """
    text = f"{what} ({(error.strerror or str(error)).lower()}); "
    if error.errno in NO_PLACE:
        return UsageError(text + fix)
    return AshlError(f"{text}free some space or {fix}")


class DataMissingError(AshlError):
    """A data set is not at its place."""

    exit_code = 3


class InterruptError(AshlError):
    """Ctrl-C or SIGINT ended the command. The records are whole."""

    exit_code = 130


class DeadlockError(AshlError):
    """Ranks wait for messages that no rank will send."""


class OwnFaultError(AshlError):
    """A part of the user's own failed (model, task, data set or optimizer), and no code of ashl."""

    def __init__(self, part: str, place: str, reason: str, hint: str) -> None:
        """`place` is the item, or the worker and the step."""
        super().__init__(part, place, reason, hint)
        self.part, self.place, self.reason, self.hint = part, place, reason, hint

    def __str__(self) -> str:
        place, hint = f", {self.place}" if self.place else "", f"; {self.hint}" if self.hint else ""
        return f"{self.part} failed, not ashl{place}: {self.reason}{hint}"
