"""Notes on a declared `cluster.exchange_s`: no NIC is ever busy, so contention costs nothing."""

from collections.abc import Iterable, Mapping
from typing import Any


def note_comparison(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a note on the contention that a comparison ignores because of `cluster.exchange_s`.

    Args: `configs` are flat, with the names of the options.
    """
    free = [config for config in configs if config.get("cluster.exchange_s") is not None]
    graphs = {config.get("topology.graph") for config in free if config.get("topology") == "gossip"}
    compared = (
        ("topologies", len({config.get("topology") for config in free}) > 1),
        ("graphs", len(graphs) > 1),
        ("MATCHA's budget", any(config.get("sync") == "matcha" for config in free)),
        ("numbers of workers", len({config.get("cluster.num_workers") for config in free}) > 1),
    )
    what = " and ".join(name for name, there in compared if there)
    if not what:
        return []
    return [
        f"This comparison of {what} is without contention: with cluster.exchange_s a message takes"
        " the same time however many others are in flight. For contention, set"
        " cluster.exchange_s=null, cluster.bandwidth_mbit_s and cluster.latency_s."
    ]
