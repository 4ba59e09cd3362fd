"""Under a declared `exchange_s` no port is ever busy: sweeps and reports say so where it
decides the outcome.
"""

import pytest
from rich.console import Console

from ashl.config.compose import compose
from ashl.config.flat import flat_config
from ashl.planning.uncontended_link_note import note_comparison
from ashl.study.grid import grid_lines, make_grid
from ashl.study.sweep import announce

PORTS = ["cluster.exchange_s=null", "cluster.bandwidth_mbit_s=10", "cluster.latency_s=0.001"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ("topology=gossip sync=d_psgd", "topology=gossip sync=d_psgd topology.graph=complete"),
            "comparison of graphs is",
        ),
        (("sync=bsp", "sync=bsp topology=all_reduce"), "comparison of topologies is"),
        (("topology=gossip sync=matcha",), "comparison of MATCHA's budget is"),
        (("sync=asp", "sync=asp cluster.num_workers=8"), "comparison of numbers of workers is"),
        (("sync=asp", "sync=bsp"), None),
    ],
)
def test_a_comparison_says_what_its_cluster_leaves_out(
    lines: tuple[str, ...], says: str | None
) -> None:
    configs = [flat_config(compose(["runtime=sim", *line.split()])) for line in lines]
    assert (
        [says in note for note in note_comparison(configs)] == [True]
        if says
        else not note_comparison(configs)
    )
    assert not note_comparison(flat_config(compose([*line.split(), *PORTS])) for line in lines)


def test_a_sweep_says_it_before_it_runs(tmp_path) -> None:
    asked = ["runtime=sim", "topology=gossip", "sync=d_psgd", "topology.graph=ring,complete"]
    console = Console(record=True, width=80)
    announce(console, make_grid(grid_lines(asked, None)), tmp_path / "[/x]", 2)
    assert "comparison of graphs is" in console.export_text()
