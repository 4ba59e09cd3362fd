"""What a planner says of one worker, and the time model behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ashl.option import Contract
from ashl.plan.profile import Profile

NS = 1e9
Payload = Callable[[float], float]  # bytes on the wire at a density / those of the dense vector


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one worker does in one stage."""

    local_steps: int  # H, between two commits
    data_share: float  # of the training set
    compression_ratio: float  # density of the update; 1 = all of it
    predicted_cycle_s: float  # H steps, encoding, push and pull, in bytes as really sent


def assignment_of(row: Sequence[float]) -> Assignment:
    """From the four numbers, in order, as they travel."""
    steps, share, ratio, cycle_s = row
    return Assignment(
        local_steps=int(steps), data_share=share, compression_ratio=ratio, predicted_cycle_s=cycle_s
    )


class Assigned(Protocol):
    """What a worker does now, as far as a planner judges it."""

    @property
    def local_steps(self) -> int: ...

    @property
    def compression_ratio(self) -> float: ...


class Planner(Contract, group="planner"):
    """How H, shares and ratios follow from a profile."""

    follows: ClassVar[bool] = False  # whether it plans anew during a run, from what it observes

    def assign(
        self, profile: Profile, h_preset: int, r_preset: float | None, payload: Payload
    ) -> tuple[Assignment, ...]:
        """What each worker does in a stage with these presets."""
        raise NotImplementedError

    def observe(
        self,
        state: Any,
        worker: int,
        step_s: float,
        push_s: float,
        pull_s: float,
        payload: float = 1.0,
    ) -> Any:
        """One commit, see `online`."""
        raise NotImplementedError

    def hear(self, state: Any, worker: int, update: Any, steps: int, samples: int) -> Any:
        """The update of that commit, see `goodput`."""
        return state

    def replan(
        self,
        state: Any,
        current: Sequence[Assigned],
        h_preset: int,
        r_preset: float | None,
        payload: Payload,
    ) -> tuple[Any, tuple[Assignment, ...] | None]:
        """(state, a new assignment where that is worth it)."""
        raise NotImplementedError


class Costs(NamedTuple):
    """One worker's profile in nanoseconds."""

    step: int
    push: int  # of the dense model
    empty_push: int  # the part of a push that no compression saves
    pull: int
    encode: int  # 0 where nothing is encoded

    def push_of(self, payload: float) -> int:
        return self.empty_push + round(payload * (self.push - self.empty_push))

    def cycle(self, steps: int, payload: float) -> int:
        """T = H · step + encode + push(payload) + pull."""
        return steps * self.step + self.encode + self.push_of(payload) + self.pull


def costs_of(profile: Profile, encoded: bool) -> list[Costs]:
    return [
        Costs(
            step=round(worker.step_s * NS),
            push=round(worker.push_s * NS),
            empty_push=round(worker.push_of(0.0) * NS),
            pull=round(worker.pull_s * NS),
            encode=round(worker.compress_s * NS) if encoded else 0,
        )
        for worker in profile.workers
    ]


def sent(payload: Callable[[float], float], ratio: float) -> float:
    """What travels of the dense model's bytes. Keeping everything never takes more than the dense
    vector itself.
    """
    return min(1.0, payload(1.0)) if ratio == 1 else payload(ratio)


def assignments(
    costs: Sequence[Costs],
    steps: Sequence[int],
    ratios: Sequence[float],
    payload: Callable[[float], float],
) -> tuple[Assignment, ...]:
    """With the cycles that follow, and shares of the data as of the steps: D_i = H_i / Σ H."""
    total = sum(steps)
    return tuple(
        Assignment(
            local_steps=h,
            data_share=h / total,
            compression_ratio=ratio,
            predicted_cycle_s=cost.cycle(h, sent(payload, ratio)) / NS,
        )
        for cost, h, ratio in zip(costs, steps, ratios, strict=True)
    )
