"""The record files can be read back after any end of the run and any fault of the disk."""

import errno
import gzip
import json
import math
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from ashl.errors import AshlError
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import Rounds, is_recorded
from ashl.tracking import jsonl, timeline
from ashl.tracking.recorder import Recorder

SUMMARY = {"schema": 1, "status": "finished", "num_workers": 2}


def round_record(rank: int, index: int) -> dict:
    start_s = 0.3 * index + 0.1 * rank
    ends_s = [start_s + share for share in (0.1, 0.15, 0.25, 0.3)]
    spans = list(zip(("compute", "push", "wait", "pull"), [start_s, *ends_s], ends_s, strict=False))
    return {
        "kind": "round",
        "stage": 0,
        "round": index,
        "rank": rank,
        "start_s": start_s,
        "end_s": ends_s[-1],
        "staleness": index % 3,
        "loss": 1.0 / (index + 1),
        "spans": [list(span) for span in spans],
    }


def record_run(run_dir: Path) -> None:
    recorder = Recorder(run_dir, "all")
    for index in range(5):
        for rank in range(3):  # the last one is a server
            recorder.event(round_record(rank, index))
    recorder.event({"kind": "stage", "stage": 1, "rank": 0, "time_s": 1.5})
    recorder.metric({"time_s": 1.5, "step": 15, "test/acc": 0.5})
    recorder.close(SUMMARY)


def entries(run_dir: Path) -> list[dict]:
    return json.loads(gzip.decompress((run_dir / "trace.json.gz").read_bytes()))["traceEvents"]


def test_what_is_recorded_can_be_read_back(tmp_path):
    record_run(tmp_path)
    events = list(jsonl.read(tmp_path / "events.jsonl"))
    assert len(events) == 16
    assert events[0] == round_record(0, 0)
    assert list(jsonl.read(tmp_path / "metrics.jsonl")) == [
        {"time_s": 1.5, "step": 15, "test/acc": 0.5}
    ]
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    assert not list(tmp_path.glob("*.part"))


def test_what_is_no_number_becomes_null(tmp_path):
    recorder = Recorder(tmp_path, "none")
    recorder.metric(
        {"a": math.nan, "b": [math.inf, 1.0], "c": np.float32("nan"), "d": np.int64(3), "e": "é"}
    )
    recorder.metric({"a": np.float32(0.5), "b": np.arange(2)})
    recorder.close({"final": {"loss": -math.inf}})
    assert list(jsonl.read(tmp_path / "metrics.jsonl")) == [
        {"a": None, "b": [None, 1.0], "c": None, "d": 3, "e": "é"},
        {"a": 0.5, "b": [0, 1]},
    ]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"final": {"loss": None}}


def test_without_events_there_is_no_trace(tmp_path):
    recorder = Recorder(tmp_path, "none")
    recorder.event(round_record(0, 0))
    recorder.close(SUMMARY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_sampling_keeps_the_start_and_grows_with_the_logarithm():
    kept = [number for number in range(1 << 16) if is_recorded("sampled", number)]
    assert kept[:1024] == list(range(1024))
    octaves = [sum(1 << k <= number < 2 << k for number in kept) for k in range(10, 16)]
    assert octaves == [512] * 6


@pytest.mark.parametrize("rounds", get_args(Rounds))
def test_of_rounds_that_nobody_keeps_no_record_is_made(rounds):
    emitted = []
    ctx = RankContext(
        SimpleNamespace(observer=SimpleNamespace(rounds=rounds, emit=emitted.append)), 0
    )
    for number in range(1100):
        ctx.time_accounting.attribute_until("compute", number + 1)
        ctx.record_round(0, number, 1, 0, dropped=False, loss=0.5)
    assert [record.round for record in emitted] == [
        k for k in range(1100) if is_recorded(rounds, k)
    ]
    assert [record.spans_ns for record in emitted] == [
        [("compute", r.round, r.round + 1)] for r in emitted
    ]
    assert ctx.steps == 1100  # counted nevertheless


def test_a_full_disk_leaves_whole_lines(tmp_path):
    recorder = Recorder(tmp_path, "all")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (10_000, limits[1])
    )  # beyond it, writes are cut short and then refused
    written, failure = 0, None
    try:
        while failure is None:
            recorder.event(round_record(0, written))
            written += 1
    except AshlError as error:
        failure = error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path) in str(failure)
    assert "free some space" in str(failure)
    assert len(list(jsonl.read(tmp_path / "events.jsonl"))) == written > 20
    assert (tmp_path / "events.jsonl").read_bytes().endswith(b"}\n")
    recorder.close(SUMMARY)
    assert (tmp_path / "summary.json").exists()


