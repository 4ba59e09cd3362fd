"""Goodput planner: the H with the best product of steps per second and progress per step.

Rule: a decision is made every `cooldown_commits` commits per worker. The candidates for the slowest
worker's H are 1 to `h_max`, in steps of a quarter. Each is planned as in `balanced`, on the moving
averages of times. Its goodput is (Σ H / max_i T_i) · B / (B + b·Σ H). The first factor is
the pace in steps per second. The second is the useful share of the samples: if a round has many
more samples (b·Σ H) than the gradient noise scale B, most are redundant. The best assignment is
taken if its goodput is more than (1 + threshold) times the current one.

B = tr Σ/|G|² is estimated from the pushes. For two consecutive pushes of different workers with H_i
and H_j steps, the mean of ⟨Δ_i, Δ_j⟩/(H_i·H_j) is |G|². The noise of b·H_i samples is |Δ_i|²/H_i² −
|G|². With `momentum` ρ it is that of b·H_i²/((1 − ρ)²·V) samples, V = (H_i + 2·Σ_{l<H_i} (H_i −
l)·ρ^l)/(1 − ρ²). Both estimates are averaged: first over all pairs, then as moving averages with
weight `smoothing`. B is their quotient. Before 1/`smoothing` pairs the planner is `online` with its
preset. The error of a codec counts as noise.

On equal workers the best H is near √(B/(b·n) · C/t), with exchanges of C seconds and steps of t
seconds. So H grows as the gradient vanishes in its noise, and as exchanges become slower. The model
has noise only. It ignores the drift of models on curved losses and oscillation at high learning
rates, so H may be too large.

Limits: with updates without noise, or exchanges without cost, H = 1. Without a gradient, H has the
highest pace. The noise of a single worker cannot be estimated, so the planner is `online` there. It
is `online` with h_max = 1 and h_preset = [1], too.

Source: the goodput of Pollux (Qiao et al., OSDI 2021), with H in place of its batch; B of
McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162. The use of B to
choose H is our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field

from ashl.device import read_scalars
from ashl.optimizer.schedule import Decay
from ashl.option import Count, option
from ashl.planner.assignment import Assignment
from ashl.planner.online import Averages, Online, pace
from ashl.size_only import SizeOnly


@dataclass(frozen=True)
class Noise:
    """Estimates of the gradient noise: the last update, and the averages over pairs of updates."""

    worker: int
    direction: Any  # last update divided by its steps, [d]
    batch: float  # samples of a step
    pairs: int = 0  # pairs of updates in the averages
    signal: float = 0.0  # |G|², in units of an update per step, squared
    spread: float = 0.0  # tr Σ of one sample, in the same units

    @property
    def scale(self) -> float:
        """Return B in samples; infinite if the noise hides the gradient."""
        return max(0.0, self.spread) / self.signal if self.signal > 0 else math.inf


@option
class Goodput(Online):
    """The planner `online` with an H chosen by gradient noise."""

    h_max: Count
    momentum: Decay
    smoothing: Annotated[float, Field(gt=0, le=1)]

    def observe_update(
        self, state: Averages, worker: int, update: Any, steps: int, samples: int
    ) -> Averages:
        """Return the state with one update of `steps` steps on `samples` samples."""
        if isinstance(update, SizeOnly):
            return state
        last: Noise | None = state.noise
        direction, batch = update / steps, samples / steps
        now = Noise(worker, direction, batch)
        if last is not None:
            now = replace(last, worker=worker, direction=direction, batch=batch)
        if last is not None and last.worker != worker:
            wide = direction.to(torch.float64)
            length, along = read_scalars([wide @ wide, wide @ last.direction.to(torch.float64)])
            spread = batch * count_independent_gradients(steps, self.momentum) * (length - along)
            weight = max(self.smoothing, 1 / (last.pairs + 1))
            now = replace(
                now,
                pairs=last.pairs + 1,
                signal=last.signal + weight * (along - last.signal),
                spread=last.spread + weight * (spread - last.spread),
            )
        return replace(state, noise=now)

    @property
    def needs(self) -> dict[str, str]:
        return {"single_updates": ""}

    def presets(self, state: Averages, h_preset: int) -> Iterable[int]:
        return (h_preset,) if self._noise(state) is None else candidates(self.h_max)

    def score(self, state: Averages, plan: Sequence[Assignment]) -> float:
        """Return useful steps per second, up to a factor that is common to all assignments."""
        noise = self._noise(state)
        if noise is None or math.isinf(noise.scale):
            return pace(plan)
        return pace(plan) / (noise.scale + noise.batch * sum(worker.local_steps for worker in plan))

    def _noise(self, state: Averages) -> Noise | None:
        """Return the estimates once they have enough pairs of updates, else None."""
        noise: Noise | None = state.noise
        return noise if noise is not None and noise.pairs >= 1 / self.smoothing else None


def candidates(h_max: int) -> Iterator[int]:
    """Yield 1 to `h_max`, each a quarter more than the one before."""
    h = 1
    while h < h_max:
        yield h
        h = max(h + 1, h * 5 // 4)
    yield h_max


def count_independent_gradients(steps: int, momentum: float) -> float:
    """Return the number of independent gradients with the same relative noise as `steps` steps.

    The steps have this momentum; the value holds in the long run.
    """
    rest = 1 - momentum
    within = momentum * (steps * rest - (1 - momentum**steps)) / rest**2  # Σ_{l<H} (H − l)·ρ^l
    return steps**2 * (1 - momentum**2) / (rest**2 * (steps + 2 * within))
