"""Costs of uncontended transfers, and the timeline of a step: its layer groups and their
exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from ashl.cluster.all_reduce_costs import contention_of
from ashl.cluster.network import ExchangeNetwork, NicNetwork, make_network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import NS, Speed, speed_of
from ashl.compression.contract import EncodeContext
from ashl.overlap.timeline import Bucket, StepTimeline, untimed_timeline
from ashl.plan.plan import StagePlan
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from ashl.stage.contract import Ranks

LinkOf = Callable[[int, int], CompressionPipeline]  # pipeline of the elements [start, stop)
WARM = 1_000_000  # an epoch after the end of every warm-up


class Uncontended:
    """Costs of transfers at the start of a run; those of collectives are cached for all members."""

    def __init__(self, network: ExchangeNetwork | NicNetwork) -> None:
        self._network = network
        self._sum_ns, self._gather_ns = cache(network.all_reduce_ns), cache(network.all_gather_ns)

    def transfer_ns(self, src: int, dst: int, nbytes: int) -> int:
        return self._network.transfer_ns(src, dst, nbytes)

    def latency_ns(self, src: int, dst: int) -> int:
        """Return the latency of a message with a payload."""
        if isinstance(self._network, ExchangeNetwork):
            return 0
        return self._network.latency_ns(src, dst, 1, 0)

    def at_server_ns(self, workers: Ranks, server: int, nbytes: int, *, out: bool) -> int:
        """Return the time for which these bytes of each worker occupy the server's NIC, or the
        slowest worker's NIC if that takes longer.

        `out` is the direction as seen from the server.
        """
        if isinstance(self._network, ExchangeNetwork):
            return max(self.transfer_ns(rank, server, nbytes) for rank in workers)
        service_ns = partial(self._network.service_ns, nbytes=nbytes, now_ns=0, inner=False)
        own_ns = max(service_ns(rank, out=not out) for rank in workers)
        return max(own_ns, len(workers) * service_ns(server, out=out))

    def all_reduce_ns(self, group: Ranks, nbytes: int, now_ns: int) -> int:
        return self._sum_ns(group, nbytes, now_ns)

    def all_gather_ns(self, group: Ranks, total: int, now_ns: int) -> int:
        return self._gather_ns(group, total, now_ns)


def make_timeline(
    stage: StagePlan,
    cluster: Any,
    groups: Sequence[Bucket],
    link: LinkOf | None = None,
    server: bool = False,
    algorithm: str | None = None,
) -> StepTimeline | None:
    """Return the timeline of a step of the slowest worker and of the exchange of all workers.

    The exchange is an all-reduce, with the codec of each message's `link` if it is compressed. With
    a server it is the pushes and pulls of all workers through the server's NIC. Messages in flight
    at once share their latency there.
    Returns: None if the costs are not declared.
    """
    if not isinstance(cluster, Cluster) or cluster.missing_costs():
        return None
    steady = replace(cluster, jitter=0.0, events=())
    speed = speed_of(steady, stage.workers[0].batch, seed=0)
    costs = make_network(steady, 4 * groups[0].stop, algorithm)
    all_workers = tuple(range(len(stage.workers)))
    return make_group_timeline(all_workers, stage, speed, Uncontended(costs), groups, link, server)


def make_group_timeline(
    members: Ranks,
    stage: StagePlan,
    speed: Speed,
    costs: Uncontended,
    groups: Sequence[Bucket],
    link: LinkOf | None,
    server: bool,
) -> StepTimeline:
    """Return the timeline of a step of the slowest of `members`.

    Only these members push and pull. All-reduces are over all workers.
    """
    all_workers = tuple(range(len(stage.workers)))
    d = groups[0].stop
    step_ns = {
        rank: speed.cost_ns(rank, "compute", stage.workers[rank].batch, 0) or 0 for rank in members
    }

    def ready_ns(group: Bucket) -> int:
        done = (d - group.start) / d if link else 0.0  # share of the elements that are encoded
        encoded_ns = {rank: speed.cost_ns(rank, "compress", done, 0) or 0 for rank in members}
        return max(round(step_ns[rank] * group.ready) + encoded_ns[rank] for rank in members)

    timeline = StepTimeline(
        ready_ns=tuple(map(ready_ns, groups)),
        nbytes=untimed_timeline(groups).nbytes,
        cost_ns=partial(costs.all_reduce_ns, all_workers, now_ns=0),
        half_ns=lambda nbytes: costs.all_gather_ns(
            all_workers, -(-nbytes // (4 * len(all_workers))) * 4 * len(all_workers), 0
        ),
        needed_ns=tuple(round(max(step_ns.values()) * group.needed) for group in groups),
        groups=tuple(groups),
    )
    if (contention := contention_of(speed.cluster)) is not None:
        timeline = replace(
            timeline,
            pace_reduction=contention.pace_reduction,
            collective_slowdown=contention.collective_slowdown,
            start_ns=contention.start_s * NS,
        )
    if server:
        server_rank = len(all_workers)
        latency_ns = max(costs.latency_ns(rank, server_rank) for rank in members)
        up_ns = partial(costs.at_server_ns, members, server_rank, out=False)
        down_ns = partial(costs.at_server_ns, members, server_rank, out=True)
        timeline = replace(
            timeline,
            ready_ns=tuple(ready + latency_ns for ready in timeline.ready_ns),
            cost_ns=up_ns,
            half_ns=down_ns,
            needed_ns=tuple(needed - latency_ns for needed in timeline.needed_ns),
            answer_ns=latency_ns + down_ns(4 * d),
            pace_reduction=0.0,
            collective_slowdown=1.0,
            start_ns=0.0,
        )
    return timeline if link is None else compress_timeline(timeline, stage, costs, groups, link)


def compress_timeline(
    timeline: StepTimeline,
    stage: StagePlan,
    costs: Uncontended,
    groups: Sequence[Bucket],
    link: LinkOf,
) -> StepTimeline:
    """Return the timeline with messages of the length that their codecs give them."""
    whole = link(0, groups[0].stop)
    all_workers = tuple(range(len(stage.workers)))
    shares = [worker.compression_ratio for worker in stage.workers]
    linear = whole.traits.linear

    @cache
    def body_ns(first: int, last: int, share: float | None) -> int:
        own = link(groups[last - 1].start, groups[first].stop)
        context = EncodeContext(ratio=share, epoch=WARM)
        payload = own.encode(CodecState(), SizeOnly(0), context)
        if linear:
            return costs.all_reduce_ns(all_workers, own.summand(payload, context).nbytes, 0)
        return costs.all_gather_ns(all_workers, len(all_workers) * payload.nbytes, 0)

    latency_ns = (costs.all_reduce_ns if linear else costs.all_gather_ns)(all_workers, 0, 0)
    ratio = None
    if whole.codec.ratio is not None:
        ratio = min(shares) if linear else max(shares)  # as `topology.exchange` does
    return replace(timeline, cost_ns=lambda _: latency_ns, ratio=ratio, body_ns=body_ns)
