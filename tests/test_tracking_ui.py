"""MLflow's page: it serves, says why not, dies with us; and it opens on a view that this MLflow
understands.
"""

import base64
import importlib.util
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
import zlib
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from ashl.errors import AshlError
from ashl.tracking import store, ui, view


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_the_page_answers_and_dies_with_us(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ashl.tracking import ui\n"
        "with ui.serve(Path(sys.argv[1]), int(sys.argv[2])) as server:\n"
        "    print(server.link, server.process.pid, flush=True); server.wait()\n"
    )
    port = free_port()
    command = [sys.executable, "-c", code, str(tmp_path), str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        link, guard = parent.stdout.readline().split()
        assert link == f"http://127.0.0.1:{port}"  # nothing ran yet
        with urllib.request.urlopen(f"{link}/health", timeout=10) as answer:
            assert answer.status == 200
        started = [psutil.Process(int(guard)), *psutil.Process(int(guard)).children(recursive=True)]
        assert len(started) >= 2
        parent.send_signal(signal.SIGKILL)
        assert parent.stderr.read() == ""
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def test_a_taken_port_is_said_in_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            AshlError, match=rf"127.0.0.1:{port} \(address already in use\); choose another port"
        ):
            ui.serve(tmp_path, port)


def test_a_host_that_is_not_there_is_said_in_one_sentence(tmp_path):
    with pytest.raises(AshlError, match=r"Cannot listen on nowhere\.invalid:.* leave --host out"):
        ui.serve(tmp_path, free_port(), "nowhere.invalid")


def test_a_store_that_is_no_store_is_said_in_one_sentence(tmp_path):
    (tmp_path / "mlflow.db").write_text(
        "this is not a database, and it is long enough to be looked at" * 100
    )
    with pytest.raises(
        AshlError, match=r"MLflow's page did not start \(.*file is not a database\)"
    ):
        ui.serve(tmp_path, free_port())


def test_a_tracking_server_has_its_own_page(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@example.org/mlflow")
    with pytest.raises(AshlError, match=r"open https://example\.org/mlflow, or unset it"):
        ui.serve(tmp_path)


HALF_DONE = """
import os, sqlite3, sys
store = sqlite3.connect(sys.argv[1], isolation_level=None)
store.execute("CREATE TABLE runs (run_uuid, experiment_id, start_time, lifecycle_stage)")
store.executemany("INSERT INTO runs VALUES (?, 7, 10, 'active')", [(str(k) * 100,) for k in range(1000)])
store.execute("PRAGMA cache_size = 1")
store.execute("BEGIN")
store.execute("UPDATE runs SET experiment_id = 8")
os._exit(1)
"""


def test_a_store_whose_writer_was_killed_is_read_all_the_same(tmp_path):
    """A change that was begun is rolled back first; a reader without write permission cannot do
    that.
    """
    subprocess.run([sys.executable, "-c", HALF_DONE, str(tmp_path / "mlflow.db")], check=False)
    assert (tmp_path / "mlflow.db-journal").exists()
    assert "/#/experiments/7/" in str(store.latest(store.tracking_uri(tmp_path)))


def test_the_link_leads_to_the_experiment_that_ran_last(tmp_path):
    uri = store.tracking_uri(tmp_path)
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert store.latest(uri) is None
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute(
            "CREATE TABLE runs (run_uuid, experiment_id, start_time, lifecycle_stage)"
        )
        assert store.latest(uri) is None
        rows = [("a", 1, 10, "active"), ("b", 3, 20, "active"), ("c", 2, 30, "deleted")]
        connection.executemany("INSERT INTO runs VALUES (?, ?, ?, ?)", rows)
        connection.commit()
        link = store.latest(uri, "http://127.0.0.1:5001")
        assert not store.has_run(tmp_path / "mlflow.db", "z")
        assert store.has_run(tmp_path / "mlflow.db", "a")
        connection.execute("BEGIN EXCLUSIVE")
        assert store.has_run(tmp_path / "mlflow.db", "z")  # unknown
    assert not store.has_run(tmp_path / "elsewhere.db", "a")
    assert link is not None
    assert link.startswith(
        "http://127.0.0.1:5001/#/experiments/3/runs?workflowType=machine_learning&"
    )
    assert link.endswith(f"&viewStateShareKey={view.KEY}")


def state(num_workers: int = 16) -> dict:
    envelope = json.loads(view.tag(num_workers))
    assert isinstance(envelope["name"], str)
    assert isinstance(envelope["createdAt"], int)
    packed = envelope["state"].removeprefix("deflate;")
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_the_view_shows_what_it_should():
    page = state()
    lines = [chart for chart in page["compareRunCharts"] if chart["type"] == "LINE"]
    assert [chart["metricKey"] for chart in lines[:3]] == ["test/acc", "wait/w0", "train/loss"]
    assert {(chart["xAxisKey"], chart["selectedXAxisMetricKey"]) for chart in lines} == {
        ("metric", "time/s")
    }
    assert lines[1]["selectedMetricKeys"] == [f"wait/w{rank}" for rank in range(16)]
    bars = [chart["metricKey"] for chart in page["compareRunCharts"] if chart["type"] == "BAR"]
    assert bars == [
        "final/test_accuracy",
        "final/time_to_target_s",
        "final/wait_share",
        "final/samples_per_s",
    ]
    assert page["selectedColumns"][:2] == ["params.`schedule`", "params.`sync`"]
    assert "metrics.`final/time_to_target_s`" in page["selectedColumns"]
    shown = [section["name"] for section in page["compareRunSections"] if section["display"]]
    assert shown == ["Over time", "Outcome", "Settings that differ"]
    assert {chart["metricSectionId"] for chart in page["compareRunCharts"]} == set(shown)
    assert '"wait/w3"' in json.dumps(state(4))
    assert '"wait/w4"' not in json.dumps(state(4))
    assert len(view.tag()) < 5000  # MLflow's limit


def test_the_installed_mlflow_still_knows_the_views_words():
    """The format is internal to MLflow: if this fails, look at the page before mending it."""
    spec = importlib.util.find_spec("mlflow")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    scripts = Path(spec.submodule_search_locations[0]).glob("server/js/build/static/js/*.js")
    text = "\n".join(path.read_text(encoding="utf-8") for path in scripts)
    page = state()
    words = {
        "mlflow.sharedViewState.",
        "viewStateShareKey",
        "compareRunsMode",
        "workflowType",
        "machine_learning",
    }
    words |= {"deflate;", "FIRST_20_RUNS", "LINE", "BAR", "DIFFERENCE", *page}
    words |= {key for chart in page["compareRunCharts"] for key in chart} | set(
        page["compareRunSections"][0]
    )
    assert not [word for word in sorted(words) if word not in text]


def test_the_page_of_a_run_is_that_of_model_training(tmp_path):
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection, connection:
        connection.execute(
            "CREATE TABLE runs (run_uuid, experiment_id, start_time, lifecycle_stage)"
        )
        connection.execute("CREATE TABLE tags (run_uuid, key, value)")
        connection.execute("INSERT INTO runs VALUES ('r', 3, 1, 'active')")
        connection.execute(
            "INSERT INTO tags VALUES ('r', 'ashl.run_dir', ?)", (str(tmp_path / "run"),)
        )
    page = store.page_of(store.tracking_uri(tmp_path), tmp_path / "run", "http://here")
    assert page == "http://here/#/experiments/3/runs/r?workflowType=machine_learning"
