"""Shared by the tests of planners: small clusters, and a plan's columns."""

from collections.abc import Sequence

from ashl.plan.profile import SCHEMA, Profile, WorkerProfile
from ashl.planner.assignment import Assignment
from ashl.planner.balanced import Balanced
from ashl.planner.online import Online
from ashl.planner.paper import Paper
from tests.conf_option import conf_option

Plan = tuple[Assignment, ...]

PAPER: Paper = conf_option("planner", "paper")
BALANCED: Balanced = conf_option("planner", "balanced")
ONLINE: Online = conf_option("planner", "online")
TICK_S = 2e-9
REFERENCE = ((2, 3, 4), (4, 6, 8))  # compute and transfers of the paper's emulation


def pairs(ratio: float) -> float:
    """Values and indices of 32 bits each."""
    return 2 * ratio


def linear(ratio: float) -> float:
    return ratio


def cluster(
    steps: Sequence[float], exchanges: Sequence[float], *, compress: float = 0.0, fixed: float = 0.0
) -> Profile:
    """Seconds of a step, and of a push plus pull in equal halves, of which the share `fixed` is
    latency.
    """
    workers = tuple(
        WorkerProfile(
            step_s=step,
            step_spread_s=0.0,
            step_noise_s=0.0,
            push_noise_s=0.0,
            push_loaded_s=None,
            pull_noise_s=0.0,
            pull_loaded_s=None,
            batch=32,
            push_s=exchange / 2,
            pull_s=exchange / 2,
            latency_s=fixed * exchange / 2,
            push_bytes_s=1e6,
            pull_bytes_s=1e6,
            compress_s=compress,
        )
        for step, exchange in zip(steps, exchanges, strict=True)
    )
    return Profile(
        schema=SCHEMA,
        model="MLP",
        num_params=10,
        dense_bytes=40,
        device="cpu",
        source="declared",
        server_step_s=0.0,
        server_bytes_s=None,
        ports=False,
        workers=workers,
    )


def reference(rho: float) -> Profile:
    """Costs with c = 20 ms and m = rho · c."""
    compute, link = REFERENCE
    return cluster([0.02 * c for c in compute], [0.02 * rho * m for m in link])


def steps(plan: Plan) -> tuple[int, ...]:
    return tuple(worker.local_steps for worker in plan)


def ratios(plan: Plan) -> list[float]:
    return [worker.compression_ratio for worker in plan]


def cycles(plan: Plan) -> list[float]:
    return [worker.predicted_cycle_s for worker in plan]


def spread(plan: Plan) -> float:
    return max(cycles(plan)) - min(cycles(plan))


def wait_share(plan: Plan) -> float:
    """Return the rate of a bounded stage in the long run, in which each worker has the slowest
    one's commit rate.
    """
    return 1 - sum(cycles(plan)) / len(plan) / max(cycles(plan))
