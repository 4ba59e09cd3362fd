"""Models, updates, module states and parts of checkpoints on their way through the job's store,
beside the records.

Bytes are cut into pieces that the store accepts, in a queue of their own for each rank, incarnation
and kind. The number of bytes is published after the last piece, so that a reader of the number
finds all pieces. Models are float32. Parts of checkpoints travel only where processes share no
folder: from a rank to the controller, and back on resume.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.errors import AshlError
from ashl.learn.staging import in_host
from ashl.run.authenticated_store import AuthenticatedStore
from ashl.run.checkpoints import Checkpoint
from ashl.runtime import rank_checkpoint
from ashl.runtime.plain_state import from_plain, to_plain
from ashl.runtime.records import NAMES, CheckpointPartSaved, ModuleState, Snapshot, UpdateShown

PIECE = 4_000_000  # bytes; the store refuses values of more than 8 MB


def upload_vector(
    store: AuthenticatedStore,
    queue: str,
    record: Snapshot | UpdateShown,
    vector: Tensor,
    before_piece: Callable[[], None],
) -> int:
    """Put a record's vector into this queue, calling `between` ahead of each piece; returns how
    many bytes it has.
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
    """Take a record's vector out, if it has one. Raises AshlError for one of another size than the
    model's.
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
            f"rank {record.rank} handed in {size} parameters where {num_params} were expected"
        )
    return torch.frombuffer(content, dtype=torch.float32)


def num_pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE)


def vector_queue(record: Snapshot | UpdateShown, incarnation: int) -> str:
    """Each life of a rank has its own: what one that was cut short has left behind is nobody's."""
    return f"{NAMES[type(record)]}/{record.rank}/{incarnation}"


POLL_S = 0.02


def checkpoint_queue(rank: int, number: int) -> str:
    """The queue of a rank's part of this checkpoint, on its way to home."""
    return f"kept/{rank}/{number}"


def restore_queue(rank: int) -> str:
    """The queue of what a rank goes on from, and the key that says how long it is."""
    return f"given/{rank}"


def push_bytes(store: AuthenticatedStore, queue: str, rank: int, content: bytes) -> None:
    for start in range(0, len(content), PIECE):
        store.push(queue, rank, memoryview(content)[start : start + PIECE])


def pop_bytes(store: AuthenticatedStore, queue: str, nbytes: int) -> bytes:
    """Raises AshlError where not all of it is there."""
    items = [store.pop(queue) for _ in range(num_pieces(nbytes))]
    content = b"".join(item[1] for item in items if item)
    if len(content) != nbytes:
        raise AshlError(f"{len(content):,} of the {nbytes:,} bytes of a checkpoint came ({queue})")
    return content


def upload_checkpoint_part(
    store: AuthenticatedStore, rank: int, number: int, document: dict[str, Any]
) -> tuple[str, int]:
    """At a rank, to home: returns the hash of its part of a checkpoint, and how many bytes
    it has.
    """
    file = io.BytesIO()
    torch.save(document, file)
    content = file.getvalue()
    push_bytes(store, checkpoint_queue(rank, number), rank, content)
    return rank_checkpoint.hash_bytes(content), len(content)


def state_queue(rank: int, incarnation: int) -> str:
    """The queue of what a worker's module keeps beside its parameters."""
    return f"state/{rank}/{incarnation}"


def upload_state(store: AuthenticatedStore, rank: int, incarnation: int, state: Any) -> int:
    """At a worker, to home; returns how many bytes it has."""
    file = io.BytesIO()
    torch.save(to_plain(state), file)
    push_bytes(store, state_queue(rank, incarnation), rank, file.getvalue())
    return len(file.getvalue())


def receive_state(store: AuthenticatedStore, record: ModuleState, incarnation: int) -> Tensor:
    """At home: the bytes that such a record comes with."""
    return torch.frombuffer(
        bytearray(pop_bytes(store, state_queue(record.rank, incarnation), record.nbytes)),
        dtype=torch.uint8,
    )


def decode_state(content: Tensor, packages: tuple[str, ...]) -> Any:
    """The state that these bytes are. Nothing is unpickled."""
    return from_plain(
        torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True), packages
    )


def receive_checkpoint_part(
    store: AuthenticatedStore, record: CheckpointPartSaved
) -> Tensor | None:
    """At home: the bytes that such a record comes with; None where the rank has written them
    itself.
    """
    if record.nbytes == 0:
        return None
    content = pop_bytes(store, checkpoint_queue(record.rank, record.number), record.nbytes)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def send_restore_point(store: AuthenticatedStore, rank: int, saved: Checkpoint | None) -> None:
    """At home, to a rank: its part of the checkpoint that the run goes on from, if it does."""
    content = rank_checkpoint.part_of(saved.folder, rank).read_bytes() if saved else b""
    push_bytes(store, restore_queue(rank), rank, content)
    since_ns = saved.time_ns if saved else 0
    store.set(restore_queue(rank), json.dumps({"since_ns": since_ns, "nbytes": len(content)}))


class RestorePoint(NamedTuple):
    """What a rank goes on from, and when on the run's clock; no file = from the beginning."""

    since_ns: int
    file: Path | io.BytesIO | None


def await_restore_point(
    store: AuthenticatedStore, rank: int, over: Callable[[], bool]
) -> RestorePoint | None:
    """At a rank: waits for it; None where the run is over before that."""
    while not store.check([restore_queue(rank)]):
        if over():
            return None
        time.sleep(POLL_S)
    line = json.loads(store.get(restore_queue(rank)))
    content = pop_bytes(store, restore_queue(rank), line["nbytes"])
    return RestorePoint(line["since_ns"], io.BytesIO(content) if content else None)
