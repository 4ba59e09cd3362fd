"""Where `cluster.exchange_s` is declared no port is ever occupied: what that hides, in a
sentence.
"""

from collections.abc import Iterable, Mapping
from typing import Any

MANY = 16  # workers at one server
HIDES = (
    "cluster.exchange_s keeps no port busy, so {what}; cluster.exchange_s=null with"
    " cluster.bandwidth_mbit_s and cluster.latency_s has ports"
)


def note_plan(config: Mapping[str, Any], num_workers: int) -> list[str]:
    """What a run leaves out by it."""
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
    """What a comparison of these runs leaves out by it; `configs` are flat, with the names of
    options.
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
