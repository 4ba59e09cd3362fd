"""A calibration in words and tables, on the terminal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ashl.calibration.combinations import LeftOut, Pair
from ashl.calibration.compared import Compared, Verdict
from ashl.plan.calibration import FEW
from ashl.plan.profile import Profile
from ashl.tracking.console import give_or_take, milliseconds, number, percent, seconds

ALIKE = 0.1  # off by as much in the same direction, all of a model are worth a word
BUSY = 0.5  # processes that want a core already, per core
TITLES = ("combination", "steps/s predicted", "measured", "ratio", "wait", "measured", "kB/step", "measured")
TITLES += ("round ms", "measured", "most of it is")
SPREADS = {
    "steps_per_s": "steps/s",
    "round_s": "time of a round",
    "step_bytes": "bytes",
    "wait_share": "wait share, difference",
}


def show_pairs(
    console: Console, tasks: Mapping[str, Any], found: Mapping[str, tuple[str, ...]], seconds_each: float, folder: Path
) -> None:
    """What would run."""
    table = Table("combination", "", box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, own in found.items():
        table.add_row(name, " ".join(own))
    console.print(table)
    count = len(tasks) * len(found)
    console.print(
        f"{count} combinations: these with {' and '.join(tasks)}, each about {seconds(seconds_each)} on real processes "
        f"and the same in virtual time; folder {folder}",
        soft_wrap=True,
    )


def announce(
    console: Console,
    pairs: Sequence[Pair],
    left_out: Sequence[LeftOut],
    folder: Path,
    budget_s: float,
    load: Mapping[str, float],
) -> None:
    rest = f", {len(left_out)} left out" if left_out else ""
    console.print(f"{len(pairs)} combinations{rest}, within {seconds(budget_s)}; folder {folder}", soft_wrap=True)
    if load["load_1min"] > BUSY * load["cores"]:
        console.print(
            f"note: the machine is busy (load {load['load_1min']:.2g} on {load['cores']:.0f} cores), and what is "
            "measured now is of that, too",
            soft_wrap=True,
        )


def show(
    console: Console,
    result: Verdict,
    left_out: Sequence[LeftOut],
    stored: Mapping[str, Profile],
    page: Path,
    count: int,
) -> None:
    """The rows, the quantiles, and what follows."""
    table = Table(*TITLES, box=None, padding=(0, 1, 0, 0))
    for row in result.rows:
        table.add_row(*cells(row))
    console.print(table)
    for own in left_out:
        console.print(f"left out: {own.name}: {own.reason}", soft_wrap=True, markup=False)
    table = Table("measured / predicted", "least", "5 %", "25 %", "median", "75 %", "95 %", "most", box=None)
    for of, title in SPREADS.items():
        table.add_row(title, *(f"{value:.3g}" for value in result.spread(of).values()))
    console.print(table)
    for sentence in sentences(result, count):
        console.print(sentence, soft_wrap=True, markup=False)
    for name, profile in stored.items():
        console.print(f"predictions for {name} are{give_or_take(profile.error)} from now on", soft_wrap=True)
    console.print(f"page  {page}; all else in {page.with_name('calibration.json')}", soft_wrap=True, markup=False)


def cells(row: Compared) -> list[str]:
    predicted, measured = row.predicted, row.measured
    return [
        f"{row.model}: {row.name}",
        number(predicted.steps_per_s),
        number(measured.steps_per_s),
        f"{measured.steps_per_s / predicted.steps_per_s:.3f}",
        percent(predicted.wait_share),
        percent(measured.wait_share),
        number(predicted.step_bytes / 1e3),
        number(measured.step_bytes / 1e3),
        milliseconds(predicted.round_s),
        milliseconds(measured.round_s),
        row.component,
    ]


def sentences(result: Verdict, count: int) -> list[str]:
    """What it comes to."""
    worst = result.worst
    found = [
        f"Predicted times are off by {percent(result.median_error)} in the median, {percent(abs(worst.ratio - 1))} at "
        f"worst ({worst.model}: {worst.name}: {worst.component}); wait shares by at most {result.wait_error:.3f}.",
        f"Most of what is off is: {result.weakest}.",
    ]
    for model, own in result.models.items():
        if own.count <= FEW:
            continue
        rest = result.apart(model)
        found.append(
            f"All of {model} took {own.common:.2f} times as long as predicted, in the median, which predictions from "
            f"its profile are multiplied by from now on; apart from that they are off by {percent(rest)} in the median."
        )
        if abs(math.log(own.common)) > max(ALIKE, 2 * rest):
            found.append(
                f"The machine has another speed with {model} than when it was profiled, or the profile is off in what "
                "all have in common: profile again where it matters."
            )
    if held := result.held_back.off:
        found.append(
            f"Of {len(held)} combinations that were held back in turn, {result.held_back.inside} lie inside the "
            f"interval that the other half gives; with what that has in common they are off by {percent(median(held))} "
            f"in the median, {percent(max(held))} at worst."
        )
    if len(result.rows) < count:
        found.append(f"{count - len(result.rows)} of {count} are missing: the same command runs them.")
    return found
