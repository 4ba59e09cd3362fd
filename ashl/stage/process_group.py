"""Collectives of the workers that merge: for all-reduce and for protocols of codecs
(`ashl.compression.contract.Team`).

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

from ashl.device import to_host
from ashl.plan.assignments import Assignments
from ashl.runtime.effects import Compute
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly
from ashl.stage.contract import StageConfig

T = TypeVar("T")
SCALARS = 2  # piggybacked scalars of a message


@dataclass
class ProcessGroup:
    """The workers of a stage, as one rank uses them. `loss` and `signal` are this rank's before a
    merge, and the sums over all members after it.
    """

    ctx: RankContext
    stage: StageConfig
    ranks: tuple[int, ...]
    weights: Sequence[float]  # c_j
    work: Assignments  # work of the round; the weights follow from it
    loss: float = 0.0
    signal: float = 0
    piggybacked_sent: bool = False  # True if loss and signal have been sent in this merge
    share: float = 1.0  # share of the model that is exchanged

    @classmethod
    def from_members(cls, ctx: RankContext, stage: StageConfig, work: Assignments) -> ProcessGroup:
        """Return the group of all members of a stage, with this work."""
        ranks, weights = ctx.members.ranks, work.weights
        if len(ranks) < len(weights):
            weights = [weights[rank] for rank in ranks]
        return cls(ctx, stage, ranks, weights, work)

    def begin(self, loss: float, signal: float) -> None:
        """Begin a merge."""
        self.loss = loss
        self.signal = signal
        self.piggybacked_sent = False

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
        """Return the sum of weight · x over the group, with the scalars piggybacked on the first
        collective of a merge.
        """
        if self.piggybacked_sent:
            x = x if weight == 1 else x * weight
            return await self.ctx.all_reduce(x, self.ranks, key=key, credit=credit)
        if isinstance(x, SizeOnly):
            signal = SizeOnly(x.nbytes, int(self.signal))
            total = await self.ctx.all_reduce(signal, self.ranks, "sum", SCALARS, key, credit)
            self._record_sums(0.0, total.signal)
            return SizeOnly(total.nbytes)
        packed = x.new_empty(x.numel() + SCALARS)
        torch.mul(x, weight, out=packed[:-SCALARS])
        packed[-2], packed[-1] = self.loss, self.signal
        total = await self.ctx.all_reduce(packed, self.ranks, "sum", SCALARS, key, credit)
        self._record_sums(*to_host(total[-SCALARS:]).tolist())
        return total[:-SCALARS]

    async def scatter(self, x: Any) -> Any:
        """Return this member's chunk of the sum over the group (a reduce-scatter)."""
        return await self.ctx.all_reduce(x, self.ranks, "scatter")

    async def gather(self, chunk: Any) -> Any:
        """Return all members' chunks of a sum (`ashl.runtime.sums.chunk`) as one vector."""
        if self.piggybacked_sent:
            return await self.ctx.all_reduce(chunk, self.ranks, "gather")
        if isinstance(chunk, SizeOnly):
            total = await self.ctx.all_reduce(
                SizeOnly(chunk.nbytes, int(self.signal)), self.ranks, "gather"
            )
            self._record_sums(0.0, total.signal)
            return SizeOnly(total.nbytes)
        packed = chunk.new_empty(chunk.numel() + SCALARS)
        packed[:-SCALARS], packed[-2], packed[-1] = chunk, self.loss, self.signal
        rows = (await self.ctx.all_reduce(packed, self.ranks, "gather", piggybacked=SCALARS)).view(
            self.size, -1
        )
        self._record_sums(*to_host(sum_in_rank_order(list(rows[:, -SCALARS:]))).tolist())
        return rows[:, :-SCALARS].flatten()

    async def all_gather(self, x: Any) -> list[Any]:
        """Return every member's bytes in rank order."""
        if self.piggybacked_sent:
            return await self.ctx.all_gather(x, self.ranks)
        if isinstance(x, SizeOnly):
            parts = await self.ctx.all_gather(SizeOnly(x.nbytes, int(self.signal)), self.ranks)
            self._record_sums(0.0, sum(part.signal for part in parts))
            return parts
        tail = torch.tensor(
            [self.loss, self.signal], dtype=torch.float64, device=str(x.device)
        ).view(torch.uint8)
        sent = torch.cat([x, tail])
        parts = await self.ctx.all_gather(sent, self.ranks, piggybacked=tail.numel())
        sums = sum_in_rank_order(
            [part[-tail.numel() :].clone().view(torch.float64) for part in parts]
        )
        self._record_sums(*to_host(sums).tolist())
        return [part[: -tail.numel()] for part in parts]

    async def send(self, place: int, name: str, payload: Any, *numbers: float) -> None:
        """Send a message of a protocol to the member at `place`."""
        meta = (self.loss, self.signal, *numbers)
        await self.ctx.send(self.ranks[place], self.stage.tag(name), payload, meta)

    async def recv(
        self, place: int, name: str, final: bool = False
    ) -> tuple[Any, tuple[float, ...]]:
        """Return (payload, numbers) from another member.

        The piggybacked scalars are added up; `final` ones replace the sums, as their sender has the
        sums of all.
        """
        message = await self.ctx.recv(self.stage.tag(name), src=self.ranks[place])
        loss, signal, *numbers = message.meta
        self._record_sums(*((loss, signal) if final else (self.loss + loss, self.signal + signal)))
        return message.payload, tuple(numbers)

    def compute(self, fn: Callable[[], T], work: float = 0.0) -> Compute:
        """Return the effect that encodes, at the cost of `work` dense vectors."""
        return self.ctx.compute(fn, work=work * self.share, kind="compress")

    def decode(self, fn: Callable[[], T], payloads: int) -> Compute:
        """Return the effect that decodes so many payloads."""
        return self.ctx.compute(fn, work=payloads * self.share, kind="decode")

    def _record_sums(self, loss: float, signal: float) -> None:
        """Record the sums of loss and signal so far."""
        self.loss = loss
        self.signal = signal
        self.piggybacked_sent = True
