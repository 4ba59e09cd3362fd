"""`ashl join`: this process takes the place of a failed worker of a run.

A run publishes its join endpoint in its folder while it can be joined (`publish_join_endpoint`). A
joining process reads it, asks the controller for a place, and trains as that worker until the run
ends. If it is evicted, it asks again (`join_again`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from ashl.errors import AshlError, UsageError, load_json, unwritable_path_error
from ashl.launch.job import is_loopback
from ashl.plan.plan import Plan
from ashl.planning.device import device_of
from ashl.planning.instantiate import parts_of
from ashl.run.authenticated_store import AuthenticatedStore, Secret, StoreAddress, StoreClient
from ashl.run.control_channel import PATIENCE_S
from ashl.run.handshake import VERSIONS, versions
from ashl.run.interface import Interface, choose_interface, replace_loopback
from ashl.run.rank import RankSettings, run_rank
from ashl.runtime.records import End, Text, parse_json, validate
from ashl.runtime.rendezvous import network_id

FILE = "job.json"  # in the run folder while the run can be joined
AGAIN_S = 0.3  # seconds between two join requests of a process
AGAIN = ("-P", "-m", "ashl.cli", "join")  # arguments of Python that start this command again


class JoinEndpoint(NamedTuple):
    """The address of a run's store, and the machine and versions that a joining process must
    share with the run.
    """

    host: Text
    port: int
    secret: Text
    machine: Text  # its unique identifier
    name: Text  # its host name
    ashl: Text
    torch: Text
    python: Text


class Place(NamedTuple):
    """The settings of a rank of the run, or the reason why a process gets none."""

    settings: RankSettings = RankSettings(0, "none")
    elsewhere: tuple[Text, ...] = ()  # addresses of processes on other machines
    how: Text = ""  # the cause of the earlier incarnation's failure
    plan: str = ""  # for a process that has not composed the configuration
    refused: Text | None = None
    exit_code: int = 1  # exit code of a refused process
    may_change: bool = False  # True if a later request may be admitted

    def dumps(self) -> str:
        return json.dumps(self._asdict())

    def settings_here(self, device: str, chosen: Interface | None) -> RankSettings:
        """Return the settings in a process with this device and network interface."""
        return self.settings._replace(
            device=self.settings.device or device,
            interface=replace_loopback(chosen, self.elsewhere),
        )


def parse_place(text: str | bytes) -> Place:
    """Return the place in a text of `Place.dumps`. Raises AshlError if it is invalid."""
    return validate(Place, parse_json(text), "the answer of the run")


def join(run_dir: Path, worker: int | None, show: Callable[[str], None]) -> int:
    """Join a run as a worker until the run ends, and return the exit code.

    Args: worker, None for any failed worker; show, shows the user a line.
    Raises: UsageError if the run rejects the request, AshlError if the run fails.
    """
    endpoint = read_join_endpoint(run_dir)
    store, place = contact_run(run_dir, endpoint, worker)
    if place.refused is not None:
        raise UsageError(f"{run_dir}: {place.refused}")
    show(f"joins {run_dir} as worker {place.settings.rank}, which {place.how}")
    runtime = parts_of(Plan.from_json(place.plan)).runtime
    chosen = choose_interface(runtime.interface, endpoint.host, endpoint.port)
    settings = place.settings_here(device_of(runtime), chosen)
    end = run_rank(settings, place.plan, store, lambda end: join_again(end, run_dir, worker), show)
    if end.code:
        raise AshlError(end.why)
    show("the run is over")
    return 0


def request_place(store: AuthenticatedStore, worker: int | None, again_s: float = 0.0) -> Place:
    """Ask the controller for the place of a failed worker, and return its answer.

    Args: again_s, seconds in which a rejected request is repeated if a later one may be admitted.
    Raises: AshlError if the controller does not answer.
    """
    until_s = time.monotonic() + again_s
    while True:
        text = store.call("join", worker)
        if text is not None:
            place = parse_place(text)
            if not place.may_change or time.monotonic() > until_s:
                return place
        elif time.monotonic() > until_s:
            raise AshlError("the run did not answer a join request; try again")
        time.sleep(AGAIN_S)


def contact_run(
    run_dir: Path, endpoint: JoinEndpoint, worker: int | None
) -> tuple[StoreClient, Place]:
    """Request a place in the run of this folder; return (its store, the controller's answer).

    Raises: UsageError if the run has ended, AshlError if it does not answer within `PATIENCE_S`.
    """
    try:
        at = StoreAddress(endpoint.host, endpoint.port, Secret(bytes.fromhex(endpoint.secret)))
    except ValueError:
        raise UsageError(f"{FILE} holds no valid secret; join another run") from None
    try:
        store = StoreClient(at, 0.0)
        store.limit_answers(2 * PATIENCE_S)
        return store, request_place(store, worker)
    except (RuntimeError, OSError) as error:
        # the store of a run that is stopped, for example by Ctrl-Z, never answers
        if isinstance(error.__cause__ or error, TimeoutError):
            raise AshlError(
                f"{run_dir}: the run did not answer within {PATIENCE_S:g} s; try again"
            ) from None
        raise UsageError(f"{run_dir}: the run has ended; its store does not answer") from None


def join_again(end: End, run_dir: Path, worker: int | None) -> NoReturn:
    """Replace this process, which was evicted, by a new one that asks to join again.

    Closes all file descriptors except those of standard input, output and error.
    """
    sys.stderr.write(f"ashl: {end.why}; rejoins\n")
    sys.stderr.flush()
    os.closerange(3, 1 << 16)
    place = [] if worker is None else ["--worker", str(worker)]
    os.execv(sys.executable, [sys.executable, *AGAIN, str(run_dir), *place])


# --- the join endpoint


@contextmanager
def publish_join_endpoint(run_dir: Path, at: StoreAddress) -> Generator[None]:
    """Publish the join endpoint of a run in its folder until the context ends.

    Raises: UsageError or AshlError if the file cannot be written.
    """
    path = run_dir / FILE
    known = network_id(), platform.node(), *versions()
    endpoint = JoinEndpoint(at.host, at.port, at.secret.hex(), *known)
    try:
        path.unlink(missing_ok=True)  # left by a run whose controller was killed
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            json.dump(endpoint._asdict(), text)
    except OSError as error:
        text = f"run.dir={run_dir}: cannot write {path.name}"
        raise unwritable_path_error(text, error, "choose another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def read_join_endpoint(run_dir: Path) -> JoinEndpoint:
    """Return the join endpoint of a run.

    Raises: UsageError if this process cannot join a run in this folder.
    """
    path = run_dir / FILE
    try:
        endpoint = validate(JoinEndpoint, load_json(path.read_text(encoding="utf-8")), "the file")
    except FileNotFoundError:
        raise UsageError(f"{run_dir}: {explain_refusal(run_dir)}") from None
    except PermissionError:
        raise UsageError(
            f"{run_dir}: the run belongs to another user; only that user can join it"
        ) from None
    except (OSError, ValueError, AshlError) as error:
        raise UsageError(
            f"{path}: not a valid join endpoint ({error}); join another run"
        ) from error
    if endpoint.machine != network_id() and is_loopback(endpoint.host):
        raise UsageError(
            f"{run_dir}: the run is on the loopback of {endpoint.name}; join it on that machine"
        )
    for name, theirs, own in zip(VERSIONS, endpoint[-3:], versions(), strict=True):
        if theirs != own:
            raise UsageError(
                f"{run_dir}: the run has {name} {theirs}, and this process has {own}; install the"
                " same version"
            )
    return endpoint


def explain_refusal(run_dir: Path) -> str:
    """Explain why a run folder without a join endpoint cannot be joined."""
    if (run_dir / "summary.json").exists():
        return "the run is over"
    if not (run_dir / "config.yaml").exists():
        return "there is no run; name the folder of one that is running"
    return "this run cannot be joined: it is in virtual time, or was killed"
