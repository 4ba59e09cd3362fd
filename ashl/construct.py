"""From a `_target_` to an object, and from what pydantic finds wrong to one sentence."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ashl.errors import UsageError


def construct(spec: Mapping[str, Any], where: str, allow: Sequence[str] = ()) -> Any:
    """The object that `_target_` names, made of the spec's other keys.

    Only classes may be named, in the module that defines them, inside `ashl` or a package in `allow`, so that a
    configuration cannot run arbitrary code. Raises UsageError.
    """
    target = spec.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise UsageError(f"{where} has no `_target_`; take one of the options that `ashl list {where}` shows")
    module_name, _, class_name = target.rpartition(".")
    if module_name.split(".")[0] not in ("ashl", *allow):
        package = module_name.split(".")[0]
        raise UsageError(f"{where} names {target!r}, outside of ashl; allow it with allow_targets=[{package}]")
    try:
        cls = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise UsageError(f"{where} names {target!r}, which cannot be imported: {error}") from error
    if not isinstance(cls, type) or cls.__module__ != module_name:
        raise UsageError(f"{where} names {target!r}, which is not a class defined in {module_name}")
    try:
        return cls(**{key: value for key, value in spec.items() if key != "_target_"})
    except ValidationError as error:
        raise UsageError(explain(error, where, cls)) from error


def explain(error: ValidationError, where: str, cls: type) -> str:
    """The first thing that is wrong, in one sentence."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained-"))]
    key = ".".join([*([where] if where else []), *path])
    known = list(getattr(cls, "__dataclass_fields__", {}))
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        near = difflib.get_close_matches(path[-1], known, n=1)
        return f"{key} is not a key; " + (f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}")
    if first["type"] in ("missing_argument", "missing_keyword_only_argument", "missing"):
        return f"{key} is missing; give it a value"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{key}={first['input']} is not possible: {message.removeprefix('input ')}"
