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
from ashl.run.desk import PATIENCE_S
from ashl.run.doors import ASKS, FILE, Answer, Ask, Door, answers_to, found, newest, wait_until
from ashl.run.interface import LOOPBACK, Chosen, named
from ashl.run.job import within
from ashl.run.rank import Place, play
from ashl.run.sealed import Sealed, Secret
from ashl.runtime.news import End

AGAIN = ("-P", "-m", "ashl.cli", "join")  # to Python


def join(run_dir: Path | None, worker: int | None, runs: Path, say: Callable[[str], None]) -> int:
    """Ask to be let in, play the worker until the run is over; returns the exit code. Without `run_dir` it is the
    newest run under `runs` that goes on. Raises UsageError where the run takes nobody, and AshlError where it fails."""
    run_dir = run_dir or newest(runs)
    door = found(run_dir)
    answer = asked(run_dir, door, worker)
    if answer.refused is not None:
        raise UsageError(f"{run_dir}: {answer.refused}")
    say(f"joins {run_dir} as worker {answer.worker}, which {answer.how}")
    through = named(Plan.from_json(answer.plan).runtime["interface"]) or Chosen(LOOPBACK, "127.0.0.1")
    where = door.host, door.port, secret_of(door), answer.home
    place = Place(answer.worker, *where, str(run_dir), answer.rounds, log=False, interface=through)
    place = place._replace(device=answer.device, one_each=answer.one_each, life=answer.life)
    end = play(place, answer.plan, lambda end: anew(end, run_dir, worker), say)
    if end.code:
        raise AshlError(end.why)
    say("the run is over")
    return 0


def secret_of(door: Door) -> Secret:
    try:
        return Secret(bytes.fromhex(door.secret))
    except ValueError:
        raise UsageError(f"{FILE} has a secret that is none.") from None


def asked(run_dir: Path, door: Door, worker: int | None) -> Answer:
    """What the run says. Raises UsageError where it is gone, and AshlError where it does not answer."""
    secret, late = secret_of(door), f"{run_dir}: the run did not answer within {PATIENCE_S:g} s; try it again."

    def ask() -> Answer:
        socket.create_connection((door.host, door.port), timeout=PATIENCE_S).close()  # torch would try for longer
        limit = timedelta(seconds=PATIENCE_S)
        store = Sealed(dist.TCPStore(door.host, door.port, is_master=False, timeout=limit), secret)
        number = secrets.randbits(31)
        store.push(ASKS, number, Ask(worker).dumps())
        for _ in wait_until(PATIENCE_S):
            if item := store.pop(answers_to(number)):
                return Answer.loads(item[1])
        raise AshlError(late)

    try:
        return within(2 * PATIENCE_S, ask, late)  # the store of a run that is stopped never answers
    except (RuntimeError, OSError):
        raise UsageError(f"{run_dir}: the run does not go on any longer: nobody answers where its store was.") from None


def anew(end: End, run_dir: Path, worker: int | None) -> NoReturn:
    """The run went on without this process: it begins again, from nothing. Whatever it had open is closed."""
    sys.stderr.write(f"ashl: {end.why}; joins anew\n")
    sys.stderr.flush()
    os.closerange(3, 1 << 16)
    os.execv(sys.executable, [sys.executable, *AGAIN, str(run_dir), *(["--worker", str(worker)] if worker else [])])
