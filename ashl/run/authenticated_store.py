"""The job's key-value store, authenticated: messages of clients outside the job have no effect.

Any client that reaches the port of a torch store can list, read, set and delete its keys. So all
processes of a job share a secret. Every value carries a keyed hash (BLAKE2b, RFC 7693) over its key
and its content. In a queue the hash also covers the sender and the sender's message number, so a
copied message is rejected. A message with a wrong hash is skipped and counted in a queue; under a
key it raises an error at the reader.

Limits: the store lists keys, and any client can delete them. That can stop a job while it starts
(gloo finds its peers by keys), not later: while a job runs, all messages use queues. The store does
not list queues, and their names follow from the secret, so other clients cannot read from them.
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
from ashl.launch.job import SECRET

HASH_BYTES = 16
FROM = struct.Struct(">iQ")  # header of a message: its sender and the sender's message number


class Secret(bytes):
    """The secret of a job. Its `repr` does not show it, so that no log or error does."""

    def __repr__(self) -> str:
        return "a secret"


def new_secret() -> Secret:
    """Return a random secret of 32 bytes."""
    return Secret(os.urandom(32))


def shared_secret(*known: object) -> Secret:
    """Return the secret of a job of another launcher, from ASHL_JOB_SECRET and values that all of
    its processes know.

    Limits: without ASHL_JOB_SECRET it keeps two jobs apart, but a client that knows the same values
    (for example the store's port) can compute it.
    """
    text = f"given {os.environ.get(SECRET, '')} known {' '.join(map(str, known))}"
    return Secret(hashlib.blake2b(text.encode(), digest_size=32, person=b"ashl job").digest())


class AuthenticatedStore(dist.Store):
    """A client of the job's store that signs what it writes and verifies what it reads.

    gloo uses it for its rendezvous, too. Each thread needs a client of its own (`another`).
    Limits: torch's `queue_len` and `list_keys` are not offered, because they block all threads
    while the store does not answer.
    """

    def __init__(self, store: dist.Store, secret: Secret) -> None:
        super().__init__()
        self._secret = secret
        self._base: Any = store  # Any: torch's stubs have neither `clone` nor values of bytes
        self._store: Any = dist.PrefixStore(self._hash(b"prefix").hex(), store)
        self.refused = 0  # rejected messages in queues
        self._sent: dict[str, int] = {}  # number of the latest message, by queue
        self._received: dict[tuple[str, int], int] = {}  # the same by queue and sender

    @property
    def address(self) -> str:
        return f"{self._base.host}:{self._base.port}"

    def another(self) -> AuthenticatedStore:
        """Return a client of the same store, with a connection of its own, for another thread."""
        return AuthenticatedStore(self._base.clone(), self._secret)

    # --- values under keys

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value. Raises AshlError if it was not written by this
        job.
        """
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
        """Append a message to a queue. Its number grows with the clock, also after a restart."""
        number = self._sent[queue] = max(self._sent.get(queue, 0) + 1, time.time_ns())
        head = FROM.pack(sender, number)
        self._store.queue_push(
            self._name(queue),
            self._hash(b"item", queue.encode(), head, content) + head + bytes(content),
        )

    def pop(self, queue: str) -> tuple[int, bytes] | None:
        """Return the sender and the content of a queue's next message; None if the queue is empty.

        Messages that are not of this job, and copies, are skipped and counted in `refused`.
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

    # --- signatures

    def _sign(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return self._hash(b"key", key.encode(), content) + content

    def _verify(self, key: str, value: bytes) -> bytes:
        content = value[HASH_BYTES:]
        if not hmac.compare_digest(value[:HASH_BYTES], self._hash(b"key", key.encode(), content)):
            raise AshlError(
                "the job's store holds a value that no process of this job has written; give the"
                " job another port"
            )
        return content

    def _hash(self, *parts: bytes | memoryview) -> bytes:
        """Return the keyed hash of the parts and their lengths."""
        state = hashlib.blake2b(key=self._secret, digest_size=HASH_BYTES)
        for part in parts:
            state.update(struct.pack(">Q", len(part)))
            state.update(part)
        return state.digest()
