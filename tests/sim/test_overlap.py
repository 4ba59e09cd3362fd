"""Overlap on a rank in virtual time, compared with closed forms to the nanosecond, and over a
checkpoint.
"""

from hypothesis import given
from hypothesis import strategies as st

from ashl.cluster.network import make_network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Speed
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim
from ashl.size_only import SizeOnly
from tests.kernels import DENSE, Quiet, in_virtual_time
from tests.laws.machines import MS, cluster


def chain(
    machines: Cluster, forward: int, backward: list[int], sizes: list[int], keyed: bool
) -> int:
    """When one step over these layers ends, in ms: backwards from the last to the first, each sum
    sent at once.
    """
    ends = []

    async def main(ctx: RankContext) -> None:
        await ctx.compute(lambda: None, forward)
        tasks = []
        for layer in reversed(range(len(sizes))):
            await ctx.compute(lambda: None, backward[layer])
            tasks.append(ctx.spawn(one(ctx, sizes[layer], layer + 1 if keyed else 0)))
        for task in tasks:
            await ctx.join(task)
        ends.append(ctx.now_ns)

    async def one(ctx: RankContext, size: int, key: int) -> None:
        await ctx.all_reduce(SizeOnly(size * DENSE), (0, 1), key=key)

    Sim(2, Speed(machines, 1, 0), make_network(machines, DENSE), Quiet()).run(
        main, tick=lambda: None
    )
    assert len(set(ends)) == 1
    return ends[0] // MS


layers = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(st.integers(1, 9), layers, st.booleans(), st.integers(1, 4))
def test_a_chain_of_layers_takes_its_closed_form(forward, drawn, keyed, slower) -> None:
    """F + max_k (R_k + S_k): R_k when the slower worker has layer k's gradient, S_k the sums of
    layers 1 to k. In which order those go that wait does not matter for the end.
    """
    backward, sizes = [b for b, _ in drawn], [c for _, c in drawn]
    machines = cluster(2, compute=(1.0, float(slower)), step_s=0.001, exchange_s=0.002)
    ready = [slower * sum(backward[k:]) for k in range(len(drawn))]
    channel = [sum(sizes[: k + 1]) for k in range(len(drawn))]
    expected = slower * forward + max(r + s for r, s in zip(ready, channel, strict=True))
    assert chain(machines, forward, backward, sizes, keyed) == expected


def ends_of(machines: Cluster, teams: tuple[tuple[int, ...], ...]) -> list[int]:
    """When a collective of each team ends, in ms, all posted at once."""
    ends = [0] * len(teams)

    async def one(ctx: RankContext, number: int) -> None:
        await ctx.all_reduce(SizeOnly(DENSE), teams[number])
        ends[number] = ctx.now_ns // MS

    async def main(ctx: RankContext) -> None:
        for task in [ctx.spawn(one(ctx, i)) for i, team in enumerate(teams) if ctx.rank in team]:
            await ctx.join(task)

    ranks = machines.num_workers
    Sim(ranks, Speed(machines, 1, 0), make_network(machines, DENSE), Quiet()).run(
        main, tick=lambda: None
    )
    return ends


def test_teams_share_ports_and_nothing_else() -> None:
    """Declared exchanges occupy no NIC, so two process groups do not delay each other, and a group
    waits for itself.

    Over links a shared member's NICs serve one collective after the other.
    """
    declared = cluster(4, exchange_s=0.2)
    assert ends_of(declared, ((0, 1), (1, 2), (0, 1))) == [100, 100, 200]
    links = cluster(
        4, bandwidth_mbit_s=0.32
    )  # 4000 bytes in 100 ms: a sum of two takes two rounds of 50
    assert ends_of(links, ((0, 1), (1, 2), (0, 1))) == [100, 200, 300]
    assert ends_of(links, ((0, 1), (2, 3))) == [100, 100]


def test_inner_and_outer_collectives_do_not_share_ports() -> None:
    two_machines = cluster(
        4, node=(0, 0, 1, 1), bandwidth_mbit_s=0.32, intra_node_bandwidth_mbit_s=3.2
    )
    assert ends_of(two_machines, ((0, 1), (2, 3), (0, 2))) == [10, 10, 100]


def test_what_a_node_computes_beside_its_loop_is_not_free() -> None:
    """Two units of work at once end after two; the first to arrive is served first, for all kinds."""
    ends = {}

    async def work(ctx: RankContext, name: str, kind: str) -> None:
        await ctx.compute(lambda: None, 1, kind)
        ends[name] = ctx.now_ns // MS

    async def main(ctx: RankContext) -> None:
        beside = [
            ctx.spawn(work(ctx, name, kind)) for name, kind in (("a", "compute"), ("b", "apply"))
        ]
        await ctx.sleep(0)
        await work(ctx, "c", "compress")
        for task in beside:
            await ctx.join(task)

    machines = cluster(1, step_s=0.1, server_step_s=0.01, compress_s=0.001)
    in_virtual_time(main, machines)
    assert ends == {"a": 100, "b": 110, "c": 111}


# --- checkpoints
# --------------------------------------------------------------------------------------------------
