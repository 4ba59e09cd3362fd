"""A job's store as its own processes see it: what strangers write there is never acted on.

Whoever reaches the port of a torch store may list, read, set and delete its keys. So all processes
of a job share a secret, and every value carries a keyed hash (BLAKE2b, RFC 7693) over where it lies
and what it says; in a queue also over who sent it and how many that sender has sent before, so that
nothing counts twice. What carries another hash is not of this job: in a queue it is passed over and
counted, under a key it is an error of whoever asks for it.

Queues are not listed, and their names follow from the secret: a stranger cannot even take anything
out of one. Keys are, and what is deleted there may stop a job while it starts (gloo meets by keys),
and no more: all that is said while it runs goes through queues.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ashl.errors import AshlError

# the variable that a job's processes share it by, where they are started by others
SECRET = "ASHL_JOB_SECRET"
HASH_BYTES = 16
FROM = struct.Struct(">iQ")  # of an item: its sender and the sender's number for it


class Secret(bytes):
    """Kept out of what is printed of whoever holds it."""

    def __repr__(self) -> str:
        return "a secret"


def new_secret() -> Secret:
    return Secret(os.urandom(32))


def shared_secret(*known: object) -> Secret:
    """Of a job that others have started: from the variable ASHL_JOB_SECRET, if it is set, and from
    what all of them know (the store's port, say), which alone keeps two jobs apart and nobody out
    who knows it, too.
    """
    text = f"given {os.environ.get(SECRET, '')} known {' '.join(map(str, known))}"
    return Secret(hashlib.blake2b(text.encode(), digest_size=32, person=b"ashl job").digest())


class AuthenticatedStore(dist.Store):
    """The job's store under its secret; gloo meets through it, too. One per thread, as of any
    client.

    Every call lets other threads go on while the store does not answer; torch's `queue_len` and
    `list_keys` do not.
    """

    def __init__(self, store: dist.Store, secret: Secret) -> None:
        super().__init__()
        self._secret = secret
        self._base: Any = store  # torch's stubs know neither `clone` nor values of bytes
        self._store: Any = dist.PrefixStore(self._hash(b"prefix").hex(), store)
        self.refused = 0  # items in queues that were not of this job
        self._sent: dict[str, int] = {}
        self._received: dict[tuple[str, int], int] = {}

    @property
    def address(self) -> str:
        return f"{self._base.host}:{self._base.port}"

    def another(self) -> AuthenticatedStore:
        """The same store for another thread, by a connection of its own."""
        return AuthenticatedStore(self._base.clone(), self._secret)

    # --- values under keys

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        """Waits for it. Raises AshlError for a value that is not of this job."""
        return self._verify(key, self._store.get(key))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        expected = self._sign(key, expected_value) if expected_value else ""
        desired = self._sign(key, desired_value)
        return self._verify(key, self._store.compare_set(key, expected, desired))

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    # --- queues

    def push(self, queue: str, sender: int, content: bytes | memoryview) -> None:
        number = self._sent[queue] = max(self._sent.get(queue, 0) + 1, time.time_ns())
        head = FROM.pack(sender, number)
        self._store.queue_push(
            self._name(queue),
            self._hash(b"item", queue.encode(), head, content) + head + bytes(content),
        )

    def pop(self, queue: str) -> tuple[int, bytes] | None:
        """The next item and its sender; None where there is none. What is not of this job is passed
        over.
        """
        name, start = self._name(queue), HASH_BYTES + FROM.size
        while True:
            try:
                item = self._store.queue_pop(name, False)
            except dist.QueueEmptyError:
                return None
            head, content = item[HASH_BYTES:start], memoryview(item)[start:]
            right = self._hash(b"item", queue.encode(), head, content)
            if len(head) == FROM.size and hmac.compare_digest(right, item[:HASH_BYTES]):
                sender, number = FROM.unpack(head)
                if number > self._received.get((queue, sender), 0):
                    self._received[queue, sender] = number
                    return sender, bytes(content)
            self.refused += 1

    def _name(self, queue: str) -> str:
        return self._hash(b"queue", queue.encode()).hex()

    # --- the seal

    def _sign(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return self._hash(b"key", key.encode(), content) + content

    def _verify(self, key: str, value: bytes) -> bytes:
        content = value[HASH_BYTES:]
        if not hmac.compare_digest(value[:HASH_BYTES], self._hash(b"key", key.encode(), content)):
            raise AshlError(
                "the job's store holds what no process of this job has written; give the job"
                " another port"
            )
        return content

    def _hash(self, *parts: bytes | memoryview) -> bytes:
        """Keyed, over the parts and where each one ends."""
        state = hashlib.blake2b(key=self._secret, digest_size=HASH_BYTES)
        for part in parts:
            state.update(struct.pack(">Q", len(part)))
            state.update(part)
        return state.digest()
