"""Why a run has diverged, judged from its last model, on every topology and both kernels.

A run has diverged if its last model, or a worker's own, is noise:
- its training loss is not finite;
- the square of a parameter overflows float32;
- the workers' models are farther from their mean than as many unrelated models would be;
- its training loss is above that of the untrained model, and the model fits its samples hardly better than samples that
  were paired at random;
- the workers' minibatch losses are far above the untrained model's loss.

In the first epoch a loss may rise before it falls, so only a rise by the factor `FAR` counts there.
"""

import math

from torch import Tensor

from ashl.learn.learner import Learner
from ashl.run.evaluation import Evaluation
from ashl.runtime.records import Counts

LARGEST = math.sqrt(3.4028235e38)  # a larger parameter has no square in float32
RISE = 1.1  # of the untrained model's loss: a larger one is a rise
FAR = 10.0  # the same of minibatches and within the first epoch, where losses vary more
UNRELATED = 0.5  # of the loss on samples paired at random: a larger loss means that little was learned


def why_diverged(counts: Counts, found: Evaluation, params: Tensor, learner: Learner, num_workers: int) -> str | None:
    """Return why the run with this last evaluation has diverged, None if it has not."""
    step = f"after step {counts.steps}"
    if counts.diverged:
        return counts.diverged
    if not found.finite:
        return f"the model's loss is {found.train_loss} {step}"
    if (largest := float(params.abs().max())) > LARGEST:
        return f"a parameter of the model is {largest:.3g} {step}"
    untrained = learner.untrained()
    if found.consensus_distance is not None:
        length = max(squared(params), squared(untrained))
        if not found.consensus_distance <= num_workers * length:
            return (
                f"the workers' models are unrelated {step}: their mean squared distance from their mean is "
                f"{found.consensus_distance:.3g}, and that mean's squared length is {squared(params):.3g}"
            )
    before = learner.train_loss(untrained)
    if not math.isfinite(before):
        return None
    untrained_loss = f"{before:.3g}, the untrained model's"
    factor = FAR if counts.samples < learner.epoch_samples else RISE
    grown = risen(found.train_loss, before, factor)
    if grown and not risen(learner.train_loss(params, shift=1), found.train_loss, 1 / UNRELATED):
        return f"the model's training loss is {found.train_loss:.3g} {step}, which is more than {untrained_loss}"
    if risen(counts.loss, before, FAR):
        return f"the workers' training loss is {counts.loss:.3g} {step}, which is more than {untrained_loss}"
    return None


def risen(loss: float, before: float, factor: float) -> bool:
    """Return True if a loss is above another one by more than (factor − 1) times its size. Losses may be negative."""
    return loss > before + (factor - 1) * abs(before)


def squared(params: Tensor) -> float:
    """Return the squared length of a vector."""
    return float(params.double().square().sum())
