"""Models and updates on their way to the monitor, through the job's key-value store, beside the records.

A vector is float32, cut into pieces that the store accepts, in a queue of its rank. Its record says how many bytes it
has and is sent after the last piece, so that whoever has the record finds all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError

PIECE = 4_000_000  # bytes; the store refuses values of more than 8 MB


def post(store: dist.Store, rank: int, vector: Tensor, between: Callable[[], None]) -> int:
    """Put a vector into the rank's queue, calling `between` ahead of each piece; returns how many bytes it has."""
    content = memoryview(vector.to("cpu", torch.float32).contiguous().numpy()).cast("B")
    for start in range(0, content.nbytes, PIECE):
        between()
        store.queue_push(queue_of(rank), bytes(content[start : start + PIECE]))
    return content.nbytes


def waiting(store: dist.Store, rank: int, nbytes: int) -> float:
    """How many vectors of this size nobody has taken out yet."""
    return store.queue_len(queue_of(rank)) / pieces_of(nbytes)


def fetch(store: dist.Store, rank: int, nbytes: int, num_params: int) -> Tensor:
    """Take a vector out. Raises AshlError for one of another size than the model's."""
    content = bytearray()
    if nbytes == 4 * num_params:
        for _ in range(pieces_of(nbytes)):
            content += store.queue_pop(queue_of(rank))
    if len(content) != 4 * num_params:
        raise AshlError(f"rank {rank} handed in {nbytes // 4} parameters where {num_params} were expected")
    return torch.frombuffer(content, dtype=torch.float32)


def pieces_of(nbytes: int) -> int:
    return -(-nbytes // PIECE)


def queue_of(rank: int) -> str:
    return f"vectors/{rank}"
