"""1-bit Adam: a warm-up to the end is Adam; after it, without loss, Adam over a frozen variance; and it learns."""

import pytest
import torch

from ashl.errors import UsageError
from ashl.planning.build import assemble
from tests.support import planned, simulated

BASE = ("optimizer.lr=0.01", "stop.steps=40", "model.hidden=[16]", "cluster=homogeneous")
MODE = ("schedule=one_bit_adam", *BASE)


@pytest.mark.slow
def test_timed_alone_it_takes_as_long():
    learned = simulated(*MODE, "schedule.warmup_epochs=0.2")
    assert simulated(*MODE, "schedule.warmup_epochs=0.2", "runtime.gradients=false").time_ns == learned.time_ns


@pytest.mark.slow
def test_a_warm_up_to_the_end_is_adam():
    adam = simulated("sync=bsp", "topology=all_reduce", "optimizer=adam", *BASE)
    assert simulated(*MODE, "schedule.warmup_epochs=9").sha256 == adam.sha256


def test_without_loss_it_is_adam_over_a_frozen_variance():
    """By hand, on one worker: ten steps of Adam, then m goes on and v does not."""
    one = ("cluster.compute=[1]", "cluster.link=null", "compression=none", "schedule.warmup_epochs=0.2")
    ran = simulated(*MODE, *one)
    ends = [record["steps"] for record in ran.of("stage")]
    trainer = assemble(ran.plan, "cpu").stages[0].trainer
    w, moments = trainer.init()
    for step in range(ends[0]):
        _, g = trainer.gradient(w, 0, step)
        moments, w = trainer.apply(w, moments, g, 0.01)
    m, v = moments[1], moments[2]
    for step in range(ends[0], 40):
        _, g = trainer.gradient(w, 0, step)
        m = 0.9 * m + 0.1 * g
        w = w - 0.01 / (1 - 0.9 ** ends[0]) * m / ((v / (1 - 0.999 ** ends[0])).sqrt() + 1e-8)
    assert 5 < ends[0] < 30
    torch.testing.assert_close(ran.params, w, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_bit_an_element_learns_as_much():
    ran = simulated(*MODE, "stop.steps=240", "schedule.warmup_epochs=2")
    assert [record["name"] for record in ran.of("stage")] == ["adam", "one_bit"]
    dense = simulated(*MODE, "stop.steps=240", "schedule.warmup_epochs=99")
    assert ran.learner is not None
    found = [each.learner.evaluate(each.params)["test_loss"] for each in (ran, dense)]
    assert found[0] < 1.3 * found[1]
    sent = [sum(ledger["bytes_up"] for ledger in each.of("ledger")) for each in (ran, dense)]
    assert sent[0] < 0.8 * sent[1]


@pytest.mark.parametrize(
    "wrong",
    [
        ("sync=one_bit_adam", "topology=all_reduce", "optimizer=adam"),
        ("schedule=one_bit_adam", "optimizer=sgd"),
    ],
)
def test_without_what_adam_has_learned_it_is_refused(wrong):
    with pytest.raises(UsageError, match="goes on with what Adam has learned; take schedule=one_bit_adam"):
        planned(*wrong)
