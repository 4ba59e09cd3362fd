"""A sweep in MLflow: each run once below the sweep, also after the store was locked or deleted.
Read back by SQLite.
"""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ashl.tracking import mlflow, mlflow_study
from tests.run_folders import write_sweep

RUN = {"workers": 2, "rounds": 4, "every_s": 0.5}
SETTINGS = [({"sync": sync, "seed": seed}, 1.0) for sync in ("bsp", "asp") for seed in ("0", "1")]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return write_sweep(tmp_path / "study", SETTINGS, RUN)


def copy(sweep: Path, timeout_s: float = 100.0) -> tuple[str | None, str | None]:
    """Tell MLflow of all runs of the sweep."""
    store = sweep.parent / "store"
    store.mkdir(exist_ok=True)
    writer = mlflow_study.start(
        sweep, store=store, name="study", axes=["sync", "seed"], command="ashl sweep"
    )
    for setting in json.loads((sweep / "sweep.json").read_text())["settings"]:
        name = " ".join(f"{key}={value}" for key, value in setting["axes"].items())
        config = {
            "seed": int(setting["axes"]["seed"]),
            "choices": {"sync": setting["axes"]["sync"]},
        }
        mlflow_study.add(writer, sweep / setting["folder"], name, config, name.rpartition(" ")[0])
    return mlflow.finish(writer, timeout_s)


def runs(sweep: Path) -> dict[str, tuple[str, str | None]]:
    """Status and parent's name by name, of the runs that are not deleted."""
    query = """SELECT r.name, r.status, p.name FROM runs r
        LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'mlflow.parentRunId'
        LEFT JOIN runs p ON p.run_uuid = t.value WHERE r.lifecycle_stage = 'active'"""
    with closing(sqlite3.connect(sweep.parent / "store/mlflow.db", timeout=10)) as connection:
        rows = connection.execute(query).fetchall()
    found = {name: (status, parent) for name, status, parent in rows}
    assert len(found) == len(rows), "no run is there twice"
    return found


def whole() -> dict[str, tuple[str, str | None]]:
    children = {
        f"sync={axes['sync']} seed={axes['seed']}": ("FINISHED", f"sync={axes['sync']}")
        for axes, _ in SETTINGS
    }
    settings = {parent: ("FINISHED", "study") for _, parent in children.values()}
    return {"study": ("FINISHED", None)} | settings | children


def medians(sweep: Path) -> dict[tuple[str, str], tuple[str, float]]:
    """Seeds and value by the names of a setting and a metric."""
    query = """SELECT p.value, r.name, m.key, m.value FROM runs r JOIN latest_metrics m USING (run_uuid)
        JOIN params p USING (run_uuid) JOIN tags t USING (run_uuid)
        WHERE p.key = 'seed' AND t.key = 'ashl.kind' AND t.value = 'setting' AND r.lifecycle_stage = 'active'"""
    with closing(sqlite3.connect(sweep.parent / "store/mlflow.db", timeout=10)) as connection:
        return {
            (name, key): (seeds, value) for seeds, name, key, value in connection.execute(query)
        }


def test_every_run_is_there_once_below_the_medians_of_its_setting(sweep: Path) -> None:
    link, warning = copy(sweep)
    assert warning is None
    assert link is not None
    assert "viewStateShareKey" in link
    assert runs(sweep) == whole()
    found = medians(sweep)
    times = [json.loads((sweep / f"{n:08x}/summary.json").read_text())["time_s"] for n in (0, 1)]
    assert found["sync=bsp", "final/time_s"] == ("0, 1", pytest.approx(sum(times) / 2, rel=1e-5))
    assert {("sync=asp", "test/acc"), ("sync=asp", "final/test_accuracy")} <= found.keys()
    copy(sweep)
    assert runs(sweep) == whole()


def test_times_are_those_of_the_runs_and_what_a_race_dropped_is_tagged(sweep: Path) -> None:
    record = json.loads((sweep / "sweep.json").read_text())
    *_, last = record["settings"]
    assert last["axes"] == {"sync": "asp", "seed": "1"}
    (sweep / "sweep.json").write_text(
        json.dumps({**record, "dropped": [{"hash": last["hash"], "reason": "behind"}]})
    )
    for number, setting in enumerate(record["settings"]):
        file = sweep / setting["folder"] / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "host_s": 7.0}))
        os.utime(file, (1000 + 100 * number,) * 2)
    copy(sweep)
    query = """SELECT r.name, r.start_time, r.end_time, t.value FROM runs r
        LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'ashl.dropped' WHERE r.lifecycle_stage = 'active'"""
    with closing(sqlite3.connect(sweep.parent / "store/mlflow.db", timeout=10)) as connection:
        found = {name: rest for name, *rest in connection.execute(query)}
    assert found["sync=bsp seed=0"] == [993_000, 1_000_000, None]
    assert found["sync=bsp"] == [993_000, 1_100_000, None]
    assert found["sync=asp seed=0"] == [1_193_000, 1_200_000, None]
    assert found["sync=asp seed=1"] == [1_293_000, 1_300_000, "behind"]
    assert found["sync=asp"] == [1_193_000, 1_300_000, "behind"]


@pytest.mark.slow
def test_what_a_deleted_or_locked_store_has_lost_comes_back(sweep: Path) -> None:
    copy(sweep)
    (sweep.parent / "store/mlflow.db").unlink()
    copy(sweep)
    assert runs(sweep) == whole()
    (sweep.parent / "store/mlflow.db").unlink()
    copy(sweep)
    with closing(sqlite3.connect(sweep.parent / "store/mlflow.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        link, warning = copy(sweep, timeout_s=15.0)
    assert link is None
    assert "locked" in str(warning)
    copy(sweep)
    assert runs(sweep) == whole()
