"""What goes back and forth while costs are measured: orders, exchanges of any size, sums, and what was found; and the
steps between them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from ashl.aggregate.weighted import Push
from ashl.learn.device import numbers
from ashl.plan.noise import is_narrow
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly
from ashl.stage.stage import Stage
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerState

EMPTY, UP, DOWN, RESULT, BOTH = range(5)  # what a worker asks of the server, or that it has done
LINK, SUM = -1, -2  # orders beside GO: time a message of this size both ways, or in a sum of all


class OverError(Exception):
    """The run ends before all is measured; a worker has received that word."""

    def __init__(self, *order: Message) -> None:
        super().__init__("the run ends while it measures")
        self.order = order


async def repeated(once: Callable[[], Coroutine[None, None, float | None]], least: int, most: int) -> list[float]:
    """Times until their interval is narrow; fewer where there is nothing more to measure (None)."""
    times: list[float] = []
    while len(times) < least or (len(times) < most and not is_narrow(times)):
        if (taken := await once()) is None:
            break
        times.append(taken)
    return times


async def time_sum(node: Node, stage: Stage, nbytes: int, group: int | None = None, *, gather: bool = False) -> float:
    """Seconds of a sum over all workers, or so many with this one, from when it has come to it; or of gathering so many
    bytes of each."""
    size = group or stage.num_workers
    first = node.rank // size * size
    body, members, start = blank(stage, nbytes), stage.workers[first : first + size], node.now
    if gather:
        await node.all_gather(body if isinstance(body, SizeOnly) else body.view(torch.uint8), members)
    else:
        await node.all_reduce(body, members)
    return node.now - start


def blank(stage: Stage, nbytes: int) -> Any:
    """A body of so many bytes: always the same one, as a run has what it sends before it does."""
    return stage.once(lambda stage: stage.trainer.blank(nbytes / stage.trainer.dense_bytes), ("blank", nbytes))


async def time_exchange(node: Node, stage: Stage, what: int, nbytes: int | None = None) -> float:
    """Seconds until a body of so many bytes, or of the dense model's, is there and its receipt is back. Raises
    OverError."""
    nbytes = stage.trainer.dense_bytes if nbytes is None else nbytes
    body, start = blank(stage, nbytes) if what in (UP, BOTH) else None, node.now
    await node.send(stage.server, stage.tag("ask"), body, (what, nbytes))
    answer = await node.recv(stage.tag("answer"), stage.tag("order"))
    if answer.tag == stage.tag("order"):
        raise OverError(answer)
    return node.now - start


async def instruct(
    node: Node, stage: Stage, members: Sequence[int], word: int, value: int = 0, group: int = 0, steps: bool = False
) -> None:
    """What is to be measured: of so many bytes or samples, by a group of so many, perhaps between steps."""
    for rank in members:
        await node.send(rank, stage.tag("order"), None, (word, value, group, int(steps)))


async def answers(
    node: Node, stage: Stage, members: Sequence[int], applied: ServerState | None = None
) -> dict[int, tuple[float, ...]]:
    """What these workers found, while their exchanges are answered, perhaps each after it has been applied as a push.
    Raises OverError."""
    found: dict[int, tuple[float, ...]] = {}
    if stage.sync.full:
        node.ledger.cut()  # as it does at workers
    while len(found) < len(members):
        message = await node.recv(stage.tag("ask"), before_s=stage.judge.deadline_s)
        if message is None or node.stopping:
            raise OverError
        what, *values = message.meta
        if what == RESULT:
            found[message.src] = (*values, *(() if message.body is None else message.body.tolist()))
        else:
            if applied is not None:
                await time_apply(node, stage, applied)
            body = blank(stage, int(values[0])) if what in (DOWN, BOTH) else None
            await node.send(message.src, stage.tag("answer"), body)
    return found


def sizes_of(stage: Stage) -> list[int]:
    """Bytes of what is sent: nothing, and around what the run will send."""
    dense = stage.trainer.dense_bytes
    return [0, *sorted({max(256, dense // share // 4 * 4) for share in (64, 8, 2, 1)}), 2 * dense]


def small_of(stage: Stage) -> int:
    """Bytes of a body that is small beside the model."""
    return max(256, stage.trainer.dense_bytes // 16 // 4 * 4)


async def time_apply(node: Node, stage: Stage, state: ServerState, count: int = 1) -> float:
    """Seconds of applying one push, or the same one so many times; the model stays as it is."""
    push = Push(0, blank(stage, stage.trainer.dense_bytes), 1, 1, 0, 0.0, 0.0, 0.0, 0.0)

    def apply() -> None:
        for _ in range(count):
            stage.outer.step(state.outer_state, state.params, stage.aggregate.fold((push,), [1.0]), 0.0)

    start = node.now
    await node.compute(apply, work=count, kind="apply")
    return node.now - start


def a_step(node: Node, stage: Stage, state: WorkerState, k: int, batch: int) -> list[float]:
    """The k-th of so many samples; the model stays as it is."""
    span = range(k * batch, (k + 1) * batch)
    return numbers([stage.trainer.local_step(state.params, state.moments, node.rank, k, 0.0, span)[0]])


def close_round(node: Node, stage: Stage, state: WorkerState) -> None:
    """What is timed in rounds is recorded round by round, as a run is, which takes time, too."""
    node.round(stage.index, state.round, 0, 0, dropped=False, loss=0.0)
    state.round += 1
