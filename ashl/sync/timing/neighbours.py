"""What messages between workers cost: all are on a ring, and send to both of their neighbours at once.

Rule: a round is a message to each neighbour, a step, and then the message of each, which are mixed, as D-PSGD has it.
Timed are many in a row, of a small body and of the dense model. Of the processor time that rounds take beyond their
steps each end of a message has an equal part.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean, median

from ashl.plan.full import Neighbours
from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.sync.timing.exchanges import a_step, answers, blank, close_round, instruct, small_of
from ashl.sync.timing.fits import through
from ashl.topology.local_work import WorkerState
from ashl.topology.mixing import mixed

NEAR = -14  # an order, with bytes and how many rounds
FIRST, MOST = 4, 2000  # rounds
WINDOW_S, WINDOWS = 0.5, 5


def on_ring(rank: int, n: int) -> tuple[int, ...]:
    """The neighbours of one of so many."""
    return tuple(sorted({(rank - 1) % n, (rank + 1) % n} - {rank}))


def neighbours(stage: Stage, rank: int) -> tuple[int, ...]:
    """Of a worker on the ring."""
    return on_ring(rank, stage.num_workers)


async def time_neighbours(node: Node, stage: Stage, state: WorkerState, nbytes: int, rounds: int) -> list[float]:
    """(seconds of a core of a round here, and seconds), after a first one at which all meet."""
    batch, near, used, begun = stage.worker(node.rank).batch, neighbours(stage, node.rank), 0.0, 0.0
    body, row = blank(stage, nbytes), dict.fromkeys(sorted((*near, node.rank)), 1 / (len(near) + 1))
    for k in range(rounds + 1):
        if k == 1:
            used, begun = node.used, node.now
        for peer in near:
            await node.send(peer, stage.tag("near", k), body, (nbytes,))
        await node.compute(partial(a_step, node, stage, state, k, batch), work=batch)
        heard = {peer: await node.recv(stage.tag("near", k), src=peer) for peer in near}
        mixed(row, node.rank, body, heard)
        close_round(node, stage, state)
    return [(node.used - used) / rounds, (node.now - begun) / rounds]


async def measured_neighbours(node: Node, stage: Stage, step_s: float) -> Neighbours | None:
    """The server's side of it, where steps take so many seconds of a core in the mean; None where nobody has a
    neighbour. Raises OverError."""
    near = len(neighbours(stage, 0))
    if not near:
        return None
    sizes = (small_of(stage), stage.trainer.dense_bytes)
    found: dict[int, list[tuple[float, float]]] = {nbytes: [] for nbytes in sizes}
    counts = dict.fromkeys(sizes, FIRST)
    for _ in range(WINDOWS + 1):
        for nbytes in sizes:
            await instruct(node, stage, stage.workers, NEAR, nbytes, counts[nbytes])
            used_s, took_s = map(fmean, zip(*(await answers(node, stage, stage.workers)).values(), strict=True))
            found[nbytes].append((max(0.0, used_s - step_s) / (2 * near), took_s))
            counts[nbytes] = max(FIRST, min(MOST, round(WINDOW_S / max(1e-9, took_s))))
    end, round_ = (
        through([(nbytes, median(row[at] for row in rows[1:]), 0.0) for nbytes, rows in found.items()]) for at in (0, 1)
    )
    return Neighbours(count=near, end=end, round=round_)
