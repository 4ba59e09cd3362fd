"""`ashl compare` and `ashl export`: what is printed, what is written, and one sentence for each
mistake.
"""

import json
import os
from pathlib import Path

import pandas
import pytest
import yaml

from ashl import load
from ashl.cli.app import main
from ashl.config.catalog import defaults
from ashl.report.records import read_study
from tests.run_folders import write_run, write_sweep


@pytest.fixture
def sweep(workplace) -> Path:
    runs = [
        ({"sync": sync, "seed": str(seed)}, reach)
        for sync, reach in (("bsp", 2.0), ("ssp", 1.0))
        for seed in (0, 1)
    ]
    return write_sweep(workplace / "study", runs)


def test_compare_prints_the_answer_and_writes_the_report(sweep, capsys) -> None:
    assert main(["compare", "study"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert out.startswith("ssp is first: time to 90.0 % accuracy 1 s")
    assert "report  study/report.html" in out
    assert (sweep / "report.html").is_file()


def test_another_target_is_written_beside_what_the_sweep_shows(sweep, capsys) -> None:
    assert main(["compare", str(sweep)]) == 0
    before = (sweep / "report.html").read_bytes()
    assert main(["compare", str(sweep), "--target", "0.5", "--figures", "svg"]) == 0
    assert f"report  {sweep}/report-target-0.5.html" in capsys.readouterr().out
    assert "time to 50.0 % accuracy" in (sweep / "report-target-0.5.html").read_text()
    assert (sweep / "figures-target-0.5/against-time.svg").is_file()
    assert (sweep / "report.html").read_bytes() == before


def test_compare_of_loose_runs_writes_here_or_where_it_is_told(workplace, capsys) -> None:
    for name in ("a", "b"):
        write_run(workplace / name, choices={"sync": name})
    assert main(["compare", "a", "b"]) == 0
    assert (workplace / "report.html").is_file()
    options = ["--out", "other.html", "--baseline", "b", "--top", "1"]
    assert main(["compare", "a", "b", *options]) == 0
    assert (workplace / "other.html").is_file()
    assert "and 1 more setting; --top" in capsys.readouterr().out
    assert not (workplace / "figures").exists()
    assert main(["compare", "a", "--figures", "png"]) == 0
    assert (workplace / "figures/against-time.png").is_file()
    assert not list(workplace.glob("figures/*.svg"))


def test_the_leaderboard_is_a_table_of_the_kind_that_the_file_names(workplace, capsys) -> None:
    """Numbers have their unit in the title; names with signs of LaTeX are escaped."""
    for name, reach_s in (("a_b", 1.0), ("50 %", 2.0), ("x|y", None)):
        write_run(workplace / name, choices={"sync": name}, reach_s=reach_s)
    title = "time to 90.0 % accuracy, s"
    for suffix in ("csv", "md", "tex"):
        assert main(["compare", "a_b", "50 %", "x|y", "--out", f"table.{suffix}"]) == 0
        assert f"report  table.{suffix}" in capsys.readouterr().out
    found = pandas.read_csv("table.csv")
    assert [*found["setting"]] == ["a_b", "50 %", "x|y"]
    assert [*found["ratio to the best"][:2]] == [
        1.0,
        pytest.approx(found[title][1] / found[title][0]),
    ]
    assert found[title].isna()[2]
    assert found["low"][2] > 0
    text = (workplace / "table.tex").read_text()
    assert r"a\_b & 1 & 1 & " in text
    assert r"50 \% & 1 & 1 & " in text
    assert r"time to 90.0 \% accuracy, s & " in text
    assert r"| x\|y | 1 | 0 | - | " in (workplace / "table.md").read_text()
    assert not (workplace / "report.html").exists()


def test_a_broken_run_is_named_on_one_line_and_the_others_continue(sweep, capsys) -> None:
    (sweep / "00000000" / "summary.json").write_text("{")
    assert main(["compare", "study"]) == 0
    err = capsys.readouterr().err
    assert err == "ashl: left out study/00000000 (summary.json is broken).\n"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ("compare", 2, "Missing argument"),
        ("compare nowhere", 2, "nowhere is no folder"),
        ("compare empty", 2, "There is no finished run to read"),
        ("compare study --target 90", 2, "as in --target 0.9"),
        ("compare study --baseline asp", 2, "name one of: bsp; ssp"),
        (
            "compare study --figures pdf,eps",
            2,
            "--figures eps: unknown kind; take svg or pdf or png",
        ),
        ("compare study low", 2, "judge them all by one, as in --target 0.9"),
        ("compare study --out no/r.html", 2, "no/r.html cannot be written"),
        ("export study --out m.tex", 2, "for the leaderboard type ashl compare with --out m.tex"),
        ("compare study --out study", 2, "study cannot be written (is a directory)"),
        ("compare study --out /dev/full", 1, "/dev/full cannot be written (no space left"),
        ("export study --out /dev/full", 1, "/dev/full cannot be written (no space left"),
        ("watch --folder empty/file -- true", 2, "cannot make the folder empty/file (file exists)"),
        ("export nowhere", 2, "nowhere is no folder"),
        ("export empty", 2, "There is no finished run to read"),
        (
            "export study --format xls",
            2,
            "--format xls: unknown value; take csv or parquet or json",
        ),
        (
            "export study --what all",
            2,
            "--what all: unknown value; take summary or metrics or events",
        ),
        ("export study --format parquet", 2, "--out runs.parquet"),
        ("export study --out no/r.csv", 2, "no/r.csv cannot be written"),
        ("export study --out no/r.parquet --format parquet", 2, "no/r.parquet cannot be written"),
    ],
)
def test_misuse_is_one_sentence(args: str, code: int, says: str, sweep, workplace, capsys) -> None:
    (workplace / "empty").mkdir()
    (workplace / "empty/file").touch()
    write_run(workplace / "low", target=0.8)
    assert main(args.split()) == code
    out, err = capsys.readouterr()
    assert says in err
    assert err.startswith("ashl: ")
    assert err.count("\n") == 1
    assert not out
    assert not list(workplace.rglob("*.part"))


