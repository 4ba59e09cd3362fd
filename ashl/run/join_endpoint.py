"""What a newcomer to a run on this machine and the run's home say to each other, and the file by which it is found.

The file has the job's secret, so it is for its owner alone, and it goes when the run does. The newcomer asks by a queue
of the job's store and is answered by another one, under a number that it has drawn: a place in the run, with all that a
rank needs to know, or why not.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ashl import __version__
from ashl.errors import AshlError, UsageError, parsed
from ashl.run.authenticated_store import Secret
from ashl.runtime.machine import machine
from ashl.runtime.records import Text, checked
from ashl.runtime.sampling import Rounds

FILE = "job.json"
JOIN_REQUESTS = "asks"  # a queue


class JoinEndpoint(NamedTuple):
    """Where the store of a run is, and what whoever joins it has to have alike."""

    host: Text
    port: int
    secret: Text
    machine: Text
    name: Text  # of the machine
    ashl: Text
    torch: Text
    python: Text


class JoinRequest(NamedTuple):
    """To take the place of a lost worker: of this one, or of any."""

    worker: int | None = None

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def loads(text: bytes) -> JoinRequest:
        return checked(JoinRequest, json.loads(text), "a question")


class JoinAnswer(NamedTuple):
    """The place that is given, in which life, or why none is."""

    refused: Text | None = None
    worker: int = 0
    incarnation: int = 0
    how: Text = ""  # the worker was lost
    plan: str = ""
    home: Text = ""
    rounds: Rounds = "none"
    device: Text = ""
    one_each: bool = False

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def loads(text: bytes) -> JoinAnswer:
        return checked(JoinAnswer, json.loads(text), "an answer")


def answer_queue(number: int) -> str:
    """The queue of the answer to whoever has drawn this number."""
    return f"answer/{number}"


def versions() -> tuple[str, str, str]:
    return __version__, torch.__version__, platform.python_version()


@contextmanager
def publish_join_endpoint(run_dir: Path, host: str, port: int, secret: Secret) -> Generator[None]:
    """While this lasts, the run may be joined. Raises AshlError where the file cannot be written."""
    path = run_dir / FILE
    endpoint = JoinEndpoint(host, port, secret.hex(), machine(), platform.node(), *versions())
    try:
        path.unlink(missing_ok=True)  # of a run whose home was killed
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            json.dump(endpoint._asdict(), text)
    except OSError as error:
        raise AshlError(f"cannot write {path} ({error.strerror}); choose another run.dir") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def read_join_endpoint(run_dir: Path) -> JoinEndpoint:
    """Of a run that goes on here. Raises UsageError where there is none that this process could join."""
    path = run_dir / FILE
    try:
        endpoint = checked(JoinEndpoint, parsed(path.read_text(encoding="utf-8")), "something")
    except FileNotFoundError:
        raise UsageError(f"{run_dir}: {why_not_joinable(run_dir)}") from None
    except PermissionError:
        raise UsageError(f"{run_dir}: the run is another user's, and only that user may join it.") from None
    except (OSError, ValueError, AshlError) as error:
        raise UsageError(f"{path} says nothing that a run would ({error}).") from error
    if endpoint.machine != machine():
        raise UsageError(f"{run_dir}: the run is on {endpoint.name}, on its loopback; join it there.")
    for name, theirs, own in zip(("ashl", "torch", "Python"), endpoint[-3:], versions(), strict=True):
        if theirs != own:
            raise UsageError(f"{run_dir}: the run has {name} {theirs}, and here is {own}; install the same on both.")
    return endpoint


def why_not_joinable(run_dir: Path) -> str:
    """Why a run without such a file cannot be joined."""
    if (run_dir / "summary.json").exists():
        return "the run is over."
    if not (run_dir / "config.yaml").exists():
        return "there is no run; name the folder of one that goes on."
    return "this run cannot be joined: it is in virtual time, was started by others, or was killed."


def newest_joinable_run(runs: Path) -> Path:
    """The folder of the run under this one that began last among those that go on. Raises UsageError where none
    does."""
    joinable: list[tuple[float, Path]] = []
    for path in runs.glob(f"**/{FILE}"):
        with suppress(OSError):
            joinable.append((path.stat().st_mtime, path.parent))
    if not joinable:
        raise UsageError(f"No run under {runs} goes on that could be joined; name the folder of one.")
    return max(joinable)[1]


def poll_until(limit_s: float) -> Generator[None]:
    """Look again and again for so long."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        yield
        time.sleep(0.02)
