"""Whether a quota holds a rank back, and how often: pieces of work, and what they used of a core."""

import math
from collections.abc import Awaitable, Callable, Sequence

from ashl.runtime.node import Node


async def in_a_row(
    node: Node, work: Callable[[int], Awaitable[object]], more: Callable[[int], bool]
) -> tuple[list[float], list[float]]:
    """(seconds, seconds of a core) of one piece of work after the other while there are to be `more` than so many, from
    one's end to the next's: a quota may take the core away right when it is asked how much was used."""
    times, used, since, before = list[float](), list[float](), node.now, node.used
    while more(len(times)):
        await work(len(times))
        now, by_now = node.now, node.used
        times.append(max(1e-9, now - since))
        used.append(by_now - before)
        since, before = now, by_now
    return times, used


def halts(times: Sequence[float], used: Sequence[float]) -> float:
    """Seconds from one to the next that the core was taken away, in pieces of work of so many seconds and so many of a
    core; 0 = it never was. Those that were interrupted took longer, for what they did, than half of what all lost."""
    least = (1 + math.fsum(times) / max(1e-9, math.fsum(used))) / 2
    count = sum(time_s > least * used_s for time_s, used_s in zip(times, used, strict=True))
    return math.fsum(times) / count if count else 0.0


def held_back(node: Node, before: int | None) -> bool:
    """Whether a quota has held this rank back more often than before, or nobody knows."""
    return before is None or node.throttled != before
