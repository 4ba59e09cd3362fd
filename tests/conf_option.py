"""Options for tests: made from the shipped YAML files, with fields changed."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONF = Path(__file__).parents[1] / "conf"


def conf_option(group: str, option: str, /, **fields: Any) -> Any:
    """The option that `group=option group.field=value …` chooses."""
    spec = values(group, option)
    module, _, kind = str(spec.pop("_target_")).rpartition(".")
    return getattr(import_module(module), kind)(**{**spec, **fields})


@cache
def loaded(group: str, option: str) -> Any:
    """Return the values of an option's file; references to the environment stay unresolved."""
    return OmegaConf.load(CONF / group / f"{option}.yaml")


def values(group: str, option: str) -> dict[str, Any]:
    """Return the values of an option's file and of the files that it starts from."""
    own: Any = OmegaConf.to_container(loaded(group, option), resolve=True)
    found: dict[str, Any] = {}
    for parent in own.pop("defaults", ()):
        if not isinstance(parent, str):
            continue  # another group's option
        found |= values(group, parent)
    return found | own


def task_of(data: Any) -> Any:
    """The task that a data set is for."""
    kind = "regression" if data.train.targets.is_floating_point() else "classification"
    return conf_option("task", kind)
