"""H where the measured trade-off is best: steps per second, against what a step of a larger round
still teaches.

Rule: every `cooldown_commits` commits per worker each H of the slowest from 1 to `h_max`, in steps
of a quarter, is planned as `balanced` does on the moving averages of times, and judged by its
goodput, (Σ H / max_i T_i) · B / (B + b·Σ H): the pace, and the share of it that learns, since of a
round that holds many more samples (b·Σ H) than the gradient noise scale B most repeat each other.
The best one is taken where it promises more than (1 + threshold) times what the present one does. B
= tr Σ/|G|² is measured from what is pushed anyway: of two pushes in a row of different workers,
with H_i and H_j steps, ⟨Δ_i, Δ_j⟩/(H_i·H_j) is |G|² in the mean, and |Δ_i|²/H_i² − |G|² the noise
of b·H_i samples, or with a `momentum` ρ that of b·H_i²/((1 − ρ)²·V), V = (H_i + 2·Σ_{l<H_i} (H_i −
l)·ρ^l)/(1 − ρ²). Both have a mean of their own, of all pairs at first and then a moving one with
weight `smoothing`, and B is their quotient; before 1/`smoothing` pairs it is `online` with its
preset. What a codec leaves out counts as noise.

On equal workers the best H is near √(B/(b·n) · C/t), with exchanges of C seconds and steps of t: H
grows as the gradient fades in its noise, and as exchanges turn slower. It knows noise alone: that
models drift apart where they are curved, and swing where rates are high, it does not see, so that H
may come out too large.

Limits: updates without noise, or exchanges without cost, make H = 1; without a gradient H is what
is quickest; one worker, of whose noise nobody can tell, is `online`, and so are all with h_max = 1
and h_preset = [1].

Source: the goodput of Pollux (Qiao et al., OSDI 2021), with H in place of its batch; B of
McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162. That H follows it
is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field

from ashl.optimizer.schedule import Decay
from ashl.option import Count, option
from ashl.planner.assignment import Assignment
from ashl.planner.online import Averages, Online, pace
from ashl.size_only import SizeOnly


@dataclass(frozen=True)
class Noise:
    """What is known of the gradients: the last update, and the means of what pairs of
    updates said.
    """

    worker: int
    direction: Any  # the last update by step, [d]
    batch: float  # samples of a step
    pairs: int = 0
    signal: float = 0.0  # |G|², in units of an update by step
    spread: float = 0.0  # tr Σ of one sample, likewise

    @property
    def scale(self) -> float:
        """B in samples; infinite where no gradient is to be seen in the noise."""
        return max(0.0, self.spread) / self.signal if self.signal > 0 else math.inf


@option
class Goodput(Online):
    """Online, with H by gradient noise, too."""

    h_max: Count
    momentum: Decay
    smoothing: Annotated[float, Field(gt=0, le=1)]

    def hear(self, state: Averages, worker: int, update: Any, steps: int, samples: int) -> Averages:
        """One update of `steps` steps on so many samples."""
        if isinstance(update, SizeOnly):
            return state
        last: Noise | None = state.noise
        direction, batch = update / steps, samples / steps
        now = Noise(worker, direction, batch)
        if last is not None:
            now = replace(last, worker=worker, direction=direction, batch=batch)
        if last is not None and last.worker != worker:
            wide = direction.to(torch.float64)
            length, along = float(wide @ wide), float(wide @ last.direction.to(torch.float64))
            spread = batch * independent(steps, self.momentum) * (length - along)
            weight = max(self.smoothing, 1 / (last.pairs + 1))
            now = replace(
                now,
                pairs=last.pairs + 1,
                signal=last.signal + weight * (along - last.signal),
                spread=last.spread + weight * (spread - last.spread),
            )
        return replace(state, noise=now)

    def presets(self, state: Averages, h_preset: int) -> Iterable[int]:
        return (h_preset,) if self._noise(state) is None else candidates(self.h_max)

    def worth(self, state: Averages, plan: Sequence[Assignment]) -> float:
        """Steps per second that learn, up to a factor that all plans have in common."""
        noise = self._noise(state)
        if noise is None or math.isinf(noise.scale):
            return pace(plan)
        return pace(plan) / (noise.scale + noise.batch * sum(worker.local_steps for worker in plan))

    def _noise(self, state: Averages) -> Noise | None:
        """Once enough pairs of updates were heard."""
        noise: Noise | None = state.noise
        return noise if noise is not None and noise.pairs >= 1 / self.smoothing else None


def candidates(h_max: int) -> Iterator[int]:
    """1 to `h_max`, each by a quarter more than the one before."""
    h = 1
    while h < h_max:
        yield h
        h = max(h + 1, h * 5 // 4)
    yield h_max


def independent(steps: int, momentum: float) -> float:
    """How many gradients have as much noise beside their mean as so many steps with this momentum,
    in the long run.
    """
    rest = 1 - momentum
    within = momentum * (steps * rest - (1 - momentum**steps)) / rest**2  # Σ_{l<H} (H − l)·ρ^l
    return steps**2 * (1 - momentum**2) / (rest**2 * (steps + 2 * within))
