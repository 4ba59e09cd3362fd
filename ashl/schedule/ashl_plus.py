"""ASHL+: ASHL's stages with Top-K on pulls too, so that a small H pays in AHL already, and a
smaller server learning rate in SHL.

Rule: ASHL's, with two changes. Both stages compress pushes to their `r_preset` with error feedback.
A pull carries the fraction `pull_ratio` of the difference to the model that the worker holds.
Exchanges are then so short that a small H costs little time, and a smaller H learns more from each
sample. In SHL the server multiplies its updates by `shl_scale`, so the learning rate decays at the
stage boundary, without a horizon known beforehand.
It is meant for planner=online, because the time of a compressed pull is known during the run only.
It is meant for aggregate=uniform, which counts work once where `data_share` counts it twice.

Limit: without a lossy compression and with `shl_scale` = 1 it is ASHL.
Source: ours, from Shen et al., "ASHL", IEEE TC 2024; error feedback: Stich et al., NeurIPS 2018;
compressed pulls: Gruntkowska, Tyurin and Richtárik, ICML 2023.
"""

from dataclasses import replace

from ashl.option import Positive, Ratio, option
from ashl.plan.plan import StagePlan
from ashl.schedule.ashl import ASHL
from ashl.schedule.choices import Choices


@option
class ASHLPlus(ASHL):
    """ASHL, compressed in both directions."""

    pull_ratio: Ratio | None
    shl_scale: Positive

    def stages(self, choices: Choices) -> list[StagePlan]:
        *first, shl = super().stages(with_compressed_pulls(choices, self.pull_ratio))
        aggregate = {**shl.aggregate, "scale": self.shl_scale * shl.aggregate["scale"]}
        return [*first, replace(shl, aggregate=aggregate)]


def with_compressed_pulls(choices: Choices, ratio: float | None) -> Choices:
    """Return the choices with this density of a pull, if the codec is lossy and
    `topology.pull_ratio` is null.
    """
    topology = choices.specs["topology"]
    if choices.ratio is not None and "pull_ratio" in topology and topology["pull_ratio"] is None:
        topology = {**topology, "pull_ratio": ratio}
    return replace(choices, specs={**choices.specs, "topology": topology})
