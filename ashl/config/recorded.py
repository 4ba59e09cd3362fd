"""Configuration of an earlier run, read from its folder; damaged files are reported as such."""

from pathlib import Path
from typing import Any

import yaml

from ashl.config.catalog import SafeLoader, catalog
from ashl.config.flat import PRESETS
from ashl.errors import UsageError

CONFIG, TYPED = "config.yaml", "overrides.yaml"
COMMAND = "command.txt"  # the typed command, quoted for a shell
BESIDE = ("run", "stop", "eval")  # mappings beside the groups


def config_of(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of a run.

    Raises: UsageError if it cannot be read, or is not a configuration.
    """
    config = read_yaml(run_dir, CONFIG)
    groups = [group for group in catalog() if group not in PRESETS]
    kinds = {"choices": dict, **dict.fromkeys((*BESIDE, *groups), dict), "allow_targets": list}
    lacking = [
        key
        for key, kind in kinds.items()
        if not isinstance(config, dict) or type(config.get(key)) is not kind
    ]
    # If the schedule sets the sync mode of each stage, the run has no choice of sync.
    chosen = {} if lacking else {"sync": "", **config["choices"]}
    lacking += [
        f"choices.{group}" for group in groups if chosen and not isinstance(chosen.get(group), str)
    ]
    if lacking:
        raise UsageError(
            f"{run_dir / CONFIG} lacks {lacking[0]}, or has something else there; name another run."
        )
    return config


def typed_settings(run_dir: Path) -> list[str]:
    """Return the settings that the user typed for a run.

    Raises: UsageError if they cannot be read.
    """
    typed = read_yaml(run_dir, TYPED)
    if not isinstance(typed, list) or not all(isinstance(text, str) for text in typed):
        raise UsageError(f"{run_dir / TYPED} is no list of what was typed; name another run.")
    return typed


def typed_command(run_dir: Path) -> str:
    """Return the command that the user typed for a run; "" if it cannot be read."""
    try:
        return (run_dir / COMMAND).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def read_yaml(run_dir: Path, name: str) -> Any:
    """Return the content of a YAML file of a run folder. Raises: UsageError."""
    try:
        return yaml.load((run_dir / name).read_text(encoding="utf-8"), SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(
            f"{run_dir}: there is no run whose {name} can be read; name the folder of a run"
        ) from error
