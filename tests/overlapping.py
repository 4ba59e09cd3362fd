"""Coroutines whose tasks overlap on a node, for both kernels."""

from collections.abc import Callable
from typing import Any

import torch

from ashl.runtime.rank_context import RankContext

TAG = ("x", 0, 0)


async def computing(ctx: RankContext, work: float, kind: str = "compute") -> float:
    await ctx.compute(lambda: None, work, kind)
    return ctx.now


async def two_computes(ctx: RankContext) -> list[float]:
    """When each of three computes of one node has ended, the main task's last: (1, 2 and 3 units of
    work).
    """
    first, second = ctx.spawn(computing(ctx, 1)), ctx.spawn(computing(ctx, 2, "compress"))
    await ctx.sleep(0)
    last = await computing(ctx, 3)
    return [await ctx.join(first), await ctx.join(second), last]


async def summed(
    ctx: RankContext,
    value: float,
    key: int = 0,
    team: tuple[int, ...] = (0, 1),
    size: int = 1000,
    credit: int = 0,
) -> Any:
    """(a number of the sum, when it came)."""
    total = await ctx.all_reduce(torch.full((size,), value), team, key=key, credit=credit)
    return float(total[0]), ctx.now


async def a_send_beside_a_collective(ctx: RankContext) -> list[float]:
    """When the sum, and when the message that rank 0 posts right after it, has come."""
    task = ctx.spawn(summed(ctx, 1.0))
    await ctx.sleep(0.05)
    if ctx.rank == 0:
        await ctx.send(1, TAG, torch.zeros(1000))
        return [(await ctx.join(task))[1]]
    await ctx.recv(TAG)
    came = ctx.now
    return [(await ctx.join(task))[1], came]


async def a_collective_behind_a_send(ctx: RankContext) -> list[float]:
    """The same, the message first."""
    if ctx.rank == 0:
        await ctx.send(1, TAG, torch.zeros(1000))
        return [(await summed(ctx, 1.0))[1]]
    task = ctx.spawn(summed(ctx, 1.0))
    await ctx.recv(TAG)
    came = ctx.now
    return [(await ctx.join(task))[1], came]


async def two_at_once(ctx: RankContext) -> list[Any]:
    """Four collectives in flight at once while the rank computes for 1 s: posted with keys 3, 2, 1
    and 1.
    """
    tasks = []
    for place, key in enumerate((3, 2, 1, 1)):
        tasks.append(ctx.spawn(summed(ctx, 10.0**place * (ctx.rank + 1), key)))
        await ctx.sleep(0)
    computed = await computing(ctx, 1)
    return [computed, *[await ctx.join(task) for task in tasks]]


async def three_and_two_ranks(ctx: RankContext) -> list[Any]:
    """Sums of two teams that share ranks 0 and 1, at once, without process groups of their own."""
    teams = [team for team in ((0, 1, 2), (0, 1)) if ctx.rank in team]
    tasks = [ctx.spawn(summed(ctx, float(ctx.rank + 1), key=1, team=team)) for team in teams]
    return [(await ctx.join(task))[0] for task in tasks]


async def gathered(ctx: RankContext, key: int) -> list[int]:
    parts = await ctx.all_gather(
        torch.full((ctx.rank + 1,), 7 + key, dtype=torch.uint8), (0, 1), key=key
    )
    return [int(part.sum()) for part in parts]


async def kinds_mixed(ctx: RankContext) -> list[Any]:
    """A sum and two gathers at once, by both ranks in the same order."""
    tasks = [
        ctx.spawn(gathered(ctx, 5)),
        ctx.spawn(summed(ctx, 2.0, key=4)),
        ctx.spawn(gathered(ctx, 0)),
    ]
    first, total, last = [await ctx.join(task) for task in tasks]
    return [first, total[0], last]


async def cancelled(ctx: RankContext) -> float:
    """Rank 1 cancels a task whose sum it has posted; the others get theirs, and the next sum is
    right.
    """
    task = ctx.spawn(summed(ctx, 1.0, key=2))
    await ctx.sleep(0)
    if ctx.rank == 1:
        await ctx.cancel(task)
        assert await ctx.join(task) is None
    else:
        assert (await ctx.join(task))[0] == 2.0
    return (await summed(ctx, float(ctx.rank)))[0]


async def left_pending(ctx: RankContext) -> str:
    """Both post a sum and end without waiting for it."""
    ctx.spawn(summed(ctx, 1.0, key=2))
    await ctx.sleep(0)
    return "ended"


