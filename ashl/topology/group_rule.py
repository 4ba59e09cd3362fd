"""What the schedulers of partial all-reduce share: parameters of the exchange, and who is on which machine.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized Training", ASPLOS 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ashl.errors import UsageError
from ashl.option import Count, Number, option
from ashl.stage.stage import Tally

GroupSize = Annotated[int, Number, Field(ge=2, lt=2**31)]


@option
class Grouping:
    """Models are averaged in groups; each scheduler says in which."""

    averages: ClassVar[bool] = True
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("partial_all_reduce",)
    section_length: Count | Literal["plan"]

    @property
    def local_steps(self) -> int | str:
        """H, between two averages."""
        return self.section_length

    def quorum(self, num_workers: int) -> int:
        """How many meet. Raises UsageError where there are not so many."""
        size: Any = getattr(self, "group_size", num_workers)
        if size > num_workers:
            raise UsageError(
                f"sync.group_size={size} is more than the {num_workers} workers that there are; take at most "
                f"{num_workers}"
            )
        return size

    def accepts(self, staleness: int) -> bool:
        return True

    def admit(self, tally: Tally) -> list[int]:
        return []


def machines(nodes: Sequence[int], workers: Iterable[int]) -> list[list[int]]:
    """These workers by machine, in the order of the machines; within each in the order given."""
    teams: dict[int, list[int]] = {}
    for worker in workers:
        teams.setdefault(nodes[worker], []).append(worker)
    return [teams[node] for node in sorted(teams)]
