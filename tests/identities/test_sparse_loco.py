"""SparseLoCo whole: DiLoCo without momentum where all is sent, and the paper's loop where little
is.
"""

from functools import partial

import torch

from ashl.planning.instantiate import assemble_job
from tests.support import simulated

whole = partial(
    simulated, "model.hidden=[16]", "cluster.num_workers=2", "sync.local_steps=3", "outer.lr=0.7"
)


def test_an_error_feedback_is_its_outer_momentum() -> None:
    chunk = (
        "compression.chunk=121",
        "compression.ratio=0.1",
        "compression.values=fp32",
    )  # of 1,210 elements
    ran = whole("experiment=sparse_loco", *chunk, "stop.steps=24")
    trainer = assemble_job(ran.plan, "cpu").stages[0].trainer
    model, moments = trainer.init()
    kept, left = [moments] * 2, [torch.zeros(10, 121)] * 2
    for first in range(0, 12, 3):
        sent = []
        for worker in range(2):
            own = model
            for step in range(first, first + 3):
                _, kept[worker], own = trainer.local_step(
                    own, kept[worker], worker, step, trainer.rate(0)
                )
            held = 0.95 * left[worker] + (own - model).view(10, 121)
            places = held.abs().topk(12, dim=1).indices
            sent.append(torch.zeros_like(held).scatter(1, places, held.gather(1, places)))
            left[worker] = held - sent[-1]
        model = model + 0.7 * (sent[0] + sent[1]).flatten() / 2
    torch.testing.assert_close(ran.params, model, rtol=0, atol=1e-5)
