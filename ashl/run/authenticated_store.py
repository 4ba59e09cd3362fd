"""The job's key-value store: it accepts only processes that know the job's secret.

`StoreServer` serves the store in the process of the controller. The ranks use it by a
`StoreClient`, which torch and gloo use as any store of theirs. The server also passes requests with
a name of their own to the controller (`StoreServer.handlers`), in the thread of the client's
connection. The last request of that thread is `closed`.

A connection begins with a challenge in both directions (keyed BLAKE2b, RFC 7693): the store and the
client prove that they know the secret, which is not sent. The store closes any other connection
before it reads a request, and logs the address once. So a client without the secret can neither
read, write nor delete a value, nor use up memory. A message is a list in JSON, followed by the
bytes in it; nothing is unpickled.

A call over a broken network never returns by itself. So a client waits for an answer in ticks of
`TICK_S`, and raises an error after too many. If this process is paused, a tick is longer and still
counts once, so that the pause does not use up the limit.

Limits: messages after the challenge are neither encrypted nor signed.
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
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch.distributed as dist

from ashl.errors import UsageError
from ashl.launch.environment import PORTS, SECRET

logger = logging.getLogger(__name__)

HASH_BYTES = 32
CHALLENGE_S = 5.0  # seconds in which a client has to prove that it knows the secret
PENDING = 64  # connections at a time within the challenge; more are closed at once
RETRY_S = 0.1
TICK_S = 0.1  # seconds between two looks for an answer
POLL_S = 0.005  # seconds between two looks for a key
SIZE = struct.Struct(">Q")  # bytes of a message
BYTES = "$bytes"  # {BYTES: length} in the JSON list stands for bytes that follow it
CLIENT, SERVER = b"client", b"server"
# operations of torch's store
OPERATIONS = {"set", "get", "compare_set", "add", "check", "delete_key"}
NEVER_S = float("inf")


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


def derive_port(secret: Secret) -> int:
    """Return the port that the processes of a job derive from its secret."""
    digest = hashlib.blake2b(b"port", key=secret, digest_size=8).digest()
    return PORTS[int.from_bytes(digest) % len(PORTS)]


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
            with NamedTemporaryFile("w", dir=path.parent) as new:  # only its owner reads it
                new.write(secrets.token_hex(32))
                new.flush()
                with suppress(FileExistsError):  # another process of this job was faster
                    os.link(new.name, path)
        status = path.stat()
        if status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise UsageError(f"{path}: other users can read it; run `chmod 600 {path}`")
        return path.read_text()
    except OSError as error:
        raise UsageError(
            f"{path}: no secret can be kept there ({error.strerror}); set {SECRET} to the same"
            " random word for all processes of the job"
        ) from error


class Connection:
    """A connection to a process that answers within `limit_s` seconds, else TimeoutError."""

    def __init__(self, link: socket.socket, limit_s: float) -> None:
        link.settimeout(TICK_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_s = limit_s
        self._link = link

    def close(self) -> None:
        self._link.close()

    __del__ = close

    def _move_bytes(self, operation: Callable[[memoryview], int], content: memoryview) -> None:
        """Repeat an operation of the socket until it has moved all bytes of `content`."""
        ticks = 0
        while content:
            try:
                count = operation(content)
            except TimeoutError:
                ticks += 1
                if ticks * TICK_S > self.limit_s:
                    raise TimeoutError(f"did not answer for {self.limit_s:g} s") from None
                continue
            if not count:
                raise ConnectionError("the connection was closed")
            content = content[count:]
            if count > HASH_BYTES:  # a challenge that arrives byte by byte gets no more time
                ticks = 0

    def send(self, content: bytes | memoryview) -> None:
        self._move_bytes(self._link.send, memoryview(content))

    def receive(self, nbytes: int) -> bytearray:
        """Return exactly this number of bytes."""
        content = bytearray(nbytes)
        self._move_bytes(self._link.recv_into, memoryview(content))
        return content

    def send_message(self, *values: Any) -> None:
        """Send plain values as a list in JSON, then the bytes among them (`BYTES`)."""
        contents: list[bytes | memoryview] = []

        def replace_bytes(content: bytes | memoryview) -> dict[str, int]:
            contents.append(content)
            return {BYTES: len(content)}

        header = json.dumps(values, default=replace_bytes).encode()
        self.send(SIZE.pack(len(header)) + header)
        for content in contents:
            self.send(content)

    def receive_message(self) -> list[Any]:
        """Return the next message. Its lengths are trusted: call it after the challenge."""

        def read_bytes(value: dict[str, Any]) -> object:
            return bytes(self.receive(value[BYTES])) if BYTES in value else value

        header = self.receive(*SIZE.unpack(self.receive(SIZE.size)))
        return json.loads(header, object_hook=read_bytes)

    def authenticate(self, secret: Secret, roles: tuple[bytes, bytes]) -> None:
        """Prove that this end knows the secret, and check that the other end does. The client
        proves it first.

        Args: roles, of this end and of the other, CLIENT or SERVER.
        Raises: ConnectionError if the other end does not know the secret.
        """
        own = os.urandom(HASH_BYTES)
        self.send(own)
        nonces = {roles[0]: own, roles[1]: bytes(self.receive(HASH_BYTES))}

        def proof(role: bytes) -> bytes:
            text = role + nonces[CLIENT] + nonces[SERVER]
            return hashlib.blake2b(text, key=secret, digest_size=HASH_BYTES).digest()

        if roles[0] == CLIENT:
            self.send(proof(CLIENT))
        if not hmac.compare_digest(self.receive(HASH_BYTES), proof(roles[1])):
            raise ConnectionError("another program uses the port")
        if roles[0] == SERVER:
            self.send(proof(SERVER))


class StoreServer:
    """Serves the store in the process of the controller, with a thread for each connection."""

    def __init__(self, secret: Secret, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen at this address; "" = all addresses. Raises OSError if the port is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = host or "127.0.0.1", self._listener.getsockname()[1]
        self.refused = set[str]()  # addresses of clients without the secret
        # answers to requests that are no operation of torch's store, by name
        self.handlers = dict[str, Callable[..., Any]]()
        self._secret = secret
        self._closed = False
        self._store = dist.HashStore()
        self._lock = threading.Lock()
        self._pending = threading.BoundedSemaphore(PENDING)
        threading.Thread(target=self._accept, daemon=True, name="store").start()

    def close(self) -> None:
        """Accept no more connections; open ones are served until their clients close them."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)

    def call(self, name: str, *args: Any) -> Any:
        """Run an operation of torch's store, or the handler of a request; None if it has none."""
        if name in OPERATIONS:
            return getattr(self._store, name)(*args)
        handler = self.handlers.get(name)
        return None if handler is None else handler(*args)

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, address = self._listener.accept()
            except OSError:  # too many open files; the next one may succeed
                time.sleep(RETRY_S)
                continue
            if not self._pending.acquire(blocking=False):
                link.close()
                continue
            serve = threading.Thread(target=self._serve, args=(link, address[0]), daemon=True)
            try:
                serve.start()
            except RuntimeError:  # the system allows no further thread; the client tries again
                self._pending.release()
                link.close()
        self._listener.close()

    def _serve(self, link: socket.socket, address: str) -> None:
        """Serve a connection until it is closed, and tell the controller of its end."""
        try:
            self._answer_requests(link, address)
        finally:
            self.call("closed")

    def _answer_requests(self, link: socket.socket, address: str) -> None:
        """Answer the requests of a client that knows the secret until its connection is closed. A
        message that is no request closes it, too.
        """
        not_answered = OSError, ValueError, TypeError
        with closing(Connection(link, CHALLENGE_S)) as connection, suppress(*not_answered):
            try:
                connection.authenticate(self._secret, (SERVER, CLIENT))
            except OSError:
                with self._lock:
                    if address not in self.refused:
                        logger.warning("refuses %s, which does not know the job's secret", address)
                    self.refused.add(address)
                raise
            finally:
                self._pending.release()
            connection.limit_s = NEVER_S
            while True:
                name, *args = connection.receive_message()
                try:
                    answer = self.call(name, *args), None
                except Exception as error:  # for example a key that is not there in time
                    answer = None, str(error) or type(error).__name__
                connection.send_message(*answer)


