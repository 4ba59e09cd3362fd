"""PR-SGD with momentum: its limits, what it averages, and what that costs."""

from functools import cache, partial

import torch

from ashl.planning.instantiate import assemble_job
from tests.support import simulated

BASE = (
    "optimizer.momentum=0.9",
    "optimizer.weight_decay=0.01",
    "optimizer.lr=0.02",
    "stop.steps=24",
)
run = cache(partial(simulated, *BASE, "model.hidden=[16]"))
MODE = ("sync=pr_sgd_momentum", "sync.local_steps=3")
RING = "topology=all_reduce"


def test_a_server_and_an_all_reduce_average_identically_and_pay_twice():
    server, ring, dense = run(*MODE), run(*MODE, RING), run("sync=local_sgd", "sync.local_steps=3")
    assert server.sha256 == ring.sha256 != dense.sha256
    paid, once = (
        sum(r["bytes_up"] + r["bytes_down"] for r in ran.of("TimeTotals"))
        for ran in (server, dense)
    )
    assert paid == 2 * once
    assert server.plan.stages[0].workers[0].message_bytes == 8 * server.plan.num_params
    assert (
        server.plan.stages[0].workers[0].predicted_cycle_s
        > dense.plan.stages[0].workers[0].predicted_cycle_s
    )


def test_all_workers_continue_from_one_mean_momentum():
    """Two workers, one sample of a quadratic each, by hand."""
    h, rounds, lr, mu = 2, 3, 0.05, 0.9
    ran = simulated(
        "sync=pr_sgd_momentum", f"sync.local_steps={h}", "dataset=quadratic", "model=linear", "schedule=single",
        f"optimizer.momentum={mu}", "optimizer.weight_decay=0", f"optimizer.lr={lr}", f"stop.steps={2 * h * rounds}",
        "cluster.compute=[1,1]", "cluster.link=null",
    )  # fmt: skip
    stage = assemble_job(ran.plan, "cpu").stages[0]
    trainer, batch = stage.trainer, stage.worker(0).batch
    w, (m,) = trainer.init()
    for k in range(rounds):
        ends = []
        for rank in range(2):
            x, own = w, m
            for step in range(k * h, (k + 1) * h):
                _, g = trainer.gradient(x, rank, step, range(step * batch, (step + 1) * batch))
                own = mu * own + g
                x = x - lr * own
            ends.append((x, own))
        w, m = (sum(pair) / 2 for pair in zip(*ends, strict=True))
    torch.testing.assert_close(ran.params, w, rtol=1e-5, atol=1e-6)
