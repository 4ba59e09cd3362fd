"""Convert state to plain values and back, and to tensors with a description in JSON.

Nothing is unpickled. Such values are tensors, numbers, text and containers only. Dataclasses and
named tuples of the named packages are made again field by field. A tensor on a device is copied to
the host first. A file is in the format of safetensors: its header holds the description.
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
KIND, NAME, ITEMS, TENSOR, SHAPE = "kind", "name", "items", "tensor", "shape"
ON_DEVICE = "there"  # kind of a tensor that was on a device
DESCRIPTION = "value"  # entry of a file's header: the value in JSON
HEADER_BYTES = 8  # bytes of the length of a file's header, which come first


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
    """Return a plain value as the content of a file."""
    text, tensors = split(value)
    named = {str(k): tensor for k, tensor in enumerate(tensors)}
    return safetensors.torch.save(named, {DESCRIPTION: text})


def decode(content: bytes, packages: tuple[str, ...] = ("ashl",), device: str = HOST) -> Any:
    """Return the value of a file's content, see `from_plain`. Raises ValueError for another one."""
    end = HEADER_BYTES + int.from_bytes(content[:HEADER_BYTES], "little")
    try:
        text = json.loads(content[HEADER_BYTES:end])["__metadata__"][DESCRIPTION]
        named = safetensors.torch.load(content)
    except (KeyError, safetensors.SafetensorError) as error:
        raise ValueError(f"is not a file of this program ({error})") from error
    return join(text, [named[str(k)] for k in range(len(named))], packages, device)


def to_plain(value: Any) -> Any:
    """Return a value as plain containers of tensors, numbers and text. Tensors are shared, or
    copied from their device; everything mutable is copied. Raises TypeError for a value that is no
    state.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return value if is_on_host(value) else {KIND: ON_DEVICE, ITEMS: to_host(value)}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {KIND: "dataclass", NAME: name_of(value), ITEMS: own}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {KIND: "named", NAME: name_of(value), ITEMS: [to_plain(item) for item in value]}
    if isinstance(value, set):  # in order: equal sets have equal bytes
        return {KIND: "set", ITEMS: [to_plain(item) for item in sorted(value)]}
    if isinstance(value, list | tuple | deque):
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
    if kind == ON_DEVICE:
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


def split(value: Any) -> tuple[str, list[Tensor]]:
    """Return a plain value as JSON and its flat tensors; one that occurs twice is there once."""
    numbers = dict[Any, int]()  # number of each tensor by its elements in memory
    tensors = list[Tensor]()

    def replace_tensors(item: Any) -> Any:
        if isinstance(item, Tensor):
            key = item.data_ptr(), item.numel(), item.dtype, item.stride()
            if key not in numbers or not item.numel():  # empty tensors have no memory of their own
                numbers[key] = len(tensors)
                tensors.append(with_own_memory(item).flatten())
            return {KIND: TENSOR, ITEMS: numbers[key], SHAPE: [*item.shape]}
        if isinstance(item, dict):
            return {key: replace_tensors(part) for key, part in item.items()}
        return [replace_tensors(part) for part in item] if isinstance(item, list | tuple) else item

    return json.dumps(replace_tensors(value)), tensors


def with_own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that shares its memory with no other: a view is copied."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def join(text: str, tensors: Sequence[Tensor], packages: tuple[str, ...], device: str) -> Any:
    """Return the value that `split` was given; see `from_plain`."""

    def restore_tensors(item: Any) -> Any:
        if isinstance(item, dict) and item.get(KIND) == TENSOR:
            return tensors[item[ITEMS]].view(item[SHAPE])
        if isinstance(item, dict):
            return {key: restore_tensors(part) for key, part in item.items()}
        return [restore_tensors(part) for part in item] if isinstance(item, list) else item

    return from_plain(restore_tensors(json.loads(text)), packages, device)


def split_tensors(value: Any) -> list[Tensor]:
    """Return a value as tensors to send: the first one describes the value in JSON, the others are
    its tensors.
    """
    text, tensors = split(to_plain(value))
    return [torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8), *tensors]


def join_tensors(parcel: Sequence[Tensor], packages: tuple[str, ...], device: str) -> Any:
    """Return the value that `split_tensors` was given; see `from_plain`."""
    return join(parcel[0].numpy().tobytes().decode(), parcel[1:], packages, device)


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
