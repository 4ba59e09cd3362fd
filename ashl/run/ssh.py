"""One ssh for each host of a job: what is to be started where, and who is there."""

import queue
import subprocess
import threading
import time
import unicodedata
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from shlex import join
from typing import IO, NamedTuple

from pydantic import BaseModel, ValidationError

from ashl import __version__
from ashl.errors import AshlError, UsageError, plain
from ashl.run.hosts import Host, HostRanks
from ashl.run.interface import LOCAL
from ashl.run.node_agent import MAX_LINE

CONNECT_S = 10
GREETING_S = 60.0  # for Python to start over there, from a slow disk perhaps
UNREACHED = "does not answer"
QUIET = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
LIVELY = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Launch:
    """Where jobs run, and how they are started there."""

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]  # the command and its options; ours follow, of which ssh takes the first that it is given
    python: str
    folder: str  # the working directory of every rank
    env: Mapping[str, str]
    size: int | None = None  # how many processes, where the user says
    port: int | None = None  # of the job's store, on the first host; None = one that is free
    verbose: bool = False

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)


class Greeting(BaseModel):
    """What a node agent says first."""

    ashl: str
    port: int | None
    reached_at: str | None
    seen_from: str | None


@dataclass
class Connection:
    """One ssh."""

    share: HostRanks
    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    greeting: Greeting | None = None
    words: list[str] = field(default_factory=list)  # what ssh, or a shell over there, has said so far
    running: set[int] = field(default_factory=set)  # its ranks that have not ended
    open: bool = True
    listeners: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.share.host.name

    @property
    def last_words(self) -> str:
        return next((plain(text) for text in reversed(self.words) if text.strip()), "")

    def send(self, line: bytes) -> None:
        with suppress(OSError):  # it is gone, as its output will say
            self.stdin.write(line + b"\n")
            self.stdin.flush()


class OutputLine(NamedTuple):
    """A line of a connection's output or of its errors; None where its output ends."""

    connection: Connection
    line: str | None
    error: bool = False


Inbox = queue.SimpleQueue[OutputLine]


class InterruptRequest:
    """How often the user has asked that it end."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, number: int, frame: object) -> None:
        self.times += 1


def command(where: Launch, host: Host, remote: Sequence[str]) -> list[str]:
    """What runs a command on this host; this machine, called localhost, needs no ssh for that."""
    if host.login == LOCAL:
        return [*remote]
    return [*where.ssh, *QUIET, *LIVELY, host.login, f"exec {join(remote)}"]


@contextmanager
def connect_nodes(where: Launch, shares: Sequence[HostRanks]) -> Generator[tuple[list[Connection], Inbox]]:
    """An agent on every host, over ssh, in process groups of their own: a Ctrl-C here is not for them."""
    inbox: Inbox = queue.SimpleQueue()
    connections: list[Connection] = []
    try:
        for share in shares:
            port = [] if where.port is None or connections else [str(where.port)]
            agent = [where.python, "-P", "-m", "ashl.run.node_agent", *port]
            argv = command(where, share.host, agent)
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                option = "--python" if share.host.login == LOCAL else "--ssh"
                raise UsageError(f"{option} {argv[0]}: {error.strerror}.") from error
            assert process.stdin is not None
            connections.append(connection := Connection(share, process, process.stdin))
            for stream, error in ((process.stdout, False), (process.stderr, True)):
                listener = threading.Thread(target=read_stream, args=(connection, stream, error, inbox), daemon=True)
                connection.listeners.append(listener)
                listener.start()
        yield connections, inbox
    finally:
        for connection in connections:
            with suppress(OSError):
                connection.stdin.close()  # on which an agent ends what it has started
        end = time.monotonic() + 1.0
        for connection in connections:
            process = connection.process  # by SIGTERM an agent on this machine ends its ranks before it goes
            for more_firmly, until in ((process.terminate, end), (process.kill, end + 4.0)):
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    more_firmly()
            process.wait()
            for listener in connection.listeners:
                listener.join(1.0)


def read_stream(connection: Connection, stream: IO[bytes], error: bool, inbox: Inbox) -> None:
    with stream:
        for line in iter(lambda: stream.readline(8 * MAX_LINE), b""):
            inbox.put(OutputLine(connection, line.decode(errors="replace").rstrip("\r\n"), error))
    if not error:
        for other in connection.listeners:
            if other is not threading.current_thread() and other.is_alive():
                other.join(1.0)  # why it has ended is said on the other stream
        inbox.put(OutputLine(connection, None))


def next_line(inbox: Inbox, wait_s: float) -> OutputLine | None:
    try:
        return inbox.get(timeout=wait_s)
    except queue.Empty:
        return None


def await_greetings(
    connections: Sequence[Connection], inbox: Inbox, interrupt: InterruptRequest, python: str
) -> list[Greeting]:
    """What each has said as it began; none where the user does not wait for it. Raises AshlError naming all hosts that
    cannot take part."""
    end = time.monotonic() + GREETING_S
    while any(c.open and c.greeting is None for c in connections) and time.monotonic() < end:
        if interrupt.times:
            return []
        if (found := next_line(inbox, 0.1)) is None:
            continue
        connection, line, error = found
        if line is None:
            connection.open = False
        elif error:
            connection.words.append(line)
        else:
            try:
                connection.greeting = Greeting.model_validate_json(line)
            except ValidationError:  # what a login shell says to everybody
                connection.words.append(line)
    faults: dict[str, list[str]] = {}
    for connection in connections:
        if text := explain_fault(connection, python):
            faults.setdefault(text, []).append(connection.name)
    if faults:
        raise AshlError("; ".join(f"{', '.join(names)} {text}" for text, names in faults.items()) + ".")
    return [connection.greeting for connection in connections if connection.greeting]


def explain_fault(connection: Connection, python: str) -> str:
    """Why this host cannot take part, as said of it; "" where it can."""
    if (greeting := connection.greeting) is not None:
        same = greeting.ashl == __version__
        return "" if same else f"has ashl {plain(greeting.ashl)}, and this machine {__version__}: install the same"
    words = connection.last_words
    if connection.open:
        return f"{UNREACHED} for {GREETING_S:g} s" + (f" ({words})" if words else "")
    code = connection.process.wait()
    if "No module named" in words:
        return f"has no ashl in {python}; install it there, or name another Python by --python"
    if code == 127:
        return f"has no {python}; name the Python that has ashl there by --python"
    if code == 255:
        return UNREACHED + (f" ({words})" if words else "") + "; `ssh HOST true` has to work without a question"
    return f"cannot start its ranks: {python} ended with exit code {code}" + (f" ({words})" if words else "")


def printable(text: str) -> str:
    """Text from elsewhere, without what would command a terminal."""
    return text if text.isprintable() else "".join(c for c in text if c == "\t" or unicodedata.category(c)[0] != "C")
