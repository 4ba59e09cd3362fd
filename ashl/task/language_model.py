"""Language modelling: training minimises cross entropy of each next token; perplexity or accuracy
is reported.

Rule: loss = mean over tokens of −log softmax(outputs)[token], perplexity = exp(that mean over the
whole test set). Tokens of target `ignore_index` do not count.
Source: Jelinek et al., "Perplexity: a measure of the difficulty of speech recognition tasks", JASA
62, 1977.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ashl.errors import UsageError
from ashl.option import option
from ashl.task.contract import ACCURACY, Task, refuse_negative


@option
class LanguageModel(Task):
    """The next token at every place: targets are the inputs, one place on."""

    metric: Literal["perplexity", "accuracy"]
    ignore_index: int

    @property
    def higher_is_better(self) -> bool:
        return self.metric == ACCURACY

    def output_shape(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        if targets.is_floating_point() or targets.ndim != 2:
            raise UsageError(
                "task=language_model needs a token at every place, targets int64 [samples,"
                f" length]; this data set has {str(targets.dtype).removeprefix('torch.')} of shape"
                f" {tuple(targets.shape[1:])} a sample"
            )
        return *targets.shape, num_classes

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), ignore_index=self.ignore_index
        )

    def counts(self, targets: Tensor) -> Tensor | None:
        refuse_negative(targets, self.ignore_index)
        return super().counts(targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [sum over the sample's tokens, number of its tokens] for each sample."""
        counted = targets != self.ignore_index
        if self.metric == ACCURACY:
            found = ((outputs.argmax(dim=2) == targets) & counted).double()
        else:
            of = outputs.transpose(1, 2), targets
            found = functional.cross_entropy(
                *of, ignore_index=self.ignore_index, reduction="none"
            ).double()
        return torch.stack([found.sum(1), counted.sum(1).double()], dim=1)

    def value(self, means: Tensor) -> float:
        ratio = means[0] / means[1]
        return (ratio if self.metric == ACCURACY else ratio.exp()).item()
