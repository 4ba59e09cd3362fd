"""`ashl join`: this process takes the place of a worker that a run on this machine has lost."""

import os
import secrets
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ashl.errors import AshlError, UsageError
from ashl.plan.plan import Plan
from ashl.run.authenticated_store import AuthenticatedStore, Secret
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

AGAIN = ("-P", "-m", "ashl.cli", "join")  # to Python


def join(run_dir: Path | None, worker: int | None, runs: Path, say: Callable[[str], None]) -> int:
    """Ask to be let in, play the worker until the run is over; returns the exit code. Without
    `run_dir` it is the newest run under `runs` that goes on. Raises UsageError where the run takes
    nobody, and AshlError where it fails.
    """
    run_dir = run_dir or newest_joinable_run(runs)
    endpoint = read_join_endpoint(run_dir)
    answer = request_place(run_dir, endpoint, worker)
    if answer.refused is not None:
        raise UsageError(f"{run_dir}: {answer.refused}")
    say(f"joins {run_dir} as worker {answer.worker}, which {answer.how}")
    through = named(Plan.from_json(answer.plan).runtime["interface"]) or Chosen(
        LOOPBACK, "127.0.0.1"
    )
    where = endpoint.host, endpoint.port, job_secret(endpoint), answer.controller_host
    settings = RankSettings(
        answer.worker, *where, str(run_dir), answer.rounds, log=False, interface=through
    )
    settings = settings._replace(
        device=answer.device, have_own_gpus=answer.have_own_gpus, incarnation=answer.incarnation
    )
    end = run_rank(settings, answer.plan, lambda end: join_again(end, run_dir, worker), say)
    if end.code:
        raise AshlError(end.why)
    say("the run is over")
    return 0


def job_secret(endpoint: JoinEndpoint) -> Secret:
    try:
        return Secret(bytes.fromhex(endpoint.secret))
    except ValueError:
        raise UsageError(f"{FILE} has a secret that is none.") from None


def request_place(run_dir: Path, endpoint: JoinEndpoint, worker: int | None) -> JoinAnswer:
    """What the run says. Raises UsageError where it is gone, and AshlError where it does not
    answer.
    """
    secret, late = (
        job_secret(endpoint),
        f"{run_dir}: the run did not answer within {PATIENCE_S:g} s; try it again.",
    )

    def send_request() -> JoinAnswer:
        socket.create_connection(
            (endpoint.host, endpoint.port), timeout=PATIENCE_S
        ).close()  # torch would try for longer
        limit = timedelta(seconds=PATIENCE_S)
        store = AuthenticatedStore(
            dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=limit), secret
        )
        number = secrets.randbits(31)
        store.push(JOIN_REQUESTS, number, JoinRequest(worker).dumps())
        for _ in poll_for(PATIENCE_S):
            if item := store.pop(answer_queue(number)):
                return JoinAnswer.loads(item[1])
        raise AshlError(late)

    try:
        return call_within(
            2 * PATIENCE_S, send_request, late
        )  # the store of a run that is stopped never answers
    except (RuntimeError, OSError):
        raise UsageError(f"{run_dir}: the run has ended: its store does not answer.") from None


def join_again(end: End, run_dir: Path, worker: int | None) -> NoReturn:
    """The run went on without this process: it begins again, from nothing. Whatever it had open is
    closed.
    """
    sys.stderr.write(f"ashl: {end.why}; rejoins\n")
    sys.stderr.flush()
    os.closerange(3, 1 << 16)
    os.execv(
        sys.executable,
        [sys.executable, *AGAIN, str(run_dir), *(["--worker", str(worker)] if worker else [])],
    )
