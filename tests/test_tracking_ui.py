"""MLflow's page: it serves, says why not, and dies with us."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from ashl.errors import AshlError, UsageError
from ashl.tracking import copying, ui
from ashl.tracking.copying import tracker_maker
from ashl.tracking.mlflow import experiment_page
from ashl.tracking.tracker import TrackedRun
from tests.engines import free_port
from tests.run_folders import empty_database, write_run, write_sweep


@pytest.mark.slow
def test_the_page_answers_and_dies_with_us(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ashl.tracking import ui\n"
        "with ui.serve(Path(sys.argv[1]), int(sys.argv[2])) as (link, server):\n"
        "    print(link, server.pid, flush=True); server.wait()\n"
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
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db"}


def test_a_taken_port_is_said_in_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            AshlError, match=rf"127.0.0.1:{port} \(address already in use\); choose another port"
        ):
            ExitStack().enter_context(ui.serve(tmp_path, port))


def test_a_host_that_is_not_there_is_said_in_one_sentence(tmp_path):
    with pytest.raises(AshlError, match=r"Cannot listen on nowhere\.invalid:.* leave --host out"):
        ExitStack().enter_context(ui.serve(tmp_path, free_port(), "nowhere.invalid"))


def test_a_store_that_is_no_store_is_said_in_one_sentence(tmp_path):
    (tmp_path / "mlflow.db").write_text(
        "this is not a database, and it is long enough to be looked at" * 100
    )
    with pytest.raises(
        AshlError, match=r"MLflow's page did not start \(.*file is not a database\)"
    ):
        ExitStack().enter_context(ui.serve(tmp_path, free_port()))


def test_a_tracking_server_has_its_own_page(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@example.org/mlflow")
    with pytest.raises(AshlError, match=r"open https://example\.org/mlflow, or unset it"):
        ExitStack().enter_context(ui.serve(tmp_path))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "mlflow.db").write_bytes(empty_database())
    return tmp_path


def test_links_lead_to_what_ran(store: Path) -> None:
    """Links lead to the latest experiment, the page of a run, or the experiment of a sweep."""
    here = "http://here"
    assert ui.link_of(store, here, None) == here  # nothing ran yet
    with pytest.raises(UsageError, match="is neither a run nor a sweep that MLflow has"):
        ui.link_of(store, here, store / "none")
    sweep = write_sweep(store / "study", [({"sync": "bsp"}, 1.0)], {"workers": 2, "rounds": 4})
    own = TrackedRun(sweep, "study", "study", kind="sweep")
    copying.RunCopy(tracker_maker("mlflow", store)(), own).advance()
    link = ui.link_of(store, here, sweep)
    assert link == experiment_page(here, link.split("/")[5])
    assert link == ui.link_of(store, here, None)
    run = write_run(store / "run")
    page = ui.link_of(store, here, run)  # MLflow did not have it
    assert re.fullmatch(
        r"http://here/#/experiments/\d+/runs/\w+\?workflowType=machine_learning", page
    )
    assert ui.link_of(store, here, run) == page
