"""A full profile whose machines are as fast in virtual time as they were while it was measured.

Rule: what all did together then is done once more in virtual time with the costs that were found: exchanges without a
pause, exchanges after a step, whose pushes are applied, and messages around a ring after a step. What messages cost
their ends, what a pause costs, and what messages between workers cost their ends are scaled in that order, each by the
factor with which virtual time is that of the profile. A thread that wakes up, and a quota of which a core that sleeps
keeps a part, are nobody's processor time, and show only in what all took together. Where something else is most of
that time, as a slow link, nothing is scaled.

That one factor for each is enough is ours; how far off it is stands in docs/calibration.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import speed_of
from ashl.config.construct import construct
from ashl.plan.profile import Profile
from ashl.runtime.node import Node
from ashl.runtime.records import Record, Snapshot, UpdateShown
from ashl.runtime.sampling import Rounds
from ashl.runtime.simulators import simulator
from ashl.size_only import SizeOnly, Vector

BOUNDS = 0.5, 2.0  # of a factor
MATTERS = 1.15  # times as long, at least, is what takes that time when a factor goes from one bound to the other
HALVINGS = 7  # of what is between them, to a hundredth
ROUNDS, EACH = 400, 20  # of all workers together, and of each, at least
FIRST = 0.2  # of the rounds, which do not count
PUSH, ANSWER, NEAR = ("push", 0, 0), ("answer", 0, 0), "near"


class Unseen:
    """Nobody looks."""

    rounds: Rounds = "none"
    stopping: str | None = None
    scores: dict[str, float | None] | None = None

    def emit(self, record: Record) -> None:
        pass

    def snapshot(self, record: Snapshot | UpdateShown, vector: Vector | None) -> None:
        pass


def as_fast(profile: Profile) -> Profile:
    """The profile with these factors, where ranks share cores in it; without its calibration, if it had one."""
    full = profile.full
    handling = None if full is None else full.handling
    if full is None or handling is None or handling.exchange_s is None or handling.round_s is None:
        return profile
    if profile.cluster().get("shared") is None:
        return profile
    batch, dense, near = profile.workers[0].batch, profile.dense_bytes, full.neighbours

    def scaled(slowed: float, paused: float, between: float = 1.0) -> Profile:
        own = replace(handling, slowed=slowed, paused=paused)
        own_full = replace(full, handling=own, neighbours=near and replace(near, slowed=between))
        return replace(profile, full=own_full, calibration=None)  # which was of another one

    def exchanges_s(slowed: float) -> float:
        return run(scaled(slowed, 0.0), partial(exchanging, None, dense), serves=True)

    slowed = factor(exchanges_s, handling.exchange_s)

    def rounds_s(paused: float) -> float:
        return run(scaled(slowed, paused), partial(exchanging, batch, dense), serves=True)

    paused = factor(rounds_s, handling.round_s)

    def ring_s(between: float) -> float:
        return run(scaled(slowed, paused, between), partial(on_a_ring, batch, dense), serves=False)

    return scaled(
        slowed, paused, 1.0 if near is None else factor(ring_s, near.round.seconds(dense) / len(full.workers))
    )


def factor(time_s: Callable[[float], float], aim_s: float) -> float:
    """With which it takes so long, within bounds."""
    low, high = BOUNDS
    if time_s(high) < MATTERS * time_s(low):
        return 1.0
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if time_s(middle) < aim_s else (low, middle)
    return math.sqrt(low * high)


def run(profile: Profile, loop: Callable[[Node, int, list[float]], Coroutine], *, serves: bool) -> float:
    """Seconds from one end of a round to the next one's, whoever's, by this loop: of a rank, the number of workers, and
    the moments at which rounds have ended."""
    cluster: Cluster = construct(profile.cluster(), "cluster")
    n, ends_s = profile.num_workers, list[float]()
    speed, costs = speed_of(cluster, profile.workers[0].batch, seed=0), network(cluster, profile.dense_bytes)
    sim = simulator(n + serves, speed, costs, Unseen(), serves=serves)
    sim.run(lambda node: loop(node, n, ends_s), tick=lambda: None)
    first = round(FIRST * len(ends_s))
    return (ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first)


async def exchanging(batch: int | None, nbytes: int, node: Node, n: int, ends_s: list[float]) -> None:
    """Workers push and pull, perhaps after a step, whose push is applied then."""
    if node.rank == n:
        left = n
        while left:
            message = await node.recv(PUSH)
            left -= message.body is None
            if message.body is not None:
                if batch is not None:
                    await node.compute(nothing, work=1, kind="apply")
                await node.send(message.src, ANSWER, message.body)
        return
    while len(ends_s) < max(ROUNDS, EACH * n):
        if batch is not None:
            await node.compute(nothing, work=batch)
        await node.send(n, PUSH, SizeOnly(nbytes))
        await node.recv(ANSWER)
        ends_s.append(node.now)
    await node.send(n, PUSH)


async def on_a_ring(batch: int, nbytes: int, node: Node, n: int, ends_s: list[float]) -> None:
    """Workers send to both of their neighbours before each step."""
    near = sorted({(node.rank - 1) % n, (node.rank + 1) % n} - {node.rank})
    for k in range(max(ROUNDS // n, EACH)):
        for peer in near:
            await node.send(peer, (NEAR, 0, k), SizeOnly(nbytes))
        await node.compute(nothing, work=batch)
        for peer in near:
            await node.recv((NEAR, 0, k), src=peer)
        ends_s.append(node.now)


def nothing() -> None:
    """What is computed is only timed."""
