"""Messages of profiling: orders, exchanges of any size, sums, answers; and the local steps between
them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any

from ashl.aggregate.weighted import Push
from ashl.device import read_scalars
from ashl.learn.trainer import AnyTrainer
from ashl.plan.confidence import is_narrow
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import StageConfig
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerState

# requests of a worker: an empty exchange, a push, a pull, an answer, a push with a pull
EMPTY, UP, DOWN, RESULT, BOTH = range(5)
# orders besides GO: time a push and a pull of this size, or a sum of this size over all workers
LINK, SUM = -1, -2
WARM_UP_APPLIES = 3  # applied pushes before the one that is timed


class RunEndedError(Exception):
    """The run ends before all is measured; a worker has received this signal in `order`."""

    def __init__(self, *order: Message) -> None:
        super().__init__("the run ends while it measures")
        self.order = order


async def repeat_timing(
    once: Callable[[], Coroutine[None, None, float | None]], least: int, most: int
) -> list[float]:
    """Return times until their interval is narrow; fewer if `once` returns None."""
    times: list[float] = []
    while len(times) < least or (len(times) < most and not is_narrow(times)):
        if (taken := await once()) is None:
            break
        times.append(taken)
    return times


async def time_sum(ctx: RankContext, stage: StageConfig, nbytes: int) -> float:
    """Return the seconds of a sum of `nbytes` bytes over all workers, from this worker's
    arrival.
    """
    start = ctx.now
    await ctx.all_reduce(empty_payload(stage, nbytes), stage.workers)
    return ctx.now - start


def empty_payload(stage: StageConfig, nbytes: int) -> Any:
    """Return a payload of zeros of `nbytes` bytes."""
    return make_payload(stage.trainer, nbytes)


@lru_cache(maxsize=4)  # allocated once, because a run allocates before it sends
def make_payload(trainer: AnyTrainer, nbytes: int) -> Any:
    return trainer.make_placeholder(nbytes / trainer.dense_bytes)


async def time_exchange(
    ctx: RankContext, stage: StageConfig, what: int, nbytes: int | None = None
) -> float:
    """Return the seconds until a payload has arrived and its receipt has returned.

    Args: `nbytes` defaults to those of the dense model. Raises: RunEndedError.
    """
    nbytes = stage.trainer.dense_bytes if nbytes is None else nbytes
    payload, start = empty_payload(stage, nbytes) if what in (UP, BOTH) else None, ctx.now
    await ctx.send(stage.server, stage.tag("ask"), payload, (what, nbytes))
    answer = await ctx.recv(stage.tag("answer"), stage.tag("order"))
    if answer.tag == stage.tag("order"):
        raise RunEndedError(answer)
    return ctx.now - start


async def send_order(
    ctx: RankContext,
    stage: StageConfig,
    members: Sequence[int],
    signal: int,
    value: int = 0,
    count: int = 0,
) -> None:
    """Send these workers an order with its arguments."""
    for rank in members:
        await ctx.send(rank, stage.tag("order"), None, (signal, value, count))


async def collect_answers(
    ctx: RankContext, stage: StageConfig, members: Sequence[int]
) -> dict[int, tuple[float, ...]]:
    """Return the answers of these workers; meanwhile answer their exchanges.

    Raises: RunEndedError.
    """
    found: dict[int, tuple[float, ...]] = {}
    while len(found) < len(members):
        message = await ctx.recv(stage.tag("ask"), before_s=stage.stop_criteria.deadline_s)
        if message is None or ctx.stop_reason:
            raise RunEndedError
        what, *values = message.meta
        if what == RESULT:
            found[message.src] = (
                *values,
                *(() if message.payload is None else message.payload.tolist()),
            )
        else:
            payload = empty_payload(stage, int(values[0])) if what in (DOWN, BOTH) else None
            await ctx.send(message.src, stage.tag("answer"), payload)
    return found


async def time_apply(ctx: RankContext, stage: StageConfig, state: ServerState) -> float:
    """Return the seconds of applying one push; the model does not change."""
    push = Push(0, empty_payload(stage, stage.trainer.dense_bytes), 1, 1, 0, 0.0, 0.0, 0.0, 0.0)

    def apply() -> None:
        stage.outer.step(state.outer_state, state.params, stage.aggregate.fold((push,), [1.0]), 0.0)

    # The first calls of a process also allocate memory and start threads: up to 20 times as long.
    for _ in range(WARM_UP_APPLIES):
        await ctx.compute(apply, work=0, kind="apply")
    start = ctx.now
    await ctx.compute(apply, work=1, kind="apply")
    return ctx.now - start


def time_step(
    ctx: RankContext, stage: StageConfig, state: WorkerState, k: int, batch: int
) -> list[float]:
    """Compute the k-th local step and return its loss; the model does not change."""
    span = range(k * batch, (k + 1) * batch)
    return read_scalars(
        [stage.trainer.local_step(state.params, state.moments, ctx.rank, k, 0.0, span)[0]]
    )
