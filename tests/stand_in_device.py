"""A stand-in device: its tensors wrap tensors of the host and cannot be read directly.

A tensor of the device refuses to be read (`.cpu()`, `.item()`, `.numpy()`, a branch on its value),
and to be mixed with a tensor of the host. Some of these also fail on an accelerator; the others
would be mistakes. Only the functions of `ashl.device` transfer data. The arithmetic is the
host's own, so a run on it has the same bits.
"""

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm2d
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ashl import device as doors

DEVICE = "cpu:0"  # for torch the host, for ashl another device
READS = {
    getattr(Tensor, name)
    for name in (
        "cpu",
        "item",
        "numpy",
        "tolist",
        "__bool__",
        "__float__",
        "__int__",
        "__array__",
        "__index__",
    )
}
MAKES = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.arange,
    torch.tensor,
    torch.eye,
    torch.rand,
}


class There(Tensor):
    """A tensor of the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type, inner: Tensor) -> Tensor:
        there = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE),
            requires_grad=inner.requires_grad,
        )
        there.inner = inner.detach()
        return there

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        mixed = Counter(type(x) for x in tensors((args, kwargs)) if isinstance(x, There) or x.dim())
        if len(mixed) > 1:
            raise AssertionError(f"{func} mixes tensors of the host and of the device")
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a number on the device is read")
        unwrapped = tree_map_only(There, lambda x: x.inner, (args, kwargs))
        found = tree_map_only(Tensor, There, func(*unwrapped[0], **unwrapped[1]))
        return return_and_correct_aliasing(func, args, kwargs, found)


def tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, value)
    return found


def through(door: Callable) -> bool:
    """Return True if one of the active calls is this transfer function."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is door.__code__:
            return True
        frame = frame.f_back
    return False


class Guard(TorchFunctionMode):
    """Watches all that torch is asked; counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        there = any(isinstance(x, There) for x in tensors((args, kwargs)))
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            if not there and str(args[1]) == DEVICE:
                assert through(doors.to_device), "what comes to the device comes by its door"
                return (
                    There(args[0])
                    if not args[0].requires_grad
                    else There(args[0].detach()).requires_grad_()
                )
            if there and str(args[1]) == doors.HOST:
                assert through(doors.to_host), "what leaves the device leaves by its door"
                self.reads += 1
                return args[0].inner
        if there and func in READS:
            doors_or_torch = (
                doors.read_scalars,
                doors.to_host,
                BatchNorm2d.forward,
            )  # counts batches while it is evaluated
            assert any(map(through, doors_or_torch)), f"{func.__name__} of what lies on the device"
            self.reads += 1
            return func(args[0].inner, *args[1:], **kwargs)
        if there and func == Tensor.data.__set__:
            args[0].inner = args[1].inner
        found = func(*args, **kwargs)
        if func in MAKES and str(kwargs.get("device")) == DEVICE:
            return tree_map_only(Tensor, lambda x: x if isinstance(x, There) else There(x), found)
        return found


@contextmanager
def guarded() -> Generator[Guard]:
    """Allow access to the device's data only through its transfer functions."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(
        True
    )  # a module's parameters change their kind
    try:
        with Guard() as guard:
            yield guard
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
