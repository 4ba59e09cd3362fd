"""The node agent of `ashl launch`: it starts the ranks of one host and forwards their output.

The launcher starts it over ssh; both write lines. The agent writes JSON: a greeting, then the
ranks' output, and the exit code of each rank that ends. The launcher writes one order in JSON with
the ranks to start, then a sign of life every few seconds, and perhaps `stop` or `kill`. If the
input ends, or is silent for `SILENCE_S`, the launcher has failed or cannot be reached: the agent
ends its ranks as Ctrl-C does, so that none outlives the launcher. The module imports no heavy
library, so that it answers at once.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, NamedTuple

from ashl import __version__
from ashl.run.process_setup import set_title

GRACE_S = 15.0  # seconds between SIGINT, at which a run finishes its records, and SIGKILL
SILENCE_S = 60.0  # seconds without a sign of life after which the launcher has failed
POLL_S = 0.1
MAX_LINE = 1 << 16  # bytes of a line that are forwarded at once
STOP, KILL, PULSE = b"stop", b"kill", b""  # the launcher's lines after its order
# Prefixes of variables of other launchers, which do not describe this job.
STRANGE = ("TORCHELASTIC_", "OMPI_", "SLURM_", "PMI_")


class OutputWriter:
    """Writes lines of JSON to the launcher, from any thread; no effect once the launcher has ended.

    Args: out, a file descriptor.
    """

    def __init__(self, out: int) -> None:
        self.out = out
        self.lock = threading.Lock()

    def write(self, **what: object) -> None:
        """Write one line with these fields."""
        line = (json.dumps(what) + "\n").encode()
        with self.lock, suppress(OSError):
            while line:
                line = line[os.write(self.out, line) :]

    def forward(self, rank: int, kind: str, stream: IO[bytes]) -> None:
        """Forward the lines of a rank's stream until its end. Args: kind, `out` or `err`."""
        for line in iter(lambda: stream.readline(MAX_LINE), b""):
            self.write(rank=rank, **{kind: line.decode(errors="replace").rstrip("\r\n")})


class CommandReader:
    """Reads the launcher's lines. Args: source, a file descriptor."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.rest = b""  # an incomplete line
        self.over = False  # True once the input has ended
        self.pending: list[bytes] = []  # lines after the order
        self.heard_at = time.monotonic()  # time of the latest input

    def lines(self, wait_s: float) -> list[bytes]:
        """Return the complete lines that arrive within `wait_s`."""
        found, self.pending = self.pending, []
        if self.over:
            time.sleep(wait_s)
        elif select.select([self.source], [], [], wait_s)[0]:
            data = os.read(self.source, MAX_LINE)
            self.heard_at, self.over = time.monotonic(), not data
            *lines, self.rest = (self.rest + data).split(b"\n")
            found += lines
        return found

    def read_order(self) -> dict[str, Any] | None:
        """Return the launcher's order, its first line; None if the launcher ends before it."""
        while not self.launcher_gone():
            if lines := self.lines(1.0):
                first, *self.pending = lines
                return json.loads(first)
        return None

    def launcher_gone(self) -> bool:
        return self.over or time.monotonic() - self.heard_at > SILENCE_S


class Rank(NamedTuple):
    """The process of a rank, and the threads that forward its output."""

    process: subprocess.Popen[bytes]
    forwarders: tuple[threading.Thread, ...]

    def ended(self) -> bool:
        """Return True if the rank has ended; then its child processes have ended, too, and its
        output is forwarded.
        """
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # before the process is waited for: until then no other process group can have its number
        self.end(signal.SIGKILL)
        self.process.wait()
        for forwarder in self.forwarders:
            forwarder.join(1.0)
        return True

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the rank and its child processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def main() -> int:
    """Run the ranks of the launcher's order, and return the exit code of the first that failed, or
    0.
    """
    set_title("ashl node agent")
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the ranks inherit it, and SIGINT must end them
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    writer, reader = OutputWriter(sys.stdout.fileno()), CommandReader(sys.stdin.fileno())
    where = os.environ.get("SSH_CONNECTION", "").split()
    seen_from, reached_at = (where[0], where[2]) if len(where) == 4 else (None, None)
    port = free_port(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    writer.write(ashl=__version__, port=port, reached_at=reached_at, seen_from=seen_from)
    order = reader.read_order()
    running: dict[int, Rank] = {}
    try:
        if order is not None:
            start(order, running, writer)
        return supervise_ranks(running, reader, writer)
    except OSError as error:
        writer.write(failed=f"{error.strerror}: {error.filename}")
        return 1
    finally:
        for rank in running.values():
            rank.end(signal.SIGKILL)


def exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def free_port(asked: int) -> int | None:
    """Return the port `asked` for, or any free one for 0; None if it is taken."""
    try:
        with socket.create_server(("", asked)) as probe:
            return probe.getsockname()[1]
    except OSError:
        return None


def start(order: Mapping[str, Any], running: dict[int, Rank], writer: OutputWriter) -> None:
    """Start the ranks of an order, each in a process group of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(STRANGE)}
    for rank, env in order["ranks"]:
        process = subprocess.Popen(
            [sys.executable, *order["argv"]],
            cwd=order["folder"],
            env=inherited
            | order["env"]
            | env
            | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        streams = (("out", process.stdout), ("err", process.stderr))
        forwarders = tuple(
            threading.Thread(target=writer.forward, args=(rank, *s), daemon=True) for s in streams
        )
        running[rank] = Rank(process, forwarders)
        for forwarder in forwarders:
            forwarder.start()


def supervise_ranks(running: dict[int, Rank], reader: CommandReader, writer: OutputWriter) -> int:
    """Wait until all ranks have ended, and return the exit code of the first that failed, or 0.

    If the launcher asks for it or has failed, the ranks get SIGINT, and after `GRACE_S` SIGKILL.
    """
    first_failure, ending_at = 0, None
    while running:
        lines = reader.lines(POLL_S)
        if ending_at is None and (STOP in lines or reader.launcher_gone()):
            ending_at = time.monotonic()
            for rank in running.values():
                rank.end(signal.SIGINT)
        if KILL in lines or (ending_at is not None and time.monotonic() - ending_at > GRACE_S):
            for rank in running.values():
                rank.end(signal.SIGKILL)
        for number in [number for number, rank in running.items() if rank.ended()]:
            code = running.pop(number).process.returncode
            first_failure = first_failure or code
            writer.write(rank=number, code=code)
    return first_failure if first_failure >= 0 else 128 - first_failure


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may still read a stream that a process outside the ranks holds open
