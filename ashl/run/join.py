"""`ashl join`: this process takes the place of a failed worker of a run.

A run publishes the address of its store in its folder while it can be joined
(`publish_join_endpoint`). A joining process reads it, asks the controller for a place
(`ashl.run.handshake`), and trains as that worker until the run ends.
"""

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ashl.errors import AshlError, UsageError, load_json, unwritable_path_error
from ashl.plan.plan import Plan
from ashl.planning.device import device_of
from ashl.planning.instantiate import parts_of
from ashl.run.authenticated_store import Secret, StoreAddress, StoreClient
from ashl.run.control_channel import PATIENCE_S
from ashl.run.handshake import Place, make_hello, request_place
from ashl.run.interface import choose_interface
from ashl.run.rank import run_rank
from ashl.runtime.records import validate

# in the run folder while the run can be joined: address and secret of the run's store
FILE = "job.json"


def join(run_dir: Path, worker: int | None, show: Callable[[str], None]) -> int:
    """Join a run as a worker until the run ends, and return the exit code, which is 0.

    Args: worker, None for any failed worker; show, shows the user a line.
    Raises: UsageError if the folder has no run that can be joined, or if the run refuses the
    request. AshlError if the run does not answer, or if it fails.
    """
    endpoint = read_join_endpoint(run_dir)
    store, place = contact_run(run_dir, endpoint, worker)
    if place.refused is not None:
        raise UsageError(f"{run_dir}: {place.refused}")
    show(f"joins {run_dir} as worker {place.settings.rank}, which {place.failure}")
    runtime = parts_of(Plan.from_json(place.plan)).runtime
    chosen = choose_interface(runtime.interface, endpoint.host)
    settings = place.settings_here(device_of(runtime), chosen)
    end = run_rank(settings, place.plan, store, show)
    if end.code:
        raise AshlError(end.why)
    show("the run is over")
    return 0


def contact_run(
    run_dir: Path, endpoint: StoreAddress, worker: int | None
) -> tuple[StoreClient, Place]:
    """Request a place in the run of this folder.

    Args: worker, None for any failed worker.
    Returns: (client of the run's store, the controller's answer: a place or a refusal).
    Raises: UsageError if the run's store cannot be reached; AshlError if it does not answer within
    `PATIENCE_S`.
    """
    place = None
    try:
        store = StoreClient(endpoint, 0.0)
        store.limit_answers(2 * PATIENCE_S)
        place = request_place(store, make_hello(worker=worker))
    except (RuntimeError, OSError) as error:
        # the store of a run that is stopped, for example by Ctrl-Z, never answers
        if not isinstance(error.__cause__ or error, TimeoutError):
            raise UsageError(
                f"{run_dir}: the run has ended, or is on the loopback of another machine; its store"
                " does not answer"
            ) from None
    if place is None:
        raise AshlError(f"{run_dir}: the run did not answer within {PATIENCE_S:g} s; try again")
    return store, place


# --- the join endpoint


@contextmanager
def publish_join_endpoint(run_dir: Path, at: StoreAddress) -> Generator[None]:
    """Publish the address and the secret of a run's store in its folder until the context ends.
    Only the user of this process can read the file.

    Raises: UsageError or AshlError if the file cannot be written.
    """
    path = run_dir / FILE
    try:
        path.unlink(missing_ok=True)  # left by a run whose controller was killed
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            json.dump([at.host, at.port, at.secret.hex()], text)
    except OSError as error:
        text = f"run.dir={run_dir}: cannot write {path.name}"
        raise unwritable_path_error(text, error, "choose another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def read_join_endpoint(run_dir: Path) -> StoreAddress:
    """Return the address and the secret of a run's store.

    Raises: UsageError if the file is missing, belongs to another user, or is not valid.
    """
    path = run_dir / FILE
    try:
        fields = validate(
            tuple[str, int, str], load_json(path.read_text(encoding="utf-8")), "the file"
        )
        return StoreAddress(fields[0], fields[1], Secret(bytes.fromhex(fields[2])))
    except PermissionError:
        raise UsageError(
            f"{run_dir}: the run belongs to another user; only that user can join it"
        ) from None
    except OSError:
        raise UsageError(f"{run_dir}: {explain_refusal(run_dir)}") from None
    except (ValueError, AshlError) as error:
        raise UsageError(
            f"{path}: not a valid join endpoint ({error}); join another run"
        ) from error


def explain_refusal(run_dir: Path) -> str:
    """Explain why a run folder without a join endpoint cannot be joined."""
    if (run_dir / "summary.json").exists():
        return "the run is over"
    if not (run_dir / "config.yaml").exists():
        return "there is no run; name the folder of one that is running"
    return "this run cannot be joined: it is in virtual time, or was killed"
