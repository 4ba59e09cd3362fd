"""Headers of a parameter server's messages to its workers."""

from functools import cache
from typing import NamedTuple, TypeVar, get_type_hints


class Assignment(NamedTuple):
    """Next work of a worker that proceeds; None keeps the planned value."""

    local_steps: int | None = None  # H
    ratio: float | None = None  # density of the update
    interval_s: float = 0.0  # if not 0: take steps for this many seconds, instead of H steps
    batch: int = 0  # samples; 0 keeps the present batch


AS_PLANNED = Assignment()


class Pull(NamedTuple):
    """Header of every reply to a push; the failed workers may follow (`ashl.topology.members`)."""

    signal: int  # GO, LAST, NEXT or STOP
    version: int  # of the model
    steps: int  # steps applied so far, of all workers
    samples: int  # samples applied so far, which the learning rate follows
    staleness: int  # of the push that this answers
    dropped: bool  # True if that push was dropped
    end_ns: int  # end of the stage, with NEXT and STOP
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0  # 0 keeps the present batch


PULL_FIELDS = len(Pull._fields)


class Admission(NamedTuple):
    """Header of the answer to a join request."""

    signal: int  # GO; STOP if the run is over
    end_ns: int  # end of the run, with STOP
    stage: int = 0  # index of the present stage
    version: int = 0  # of the model
    steps: int = 0  # steps applied so far, of all workers
    samples: int = 0  # samples applied so far, of all workers
    rounds: int = 0  # the worker's own rounds: applied, dropped or still to be merged
    done: int = 0  # steps in these rounds
    # first stage whose assignments follow in another message; 0 if the plan still holds
    planned: int = 0
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0


ADMISSION_FIELDS = len(Admission._fields)
Head = TypeVar("Head", bound=NamedTuple)


def parse_reply(of: type[Head], meta: tuple[float, ...]) -> Head:
    """Return a message's header as the type `of`.

    In virtual time the header may already have that type; between processes all fields are floats.
    """
    if isinstance(meta, of):
        return meta
    return of(*(kind(x) for kind, x in zip(field_types(of), meta, strict=False)))


@cache
def field_types(of: type[NamedTuple]) -> tuple[type[float], ...]:
    """Return the types of a header's fields."""
    return tuple(get_type_hints(of).values())
