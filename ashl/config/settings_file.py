"""Settings from a YAML file of KEY: VALUE, read as if the user had typed them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ashl.config.catalog import check_keys
from ashl.config.override import key_of
from ashl.errors import UsageError

BARE = re.compile(r"[\w.+/-]+")  # text in a list that Hydra reads without quotes


def with_settings(file: Path | None, typed: Sequence[str]) -> list[str]:
    """Return the settings of a file, if there is one, followed by the typed ones; a typed key
    replaces the file's.

    Raises: UsageError if the file cannot be read, or contains anything but settings.
    """
    keys = {key_of(text) for text in typed}
    own = [] if file is None else read_settings(file)
    return [*(text for text in own if key_of(text) not in keys), *typed]


def read_settings(file: Path) -> list[str]:
    """Return KEY=VALUE for each setting of a file; keys may be dotted or nested.

    A list of KEY=VALUE, like the overrides.yaml of a run folder, is also accepted.
    """
    try:
        # BaseLoader leaves values as they are written, so that Hydra reads them as it reads the
        # command line.
        found = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)
        check_keys(file)
    except RecursionError as error:
        raise UsageError(
            f"--config {file}: it nests its values too deep; write them flatter"
        ) from error
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UsageError(
            f"--config {file}: it is not valid YAML ({problem}); correct it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "it is not UTF-8").lower()
        raise UsageError(
            f"--config {file}: it cannot be read ({reason}); name a YAML file of KEY: VALUE"
        ) from error
    if (
        found
        and isinstance(found, list)
        and all(isinstance(text, str) and "=" in text for text in found)
    ):
        texts = [str(text) for text in found]
    elif found and isinstance(found, dict):
        check_is_no_record(file, found)
        texts = [f"{key}={value}" for key, value in flatten_settings(found)]
    else:
        raise UsageError(
            f"--config {file}: it has no settings; write KEY: VALUE, for example `sync: bsp`"
        )
    if any(key_of(text) == "allow_targets" for text in texts):
        raise UsageError(
            f"--config {file}: a file cannot allow code to be imported; type allow_targets=[...]"
            " instead"
        )
    return texts


def check_is_no_record(file: Path, found: Mapping[str, Any]) -> None:
    """Refuse a record of ashl, which has more than settings. Raises: UsageError, naming the file
    to take.
    """
    if "choices" in found:  # the config.yaml of a run
        raise UsageError(
            f"--config {file}: it is the resolved configuration of a run; name the overrides.yaml"
            " beside it"
        )
    if "schema" in found:  # plan.json, profile.json, summary.json, sweep.json
        raise UsageError(
            f"--config {file}: it is a record of ashl; give a plan as plan=FILE, a profile as"
            " profile=FILE, or name a YAML file of KEY: VALUE"
        )


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys with their values as a user types them."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield (
                f"{prefix}{key}",
                "null" if value == "" else value if isinstance(value, str) else as_typed(value),
            )


def as_typed(value: Any) -> str:
    """Return a value within a list as Hydra reads it."""
    if isinstance(value, list):
        return "[" + ",".join(map(as_typed, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_typed(one)}" for key, one in value.items()) + "}"
    return value if BARE.fullmatch(value) else '"' + value.replace('"', '\\"') + '"'
