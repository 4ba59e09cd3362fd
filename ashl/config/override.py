"""Settings (KEY=VALUE) and whole commands, as a user types them."""

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path


def key_of(override: str) -> str:
    """Return the key of a setting; a leading `+` or `++` is ignored."""
    return override.lstrip("+").partition("=")[0]


def group_of(override: str) -> str:
    """Return the group of a setting: its key up to the first dot."""
    return key_of(override).partition(".")[0]


def path_of(text: str) -> Path:
    """Return a path as a user types it: `~` and `~USER` are their home folders, if there are
    any.
    """
    # not Path.expanduser, which raises RuntimeError if there is no such user
    return Path(os.path.expanduser(text))


def index_by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Return settings by their keys; of a key that is typed twice the last value counts."""
    return {key_of(text): text for text in overrides}


@dataclass(frozen=True)
class CommandLine:
    """A command of ashl as it was typed; as text, quoted for a shell.

    Args: words is the command's name and what follows it; config_dir is the folder of the user's
    own options, which the environment may have named; before is `ashl`, with `launch` and its
    options where hosts run the command.
    """

    words: tuple[str, ...]
    config_dir: str | None = None
    before: tuple[str, ...] = ("ashl",)

    def __str__(self) -> str:
        name, *rest = self.words
        return self.follow_up(name, *rest)

    def follow_up(self, name: str, *words: object) -> str:
        """Return a command that follows from this one: on the same hosts, with the same folder of
        options.
        """
        own = [] if self.config_dir is None else ["--config-dir", self.config_dir]
        return shlex.join([*self.before, name, *own, *map(str, words)])


def command_line(
    name: str, words: Sequence[str], config_dir: str | PathLike[str] | None = None
) -> CommandLine:
    """Return the command that does what a function of the package was asked for."""
    return CommandLine((name, *words), None if config_dir is None else fspath(config_dir))


def command_text(*words: object) -> str:
    """Return a command of ashl that needs no options of the user's own, quoted for a shell."""
    return shlex.join(["ashl", *map(str, words)])
