"""What a parameter server answers a push with, beside the model."""

from __future__ import annotations

from typing import NamedTuple


class Orders(NamedTuple):
    """What a worker that goes on does next; None = as planned."""

    local_steps: int | None = None  # H
    ratio: float | None = None  # kept share of its update
    interval_s: float = 0.0  # where it is not 0, steps are taken until so much time has passed, instead of H
    batch: int = 0  # 0 = as before


AS_PLANNED = Orders()


class Pull(NamedTuple):
    """What every reply says beside the model; who is gone may follow (`ashl.topology.members`)."""

    word: float  # GO, LAST, NEXT or STOP
    version: float
    steps: float  # applied so far
    samples: float  # ... the learning rate follows them
    staleness: float  # of the push that this answers
    dropped: float  # whether that push was dropped
    end_ns: float  # of the stage, with NEXT and STOP
    local_steps: float = 1.0
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: float = 0.0  # 0 = as before


PULL = len(Pull._fields)


def said(meta: tuple[float, ...]) -> Pull:
    """What a reply says, which in virtual time comes as it was."""
    return meta if isinstance(meta, Pull) else Pull(*meta[:PULL])
