"""The page: one small offline file of well-formed figures, in which nothing that was read is taken
for markup.
"""

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from ashl.errors import AshlError
from ashl.report import figures as drawn
from ashl.report.compare import write_report
from ashl.report.figures import Figure, mean_curve
from ashl.report.leaderboard import rank
from ashl.report.records import read_run, read_study
from tests.run_folders import lines, metric, write_run, write_sweep

LOSS_TITLE = "Loss against time"
SECTIONS = (
    "Leaderboard",
    "Time to target",
    "Against time",
    "Against bytes",
    "Where the workers",
    "The first rounds",
)


def study(folder: Path, cluster: tuple[str, ...] = ()) -> Path:
    runs = [
        (
            {"sync": sync, **({"cluster.exchange_s": at} if at else {}), "seed": str(seed)},
            reach * (1 + seed / 10),
        )
        for sync, reach in (("bsp", 2.0), ("ssp", 1.0), ("asp", 3.0))
        for at in cluster or ("",)
        for seed in (0, 1)
    ]
    return write_sweep(folder / "sweep", runs)


def page_of(*folders: Path, **options) -> str:
    return write_report(rank(read_study(folders)), **options).read_text()


def figures_of(*folders: Path) -> dict[str, Figure]:
    return {figure.title: figure for figure in drawn.draw_figures(rank(read_study(folders)))}


