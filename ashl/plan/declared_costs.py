"""The profile of a cluster with declared costs."""

import math

from ashl.cluster.spec import Cluster
from ashl.errors import UsageError
from ashl.plan.profile import SCHEMA, Profile, WorkerProfile, rate_of


def profile_of_declared_costs(cluster: Cluster, model: str, num_params: int, batch: int) -> Profile:
    """Return the profile of the declared costs, with a free server NIC and before any event.

    Raises: UsageError, naming a missing cost.
    """
    for name in cluster.missing_costs():
        if name != "server_step_s":  # a cost of the server, not of a worker
            raise UsageError(
                f"cluster.{name}: not declared, and a profile without a measurement needs it (a"
                " missing cost is not zero); set a value, or measure with runtime=local"
            )
    assert cluster.step_s is not None
    assert cluster.compress_s is not None
    dense_bytes = 4 * num_params
    workers = []
    for rank in range(len(cluster.compute)):
        step_s = cluster.compute[rank] * cluster.step_s
        latency_s, up, down = _path_costs(cluster, rank, dense_bytes)
        workers.append(
            WorkerProfile(
                step_s=step_s,
                step_spread_s=cluster.jitter_of(rank) * step_s,
                step_noise_s=0.0,
                batch=batch,
                push_s=latency_s + (dense_bytes / up if up else 0.0),
                push_noise_s=0.0,
                push_loaded_s=None,
                pull_s=latency_s + (dense_bytes / down if down else 0.0),
                pull_noise_s=0.0,
                pull_loaded_s=None,
                latency_s=latency_s,
                push_bytes_s=up,
                pull_bytes_s=down,
                compress_s=cluster.compress_of(rank) or 0.0,
            )
        )
    server = (
        math.inf
        if cluster.exchange_s is not None
        else cluster.bytes_s(len(cluster.compute), True, False)
    )
    return Profile(
        schema=SCHEMA,
        model=model,
        num_params=num_params,
        dense_bytes=dense_bytes,
        device="any",
        source="declared",
        server_step_s=cluster.server_step_s,
        server_bytes_s=None if server == math.inf else server,
        ports=cluster.exchange_s is None,
        workers=tuple(workers),
    )


def _path_costs(
    cluster: Cluster, rank: int, dense_bytes: int
) -> tuple[float, float | None, float | None]:
    """Return (latency, bytes per second up and down) of one worker's path to the server.

    The network model is that of `ashl.cluster.network`.
    """
    link, server = cluster.links[rank], len(cluster.compute)
    if cluster.exchange_s is not None:
        rate = rate_of(link * cluster.exchange_s / 2, dense_bytes)
        return 0.0, rate, rate
    up, down = (
        min(cluster.bytes_s(rank, o, False) / link, cluster.bytes_s(server, not o, False))
        for o in (True, False)
    )
    return (
        link * cluster.latency_of(rank),
        None if up == math.inf else up,
        None if down == math.inf else down,
    )
