"""The job's key-value store: it accepts only processes that know the job's secret.

The store is in the process of the controller. It also passes requests with a name of their own to
the controller (`StoreServer.handlers`), in the thread of the client's connection. The last request
of that thread is `closed`.

A connection begins with a challenge in both directions (keyed BLAKE2b, RFC 7693): the store and the
client prove that they know the secret, which is not sent. The store closes any other connection
before it reads a request, and logs the address once. So a client without the secret can neither
read, write nor delete a value, nor use up memory. A message is a list in JSON, followed by the
bytes in it; nothing is unpickled.

Limits: what follows the challenge is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ashl.errors import UsageError
from ashl.launch.job import SECRET

logger = logging.getLogger(__name__)

HASH_BYTES = 32
CHALLENGE_S = 5.0  # seconds in which a client has to prove that it knows the secret
PENDING = 64  # connections that have not proved it yet; more are closed at once
RETRY_S = 0.1
POLL_S = 0.005  # seconds between two looks for a key
SIZE = struct.Struct(">Q")  # bytes of a message
CLIENT, SERVER = b"client", b"server"
# operations of torch's store
OPERATIONS = {"set", "get", "compare_set", "add", "check", "delete_key", "num_keys"}


class Secret(bytes):
    """The secret of a job. Its `repr` does not show it, so that no log or error does."""

    def __repr__(self) -> str:
        return "a secret"


class StoreAddress(NamedTuple):
    """Where a job's store is, and the secret that it asks for."""

    host: str
    port: int
    secret: Secret


def new_secret() -> Secret:
    """Return a random secret of 32 bytes."""
    return Secret(os.urandom(32))


def shared_secret(*known: object) -> Secret:
    """Return the secret of a job of another launcher: from ASHL_JOB_SECRET, else from the user's
    file, and from values that all of its processes know.
    """
    text = f"given {os.environ.get(SECRET) or user_secret()} known {' '.join(map(str, known))}"
    return Secret(hashlib.blake2b(text.encode(), digest_size=32, person=b"ashl job").digest())


def secret_file() -> Path:
    """Return the path of the user's file with a secret."""
    return Path.home() / ".ashl" / "secret"


def user_secret() -> str:
    """Return the user's secret, from a file of mode 600 in the home folder, made when missing.

    Raises: UsageError if it cannot be made or read, or if other users can read it.
    """
    path = secret_file()
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            new = path.with_name(secrets.token_hex(8))
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another process of this job was faster
                os.link(new, path)
            new.unlink()
        status = path.stat()
        if status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise UsageError(f"{path}: other users can read it; run `chmod 600 {path}`")
        return path.read_text()
    except OSError as error:
        raise UsageError(
            f"{path}: no secret can be kept there ({error.strerror}); set {SECRET} to the same"
            " random word for all processes of the job"
        ) from error


def receive(connection: socket.socket, nbytes: int) -> bytearray:
    """Return exactly this number of bytes. Raises ConnectionError if the other end closes."""
    content = bytearray(nbytes)
    view = memoryview(content)
    while view:
        if not (count := connection.recv_into(view)):
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return content


def send_message(connection: socket.socket, *values: Any) -> None:
    """Send plain values. Bytes follow the others, which have their number in their place."""
    contents = [value for value in values if isinstance(value, bytes | memoryview)]
    header = json.dumps(
        [
            {"nbytes": len(value)} if isinstance(value, bytes | memoryview) else value
            for value in values
        ]
    ).encode()
    connection.sendall(SIZE.pack(len(header)) + header)
    for content in contents:
        connection.sendall(content)


def receive_message(connection: socket.socket) -> list[Any]:
    """Return the next message of a process that has proved that it knows the secret."""
    values = json.loads(receive(connection, *SIZE.unpack(receive(connection, SIZE.size))))
    return [
        bytes(receive(connection, value["nbytes"])) if isinstance(value, dict) else value
        for value in values
    ]


