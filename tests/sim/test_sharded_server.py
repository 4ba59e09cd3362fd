"""A model in pieces on several servers: the same model as on one where all wait for all, in less
time.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from ashl.planning.instantiate import assemble_job
from ashl.topology import parameter_server, sharded_server
from ashl.topology.parameter_server import on_push
from ashl.topology.sharded_server import ShardedServer
from tests.support import planned, simulated
from tests.support import run as play

LINKS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=20",
    "cluster.server_bandwidth_mbit_s=20",
)
PORTS = (
    "cluster=homogeneous",
    *LINKS,
    "cluster.latency_s=0.002",
    "cluster.step_s=0.03",
    "model.hidden=[16]",
)
run = partial(simulated, *PORTS)
several = partial(run, "topology=sharded_server")
S_NS = 4 * (64 * 16 + 16 + 16 * 10 + 10) * 400  # of the model at 20 Mbit/s


@pytest.mark.limit("topology=sharded_server")
@pytest.mark.parametrize(
    "mode",
    [
        "sync=bsp optimizer.momentum=0.9 topology.servers=3 topology.partition_by=layers",
        "sync=local_sgd sync.local_steps=3 outer=nesterov eval.every_commits=8",
        "sync=bsp compression=cast compression.error_feedback=true",
        "sync=bsp compression=terngrad topology.servers=3 topology.partition_by=layers",
        (
            "sync=local_sgd compression=topk compression.per_layer=true topology.servers=4"
            " topology.partition_by=layers"
        ),
        (
            "schedule=post_local schedule.switch_epochs=0.2 schedule.momentum=reset"
            " optimizer.momentum=0.9"
        ),
    ],
)
def test_several_servers_are_one(mode) -> None:
    own = mode.split()
    one = run("stop.steps=24", *(o for o in own if not o.startswith("topology.")))
    ran = several("stop.steps=24", *own)
    assert len(ran.snapshots) == len(one.snapshots)
    assert all(
        torch.equal(x, y) for (_, x), (_, y) in zip(ran.snapshots, one.snapshots, strict=True)
    )
    assert ran.end["reason"] == one.end["reason"]
    assert ran.end["steps_by"] == one.end["steps_by"]
    assert ran.time_ns <= one.time_ns


def test_all_of_several_servers_end() -> None:
    chosen = ("sync=ssp", "cluster.compute=[1,2,3,5]", "stop.steps=40")
    ran = several("topology.servers=3", *chosen, "stop.steps=null", "stop.seconds=0.7")
    assert ran.end["reason"] == "seconds"
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_at_the_end_each_shows_its_piece_as_it_was_after_as_many_merges(monkeypatch) -> None:
    """The other servers are ahead by merges when they are notified, without a barrier."""
    seen: dict[tuple[int, int], torch.Tensor] = {}

    async def noted(ctx, stage, state, message) -> bool:
        merged = await on_push(ctx, stage, state, message)
        seen[ctx.rank, state.progress.version] = state.params
        return merged

    for module in (parameter_server, sharded_server):
        monkeypatch.setattr(module, "on_push", noted)
    links = (
        "cluster.bandwidth_mbit_s=200",
        "cluster.server_bandwidth_mbit_s=null",
        "cluster.latency_s=0.02",
    )
    uneven = ("cluster.compute=[1,1,1,2,3,1]", "cluster.step_s=0.004")
    ran = several("topology.servers=2", "sync=asp", *links, *uneven, "stop.steps=60")
    last = ran.end["merges"]
    assert max(version for _, version in seen) > last, "else the case proves nothing"
    assert torch.equal(ran.params, torch.cat([seen[6, last], seen[7, last]]))


def test_who_has_dropped_more_than_the_first_ends_all_the_same() -> None:
    uneven = (
        "cluster.compute=[1,1,2,3]",
        "cluster.step_s=0.01",
        "cluster.jitter=0.5",
        "runtime.gradients=false",
    )
    links = ("cluster.latency_s=0.005", "cluster.server_bandwidth_mbit_s=10")
    mode = ("sync=ringmaster", "sync.max_staleness=4")
    ran = several(
        "topology.servers=2", *mode, *links, *uneven, "stop.steps=37", "eval.every_commits=5"
    )
    assert ran.end["reason"] == "steps"


def test_each_piece_is_a_message_of_its_own() -> None:
    """One worker by hand: it sends the largest fifth of each half, and keeps the residual there."""
    plain = (
        "dataset=synthetic",
        "dataset.shape=[64]",
        "optimizer.momentum=0",
        "optimizer.weight_decay=0",
        "stop.steps=3",
    )
    one = ("cluster.num_workers=1", "compression=topk", "compression.ratio=0.2", *plain)
    ran = several("sync=bsp", *one)
    stage = assemble_job(ran.plan, "cpu").stages[0]
    model, _ = stage.trainer.init()
    halves = [held.runs[0] for held in stage.fragments]
    left = torch.zeros_like(model)
    for step in range(3):
        left = left + stage.trainer.gradient(model, 0, step)[1]
        sent = torch.zeros_like(model)
        for start, stop in halves:
            places = start + left[start:stop].abs().topk(round(0.2 * (stop - start))).indices
            sent[places] = left[places]
        model, left = model - stage.trainer.rate(0) * sent, left - sent
    assert len(halves) == 2
    torch.testing.assert_close(ran.params, model, rtol=0, atol=1e-6)
    payload = stage.fragment_stages[0].codec.encoded_nbytes
    assert ran.of("TimeTotals")[0]["bytes_up"] == 3 * sum(
        payload(0.2, stop - start) for start, stop in halves
    )


def test_an_asynchronous_stage_transfers_all_work_in_flight() -> None:
    """A worker that some servers have let go on is called back by them, so that all go into the
    next stage as one.
    """
    uneven = (
        "cluster.compute=[1,1,2,3]",
        "cluster.jitter=0.3",
        "compression=topk",
        "stop.steps=240",
    )
    mode = ("topology=sharded_server", "topology.servers=3", "sync=ssp")
    plan = planned(*PORTS, *mode, *uneven)
    (stage,) = plan.stages
    ran = play(
        replace(
            plan, stages=(replace(stage, name="a", until={"commits": 21}), replace(stage, name="b"))
        )
    )
    assert [end["reason"] for end in ran.of("StageEnd")] == ["commits", "steps"]
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)
    assert ran.end["steps"] == sum(ran.end["steps_by"])


@pytest.mark.parametrize(
    "mode",
    ["sync=bsp", "sync=bsp runtime.on_worker_failure=reshard", "sync=asp sync.local_steps=2"],
)
def test_a_failed_worker_is_detected_by_all(mode) -> None:
    """It fails while it computes: in rounds, what is left is the parameter server's run, to the
    bit.
    """
    fails = "cluster.events=[{time_s: 0.1, worker: 2, fail: true}]"
    chosen = (
        "cluster.compute=[1,1,2,1]",
        *mode.split(),
        fails,
        "stop.steps=80",
        "eval.every_commits=8",
    )
    ran, one = several("topology.servers=3", *chosen), run(*chosen)
    assert ran.end["reason"] == "steps"
    assert ran.end["commits"][2] < min(ran.end["commits"][:2])
    if "sync=bsp" in mode:
        assert ran.sha256 == one.sha256
        assert ran.end["commits"] == one.end["commits"]


def test_the_incast_is_shared_out() -> None:
    """Four pushes at once, each in as many pieces as there are servers: a merge is over once all
    ports are through.
    """
    for servers in (1, 2, 4):
        ran = several(
            "sync=bsp", "runtime.gradients=false", "stop.steps=4", f"topology.servers={servers}"
        )
        assert ran.time_ns == 30_000_000 + 2_000_000 + 4 * S_NS // servers


def test_pieces_are_as_equal_as_they_can_be() -> None:
    def cut(servers, how, *sizes):
        return [
            stop - start
            for start, stop in ShardedServer(servers=servers, partition_by=how).bounds(sizes)
        ]

    assert cut(3, "bytes", 4, 6) == [3, 4, 3]
    assert cut(2, "layers", 1, 1, 8, 1) == [2, 9]
    assert cut(3, "layers", 9, 1, 1) == [9, 1, 1]
    assert cut(4, "bytes", 4) == [1, 1, 1, 1]
