"""Workers fail and rejoin in rounds, under all-reduce or at a server, in virtual time.

Runs are compared with rounds of the survivors by the formula alone, and to the nanosecond.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ashl.planning.instantiate import assemble_job
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim
from ashl.runtime.sums import sum_in_rank_order
from ashl.stage.compression_pipeline import CompressionPipeline
from ashl.stage.contract import StageConfig
from ashl.stage.members import members_of
from ashl.topology import epochs, local_work
from ashl.topology.local_work import WorkerState, context_of
from tests.sim.test_churn import DETECT_S, RUN, back, lost, with_events
from tests.support import Ran, planned, run

RING = (*RUN, "topology=all_reduce", "aggregate=uniform")
SIZES = (*RING, "runtime.gradients=false")
PORTS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=200",
    "cluster.latency_s=0.001",
    "model.hidden=[16,16]",
)
IN_BUCKETS = (
    (("overlap=wfbp",), 0.31),
    (("overlap=merged", "overlap.plan=[1,2]"), 0.31),
    (("overlap=tictac", "overlap.plan=layers"), 0.31),
    (("overlap=slices", "overlap.slice=100"), 0.26),
    (("overlap=priority", "overlap.plan=layers", "overlap.slice=100", "overlap.credit=2"), 0.28),
)


class Alone:
    """Compute rounds of some workers by the formula alone: no effects, no clock. Joining workers
    are named by round.
    """

    def __init__(self, stage: StageConfig) -> None:
        self.stage = stage
        self.params, self.moments = stage.trainer.init()
        self.version = self.samples = 0
        self.outer = None
        self.workers = [self.worker(rank, 0) for rank in range(stage.num_workers)]

    def worker(self, rank: int, step: int) -> WorkerState:
        state = WorkerState(self.params, self.stage.trainer.moments())
        state.enter(self.stage, members_of(self.stage), rank)
        state.step, state.drawn, state.round = step, step * state.batch, step
        return state

    def update(self, rank: int) -> Tensor:
        stage, state, trainer = self.stage, self.workers[rank], self.stage.trainer
        state.params, state.samples, local = self.params, self.samples, self.params
        for _ in range(members_of(stage).planned.steps[rank]):
            step, first = state.step, state.drawn
            state.step, state.drawn = step + 1, first + state.batch
            span = range(first, state.drawn)
            if stage.sync.exchange == "gradient":
                return trainer.gradient(self.params, rank, step, span)[1]
            rate = trainer.rate(self.samples)
            _, state.moments, local = trainer.local_step(
                local, state.moments, rank, step, rate, span
            )
        return local - self.params

    def updates(self, members: Sequence[int]) -> list[Tensor]:
        """Return the updates of these workers that a round merges."""
        return [self.update(rank) for rank in members]

    def round(self, members: Sequence[int]) -> Tensor:
        """The model after a round of these."""
        stage, pipeline = self.stage, self.stage.pipeline
        updates = self.updates(members)
        if pipeline.traits.lossless:
            total = sum_in_rank_order([x * (1 / len(members)) for x in updates])
        else:
            total = self.coded(pipeline, updates, members)
        for rank in members:
            self.workers[rank].round += 1
        rate = stage.trainer.rate(self.samples)
        if stage.sync.exchange == "gradient":
            self.moments, self.params = stage.trainer.apply(self.params, self.moments, total, rate)
        else:
            self.outer, self.params = stage.outer.step(self.outer, self.params, total, rate)
        self.version += 1
        self.samples += sum(members_of(stage).planned.samples[rank] for rank in members)
        return self.params

    def coded(
        self, pipeline: CompressionPipeline, updates: list[Tensor], members: Sequence[int]
    ) -> Tensor:
        ends = [self.workers[rank].codec_state for rank in members]
        contexts = [
            context_of(self.stage, rank, self.workers[rank], self.version) for rank in members
        ]
        bodies = [pipeline.encode(*both) for both in zip(ends, updates, contexts, strict=True)]
        return pipeline.merge(ends[0], bodies, [1 / len(members)] * len(members), members)


class AloneLate(Alone):
    """The same rounds with each gradient merged one round after its start."""

    pending: dict[int, Tensor] | None = None

    def updates(self, members: Sequence[int]) -> list[Tensor]:
        pending = self.pending or {rank: self.update(rank) for rank in members}
        self.pending = {rank: self.update(rank) for rank in members}
        return [pending[rank] for rank in members]


def models(ran: Ran) -> dict[int, Tensor]:
    return {record["merges"]: params for record, params in ran.snapshots}


@pytest.mark.parametrize("rank", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize(
    "mode",
    [
        ("sync=bsp", "optimizer.momentum=0.9"),
        ("sync=bsp", "compression=topk", "compression.ratio=0.1"),
        ("sync=local_sgd", "sync.local_steps=3", "optimizer.momentum=0.9", "outer=nesterov"),
        ("sync=bsp", "overlap=wfbp", "optimizer.momentum=0.9"),
    ],
    ids=["momentum", "topk", "outer", "wfbp"],
)
def test_rounds_after_a_loss_are_those_of_the_others(mode: tuple[str, ...], rank: int) -> None:
    """The run continues if rank 0 fails, the lead rank that decides and sends the models: another
    one replaces it.
    """
    plan = with_events(planned(*RING, *mode, "stop.steps=42"), lost(rank, 0.51))
    ran, alone = run(plan), Alone(assemble_job(plan, "cpu").stages[0])
    others, with_it = [r for r in range(3) if r != rank], ran.end["commits"][rank]
    found, merges = models(ran), ran.end["merges"]
    assert 1 < with_it < merges - 2
    for number in range(1, merges + 1):
        params = alone.round([0, 1, 2] if number <= with_it else others)
        assert torch.equal(found[number], params), number
    h = members_of(alone.stage).planned.steps[0]
    assert [ran.end["commits"][r] for r in others] == [merges] * 2, "no round is counted twice"
    assert ran.end["dropped_by"][rank] == h
    assert ran.end["steps"] == h * (2 * merges + with_it)
    assert [r["merges"] for r, _ in ran.snapshots[:-1]] == list(range(1, merges + 1))


@pytest.mark.parametrize(
    ("mode", "fails_s"),
    [
        (("sync=bsp", "optimizer.momentum=0.9"), 0.31),  # the slowest, while it computes
        (("sync=bsp", "optimizer.momentum=0.9", "overlap=delayed"), 0.31),
        (("sync=bsp", "compression=topk", "compression.ratio=0.1"), 0.31),
        # while it computes the forward pass, so that no bucket of the round has its part
        *((("sync=bsp", "optimizer.momentum=0.9", *PORTS, *own), s) for own, s in IN_BUCKETS),
        (("sync=local_sgd", "sync.local_steps=3", "optimizer.momentum=0.9"), 0.6),
    ],
    ids=["momentum", "late", "topk", *(own[0] for own, _ in IN_BUCKETS), "local_sgd"],
)
def test_rounds_at_a_server_after_a_loss_are_those_of_the_others(
    mode: tuple[str, ...], fails_s: float
) -> None:
    plan = with_events(planned(*RUN, *mode, "stop.steps=40", "aggregate=uniform"), lost(2, fails_s))
    stage = assemble_job(plan, "cpu").stages[0]
    ran, alone = run(plan), Alone(stage) if stage.delayed_overlap is None else AloneLate(stage)
    with_it, found = ran.end["commits"][2], models(ran)
    assert 1 < with_it < ran.end["merges"] - 2
    for number in range(1, ran.end["merges"]):
        params = alone.round([0, 1, 2] if number <= with_it else [0, 1])
        assert torch.equal(found[number], params), number
    assert ran.end["commits"][:2] == [ran.end["merges"]] * 2, "no round is counted twice"


@pytest.mark.parametrize(
    "mode",
    [
        ("sync=bsp", "optimizer.momentum=0.9"),
        ("sync=local_sgd", "sync.local_steps=3", "optimizer=adam", "outer=delayed_nesterov"),
    ],
    ids=["momentum", "outer"],
)
def test_who_comes_takes_part_from_the_next_round_on(mode: tuple[str, ...]) -> None:
    plan = with_events(planned(*RING, *mode, "stop.steps=75"), lost(0, 0.31), back(0, 0.62))
    ran, alone = run(plan), Alone(assemble_job(plan, "cpu").stages[0])
    found, merges, h = models(ran), ran.end["merges"], members_of(alone.stage).planned.steps[0]
    with_it = sum(r["rank"] == 0 and r["end_ns"] < 310_000_000 for r in ran.of("Round"))
    again = with_it + merges - ran.end["commits"][0]
    assert with_it < again < merges - 1
    for number in range(1, merges):  # the last round may be cut short
        if number == again + 1:
            alone.workers[0] = alone.worker(0, (with_it + 1) * h)
        assert torch.equal(
            found[number], alone.round([0, 1, 2] if not with_it < number <= again else [1, 2])
        ), number


@pytest.mark.parametrize("codec", ["topk", "power_sgd", "diana", "fetch_sgd", "gtopk"])
def test_all_members_have_the_same_model(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank merges on its own here, as on processes: codecs with shared state begin again after
    a join.
    """
    merges = dict[Any, list[Tensor]]()

    def compute_once(
        sim: Sim, ctx: RankContext, team: tuple[int, ...], key: Any, fn: Callable[[], Any]
    ) -> Any:
        value = fn()
        if key[0] == "merge":
            merges.setdefault((team, *key), []).append(
                value[0].params
            )  # beside the next round, as planned
        return value

    plan = planned(
        *RING, "sync=bsp", f"compression={codec}", "optimizer.momentum=0", "stop.steps=60"
    )
    monkeypatch.setattr(Sim, "compute_once", compute_once)
    ran = run(with_events(plan, lost(1, 0.31), back(1, 0.62), lost(0, 0.9), back(0, 1.2)))
    assert ran.end["reason"] == "steps"
    assert {len(key[0]) for key in merges} == {2, 3}
    for (team, *_), found in merges.items():
        # a failure may interrupt the messages of a codec's own protocol
        assert len(found) == len(team) or codec == "gtopk"
        assert all(torch.equal(found[0], params) for params in found)


