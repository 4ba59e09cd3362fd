"""ADSP as ASHL's repository re-implements it: no local steps. A weak stand-in for `adsp`, here to
tell the two apart.

Rule: workers commit at ADSP's searched rate, but compute all gradients between two commits on the
model as pulled and send U = Σ lr·g; the server takes an optimizer step on it, m ← 0.9·m + c·U, w ←
w − lr·m, so that the learning rate counts twice. The server's rate is multiplied by `decay` at each
new search. Give the server its momentum by `optimizer.momentum=0.9` and its plain mean by
`aggregate=uniform`.

Limit: H = 1 (an interval below one step) is asynchronous SGD on gradients, with the rate squared.
Not carried over: that repository's batch of 42 and its stop at a loss of 0.05, which the
configuration can set.

Source: the ADSP baseline in the repository of Shen et al., "ASHL", IEEE TC 2024 (commits of
December 2022). The method itself: Hu, Wang and Wu, AAAI 2020, which takes real local steps.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from ashl.option import option
from ashl.sync.adsp import ADSP, Search


@option
class ADSPAshlRepo(ADSP):
    """A common commit rate, gradients on a frozen model, the learning rate twice."""

    exchange: ClassVar[str] = "accumulated"
    decay: Annotated[float, Field(gt=0, le=1)]

    def lr_scale(self, state: Search) -> float:
        return self.decay ** (state.searches - 1)
