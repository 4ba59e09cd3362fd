"""Transfer of models, updates, module states and parts of checkpoints through the job's store.

Bytes are split into pieces that the store accepts, in a queue of their own for each rank,
incarnation and kind. A record with the number of bytes follows the last piece, so its reader finds
all pieces. Models are float32. Parts of checkpoints are transferred only if the processes share no
folder: from a rank to the controller (upload), and back on resume (restore point).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.errors import AshlError
from ashl.learn.staging import in_host
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.run.checkpoints import Checkpoint
from ashl.runtime import rank_checkpoint
from ashl.runtime.plain_state import decode, encode, to_plain
from ashl.runtime.records import NAMES, CheckpointPartSaved, ModuleState, Snapshot, UpdateShown

PIECE = 4_000_000  # bytes; the store refuses values of more than 8 MB


def upload_vector(
    store: AuthenticatedStore,
    queue: str,
    record: Snapshot | UpdateShown,
    vector: Tensor,
    before_piece: Callable[[], None],
) -> int:
    """Upload a record's vector, and return its number of bytes.

    Args: vector [d], converted to float32; before_piece, called before each piece.
    """
    with in_host(vector.to(torch.float32)) as here:
        content = memoryview(here.contiguous().numpy()).cast("B")
        for start in range(0, content.nbytes, PIECE):
            before_piece()
            store.push(queue, record.rank, content[start : start + PIECE])
        return content.nbytes


def receive_vector(
    store: AuthenticatedStore, queue: str, record: Snapshot | UpdateShown, num_params: int
) -> Tensor | None:
    """Return the vector of a record, float32 [num_params]; None if it has none.

    Raises: AshlError if its size differs from the model's.
    """
    if record.nbytes is None:
        return None
    content = bytearray()
    if record.nbytes == 4 * num_params:
        for _ in range(num_pieces(record.nbytes)):
            item = store.pop(queue)
            content += item[1] if item else b""
    if len(content) != 4 * num_params:
        size = (record.nbytes if record.nbytes != 4 * num_params else len(content)) // 4
        raise AshlError(
            f"rank {record.rank} sent {size} parameters, and {num_params} were expected"
        )
    return torch.frombuffer(content, dtype=torch.float32)


def num_pieces(nbytes: int) -> int:
    """Return ⌈nbytes / PIECE⌉."""
    return -(-nbytes // PIECE)


def vector_queue(record: Snapshot | UpdateShown, incarnation: int) -> str:
    """Return the queue of an incarnation's models or updates.

    A failed incarnation may leave an incomplete vector, so each has its own queue.
    """
    return f"{NAMES[type(record)]}/{record.rank}/{incarnation}"


POLL_S = 0.02  # seconds between two reads of the store while a rank waits


def checkpoint_queue(rank: int, number: int) -> str:
    """Return the queue in which a rank uploads its part of a checkpoint."""
    return f"kept/{rank}/{number}"


def restore_queue(rank: int) -> str:
    """Return the queue of a rank's restore point, which is also the key of its number of bytes."""
    return f"given/{rank}"


def push_bytes(store: AuthenticatedStore, queue: str, rank: int, content: bytes) -> None:
    """Put bytes into a queue, piece by piece."""
    for start in range(0, len(content), PIECE):
        store.push(queue, rank, memoryview(content)[start : start + PIECE])


def pop_bytes(store: AuthenticatedStore, queue: str, nbytes: int) -> bytes:
    """Take `nbytes` bytes out of a queue. Raises AshlError if some are missing."""
    items = [store.pop(queue) for _ in range(num_pieces(nbytes))]
    content = b"".join(item[1] for item in items if item)
    if len(content) != nbytes:
        raise AshlError(f"only {len(content):,} of {nbytes:,} bytes are in the queue {queue}")
    return content


def upload_checkpoint_part(
    store: AuthenticatedStore, rank: int, number: int, content: bytes
) -> tuple[str, int]:
    """Upload a rank's part of a checkpoint to the controller; return its hash and number of
    bytes.
    """
    push_bytes(store, checkpoint_queue(rank, number), rank, content)
    return rank_checkpoint.hash_bytes(content), len(content)


def state_queue(rank: int, incarnation: int) -> str:
    """Return the queue of a worker's module states: the values that forward passes change."""
    return f"state/{rank}/{incarnation}"


def upload_state(store: AuthenticatedStore, rank: int, incarnation: int, state: Any) -> int:
    """Upload a worker's module state to the controller; return its number of bytes."""
    content = encode(to_plain(state))
    push_bytes(store, state_queue(rank, incarnation), rank, content)
    return len(content)


def receive_state(store: AuthenticatedStore, record: ModuleState, incarnation: int) -> Tensor:
    """Return at the controller the module state of a record, as bytes (uint8)."""
    return torch.frombuffer(
        bytearray(pop_bytes(store, state_queue(record.rank, incarnation), record.nbytes)),
        dtype=torch.uint8,
    )


def decode_state(content: Tensor, packages: tuple[str, ...]) -> Any:
    """Decode a module state from uint8 bytes.

    Args: packages, of whose classes the state may hold objects.
    Limits: nothing is unpickled.
    """
    return decode(content.numpy().tobytes(), packages)


def receive_checkpoint_part(
    store: AuthenticatedStore, record: CheckpointPartSaved
) -> Tensor | None:
    """Return at the controller a rank's part of a checkpoint, as bytes (uint8); None if the rank
    has written the file itself.
    """
    if record.nbytes == 0:
        return None
    content = pop_bytes(store, checkpoint_queue(record.rank, record.number), record.nbytes)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class RestorePoint(NamedTuple):
    """The point that a rank starts from."""

    since_ns: int = 0  # run time
    number: int = 0  # number of the next checkpoint
    content: bytes = b""  # its part of the checkpoint; empty = the beginning of the run


def restore_point_of(saved: Checkpoint | None, rank: int) -> RestorePoint:
    """Return the point from which a rank resumes, or the beginning."""
    if saved is None:
        return RestorePoint()
    content = rank_checkpoint.part_of(saved.folder, rank).read_bytes()
    return RestorePoint(saved.time_ns, saved.number + 1, content)


def send_restore_point(store: AuthenticatedStore, rank: int, point: RestorePoint) -> None:
    """Send a rank its restore point."""
    push_bytes(store, restore_queue(rank), rank, point.content)
    line = {"since_ns": point.since_ns, "number": point.number, "nbytes": len(point.content)}
    store.set(restore_queue(rank), json.dumps(line))


def await_restore_point(
    store: AuthenticatedStore, rank: int, over: Callable[[], bool]
) -> RestorePoint | None:
    """Wait at a rank for its restore point; return None if the run is `over` before."""
    while not store.check([restore_queue(rank)]):
        if over():
            return None
        time.sleep(POLL_S)
    line = json.loads(store.get(restore_queue(rank)))
    content = pop_bytes(store, restore_queue(rank), line["nbytes"])
    return RestorePoint(line["since_ns"], line["number"], content)
