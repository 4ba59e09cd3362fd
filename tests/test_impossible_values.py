"""A key of any option refuses a value that no run can use."""

import math

import pytest

from ashl.config.catalog import catalog, parameters
from ashl.config.compose import PRESETS
from ashl.config.construct import construct
from ashl.errors import UsageError
from tests.conf_option import values

TEXTS = (
    "dataset.path",
    "dataset.root",
    "model.name",
    "runtime.interface",
    "topology.graph",
    "tracking.experiment",
)


def refusal(spec: dict, group: str) -> str:
    """Return how an option is refused; "" if it can be constructed."""
    try:
        construct(spec, group)
    except UsageError as error:
        return str(error)
    return ""


def nonsense(key: str) -> list[float | str]:
    """Return values that a key cannot have: no clock can hold an endless time."""
    values: list[float | str] = [math.nan, -math.inf if key == "task.ignore_index" else -(10**9)]
    if key.endswith("_s") and not key.endswith("mbit_s"):
        values.append(1e300)
    return values if key in TEXTS else [*values, "x"]


@pytest.mark.parametrize("group", sorted(catalog().keys() - set(PRESETS)))
def test_no_key_takes_what_no_run_can_use(group: str) -> None:
    taken = [
        f"{key}={value}"
        for option, file in catalog()[group].items()
        for key in (f"{group}.{parameter.key}" for parameter in parameters(file))
        for value in nonsense(key)
        if f"{key}={value} is not possible"
        not in refusal({**values(group, option), key.removeprefix(f"{group}."): value}, group)
    ]
    assert taken == []
