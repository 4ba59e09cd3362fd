"""Operations on arrays: NumPy arrays in host memory, or torch tensors on a device.

A codec that works on both uses the operators that both share: slices, comparisons, + − ×, `len`,
`reshape`. Beyond these it uses the functions of this module and the kernels of this package. For
tensors, the kernels call `device_kernels`.
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
    """Return a floating-point vector as a float32 array.

    In host memory it is a NumPy array, a view of x if possible; on a device it is a tensor.
    """
    x = x.detach().to(torch.float32).contiguous()
    return x.numpy() if at_home(x) else x


def bytes_of(x: Tensor) -> Array:
    """Return a tensor of bytes as an array, without a copy."""
    return x.numpy() if at_home(x) else x


def tensor_of(array: Array) -> Tensor:
    """Return an array as a tensor, without a copy."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def same_form(like: Array, tensor: Tensor) -> Array:
    """Return a tensor as an array of the same kind as `like`."""
    return tensor if isinstance(like, Tensor) else tensor.numpy()


def beside(like: Array, array: Array) -> Array:
    """Return a host array on the device of `like`; an array that is there already is returned as it
    is.
    """
    here = isinstance(array, np.ndarray) and isinstance(like, Tensor)
    return to_device(torch.from_numpy(array), str(like.device)) if here else array


def to_device_index(like: Array, places: np.ndarray) -> Array:
    """Return indices from the host as an index of `like`."""
    return beside(like, places.astype(np.int64)) if isinstance(like, Tensor) else places


def as_index(numbers: Array) -> Array:
    """Return integers as int64, on the same device."""
    return numbers.long() if isinstance(numbers, Tensor) else numbers.astype(np.int64)


def wide(array: Array) -> Array:
    """Return the array in float64."""
    return array.to(torch.float64) if isinstance(array, Tensor) else array.astype(np.float64)


def look_up(table: np.ndarray, numbers: Array) -> Array:
    """Return the entries of a short host table at these indices, on the device of the indices."""
    if isinstance(numbers, Tensor):
        return beside(numbers, table)[numbers.long()]
    return table.take(numbers)


def where_true(condition: Array) -> Array:
    """Return the ascending indices of the elements that are true."""
    if isinstance(condition, Tensor):
        return condition.nonzero().view(-1)
    return np.flatnonzero(condition)


def ops(array: Array) -> Any:
    """Return numpy or torch, for functions that both have under one name."""
    return torch if isinstance(array, Tensor) else np


def concatenate(parts: Sequence[Array]) -> Array:
    """Return the parts as one array."""
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else np.concatenate(parts)


def read(array: Array) -> np.ndarray:
    """Return a small array in host memory."""
    return to_host(array).numpy() if isinstance(array, Tensor) else array


def as_bytes(array: Array) -> Array:
    """Return the bytes of an array, uint8."""
    if isinstance(array, Tensor):
        return array.contiguous().view(-1).view(torch.uint8)
    return array.reshape(-1).view("u1")


def view_as(part: Array, dtype: str) -> Array:
    """Return bytes as numbers of a type."""
    if not isinstance(part, Tensor):
        return part.view(dtype)
    kind = TYPES[dtype]
    return (part.clone() if part.storage_offset() % kind.itemsize else part).view(kind)


def zeros(like: Array, *shape: int) -> Array:
    """Return zeros, float32, on the device of `like`."""
    if isinstance(like, Tensor):
        return torch.zeros(shape, device=str(like.device))
    return np.zeros(shape, np.float32)


def is_true(condition: Array) -> bool:
    """Return the value of a condition of one element as bool."""
    return bool(numbers([condition])[0]) if isinstance(condition, Tensor) else bool(condition)


def divide(x: Array, number: float) -> Array:
    """Return x/number, rounded once per element."""
    return x / torch.full_like(x, number) if isinstance(x, Tensor) else x / np.float32(number)


def cast(x: Array, dtype: torch.dtype) -> Array:
    """Return the nearest 16-bit floating-point numbers, with their bits as int16."""
    return same_form(x, tensor_of(x).to(dtype).view(torch.int16))


def uncast(values: Array, dtype: torch.dtype) -> Array:
    """Return float32 numbers from the int16 bits of 16-bit floating-point numbers."""
    return same_form(values, tensor_of(values).view(dtype).float())
