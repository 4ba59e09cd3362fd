"""What partial all-reduce asks its sync mode: which workers average with each other next.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized Training", ASPLOS 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ashl.errors import UsageError
from ashl.option import Count, Number, option
from ashl.stage.rule import Members, Rule

if TYPE_CHECKING:
    from ashl.topology.group_generator import Groups

GroupSize = Annotated[int, Number, Field(ge=2, lt=2**31)]


@option
class GroupRule(Rule, contract=True):
    """Models are averaged in groups; each scheduler says in which."""

    averages: ClassVar[bool] = True
    ordered: ClassVar[bool] = False  # whether groups follow one order that all workers share: none is a conflict
    group_size: ClassVar[int | None] = None  # workers of a group; None = as the scheduler draws them
    section_length: Count | Literal["plan"]

    @property
    def local_steps(self) -> int | str:  # type: ignore[override]
        """H, between two averages."""
        return self.section_length

    def quorum(self, num_workers: int) -> int:
        """How many meet. Raises UsageError where there are not so many."""
        size = self.group_size or num_workers
        if size > num_workers:
            raise UsageError(
                f"sync.group_size={size} is more than the {num_workers} workers that there are; take at most "
                f"{num_workers}"
            )
        return size

    def draw(self, state: Groups, asker: int, now_ns: int) -> list[Members]:
        """The groups to make, in order, now that this worker asks and has none."""
        raise NotImplementedError

    def wakes(self, state: Groups) -> int | None:
        """The moment to draw again, where time matters; in nanoseconds."""
        return None

    def groups(self, nodes: Sequence[int]) -> list[Members]:
        """Groups that are known before the run."""
        return []


def machines(nodes: Sequence[int], workers: Iterable[int]) -> list[list[int]]:
    """These workers by machine, in the order of the machines; within each in the order given."""
    teams: dict[int, list[int]] = {}
    for worker in workers:
        teams.setdefault(nodes[worker], []).append(worker)
    return [teams[node] for node in sorted(teams)]
