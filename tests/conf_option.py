"""Options for tests: made from the shipped YAML files, with fields changed."""

from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONF = Path(__file__).parents[1] / "conf"


def conf_option(group: str, option: str, /, **fields: Any) -> Any:
    """The option that `group=option group.field=value …` chooses."""
    spec = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"), resolve=True)
    assert isinstance(spec, dict)
    module, _, kind = str(spec.pop("_target_")).rpartition(".")
    return getattr(import_module(module), kind)(**{**spec, **fields})
