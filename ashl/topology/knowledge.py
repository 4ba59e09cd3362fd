"""What workers that gossip in rounds tell each other of the run, and of who is there."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ashl.topology.rounds import Lives, View

LACKED = 2  # views: the one that is agreed on next, and the one before it
Key = tuple[int, frozenset[tuple[int, int]]]


class GossipHeader(NamedTuple):
    """What rides on every message: all that is known of the run so far."""

    loss: float  # mean of the sender's loss and of those that it heard of
    not_finite: float = 0  # 1 + the rank whose loss is no number; 0 = none
    verdict: float = 0  # of rank 0, as a place in VERDICTS
    last: float = 0  # the round after which it holds
    snapshot_after: float = -1  # the round after which all hand in their models


NOTHING_HEARD = GossipHeader(math.nan)


class Knowledge(NamedTuple):
    """What ranks send each other where somebody is lost, or comes."""

    views: tuple[View, ...]  # or the last ones of them
    known: Lives
    phase: int
    k: int
    rounds: dict[int, int]
    header: GossipHeader
    waiting: frozenset[int] = frozenset()  # members that have no model yet
    before: int = 0  # how many views there are before these

    @property
    def key(self) -> Key:
        """What is being agreed on."""
        return self.before + len(self.views), frozenset(self.known.items())

    def with_what(self, other: Knowledge) -> Knowledge:
        """What both know together, who agree on the same."""
        rounds = {
            rank: max(of.get(rank, 0) for of in (self.rounds, other.rounds)) for rank in self.rounds | other.rounds
        }
        mine, theirs = self.header, other.header
        verdict, last = max((mine.verdict, mine.last), (theirs.verdict, theirs.last))
        return Knowledge(
            self.views,
            self.known,
            self.phase,
            max(self.k, other.k),
            rounds,
            GossipHeader(
                mine.loss,
                max(mine.not_finite, theirs.not_finite),
                verdict,
                last,
                max(mine.snapshot_after, theirs.snapshot_after),
            ),
            self.waiting | other.waiting,
        )


Came = dict[tuple[Key, int, int], Knowledge]  # by what is agreed on, phase and sender


def latest(known: Knowledge) -> Knowledge:
    """With no more views than those lack who are to hear of it, which are many where workers come and go."""
    if not (known.views and known.views[-1].returns):
        return known
    return known._replace(views=known.views[-LACKED:], before=max(0, len(known.views) - LACKED))


def written(known: Knowledge) -> Tensor:
    """As a body. Of who comes back something is said only where somebody has."""
    views = [
        (view.first, sorted(view.gone), sorted(view.rounds.items()))
        + ((sorted(view.known.items()), sorted(view.came.items())) if view.returns else ())
        for view in known.views
    ]
    lives = [rank if life == 1 else (rank, life) for rank, life in sorted(known.known.items())]
    fields = (views, lives, known.phase, known.k, sorted(known.rounds.items()), known.header)
    fields += (sorted(known.waiting), known.before) if known.waiting or known.before else ()
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


def read(body: Tensor) -> Knowledge:
    views, lives, phase, k, rounds, header, *rest = json.loads(bytes(body.tolist()))
    found = list[View]()
    for first, gone, of, *more in views:
        known, came = map(dict, more) if more else (dict.fromkeys(gone, 1), {})
        found.append(View(first, frozenset(gone), dict(of), known, came))
    known = dict((life, 1) if isinstance(life, int) else life for life in lives)
    waiting, before = rest or ((), 0)
    return Knowledge(tuple(found), known, phase, k, dict(rounds), GossipHeader(*header), frozenset(waiting), before)
