"""A sweep in MLflow: each run once below the sweep, also after the store was locked or deleted."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ashl.tracking import copying
from ashl.tracking.copying import Copier, tracker_maker
from ashl.tracking.tracker import TrackedRun
from tests.run_folders import empty_database, write_sweep

RUN = {"workers": 2, "rounds": 4, "every_s": 0.5}
SETTINGS = [({"sync": sync, "seed": seed}, 1.0) for sync in ("bsp", "asp") for seed in ("0", "1")]
WHOLE = {"study": ("FINISHED", None)} | {
    f"sync={axes['sync']} seed={axes['seed']}": ("FINISHED", "study") for axes, _ in SETTINGS
}


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(copying, "PERIOD_S", 0.05)
    (tmp_path / "store").mkdir()
    (tmp_path / "store/mlflow.db").write_bytes(empty_database())
    return write_sweep(tmp_path / "study", SETTINGS, RUN)


late: list[Copier] = []  # a command ends here, and with it the thread that may still wait


def copy(sweep: Path, sink: str = "mlflow", wait_s: float = 100.0) -> tuple[str | None, str | None]:
    """Copy all runs of the sweep."""
    own = TrackedRun(sweep, "study", "study", kind="sweep", note="`ashl sweep`")
    copier = Copier(tracker_maker(sink, sweep.parent / "store"), sink, own)
    for setting in json.loads((sweep / "sweep.json").read_text())["settings"]:
        name = " ".join(f"{key}={value}" for key, value in setting["axes"].items())
        copier.add(TrackedRun(sweep / setting["folder"], name, "study", setting["axes"]))
    answer = copier.finish(wait_s)
    late.append(copier)
    return answer


def query(sweep: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(sweep.parent / "store/mlflow.db", timeout=10)) as connection:
        return connection.execute(sql).fetchall()


def runs(sweep: Path) -> dict[str, tuple[str, str | None]]:
    """Return status and parent's name by name, of the runs that are not deleted."""
    rows = query(
        sweep,
        """SELECT r.name, r.status, p.name FROM runs r
        LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'mlflow.parentRunId'
        LEFT JOIN runs p ON p.run_uuid = t.value WHERE r.lifecycle_stage = 'active'""",
    )
    found = {name: (status, parent) for name, status, parent in rows}
    assert len(found) == len(rows), "no run is there twice"
    return found


def test_every_run_is_there_once_below_the_sweep(sweep: Path) -> None:
    folders = sorted(sweep.glob("0*"))
    for number, folder in enumerate(folders):
        file = folder / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "host_s": 7.0}))
        os.utime(file, (1000 + 100 * number,) * 2)
    assert copy(sweep) == (f"ashl ui {sweep}", None)
    assert runs(sweep) == WHOLE
    times = "SELECT start_time, end_time FROM runs WHERE name LIKE 'sync=%' ORDER BY 1"
    expected = [(993_000 + 100_000 * k, 1_000_000 + 100_000 * k) for k in range(len(folders))]
    assert query(sweep, times) == expected
    before = query(sweep, "SELECT run_uuid FROM runs")
    changed = folders[0] / "summary.json"
    changed.write_text(json.dumps({**json.loads(changed.read_text()), "steps": 9}))
    copy(sweep)  # the run that changed is copied again, in place of its earlier copy
    assert runs(sweep) == WHOLE
    assert len(query(sweep, "SELECT run_uuid FROM runs")) == len(before) + 1


def test_the_runs_of_a_sweep_are_copied_to_tensorboard(sweep: Path) -> None:
    pytest.importorskip("tensorboard")
    assert copy(sweep, "tensorboard") == (f"tensorboard --logdir {sweep}", None)
    assert len(list(sweep.glob("0*/tensorboard/outcome"))) == len(SETTINGS)


def test_what_a_locked_store_has_lost_comes_back(sweep: Path) -> None:
    copy(sweep)
    summary = next(sweep.glob("0*/summary.json"))
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "steps": 9}))
    with closing(sqlite3.connect(sweep.parent / "store/mlflow.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        shown, warning = copy(sweep, wait_s=1.0)
    assert shown is None
    assert "1 s were not enough" in str(warning)
    assert "the same command copies the rest" in str(warning)
    late[-1]._thread.join()
    copy(sweep)
    assert runs(sweep) == WHOLE
