"""Copies in trackers: what arrives there, and that a run never suffers from a tracker that fails."""

import operator
import os
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ashl.cli.app import main
from ashl.tracking import copying
from ashl.tracking.copying import Copier, metric_points, params_of, summary_numbers, tracker_maker
from ashl.tracking.recorder import Recorder
from ashl.tracking.tracker import Point, TrackedRun
from tests.run_folders import empty_database

CONFIG = {
    "seed": 7,
    "sync": {"_target_": "ashl.sync.ssp.SSP", "staleness": 3},
    "cluster": {"_target_": "ashl.cluster.spec.Cluster", "compute": [1.0, 2.0]},
}
ROW = {"time_s": 0.5, "host_s": 0.1, "step": 40, "commits": 40, "train/loss": 1.5, "wait/w0": 0.25}
ROOT = Path(__file__).parents[1]
ROW |= {"time/s": 0.5, "measure/grad_norm": 4.5}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PERIOD_S", 0.05)


def summary(status: str) -> dict:
    return {
        "schema": 1,
        "seed": 7,
        "status": status,
        "exit_reason": f"it {status}",
        "time_s": 3.0,
        "num_workers": 1,
        "steps": 120,
        "max_lead": None,
        "final": {"test_accuracy": 0.123456789, "test_loss": None},
        "best": {"test_accuracy": 0.5, "time_s": 2.0},
        "workers": [{"wait_s": 0.75}],
        "measures": {"grad_norm": {"last": 2.5, "mean": 3.0}},
    }


def begin(
    run_dir: Path, store: Path, sink: str = "mlflow", make: Any = None, **row: float
) -> tuple[Recorder, Copier]:
    recorder = Recorder(run_dir, "all")
    (run_dir / "config.yaml").write_text("seed: 7\n")
    run = TrackedRun(run_dir, run_dir.name, "ashl", params_of(CONFIG), note="`ashl train`")
    copier = Copier(make or tracker_maker(sink, store), sink, run)
    recorder.metric(ROW | row | {"test/acc": 0.25})
    recorder.metric(ROW | {"time_s": 1.0, "step": 80, "test/acc": None, "time/s": 1.0})
    return recorder, copier


def end(begun: tuple[Recorder, Copier], status: str = "finished", wait_s: float = 60.0):
    recorder, copier = begun
    recorder.close(summary(status))
    return copier.finish(wait_s)


def query(store: Path, sql: str) -> list[tuple]:
    uri = f"{(store / 'mlflow.db').as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=10.0)) as connection:
        return connection.execute(sql).fetchall()


def statuses(store: Path) -> dict[str, str]:
    try:
        return dict(query(store, "SELECT name, status FROM runs"))
    except sqlite3.Error:  # no store yet
        return {}


