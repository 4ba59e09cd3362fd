"""Convert state to plain values and back, and write them to a file.

Nothing is unpickled. A file holds tensors, numbers, text and containers only. Dataclasses and named
tuples of the named packages are made again field by field. A tensor on a device is copied to the
host first.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ashl.learn.device import HOST, at_home, to_device, to_host

PLAIN = (type(None), bool, int, float, str)
KIND, NAME, ITEMS, TENSOR, SHAPE = "kind", "name", "items", "tensor", "shape"
THERE = "there"  # kind of a tensor that was on a device


def save(path: Path, document: Any) -> None:
    """Replace a file of tensors and plain values in one step. Raises OSError, or RuntimeError,
    which torch's writer raises for a full disk; then the old file stays.
    """
    part = path.with_suffix(".part")
    try:
        torch.save(document, part)
        os.replace(part, path)
    except (OSError, RuntimeError):
        part.unlink(missing_ok=True)
        raise


def to_plain(value: Any) -> Any:
    """Return a value as plain containers of tensors, numbers and text. Tensors are shared, or
    copied from their device; everything mutable is copied. Raises TypeError for a value that is no
    state.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return value if at_home(value) else {KIND: THERE, ITEMS: to_host(value)}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {KIND: "dataclass", NAME: name_of(value), ITEMS: own}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {KIND: "named", NAME: name_of(value), ITEMS: [to_plain(item) for item in value]}
    if isinstance(value, list | tuple | set | deque):
        return {KIND: type(value).__name__, ITEMS: [to_plain(item) for item in value]}
    if isinstance(value, dict):
        return {
            KIND: "dict",
            ITEMS: [(to_plain(key), to_plain(item)) for key, item in value.items()],
        }
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def from_plain(value: Any, packages: tuple[str, ...] = ("ashl",), device: str = HOST) -> Any:
    """Return the value that `to_plain` was given; tensors of a device are moved to `device`. Only
    classes of `packages` are made. Raises ValueError for other content.
    """
    if type(value) in PLAIN or isinstance(value, Tensor):
        return value
    if not isinstance(value, dict) or KIND not in value:
        raise ValueError("a checkpoint holds a value that is no state")
    kind, items = value[KIND], value[ITEMS]
    if kind == THERE:
        return to_device(items, device)
    if kind == "dict":
        return {
            from_plain(key, packages): from_plain(item, packages, device) for key, item in items
        }
    if kind == "dataclass":
        cls = class_of(value[NAME], packages)
        made = object.__new__(cls)
        for name in (field.name for field in fields(cls)):
            object.__setattr__(made, name, from_plain(items[name], packages, device))
        return made
    parts = [from_plain(item, packages, device) for item in items]
    if kind == "named":
        return class_of(value[NAME], packages)(*parts)
    return {"list": list, "tuple": tuple, "set": set, "deque": deque}[kind](parts)


def split_tensors(value: Any) -> list[Tensor]:
    """Return a value as tensors to send: the first one describes the value in JSON, the others are
    its tensors.
    """
    tensors = list[Tensor]()

    def apart(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors.append(item.flatten())
            return {KIND: TENSOR, ITEMS: len(tensors), SHAPE: [*item.shape]}
        if isinstance(item, dict):
            return {key: apart(part) for key, part in item.items()}
        return [apart(part) for part in item] if isinstance(item, list | tuple) else item

    text = json.dumps(apart(to_plain(value)))
    return [torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8), *tensors]


def join_tensors(parcel: Sequence[Tensor], packages: tuple[str, ...], device: str) -> Any:
    """Return the value that `split_tensors` was given; see `from_plain`."""

    def whole(item: Any) -> Any:
        if isinstance(item, dict) and item.get(KIND) == TENSOR:
            return parcel[item[ITEMS]].view(item[SHAPE])
        if isinstance(item, dict):
            return {key: whole(part) for key, part in item.items()}
        return [whole(part) for part in item] if isinstance(item, list) else item

    return from_plain(whole(json.loads(parcel[0].numpy().tobytes())), packages, device)


def name_of(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def class_of(name: str, packages: tuple[str, ...]) -> Any:
    """Return a dataclass or named tuple by its name. Raises ValueError if it is not in one of
    `packages`.
    """
    module, _, qualname = name.partition(":")
    if module.partition(".")[0] not in packages:
        raise ValueError(
            f"a checkpoint names the package {module}; allowed are {', '.join(packages)}"
        )
    cls: Any = importlib.import_module(module)
    for part in qualname.split("."):
        cls = getattr(cls, part)
    if not isinstance(cls, type) or not (is_dataclass(cls) or hasattr(cls, "_fields")):
        raise ValueError(f"a checkpoint names {name}, which is not a state")
    return cls
