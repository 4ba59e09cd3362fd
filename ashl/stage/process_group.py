"""Collectives of the workers that merge: for all-reduce and for protocols of codecs
(`ashl.compression.contract.Team`).

When a member fails, a collective or protocol in flight raises `GroupBrokenError`, which the caller
of the merge catches. A rank that waits for a message learns of the failure from the kernel, or from
its peer (`give_up`).

Every merge piggybacks two scalars: a share of the mean loss, and the control signal of rank 0. They
travel with the first message of each member, count for neither bytes nor time, and are returned as
sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from ashl.learn.device import to_host
from ashl.runtime.effects import PEER_FAILED, CollectiveAborted, Compute
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly
from ashl.stage.stage import Stage

T = TypeVar("T")
NUMBERS = 2  # that ride along
GIVEN_UP = "given up"


class GroupBrokenError(Exception):
    """A member is gone, and with it what was awaited of all."""


def check_complete(result: Any) -> Any:
    """What came of a collective. Raises TeamBrokenError where a member is lost."""
    if result.__class__ is CollectiveAborted:
        raise GroupBrokenError
    return result


@dataclass
class ProcessGroup:
    """The workers of a stage at one rank. `loss` and `word` are this rank's before a merge and the
    sums after it.
    """

    ctx: RankContext
    stage: Stage
    ranks: tuple[int, ...]
    weights: list[float]  # c_j
    loss: float = 0.0
    signal: float = 0
    carried: bool = False  # whether they have gone with a message of this merge
    share: float = 1.0  # of the model that is exchanged
    epoch: int = 0  # how many losses had been taken into account when it was formed
    incarnations: tuple[int, ...] = ()  # how often each member had been lost by then, where one had

    @classmethod
    def of(
        cls, ctx: RankContext, stage: Stage, epoch: int = 0, incarnations: tuple[int, ...] = ()
    ) -> ProcessGroup:
        """All workers of a stage."""
        return cls(
            ctx, stage, stage.workers, stage.team_weights, epoch=epoch, incarnations=incarnations
        )

    def begin(self, loss: float, signal: float) -> None:
        """A merge begins."""
        self.loss, self.signal, self.carried = loss, signal, False

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def place(self) -> int:
        return self.ranks.index(self.ctx.rank)

    @property
    def weight(self) -> float:
        return self.weights[self.place]

    @property
    def not_finite(self) -> bool:
        return math.isnan(self.loss)

    async def all_reduce(self, x: Any, weight: float = 1.0, key: int = 0, credit: int = 0) -> Any:
        if self.carried:
            x = x if weight == 1 else x * weight
            return check_complete(
                await self.ctx.all_reduce(x, self.ranks, key=key, credit=credit, epoch=self.epoch)
            )
        if isinstance(x, SizeOnly):
            signal = SizeOnly(x.nbytes, int(self.signal))
            total = check_complete(
                await self.ctx.all_reduce(
                    signal, self.ranks, "sum", NUMBERS, key, credit, self.epoch
                )
            )
            self._carry(0.0, total.signal)
            return SizeOnly(total.nbytes)
        packed = x.new_empty(x.numel() + NUMBERS)
        torch.mul(x, weight, out=packed[:-NUMBERS])
        packed[-2], packed[-1] = self.loss, self.signal
        total = check_complete(
            await self.ctx.all_reduce(packed, self.ranks, "sum", NUMBERS, key, credit, self.epoch)
        )
        self._carry(*to_host(total[-NUMBERS:]).tolist())
        return total[:-NUMBERS]

    async def gather(self, chunk: Any) -> Any:
        """All members' chunks of a sum (`ashl.runtime.sums.chunk`), as one vector."""
        if self.carried:
            return await self.ctx.all_reduce(chunk, self.ranks, "gather")
        if isinstance(chunk, SizeOnly):
            total = await self.ctx.all_reduce(
                SizeOnly(chunk.nbytes, int(self.signal)), self.ranks, "gather"
            )
            self._carry(0.0, total.signal)
            return SizeOnly(total.nbytes)
        packed = chunk.new_empty(chunk.numel() + NUMBERS)
        packed[:-NUMBERS], packed[-2], packed[-1] = chunk, self.loss, self.signal
        rows = (await self.ctx.all_reduce(packed, self.ranks, "gather", piggybacked=NUMBERS)).view(
            self.size, -1
        )
        self._carry(*to_host(sum_in_rank_order(list(rows[:, -NUMBERS:]))).tolist())
        return rows[:, :-NUMBERS].flatten()

    async def all_gather(self, x: Any) -> list[Any]:
        if self.carried:
            return check_complete(await self.ctx.all_gather(x, self.ranks, epoch=self.epoch))
        if isinstance(x, SizeOnly):
            parts = check_complete(
                await self.ctx.all_gather(
                    SizeOnly(x.nbytes, int(self.signal)), self.ranks, epoch=self.epoch
                )
            )
            self._carry(0.0, sum(part.signal for part in parts))
            return parts
        tail = torch.tensor(
            [self.loss, self.signal], dtype=torch.float64, device=str(x.device)
        ).view(torch.uint8)
        sent = torch.cat([x, tail])
        parts = check_complete(
            await self.ctx.all_gather(sent, self.ranks, piggybacked=tail.numel(), epoch=self.epoch)
        )
        sums = sum_in_rank_order(
            [part[-tail.numel() :].clone().view(torch.float64) for part in parts]
        )
        self._carry(*to_host(sums).tolist())
        return [part[: -tail.numel()] for part in parts]

    async def send(self, place: int, name: str, payload: Any, *numbers: float) -> None:
        tag = self.stage.tag(name, self.epoch)
        await self.ctx.send(self.ranks[place], tag, payload, (self.loss, self.signal, *numbers))

    async def recv(
        self, place: int, name: str, final: bool = False
    ) -> tuple[Any, tuple[float, ...]]:
        """(body, numbers) from one other. What rides along is added up, but `final` from one who
        has everything. Raises TeamBrokenError where that one is lost, or has given up.
        """
        tag, given_up = self.stage.tag(name, self.epoch), self.stage.tag(GIVEN_UP, self.epoch)
        tags = (tag, given_up, PEER_FAILED) if self.stage.elastic else (tag,)
        while (message := await self.ctx.recv(*tags, src=self.ranks[place])).tag != tag:
            if message.tag == given_up or message.meta[0] >= (
                self.incarnations[place] if self.incarnations else 0
            ):
                raise GroupBrokenError  # else it was an earlier life that is over
        loss, signal, *numbers = message.meta
        self._carry(*((loss, signal) if final else (self.loss + loss, self.signal + signal)))
        return message.body, tuple(numbers)

    async def give_up(self, places: Sequence[int]) -> None:
        """Tell these, who may wait for a message of a protocol that has come to nothing."""
        for place in places:
            await self.ctx.send(self.ranks[place], self.stage.tag(GIVEN_UP, self.epoch))

    async def confirm_all_complete(self) -> None:
        """Where workers may be lost: all have come so far with a protocol of messages, so that none
        has what another lacks. Raises TeamBrokenError.
        """
        if self.stage.elastic and self.stage.link.has_own_messages:
            check_complete(
                await self.ctx.all_reduce(
                    torch.zeros(1), self.ranks, piggybacked=1, epoch=self.epoch
                )
            )

    def compute(self, fn: Callable[[], T], work: float = 0.0) -> Compute:
        return self.ctx.compute(fn, work=work * self.share, kind="compress")

    def decode(self, fn: Callable[[], T], bodies: int) -> Compute:
        """What takes so many bodies apart."""
        return self.ctx.compute(fn, work=bodies * self.share, kind="decode")

    def blank(self, nbytes: int) -> Any:
        return SizeOnly(nbytes)

    def _carry(self, loss: float, signal: float) -> None:
        self.loss, self.signal, self.carried = loss, signal, True