def test_a_collective_in_flight_is_aborted() -> None:
    """All have come at 0.08 s. Worker 1 fails at 0.085 s, during the sum. An epoch begins 0.02 s
    later: the others exchange the same work, and their sum takes three quarters as long.
    """
    ran = run(with_events(planned(*SIZES, "sync=bsp", "stop.steps=20"), lost(1, 0.085)))
    whole = (
        run(planned(*SIZES, "sync=bsp", "stop.steps=20")).snapshots[0][0]["time_ns"] - 80_000_000
    )
    first = ran.snapshots[0][0]
    assert first["commits"] == [1, 0, 1]
    assert first["time_ns"] == pytest.approx(85_000_000 + DETECT_S * 1e9 + whole * 3 / 4, abs=2)
    assert first["dropped_by"] == [0, 1, 0]
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_a_failure_while_all_wait_for_it_is_noticed_in_time() -> None:
    ran = run(with_events(planned(*SIZES, "sync=bsp", "stop.steps=20"), lost(2, 0.05)))
    first = ran.snapshots[0][0]
    assert first["commits"] == [1, 1, 0]
    assert 70_000_000 < first["time_ns"] < 80_000_000


H3 = ("sync=local_sgd", "sync.local_steps=3", "stop.steps=60")


@pytest.mark.parametrize("mode", [("sync=bsp",), H3[:2]], ids=["bsp", "local_sgd"])
def test_no_round_at_a_server_waits_for_a_worker_that_joins_within_it(
    mode: tuple[str, ...],
) -> None:
    """Worker 2 rejoins at any moment of a round: no round takes longer than without failures."""
    plan = planned(*RUN, *mode, "runtime.gradients=false", "stop.steps=60")
    longest_ns = max(r["end_ns"] - r["start_ns"] for r in run(plan).of("Round"))
    for moment in range(20):
        ran = run(with_events(plan, lost(2, 0.2), back(2, 0.5 + 0.0131 * moment)))
        rounds = [r for r in ran.of("Round") if r["rank"] == 0]
        assert max(r["end_ns"] - r["start_ns"] for r in rounds) <= longest_ns
        assert ran.end["commits"][2] > 0