def wait_for_running(store: Path, name: str) -> None:
    until_s = time.monotonic() + 30
    while statuses(store).get(name) != "RUNNING":
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with one run of each fate."""
    runs = tmp_path_factory.mktemp('the runs\' "own"')
    (runs / "mlflow.db").write_bytes(empty_database())
    for name, status in {"good": "finished", "stopped": "interrupted", "bad": "diverged"}.items():
        shown, warning = end(begin(runs / name, runs), status)
        assert warning is None
        assert shown is not None
        assert shown.startswith("ashl ui ")
    recorder, died = begin(runs / "died", runs)
    assert died.finish(30.0)[1] is None  # without a summary
    recorder.leave()
    return runs


def test_the_status_follows_the_summary(store: Path) -> None:
    assert statuses(store) == {
        "good": "FINISHED",
        "stopped": "KILLED",
        "bad": "FAILED",
        "died": "FAILED",
    }
    assert query(store, "SELECT count(*) FROM experiments WHERE name = 'ashl'") == [(1,)]
    fates = {"good", "stopped", "bad", "died"}
    assert {path.name for path in store.iterdir()} - fates == {"mlflow.db", "artifacts"}


def test_what_arrives_in_mlflow(store: Path) -> None:
    ((run_id, artifacts),) = query(
        store, "SELECT run_uuid, artifact_uri FROM runs WHERE name = 'good'"
    )
    tags = dict(query(store, f"SELECT key, value FROM tags WHERE run_uuid = '{run_id}'"))
    assert tags["ashl.kind"] == "run"
    assert tags["ashl.status"] == "finished"
    assert tags["ashl.run_dir"] == str(store / "good")
    assert tags["mlflow.note.content"] == "`ashl train`"
    params = dict(query(store, f"SELECT key, value FROM params WHERE run_uuid = '{run_id}'"))
    assert params == params_of(CONFIG)
    measured = f"SELECT key, step, value FROM metrics WHERE run_uuid = '{run_id}'"
    assert set(query(store, f"{measured} AND step > 0")) == {
        ("test/acc", 40, 0.25),
        *(("train/loss", step, 1.5) for step in (40, 80)),
        *(("wait/w0", step, 0.25) for step in (40, 80)),
        *(("measure/grad_norm", step, 4.5) for step in (40, 80)),
        ("time/s", 40, 0.5),
        ("time/s", 80, 1.0),
    }
    assert {(key, value) for key, _, value in query(store, f"{measured} AND step = 0")} == {
        ("final/time_s", 3.0),
        ("final/num_workers", 1.0),
        ("final/steps", 120.0),
        ("final/test_accuracy", 0.123457),
        ("final/best_test_accuracy", 0.5),
        ("final/best_time_s", 2.0),
        ("final/measure/grad_norm", 2.5),
        ("final/wait_share_w0", 0.25),
    }
    folder = Path(urllib.request.url2pathname(artifacts.removeprefix("file://")))
    assert folder.is_relative_to(store / "artifacts")
    files = {"summary.json", "config.yaml", "trace.json.gz"}
    assert {path.name for path in folder.iterdir()} == files


def test_what_arrives_in_tensorboard(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_dir = tmp_path / "run"
    shown, warning = end(begin(run_dir, tmp_path, "tensorboard"))
    assert (shown, warning) == (f"tensorboard --logdir {run_dir / 'tensorboard'}", None)
    # TensorBoard shows the name of the folder as the run's
    found = accumulators.EventAccumulator(str(run_dir / "tensorboard" / run_dir.name)).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(40, 1.5), (80, 1.5)]
    assert [one.value for one in found.Scalars("test/acc")] == [0.25]
    assert found.Scalars("final/test_accuracy")[0].value == pytest.approx(0.123457)
    run = TrackedRun(run_dir, "run", "ashl")
    tracker = tracker_maker("tensorboard", tmp_path)()
    assert tracker.has(run, copying.summary_hash(run_dir))
    assert not tracker.has(run, "other")


def test_what_arrives_in_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    shown, warning = end(begin(run_dir, tmp_path, "wandb"))
    assert warning is None
    (folder,) = run_dir.glob("wandb/offline-run-*")
    assert shown == f"wandb sync {folder}"
    (records,) = folder.glob("*.wandb")
    texts = (b"train/loss", b"test/acc", b"sync.staleness", b"final/test_accuracy")
    until_s = time.monotonic() + 20  # a process of W&B's own writes them out
    while not all(text in records.read_bytes() for text in texts):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    run = TrackedRun(run_dir, "run", "ashl")
    assert tracker_maker("wandb", tmp_path)().has(run, copying.summary_hash(run_dir))


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_missing_library_is_an_error_that_names_the_extra(
    sink: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("ashl.tracking.option.find_spec", lambda name: None)
    assert main(["train", "runtime=sim", "debug=fast", f"tracking={sink}", "--dry-run"]) == 2
    expected = f'tracking={sink}: needs the library {sink}; run pip install "ashl[{sink}]", or set'
    assert expected in capsys.readouterr().err


def test_the_key_metric_comes_first() -> None:
    names = [name for name, *_ in metric_points(ROW | {"test/acc": 0.5, "test/loss": None})]
    assert names == ["test/acc", "train/loss", "wait/w0", "time/s", "measure/grad_norm"]
    assert dict(summary_numbers({"final": {"test_loss": 1}, "steps": 3, "failed": True})) == {
        "test_loss": 1.0,
        "steps": 3.0,
    }


def test_what_a_tracker_refused_for_a_while_arrives_later(tmp_path: Path) -> None:
    refusals = iter([True, True, False, True, False, False, True, True])
    kept = list[Point]()

    def refuse(*_: object) -> str:
        if next(refusals, False):
            raise ConnectionError("no route to host")
        return "1"

    def accept(points: Sequence[Point]) -> None:
        refuse()
        kept.extend(points)

    tracker = Mock(**{"open.side_effect": refuse, "log_metrics.side_effect": accept})
    tracker.close.return_value = "shown"
    recorder, copier = begin(tmp_path / "run", tmp_path, make=lambda: tracker)
    for step in range(100, 3100):
        recorder.metric(ROW | {"step": step})
    until_s = time.monotonic() + 20
    while operator.length_hint(refusals) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert end((recorder, copier)) == ("shown", None)
    steps = [point.step for point in kept if point.name == "train/loss"]
    assert steps == [40, 80, *range(100, 3100)]


def test_a_store_that_is_away_costs_a_warning_and_no_more(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its store").mkdir()
    (tmp_path / "its store/mlflow.db").write_bytes(empty_database())
    deleted = begin(tmp_path / "deleted", tmp_path / "its store")
    wait_for_running(tmp_path / "its store", "deleted")
    (tmp_path / "its store" / "mlflow.db").unlink()
    assert "no such table" in str(end(deleted)[1])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    shown, warning = end(begin(tmp_path / "unreachable", store))
    assert shown is None
    assert "(http://127.0.0.1:9 does not answer); its records are whole in " in str(warning)
    assert "secret" not in str(warning)


def test_no_name_costs_a_run(tmp_path: Path, store: Path) -> None:
    """Names of a user's own: signs that MLflow refuses, parts of a path, equal names."""
    odd = {"test/acc@5(top)": 0.5, "measure/a//../b": 1.0, "measure/ä": 2.0}
    recorder = Recorder(tmp_path / "odd", "all")
    params = params_of({"dataset": {"k(1)": 1, "k[1]": "x" * 9000}, "model": {"y" * 400: 3}})
    run = TrackedRun(tmp_path / "odd", "odd", "names", params)
    copier = Copier(tracker_maker("mlflow", store), "mlflow", run)
    recorder.metric(ROW | odd | {"measure/" + "x" * 400: 3.0})
    assert end((recorder, copier))[1] is None
    ours = "JOIN runs USING (run_uuid) WHERE runs.name = 'odd'"
    names = {name for (name,) in query(store, f"SELECT DISTINCT key FROM metrics {ours}")}
    assert {"test/acc_5_top_", "measure/a/_/_/b", "measure/_", "train/loss"} <= names
    found = dict(query(store, f"SELECT key, value FROM params {ours}"))
    assert (found["dataset.k_1_"], found["dataset.k_1__2"][:2]) == ("1", "xx")


def copy_from_eight_processes(folder: str) -> None:
    """Fork eight processes, each of which copies a run to one store. Run it without threads."""
    import mlflow

    assert mlflow  # which children then need not import
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            _, warning = end(begin(Path(folder) / f"run{number}", Path(folder) / "store"))
            print(warning, flush=True)
            os._exit(warning is not None)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8


@pytest.mark.slow
def test_eight_processes_write_to_one_store(tmp_path: Path) -> None:
    """They also create it at once."""
    script = "import sys; from tests.test_tracking_copies import copy_from_eight_processes as run"
    command = [sys.executable, "-c", f"{script}; run(sys.argv[1])", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100)
    expected = {f"run{number}": "FINISHED" for number in range(8)}
    assert statuses(tmp_path / "store") == expected
    ((count,),) = query(tmp_path / "store", "SELECT count(*) FROM metrics WHERE step > 0")
    assert count == 8 * 9
