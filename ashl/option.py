"""Define the form of an option: a frozen, keyword-only dataclass whose fields are checked when
made.

Defaults are in the option's YAML file only, so that a class never disagrees with its file. A field
that replaces a class variable of a base is required, even if the base has a value.
"""

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import get_annotations, iscoroutinefunction, isfunction, signature
from types import FunctionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ashl.errors import UsageError

T = TypeVar("T", bound=type)
STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
NEAR = 0.8  # similarity from which one name may be the other, misspelt


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def option(cls: T) -> T:
    """Make a class an option."""
    for name, annotation in get_annotations(cls).items():
        inherited = name not in cls.__dict__ and name in dir(cls) and name not in known_fields(cls)
        if inherited and "ClassVar" not in str(annotation):
            setattr(cls, name, Field(...))
    return dataclass(frozen=True, kw_only=True, config=STRICT)(cls)


def known_fields(cls: type) -> frozenset[str]:
    """Return the names of an option's fields, without class variables."""
    return frozenset(
        field.name for base in cls.__mro__ if is_dataclass(base) for field in fields(base)
    )


class Contract:
    """A typed base with a default for every hook, which the options of one group extend.

    `group` names the group. `contract` marks a base below it that has more hooks. With `strict`, a
    class may define only known hooks; names for its own use begin with an underscore.
    """

    _group: ClassVar[str] = ""
    _strict: ClassVar[bool] = False
    _contract: ClassVar[bool] = True

    @property
    def needs(self) -> dict[str, str]:
        """The capabilities of other options that this one needs, see `ashl.planning.capabilities`.

        Each maps to the key of this option that needs it, "" = the option itself.
        """
        return {}

    def __init_subclass__(
        cls, *, group: str | None = None, contract: bool = False, strict: bool | None = None
    ) -> None:
        super().__init_subclass__()
        cls._contract = contract or group is not None
        cls._group = cls._group if group is None else group
        cls._strict = cls._strict if strict is None else strict


@cache  # a class is checked once
def refuse_wrong_hooks(cls: type[Contract], where: str) -> None:
    """Refuse a class with an unknown hook, a hook of the wrong form, or a missing value.

    A misspelt hook would be ignored, and the default would apply instead.

    Raises: UsageError, with the nearest right name.
    """
    bases = [
        part
        for part in cls.__mro__
        if issubclass(part, Contract) and part.__dict__.get("_contract", True)
    ]
    who = f"{where} names {quoted_name(cls)}"
    own = [part for part in cls.__mro__[:-1] if part not in bases]
    for part in own:
        refuse_unknown_names(cls, part, bases, who)
        refuse_wrong_parameters(cls, part, bases, who)
    methods = {name for part in bases for name, value in part.__dict__.items() if isfunction(value)}
    if wrong := sorted(name for name in methods & known_fields(cls) if not name.startswith("_")):
        raise UsageError(
            f"{who}; its field {wrong[0]!r} has the name of a method; give it another name"
        )
    for name in sorted(name for part in bases for name in get_annotations(part)):
        if name not in methods and isfunction(getattr(cls, name, None)):
            raise UsageError(f"{who}; its {name!r} is a method, not a value; make it a property")
        if name not in dir(cls) and name not in known_fields(cls):
            raise UsageError(
                f"{who}; it does not define {name!r}, which has no default; give the class one"
            )


def refuse_unknown_names(cls: type[Contract], part: type, bases: Sequence[type], who: str) -> None:
    """Raise UsageError if `part` of an option's class defines a public name that no base has.

    Without `strict`, only a name that resembles a hook is refused.
    """
    named = [set(base.__dict__) | set(get_annotations(base)) for base in bases]
    known = {name for names in named for name in names if not name.startswith("_")}
    known |= known_fields(cls)
    for name in dict.fromkeys((*part.__dict__, *get_annotations(part))):
        if name.startswith("_") or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
        if near:
            raise UsageError(f"{who}; its {name!r} is not known; did you mean {near[0]!r}?")
        if cls._strict:
            raise UsageError(
                f"{who}; its {name!r} is not known; a name for its own use begins with an"
                " underscore"
            )


def refuse_wrong_parameters(
    cls: type[Contract], part: type, bases: Sequence[type], who: str
) -> None:
    """Raise UsageError if `part` of an option's class has a hook with other parameters."""
    for name, value in part.__dict__.items():
        above = next((base.__dict__[name] for base in bases if name in base.__dict__), None)
        if (
            isfunction(above)
            and name not in known_fields(cls)
            and not accepts_arguments(value, above)
        ):
            right = f"{name}({', '.join(signature(above).parameters)})"
            raise UsageError(f"{who}; its {name!r} cannot be called; write it as {right}")


def refuse_wrong_types(made: Contract, where: str) -> None:
    """Refuse an option with a value of a type that its base does not allow; it would be ignored,
    too.

    Raises: UsageError.
    """
    bases = [part for part in type(made).__mro__ if issubclass(part, Contract) and part._contract]
    for base in bases:
        for name, adapter in value_types(base).items():
            value = getattr(made, name)
            try:
                adapter.validate_python(value, strict=True)
            except ValidationError as error:
                right = " or ".join(
                    dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in error.errors())
                )
                raise UsageError(
                    f"{where} names {quoted_name(type(made))}; its {name}={value!r} is not"
                    f" possible: should be {right}"
                ) from error


@cache
def value_types(base: type[Contract]) -> dict[str, TypeAdapter]:
    """Return the values that a contract defines, methods excluded, with the type of each."""
    hints = get_type_hints(base, include_extras=True)
    asked = [
        name
        for name in get_annotations(base)
        if get_origin(hints[name]) is ClassVar and not name.startswith("_")
    ]
    return {name: TypeAdapter(get_args(hints[name])[0]) for name in asked}


def quoted_name(cls: type) -> str:
    return f"'{cls.__module__}.{cls.__name__}'"


def accepts_arguments(hook: Any, above: FunctionType) -> bool:
    """Return True if a hook can be called with all arguments of the hook `above` it."""
    bound = (
        hook.__get__(above) if isinstance(hook, FunctionType | staticmethod | classmethod) else hook
    )
    if not callable(bound) or (iscoroutinefunction(bound) and not iscoroutinefunction(above)):
        return False
    asked = signature(above.__get__(above)).parameters.values()
    if any(par.kind in (par.VAR_POSITIONAL, par.VAR_KEYWORD) for par in asked):
        return True
    named = {par.name: None for par in asked if par.kind is par.KEYWORD_ONLY}
    try:
        signature(bound).bind(*(None for par in asked if par.name not in named), **named)
    except TypeError:
        return False
    return True


def _no_truth_value(value: Any) -> Any:
    """Refuse true and false, which Python counts as numbers."""
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


Number = BeforeValidator(_no_truth_value)
Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Number, Field(ge=0, allow_inf_nan=False)]
# Seconds, up to 30 years: the limit of a clock of nanoseconds.
Duration = Annotated[NonNegative, Field(le=1e9)]
Span = Annotated[Duration, Field(gt=0)]
Ratio = Annotated[float, Number, Field(gt=0, le=1)]
Fraction = Annotated[float, Number, Field(ge=0, le=1)]
Count = Annotated[int, Number, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Number, Field(ge=0, lt=2**63)]
Size = Annotated[Count, Field(le=10**9)]  # of an array that is made up
