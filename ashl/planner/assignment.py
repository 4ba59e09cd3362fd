"""The planner contract, the assignment of a worker, and the time model of a cycle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ashl.option import Contract
from ashl.plan.profile import Profile

NS = 1e9
Payload = Callable[[float], float]  # density → encoded bytes as a share of the dense bytes


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The work of one worker in one stage."""

    local_steps: int  # H, steps between two commits
    data_share: float  # share of the training set
    compression_ratio: float  # density of the update; 1 = dense
    predicted_cycle_s: float  # seconds of H steps, encoding, push and pull, with encoded bytes


def assignment_of(row: Sequence[float]) -> Assignment:
    """Return the assignment of (H, data share, density, cycle in seconds), as sent in a message."""
    steps, share, ratio, cycle_s = row
    return Assignment(
        local_steps=int(steps), data_share=share, compression_ratio=ratio, predicted_cycle_s=cycle_s
    )


class CurrentWork(Protocol):
    """The part of a worker's current assignment that a planner compares."""

    @property
    def local_steps(self) -> int: ...

    @property
    def compression_ratio(self) -> float: ...


class Planner(Contract, group="planner"):
    """Base class of planners: rules that derive H, data shares and densities from a profile."""

    replans: ClassVar[bool] = False  # True if it replans during a run from observed times

    def assign(
        self, profile: Profile, h_preset: int, r_preset: float | None, payload: Payload
    ) -> tuple[Assignment, ...]:
        """Return the assignment of each worker in a stage with these presets."""
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
        """Return the state with the observed times of one commit, see `ashl.planner.online`."""
        raise NotImplementedError

    def observe_update(self, state: Any, worker: int, update: Any, steps: int, samples: int) -> Any:
        """Return the state with the update of one commit, see `ashl.planner.goodput`."""
        return state

    def replan(
        self,
        state: Any,
        current: Sequence[CurrentWork],
        h_preset: int,
        r_preset: float | None,
        payload: Payload,
    ) -> tuple[Any, tuple[Assignment, ...] | None]:
        """Return (state, new assignment); None for the assignment if no change is worth it."""
        raise NotImplementedError


class Costs(NamedTuple):
    """One worker's profile in nanoseconds."""

    step: int
    push: int  # push of the dense model
    empty_push: int  # part of a push that does not depend on its bytes
    pull: int
    encode: int  # 0 without compression

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


def sent_share(payload: Callable[[float], float], ratio: float) -> float:
    """Return the encoded bytes at a density, as a share of the dense bytes.

    At density 1 the dense vector is sent if encoding does not shorten it.
    """
    return min(1.0, payload(1.0)) if ratio == 1 else payload(ratio)


def assignments(
    costs: Sequence[Costs],
    steps: Sequence[int],
    ratios: Sequence[float],
    payload: Callable[[float], float],
) -> tuple[Assignment, ...]:
    """Return the assignments with these steps and densities.

    Cycles are predicted, and D_i = H_i / Σ H.
    """
    total = sum(steps)
    return tuple(
        Assignment(
            local_steps=h,
            data_share=h / total,
            compression_ratio=ratio,
            predicted_cycle_s=cost.cycle(h, sent_share(payload, ratio)) / NS,
        )
        for cost, h, ratio in zip(costs, steps, ratios, strict=True)
    )
