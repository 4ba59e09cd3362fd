"""Types of the values in plan and profile files, and the reader of such a file."""

from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ashl.config.construct import explain_error
from ashl.errors import load_json

T = TypeVar("T")
FILE = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# A clock of nanoseconds holds about 30 years.
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]


def check_name(name: str) -> str:
    """Return a name that can be printed. Raises: ValueError."""
    if not name.isprintable():
        raise ValueError("should be printable text")
    return name


Name = Annotated[str, AfterValidator(check_name)]


def one_of(*words: str) -> AfterValidator:
    """Return the check that a value is one of these words."""

    def check(word: str) -> str:
        if word not in words:
            raise ValueError(f"should be one of {', '.join(words)}")
        return word

    return AfterValidator(check)


def read_json(cls: type[T], text: str, schema: int) -> T:
    """Return the dataclass of a JSON text, with the type of each value checked.

    Raises: ValueError, one sentence.
    """
    data: Any = load_json(text)
    if not isinstance(data, dict) or data.get("schema", schema) != schema:
        found = f"schema {data['schema']}" if isinstance(data, dict) else "no mapping of keys"
        raise ValueError(f"{found} where schema {schema} was expected; make the file again")
    try:
        return adapter(cls).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        # an error without a key concerns the whole file
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(explain_error(error, "", cls) if first["loc"] else reason) from error


@cache
def adapter(cls: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(cls)
