"""Headers of a parameter server's messages to its workers, and the assignment within them.

Data flow: a sync mode returns an `Assignment`; the server puts its values into the `Pull` that
answers a push, or into the `Admission` that answers a join request.

Signals (`ashl.stage.stage`): GO, compute and push again; LAST, push the remaining work of a delayed
exchange, and compute no more in this stage; NEXT, the stage has ended; STOP, the run has ended.
"""

from functools import cache
from typing import NamedTuple, TypeVar, get_type_hints


class Assignment(NamedTuple):
    """Next work of a worker that proceeds, as a sync mode sets it.

    None keeps the planned value; a batch of 0 keeps the batch of the previous round.
    """

    local_steps: int | None = None  # H, the steps before the next push
    ratio: float | None = None  # density of the update
    interval_s: float = 0.0  # if not 0: take steps for this many seconds, instead of H steps
    batch: int = 0  # samples per step


AS_PLANNED = Assignment()


class Pull(NamedTuple):
    """Header of every reply to a push.

    With `runtime.on_worker_failure=reshard` the header is followed by numbers that encode the
    failed workers, see `ashl.topology.members`.
    """

    signal: int  # GO, LAST, NEXT or STOP
    version: int  # of the model
    steps: int  # steps applied so far, of all workers
    samples: int  # samples applied so far, which the learning rate follows
    staleness: int  # of the push that this answers
    dropped: bool  # True if that push was dropped
    end_ns: int  # end time of the stage, with NEXT and STOP; else 0
    # next work, with GO; units as in `Assignment`
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0


PULL_FIELDS = len(Pull._fields)


class Admission(NamedTuple):
    """Header of the answer to a join request."""

    signal: int  # GO; STOP if the run is over
    end_ns: int  # end time of the run, with STOP; else 0
    stage: int = 0  # index of the present stage
    version: int = 0  # of the model
    steps: int = 0  # steps applied so far, of all workers
    samples: int = 0  # samples applied so far, of all workers
    rounds: int = 0  # rounds of this worker: applied, dropped or not merged yet
    done: int = 0  # steps of this worker in these rounds
    # first stage whose assignments were planned after profiling, and follow in another message;
    # 0 = no such stage
    planned: int = 0
    # next work; units as in `Assignment`
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0


ADMISSION_FIELDS = len(Admission._fields)
Head = TypeVar("Head", bound=NamedTuple)


def parse_reply(of: type[Head], meta: tuple[float, ...]) -> Head:
    """Return a message's header as the type `of`; further numbers in `meta` are ignored.

    In virtual time the header may already have that type. Between processes all fields are floats.
    """
    if isinstance(meta, of):
        return meta
    return of(*(kind(x) for kind, x in zip(field_types(of), meta, strict=False)))


@cache
def field_types(of: type[NamedTuple]) -> tuple[type[float], ...]:
    """Return the types of a header's fields, in order."""
    return tuple(get_type_hints(of).values())
