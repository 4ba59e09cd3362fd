"""Two kinds of arrays: NumPy's in the host's memory, torch's tensors on a device, and what differs
between them.

A codec that works on both takes what both understand (slices, comparisons, + − ×, `len`,
`reshape`), these functions, and the kernels of this folder, which for tensors are those of
`device_kernels`.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ashl.learn.device import at_home, numbers, to_device, to_host

Array: TypeAlias = Any  # np.ndarray in the host's memory, Tensor on a device
TYPES = {
    "u1": torch.uint8,
    "<i2": torch.int16,
    "<i4": torch.int32,
    "<f2": torch.float16,
    "<f4": torch.float32,
}


def array_of(x: Tensor) -> Array:
    """A vector of any floating type as float32: an array in the host's memory, without a copy where
    it is one already; a tensor elsewhere.
    """
    x = x.detach().to(torch.float32).contiguous()
    return x.numpy() if at_home(x) else x


def bytes_of(x: Tensor) -> Array:
    """A tensor of bytes as an array of the kind that goes with where it lies."""
    return x.numpy() if at_home(x) else x


def tensor_of(array: Array) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def same_form(like: Array, tensor: Tensor) -> Array:
    """A tensor as an array of that kind."""
    return tensor if isinstance(like, Tensor) else tensor.numpy()


def beside(like: Array, array: Array) -> Array:
    """An array of the host where that one lies; itself where it lies there."""
    here = isinstance(array, np.ndarray) and isinstance(like, Tensor)
    return to_device(torch.from_numpy(array), str(like.device)) if here else array


def to_device_index(like: Array, places: np.ndarray) -> Array:
    """Places that the host has drawn, as an index of that one."""
    return beside(like, places.astype(np.int64)) if isinstance(like, Tensor) else places


def as_index(numbers: Array) -> Array:
    """Numbers that lie there as an index of what lies there, too."""
    return numbers.long() if isinstance(numbers, Tensor) else numbers.astype(np.int64)


def wide(array: Array) -> Array:
    """In float64."""
    return array.to(torch.float64) if isinstance(array, Tensor) else array.astype(np.float64)


def look_up(table: np.ndarray, numbers: Array) -> Array:
    """Of a short table the entries of these numbers, where they lie."""
    return (
        beside(numbers, table)[numbers.long()]
        if isinstance(numbers, Tensor)
        else table.take(numbers)
    )


def where_true(condition: Array) -> Array:
    """The ascending places where it holds."""
    return (
        condition.nonzero().view(-1) if isinstance(condition, Tensor) else np.flatnonzero(condition)
    )


def ops(array: Array) -> Any:
    """Where the functions for such arrays are that NumPy and torch have under one name."""
    return torch if isinstance(array, Tensor) else np


def concatenate(parts: Sequence[Array]) -> Array:
    """One after the other."""
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else np.concatenate(parts)


def read(array: Array) -> np.ndarray:
    """What is little, in the host's memory."""
    return to_host(array).numpy() if isinstance(array, Tensor) else array


def as_bytes(array: Array) -> Array:
    """Numbers as the bytes that they are."""
    return (
        array.contiguous().view(-1).view(torch.uint8)
        if isinstance(array, Tensor)
        else array.reshape(-1).view("u1")
    )


def view_as(part: Array, dtype: str) -> Array:
    """Bytes as numbers of another type."""
    if not isinstance(part, Tensor):
        return part.view(dtype)
    kind = TYPES[dtype]
    return (part.clone() if part.storage_offset() % kind.itemsize else part).view(kind)


def zeros(like: Array, *shape: int) -> Array:
    """float32 where that one lies."""
    return (
        torch.zeros(shape, device=str(like.device))
        if isinstance(like, Tensor)
        else np.zeros(shape, np.float32)
    )


def is_true(condition: Array) -> bool:
    """A single truth, read."""
    return bool(numbers([condition])[0]) if isinstance(condition, Tensor) else bool(condition)


def divide(x: Array, number: float) -> Array:
    """x/number, each quotient rounded once."""
    return x / torch.full_like(x, number) if isinstance(x, Tensor) else x / np.float32(number)


def cast(x: Array, dtype: torch.dtype) -> Array:
    """The nearest numbers of 16 bits, as int16."""
    return same_form(x, tensor_of(x).to(dtype).view(torch.int16))


def uncast(values: Array, dtype: torch.dtype) -> Array:
    """float32 again."""
    return same_form(values, tensor_of(values).view(dtype).float())
