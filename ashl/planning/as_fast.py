"""A full profile whose machines are as fast in virtual time as they were while it was measured.

Rule: what all did together then is done once more in virtual time with the costs that were found: exchanges without a
pause, exchanges after a step, whose pushes are applied, and messages around a ring after a step. What messages cost
their ends, what a pause costs, and what messages between workers cost their ends are scaled in that order, each by the
factor with which virtual time is that of the profile; before that, where both ways of a server's port slow each other
down, by how much they do. A thread that wakes up, and a quota of which a core that sleeps keeps a part, are nobody's
processor time, and show only in what all took together. Where something else is most of that time, as a slow link,
nothing is scaled.

That one factor for each is enough is ours; how far off it is stands in docs/calibration.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import speed_of
from ashl.plan.profile import Profile
from ashl.planning.build import Options
from ashl.runtime.node import Deaf, Node
from ashl.runtime.simulators import simulator
from ashl.size_only import SizeOnly
from ashl.sync.timing.neighbours import on_ring

BOUNDS = 0.5, 2.0  # of a factor
MATTERS = 1.15  # times as long, at least, is what takes that time when a factor goes from one bound to the other
HALVINGS = 7  # of what is between them, to a hundredth
ROUNDS, EACH = 400, 20  # of all workers together, and of each, at least
FIRST = 0.2  # of the rounds, which do not count
Loop = Callable[[Node, int, list[float]], Coroutine]
PUSH, ANSWER, NEAR = ("push", 0, 0), ("answer", 0, 0), "near"


class Factors(NamedTuple):
    """With which costs are multiplied: ends of messages, pauses, ends of messages between workers, and by how much what
    goes each way of the server's port slows the other."""

    slowed: float = 1.0
    paused: float = 1.0
    between: float = 1.0
    crossed: float = 1.0


def as_fast(profile: Profile) -> Profile:
    """The profile with these factors, where ranks share cores in it or a server's port is slower both ways; without its
    calibration, if it had one."""
    full = profile.full
    if full is None or full.server is None or (handling := full.handling) is None:
        return profile
    shared, crossed = profile.cluster().get("shared") is not None, full.server.crossed_s_per_byte is not None
    if handling.exchange_s is None or handling.round_s is None or not (shared or crossed):
        return profile
    batch, dense, found = profile.workers[0].batch, profile.dense_bytes, Factors()
    exchanges, rounds = (partial(exchanging, own, dense) for own in (None, batch))

    def of(name: str, aim_s: float, loop: Loop, *, serves: bool = True, **others: float) -> Factors:
        def time_s(value: float) -> float:
            return run(scaled(profile, found._replace(**others, **{name: value})), loop, serves=serves)

        return found._replace(**{name: factor(time_s, aim_s)})

    if crossed:
        found = of("crossed", handling.exchange_s, exchanges, paused=0.0)
    if shared:
        found = of("slowed", handling.exchange_s, exchanges, paused=0.0)
        found = of("paused", handling.round_s, rounds)
    if shared and full.neighbours is not None:
        round_s = full.neighbours.round.seconds(dense)
        found = of("between", round_s / profile.num_workers, partial(on_a_ring, batch, dense), serves=False)
    return scaled(profile, found)


def scaled(profile: Profile, by: Factors) -> Profile:
    """With these costs; without its calibration, which was of others."""
    full = profile.full
    assert full is not None
    assert full.handling is not None
    assert full.server is not None
    crossed = full.server.crossed_s_per_byte
    own = replace(
        full,
        handling=replace(full.handling, slowed=by.slowed, paused=by.paused),
        neighbours=full.neighbours and replace(full.neighbours, slowed=by.between),
        server=replace(full.server, crossed_s_per_byte=crossed and crossed * by.crossed),
    )
    return replace(profile, full=own, calibration=None)


def factor(time_s: Callable[[float], float], aim_s: float) -> float:
    """With which it takes so long, within bounds."""
    low, high = BOUNDS
    if time_s(high) < MATTERS * time_s(low):
        return 1.0
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if time_s(middle) < aim_s else (low, middle)
    return math.sqrt(low * high)


def run(profile: Profile, loop: Loop, *, serves: bool) -> float:
    """Seconds from one end of a round to the next one's, whoever's, by this loop: of a rank, the number of workers, and
    the moments at which rounds have ended."""
    cluster: Cluster = Options(()).of("cluster", profile.cluster())
    n, ends_s = profile.num_workers, list[float]()
    speed, costs = speed_of(cluster, profile.workers[0].batch, seed=0), network(cluster, profile.dense_bytes)
    sim = simulator(n + serves, speed, costs, Deaf(), serves=serves)
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
    near = on_ring(node.rank, n)
    for k in range(max(ROUNDS // n, EACH)):
        for peer in near:
            await node.send(peer, (NEAR, 0, k), SizeOnly(nbytes))
        await node.compute(nothing, work=batch)
        for peer in near:
            await node.recv((NEAR, 0, k), src=peer)
        ends_s.append(node.now)


def nothing() -> None:
    """What is computed is only timed."""
