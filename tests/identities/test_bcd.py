"""Block coordinate descent: what it minimises never grows, each block is where it should be, many
workers are one.
"""

import pytest
import torch

from ashl.optimizer.bcd import append_ones, flatten_layers, weights_of
from ashl.planning.instantiate import assemble_job
from tests.conf_option import conf_option
from tests.support import planned, simulated

CHOSEN = ("schedule=single", "sync=bsp", "topology=all_reduce", "optimizer=bcd")
SMALL = (*CHOSEN, "cluster=homogeneous", "model.hidden=[24]")


@pytest.mark.limit("optimizer=bcd")
def test_many_workers_are_one_with_all_the_data() -> None:
    uneven = simulated(
        *SMALL, "dataset.partition=dirichlet", "dataset.alpha=1", "stop.epochs=4", "seed=1"
    )
    one = simulated(*SMALL, "cluster.compute=[1]", "stop.epochs=4", "seed=1")
    assert uneven.end["steps"] == 16
    torch.testing.assert_close(uneven.params, one.params, rtol=1e-3, atol=1e-4)


def test_every_block_is_where_the_objective_is_least() -> None:
    """No step in any direction from a new block makes F smaller; of V, none to either side of 0
    either.
    """
    rule = conf_option("optimizer", "bcd", gamma=0.5, rho=0.7, ridge=1e-9)
    trainer = assemble_job(planned(*SMALL, "model.hidden=[5,4]"), "cpu").stages[0].trainer
    params, moments = trainer.learner.init(), rule.init_for_layers(trainer.learner.layers)
    inputs, targets = (x.double() for x in trainer.learner.samples(trainer.batches[0].shard[:60]))
    _, blocks, means = rule.sweep(params, moments, None, inputs, targets)
    _, blocks, means = rule.sweep(params, moments, blocks, inputs, targets)
    old = weights_of(moments, params)
    assert means.numel() == rule.statistics(trainer.learner.layers)
    _, after = rule.step(moments, params.double(), means, 1.0)
    new = weights_of(moments, after)
    generator = torch.Generator().manual_seed(0)

    def worse(weights, changed):
        return rule.objective(weights, changed, inputs, targets) >= rule.objective(
            weights, blocks, inputs, targets
        )

    for size in (1e-3, 0.3):
        for _ in range(5):
            noise = size * torch.randn(
                blocks.sums[0].shape, generator=generator, dtype=torch.double
            )
            assert worse(old, blocks._replace(sums=[blocks.sums[0] + noise, *blocks.sums[1:]])), (
                "the last to be set"
            )
            shaken = [
                w + size * torch.randn(w.shape, generator=generator, dtype=torch.double)
                for w in new
            ]
            assert rule.objective(shaken, blocks, inputs, targets) > rule.objective(
                new, blocks, inputs, targets
            )
    assert torch.equal(flatten_layers(new), after)
    residual = blocks.sums[1] - new[1] @ append_ones(blocks.outputs[0])
    torch.testing.assert_close(
        residual @ append_ones(blocks.outputs[0]).T, torch.zeros(4, 6).double(), rtol=0, atol=1e-5
    )


def test_activated_sums_against_a_grid() -> None:
    rule = conf_option("optimizer", "bcd", gamma=0.5, rho=2.0)
    outputs, sums = torch.meshgrid(
        torch.linspace(-2, 2, 17), torch.linspace(-2, 2, 19), indexing="ij"
    )
    grid = torch.linspace(-4, 4, 8001)[:, None, None]
    cost = 2.0 * (outputs - grid.relu()) ** 2 + 0.5 * (grid - sums) ** 2
    found = rule.minimize_sums(outputs, sums)
    least = 2.0 * (outputs - found.relu()) ** 2 + 0.5 * (found - sums) ** 2
    assert (least <= cost.min(0).values + 1e-5).all()