def test_an_export_to_a_pipe_leaves_the_pipe(sweep, workplace) -> None:
    """A device, for example /dev/null, is not replaced by a file, and a link keeps its target."""
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    Path("link").symlink_to("target.csv")
    assert main(["export", "study", "--out", "pipe"]) == 0
    assert main(["export", "study", "--format", "csv", "--out", "link"]) == 0
    assert Path("pipe").is_fifo()
    assert os.read(reader, 1 << 20) == Path("target.csv").read_bytes()
    assert Path("link").is_symlink()
    os.close(reader)


READERS = {"csv": pandas.read_csv, "json": pandas.read_json, "parquet": pandas.read_parquet}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(("what", "rows"), [("summary", 4), ("metrics", 60), ("events", 160)])
def test_pandas_reads_an_export_in_one_line(
    kind: str, what: str, rows: int, sweep, workplace
) -> None:
    assert main(["export", "study", "--what", what, "--out", f"out.{kind}"]) == 0
    frame = READERS[kind](workplace / f"out.{kind}")
    assert len(frame) == rows
    assert list(frame.columns[:4]) == ["hash", "setting", "seed", "sync"]
    if what == "summary":
        assert frame.groupby("sync")["time_to_target_s"].median().to_dict() == {
            "bsp": 2.0,
            "ssp": 1.0,
        }
        assert frame["w1_compute_s"].tolist() == pytest.approx([1.2, 1.2, 0.6, 0.6])
        assert frame["final_test_accuracy"].notna().all()
    elif what == "metrics":
        assert frame.groupby("sync")["time_s"].max().to_dict() == {"bsp": 2.0, "ssp": 1.0}
    else:
        assert json.loads(frame["spans"][0])[0] == ["compute", 0.0, 0.05]


GROUPS = [group for group in defaults() if group not in ("experiment", "debug")]


