"""Output on a terminal, read back as text."""

import io
import math
import re
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from ashl.run.metrics import CompressionStats
from ashl.run.monitor import Monitor, MonitorState, make_frame
from ashl.runtime.records import Counts, Heartbeat, StageEnd
from ashl.runtime.time_accounting import KINDS
from ashl.tracking import console as screen
from ashl.tracking.console import Frame, Progress, WorkerFrame, describe_duration, print_outcome
from ashl.tracking.sweep_progress import describe_end
from tests.support import planned

SHOWN = {"MLflow": "ashl ui runs/demo"}


def frame(host_s: float, num_workers: int = 2, metric: tuple[str, float] | None = None) -> Frame:
    return Frame(
        time_s=75.0,
        host_s=host_s,
        stage="ssp",
        steps=12345,
        commits=12345,
        loss=0.1234,
        accuracy=None if metric else 0.931,
        metric=metric,
        samples_per_s=7890.1,
        wait_share=0.125,
        progress=0.5,
        eta_host_s=8.0,
        workers=[WorkerFrame(rank, 1234, 456.7, 0.25, 1.5, None) for rank in range(num_workers)],
    )


def summary(**changes: object) -> dict:
    worker = {
        "steps": 500,
        "compute_s": 6.0,
        "compress_s": 0.0,
        "push_s": 1.0,
        "pull_s": 1.0,
        "wait_s": 2.0,
    }
    worker |= {
        "down_s": 0.0,
        "bytes_up": 5e6,
        "bytes_down": 5e6,
        "staleness_mean": 1.25,
        "staleness_max": 3,
    }
    return {
        "name": "demo",
        "status": "finished",
        "exit_reason": "target reached",
        "time_s": 10.0,
        "host_s": 1.5,
        "time_kind": "virtual",
        "steps": 1000,
        "steps_per_s": 100.0,
        "samples_per_s": 3200.0,
        "wait_share": 0.2,
        "max_lead": 3,
        "bytes_up": 1e7,
        "bytes_down": 1e7,
        "metric": "accuracy",
        "final": {
            "train_loss": 0.02,
            "test_loss": 0.07,
            "test_accuracy": 0.981,
            "test_metric": 0.981,
        },
        "best": {"test_accuracy": 0.985, "time_s": 9.0},
        "target_accuracy": 0.97,
        "time_to_target_s": 8.0,
        "workers": [worker, worker],
    } | changes


def pipe(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_gets_a_plain_line_every_two_seconds():
    console = pipe(width=20)
    with closing(Progress(console, name="demo", target_accuracy=0.97)) as progress:
        for tenths in range(50):
            progress.update(frame(tenths / 10))
    lines = text(console).splitlines()
    assert len(lines) == 3
    assert set(lines) == {
        "time 1 min 15 s  steps 12,345  ETA 8 s  accuracy 93.1 % of 97.0 %  loss 0.123  samples/s"
        " 7,890  waiting 12.5 %"
    }


def test_a_terminal_gets_a_table_that_disappears_at_the_end():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with closing(Progress(console, name="[demo]", target_accuracy=None)) as progress:
        progress.update(frame(0.0, num_workers=20))
        progress.update(frame(0.1)._replace(stage="too fresh"))
        shown = text(console)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "[demo]  ssp   time 1 min 15 s" in plain
    assert "too fresh" not in plain
    assert "and 4 more workers" in plain
    rows = [line.split() for line in plain.splitlines() if " 1,234 " in line]
    assert len(rows) == screen.MAX_ROWS
    assert rows[0] == ["0", "1,234", "457", "25.0", "%", "1.5", "-"]
    assert text(console)[len(shown) :].count("\x1b[2K") > screen.MAX_ROWS  # every line is erased


def test_quiet_says_nothing():
    console = Console(file=io.StringIO(), force_terminal=True)
    with closing(Progress(console, name="demo", quiet=True)) as progress:
        progress.update(frame(0.0))
    assert text(console) == ""


def test_a_frame_may_know_little():
    console = pipe()
    unknown = Frame(0.0, 0.0, "", 0, 1, math.nan, None, None, None, None, None, None, [])
    with closing(Progress(console, name="demo")) as progress:
        progress.update(unknown)
    assert text(console) == "time 0 s  steps 0  loss -  samples/s -  waiting -\n"


def test_a_task_without_accuracy_is_told_by_its_own_metric():
    console = pipe()
    with closing(Progress(console, name="demo")) as progress:
        progress.update(frame(0.0, metric=("perplexity", 21.37)))
    assert "perplexity 21.4  loss 0.123" in text(console)
    shown = describe_end(
        summary(
            final={"test_metric": 0.141, "train_loss": 0.2}, metric="mae", time_to_target_s=None
        )
    )
    assert shown == "finished after 10 s, mae 0.141"


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with closing(Progress(console, name="demo")) as progress:
        progress.update(frame(0.0))
    print_outcome(console, summary(), Path("runs/demo"), SHOWN)
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|38|9[0-7])\b[0-9;]*m", text(console))


