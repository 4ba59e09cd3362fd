"""Checkpoints of asynchronous gossip as processes make them: each rank on its own, while messages
are in flight.

Virtual time can choose every moment.
"""

from collections.abc import Callable

import pytest
import torch

from ashl.cluster.network import network
from ashl.cluster.speed import speed_of
from ashl.config.construct import construct
from ashl.learn.device import HOST
from ashl.planning.instantiate import assemble
from ashl.run.evaluation import make_model_set
from ashl.runtime.effects import Send
from ashl.runtime.plain_state import from_plain, to_plain
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim
from ashl.stage.program import program
from ashl.topology import pairs
from tests.support import Ran, planned

Due = Callable[[int, int, int], bool]  # of a rank, a version and a moment
RUN = (
    "cluster=homogeneous",
    "topology=gossip",
    "dataset.batch_size=16",
    "eval.every_commits=40",
    "model.hidden=[8]",
)
SLOW = ("cluster.compute=[1,1.3,3,2,1.1,1.7]", "topology.graph=ring", "stop.steps=200")


class Cut(Sim):
    """Keeps each rank once it is due."""

    due: Due
    kept: dict[int, tuple]
    refused = 0

    def checkpoint_due(self, ctx: RankContext, version: int) -> bool:
        return ctx.rank not in self.kept and self.due(ctx.rank, version, self.now_ns)

    def safe_point(self, ctx: RankContext, stage: int, state) -> bool:
        if state is None or not self.checkpoint_due(ctx, state.version):
            return False
        self.kept[ctx.rank] = stage, to_plain(state)
        return True

    def _send(self, ctx: RankContext, send: Send) -> None:
        self.refused += send.tag[0] == "answer" and send.body is None
        super()._send(ctx, send)


def ran(
    *overrides: str, due: Due = lambda *_: False, kept: dict[int, tuple] | None = None
) -> tuple[Ran, Cut]:
    """A run, from what was kept or from its beginning, and the kernel with what it keeps itself."""
    plan = planned(*RUN, *overrides)
    job, cluster = assemble(plan, HOST), construct(plan.cluster, "cluster")
    stage = job.stages[0]
    found = Ran(plan, parts=make_model_set(stage), learner=job.learner)
    speed = speed_of(cluster, stage.plan.workers[0].batch, plan.seed)
    sim = Cut(plan.num_ranks, speed, network(cluster, stage.trainer.dense_bytes), found)
    sim.due, sim.kept = due, {}

    def play(ctx: RankContext):
        if kept is None:
            return program(ctx, job.stages)
        index, state = kept[ctx.rank]
        return program(ctx, job.stages, saved=(index, from_plain(state, ("ashl",))), joins=True)

    sim.run(play, tick=lambda: None)
    return found, sim


def states(sim: Cut) -> list:
    """Return the saved state of the workers."""
    return [from_plain(state, ("ashl",)) for rank, (_, state) in sorted(sim.kept.items())][:-1]


def later_by_rank(rank: int, version: int, now_ns: int) -> bool:
    """Each rank is notified at another time."""
    return now_ns > 150_000_000 + (rank * 5 % 7) * 30_000_000


def checked(rest: Ran, sim: Cut) -> None:
    """Nothing is counted twice or left out, and rounds go on where they were."""
    end = rest.end
    assert end["steps"] == sum(end["steps_by"]) >= 200
    assert sum(end["commits"]) == end["merges"]
    for rank, state in enumerate(states(sim)):
        rounds = [r for r in rest.of("round") if r["rank"] == rank]
        assert [r["round"] for r in rounds] == [*range(state.round, state.round + len(rounds))]
        assert end["steps_by"][rank] == state.step + sum(
            r["steps"] for r in rounds if not r["dropped"]
        )


