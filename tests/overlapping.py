"""Coroutines whose tasks overlap on a node, for both kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ashl.runtime.node import Node

TAG = ("x", 0, 0)


async def computing(node: Node, work: float, kind: str = "compute") -> float:
    await node.compute(lambda: None, work, kind)
    return node.now


async def two_computes(node: Node) -> list[float]:
    """When each of three computes of one node has ended, the main task's last: (1, 2 and 3 units of work)."""
    first, second = node.spawn(computing(node, 1)), node.spawn(computing(node, 2, "compress"))
    await node.sleep(0)
    last = await computing(node, 3)
    return [await node.join(first), await node.join(second), last]


async def summed(
    node: Node, value: float, key: int = 0, team: tuple[int, ...] = (0, 1), size: int = 1000, credit: int = 0
) -> Any:
    """(a number of the sum, when it came)."""
    total = await node.all_reduce(torch.full((size,), value), team, key=key, credit=credit)
    return float(total[0]), node.now


async def a_send_beside_a_collective(node: Node) -> list[float]:
    """When the sum, and when the message that rank 0 posts right after it, has come."""
    task = node.spawn(summed(node, 1.0))
    await node.sleep(0.05)
    if node.rank == 0:
        await node.send(1, TAG, torch.zeros(1000))
        return [(await node.join(task))[1]]
    await node.recv(TAG)
    came = node.now
    return [(await node.join(task))[1], came]


async def a_collective_behind_a_send(node: Node) -> list[float]:
    """The same, the message first."""
    if node.rank == 0:
        await node.send(1, TAG, torch.zeros(1000))
        return [(await summed(node, 1.0))[1]]
    task = node.spawn(summed(node, 1.0))
    await node.recv(TAG)
    came = node.now
    return [(await node.join(task))[1], came]


async def two_at_once(node: Node) -> list[Any]:
    """Four sums under way at once while the node computes for 1: posted with keys 3, 2, 1 and 1."""
    tasks = []
    for place, key in enumerate((3, 2, 1, 1)):
        tasks.append(node.spawn(summed(node, 10.0**place * (node.rank + 1), key)))
        await node.sleep(0)
    computed = await computing(node, 1)
    return [computed, *[await node.join(task) for task in tasks]]


async def training(node: Node, steps: int, layers: int, overlap: bool, work: Callable[[], None] = lambda: None) -> Any:
    """Steps of a forward of 2 and `layers` backwards of 1 each; then one sum after the other, or each as soon as its
    layer is done, the layer that is needed first with the lowest key. Returns the sums and when it ended."""
    sums: list[float] = []
    for step in range(steps):
        await node.compute(work, 2)
        tasks, whole = [], partial(summed, node, team=(0, 1))
        for layer in reversed(range(layers)):
            await node.compute(work, 1)
            value = float(step * layers + layer + node.rank)
            tasks.append(node.spawn(whole(value, key=1 + layer)) if overlap else whole(value))
        for task in tasks:
            sums.append((await node.join(task) if overlap else await task)[0])
    return sums, node.now


async def plain(node: Node) -> Any:
    return await training(node, 10, 4, overlap=False)


async def layer_by_layer(node: Node) -> Any:
    return await training(node, 10, 4, overlap=True)


async def three_and_two_ranks(node: Node) -> list[Any]:
    """Sums of two teams that share ranks 0 and 1, at once, without process groups of their own."""
    teams = [team for team in ((0, 1, 2), (0, 1)) if node.rank in team]
    tasks = [node.spawn(summed(node, float(node.rank + 1), key=1, team=team)) for team in teams]
    return [(await node.join(task))[0] for task in tasks]


async def gathered(node: Node, key: int) -> list[int]:
    parts = await node.all_gather(torch.full((node.rank + 1,), 7 + key, dtype=torch.uint8), (0, 1), key=key)
    return [int(part.sum()) for part in parts]


async def kinds_mixed(node: Node) -> list[Any]:
    """A sum and two gathers at once, by both ranks in the same order."""
    tasks = [node.spawn(gathered(node, 5)), node.spawn(summed(node, 2.0, key=4)), node.spawn(gathered(node, 0))]
    first, total, last = [await node.join(task) for task in tasks]
    return [first, total[0], last]


async def cancelled(node: Node) -> float:
    """Rank 1 cancels a task whose sum it has posted; the others get theirs, and the next sum is right."""
    task = node.spawn(summed(node, 1.0, key=2))
    await node.sleep(0)
    if node.rank == 1:
        await node.cancel(task)
        assert await node.join(task) is None
    else:
        assert (await node.join(task))[0] == 2.0
    return (await summed(node, float(node.rank)))[0]