def test_the_outcome_fits_80_columns_but_for_what_is_copied():
    console = pipe()
    print_outcome(console, summary(), Path("runs/demo"), SHOWN)
    lines = [line.rstrip() for line in text(console).splitlines()]
    assert lines[0] == "demo finished: target reached"
    assert "accuracy  98.1 %, best 98.5 % after 9 s" in lines
    assert "target    97.0 % reached after 8 s" in lines
    assert f"run folder  {Path('runs/demo')}" in lines
    assert lines[-1] == "MLflow      ashl ui runs/demo"
    row, _ = (line.split() for line in lines if " 500 " in line)
    assert " ".join(row) == "0 500 60 % 10 % 10 % 20 % 1.25 3 5 MB"
    assert all(len(line) <= 80 for line in lines[:-2])


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_table_of_workers_cuts_no_word_and_no_number(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    shares = {f"{part}_s": 1.0 for part in KINDS}
    worker = summary()["workers"][0] | shares | {"steps": 12345, "bytes_up": 2.11e6}
    profile = {
        "name": "profile",
        "start_s": 0.0,
        "end_s": 5.0,
        "steps": 0,
        "wait_share": 0.5,
        "wait_s": [0.5, 0.5],
    }
    stage = profile | {"profiling": True, "exit_reason": "plan", "until": {}}
    print_outcome(console, summary(workers=[worker, worker], stages=[stage]), Path("runs/demo"), {})
    said = text(console)
    assert "…" not in said
    assert said.count("12,345") == said.count("2.11 MB") == 2
    absent = re.findall(r"no room for (.*);", said)
    assert bool(absent) == (width < 100)
    shown = next(line for line in said.splitlines() if "worker" in line and "steps" in line).split()
    titles = {"worker", "steps", *KINDS, "profiling", "staleness", "max", "up"}
    assert {*shown, *"".join(absent).split(", ")} - {""} == titles


@pytest.mark.parametrize("status", ["failed", "diverged", "interrupted"])
def test_a_run_that_ended_early_has_an_outcome_too(status):
    console = pipe()
    print_outcome(
        console, {"name": "demo", "status": status, "exit_reason": None}, Path("runs/demo"), {}
    )
    assert text(console).startswith(f"demo {status}\n")
    assert "MLflow" not in text(console)


def test_numbers_as_people_write_them():
    assert [screen.number(value) for value in (None, 3, 12345.6, 0.012345)] == [
        "-",
        "3",
        "12,346",
        "0.0123",
    ]
    assert [screen.seconds(value) for value in (None, 0.25, 125.0, 11_220.0)] == [
        "-",
        "0.25 s",
        "2 min 05 s",
        "3 h 07 min",
    ]
    assert [screen.megabytes(value) for value in (None, 27_400_000, 1_234_000_000)] == [
        "-",
        "27.4 MB",
        "1,234 MB",
    ]
    assert [screen.percent(value) for value in (None, 0.5)] == ["-", "50.0 %"]


@pytest.mark.parametrize(("virtual", "eta_s"), [(False, 6.0), (True, 30.0)])
def test_how_long_processes_took_to_start_does_not_count(virtual: bool, eta_s: float) -> None:
    """A quarter of 8 s is done, 10 s after the command was typed."""
    beat = Heartbeat(0, 2 * 10**9, 5, None, None, dict.fromkeys(KINDS, 0), 0, 0, {})
    shown = frame_of(None, [beat], virtual)
    assert shown.eta_host_s == eta_s


@pytest.mark.parametrize(("has_server", "commits"), [(True, 8), (False, 2)])
def test_a_frame_counts_commits_as_the_summary_does(has_server: bool, commits: int) -> None:
    zeros = [0] * 4
    counts = Counts(8, 256, 2, [2] * 4, [2] * 4, *([zeros] * 3), 0, None, None, 1.0, None)
    assert frame_of(counts, [], has_server=has_server).commits == commits


def test_a_resumed_run_shows_no_counts_before_its_lead_rank_has_resumed() -> None:
    """The counts of a stage that ended before the checkpoint would be shown at the time 0."""
    monitor = Monitor.__new__(Monitor)
    zeros = [0]
    counts = Counts(8, 256, 8, [8], [8], *([zeros] * 3), 0, None, None, 1.0, None)
    monitor.run_state = MonitorState(CompressionStats(4), None)
    monitor.run_state.stages = [StageEnd(0, 0, "first", "epochs", 10**9, counts)]
    monitor.heartbeats, monitor.final = {}, None
    assert (monitor.counts(), monitor.running_counts()) == (counts, None)
    later = counts._replace(steps=9)
    totals = dict.fromkeys(KINDS, 0)
    monitor.heartbeats[0] = Heartbeat(0, 2 * 10**9, 9, 0, 1.0, totals, 0, 0, {}, later)
    assert monitor.counts() == monitor.running_counts() == later


def frame_of(
    counts: Counts | None, beats: list[Heartbeat], virtual: bool = True, has_server: bool = True
) -> Frame:
    """Return a frame of a run of 8 s whose command was typed 10 s ago."""
    return make_frame(
        planned("sync=bsp", "stop.seconds=8"),
        0,
        counts,
        beats,
        (),
        1437,
        None,
        None,
        10.0,
        virtual,
        has_server,
    )


def test_the_time_of_a_run_says_what_it_counts() -> None:
    times = {"time_s": 1.4, "host_s": 10.4}
    real = describe_duration({**times, "time_kind": "wall"})
    assert real == "1.4 s of training, 10.4 s in all with start and evaluations"
    virtual = describe_duration({**times, "time_kind": "virtual"})
    assert virtual == "1.4 s of virtual time, computed in 10.4 s"


def test_a_line_beside_the_table_breaks_between_words() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    text = "worker 3 computes 5 times slower than the median; the others waited 65.6 % of the time"
    with closing(Progress(console, name="demo")) as progress:
        progress.print_line(text)
    assert isinstance(console.file, io.StringIO)
    assert "65.6 % of \nthe time\n" in console.file.getvalue()
