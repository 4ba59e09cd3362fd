"""Costs by layer group and by message: those of a declared cluster, and plans by those that were
measured.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import NS
from ashl.errors import UsageError
from ashl.learn.learner import Learner
from ashl.overlap.timeline import end_shares, untimed_timeline
from ashl.plan.alpha_beta import LARGE, SMALL, AlphaBeta, fit_line
from ashl.plan.plan import Plan
from ashl.plan.profile import Profile
from ashl.planning.instantiate import layer_groups


def with_measured_readiness(plan: Plan, known: Profile | None) -> Plan:
    """The plan with the moments at which layer groups are ready, where a profile has them. Raises
    UsageError.
    """
    if known is None or known.source == "declared" or not known.group_bytes:
        return plan
    if known.group_bytes != untimed_timeline(layer_groups(plan)).nbytes:
        raise UsageError(known.clash("other layer groups than the model has"))
    return replace(plan, shares=known.shares, needed=known.needed)


def with_layer_group_costs(
    profile: Profile, plan: Plan, learner: Learner, cluster: Cluster, known: Profile | None = None
) -> Profile:
    """A declared profile with costs by layer group and by message, as the cluster has them; layer
    groups are ready when the profile says that the cluster is made of, where it is.
    """
    groups = layer_groups(
        with_measured_readiness(replace(plan, work=plan.work or learner.work()), known)
    )
    passes = [after - before for before, after in pairwise((0.0, *end_shares(groups)))]
    forward, backward = passes[: len(groups)][::-1], passes[len(groups) :]
    steady = replace(cluster, jitter=0.0, events=())
    costs, team, server = (
        network(steady, profile.dense_bytes),
        tuple(range(profile.num_workers)),
        profile.num_workers,
    )

    def line(cost_ns: Callable[[int], int]) -> AlphaBeta:
        return fit_line({nbytes: [cost_ns(nbytes) / NS] for nbytes in (*SMALL, *LARGE)})

    workers = tuple(
        replace(
            worker,
            forward_s=tuple(worker.step_s * share for share in forward),
            backward_s=tuple(worker.step_s * share for share in backward),
            push_line=line(partial(costs.transfer_ns, rank, server)),
            pull_line=line(partial(costs.transfer_ns, server, rank)),
        )
        for rank, worker in enumerate(profile.workers)
    )
    sums = line(lambda nbytes: costs.all_reduce_ns(team, nbytes, 0)) if len(team) > 1 else None
    return replace(
        profile, workers=workers, group_bytes=untimed_timeline(groups).nbytes, all_reduce=sums
    )
