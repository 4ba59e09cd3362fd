"""Serve MLflow's page on the store of the runs, as a process that cannot outlive ours."""

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from ashl.errors import AshlError, UsageError
from ashl.tracking import store as stores

READY = "ready"
PATIENCE_S = 90  # seconds; the first start creates the schema and compiles MLflow's modules
GRACE_S = 5


@dataclass(frozen=True)
class Server:
    """A running page, as a context manager.

    MLflow ends with the block, at the latest with our process.
    """

    address: str  # address on which it listens, `http://host:port`
    link: str  # page to open: by default the saved view of the latest experiment
    process: subprocess.Popen

    def wait(self) -> int:
        """Wait until the server ends, and return its exit code. Ctrl-C raises KeyboardInterrupt."""
        return self.process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()  # the guard process then ends MLflow
        self.process.stdout.close()
        self.process.wait()


def serve(
    store: Path, port: int = 5000, host: str = "127.0.0.1", folder: Path | None = None
) -> Server:
    """Serve MLflow's page for the folder `store`, and return once it answers.

    Args: folder is the run or sweep to link to; None = the latest.
    Raises: UsageError if the store does not have that folder; AshlError if the port is taken,
    MLflow does not start, or MLFLOW_TRACKING_URI names a server, which has a page of its own.
    """
    uri = stores.tracking_uri(store)
    if urlsplit(uri).scheme in ("http", "https"):
        raise AshlError(
            f"MLFLOW_TRACKING_URI is set: open {stores.public(uri)}, or unset it to see {store}."
        )
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    wanted = None if folder is None else stores.page_of(uri, folder.absolute(), address)
    if folder is not None and wanted is None:
        raise UsageError(
            f"MLflow knows nothing of {folder} (in {stores.public(uri)}); leave it out to see what"
            " ran last."
        )
    # MLflow itself would report a taken port in 60 lines, or another server would answer.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            local = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            fix = (
                "leave --host out to listen on this machine"
                if local
                else "choose another port with --port"
            )
            raise AshlError(f"Cannot listen on {host}:{port} ({reason}); {fix}.") from error
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ashl.tracking.ui", uri, host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=stores.ENVIRONMENT | os.environ,
        start_new_session=True,  # Ctrl-C reaches only us; we then end MLflow in order
    )
    server = Server(address, wanted or stores.latest(uri, address) or address, process)
    complete = False
    try:
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        complete = answer == READY
    finally:
        if not complete:
            server.__exit__()
    if not complete:
        raise AshlError(f"MLflow's page did not start ({answer or 'it was ended'}).")
    return server


def main() -> None:
    """Run MLflow's server until standard input closes or it ends: `python -m ashl.tracking.ui URI
    HOST PORT`.

    Prints READY on standard output once the server answers, or else the reason why it does not.
    """
    uri, host, port = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` runs
    arguments = ["--backend-store-uri", uri, "--host", host, "--port", port, "--workers", "1"]
    command = [sys.executable, "-P", "-m", "mlflow", "server", *arguments]
    server = None
    with tempfile.TemporaryFile() as log:
        try:
            with stores.schema_lock(uri):
                server = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                ready = _comes_up(server, host, int(port))
            print(READY if ready else _complaint(log), flush=True)
            while ready and server.poll() is None and not _closed(within_s=1.0):
                pass
        finally:
            if server is not None:
                _end(server)


def _comes_up(server: subprocess.Popen, host: str, port: int) -> bool:
    for _ in range(PATIENCE_S * 4):
        if server.poll() is not None or _closed(within_s=0.25):
            return False
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return True
    return False


def _closed(within_s: float) -> bool:
    """Return True if standard input closes within this time: the parent has closed it or died."""
    return bool(select.select([sys.stdin], [], [], within_s)[0])


def _complaint(log: IO[bytes]) -> str:
    log.seek(0)
    return stores.gist(log.read().decode(errors="replace")) or f"no answer within {PATIENCE_S} s"


def _end(server: subprocess.Popen) -> None:
    """End MLflow's processes, which are a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)


if __name__ == "__main__":
    main()
