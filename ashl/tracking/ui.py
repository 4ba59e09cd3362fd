"""Serve MLflow's page on the store of the runs, as a process that cannot outlive ours."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ashl.config.recorded import CONFIG, read_yaml, typed_command
from ashl.config.signals import end_with_parent
from ashl.errors import AshlError, UsageError
from ashl.tracking import jsonl
from ashl.tracking.copying import copy_missing, describe_run, find_cause
from ashl.tracking.killed import close_killed
from ashl.tracking.mlflow import (
    FOLDER,
    TRAINING,
    MlflowTracker,
    client_of,
    experiment_page,
    find_runs,
    folder_tag,
    set_environment,
    tracking_uri,
    without_credentials,
)
from ashl.tracking.recorder import SUMMARY

PATIENCE_S = 90.0  # the first start creates the schema and compiles MLflow's modules
GRACE_S = 5.0


@contextmanager
def serve(
    store: Path, port: int = 5000, host: str = "127.0.0.1", folder: Path | None = None
) -> Generator[tuple[str, subprocess.Popen]]:
    """Serve MLflow's page for the folder `store`; MLflow ends with the block, or with our process.

    Args: folder is the run or sweep to link to; None = the latest. A run that MLflow does not have
    is copied first.
    Yields: once the page answers, its link and the process.
    Raises: UsageError if the folder is neither a run nor a known sweep; AshlError if the port is
    taken, MLflow does not start, or MLFLOW_TRACKING_URI names a server, which has a page.
    """
    uri = tracking_uri(store)
    if uri.startswith(("http://", "https://")):
        raise AshlError(
            f"MLFLOW_TRACKING_URI is set: open {without_credentials(uri)}, or unset it to see"
            f" {store}."
        )
    check_port(host, port)
    set_environment(store)
    if not (store / "mlflow.db").exists():
        client_of(store)  # it and the server must not create the database at once
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    arguments = ["--backend-store-uri", uri, "--host", host, "--port", str(port), "--workers", "1"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlflow", "server", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only us; we then end MLflow in order
            preexec_fn=end_with_parent,  # MLflow then ends its own processes
        )
        try:
            try:
                link = link_of(store, address, folder)
                wait_for_answer(process, host, port, log)
            except AshlError:
                raise
            except Exception as error:  # any error of MLflow or of its store
                raise AshlError(
                    f"MLflow's page did not start ({find_cause(str(error))})."
                ) from error
            yield link, process
        finally:
            end_server(process)


def link_of(store: Path, address: str, folder: Path | None) -> str:
    """Return the page of a run, of a sweep's experiment, or of the latest experiment."""
    client = client_of(store)
    if folder is not None:
        close_killed(folder)
    if folder is not None and (folder / SUMMARY).exists():
        config, summary = read_yaml(folder, CONFIG), jsonl.read_json(folder / SUMMARY) or {}
        experiment = config.get("tracking", {}).get("experiment", "ashl")
        name = f"{summary.get('name')}-s{summary.get('seed')}"
        run = describe_run(folder, name, experiment, config, typed_command(folder))
        copy_missing(MlflowTracker(store), run)
    tags = {} if folder is None else {FOLDER: folder_tag(folder)}
    found = find_runs(client, client.search_experiments(), tags)
    if not found and folder is None:
        return address
    if not found:
        raise UsageError(
            f"{folder} is neither a run nor a sweep that MLflow has (in"
            f" {without_credentials(tracking_uri(store))}); leave it out to see what ran last."
        )
    info = found[0].info
    if folder is None or (folder / "sweep.json").exists():
        return experiment_page(address, info.experiment_id)
    return f"{address}/#/experiments/{info.experiment_id}/runs/{info.run_id}?{TRAINING}"


def check_port(host: str, port: int) -> None:
    """Raise AshlError if the address is taken: MLflow itself would report that in 60 lines."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower().partition(" (")[0]
        raise AshlError(
            f"Cannot listen on {host}:{port} ({reason}); choose another port with --port, or leave"
            " --host out."
        ) from error


def wait_for_answer(process: subprocess.Popen, host: str, port: int, log: IO[bytes]) -> None:
    """Wait until the server accepts connections. Raises: AshlError."""
    until_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < until_s:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.25)
    log.seek(0)
    reason = find_cause(log.read().decode(errors="replace")) or f"no answer within {PATIENCE_S:g} s"
    raise AshlError(f"MLflow's page did not start ({reason}).")


def end_server(process: subprocess.Popen) -> None:
    """End MLflow's processes, which are a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
