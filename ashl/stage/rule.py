"""What a stage is made of, as types: the rule of a sync mode, and the topology whose loops ask it.

Each loop has a typed base of its own below `Rule`, with a default for every question, in the file of the loop:
`ServerRule` (parameter server), `StepRule` (all-reduce), `RoundRule` and `RoamingRule` (gossip), `GroupRule` (partial
all-reduce). A sync mode is legal where it is what the topology asks, and what travels beside it only where the topology
says that it carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from ashl.compression.contract import Estimator
from ashl.option import Contract, Count, Duration

if TYPE_CHECKING:
    from ashl.runtime.node import Node
    from ashl.stage.stage import Stage
    from ashl.stage.tally import Tally

Loop = Callable[["Node", "Stage", Any], Coroutine[Any, Any, int]]  # of one rank through one stage; its last word
Members = tuple[int, ...]  # sorted ranks

CODEC, WEIGHTS, PULLS, STATISTICS = "codec", "weights", "pulls", "statistics"  # what a topology may carry
OVERLAP, DELAY = "overlap", "delay"  # whether a gradient may travel in parts, and work while the next is computed
OUTER = "outer"  # ... and whether it merges updates, so that an outer optimizer may step on them
CHURN = "churn"  # ... and whether it goes on without a worker that is lost, and with one that comes
CARGO = frozenset({CODEC, WEIGHTS, PULLS, STATISTICS, OUTER, OVERLAP, DELAY, CHURN})


class Network(Protocol):
    """What transfers cost, uncontended, in nanoseconds."""

    def transfer_ns(self, src: int, dst: int, nbytes: int) -> int: ...

    def all_reduce_ns(self, group: Members, nbytes: int, now_ns: int) -> int: ...

    def all_gather_ns(self, group: Members, total: int, now_ns: int) -> int: ...


class Rule(Contract, group="sync", strict=True):
    """What every sync mode says, whichever loop asks it. A field of the option may stand in for any of these."""

    # what travels, see `topology.local_work`
    exchange: ClassVar[Literal["gradient", "difference", "accumulated"]] = "difference"
    averages: ClassVar[bool] = False  # whether weights are renormalised over a merge, not over all workers
    local_steps: ClassVar[Count | Literal["plan"]] = 1  # H between two exchanges; "plan" = the plan's, by worker
    in_rounds: ClassVar[bool] = False  # whether nobody goes on before all have, so that the last round may be cut short
    interval_s: ClassVar[Duration] = 0.0  # seconds of the first local work, where seconds count instead of H
    estimator: ClassVar[Estimator | None] = None  # of the gradient, see `topology.estimate`; None = the codec says
    resizes: ClassVar[bool] = False  # whether batches change, so that weights have to follow the samples
    coordinated: ClassVar[bool] = False  # whether a coordinator takes part as rank n
    momentum_travels: ClassVar[bool] = False  # whether the optimizer's momentum goes along in every message
    codecs: ClassVar[tuple[dict[str, Any], ...]] = ()  # whose encoding is timed then, beside the chosen one's, as specs
    after_adam: ClassVar[bool] = False  # whether it goes on with the moments that Adam has left in the stage before
    by_part: ClassVar[bool] = False  # whether costs are measured by layer group, and of large messages and of sums
    carries: ClassVar[frozenset[str] | None] = None  # None = what the topology carries

    def quorum(self, num_workers: int) -> int:
        """How many workers' work makes a merge. Raises UsageError where there are not so many."""
        return num_workers

    def step(self, stage: Stage, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        """(moments, outer moments, model) after a merge of this sum: one outer step, or one of the optimizer where
        gradients are merged. Moments are None where each worker keeps its own. `state` stays as it is."""
        if self.exchange == "difference":
            return None, *stage.outer.step(state.outer_state, state.params, update, lr)
        exact, place = stage.link.flags.lossless, f"at merge {state.version}"
        moments, params = stage.trainer.apply(state.params, state.moments, update, lr, exact, place)
        return moments, state.outer_state, params

    def sums_whole(self, stage: Stage, tally: Tally) -> bool:
        """Whether the next sum over all workers is of updates as they are, whatever the codec."""
        return False

    def loop(self, stage: Stage, rank: int) -> Loop | None:
        """The loop of this rank, where the topology's does not serve."""
        return None

    def links(self, stage: Stage, rank: int) -> Members:
        """The ranks that such a loop exchanges messages with, beyond the topology's."""
        return ()


class Topology(Contract, group="topology"):
    """How models meet: the mechanism of an exchange, with the loop of each role."""

    asks: ClassVar[type[Rule] | tuple[type[Rule], ...]]  # the rules that its loops ask
    carries: ClassVar[frozenset[str]]  # what travels beside plain updates; what it lacks is refused
    has_server: ClassVar[bool] = False  # whether rank n holds the model
    coordinated: ClassVar[bool] = False  # whether a coordinator takes part as rank n
    replicas: ClassVar[bool] = False  # whether every worker has a model of its own, so that their mean is evaluated
    pull_ratio: ClassVar[float | None] = None  # kept share of what a pull changes
    servers: ClassVar[int] = 1  # that hold the model together, where there are servers
    algorithm: ClassVar[str | None] = None  # of its sums, where one is asked for, see `ashl.cluster.sum_rounds`

    def check(self, sync: Rule, num_workers: int, seed: int) -> None:
        """Raises UsageError where it is wrong for so many workers or for this sync mode."""

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        """How many servers and coordinators take part beside the workers, with the machine of each worker where it is
        known."""
        return int(self.has_server or self.coordinated)

    def server_of(self, stage: Stage, rank: int) -> int:
        """The server that this worker talks to, where there is one."""
        return stage.server

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The ranks that this one exchanges messages with."""
        raise NotImplementedError

    def hears(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The ranks that have to know when this one is gone."""
        return self.links(stage, rank)

    def groups(self, stage: Stage) -> Sequence[Members]:
        """Groups that are known before the run, so that processes can set them up."""
        return (stage.workers,) if stage.sync.by_part and stage.num_workers > 1 else ()

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What an exchange takes, uncontended."""
        raise NotImplementedError

    def begin(self, node: Node, stage: Stage) -> Any:
        """A rank's state before the first stage: the initial model, alike everywhere."""
        raise NotImplementedError

    async def come(
        self, node: Node, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Any] | None:
        """A worker comes while the others run: the stage that they are in, and its state there; None where the run is
        over. For topologies that carry churn. From a checkpoint, where all come anew, with (stage, state) of this rank
        as they were kept; a server has them gather."""
        raise NotImplementedError

    def role(self, stage: Stage, rank: int) -> Loop:
        """The loop of this rank."""
        raise NotImplementedError


def extra_ranks(topology: Topology, sync: Rule | None, nodes: tuple[int, ...] | None) -> int:
    """How many take part beside the workers, from rank n on: 1 where there is a parameter server or a coordinator
    (`ashl.topology.coordinator`), more where servers are a tree; else 0."""
    return topology.extra_ranks(nodes) or int(sync is not None and sync.coordinated)
