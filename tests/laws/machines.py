"""Shared by the laws of costs."""

from typing import Any

from ashl.cluster.spec import Cluster

MS = 1_000_000  # nanoseconds


def cluster(n: int, **costs: Any) -> Cluster:
    """Workers at factor 1 behind links of 1 Mbit/s, unless `costs` say otherwise."""
    inner = ("node", "intra_node_bandwidth_mbit_s", "intra_node_latency_s")
    base = dict.fromkeys(
        ("num_workers", "link", "exchange_s", "server_bandwidth_mbit_s", *inner)
    ) | {
        "bandwidth_mbit_s": 1.0,
        "latency_s": 0.0,
        "compute": (1.0,) * n,
    }
    base |= dict.fromkeys(("compute_spread", "compress_s", "server_step_s", "jitter"), 0.0)
    base |= {"step_s": 0.01, "events": (), "churn": None, "failure_detection_s": 0.02}
    return Cluster(**base | costs)
