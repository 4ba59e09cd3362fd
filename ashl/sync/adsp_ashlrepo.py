"""ADSP as ASHL's repository re-implements it, without local steps: a weaker baseline than `adsp`.

Use when: the comparison of ASHL's released code is to be repeated.
Avoid when: training matters: this variant takes no real local steps and is slow.
Alternatives: `adsp`, which takes them.

Rule: workers commit at the common rate that ADSP's search finds. They compute all gradients between
two commits on the model that they pulled, and push U = Σ lr·g. The server takes an optimizer step
on U/n, m ← 0.9·m + U/n, w ← w − lr·m, so the learning rate counts twice. Each new search multiplies
the server's learning rate by `decay`. The rule needs `optimizer.momentum=0.9` and
`aggregate=uniform`.
Waiting: no worker waits for another one.

Limit: an interval of at most one step is asynchronous SGD on gradients, with the square of the
learning rate.
Source: the ADSP baseline in the repository of Shen et al., "ASHL", IEEE TC 2024 (commits of
December 2022). The method itself takes local steps: Hu, Wang and Wu, AAAI 2020.
Differs: the repository's batch of 42 and its stop at a loss of 0.05 are not defaults here; the
configuration can set both.

Family: asynchronous server.
Status: reproduction.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from ashl.option import option
from ashl.sync.adsp import ADSP, Search


@option
class ADSPAshlRepo(ADSP):
    """A common commit rate, gradients on the pulled model, and the learning rate twice."""

    exchange: ClassVar[str] = "accumulated"
    decay: Annotated[float, Field(gt=0, le=1)]

    def lr_scale(self, state: Search) -> float:
        return self.decay ** (state.searches - 1)
