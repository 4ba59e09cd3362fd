"""Workers fail and rejoin under all-reduce in virtual time.

Runs are compared with rounds of the survivors by the formula alone, and to the nanosecond.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ashl.compression.gtopk import Final, GTopK, tree_neighbours, within
from ashl.compression.wrappers import join_states, slice_state
from ashl.errors import AshlError
from ashl.planning.instantiate import assemble
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim
from ashl.runtime.sums import sum_in_rank_order
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from ashl.stage.contract import StageConfig
from ashl.stage.members import members_of
from ashl.topology.local_work import WorkerState, context_of
from tests.sim.test_churn import DETECT_S, RUN, back, lost, with_events
from tests.support import Ran, planned, run, simulated

RING = (*RUN, "topology=all_reduce", "aggregate=uniform")
SIZES = (*RING, "runtime.gradients=false")


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

    def round(self, members: Sequence[int]) -> Tensor:
        """The model after a round of these."""
        stage, pipeline = self.stage, self.stage.pipeline
        updates = [self.update(rank) for rank in members]
        if pipeline.traits.lossless:
            total = sum_in_rank_order([x * (1 / len(members)) for x in updates])
        elif stage.pipelines:
            total = self.by_message(members, updates)
        elif isinstance(pipeline.innermost, GTopK):
            total = self.by_tree(members, updates)
        else:
            total = self.coded(
                pipeline, [self.workers[rank].codec_state for rank in members], updates, members
            )
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

    def by_tree(self, members: Sequence[int], updates: list[Tensor]) -> Tensor:
        """Compute gTop-k along the tree of these ranks."""
        pipeline, n, d = self.stage.pipeline, len(members), self.stage.pipeline.d
        codec, ends = pipeline.innermost, [self.workers[rank].codec_state for rank in members]
        assert isinstance(codec, GTopK)
        contexts = [
            context_of(self.stage, rank, self.workers[rank], self.version) for rank in members
        ]
        sources = [pipeline.before(*each) for each in zip(ends, updates, contexts, strict=True)]
        sets = [[codec.select(source, 1 / n)] for source in sources]
        for place in reversed(range(n)):
            for child in tree_neighbours(place, n)[1]:
                sets[place].append(
                    codec.merge_few(sets[place][-1], codec.write_few(sets[child][-1], d), d)
                )
        few = sets[0][-1]
        finals = {0: Final(few, torch.ones(few.indices.numel(), dtype=torch.bool))}
        for place in range(n):
            for child, merged in zip(
                reversed(tree_neighbours(place, n)[1]), reversed(sets[place]), strict=False
            ):
                finals[place] = finals[place]._replace(
                    alive=finals[place].alive & within(few, merged)
                )
                finals[child] = finals[place]
        outcomes = [
            codec.finish_sum(sources[place], sets[place][0], finals[place]) for place in range(n)
        ]
        merged = [
            pipeline.after(*each) for each in zip(ends, updates, contexts, outcomes, strict=True)
        ]
        return merged[0]

    def coded(
        self,
        pipeline: CompressionPipeline,
        ends: list[CodecState],
        updates: list[Tensor],
        members: Sequence[int],
    ) -> Tensor:
        contexts = [
            context_of(self.stage, rank, self.workers[rank], self.version) for rank in members
        ]
        contexts = [context._replace(layer=pipeline.layer) for context in contexts]
        bodies = [pipeline.encode(*both) for both in zip(ends, updates, contexts, strict=True)]
        return pipeline.merge(ends[0], bodies, [1 / len(members)] * len(members), members)

    def by_message(self, members: Sequence[int], updates: list[Tensor]) -> Tensor:
        """Each of a gradient's messages by itself, with what is kept of it."""
        kept, sums = [self.workers[rank].codec_state for rank in members], list[Tensor]()
        pieces = list[list[CodecState]]()
        for part, pipeline in zip(
            self.stage.buckets[::-1], self.stage.pipelines[::-1], strict=True
        ):
            pieces.append(
                [
                    replace(ends, sender=slice_state(ends.sender, part.start, part.stop))
                    for ends in kept
                ]
            )
            sums.append(
                self.coded(
                    pipeline, pieces[-1], [x[part.start : part.stop] for x in updates], members
                )
            )
        for ends, own in zip(kept, zip(*pieces, strict=True), strict=True):
            ends.sender = join_states([piece.sender for piece in own])
        return torch.cat(sums)


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
        (
            "sync=bsp",
            "overlap=layerwise",
            "overlap.plan=none",
            "compression=topk",
            "compression.ratio=0.1",
        ),
        ("sync=bsp", "compression=gtopk", "compression.ratio=0.1"),
    ],
    ids=["momentum", "topk", "outer", "wfbp", "layerwise", "gtopk"],
)
def test_rounds_after_a_loss_are_those_of_the_others(mode: tuple[str, ...], rank: int) -> None:
    """The run continues if rank 0 fails, the lead rank that decides and sends the models: another
    one replaces it.
    """
    plan = with_events(planned(*RING, *mode, "stop.steps=42"), lost(rank, 0.51))
    ran, alone = run(plan), Alone(assemble(plan, "cpu").stages[0])
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
    "mode",
    [
        ("sync=bsp", "optimizer.momentum=0.9"),
        ("sync=local_sgd", "sync.local_steps=3", "optimizer=adam", "outer=delayed_nesterov"),
    ],
    ids=["momentum", "outer"],
)
def test_who_comes_takes_part_from_the_next_round_on(mode: tuple[str, ...]) -> None:
    plan = with_events(planned(*RING, *mode, "stop.steps=75"), lost(0, 0.31), back(0, 0.62))
    ran, alone = run(plan), Alone(assemble(plan, "cpu").stages[0])
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
    later: the others compute once more, and their sum takes three quarters as long.
    """
    ran = run(with_events(planned(*SIZES, "sync=bsp", "stop.steps=20"), lost(1, 0.085)))
    whole = (
        run(planned(*SIZES, "sync=bsp", "stop.steps=20")).snapshots[0][0]["time_ns"] - 80_000_000
    )
    first = ran.snapshots[0][0]
    assert first["commits"] == [1, 0, 1]
    assert first["time_ns"] == pytest.approx(165_000_000 + DETECT_S * 1e9 + whole * 3 / 4, abs=2)
    assert first["dropped_by"] == [0, 1, 0]
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_a_failure_while_all_wait_for_it_is_noticed_in_time() -> None:
    ran = run(with_events(planned(*SIZES, "sync=bsp", "stop.steps=20"), lost(2, 0.05)))
    first = ran.snapshots[0][0]
    assert first["commits"] == [1, 1, 0]
    assert 110_000_000 < first["time_ns"] < 120_000_000


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_in_the_sum_of_one_part_breaks_off_the_round(rank: int) -> None:
    """The survivors repeat all collectives of a round, for every time of a failure.

    A round has 0.03 s of steps and collectives of several buckets. They begin again when both
    survivors know of the failure and have their gradients.
    """
    plan = planned(
        *SIZES,
        "sync=bsp",
        "overlap=wfbp",
        "cluster.compute=[1,1,1]",
        "stop.steps=21",
        "model.hidden=[64,64]",
    )
    whole, n = run(plan), 60
    times = [record["time_ns"] for record, _ in whole.snapshots]
    for moment in range(times[1], times[2] + 1, (times[2] - times[1]) // n):
        ran = run(with_events(plan, lost(rank, moment / 1e9)))
        commits = ran.end["commits"]
        assert commits[rank] == 2 + (moment >= times[2])
        assert commits.count(ran.end["merges"]) == 2
        assert ran.end["dropped_by"][rank] == 1
        assert ran.end["steps"] == sum(ran.end["steps_by"]) >= 21
        assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_losses_one_after_the_other_and_a_return_before_anybody_has_noticed() -> None:
    events = (lost(0, 0.2), lost(1, 0.21), back(1, 0.215), back(0, 0.7), lost(2, 0.9))
    ran = run(with_events(planned(*SIZES, "sync=bsp", "stop.steps=60"), *events))
    assert ran.end["reason"] == "steps"
    assert ran.end["steps"] == sum(ran.end["steps_by"]) >= 60
    assert ran.end["dropped_by"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("events", "least", "said"),
    [
        (
            (lost(0, 0.1), lost(1, 0.2), lost(2, 0.3)),
            1,
            r"worker 2 failed at 0\.3 s and 0 of 3 workers remain that",
        ),
        ((lost(0, 0.1),), 3, r"2 of 3 workers are running, fewer than runtime\.min_workers=3"),
    ],
)
def test_the_run_ends_where_too_few_are_left(
    events: tuple[dict, ...], least: int, said: str
) -> None:
    plan = planned(*SIZES, "sync=bsp", "stop.seconds=1", f"runtime.min_workers={least}")
    with pytest.raises(AshlError, match=said):
        run(with_events(plan, *events))


def test_a_worker_that_rejoins_in_the_last_round_takes_part_in_it() -> None:
    plan = planned(*SIZES, "sync=bsp", "stop.steps=30")
    end_s = run(with_events(plan, lost(1, 0.1))).time_ns / 1e9
    ran = run(with_events(plan, lost(1, 0.1), back(1, end_s - 1e-3)))
    assert ran.of("WorkerRejoined")
    assert ran.end["commits"][1] == 2
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


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
    """All members count the same rounds, also if a worker rejoins before its failure is noticed."""
    own = ("aggregate=uniform", "runtime.gradients=false", "stop.steps=90")
    plan = planned(*RUN, "topology=all_reduce", *mode, *own)
    twice = (lost(1, 0.512), back(1, 0.52), lost(0, 0.9), back(0, 1.2))
    for events in ((lost(0, 0.51),), (lost(2, 0.51),), (lost(0, 0.51), back(0, 0.93)), twice):
        ran = run(with_events(plan, *events))
        assert ran.end["reason"] == "steps"
        assert ran.end["steps"] == sum(ran.end["steps_by"]) >= 90
        assert sorted(ran.end["commits"])[1:] == [ran.end["merges"]] * 2
        assert sum(map(bool, ran.end["dropped_by"])) == len({event["worker"] for event in events})
        assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_failures_at_random_never_end_a_run() -> None:
    plan = planned(*SIZES, "sync=local_sgd", "stop.seconds=5")
    ran = run(with_events(plan, churn={"mtbf_s": 0.3, "mttr_s": 0.5}))
    assert ran.end["reason"] == "seconds"
    assert len(ran.of("WorkerFailed")) > 10
    assert run(with_events(plan, churn={"mtbf_s": 0.3, "mttr_s": 0.5})).records == ran.records


def test_a_run_whose_configuration_says_so() -> None:
    """Its plan is predicted without failures."""
    events = (
        "cluster.events=[{time_s: 0.2, worker: 0, fail: true}, {time_s: 0.4, worker: 0, rejoin:"
        " true}]"
    )
    ran = simulated(*SIZES, "sync=bsp", "stop.steps=50", events)
    assert [record["rank"] for record in ran.of("WorkerRejoined")] == [0]
    assert (
        ran.plan.stages[0].predicted_steps_per_s
        == planned(*SIZES, "sync=bsp").stages[0].predicted_steps_per_s
    )
