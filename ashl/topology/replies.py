"""What a parameter server answers a push with, beside the model."""

from functools import cache
from typing import NamedTuple, TypeVar, get_type_hints


class Assignment(NamedTuple):
    """What a worker that goes on does next; None = as planned."""

    local_steps: int | None = None  # H
    ratio: float | None = None  # density of its update
    interval_s: float = (
        0.0  # where it is not 0, steps are taken until so much time has passed, instead of H
    )
    batch: int = 0  # 0 = as before


AS_PLANNED = Assignment()


class Pull(NamedTuple):
    """What every reply says beside the model; who is gone may follow (`ashl.topology.members`)."""

    signal: int  # GO, LAST, NEXT or STOP
    version: int
    steps: int  # applied so far
    samples: int  # ... the learning rate follows them
    staleness: int  # of the push that this answers
    dropped: bool  # whether that push was
    end_ns: int  # of the stage, with NEXT and STOP
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0  # 0 = as before


PULL_FIELDS = len(Pull._fields)


class Admission(NamedTuple):
    """What a newcomer receives beside the model."""

    signal: int  # GO; STOP where the run is over
    end_ns: int  # of the run, with STOP
    stage: int = 0
    version: int = 0
    steps: int = 0  # applied so far
    samples: int = 0
    rounds: int = 0  # its own, applied or dropped or kept for a merge
    done: int = 0  # ... of the steps
    planned: int = (
        0  # the stage from which on another message says what workers do; 0 = the plan does
    )
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0


ADMISSION_FIELDS = len(Admission._fields)
Head = TypeVar("Head", bound=NamedTuple)


def parse_reply(of: type[Head], meta: tuple[float, ...]) -> Head:
    """What the head of a message says: in virtual time it may come as it was, from a process it is
    all floats.
    """
    return (
        meta
        if isinstance(meta, of)
        else of(*(kind(x) for kind, x in zip(field_types(of), meta, strict=False)))
    )


@cache
def field_types(of: type[NamedTuple]) -> tuple[type[float], ...]:
    """The types of its fields."""
    return tuple(get_type_hints(of).values())
