"""Flatten a configuration: dotted keys, and each group's option by its name."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

# Groups that set values of other groups only; the configuration itself contains what they set.
PRESETS = ("experiment", "debug")


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration under dotted keys, with lists as JSON text and each group's option by
    name.

    A group without effect is not in `choices`, for example the sync mode if the schedule names
    those of its stages.
    """
    choices = dict(config.get("choices") or {})
    if choices and "sync" not in choices:
        config = {key: value for key, value in config.items() if key != "sync"}
    for group, content in config.items():
        if isinstance(content, dict) and "_target_" in content:
            choices.setdefault(group, option_name(str(content["_target_"])))
    found: dict[str, Any] = {
        group: option for group, option in choices.items() if group not in PRESETS
    }
    rest = {key: value for key, value in config.items() if key not in ("choices", "sweep")}
    values = {
        key: value
        for key, value in flat_items(rest)
        if not key.endswith("_target_") and key not in found
    }
    return found | values


def setting_text(value: Any) -> str:
    """Return a value of a flat configuration as the command line writes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def option_name(target: str) -> str:
    """Return an option's name from its class.

    >>> option_name("ashl.sync.bsp.BSP"), option_name("torchvision.models.vgg11")
    ('bsp', 'vgg11')
    """
    module, _, name = target.rpartition(".")
    module = module.rpartition(".")[2]
    if not target.startswith("ashl."):
        return name
    return module if module not in ("option", "spec") else name.removesuffix("Runtime").lower()


def flat_items(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted key, with lists as JSON text."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            text = json.dumps(value, default=str) if isinstance(value, list | dict) else value
            yield f"{prefix}{key}", text