async def one_sided(ctx: RankContext) -> str:
    """Only rank 0 posts a sum, and both end."""
    if ctx.rank == 0:
        ctx.spawn(summed(ctx, 1.0, key=2))
    await ctx.sleep(0.01)
    return "ended"


async def crossed(ctx: RankContext) -> None:
    """The ranks post in different orders."""
    keys = (1, 2) if ctx.rank == 0 else (2, 1)
    tasks = [ctx.spawn(summed(ctx, 1.0, key)) for key in keys]
    for task in tasks:
        await ctx.join(task)


async def a_peer_dies(ctx: RankContext) -> None:
    """Rank 1 fails while rank 0's collective is in flight."""
    if ctx.rank == 1:
        await ctx.sleep(0.2)
        raise ValueError("rank 1 falls over")
    task = ctx.spawn(summed(ctx, 1.0, key=1))
    await ctx.join(task)


async def computed_alike(ctx: RankContext) -> list[int]:
    """Values that the ranks of a process group share: one object in virtual time, equal ones on
    processes.
    """
    made = []
    for step in range(3):
        value = ctx.compute_once((0, 1), ("sum", step), lambda step=step: [step])
        await ctx.sleep(0.001 * (ctx.rank + 1))
        made.append(value[0])
    return made


async def push_and_wait(ctx):
    """Rank 0 pushes the whole model, and the receiver takes 0.3 s to answer."""
    if ctx.rank:
        await ctx.recv(("push", 0, 0))
        await ctx.sleep(0.3)
        return await ctx.send(0, ("pull", 0, 0))
    await ctx.send(1, ("push", 0, 0), torch.zeros(1000))
    return await ctx.recv(("pull", 0, 0))


async def through_one_port(ctx: RankContext) -> list[float]:
    """Ranks 0 and 1 send to 2 and 3, all at once, and then each pair sums: when both had come on
    this rank.
    """
    if ctx.rank < 2:
        await ctx.send(ctx.rank + 2, TAG, torch.zeros(1000))
    else:
        await ctx.recv(TAG)
    came = ctx.now
    return [came, (await summed(ctx, 1.0, team=(ctx.rank % 2, ctx.rank % 2 + 2)))[1]]


async def with_credit(ctx: RankContext, credit: int) -> list[str]:
    """The order of one collective, three that are posted while it is in flight, and two with a
    lower key that are posted during the next.
    """
    order: list[str] = []

    async def one(name: str, key: int) -> None:
        await summed(ctx, 1.0, key, credit=credit)
        order.append(name)

    tasks = [ctx.spawn(one("first", 2))]
    await ctx.sleep(0.03)
    tasks += [ctx.spawn(one(name, 2)) for name in ("late a", "late b", "late c")]
    await ctx.sleep(0.1)
    tasks += [ctx.spawn(one(name, 1)) for name in ("early a", "early b")]
    for task in tasks:
        await ctx.join(task)
    return order


async def one_ahead(ctx: RankContext) -> list[str]:
    return await with_credit(ctx, 1)


async def two_ahead(ctx: RankContext) -> list[str]:
    return await with_credit(ctx, 2)


async def standing_still(ctx: RankContext) -> Any:
    """A computation of 2 with one of its inputs at once, the other after 0.15 s; it emits one part."""
    first, second, part = ("first", 0, 0), ("second", 0, 0), ("part", 0, 0)

    async def later() -> None:
        await ctx.sleep(0.15)
        await ctx.send(ctx.rank, second, torch.full((3,), 2.0))

    def work(hand_out: Callable, take: Callable) -> float:
        found = float(take(0).sum() + take(1).sum())
        hand_out(0, torch.ones(2))
        return found

    task = ctx.spawn(later())
    await ctx.send(ctx.rank, first, torch.ones(1))
    found = await ctx.compute(work, 2, parts=((0.75, part),), needs=((0.0, first), (0.5, second)))
    await ctx.join(task)
    return found, ctx.now, (await ctx.recv(part)).payload.numel()


async def in_halves(ctx: RankContext) -> Any:
    """A sum of five numbers in two halves among three ranks, and when each was there."""
    x = torch.arange(5.0) * 10**ctx.rank
    chunk = await ctx.all_reduce(x, (0, 1, 2), "scatter")
    scattered = ctx.now
    rows = await ctx.all_reduce(
        torch.cat([chunk, chunk.new_tensor([ctx.rank])]), (0, 1, 2), "gather", piggybacked=1
    )
    return chunk.tolist(), rows.view(3, 3).tolist(), scattered, ctx.now
