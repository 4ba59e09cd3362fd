"""Models and updates on their way to the monitor, through the job's key-value store, beside the records.

A vector is float32, cut into pieces that the store accepts, in a queue of its rank and kind. Its record says how many
bytes it has and is sent after the last piece, so that whoever has the record finds all of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ashl.errors import AshlError
from ashl.learn.staging import in_host
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.runtime.records import NAMES, Snapshot, UpdateShown

PIECE = 4_000_000  # bytes; the store refuses values of more than 8 MB


def upload_vector(
    store: AuthenticatedStore,
    queue: str,
    record: Snapshot | UpdateShown,
    vector: Tensor,
    before_piece: Callable[[], None],
) -> int:
    """Put a record's vector into this queue, calling `between` ahead of each piece; returns how many bytes it has."""
    with in_host(vector.to(torch.float32)) as here:
        content = memoryview(here.contiguous().numpy()).cast("B")
        for start in range(0, content.nbytes, PIECE):
            before_piece()
            store.push(queue, record.rank, content[start : start + PIECE])
        return content.nbytes


def receive_vector(
    store: AuthenticatedStore, queue: str, record: Snapshot | UpdateShown, num_params: int
) -> Tensor | None:
    """Take a record's vector out, if it has one. Raises AshlError for one of another size than the model's."""
    if record.nbytes is None:
        return None
    content = bytearray()
    if record.nbytes == 4 * num_params:
        for _ in range(num_pieces(record.nbytes)):
            item = store.pop(queue)
            content += item[1] if item else b""
    if len(content) != 4 * num_params:
        size = (record.nbytes if record.nbytes != 4 * num_params else len(content)) // 4
        raise AshlError(f"rank {record.rank} handed in {size} parameters where {num_params} were expected")
    return torch.frombuffer(content, dtype=torch.float32)


def num_pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE)


def vector_queue(record: Snapshot | UpdateShown, incarnation: int) -> str:
    """Each life of a rank has its own: what one that was cut short has left behind is nobody's."""
    return f"{NAMES[type(record)]}/{record.rank}/{incarnation}"
