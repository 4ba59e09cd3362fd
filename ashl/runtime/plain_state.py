"""Convert state to tensors, of which the first one describes the value in JSON, and back.

Nothing is unpickled. A state consists of tensors, numbers, text and containers only. Dataclasses
and named tuples of the named packages are made again field by field. A tensor on a device is copied
to the host first. A file is in the format of safetensors.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ashl.device import HOST, is_on_host, to_device, to_host

PLAIN = (type(None), bool, int, float, str)
CONTAINERS = {cls.__name__: cls for cls in (list, tuple, set, deque)}
KIND, NAME, ITEMS, SHAPE = "kind", "name", "items", "shape"
HERE, ON_DEVICE = "here", "there"  # kinds of a tensor: one of the host, one of a device


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one step. Raises OSError, or RuntimeError, which torch's writer raises for a
    full disk; then the old file stays.
    """
    part = path.with_suffix(".part")
    try:
        write(part)
        os.replace(part, path)
    except (OSError, RuntimeError):
        part.unlink(missing_ok=True)
        raise


def encode(value: Any) -> bytes:
    """Return a state as the content of a file."""
    return encode_tensors(split_tensors(value))


def encode_tensors(parcel: Sequence[Tensor]) -> bytes:
    """Return the tensors of `split_tensors` as the content of a file."""
    return safetensors.torch.save({str(k): tensor for k, tensor in enumerate(parcel)})


def decode(content: bytes, packages: tuple[str, ...] = ("ashl",), device: str = HOST) -> Any:
    """Return the state of a file's content, see `join_tensors`. Raises ValueError for another
    file.
    """
    try:
        named = safetensors.torch.load(content)
        parcel = [named[str(k)] for k in range(len(named))]
    except (KeyError, safetensors.SafetensorError) as error:
        raise ValueError(f"is not a file of this program ({error})") from error
    return join_tensors(parcel, packages, device)


def split_tensors(value: Any) -> list[Tensor]:
    """Return a state as tensors: its description, and then its flat tensors, shared with the
    state or copied from their device. One that occurs twice is there once.

    Raises: TypeError for a value that is no state.
    """
    parcel = Parcel()
    text = json.dumps(describe(value, parcel))
    return [torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8), *parcel.tensors]


class Parcel:
    """The flat tensors of a state."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[Any, int] = {}  # number of each tensor by its elements in memory
        self._added: list[Tensor] = []  # kept, so that no two have the same memory

    def add(self, tensor: Tensor) -> int:
        """Add a tensor on the host, unless it is there; return its number."""
        self._added.append(tensor)
        key = tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.stride()
        # empty tensors have no memory of their own
        if key not in self._numbers or not tensor.numel():
            self._numbers[key] = len(self.tensors)
            self.tensors.append(with_own_memory(tensor).flatten())
        return self._numbers[key]


def describe(value: Any, parcel: Parcel) -> Any:
    """Return a state as values of JSON, with the numbers of its tensors in the parcel."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        kind = HERE if is_on_host(value) else ON_DEVICE
        return {KIND: kind, ITEMS: parcel.add(to_host(value)), SHAPE: [*value.shape]}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            field.name: describe(getattr(value, field.name), parcel) for field in fields(value)
        }
        return {KIND: "dataclass", NAME: name_of(value), ITEMS: parts}
    if isinstance(value, dict):
        pairs = [(describe(key, parcel), describe(part, parcel)) for key, part in value.items()]
        return {KIND: "dict", ITEMS: pairs}
    if isinstance(value, set):
        value_parts, kind = sorted(value), {KIND: "set"}  # in order: equal sets have equal bytes
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        value_parts, kind = value, {KIND: "named", NAME: name_of(value)}
    elif isinstance(value, list | tuple | deque):
        value_parts, kind = value, {KIND: type(value).__name__}
    else:
        raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")
    return {**kind, ITEMS: [describe(part, parcel) for part in value_parts]}


def with_own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that shares its memory with no other: a view is copied."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def join_tensors(
    parcel: Sequence[Tensor], packages: tuple[str, ...] = ("ashl",), device: str = HOST
) -> Any:
    """Return the state that `split_tensors` was given; tensors of a device are moved to `device`.

    Only classes of `packages` are made. Raises ValueError for other content.
    """

    def make(item: Any) -> Any:
        if type(item) in PLAIN:
            return item
        if not isinstance(item, dict) or KIND not in item:
            raise ValueError("a checkpoint holds a value that is no state")
        kind, items = item[KIND], item[ITEMS]
        if kind in (HERE, ON_DEVICE):
            tensor = parcel[1 + items].view(item[SHAPE])
            return tensor if kind == HERE else to_device(tensor, device)
        if kind == "dict":
            return {make(key): make(part) for key, part in items}
        if kind == "dataclass":
            cls = class_of(item[NAME], packages)
            made = object.__new__(cls)
            for name in (field.name for field in fields(cls)):
                object.__setattr__(made, name, make(items[name]))
            return made
        parts = [make(part) for part in items]
        if kind == "named":
            return class_of(item[NAME], packages)(*parts)
        return CONTAINERS[kind](parts)

    try:
        return make(json.loads(parcel[0].numpy().tobytes()))
    except (LookupError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise ValueError(f"a checkpoint holds another state than described ({error})") from error


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