def prove(connection: socket.socket, secret: Secret, roles: tuple[bytes, bytes]) -> bool:
    """Prove that this end knows the secret, and return True if the other end has proved it.

    Args: roles, of this end and of the other. The client proves it first.
    """
    connection.settimeout(CHALLENGE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own = os.urandom(HASH_BYTES)
    connection.sendall(own)
    nonces = {roles[0]: own, roles[1]: bytes(receive(connection, HASH_BYTES))}

    def proof(role: bytes) -> bytes:
        text = role + nonces[CLIENT] + nonces[SERVER]
        return hashlib.blake2b(text, key=secret, digest_size=HASH_BYTES).digest()

    if roles[0] == CLIENT:
        connection.sendall(proof(CLIENT))
    if not hmac.compare_digest(receive(connection, HASH_BYTES), proof(roles[1])):
        return False
    if roles[0] == SERVER:
        connection.sendall(proof(SERVER))
    connection.settimeout(None)
    return True


class StoreServer:
    """The store, in the process of the controller. It serves each connection by a thread."""

    def __init__(self, secret: Secret, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen at this address; "" = all addresses. Raises OSError if the port is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = host or "127.0.0.1", self._listener.getsockname()[1]
        self.refused: Counter[str] = Counter()  # connections without the secret, by address
        self._secret, self._closed = secret, False
        self._store = dist.HashStore()
        # requests that are no operation of torch's store, by name
        self.handlers = dict[str, Callable[..., Any]]()
        self._pending = threading.BoundedSemaphore(PENDING)
        threading.Thread(target=self._accept, daemon=True, name="store").start()

    def close(self) -> None:
        """Accept no more connections; open ones are served until their clients close them."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)

    def call(self, name: str, *args: Any) -> Any:
        """Run an operation of torch's store, or a request; None while no handler accepts it."""
        if name in OPERATIONS:
            return getattr(self._store, name)(*args)
        handler = self.handlers.get(name)
        return None if handler is None else handler(*args)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # too many open files; the next one may succeed
                time.sleep(RETRY_S)
                continue
            if self._pending.acquire(blocking=False):
                serve = threading.Thread(target=self._serve, args=(connection, address[0]))
                serve.daemon = True
                serve.start()
            else:
                connection.close()
        self._listener.close()

    def _serve(self, connection: socket.socket, address: str) -> None:
        """Serve a connection until it is closed, if its client knows the secret."""
        with connection, suppress(OSError, ValueError):
            known = False
            try:
                known = prove(connection, self._secret, (SERVER, CLIENT))
            finally:
                self._pending.release()
                if not known:
                    self.refused[address] += 1
                    if self.refused[address] == 1:
                        logger.warning("refuses %s, which does not know the job's secret", address)
            while known:
                name, *args = receive_message(connection)
                try:
                    answer = self.call(name, *args), None
                except (RuntimeError, ValueError) as error:  # a key that is not there in time
                    answer = None, str(error)
                send_message(connection, *answer)
        self.call("closed")


class StoreClient:
    """The connection of a process to a store. All of its threads may use it."""

    def __init__(self, address: StoreAddress, timeout_s: float) -> None:
        """Connect, again and again for `timeout_s` seconds.

        Raises: OSError if no store with this secret answers.
        """
        self.host, self.port, secret = address
        self.refused = Counter[str]()
        self._lock = threading.Lock()
        self._connection: Any = None
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                where = self.host, self.port
                self._connection = socket.create_connection(where, timeout=CHALLENGE_S)
                if prove(self._connection, secret, (CLIENT, SERVER)):
                    return
                raise ConnectionError("another program uses the port")
            except OSError:
                if self._connection is not None:
                    self._connection.close()
                if time.monotonic() > end_s:
                    raise
                time.sleep(RETRY_S)

    def __del__(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def limit_answers(self, limit_s: float | None) -> None:
        """Set the longest wait for an answer of the store; None = no limit."""
        self._connection.settimeout(limit_s)

    def call(self, name: str, *args: Any) -> Any:
        """Request an operation of the store. Raises RuntimeError if it fails, or the store ends."""
        try:
            with self._lock:
                send_message(self._connection, name, *args)
                answer, problem = receive_message(self._connection)
        except OSError as error:
            raise RuntimeError(f"the job's store has ended ({error})") from error
        if problem is not None:
            raise RuntimeError(problem)
        return answer


class AuthenticatedStore(dist.Store):
    """The job's store as torch and gloo use it, with requests to the controller.

    Args: where its calls go.
    """

    def __init__(self, at: StoreServer | StoreClient) -> None:
        super().__init__()
        self._at = at
        self._timeout_s = float("inf")

    @property
    def address(self) -> str:
        return f"{self._at.host}:{self._at.port}"

    @property
    def port(self) -> int:
        return self._at.port

    @property
    def refused(self) -> int:
        """Return how many connections without the secret the store has refused, at its server."""
        return self._at.refused.total()

    def set(self, key: str, value: str | bytes) -> None:
        self._at.call("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._at.call("get", key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. Raises RuntimeError if one is missing after the timeout."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        end_s = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > end_s:
                raise RuntimeError(f"the job's store has not {', '.join(keys)} after {limit_s:g} s")
            time.sleep(POLL_S)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._at.call("compare_set", key, expected_value, desired_value)

    def add(self, key: str, value: int) -> int:
        return self._at.call("add", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._at.call("check", [*keys])

    def delete_key(self, key: str) -> bool:
        return self._at.call("delete_key", key)

    def num_keys(self) -> int:
        return self._at.call("num_keys")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def call(self, name: str, *args: Any) -> Any:
        """Return the controller's answer to a request; None if it accepts none of this name."""
        return self._at.call(name, *args)

    def handle(self, **handlers: Callable[..., Any]) -> None:
        """Answer requests by these functions from now on; for the process of the store alone."""
        assert isinstance(self._at, StoreServer)
        self._at.handlers |= handlers
