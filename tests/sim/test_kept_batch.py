"""Survivors hold the global batch, with `runtime.on_worker_failure=keep_batch`.

Behind a server they learn of a failure from the next reply: the round of the failure is smaller.
"""

import random

import pytest
import torch

from ashl.errors import UsageError
from ashl.planning.instantiate import assemble_job
from ashl.runtime.sums import sum_in_rank_order
from ashl.stage.members import hold_batch
from ashl.topology.local_work import split_batch
from tests.sim.test_churn import RUN, back, lost, with_events
from tests.support import planned, run

KEEPS = (*RUN, "sync=bsp", "runtime.on_worker_failure=keep_batch", "optimizer.momentum=0")
TOPOLOGIES = ("parameter_server", "all_reduce")


def test_batches_of_any_members_add_up_and_stay_in_proportion() -> None:
    rng = random.Random(0)
    for _ in range(100):
        own = [rng.randint(1, 40) for _ in range(5)]
        here = sorted(rng.sample(range(5), rng.randint(1, 5)))
        batches = hold_batch(own, here)
        assert sum(batches[rank] for rank in here) == sum(own)
        factor = sum(own) / sum(own[rank] for rank in here)
        assert all(0 <= batches[rank] - int(own[rank] * factor) <= 1 for rank in here)
        assert all(batches[rank] == own[rank] for rank in {*range(5)} - {*here})


def test_no_minibatch_is_larger_than_planned() -> None:
    assert split_batch(24, 16) == [12, 12]
    assert split_batch(33, 16) == [11, 11, 11]
    assert split_batch(17, 16) == [9, 8]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_round_has_the_global_batch(topology: str) -> None:
    """One of three workers fails and rejoins: every merge holds 48 samples.

    Behind a server the round of the failure lacks 16.
    """
    events = lost(2, 0.31), back(2, 0.8)
    ran = run(with_events(planned(*KEEPS, f"topology={topology}", "stop.epochs=2"), *events))
    counts = [record for record, _ in ran.snapshots]
    beyond = [record["samples"] - 48 * record["merges"] for record in counts]
    assert {*beyond} == ({0} if topology == "all_reduce" else {0, -16})
    assert beyond == sorted(beyond, reverse=True)
    rounds = ran.of("Round")
    fewer = [r for r in rounds if r["rank"] == 2]
    assert len(fewer) < len([r for r in rounds if r["rank"] == 0]) - 3
    assert len(fewer) > 8, "it has rejoined"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_gradient_is_that_of_all_samples(topology: str) -> None:
    """After the failure two workers compute 24 samples each, in two minibatches of 12."""
    plan = planned(*KEEPS, f"topology={topology}", "stop.steps=40")
    ran = run(with_events(plan, lost(2, 0.31)))
    stage = assemble_job(plan, "cpu").stages[0]
    with_it = ran.end["commits"][2]
    assert 1 < with_it < ran.end["merges"] - 2
    smaller = with_it + (topology == "parameter_server")  # rounds with the planned batches
    models = {record["merges"]: params for record, params in ran.snapshots}
    trainer, (params, moments) = stage.trainer, stage.trainer.init()
    for number in range(1, ran.end["merges"]):
        members = [0, 1, 2] if number <= with_it else [0, 1]
        size = 16 if number <= smaller else 24
        rate = trainer.rate(48 * (number - 1))
        updates = []
        for rank in members:
            first = 16 * min(number - 1, smaller) + 24 * max(0, number - 1 - smaller)
            parts = [range(first, first + size)]
            if size == 24:
                parts = [range(first, first + 12), range(first + 12, first + 24)]
            pieces = [trainer.gradient(params, rank, number - 1, part)[1] for part in parts]
            total = pieces[0] if size == 16 else pieces[0] * 0.5 + pieces[1] * 0.5
            updates.append(total * (1 / len(members)))
        moments, params = trainer.apply(params, moments, sum_in_rank_order(updates), rate)
        assert torch.equal(models[number], params), number


@pytest.mark.parametrize(
    "mode",
    [
        "sync=asp",
        "sync=local_sgd",
        "sync=backup",
        "sync=bsp overlap=wfbp",
        "topology=all_reduce sync=local_sgd",
        "topology=gossip sync=d_psgd",
        "topology=sharded_server sync=bsp cluster.exchange_s=null cluster.bandwidth_mbit_s=100"
        " cluster.latency_s=0.001",
        "schedule=ashl",
    ],
)
def test_other_rounds_are_refused_in_one_sentence(mode: str) -> None:
    words = [word for word in KEEPS if not word.startswith("sync=")]
    with pytest.raises(UsageError, match=r"^runtime\.on_worker_failure=keep_batch: .*skip$"):
        planned(*words, *mode.split(), "stop.steps=40")
