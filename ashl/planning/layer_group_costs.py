"""Costs by layer group and by message: those of a declared cluster, and measured ones in plans."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ashl.cluster.network import make_network
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
    """Return the plan with the measured moments at which layer groups are ready, if the profile has
    them.

    Raises: UsageError.
    """
    if known is None or known.source == "declared" or not known.group_bytes:
        return plan
    if known.group_bytes != untimed_timeline(layer_groups(plan)).nbytes:
        raise UsageError(known.explain_mismatch("other layer groups than the model has"))
    return replace(plan, shares=known.shares, needed=known.needed_shares)


def with_layer_group_costs(
    profile: Profile, plan: Plan, learner: Learner, cluster: Cluster, known: Profile | None = None
) -> Profile:
    """Return a declared profile with the cluster's costs by layer group and by message.

    The moments at which layer groups are ready are those of the profile `known`, if there is one.
    """
    groups = layer_groups(
        with_measured_readiness(replace(plan, work=plan.work or learner.work()), known)
    )
    passes = [after - before for before, after in pairwise((0.0, *end_shares(groups)))]
    forward, backward = passes[: len(groups)][::-1], passes[len(groups) :]
    steady = replace(cluster, jitter=0.0, events=())
    costs = make_network(steady, profile.dense_bytes)
    all_workers = tuple(range(profile.num_workers))
    server = profile.num_workers

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
    sums = (
        line(lambda nbytes: costs.all_reduce_ns(all_workers, nbytes, 0))
        if len(all_workers) > 1
        else None
    )
    return replace(
        profile, workers=workers, group_bytes=untimed_timeline(groups).nbytes, all_reduce=sums
    )