GOSSIP = ("topology=gossip", "sync.local_steps=3")
IN_ROUNDS = (
    ("topology=all_reduce", "sync=bsp"),
    *(
        ("topology=all_reduce", *H3[:2], own)
        for own in ("optimizer.momentum=0.9", "outer=nesterov", "compression=topk")
    ),
    ("topology=all_reduce", "sync=pr_sgd_momentum", "sync.local_steps=3", "optimizer.momentum=0.9"),
    ("topology=gossip", "sync=d_psgd"),
    (*GOSSIP, "sync=d_psgd", "sync.order=atc"),
    (*GOSSIP, "sync=choco", "compression=topk"),
    (*GOSSIP, "sync=sgp", "sync.overlap=1"),
    *((*GOSSIP, f"sync={name}") for name in ("noloco", "gossip_pga", "relay_sum")),
)
WITHOUT_ROUNDS = (
    *((*GOSSIP, f"sync={name}") for name in ("ad_psgd", "swarm", "hop")),
    (
        "topology=partial_all_reduce",
        "sync=ripples_first_come",
        "sync.group_size=2",
        "sync.local_steps=3",
    ),
)


@pytest.mark.parametrize("mode", [*IN_ROUNDS, *WITHOUT_ROUNDS], ids=" ".join)
def test_survivors_repeat_no_step(mode: tuple[str, ...]) -> None:
    """Worker 2 fails and rejoins twice, at any moments. In rounds a survivor waits for no joining
    worker. Without rounds a worker records the work that the end of the run drops as a whole.
    """
    plan = planned(*RUN, *mode, "runtime.gradients=false", "stop.steps=150")
    longest_ns = max(r["end_ns"] - r["start_ns"] for r in run(plan).of("Round"))
    for moment in range(10):
        at_s = 0.2 + 0.0231 * moment
        ran = run(with_events(plan, *(e for s in (at_s, at_s + 0.3) for e in twice(2, s))))
        for rank in (0, 1):
            rounds = [r for r in ran.of("Round") if r["rank"] == rank]
            step_ns = (20_000_000, 40_000_000)[rank]
            missing_ns = step_ns * sum(r["steps"] for r in rounds) - ran.ledgers[rank]["compute"]
            assert 0 <= missing_ns <= (mode in WITHOUT_ROUNDS) * 3 * step_ns
            if mode in IN_ROUNDS:
                assert ran.end["dropped_by"][2] > 0
                assert ran.end["steps_by"][rank] == sum(r["steps"] for r in rounds)
                took_ns = max(r["end_ns"] - r["start_ns"] for r in rounds[:-1])
                assert took_ns <= longest_ns + 2 * DETECT_S * 1e9


