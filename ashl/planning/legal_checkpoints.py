"""Checkpoints, refused where none could be made."""

from collections.abc import Sequence

from ashl.cluster.summing import beside_of
from ashl.errors import UsageError
from ashl.plan.plan import StagePlan
from ashl.planning.build import Parts, StageParts
from ashl.planning.legal import carried_by
from ashl.stage.stage import CHURN, sums_beside
from ashl.topology.all_reduce import AllReduce
from ashl.topology.gossip import RoamingRule, RoundRule
from ashl.topology.parameter_server import ServerRule
from ashl.topology.partial_all_reduce import PartialAllReduce


def check_checkpoints(every_s: float | None, parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse to promise checkpoints where none can be made."""
    if every_s is None:
        return
    real, slowed = parts.runtime.name != "sim", beside_of(parts.cluster) is not None
    if slowed and not real and any(sums_beside(own.sync, own.topology, own.overlap) for own in parts.stages):
        raise UsageError(
            "run.checkpoint_s: by the profile sums and computing slow each other down, and no checkpoint holds how far "
            "both are; drop it, or take overlap=none"
        )
    if real and len(stages) > 1 and any(map(in_one_round, parts.stages)):
        raise UsageError(
            "run.checkpoint_s: real processes leave checkpoints of sync=hop and sync=d_admm in plans of one stage "
            "only, as workers come to another after different numbers of rounds; drop it, or take one stage"
        )
    lockstep = in_lockstep(parts, len(stages[0].workers))
    for stage, own in zip(stages, parts.stages, strict=True):
        if real and not (lockstep or comes_anew(own)):
            raise UsageError(
                f"run.checkpoint_s: in stage {stage.name} not all go round by round, and real processes leave "
                "checkpoints only then, where servers merge their updates, or where models are averaged in groups or "
                "pairs; drop it, or take sync=bsp, sync=local_sgd or sync=ssp"
            )


def in_lockstep(parts: Parts, num_workers: int) -> bool:
    """Whether in every stage nothing is on its way at the top of everybody's loop, but what is sent from there, or
    said again where a run goes on."""
    return all(_in_lockstep(own, num_workers) for own in parts.stages)


def _in_lockstep(own: StageParts, num_workers: int) -> bool:
    sync = own.sync
    if not sync.in_rounds or sync.quorum(num_workers) < num_workers:
        return False
    return isinstance(sync, ServerRule | RoundRule) or isinstance(own.topology, AllReduce)


def says_again(parts: Parts) -> bool:
    """Whether workers that go round by round, and go on from a checkpoint, first say again what was on its way."""
    return any(isinstance(own.sync, RoundRule) and own.sync.lag for own in parts.stages)


def in_one_round(own: StageParts) -> bool:
    """Whether workers are kept at the begin of one round, though each comes to it when it does."""
    return isinstance(own.sync, RoamingRule) and own.sync.kept == "round"


def comes_anew(own: StageParts) -> bool:
    """Whether workers may resume from a server's state, or each from its own; see `ashl.topology.parameter_server`,
    `ashl.topology.partial_all_reduce` and `ashl.topology.coordinator`."""
    if isinstance(own.topology, PartialAllReduce):
        return True
    if isinstance(own.sync, RoamingRule):
        return bool(own.sync.kept)
    return own.topology.has_server and CHURN in carried_by(own.topology, own.sync) and own.overlap.serial