def test_the_summary_is_written_when_the_trace_does_not_fit(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(timeline, "write", full)
    recorder = Recorder(tmp_path, "all")
    with pytest.raises(AshlError, match="no space left on device"):
        recorder.close(SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY


def test_a_summary_is_whole_or_absent(tmp_path, monkeypatch):
    def interrupted(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "summary.json"
    jsonl.write_json(path, {"old": True})
    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(OSError, match="Input/output"):
        jsonl.write_json(path, {"new": True})
    assert json.loads(path.read_text()) == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    code = (
        "import itertools, sys; from pathlib import Path; from ashl.tracking.recorder import"
        " Recorder\nrecorder = Recorder(Path(sys.argv[1]), 'all')\nfor k in itertools.count():\n   "
        " recorder.event({'kind': 'round', 'round': k, 'pad': 'x' * (k % 997)})\n    if k == 100:"
        " print(flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    rounds = [record["round"] for record in jsonl.read(tmp_path / "events.jsonl")]
    assert rounds == list(range(len(rounds)))
    assert len(rounds) > 100


def test_readers_leave_a_cut_line_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert jsonl.tail(path, 0) == ([], 0)
    path.write_text('{"a":1}\n{"a":2}\n{"a')
    assert list(jsonl.read(path)) == [{"a": 1}, {"a": 2}]
    records, offset = jsonl.tail(path, 0)
    assert (records, offset) == ([{"a": 1}, {"a": 2}], 16)
    assert jsonl.tail(path, offset) == ([], offset)
    with open(path, "a") as file:
        file.write('":3}\n')
    assert jsonl.tail(path, offset) == ([{"a": 3}], 24)


def test_equal_runs_have_equal_traces(tmp_path):
    record_run(tmp_path / "first")
    record_run(tmp_path / "elsewhere and later")
    first, second = (
        (tmp_path / name / "trace.json.gz").read_bytes()
        for name in ("first", "elsewhere and later")
    )
    assert first == second


def test_the_trace_is_in_chromes_format(tmp_path):
    record_run(tmp_path)
    found = entries(tmp_path)
    names = {
        entry["tid"]: entry["args"]["name"] for entry in found if entry["name"] == "thread_name"
    }
    assert names == {0: "worker 0", 1: "worker 1", 2: "server"}
    slices = [entry for entry in found if entry["ph"] == "X"]
    assert len(slices) == 15 * 5
    assert all(
        entry["dur"] >= 0 and {"name", "pid", "tid", "ts"} <= entry.keys() for entry in slices
    )
    for outer in (entry for entry in slices if entry["name"].startswith("round")):
        inner = [
            entry
            for entry in slices
            if entry["tid"] == outer["tid"]
            and outer["ts"] <= entry["ts"] < outer["ts"] + outer["dur"]
        ]
        assert [entry["name"] for entry in inner[1:]] == ["compute", "push", "wait", "pull"]
        assert sum(entry["dur"] for entry in inner[1:]) == pytest.approx(outer["dur"], abs=1e-6)
    (instant,) = (entry for entry in found if entry["ph"] == "i")
    assert (instant["name"], instant["ts"]) == ("stage", 1.5e6)