class StoreClient(dist.Store):
    """The store as torch and gloo use it, with requests to the controller. All threads of this
    process may use it.
    """

    def __init__(self, address: StoreAddress, connect_s: float) -> None:
        """Connect, again and again for `connect_s` seconds.

        Raises: OSError if no store with this secret answers.
        """
        super().__init__()
        self._at = address
        self.host, self.port, secret = address
        self._lock = threading.Lock()
        self._failure: str | None = None  # why no call succeeds any more
        end_s = time.monotonic() + connect_s
        while True:
            try:
                link = socket.create_connection((self.host, self.port), timeout=CHALLENGE_S)
                self._connection = Connection(link, CHALLENGE_S)
                return self._connection.authenticate(secret, (CLIENT, SERVER))
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(RETRY_S)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        self._connection.close()

    def limit_answers(self, limit_s: float) -> None:
        """Set the longest wait for an answer, in seconds for which this process is awake."""
        self._connection.limit_s = limit_s

    def call_apart(self, name: str, *args: Any) -> Any:
        """Return the answer to a request by a connection of its own, so that no report waits until
        a large answer has arrived.

        Raises: as `call`; OSError if the store cannot be reached.
        """
        with closing(StoreClient(self._at, CHALLENGE_S)) as apart:
            apart.limit_answers(self._connection.limit_s)
            return apart.call(name, *args)

    def call(self, name: str, *args: Any) -> Any:
        """Return the answer to a request; None if the controller accepts none of this name.

        Raises: RuntimeError if the request or the store fails.
        """
        try:
            with self._lock:
                self._connection.send_message(name, *args)
                answer, problem = self._connection.receive_message()
        except OSError as error:
            self._connection.close()
            how = f"has ended ({error})"
            if isinstance(error, TimeoutError):
                how = f"{error} (runtime.wait_timeout_s)"
            self._failure = self._failure or f"the job's store at {self.address} {how}"
            raise RuntimeError(self._failure) from error
        if problem is not None:
            raise RuntimeError(problem)
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self.call("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self.call("get", key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, without a limit by default. Raises RuntimeError if one is missing after
        the timeout.
        """
        limit_s = NEVER_S if timeout is None else timeout.total_seconds()
        end_s = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > end_s:
                raise RuntimeError(f"the job's store has no {', '.join(keys)} after {limit_s:g} s")
            time.sleep(POLL_S)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self.call("compare_set", key, expected_value, desired_value)

    def add(self, key: str, value: int) -> int:
        return self.call("add", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self.call("check", [*keys])

    def delete_key(self, key: str) -> bool:
        return self.call("delete_key", key)
