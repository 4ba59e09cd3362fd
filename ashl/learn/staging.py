"""Copy vectors between CUDA memory and host memory while the device computes.

Rule: copies use a stream of their own and pinned host memory, which the device accesses directly.
To the host, that stream waits for the work that the device has received so far. In both directions
the calling thread waits for its copy, and the device never waits. Torch keeps pinned memory that is
free again, and gives it to the next copy.

Limits: on devices other than CUDA, tensors are moved by `ashl.device`.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ashl.device import to_host


@cache
def side_stream(device: str) -> torch.cuda.Stream:
    """Return the stream of the copies of a CUDA device in this process."""
    return torch.cuda.Stream(device)


def copy_to_host(x: Tensor) -> Tensor:
    """Return x in host memory, itself if it is there; it may only be read."""
    if not x.is_cuda:
        return to_host(x)
    device = str(x.device)
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        here.copy_(x.detach(), non_blocking=True)
        side.record_event().synchronize()
    return here


def fill_buffer(nbytes: int, device: str, fill: Callable[[Tensor], object]) -> Tensor:
    """Return uint8 [nbytes] with the content that `fill` writes in host memory.

    The result is on the device if that is CUDA.
    """
    on_cuda = torch.device(device).type == "cuda"
    flat = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
    fill(flat)
    if not on_cuda:
        return flat
    side = side_stream(device)
    # The memory belongs to the side stream, so that no other kernel still writes to it.
    with torch.cuda.stream(side):
        x = flat.to(device, non_blocking=True)
        side.record_event().synchronize()
    x.record_stream(torch.cuda.current_stream(device))
    return x