@pytest.mark.parametrize(
    "mode",
    [
        "sync=ad_psgd",
        pytest.param("sync=swarm sync.local_steps=3 sync.overlap=false", marks=pytest.mark.slow),
        pytest.param("sync=swarm sync.local_steps=2", marks=pytest.mark.slow),
    ],
)
def test_the_mean_of_models_that_meet_in_pairs_is_whole(mode: str, monkeypatch) -> None:
    """The sum of the saved models is that of the first ones and of all their steps, also in the
    resumed run.

    An average is in both of its models or in none.
    """
    steps, at_cut, report = dict[int, torch.Tensor](), dict[int, torch.Tensor](), pairs.report_merge

    async def counted(ctx: RankContext, stage, state, work, staleness: int) -> None:
        if isinstance(ctx.kernel, Cut):  # and not where it is but planned
            steps[ctx.rank] = steps.get(ctx.rank, 0) + work.body.double()
            if ctx.rank not in ctx.kernel.kept:
                at_cut[ctx.rank] = steps[ctx.rank]
        await report(ctx, stage, state, work, staleness)

    monkeypatch.setattr(pairs, "report_merge", counted)
    line = [*SLOW, *mode.split()]
    whole, sim = ran(*line, due=later_by_rank)
    assert sim.refused
    assert len({state.cut for state in states(sim)}) == 1
    first = assemble(whole.plan, HOST).learner.init().double()
    kept = torch.stack([state.params.double() for state in states(sim)]).sum(0)
    assert torch.allclose(kept, 6 * first + sum(at_cut.values()), atol=1e-5)
    steps.clear()
    rest, _ = ran(*line, kept=sim.kept)
    assert torch.allclose(6 * rest.params.double(), kept + sum(steps.values()), atol=1e-5)
    checked(rest, sim)


@pytest.mark.parametrize(
    "mode",
    ["sync=hop sync.staleness=0", pytest.param("sync=d_admm sync.rho=0.1", marks=pytest.mark.slow)],
)
def test_a_run_in_lockstep_resumes_bit_for_bit(mode: str) -> None:
    line = [*SLOW, *mode.split(), "sync.local_steps=2"]
    _, whole = ran(*line, due=lambda rank, version, now_ns: version >= 12)
    _, sim = ran(*line, due=lambda rank, version, now_ns: version >= 6)
    rest, again = ran(*line, due=lambda rank, version, now_ns: version >= 12, kept=sim.kept)
    assert {state.version for state in states(sim)} == {6}
    checked(rest, sim)
    for one, other in zip(states(again), states(whole), strict=True):
        assert one.version == other.version == 12
        assert torch.equal(one.params, other.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "sync=hop sync.staleness=2 sync.max_lead=3",
        "sync=hop sync.backups=1 sync.max_lead=4 sync.skip_lead=3",
    ],
)
def test_nobody_skips_the_iteration_in_which_all_are_kept(mode: str) -> None:
    line = [*SLOW, *mode.split(), "sync.local_steps=1"]
    for at in (5, 6, 7, 8):
        _, sim = ran(*line, due=lambda rank, version, now_ns, at=at: version >= at)
        assert (
            {state.version for state in states(sim)}
            == {state.rule_state.k for state in states(sim)}
            == {at}
        )
        rest, again = ran(
            *line, due=lambda rank, version, now_ns, at=at: version >= 2 * at, kept=sim.kept
        )
        assert {state.version for state in states(again)} == {2 * at}
        assert rest.end["steps"] >= 200


@pytest.mark.parametrize(
    "mode", ["sync.delay=2 sync.barrier=1", pytest.param("sync.delay=0", marks=pytest.mark.slow)]
)
def test_duals_add_up_to_nothing(mode: str) -> None:
    line = [
        *SLOW,
        "sync=d_admm",
        "sync.rho=0.05",
        "sync.local_steps=2",
        "optimizer.lr=0.02",
        *mode.split(),
    ]
    _, sim = ran(*line, due=lambda rank, version, now_ns: version >= 6)
    rest, again = ran(*line, due=lambda rank, version, now_ns: version >= 14, kept=sim.kept)
    checked(rest, sim)
    for cut, at in ((sim, 6), (again, 14)):
        edges = [state.rule_state for state in states(cut)]
        for own in edges:
            own.heard = {
                j: {m: x for m, x in versions.items() if m < own.k}
                for j, versions in own.heard.items()
            }
            own.match(0.05)
            assert own.k == at
            assert set(own.matched.values()) == {at - 1}
        size = max(float(own.dual.abs().max()) for own in edges)
        assert float(sum(own.dual for own in edges).abs().max()) < 1e-4 * size