@pytest.mark.parametrize(
    ("key", "recorded", "loose"),
    [
        *((key, "of the run", False) for key in (*GROUPS, "plan", "profile")),
        ("compression", None, True),
        ("compression", {"relative_error": 0.5}, True),
    ],
)
def test_what_was_typed_is_what_is_exported(key: str, recorded, *, loose: bool, workplace) -> None:
    """`compression=none` vanished: a summary has a `compression` of its own, which is null without
    a codec.
    """
    off = "null" if key in ("plan", "profile") else "none"
    runs = [({key: value, "seed": "0"}, 1.0) for value in (off, "another")]
    summary = {key: recorded} if key not in ("runtime", "name") else {}
    write_sweep(workplace / "study", runs, summary)
    for folder, (values, _) in zip(sorted(workplace.glob("study/0*")), runs, strict=True):
        (folder / "overrides.yaml").write_text(
            json.dumps([f"{key}={values[key]}", "stop.steps=8", "run.dir=x"])
        )
        if key in ("plan", "profile"):
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config[key] = yaml.safe_load(config["choices"].pop(key))
            config["runtime"] = {"_target_": "ashl.runtime.option.LocalRuntime"}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
        for file in ("metrics.jsonl", "events.jsonl"):
            rows = [
                {**json.loads(row), key: recorded}
                for row in (folder / file).read_text().splitlines()[:2]
            ]
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if loose:
        (workplace / "study" / "sweep.json").unlink()
    for what in (
        ("summary", "metrics", "events") if key != "tracking" else ("summary",)
    ):  # it moves no figure
        frame = getattr(load("study"), what)
        assert set(frame.groupby(key).groups) == {off, "another"}, what
        if what == "summary":
            assert (set(frame["stop.steps"]), "run.dir" in frame) == ({"8"}, False)
        assert main(["export", "study", "--what", what, "--out", "out.csv"]) == 0
        written = pandas.read_csv("out.csv", keep_default_na=False)  # null is a word that is typed
        assert set(written[key]) == {off, "another"}, what
        if recorded == "of the run" and key != "runtime":
            assert set(frame[f"recorded_{key}"]) == {recorded}


def test_an_export_goes_to_standard_output(sweep, capsys) -> None:
    assert main(["export", "study"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("hash,setting,seed,sync,folder,")
    assert main(["export", "study", "--format", "json"]) == 0
    assert [row["setting"] for row in json.loads(capsys.readouterr().out)] == [
        "bsp",
        "bsp",
        "ssp",
        "ssp",
    ]


def test_an_export_of_what_some_runs_lack_leaves_them_out_by_name(sweep, capsys) -> None:
    (sweep / "00000000" / "events.jsonl").unlink()
    assert main(["export", "study", "--what", "events"]) == 0
    out, err = capsys.readouterr()
    assert "00000000 (events.jsonl is missing or broken)" in err
    assert len(out.splitlines()) == 1 + 3 * 40


def test_a_folder_of_folders_is_looked_through(tmp_path) -> None:
    """`ashl compare runs`: days, sweeps, profiles, and what MLflow keeps of them."""
    write_run(tmp_path / "runs/2026-01-01/bsp", reach_s=2)
    write_run(tmp_path / "runs/2026-01-02/asp", choices={"sync": "asp"})
    write_run(tmp_path / "runs/2026-01-02/profile", exit_reason="profiled", choices={"sync": "ssp"})
    write_run(tmp_path / "runs/artifacts/1/copy", choices={"sync": "backup"})
    study = read_study([tmp_path / "runs"])
    assert sorted(run.name for run in study.runs) == ["asp", "bsp"]
    assert [(out.name.rpartition("/")[2], out.reason) for out in study.left_out] == [
        ("profile", "is a profile, in which nothing was learned")
    ]


def test_a_folder_of_too_many_folders_is_refused(workplace, capsys, monkeypatch) -> None:
    """`ashl compare /` searched the whole file system."""
    monkeypatch.setattr("ashl.report.records.MAX_FOLDERS", 3)
    (workplace / "a/b/c").mkdir(parents=True)
    assert main(["compare", "."]) == 2
    assert ". has more than 3 folders without a run; name a folder" in capsys.readouterr().err


def test_a_narrow_screen_has_narrow_tables(sweep, capsys, monkeypatch) -> None:
    """COLUMNS also sets the width in a pipe: 134 columns were printed at 80."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", str(sweep), "--out", "a.html"]) == 0
    lines = capsys.readouterr().out.split("\n")
    # A command is not wrapped, so that it can be copied.
    assert max(len(line) for line in lines if not line.startswith("next:")) <= 80
    assert main(["list"]) == 0
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 112, (
        "some sentences are not folded"
    )


def test_a_run_in_virtual_time_counts_once(workplace, capsys) -> None:
    """The same command twice gives the same run, which does not count as another seed."""
    line = ["train", "-q", "runtime=sim", "tracking=none", "sync=bsp", "stop.steps=8"]
    for name, *other in (("one",), ("again", "name=again"), ("more", "seed=1")):
        assert main([*line, f"run.dir=runs/{name}", *other]) == 0
    capsys.readouterr()
    assert main(["compare", "runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [out["name"] for out in found["left_out"]] == ["runs/one"]
    assert found["settings"][0]["seeds"] == 2
