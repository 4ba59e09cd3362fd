"""Run `ashl advise --probe HOSTS`: measure the links of hosts, and answer how many local steps H
they need.

Rule: a job on the hosts profiles steps and links. Rounds of local SGD by all-reduce are predicted
in virtual time for each H up to SIMULATED. A further step lengthens a round by t, which is the
slope at the last two of these H. The utilisation is H·t / (seconds of a round). The answer is the
smallest H from which on the utilisation is at least WANTED, or else the largest H.

Limits: it answers speed alone. A larger H also needs more steps to a loss, which `ashl advise`
without `--probe` compares.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from ashl.config.compose import compose
from ashl.errors import AshlError, DataMissingError
from ashl.launch.job import read_machines
from ashl.plan.files import read_profile
from ashl.plan.profile import Profile
from ashl.planning.compile_plan import compile_plan
from ashl.tracking.console import megabytes, percent, plain_table, print_unwrapped

ADVICE = Path("runs/advice")
LOCAL_STEPS = tuple(2**k for k in range(10))
SIMULATED = 64  # longer rounds are prolonged by further steps of equal length
WANTED = 0.9  # utilisation
HOUR_S = 3600.0
# Ranges in which predictions were compared with measured clusters, see docs/results/backtest.md.
TESTED_MBIT_S = (50.0, 5000.0)
TESTED_WORKERS = 20
METHOD = (
    "topology=all_reduce",
    "sync=local_sgd",
    "runtime=sim",
    "runtime.gradients=false",
    "stop.steps=1000000000",  # else a run of few epochs cuts long rounds
)


@dataclass(frozen=True)
class Choice:
    """The predicted effect of an H. `bytes_per_hour` is sent by one worker."""

    local_steps: int
    utilisation: float
    bytes_per_hour: float


@dataclass(frozen=True)
class Probed:
    """The answer of a probe."""

    workers: int
    link_mbit_s: float | None  # None = a push of the model takes no longer than an empty message
    choices: tuple[Choice, ...]
    profile: Path

    @property
    def best_choice(self) -> Choice:
        """Return the smallest H from which on all have the wanted utilisation, or else the largest.

        Steps are random, so that a small H may seem good by chance.
        """
        few = [k for k, own in enumerate(self.choices) if own.utilisation < WANTED]
        first = few[-1] + 1 if few else 0
        return self.choices[min(first, len(self.choices) - 1)]

    def warnings(self) -> list[str]:
        """Return a sentence for each measured value outside the tested ranges."""
        low, high = TESTED_MBIT_S
        found = []
        if self.link_mbit_s is not None and not low <= self.link_mbit_s <= high:
            found.append(
                f"predictions were compared with measurements at {low:g} to {high:g} Mbit/s, and"
                f" the slowest link has {self.link_mbit_s:.3g} Mbit/s"
            )
        if self.workers > TESTED_WORKERS:
            found.append(
                f"predictions were compared with measurements of up to {TESTED_WORKERS} workers,"
                f" and here are {self.workers}"
            )
        return found

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        found = {**asdict(self), "profile": str(self.profile), "warnings": self.warnings()}
        return {**asdict(self.best_choice), **found}

    def show(self, console: Console) -> None:
        """Print the answer, the table of all H, and the warnings."""
        best = self.best_choice
        reached = "" if best.utilisation >= WANTED else f"no H reaches {percent(WANTED, 0)}; "
        links = "links without a measurable limit"
        if self.link_mbit_s is not None:
            links = f"links of {self.link_mbit_s:.3g} Mbit/s"
        print_unwrapped(
            console,
            f"{reached}H = {best.local_steps}: the utilisation of {self.workers} workers is"
            f" {percent(best.utilisation)}, and each sends {megabytes(best.bytes_per_hour)} an hour"
            f" over {links}",
            style="bold",
        )
        titles = ("H", "utilisation", "sent per worker and hour")
        rows = [
            (str(own.local_steps), percent(own.utilisation), megabytes(own.bytes_per_hour))
            for own in self.choices
        ]
        console.print(plain_table(titles, rows, left=titles))
        print_unwrapped(console, *(f"warning: {warning}" for warning in self.warnings()))


def probe(hosts: Path, overrides: Sequence[str]) -> Probed:
    """Measure the hosts by a job of `ashl launch`, and predict each H.

    Args: hosts, a hosts file with one slot for each worker and one for a server; the first host is
    this machine, which receives the profile.
    Raises: UsageError if the hosts file cannot be read or is wrong; AshlError if the job failed;
    DataMissingError if the profile is on another machine.
    """
    read_machines(hosts)  # an error here is one sentence, and that of the job is two
    folder = (ADVICE / f"probe-{uuid4().hex[:8]}").resolve()
    job = [sys.executable, "-P", "-m", "ashl.cli", "launch", "--hosts", str(hosts), "--", "profile"]
    ran = subprocess.run([*job, *overrides, f"run.dir={folder}"], stdout=sys.stderr, check=False)
    if ran.returncode:
        raise AshlError(
            f"--probe {hosts}: the job on the hosts ended with code {ran.returncode}; its own"
            " message is above"
        )
    path = folder / "profile.json"
    if not path.exists():
        raise DataMissingError(
            f"--probe {hosts}: the profile is on the first host; run the command there"
        )
    return from_profile(path, overrides)


def from_profile(path: Path, overrides: Sequence[str]) -> Probed:
    """Predict each H on a profiled cluster."""
    profile = read_profile(str(path))
    n = len(profile.workers)
    sent = 2 * (n - 1) / n * profile.dense_bytes  # bytes of one worker in a ring all-reduce

    def round_s(local_steps: int) -> float:
        """Return the predicted seconds of a round."""
        cluster = ("cluster=profile", f"profile={path}", f"sync.local_steps={local_steps}")
        plan = compile_plan(compose([*overrides, *METHOD, *cluster]))
        rate = plan.stages[0].predicted_steps_per_s
        assert rate is not None
        return local_steps * n / rate

    rounds_s = {own: round_s(own) for own in LOCAL_STEPS if own <= SIMULATED}
    step_s = (rounds_s[SIMULATED] - rounds_s[SIMULATED // 2]) / (SIMULATED / 2)
    longer = {
        own: rounds_s[SIMULATED] + (own - SIMULATED) * step_s
        for own in LOCAL_STEPS
        if own > SIMULATED
    }
    choices = tuple(
        Choice(own, min(1.0, own * step_s / seconds), HOUR_S / seconds * sent)
        for own, seconds in {**rounds_s, **longer}.items()
    )
    return Probed(n, link_mbit_s(profile), choices, path)


def link_mbit_s(profile: Profile) -> float | None:
    """Return the rate of the slowest link: of a measured all-reduce, else of the pushes; None
    without any.
    """
    n = len(profile.workers)
    if profile.all_reduce is not None and profile.all_reduce.s_per_byte:
        return 2 * (n - 1) / n / profile.all_reduce.s_per_byte / 125_000
    rates = [worker.push_bytes_s for worker in profile.workers if worker.push_bytes_s]
    return min(rates) / 125_000 if rates else None
