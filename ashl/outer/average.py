"""Plain average: the merged update is added to the model.

Use when: no outer step is wanted: the merged update is added.
Avoid when: there are many rounds of many local steps in similar directions.
Alternatives: `nesterov`; `heavy_ball`.

Rule: w ← w + Σ c_i·Δ_i.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017 (FedAvg); with H local steps it is local SGD: Stich, ICLR 2019.
"""

from typing import ClassVar

from torch import Tensor

from ashl.option import option
from ashl.outer.contract import Moments, Outer


@option
class Average(Outer):
    """Adds the merged update."""

    linear: ClassVar[bool] = True

    @property
    def needs(self) -> dict[str, str]:
        return {}

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        return moments, params + update
