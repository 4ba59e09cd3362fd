"""Every way a command can end badly: one sentence for the user, one exit code for scripts."""

import json
from typing import Any


def plain(text: str) -> str:
    """Text from elsewhere as it may be shown: on one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def parsed(text: str | bytes) -> Any:
    """The value that JSON text stands for. Raises ValueError, also where brackets are nested too
    deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None


class AshlError(Exception):
    """The run failed. The message is the one sentence the user reads; it names the fix where there
    is one.
    """

    exit_code = 1


class UsageError(AshlError):
    """The command line or the configuration asks for something impossible."""

    exit_code = 2


class UnusedKeyError(UsageError):
    """A key that other options have, and the chosen one has not: an error in one run, left out in a
    sweep over them.
    """

    def __init__(self, text: str, key: str) -> None:
        super().__init__(text)
        self.key = key


class NoEffectError(UnusedKeyError):
    """A key whose value changes nothing beside the others: an error in one run, left out in a
    sweep.
    """


class DataMissingError(AshlError):
    """A data set is not where it was looked for."""

    exit_code = 3


class OwnFaultError(AshlError):
    """A part of the user's own failed: its model, task, data set or optimizer, and no code
    of ashl.
    """

    def __init__(self, part: str, place: str, reason: str, hint: str) -> None:
        """`place` is the item, the worker and the step."""
        super().__init__(part, place, reason, hint)
        self.part, self.place, self.reason, self.hint = part, place, reason, hint

    def __str__(self) -> str:
        place, hint = f", {self.place}" if self.place else "", f"; {self.hint}" if self.hint else ""
        return f"{self.part} failed, not ashl{place}: {self.reason}{hint}"
