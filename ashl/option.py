"""The form of a configuration option: a frozen, keyword-only dataclass whose fields are checked when it is made.

Defaults live in the option's YAML file and nowhere else, so that a class never disagrees with its file.
"""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
option = dataclass(frozen=True, kw_only=True, config=STRICT)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
