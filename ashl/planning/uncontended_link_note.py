"""Notes on a declared `cluster.exchange_s`: no NIC is ever busy, so contention costs nothing."""

from collections.abc import Iterable, Mapping
from typing import Any

MANY = 16  # workers of one server from which a note is useful
HIDES = (
    "with cluster.exchange_s no NIC is ever busy, so {what}; cluster.exchange_s=null with"
    " cluster.bandwidth_mbit_s and cluster.latency_s has NICs"
)


def note_plan(config: Mapping[str, Any], num_workers: int) -> list[str]:
    """Return a note on the contention that a run ignores because of `cluster.exchange_s`."""
    topology, graph = config["choices"]["topology"], config["topology"].get("graph")
    if config["cluster"].get("exchange_s") is None:
        return []
    if topology == "gossip" and config["choices"].get("sync") == "matcha":
        what = "MATCHA's budget saves no time: a matching more costs nothing"
    elif topology == "gossip" and graph not in ("ring", "one_peer_exponential"):
        what = f"every neighbour beyond the first is free on graph {graph}"
    elif topology == "parameter_server" and num_workers >= MANY:
        what = f"{num_workers} workers never queue at the server"
    else:
        return []
    return [HIDES.format(what=what)]


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
    return (
        [HIDES.format(what=f"what many messages at once cost is no part of comparing {what}") + "."]
        if what
        else []
    )
