"""The form of a configuration option: a frozen, keyword-only dataclass whose fields are checked when it is made.

Defaults live in the option's YAML file and nowhere else, so that a class never disagrees with its file.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
option = dataclass(frozen=True, kw_only=True, config=STRICT)


def _no_truth_value(value: Any) -> Any:
    """`true` is no number, although Python thinks so."""
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


Number = BeforeValidator(_no_truth_value)
Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Number, Field(ge=0, allow_inf_nan=False)]
Duration = Annotated[NonNegative, Field(le=1e9)]  # seconds, up to 30 years: what a clock of nanoseconds can bear
Ratio = Annotated[float, Number, Field(gt=0, le=1)]
Fraction = Annotated[float, Number, Field(ge=0, le=1)]
Count = Annotated[int, Number, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Number, Field(ge=0, lt=2**63)]
