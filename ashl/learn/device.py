"""The doors between the host's memory and the device's: whatever crosses, crosses here.

The vectors of a run (models, moments, gradients, what is summed of them) lie on `runtime.device` and stay there. The
host sees what it must: losses, once for each exchange; what is sent by gloo, evaluated, or encoded by a codec that
works there alone. Each way back waits until the device has come so far, so none lies inside a local step.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

HOST = "cpu"
HERE = torch.device(HOST)
Placed = TypeVar("Placed", Tensor, nn.Module)


def to_device(x: Placed, device: str) -> Placed:
    """The same on the device; itself where it is there."""
    return cast(Placed, x.to(device))


def to_host(x: Tensor) -> Tensor:
    """The same in the host's memory; itself where it is there."""
    return x.detach().to(HOST)


def at_home(x: Tensor) -> bool:
    """Whether it lies in the host's memory."""
    return x.device == HERE


def numbers(scalars: Sequence[Tensor | float]) -> list[float]:
    """What they are, read in one go; all of them lie there, or none."""
    if len(scalars) == 1:
        return [float(scalars[0])]
    there = [scalar for scalar in scalars if isinstance(scalar, Tensor)]
    return to_host(torch.stack(there)).tolist() if len(there) > 1 else [float(scalar) for scalar in scalars]


def allow_tf32(allowed: bool) -> None:
    """Whether products and convolutions of float32 on CUDA may round their factors to ten bits. torch's own default is
    that convolutions may."""
    backends: Any = torch.backends
    kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    for kind in kinds:
        kind.fp32_precision = "tf32" if allowed else "ieee"


@contextmanager
def seeded(seed: int, device: str) -> Generator[torch.Generator]:
    """Torch's own generator of the device, set to `seed` inside and put back after: layers draw from no other."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.init()
        generator = torch.cuda.default_generators[torch.cuda.current_device() if place.index is None else place.index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield generator
    finally:
        generator.set_state(state)