async def left_pending(node: Node) -> str:
    """Both post a sum and end without waiting for it."""
    node.spawn(summed(node, 1.0, key=2))
    await node.sleep(0)
    return "ended"


async def one_sided(node: Node) -> str:
    """Only rank 0 posts a sum, and both end."""
    if node.rank == 0:
        node.spawn(summed(node, 1.0, key=2))
    await node.sleep(0.01)
    return "ended"


async def crossed(node: Node) -> None:
    """The ranks post in different orders."""
    keys = (1, 2) if node.rank == 0 else (2, 1)
    tasks = [node.spawn(summed(node, 1.0, key)) for key in keys]
    for task in tasks:
        await node.join(task)


async def a_peer_dies(node: Node) -> None:
    """Rank 1 fails while rank 0's sum is under way."""
    if node.rank == 1:
        await node.sleep(0.2)
        raise ValueError("rank 1 falls over")
    task = node.spawn(summed(node, 1.0, key=1))
    await node.join(task)


async def computed_alike(node: Node) -> list[int]:
    """What the ranks of a team share: the same object in virtual time, equal ones on processes."""
    made = []
    for step in range(3):
        value = node.alike((0, 1), ("sum", step), lambda step=step: [step])
        await node.sleep(0.001 * (node.rank + 1))
        made.append(value[0])
    return made


async def push_and_wait(node):
    """Rank 0 pushes the whole model, and the receiver takes 0.3 s to answer."""
    if node.rank:
        await node.recv(("push", 0, 0))
        await node.sleep(0.3)
        return await node.send(0, ("pull", 0, 0))
    await node.send(1, ("push", 0, 0), torch.zeros(1000))
    return await node.recv(("pull", 0, 0))


async def through_one_port(node: Node) -> list[float]:
    """Ranks 0 and 1 send to 2 and 3, all at once, and then each pair sums: when both had come on this rank."""
    if node.rank < 2:
        await node.send(node.rank + 2, TAG, torch.zeros(1000))
    else:
        await node.recv(TAG)
    came = node.now
    return [came, (await summed(node, 1.0, team=(node.rank % 2, node.rank % 2 + 2)))[1]]


async def with_credit(node: Node, credit: int) -> list[str]:
    """The order of a sum, three that come while it is under way, and two of a lower key that come during the next."""
    order: list[str] = []

    async def one(name: str, key: int) -> None:
        await summed(node, 1.0, key, credit=credit)
        order.append(name)

    tasks = [node.spawn(one("first", 2))]
    await node.sleep(0.03)
    tasks += [node.spawn(one(name, 2)) for name in ("late a", "late b", "late c")]
    await node.sleep(0.1)
    tasks += [node.spawn(one(name, 1)) for name in ("early a", "early b")]
    for task in tasks:
        await node.join(task)
    return order


async def one_ahead(node: Node) -> list[str]:
    return await with_credit(node, 1)


async def two_ahead(node: Node) -> list[str]:
    return await with_credit(node, 2)


async def standing_still(node: Node) -> Any:
    """A computation of 2 that has one of its needs at once, the other after 0.15 s, and hands out one part."""
    first, second, part = ("first", 0, 0), ("second", 0, 0), ("part", 0, 0)

    async def later() -> None:
        await node.sleep(0.15)
        await node.send(node.rank, second, torch.full((3,), 2.0))

    def work(hand_out: Callable, take: Callable) -> float:
        found = float(take(0).sum() + take(1).sum())
        hand_out(0, torch.ones(2))
        return found

    task = node.spawn(later())
    await node.send(node.rank, first, torch.ones(1))
    found = await node.compute(work, 2, parts=((0.75, part),), needs=((0.0, first), (0.5, second)))
    await node.join(task)
    return found, node.now, (await node.recv(part)).body.numel()


async def in_halves(node: Node) -> Any:
    """A sum of five numbers in two halves among three ranks, and when each was there."""
    x = torch.arange(5.0) * 10**node.rank
    chunk = await node.all_reduce(x, (0, 1, 2), "scatter")
    scattered = node.now
    rows = await node.all_reduce(torch.cat([chunk, chunk.new_tensor([node.rank])]), (0, 1, 2), "gather", riders=1)
    return chunk.tolist(), rows.view(3, 3).tolist(), scattered, node.now
