"""MLflow as a copy: what arrives there, and that a run never suffers from a store that is away.
Read back by SQLite.
"""

import re
import sqlite3
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from ashl.tracking import mlflow, view
from ashl.tracking.recorder import Recorder

CONFIG = {
    "seed": 7,
    "sync": {"_target_": "ashl.sync.ssp.SSP", "staleness": 3},
    "cluster": {"_target_": "ashl.cluster.spec.Cluster", "compute": [1.0, 2.0]},
}
METRICS = {
    "time_s": 0.5,
    "host_s": 0.1,
    "step": 40,
    "commits": 40,
    "train/loss": 1.5,
    "wait/w0": 0.25,
    "time/s": 0.5,
}
METRICS |= {"measure/grad_norm": 4.5}


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


def begin(run_dir: Path, store: Path) -> tuple[Recorder, mlflow.Writer]:
    recorder = Recorder(run_dir, "all")
    (run_dir / "config.yaml").write_text("seed: 7\n")
    tags = {"ashl.kind": "train"}
    writer = mlflow.start(
        run_dir, store=store, experiment="ashl", run_name=run_dir.name, params=CONFIG, tags=tags
    )
    recorder.metric(METRICS | {"test/acc": 0.25})
    recorder.metric(METRICS | {"time_s": 1.0, "step": 80, "test/acc": None, "time/s": 1.0})
    return recorder, writer


def end(
    begun: tuple[Recorder, mlflow.Writer], status: str = "finished"
) -> tuple[str | None, str | None]:
    recorder, writer = begun
    recorder.close(summary(status))
    return mlflow.finish(writer, timeout_s=60.0)


def query(store: Path, sql: str) -> list[tuple]:
    with closing(
        sqlite3.connect(f"{(store / 'mlflow.db').as_uri()}?mode=ro", uri=True, timeout=10.0)
    ) as connection:
        return connection.execute(sql).fetchall()


def eventually(holds: Callable[[], object], within_s: float = 30.0) -> None:
    for _ in range(round(within_s / 0.1)):
        try:
            if holds():
                return
        except sqlite3.Error:  # no such table yet
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {within_s} s")


