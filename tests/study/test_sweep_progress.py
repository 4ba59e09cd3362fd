"""The live view of a sweep at several widths, and the host time that a dry run predicts."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ashl.cli.app import main
from ashl.run.host_time import RunLength, predict_length
from ashl.tracking.counting import Counting
from ashl.tracking.sweep_progress import Running, SweepProgress, progress_of
from tests.support import planned

LABELS = [
    "sync=bsp",
    (
        "sync=local_sgd sync.local_steps=16 topology=all_reduce compression=topk"
        " compression.ratio=0.01"
    ),
]


def drawn(width: int, running: list[Running]) -> list[str]:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    progress = SweepProgress(console, 12, quiet=True)
    progress.done = 3
    progress.show(running)
    console.print(progress.bars.get_renderable())
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_line_for_the_sweep_and_one_for_each_run(width: int) -> None:
    head, *rows = drawn(width, [Running(LABELS[0], 0.5, "91.2 %"), Running(LABELS[1], None, "")])
    assert re.match(r"3 of 12 runs, 2 running +━+ +\d:\d\d:\d\d", head)
    assert len(rows) == 2
    assert all(len(row) <= width for row in (head, *rows))
    assert re.match(r"sync=bsp .*━+.* 91.2 % +\d:\d\d:\d\d", rows[0])
    assert rows[1].startswith("sync=local_sgd")
    assert "…" in rows[1] or width == 140


def test_something_is_shown_before_any_run_has_begun() -> None:
    (head,) = drawn(80, [])[:1]
    assert head.startswith("3 of 12 runs, 0 running")
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    progress = SweepProgress(console, 12, quiet=False)
    progress.close()
    assert "0 of 12 runs, starting" in console.file.getvalue()


def test_how_far_a_run_is_follows_its_nearest_limit() -> None:
    limits = {"seconds": None, "steps": 10}
    assert progress_of("a", {}, limits, 8.0) == Running("a", 0.0, "")
    first = {"time_s": 2.0, "step": 1, "test/acc": 0.5}
    assert progress_of("a", first, limits, 8.0) == Running("a", 0.25, "50.0 %")
    second = {"time_s": 3.0, "step": 6, "test/acc": None, "train/loss": 0.25}
    assert progress_of("a", second, limits, 8.0) == Running("a", 0.6, "loss 0.25")


def test_a_dry_run_says_host_time(workplace: Path, capsys: pytest.CaptureFixture) -> None:
    base = ["runtime=sim", "model.hidden=[8]", "stop.epochs=2", "tracking=none", "--dry-run"]
    assert main(["train", *base]) == 0
    single = r"^on this machine about \S+ s, less if a target ends the run$"
    assert re.search(single, capsys.readouterr().out, re.M)
    assert main(["sweep", *base, "sync=bsp,asp", "seed=0,1", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    about = r"^on this machine about (\S+) s for 4 runs, 2 at a time, less if a target ends a run$"
    total = re.search(about, out, re.M)
    assert total
    assert 2 * 0.7 <= float(total[1]) < 20  # the starts alone take this long
    assert (
        main(["train", "cluster=real", "cluster.num_workers=1", "stop.epochs=1", "--dry-run"]) == 0
    )
    assert "on this machine" not in capsys.readouterr().out  # a real run is on one clock
    assert main(["train", *base, "runtime.gradients=false", "sync=asp", "schedule=single"]) == 0
    assert "on this machine" not in capsys.readouterr().out  # nothing is computed


def test_the_fastest_stage_bounds_the_steps_and_the_slowest_one_the_time() -> None:
    plan = planned("sync=asp", "stop.seconds=8", "stop.steps=100")
    fast, slow = (replace(plan.stages[0], predicted_steps_per_s=rate) for rate in (10.0, 5.0))
    plan = replace(plan, stages=(fast, slow))
    assert predict_length(plan, 1437) == RunLength(80.0, 8.0)
    sooner = replace(plan, limits=replace(plan.limits, steps=20))
    assert predict_length(sooner, 1437) == RunLength(20, 4.0)
    unknown = replace(plan, stages=(replace(slow, predicted_steps_per_s=None),))
    assert predict_length(unknown, 1437) == RunLength(100, None)
    endless = replace(unknown, limits=replace(plan.limits, steps=None))
    assert predict_length(endless, 1437) is None


def test_progress_in_a_pipe_is_a_line_every_two_seconds(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 1.0, 2.5, 2.5, 3.0, 4.6, 4.6])
    monkeypatch.setattr("ashl.tracking.counting.time.monotonic", lambda: next(moments))
    with Counting("planning candidates") as counting:
        for done in range(4):
            counting.update(done, 36, "BSP")
    assert capsys.readouterr().err.splitlines() == [
        "ashl: planning candidates: 1 of 36 (BSP)",
        "ashl: planning candidates: 3 of 36 (BSP)",
    ]


def test_lines_and_table_name_the_phase() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    progress = SweepProgress(console, 3, quiet=False, phase="tuning")
    progress.count_ended("BSP", {"status": "finished", "time_s": 2.0})
    console.print(progress.bars.get_renderable())
    first, second, *_ = console.file.getvalue().splitlines()
    assert first.startswith("[tuning: 1/3] BSP  finished after 2 s")
    assert second.startswith("tuning: 1 of 3 runs, ")