def figures(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_of_a_sweep(tmp_path) -> None:
    folder = study(tmp_path)
    (folder / "00000001/report.html").write_text("")
    report = write_report(rank(read_study([folder])), command="ashl compare sweep")
    assert report == tmp_path / "sweep" / "report.html"
    page = report.read_text()
    assert [
        section for section in SECTIONS if f"<h2>{section}" not in page.replace("&#39;", "'")
    ] == []
    assert len(figures(page)) == 5
    assert len(page) < 1_000_000
    assert not re.search(
        r"<script|https?://(?!www\.w3\.org/(2000/svg|1999/xlink))|<link|<img|@import", page
    )  # offline, and without scripts
    assert "ashl compare sweep" in page
    assert "ashl sweep sync=bsp,ssp,asp seed=0,1" in page
    assert '<a href="00000000/">0</a> <a href="00000001/report.html">1</a>' in page
    assert "prefers-color-scheme:dark" in page
    assert page.count("<svg") == page.count('<div class="wide"><svg')
    assert page.count("<table") == page.count('<div class="wide"><table')
    assert page.count("fill: url(#") < 40, "printed, each hatched shape takes a hundred kilobytes"


def test_the_page_of_a_study_over_clusters_has_the_map(tmp_path) -> None:
    page = page_of(study(tmp_path, ("0.1", "0.2", "0.4")))
    assert "<h2>Who wins where</h2>" in page
    assert len(figures(page)) == 6


def test_what_was_read_is_text_and_not_markup(tmp_path) -> None:
    evil = "<script>alert('1')</script>&\"'"
    folders = [
        write_run(tmp_path / f"{seed}", seed=seed, choices={"sync": evil if seed else "bsp"})
        for seed in (0, 1)
    ]
    bad = write_run(tmp_path / "<b>bad", status="failed", exit_reason=evil, time_to_target_s=None)
    page = page_of(*folders, bad, out=tmp_path / "r.html", command=evil)
    assert "<script" not in page
    assert "<b>bad" not in page
    assert "&lt;script&gt;" in page
    assert figures(page)


def test_a_large_study_stays_small(tmp_path) -> None:
    runs = [({"sync": f"mode{i}", "seed": "0"}, 1 + 0.1 * i) for i in range(210)]
    page = page_of(write_sweep(tmp_path / "s", runs, {"every_s": 1.0, "rounds": 1}))
    assert len(page) < 300_000
    assert "The best 7 of 210 settings and the baseline." in page
    assert f"10 more settings are in the export: `ashl export {tmp_path}/s`" in page


def test_long_runs_of_many_workers_stay_small(tmp_path) -> None:
    runs = [({"sync": f"mode{i}", "seed": "0"}, 1 + 0.1 * i) for i in range(6)]
    page = page_of(
        write_sweep(tmp_path / "s", runs, {"every_s": 0.005, "rounds": 60, "workers": 40})
    )
    assert len(page) < 500_000
    assert "workers 0 to 15 of 40" in page


@pytest.mark.parametrize("lacking", ["events.jsonl", "metrics.jsonl"])
def test_a_figure_without_its_records_is_left_out(tmp_path, lacking: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / lacking).unlink()
    page = page_of(folder, out=tmp_path / "r.html")
    assert ("The first rounds" in page, "Against time" in page) == (
        lacking[0] == "m",
        lacking[0] == "e",
    )
    assert figures(page)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(
        AshlError,
        match=r"cannot be written \(no such file or directory\); name another place with --out",
    ):
        page_of(folder, out=tmp_path / "nowhere" / "r.html")
    with pytest.raises(
        AshlError, match=r"^/ cannot be written \(.*\); name another place with --out"
    ):
        page_of(folder, out=Path("/"))


def test_notes_say_of_one_run_what_holds_for_one_run(tmp_path) -> None:
    run = next(path for path in sorted(study(tmp_path).iterdir()) if path.is_dir())
    notes = {title: figure.note for title, figure in figures_of(run).items()}
    assert "Where the workers' time goes" in notes
    for words in ("seeds", "a stage begins", "of each"):
        assert not any(words in note for note in notes.values())


def test_each_figure_is_a_file_of_three_kinds_with_equal_bytes_each_time(tmp_path) -> None:
    folder = study(tmp_path) / "figures"
    board = rank(read_study([folder.parent]))
    write_report(board, kinds=("svg", "pdf", "png"))
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    stems = {file.stem for file in folder.iterdir()}
    assert len(files) == 3 * len(stems) == 3 * len(drawn.draw_figures(board))
    for file, content in files.items():
        start = {"svg": b"<?xml", "pdf": b"%PDF-", "png": b"\x89PNG"}[file.rpartition(".")[2]]
        assert content.startswith(start), file
    assert b"/PatternType 1" in files["where-the-workers-time-goes.pdf"], "hatched"
    assert b"/Font" in files["against-time.pdf"], "text stays text"
    page, full = (
        float(re.search(pattern, files[f"time-to-target.{kind}"])[1])
        for kind, pattern in (
            ("pdf", rb"/MediaBox \[ 0 0 ([\d.]+)"),
            ("svg", rb'viewBox="0 0 ([\d.]+)'),
        )
    )
    assert page < full, "no empty margin beside a figure in a paper"
    assert b">accuracy on the test set, %</text>" in files["against-time.svg"]
    again = {figure.title: figure for figure in drawn.draw_figures(board)}["Against time"]
    for kind in ("svg", "pdf", "png"):
        assert again.to_bytes(kind) == files[f"against-time.{kind}"]


def test_names_with_signs_of_formulas_and_other_letters_are_drawn(tmp_path) -> None:
    for index, name in enumerate(("$x$", "$_$_", "模型")):
        write_run(tmp_path / str(index), choices={"sync": name})
    assert "$x$" in page_of(*(tmp_path / str(index) for index in range(3)), out=tmp_path / "r.html")


def test_the_mean_over_seeds_by_hand(tmp_path) -> None:
    runs = [write_run(tmp_path / f"{seed}", seed=seed) for seed in (0, 1)]
    lines(runs[0] / "metrics.jsonl", [metric(1.0, 0.2, 1), metric(3.0, 0.6, 1)])
    lines(runs[1] / "metrics.jsonl", [metric(2.0, 0.6, 1), metric(4.0, 0.8, 1)])
    found = mean_curve([read_run(folder) for folder in runs], "time_s", "test/acc")
    assert found is not None
    assert tuple(found.index) == (2.0, 3.0, 4.0)  # from where both have a value
    assert tuple(found["mean"]) == pytest.approx((0.5, 0.65, 0.7))  # the first keeps its 0.6
    assert tuple(found["min"]) == pytest.approx((0.4, 0.6, 0.6))
    assert tuple(found["max"]) == pytest.approx((0.6, 0.7, 0.8))


def test_names_of_lines_that_end_at_one_place_are_beside_each_other_inside_the_axes() -> None:
    drawing = drawn.new_drawing(200)
    axes = drawn.add_axes(drawing, 50, 10, 500, 120)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    drawn.name_ends(axes, [(str(height), 0.9, height) for height in (1, 1, 1, -3)])
    places = [axes.transData.transform(text.xy) for text in axes.texts]
    assert all(axes.bbox.contains(*place) for place in places)
    heights = sorted(height for _, height in places)
    assert min(after - before for before, after in pairwise(heights)) > 13, "of a text of 9 points"


def test_the_last_of_two_evaluations_at_one_time_is_drawn(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    lines(run / "metrics.jsonl", [metric(1.0, 0.2, 1), metric(2.0, 0.5, 1), metric(2.0, 0.6, 1)])
    found = mean_curve([read_run(run)], "time_s", "test/acc")
    assert found is not None
    assert found["mean"].iloc[-1] == pytest.approx(0.6)


def test_the_report_of_one_run_tells_its_whole_story(tmp_path) -> None:
    """Its curve ended where the best was reached, at half the run; no loss, no stage, no command
    was there.

    The curves over time mark where each stage begins.
    """
    stages = [
        {"name": "ahl", "start_s": 0.0, "end_s": 1.5},
        {"name": "shl", "start_s": 1.5, "end_s": 4.0},
    ]
    run = write_run(tmp_path / "run", reach_s=None, target=None, end_s=4.0, stages=stages)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[10:]:
        row["test/acc"] = rows[10]["test/acc"]  # the best, long before the end
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "command.txt").write_text("ashl train 'run.dir=a run'\n")
    page = page_of(run, out=tmp_path / "report.html")
    time, loss = (
        page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
        for title in ("Against time", LOSS_TITLE)
    )
    for figure in (time, loss):
        assert ">4.0<" in figure, "the axis goes to the end of the run"
        assert ">ahl from 0 s<" in figure
        assert ">shl from 1.5 s<" in figure
    assert "training loss" in loss
    assert "<code>ashl train &#39;run.dir=a run&#39;</code>" in page
    both = [run, write_run(tmp_path / "other", reach_s=None, target=None, choices={"sync": "ssp"})]
    page_of_both = page_of(*both, out=tmp_path / "both.html")
    assert LOSS_TITLE not in page_of_both
    assert ">ahl from 0 s<" not in page_of_both
    assert len(set(re.findall(r'clipPath id="([^"]*)"', page))) == page.count("<clipPath")