def statuses(store: Path) -> dict[str, str]:
    return dict(query(store, "SELECT name, status FROM runs"))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A store that three writers began on at once when it was fresh; one of them was killed, and
    reaped by a fourth.
    """
    runs = tmp_path_factory.mktemp("the runs")  # a blank in its name
    ends = {"good": "finished", "stopped": "interrupted"}
    begun = {name: begin(runs / name, runs) for name in ends}
    recorder, orphan = begin(runs / "orphan", runs)
    assert orphan.process is not None
    eventually(lambda: statuses(runs).get("orphan") == "RUNNING")
    orphan.process.kill()
    link, warning = mlflow.finish(orphan, timeout_s=10.0)
    assert link is None
    assert "its writer ended with code -9" in str(warning)
    for name, status in ends.items():
        link, warning = end(begun[name], status)
        assert warning is None
        assert str(link).startswith(
            "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning&"
        )
    died, writer = begin(runs / "died", runs)
    assert mlflow.finish(writer)[1] is None  # as at the death of its process: no summary yet
    for late in (recorder, died):
        late.close({})
    return runs


def test_the_status_follows_the_summary(store):
    assert statuses(store) == {
        "good": "FINISHED",
        "stopped": "KILLED",
        "orphan": "FAILED",  # as the next writer found it
        "died": "FAILED",
    }
    assert mlflow.STATUS["diverged"] == "FAILED"
    assert query(store, "SELECT count(*) FROM experiments WHERE name = 'ashl'") == [(1,)]


def test_the_page_opens_on_the_view_of_the_last_run(store):
    (tag,) = query(store, f"SELECT value FROM experiment_tags WHERE key = '{view.TAG}'")
    assert tag == (view.tag(1),)


def test_what_arrives(store):
    ((run_id, artifacts),) = query(
        store, "SELECT run_uuid, artifact_uri FROM runs WHERE name = 'good'"
    )
    tags = dict(query(store, f"SELECT key, value FROM tags WHERE run_uuid = '{run_id}'"))
    assert tags["ashl.kind"] == "train"
    assert tags["ashl.status"] == "finished"
    assert tags["ashl.run_dir"] == str(store / "good")
    params = dict(query(store, f"SELECT key, value FROM params WHERE run_uuid = '{run_id}'"))
    assert params == {
        "seed": "7",
        "sync": "ssp",
        "sync.staleness": "3",
        "cluster": "spec",
        "cluster.compute": "[1.0, 2.0]",
    }
    history = query(
        store, f"SELECT key, step, value FROM metrics WHERE run_uuid = '{run_id}' AND step > 0"
    )
    assert set(history) == {
        ("test/acc", 40, 0.25),
        ("train/loss", 40, 1.5),
        ("train/loss", 80, 1.5),
        ("wait/w0", 40, 0.25),
        ("wait/w0", 80, 0.25),
        ("measure/grad_norm", 40, 4.5),
        ("measure/grad_norm", 80, 4.5),
        ("time/s", 40, 0.5),
        ("time/s", 80, 1.0),
    }
    finals = dict(
        query(store, f"SELECT key, value FROM metrics WHERE run_uuid = '{run_id}' AND step = 0")
    )
    assert finals == {
        "final/time_s": 3.0,
        "final/num_workers": 1.0,
        "final/steps": 120.0,
        "final/test_accuracy": 0.123457,
        "final/best_test_accuracy": 0.5,
        "final/best_time_s": 2.0,
        "final/measure/grad_norm": 2.5,
        "final/wait_share_w0": 0.25,
    }
    folder = Path(urllib.request.url2pathname(artifacts.removeprefix("file://")))
    assert folder.is_relative_to(store / "artifacts")
    assert {path.name for path in folder.iterdir()} == {
        "summary.json",
        "config.yaml",
        "trace.json.gz",
    }


def test_the_key_metric_comes_first():
    names = [name for name, *_ in mlflow.points(METRICS | {"test/acc": 0.5, "test/loss": None})]
    assert names == ["test/acc", "train/loss", "wait/w0", "time/s", "measure/grad_norm"]


def test_a_flat_configuration_is_as_good_as_a_nested_one():
    flat = mlflow.flat(CONFIG)
    assert flat == mlflow.flat(
        {"sync._target_": "ashl.sync.ssp.SSP"} | {k: v for k, v in flat.items() if k != "sync"}
    )
    assert mlflow.flat({"model": {"_target_": "torchvision.models.vgg11"}}) == {"model": "vgg11"}


def test_nothing_is_left_but_the_store(store):
    assert {path.name for path in store.iterdir()} - {"good", "stopped", "orphan", "died"} == {
        "mlflow.db",
        "mlflow.db.lock",
        "artifacts",
    }
    assert not list(store.glob(f"[gsd]*/{mlflow.LOG}"))  # where nothing went wrong, nothing is said


def test_a_store_that_is_away_costs_a_warning_and_no_more(store, tmp_path, monkeypatch):
    locked = begin(tmp_path / "locked", store)
    deleted = begin(tmp_path / "deleted", tmp_path / "its store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    unreachable = begin(tmp_path / "unreachable", store)
    with closing(sqlite3.connect(store / "mlflow.db", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        locked[0].close(summary("finished"))
        began = time.monotonic()
        link, warning = mlflow.finish(locked[1], timeout_s=3.0)
        assert time.monotonic() - began < 6.0
    assert link is None
    said = (
        r"MLflow did not take all of this run \(.*mlflow.db is locked by another process; waited 3"
        r" s\); its .*"
    )
    assert re.fullmatch(said, str(warning))
    hurried = begin(tmp_path / "hurried", store)
    hurried[0].close(summary("finished"))
    link, warning = mlflow.finish(hurried[1], timeout_s=0.0)
    assert link is None
    assert "(0 s were not enough)" in str(warning), "a lock of its own writer is none"
    eventually(lambda: statuses(tmp_path / "its store").get("deleted") == "RUNNING")
    (tmp_path / "its store" / "mlflow.db").unlink()
    assert "was deleted or replaced during the run" in str(end(deleted)[1])
    link, warning = end(unreachable)
    assert link is None
    said = (
        "MLflow did not take all of this run (http://127.0.0.1:9 does not answer); its records are"
        " whole in "
    )
    assert str(warning).startswith(said)
    assert "secret" not in str(warning) + (tmp_path / "unreachable" / mlflow.LOG).read_text()


def test_no_name_costs_a_run(tmp_path):
    """Names of a user's own: signs that MLflow refuses, parts of a path, names that become
    equal.
    """
    odd = {
        "test/acc@5(top)": 0.5,
        "measure/a//../b": 1.0,
        "measure/ä": 2.0,
        "measure/" + "x" * 400: 3.0,
    }
    recorder = Recorder(tmp_path / "run", "all")
    params = {"dataset": {"k(1)": 1, "k[1]": 2}, "model": {"y" * 400: 3}}
    writer = mlflow.start(
        tmp_path / "run",
        store=tmp_path / "store",
        experiment="ashl",
        run_name="odd",
        params=params,
        tags={},
    )
    recorder.metric(METRICS | odd)
    link, warning = end((recorder, writer))
    assert (link is not None, warning) == (True, None)
    store = tmp_path / "store"
    assert query(store, "select status from runs") == [("FINISHED",)]
    names = {name for (name,) in query(store, "select distinct key from metrics")}
    assert {
        "test/acc_5_top_",
        "measure/a/_/_/b",
        "measure/_",
        "train/loss",
        "final/test_accuracy",
    } <= names
    found = dict(query(store, "select key, value from params"))
    assert (found["dataset.k_1_"], found["dataset.k_1__2"]) == ("1", "2")


def test_what_mlflow_refuses_is_left_out_alone(tmp_path):
    class RefusedError(Exception):
        error_code = mlflow.INVALID

    class Picky:
        logged: ClassVar[list[str]] = []

        def log_batch(self, run_id, metrics):
            if any(metric.key == "b" for metric in metrics):
                raise RefusedError
            self.logged += [metric.key for metric in metrics]

    copy = mlflow.Copy(tmp_path, {"params": {}})
    copy.client, copy.run = Picky(), SimpleNamespace(run_id="1", start_time=0)
    copy.log_metrics((name, 1.0, 0, 0.0) for name in "abcd")
    assert (Picky.logged, list(copy.refused)) == (["a", "c", "d"], ["b"])
