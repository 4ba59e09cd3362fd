"""Overlap between two network namespaces whose link is really slow: its bits, and whether a step
takes what its plan says; how much it gains is for `tests.benchmarks.links` to say.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.engines import free_port
from tests.namespaces import job, machines, missing

RUN = (
    "topology=all_reduce sync=bsp runtime=torchrun cluster=real tracking=none model=resnet8"
    " dataset=synthetic dataset.num_train=640 dataset.num_test=10 stop.steps=24"
    " eval.every_commits=1000 run.dir=run --quiet"
)
# By which a step may take more or less than predicted, on cores that others use as well.
FACTOR = 1.5


def folder_of(names: list[str], place: Path, command: str, *overrides: str) -> Path:
    """Run it, a rank on each of these machines; returns the folder of the run, where the rank that
    records keeps it.
    """
    job(
        names,
        free_port(),
        [sys.executable, "-m", "ashl.cli", command, *RUN.split(), *overrides],
        place,
    )
    return next(place.glob("*/run"))


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sums_are_hidden_behind_backward_and_change_no_bit(tmp_path: Path) -> None:
    """A run over shaped links, as root; otherwise it is skipped with the reason."""
    if why := missing():
        pytest.skip(why)
    found = {}
    with machines(50, 50) as names:
        for overlap in ("none", "wfbp", "merged", "priority", "dear"):
            plan = {
                "merged": ["overlap.plan=[2,3,2]"],
                "priority": ["overlap.plan=layers"],
                "dear": ["overlap.plan=layers"],
            }
            found[overlap] = summary_of(
                folder_of(
                    names, tmp_path / overlap, "train", f"overlap={overlap}", *plan.get(overlap, [])
                )
            )
    assert len({summary["params_sha256"] for summary in found.values()}) == 1
    assert {summary["steps"] for summary in found.values()} == {24}
    assert all(
        summary["comm_hidden_share"] > 0.05
        for overlap, summary in found.items()
        if overlap != "none"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_take_what_their_plan_says(tmp_path: Path) -> None:
    """Planned and predicted from what `ashl profile` has measured between the same two. Not with a
    message for each layer group, as small ones take longer than the line through large ones says.
    """
    if why := missing():
        pytest.skip(why)
    with machines(50, 50) as names:
        server = [*names, names[0]]  # which only a profile needs
        profile = (
            folder_of(server, tmp_path / "profile", "profile", "topology=parameter_server")
            / "profile.json"
        )
        for overlap in ("none", "merged"):
            run = folder_of(
                names,
                tmp_path / overlap,
                "train",
                f"overlap={overlap}",
                f"profile={profile}",
                "stop.steps=80",
            )
            said = (
                32
                * json.loads((run / "plan.json").read_text())["stages"][0]["predicted_steps_per_s"]
            )
            assert 1 / FACTOR < said / summary_of(run)["samples_per_s"] < FACTOR, overlap
