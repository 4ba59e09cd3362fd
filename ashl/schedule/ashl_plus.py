"""ASHL+: ASHL's stages with Top-K on the way down too, so that small H pays already in AHL, and
smaller steps in SHL.

Rule: ASHL's, but both stages compress the push to their `r_preset` with error feedback, and a pull
carries `pull_ratio` of the difference to what the worker holds. With the exchange that much
shorter, H can be small without much time going into transfers, and smaller H learns more from each
sample. In SHL the server adds `shl_scale` times what it would: the border between the stages is
where the step falls, without a horizon known beforehand. Meant for planner=online, since what a
compressed pull takes is seen during the run only, and for aggregate=uniform, which counts work once
where `data_share` counts it twice.

Limit: without a compression that leaves something out, and with `shl_scale` = 1, it is ASHL.

Source: departs from Shen et al., "ASHL", IEEE TC 2024; error feedback, Stich et al., NeurIPS 2018;
compressed pulls, Gruntkowska, Tyurin and Richtárik, ICML 2023.
"""

from dataclasses import replace

from ashl.option import Positive, Ratio, option
from ashl.plan.plan import StagePlan
from ashl.schedule.ashl import ASHL
from ashl.schedule.choices import Choices


@option
class ASHLPlus(ASHL):
    """ASHL, compressed both ways."""

    pull_ratio: Ratio | None
    shl_scale: Positive

    def stages(self, choices: Choices) -> list[StagePlan]:
        *first, shl = super().stages(with_compressed_pulls(choices, self.pull_ratio))
        aggregate = {**shl.aggregate, "scale": self.shl_scale * shl.aggregate["scale"]}
        return [*first, replace(shl, aggregate=aggregate)]


def with_compressed_pulls(choices: Choices, ratio: float | None) -> Choices:
    """The choices with this density of a pull, where something is compressed and no share is
    chosen.
    """
    topology = choices.specs["topology"]
    if choices.ratio is not None and "pull_ratio" in topology and topology["pull_ratio"] is None:
        topology = {**topology, "pull_ratio": ratio}
    return replace(choices, specs={**choices.specs, "topology": topology})
