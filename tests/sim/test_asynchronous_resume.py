"""Asynchronous workers rejoin a server that was restored from a checkpoint, as in real runs, but in
virtual time.

A single worker has no message in flight, so it continues bit for bit.
"""

import pytest

from ashl.cluster.network import network
from ashl.cluster.speed import Speed
from ashl.config.construct import construct
from ashl.learn.device import HOST
from ashl.planning.instantiate import assemble
from ashl.run.evaluation import make_model_set
from ashl.runtime.plain_state import from_plain, to_plain
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim
from ashl.stage.program import program
from tests.support import Ran, planned, simulated

pytestmark = pytest.mark.usefixtures("short_forecasts")

RUN = (
    "cluster=homogeneous",
    "dataset.batch_size=16",
    "eval.every_commits=10",
    "optimizer.momentum=0.9",
)
PIECES = (
    "topology=sharded_server topology.servers=2 cluster.link=null cluster.exchange_s=null"
    " cluster.bandwidth_mbit_s=20 cluster.latency_s=0.001"
)


class Keeping(Sim):
    """Keeps every rank as it is at the top of its loop, from a version of the model on."""

    from_version = 10**9

    def safe_point(self, ctx: RankContext, stage: int, state) -> None:
        kept: dict[int, tuple] = self.__dict__.setdefault("kept", {})
        if state is not None and state.version >= self.from_version and ctx.rank not in kept:
            kept[ctx.rank] = stage, to_plain(state)


def ran(
    *overrides: str, version: int = 10**9, kept: dict[int, tuple] | None = None, comes: bool = True
) -> tuple[Ran, dict[int, tuple]]:
    """A run, from what was kept or from its beginning, and what it keeps itself."""
    plan = planned(*RUN, *overrides)
    job, cluster = assemble(plan, HOST), construct(plan.cluster, "cluster")
    stage = job.stages[0]
    found = Ran(plan, parts=make_model_set(stage), learner=job.learner)
    speed = Speed(cluster, stage.plan.workers[0].batch, plan.seed)
    sim = Keeping(plan.num_ranks, speed, network(cluster, stage.trainer.dense_bytes), found)
    sim.from_version = version

    def play(ctx: RankContext):
        if kept is None:
            return program(ctx, job.stages)
        index, state = kept[ctx.rank]
        return program(ctx, job.stages, saved=(index, from_plain(state, ("ashl",))), joins=comes)

    sim.run(play, tick=lambda: None)
    return found, sim.__dict__.get("kept", {})


@pytest.mark.parametrize(
    "mode",
    [
        "sync=asp compression=topk compression.ratio=0.1",
        "sync=ssp sync.local_steps=1 compression=qsgd",
        f"sync=asp compression=topk compression.ratio=0.1 {PIECES}",
        "sync=asp topology.pull_ratio=0.2 compression=topk compression.ratio=0.2 outer=nesterov",
    ],
)
def test_a_single_worker_resumes_bit_for_bit(mode: str) -> None:
    line = [*mode.split(), "cluster.compute=[1]", "stop.steps=60"]
    whole, kept = ran(*line, version=25)
    rest, _ = ran(*line, kept=kept)
    assert (rest.end["steps"], rest.end["merges"]) == (whole.end["steps"], whole.end["merges"])
    if (
        "pull_ratio" in mode
    ):  # the first pull is the model itself: what the last ones had left out comes with it
        assert rest.sha256 != whole.sha256
    else:
        assert rest.sha256 == whole.sha256 == simulated(*RUN, *line).sha256


@pytest.mark.parametrize(
    "mode",
    [
        "sync=ssp sync.staleness=1 compression=topk compression.ratio=0.1",
        "sync=fedbuff",
        "sync=backup sync.backups=1 compression=diana",
        "schedule=ashl schedule.loss_switch=2.2",
        f"sync=ssp sync.staleness=1 compression=topk compression.ratio=0.1 {PIECES}",
        f"sync=backup sync.backups=1 {PIECES}",
    ],
)
def test_what_the_server_had_merged_counts_and_the_rest_is_computed_again(mode: str) -> None:
    line = [*mode.split(), "cluster.compute=[1,2,4]", "stop.steps=240"]
    _, kept = ran(*line, version=3)
    server = from_plain(kept[3][1], ("ashl",))
    before = server.progress.report()
    assert 0 < before.steps < 240
    rest, _ = ran(*line, kept=kept)
    end = rest.end
    assert end["steps"] == sum(end["steps_by"]) >= 240
    assert all(now >= then for now, then in zip(end["steps_by"], before.steps_by, strict=True))
    assert sum(end["commits"]) > sum(before.commits)
    first = [min(r["round"] for r in rest.of("round") if r["rank"] == rank) for rank in range(3)]
    assert first == server.progress.rounds()


@pytest.mark.parametrize("overlap", [1, 3])
def test_messages_of_push_sum_that_were_on_their_way_are_said_again(overlap: int) -> None:
    line = (
        f"topology=gossip sync=sgp sync.overlap={overlap} topology.graph=ring"
        " cluster.compute=[1,3,2] stop.steps=60"
    )
    whole, kept = ran(*line.split(), version=7)
    assert [len(from_plain(state, ("ashl",)).in_flight) for _, state in kept.values()] == [
        overlap
    ] * 3
    rest, _ = ran(*line.split(), kept=kept)
    assert rest.sha256 == whole.sha256 == simulated(*RUN, *line.split()).sha256


@pytest.mark.parametrize(
    "mode", ["sync=bsp overlap=delayed", "sync=local_sgd overlap=streaming sync.local_steps=2"]
)
def test_no_late_message_is_in_flight_at_a_safe_point(mode: str) -> None:
    line = [
        *mode.split(),
        "topology=all_reduce",
        "cluster.compute=[1,2]",
        "stop.steps=60",
        "eval.every_commits=100",
    ]
    whole, kept = ran(*line, version=5)
    rest, _ = ran(*line, kept=kept, comes=False)
    assert rest.sha256 == whole.sha256 == simulated(*RUN, *line).sha256
