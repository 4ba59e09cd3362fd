"""The timeline of a step on a cluster with declared costs: its layer groups and their exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from ashl.cluster.all_reduce_costs import contention_of
from ashl.cluster.network import ExchangeNetwork, NicNetwork, make_network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import NS, speed_of
from ashl.compression.contract import EncodeContext
from ashl.overlap.timeline import Bucket, StepTimeline, untimed_timeline
from ashl.plan.plan import StagePlan
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from ashl.stage.contract import Ranks

LinkOf = Callable[[int, int], CompressionPipeline]  # pipeline of the elements [start, stop)
WARM = 1_000_000  # an epoch after the end of every warm-up


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
    speed = speed_of(replace(cluster, jitter=0.0, events=()), stage.workers[0].batch, seed=0)
    network = make_network(speed.cluster, 4 * groups[0].stop, algorithm)
    workers = tuple(range(len(stage.workers)))
    d = groups[0].stop
    step_ns = {
        rank: speed.cost_ns(rank, "compute", stage.workers[rank].batch, 0) or 0 for rank in workers
    }

    def ready_ns(group: Bucket) -> int:
        done = (d - group.start) / d if link else 0.0  # share of the elements that are encoded
        encoded_ns = {rank: speed.cost_ns(rank, "compress", done, 0) or 0 for rank in workers}
        return max(round(step_ns[rank] * group.ready) + encoded_ns[rank] for rank in workers)

    timeline = StepTimeline(
        ready_ns=tuple(map(ready_ns, groups)),
        nbytes=untimed_timeline(groups).nbytes,
        cost_ns=cache(partial(network.all_reduce_ns, workers, now_ns=0)),
        half_ns=cache(
            lambda nbytes: network.all_gather_ns(
                workers, -(-nbytes // (4 * len(workers))) * 4 * len(workers), 0
            )
        ),
        needed_ns=tuple(round(max(step_ns.values()) * group.needed) for group in groups),
        groups=tuple(groups),
    )
    if server:
        assert isinstance(network, NicNetwork)
        return with_server(timeline, network, workers)
    if (contention := contention_of(cluster)) is not None:
        timeline = replace(
            timeline,
            pace_reduction=contention.pace_reduction,
            collective_slowdown=contention.collective_slowdown,
            start_ns=contention.start_s * NS,
        )
    return timeline if link is None else compress_timeline(timeline, stage, network, link)


def with_server(timeline: StepTimeline, network: NicNetwork, workers: Ranks) -> StepTimeline:
    """Return the timeline with the pushes and pulls of all workers as its exchange."""
    server = len(workers)

    def at_server_ns(nbytes: int, *, out: bool) -> int:
        """Return the time for which these bytes of each worker occupy the server's NIC, or the
        slowest worker's NIC if that takes longer; `out` is the direction as seen from the server.
        """
        service_ns = partial(network.service_ns, nbytes=nbytes, now_ns=0, inner=False)
        own_ns = max(service_ns(rank, out=not out) for rank in workers)
        return max(own_ns, len(workers) * service_ns(server, out=out))

    latency_ns = max(network.latency_ns(rank, server, 1, 0) for rank in workers)
    down_ns = partial(at_server_ns, out=True)
    return replace(
        timeline,
        ready_ns=tuple(ready + latency_ns for ready in timeline.ready_ns),
        cost_ns=partial(at_server_ns, out=False),
        half_ns=down_ns,
        needed_ns=tuple(needed - latency_ns for needed in timeline.needed_ns),
        answer_ns=latency_ns + down_ns(sum(timeline.nbytes)),
    )


def compress_timeline(
    timeline: StepTimeline,
    stage: StagePlan,
    network: ExchangeNetwork | NicNetwork,
    link: LinkOf,
) -> StepTimeline:
    """Return the timeline with messages of the length that their codecs give them."""
    groups = timeline.groups
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
            return network.all_reduce_ns(all_workers, own.summand(payload, context).nbytes, 0)
        return network.all_gather_ns(all_workers, len(all_workers) * payload.nbytes, 0)

    latency_ns = (network.all_reduce_ns if linear else network.all_gather_ns)(all_workers, 0, 0)
    ratio = None
    if whole.codec.ratio is not None:
        ratio = min(shares) if linear else max(shares)  # as `topology.exchange` does
    return replace(timeline, cost_ns=lambda _: latency_ns, ratio=ratio, body_ns=body_ns)
