"""`ashl join`: this process takes the place of a failed worker of a run on this machine.

It reads the run's join endpoint, asks the controller for a place, and trains as that worker until
the run ends. If it is evicted, it asks again (`join_again`).
"""

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ashl.errors import AshlError, UsageError
from ashl.plan.plan import Plan
from ashl.run.authenticated_store import AuthenticatedStore, Secret, StoreClient
from ashl.run.control_channel import (
    FILE,
    JOIN_REQUESTS,
    PATIENCE_S,
    JoinAnswer,
    JoinEndpoint,
    JoinRequest,
    answer_queue,
    newest_joinable_run,
    poll_for,
    read_join_endpoint,
)
from ashl.run.interface import LOOPBACK, Chosen, named
from ashl.run.job import call_within
from ashl.run.rank import RankSettings, run_rank
from ashl.runtime.control_messages import End

AGAIN = ("-P", "-m", "ashl.cli", "join")  # arguments of Python that start this command again


def join(run_dir: Path | None, worker: int | None, runs: Path, say: Callable[[str], None]) -> int:
    """Join a run as a worker until the run ends, and return the exit code.

    Args: run_dir, None for the newest running run under `runs`; worker, None for any failed worker;
    say, shows a line to the user.
    Raises: UsageError if the run rejects the request, AshlError if the run fails.
    """
    run_dir = run_dir or newest_joinable_run(runs)
    endpoint = read_join_endpoint(run_dir)
    answer = request_place(run_dir, endpoint, worker)
    if answer.refused is not None:
        raise UsageError(f"{run_dir}: {answer.refused}")
    say(f"joins {run_dir} as worker {answer.worker}, which {answer.how}")
    interface = named(Plan.from_json(answer.plan).runtime["interface"])
    settings = RankSettings(
        rank=answer.worker,
        host=endpoint.host,
        port=endpoint.port,
        secret=job_secret(endpoint),
        controller_host=answer.controller_host,
        run_dir=str(run_dir),
        rounds=answer.rounds,
        log=False,
        interface=interface or Chosen(LOOPBACK, "127.0.0.1"),
        device=answer.device,
        have_own_gpus=answer.have_own_gpus,
        incarnation=answer.incarnation,
    )
    end = run_rank(settings, answer.plan, lambda end: join_again(end, run_dir, worker), say)
    if end.code:
        raise AshlError(end.why)
    say("the run is over")
    return 0


def job_secret(endpoint: JoinEndpoint) -> Secret:
    """Return the secret of a join endpoint. Raises UsageError if it is not hexadecimal."""
    try:
        return Secret(bytes.fromhex(endpoint.secret))
    except ValueError:
        raise UsageError(f"{FILE} holds no valid secret; join another run") from None


def request_place(run_dir: Path, endpoint: JoinEndpoint, worker: int | None) -> JoinAnswer:
    """Return the controller's answer to a join request.

    Raises: UsageError if the run has ended, AshlError if it does not answer within `PATIENCE_S`.
    """
    secret = job_secret(endpoint)
    late = f"{run_dir}: the run did not answer within {PATIENCE_S:g} s; try again"

    def send_request() -> JoinAnswer:
        store = AuthenticatedStore(StoreClient(endpoint.host, endpoint.port, secret, 0.0))
        number = secrets.randbits(31)
        store.push(JOIN_REQUESTS, number, JoinRequest(worker).dumps())
        for _ in poll_for(PATIENCE_S):
            if item := store.pop(answer_queue(number)):
                return JoinAnswer.loads(item[1])
        raise AshlError(late)

    try:
        # the store of a run that is stopped, for example by Ctrl-Z, never answers
        return call_within(2 * PATIENCE_S, send_request, late)
    except TimeoutError:
        raise AshlError(late) from None
    except (RuntimeError, OSError):
        raise UsageError(f"{run_dir}: the run has ended; its store does not answer") from None


def join_again(end: End, run_dir: Path, worker: int | None) -> NoReturn:
    """Replace this process, which was evicted, by a new one that asks to join again.

    Closes all file descriptors except those of standard input, output and error.
    """
    sys.stderr.write(f"ashl: {end.why}; rejoins\n")
    sys.stderr.flush()
    os.closerange(3, 1 << 16)
    os.execv(
        sys.executable,
        [sys.executable, *AGAIN, str(run_dir), *(["--worker", str(worker)] if worker else [])],
    )
