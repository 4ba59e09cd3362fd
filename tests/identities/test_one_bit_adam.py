"""1-bit and 0/1 Adam: a warm-up to the end is Adam; after it, without loss, Adam over a frozen
variance.
"""

from types import SimpleNamespace

import pytest
import torch

from ashl.errors import UsageError
from ashl.planning.instantiate import assemble_job
from ashl.stage.progress import Progress
from ashl.sync.zero_one_adam import ZeroOneAdam
from tests.support import planned, simulated

BASE = ("optimizer.lr=0.01", "stop.steps=40", "model.hidden=[16]", "cluster=homogeneous")
MODE = ("schedule=one_bit_adam", *BASE)


@pytest.mark.limit("sync=one_bit_adam")
def test_without_loss_it_is_adam_over_a_frozen_variance():
    """One worker by hand: ten steps of Adam, then m changes and v does not."""
    one = (
        "cluster.compute=[1]",
        "cluster.link=null",
        "compression=none",
        "schedule.warmup_epochs=0.2",
    )
    ran = simulated(*MODE, *one, "optimizer=adamw", "optimizer.weight_decay=2")
    ends = [record["steps"] for record in ran.of("StageEnd")]
    trainer = assemble_job(ran.plan, "cpu").stages[0].trainer
    w, moments = trainer.init()
    for step in range(ends[0]):
        _, g = trainer.gradient(w, 0, step)
        moments, w = trainer.apply(w, moments, g, 0.01)
    m, v = moments[1], moments[2]
    for step in range(ends[0], 40):
        _, g = trainer.gradient(w, 0, step)
        m = 0.9 * m + 0.1 * g
        w = w * (1 - 0.01 * 2) - 0.01 / (1 - 0.9 ** ends[0]) * m / (
            (v / (1 - 0.999 ** ends[0])).sqrt() + 1e-8
        )
    assert 5 < ends[0] < 30
    torch.testing.assert_close(ran.params, w, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        ("sync=one_bit_adam", "topology=all_reduce", "optimizer=adam"),
        ("schedule=one_bit_adam", "optimizer=sgd"),
    ],
)
def test_without_what_adam_has_learned_it_is_refused(wrong):
    with pytest.raises(
        UsageError, match="needs the moments of a stage with Adam; take schedule=one_bit_adam"
    ):
        planned(*wrong)


NEVER = (
    "sync.update_scaler=999",
    "sync.local_step_clipper=1",
)  # leaves out a step of the variance, or an exchange
ZERO_ONE = (
    "sync=zero_one_adam",
    "topology=all_reduce",
    "optimizer=adam",
    "compression=one_bit",
    *BASE,
)


@pytest.mark.limit("sync=zero_one_adam")
def test_0_1_adam_is_adam_or_1_bit_adam_to_the_bit():
    adam = simulated("sync=bsp", "topology=all_reduce", "optimizer=adam", *BASE)
    ran = simulated(*ZERO_ONE, *NEVER, "sync.freeze_step=999")
    assert (ran.sha256, ran.time_ns) == (adam.sha256, adam.time_ns)
    one_bit = simulated(*MODE, "schedule.warmup_epochs=0.2")
    warm = one_bit.of("StageEnd")[0]["steps"] // 4
    ran = simulated(*ZERO_ONE, *NEVER, f"sync.freeze_step={warm}")
    assert 1 < warm < 10
    assert (ran.sha256, ran.time_ns) == (one_bit.sha256, one_bit.time_ns)


def test_0_1_adam_by_hand():
    """Two workers, without loss: whole gradients at 0, 1, 3 and 5, momenta between, and two steps
    at once from 8 on.
    """
    policy = (
        "sync.freeze_step=6",
        "sync.update_scaler=2",
        "sync.local_step_scaler=2",
        "sync.local_step_clipper=2",
    )
    own = (*ZERO_ONE, *policy, "compression=none", "cluster.num_workers=2", "stop.steps=24")
    ran = simulated(*own)
    assert [record["steps"] for record in ran.of("Round") if record["rank"] == 0] == [1] * 8 + [
        2
    ] * 2
    assert simulated(*own, "runtime.gradients=false").time_ns == ran.time_ns
    trainer = assemble_job(ran.plan, "cpu").stages[0].trainer
    w, moments = trainer.init()
    for merge, first, last in [*((k, k, k + 1) for k in range(8)), (8, 8, 10), (9, 10, 12)]:
        if merge in (0, 1, 3, 5):
            moments, w = trainer.apply(
                w, moments, sum(trainer.gradient(w, i, first)[1] for i in (0, 1)) / 2, 0.01
            )
            continue
        count, m, v = moments
        rest, sums = [1 - beta ** int(count) for beta in (0.9, 0.999)], []
        scale = 0.01 / rest[0] / ((v / rest[1]).sqrt() + 1e-8)
        for worker in (0, 1):
            local, own_m, total = w, m, 0
            for step in range(first, last):
                own_m = 0.9 * own_m + 0.1 * trainer.gradient(local, worker, step)[1]
                local, total = local - scale * own_m, total + own_m
            sums.append(total)
        moments, w = (count, sum(sums) / 2 / (last - first), v), w - scale * sum(sums) / 2
    torch.testing.assert_close(ran.params, w, rtol=1e-3, atol=1e-5)


def whole_steps(rule: ZeroOneAdam, progress: Progress, rounds: list[list[int]]) -> list[int]:
    """Return the merges with whole gradients; `rounds` has the steps of each worker by merge."""
    whole = []
    for k, steps in enumerate(rounds):
        whole += [k] if rule.sums_whole(SimpleNamespace(), progress) else []
        progress.commit_all(steps, samples=sum(steps))
    return whole


def test_a_failed_worker_does_not_delay_the_policy():
    """The policy counts merges, and not the workers in them."""
    rule = ZeroOneAdam(freeze_step=20, update_scaler=2, local_step_scaler=8, local_step_clipper=6)
    progress = Progress(3)
    assert whole_steps(rule, progress, [[1, 1, 1]] * 2) == [0, 1]
    progress.remove_worker(2)
    assert whole_steps(rule, progress, [[1, 1, 0]] * 28) == [1, 3, 7, 11]


def test_the_variance_is_learned_ever_less_often():
    rule = ZeroOneAdam(freeze_step=20, update_scaler=2, local_step_scaler=8, local_step_clipper=6)
    assert whole_steps(rule, Progress(1), [[1]] * 30) == [0, 1, 3, 5, 9, 13]
    assert [rule._frozen_local_steps(k) for k in (-5, 0, 7, 8, 11, 12, 13, 14, 99)] == [
        1,
        1,
        1,
        2,
        2,
        4,
        4,
        6,
        6,
    ]
