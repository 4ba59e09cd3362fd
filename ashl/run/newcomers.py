"""Home's answer to whoever asks for the place of a lost worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ashl.planning.legal_churn import lets_in, modes_of
from ashl.run.doors import Answer, Ask
from ashl.run.monitor import Monitor

if TYPE_CHECKING:
    from ashl.run.attendance import Attendance


def answer(seen: Attendance, monitor: Monitor, ask: Ask, keeps: bool) -> Answer:
    """A place, which is taken with that, or why there is none. `keeps`: the run leaves checkpoints."""
    if why := refusal(seen, monitor, ask.worker, keeps):
        return Answer(refused=why)
    rank = min(seen.lost.keys() - seen.coming.keys()) if ask.worker is None else ask.worker
    seen.expect(monitor, rank)
    seen.processes.pop(rank, None)
    place = seen.places[rank]
    known = place.home, place.rounds, place.device, place.one_each
    return Answer(None, rank, seen.desk.lives[rank], seen.lost[rank], seen.plan.to_json(), *known)


def refusal(seen: Attendance, monitor: Monitor, worker: int | None, keeps: bool) -> str | None:
    plan, parts = seen.plan, monitor.job.parts
    if not lets_in(parts):
        return f"a run with {modes_of(parts)} takes nobody; a new run with run.checkpoint_s can be resumed."
    if keeps:
        return "a run that leaves checkpoints (run.checkpoint_s) takes nobody."
    if monitor.final is not None or monitor.stopping:
        return "the run is over."
    if monitor.counts() is None:
        return "the run has not begun."
    if worker is not None and worker >= plan.num_workers:
        return f"there is no worker {worker}; the run has workers 0 to {plan.num_workers - 1}."
    if worker is not None and worker not in seen.lost:
        return f"worker {worker} is not lost."
    if not seen.lost:
        return "no worker of this run is lost."
    if seen.coming.keys() >= ({*seen.lost} if worker is None else {worker}):
        return "who was lost is coming back already."
    return None
