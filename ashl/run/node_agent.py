"""One host's part of `ashl launch`: starts its ranks, passes on what they say, lets none outlive
the launcher.

It is started over ssh and talks in lines of JSON. Out goes a greeting, then what the ranks say, and
the exit code of each that ends. In comes one order with what to start, then a pulse every few
seconds and perhaps `stop` or `kill`. When the input ends, or is silent for long, the launcher is
gone, or cannot be reached: the ranks are ended as by Ctrl-C. Imports nothing heavy, so that it
answers at once.
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

GRACE_S = 15.0  # between SIGINT, on which a run finishes its records, and SIGKILL
SILENCE_S = 60.0  # without a pulse
POLL_S = 0.1
MAX_LINE = 1 << 16  # bytes of a line that are passed on at once
STOP, KILL, PULSE = b"stop", b"kill", b""  # what the launcher says after its order
STRANGE = (
    "TORCHELASTIC_",
    "OMPI_",
    "SLURM_",
    "PMI_",
)  # another starter's variables, which are not about this job


class OutputWriter:
    """What goes to the launcher, line by line, from any thread. Where nobody listens any longer,
    nothing is said.
    """

    def __init__(self, out: int) -> None:
        self.out, self.lock = out, threading.Lock()

    def write(self, **what: object) -> None:
        line = (json.dumps(what) + "\n").encode()
        with self.lock, suppress(OSError):
            while line:
                line = line[os.write(self.out, line) :]

    def forward(self, rank: int, kind: str, stream: IO[bytes]) -> None:
        for line in iter(lambda: stream.readline(MAX_LINE), b""):
            self.write(rank=rank, **{kind: line.decode(errors="replace").rstrip("\r\n")})


class CommandReader:
    """What the launcher says."""

    def __init__(self, source: int) -> None:
        self.source, self.rest, self.over = source, b"", False
        self.pending: list[bytes] = []
        self.heard_at = time.monotonic()

    def lines(self, wait_s: float) -> list[bytes]:
        """The whole lines that come in this time."""
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
        """The first line; None where the launcher goes without one."""
        while not self.launcher_gone():
            if lines := self.lines(1.0):
                first, *self.pending = lines
                return json.loads(first)
        return None

    def launcher_gone(self) -> bool:
        return self.over or time.monotonic() - self.heard_at > SILENCE_S


class Rank(NamedTuple):
    process: subprocess.Popen[bytes]
    forwarders: tuple[threading.Thread, ...]

    def ended(self) -> bool:
        """Whether it has; then nothing is left of what it started, and all that it said is passed
        on.
        """
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.end(
            signal.SIGKILL
        )  # before it is waited for: until then nobody else's group can have its number
        self.process.wait()
        for forwarder in self.forwarders:
            forwarder.join(1.0)
        return True

    def end(self, number: signal.Signals) -> None:
        """With all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def main() -> int:
    """The exit code is that of the first rank that failed; 0 where none did."""
    set_title("ashl node agent")
    signal.pthread_sigmask(
        signal.SIG_SETMASK, []
    )  # the ranks inherit it, and are to hear of SIGINT
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
    """This port, or some free one where none is asked for; None where it is taken."""
    try:
        with socket.create_server(("", asked)) as probe:
            return probe.getsockname()[1]
    except OSError:
        return None


def start(order: Mapping[str, Any], running: dict[int, Rank], writer: OutputWriter) -> None:
    """Each rank in a process group of its own."""
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
    """Until all have ended: as they like, or in order once the launcher wishes so, or is gone."""
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
    os._exit(code)  # a thread may still read what a stranger keeps open