def twice(worker: int, time_s: float) -> tuple[dict, dict]:
    """Return the events of a worker that fails and rejoins 0.1 s later."""
    return lost(worker, time_s), back(worker, time_s + 0.1)


@pytest.mark.parametrize(
    "mode",
    [
        (*H3, "outer=nesterov", "compression=topk"),
        (*H3, "runtime.on_worker_failure=reshard"),
        ("sync=bsp", "runtime.on_worker_failure=keep_batch", "stop.steps=30"),
        (*H3[:2], "stop.steps=32"),
        ("topology=gossip", "sync=d_psgd", "sync.local_steps=3", "stop.steps=60"),
        ("topology=gossip", "sync=d_psgd", "sync.local_steps=3", "stop.steps=32"),
    ],
    ids=["kept", "other data", "other batch", "truncated", "gossip", "gossip, truncated"],
)
def test_kept_work_gives_the_model_of_repeated_work(
    mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 2 fails while the others wait. The survivors repeat their work if their data, batch or
    H changes.
    """
    own = RUN if "topology=gossip" in mode else RING
    plan = planned(*own, *mode, "optimizer.momentum=0.9")
    rounds = [r for r in run(plan).of("Round") if r["rank"] == 2]
    last = rounds[-1 if "stop.steps=32" in mode else 2]
    begin_s, end_s = last["start_ns"] / 1e9, last["end_ns"] / 1e9
    plan = with_events(plan, lost(2, begin_s + 0.8 * (end_s - begin_s)))
    kept = run(plan)
    for module in (local_work, epochs):
        monkeypatch.setattr(module, "keeps_work", lambda stage: False)
    repeated = run(plan)
    assert kept.end["steps_by"] == repeated.end["steps_by"]
    assert torch.equal(kept.snapshots[-1][1], repeated.snapshots[-1][1])
    is_kept = kept.ledgers[0]["compute"] < repeated.ledgers[0]["compute"]
    assert is_kept == ("outer=nesterov" in mode or "stop.steps=60" in mode[-1:])


OVERLAPS = (
    ("sync=bsp", "overlap=priority"),
    ("sync=bsp", "overlap=dear"),
    ("sync=bsp", "overlap=layerwise", "compression=topk"),
    ("sync=local_sgd", "sync.local_steps=3", "overlap=eager"),
    ("sync=local_sgd", "sync.local_steps=3", "overlap=overlap_local_sgd"),
    ("sync=local_sgd", "sync.local_steps=6", "overlap=streaming"),
    ("sync=local_sgd", "sync.local_steps=6", "overlap=loscar"),
    ("schedule=one_bit_adam", "optimizer=adam"),
    ("sync=zero_one_adam", "optimizer=adam"),
)


@pytest.mark.parametrize("mode", OVERLAPS, ids=lambda mode: mode[-1])
def test_failures_and_rejoins_with_every_overlap(mode: tuple[str, ...]) -> None:
    """All members count the same rounds, also if a worker rejoins before its failure is noticed. A
    worker may have no work in the round in which it joins.
    """
    own = ("aggregate=uniform", "runtime.gradients=false", "stop.steps=90")
    plan = planned(*RUN, "topology=all_reduce", *mode, *own)
    twice = (lost(1, 0.512), back(1, 0.52), lost(0, 0.9), back(0, 1.2))
    for events in ((lost(0, 0.51),), (lost(2, 0.51),), (lost(0, 0.51), back(0, 0.93)), twice):
        ran = run(with_events(plan, *events))
        assert ran.end["reason"] == "steps"
        assert ran.end["steps"] == sum(ran.end["steps_by"]) >= 90
        rejoins = any("rejoin" in event for event in events)
        others = sorted(ran.end["commits"])[1:]
        assert all(ran.end["merges"] - count in (0, rejoins) for count in others)
        assert sum(map(bool, ran.end["dropped_by"])) == len({event["worker"] for event in events})
        assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_a_limit_truncates_the_last_round_after_a_failure() -> None:
    """The sync mode sets an H of more than the planned one, and 83 steps end the run."""
    mode = "sync=qsr sync.local_steps=1 sync.h_max=8 sync.alpha=0.3 optimizer.lr=0.02"
    cluster = "cluster=homogeneous cluster.compute=[1,1,1,1] dataset.batch_size=8"
    own = ("topology=all_reduce", "schedule=single", "model.hidden=[8]", "stop.steps=83")
    ran = run(with_events(planned(*mode.split(), *cluster.split(), *own), lost(1, 0.37)))
    assert 83 <= ran.end["steps"] < 83 + 3
