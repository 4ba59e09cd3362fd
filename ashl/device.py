"""Move tensors between host memory and the device, and seed the generators of both.

The vectors of a run (models, moments, gradients and their sums) are on `runtime.device` and stay
there. The host reads losses, once for each exchange, and vectors that gloo sends, that an
evaluation uses, or that a codec encodes on the host only. Each copy to the host waits for the
device, so none happens inside a local step.
"""

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

HOST = "cpu"
HERE = torch.device(HOST)
Placed = TypeVar("Placed", Tensor, nn.Module)


def to_device(x: Placed, device: str) -> Placed:
    """Return the tensor or module on the device; itself if it is there."""
    return cast(Placed, x.to(device))


def to_host(x: Tensor) -> Tensor:
    """Return the tensor in host memory; itself if it is there."""
    return x.detach().to(HOST)


def is_on_host(x: Tensor) -> bool:
    """Return True if the tensor is in host memory."""
    return x.device == HERE


def read_scalars(scalars: Sequence[Tensor | float]) -> list[float]:
    """Return the values of scalars with one read; all of them are on one device, or none is a
    tensor.
    """
    if len(scalars) == 1:
        return [float(scalars[0])]
    there = [scalar for scalar in scalars if isinstance(scalar, Tensor)]
    return (
        to_host(torch.stack(there)).tolist()
        if len(there) > 1
        else [float(scalar) for scalar in scalars]
    )


def allow_tf32(allowed: bool) -> None:
    """Allow products and convolutions of float32 on CUDA to round their factors to ten bits, or
    forbid it.

    By torch's default, convolutions may.
    """
    backends: Any = torch.backends
    kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    for kind in kinds:
        kind.fp32_precision = "tf32" if allowed else "ieee"


# Replaces numpy's own generator while it is seeded: swapping takes a hundredth of the time of
# saving and restoring 624 words.
SEEDED = np.random.MT19937(0)
NUMPY: Any = np.random  # its stubs lack the functions that swap
WORD = 2**32  # seeds of numpy's global generator are below this
_claimed = False  # True while a run owns the global generators and no seeded code runs


@contextmanager
def claim_generators(device: str) -> Generator[None]:
    """Save the states of the global generators once for a whole run, and restore them at its end.

    Inside, an outermost `seed_generators` does not restore them: that costs 15 µs, which counts in
    a step of a small model.
    """
    global _claimed
    with seed_generators(0, device):
        _claimed = True
        try:
            yield
        finally:
            _claimed = False


@contextmanager
def seed_generators(seed: int, device: str) -> Generator[torch.Generator]:
    """Seed each generator from which code draws without naming one; restore all of them at the end.

    These are torch's of the CPU and of `device`, numpy's, and that of Python's `random`. Yields
    torch's generator of `device`. This is the only place that seeds them.
    """
    global _claimed
    generator = generator_of(device)
    own = [torch.default_generator] if device == HOST else [torch.default_generator, generator]
    if _claimed:
        _claimed = False  # code that this code calls restores the states
        try:
            seed_all(own, seed)
            yield generator
        finally:
            _claimed = True
        return
    states = [(one, one.get_state()) for one in own]
    numpys, pythons = NUMPY.get_bit_generator(), random.getstate()
    NUMPY.set_bit_generator(np.random.MT19937(0) if numpys is SEEDED else SEEDED)
    try:
        seed_all(own, seed)
        yield generator
    finally:
        for one, state in states:
            one.set_state(state)
        NUMPY.set_bit_generator(numpys)
        random.setstate(pythons)


def seed_all(generators: Sequence[torch.Generator], seed: int) -> None:
    """Seed these generators of torch, numpy's global one, and that of Python's `random`."""
    for generator in generators:
        generator.manual_seed(seed)
    np.random.seed(seed % WORD)
    random.seed(seed)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators of torch (on the CPU), numpy and Python, for a
    comparison.
    """
    _, words, position, *_ = NUMPY.get_state(legacy=True)
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        words.tobytes(),
        position,
        random.getstate(),
    )


def generator_of(device: str) -> torch.Generator:
    """Return torch's own generator of a device: layers draw from no other."""
    place = torch.device(device)
    if place.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[
        torch.cuda.current_device() if place.index is None else place.index
    ]
