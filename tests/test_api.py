"""`import ashl`: what the command line does, for scripts."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ashl
from ashl.errors import UsageError
from tests.conf_option import conf_option

SMALL = ("runtime=sim", "tracking=none", "model.hidden=[4]", "stop.epochs=1")


def test_train_returns_the_run_with_its_records_and_leaves_the_process_as_it_was(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = ashl.train("sync=bsp", *SMALL)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    assert dict(run) == {**run.summary, "run_dir": str(run.folder)}
    assert (run["status"], capsys.readouterr()) == ("finished", ("", ""))
    assert run.metrics["test/acc"].iloc[-1] == run["final"]["test_accuracy"]
    assert (run.events["kind"] == "round").sum() == run["commits"]
    assert run.plan["num_workers"] == run["num_workers"]
    with pytest.raises(UsageError, match=r"did you mean bsp\?"):
        ashl.train("sync=bps")


def test_sweep_returns_the_runs_in_the_order_of_the_grid(workplace: Path) -> None:
    runs = ashl.sweep(
        "sync=asp,bsp", *SMALL, "stop.target_accuracy=0.2", "tracking.events=none", jobs=2
    )
    assert [run["name"] for run in runs] == ["asp-mlp-digits", "bsp-mlp-digits"]
    assert list(runs.summary["sync"]) == ["asp", "bsp"]
    assert list(runs.summary["steps"]) == [run["steps"] for run in runs]
    assert set(runs.metrics["setting"]) == {"asp", "bsp"}
    assert len(runs.metrics) == sum(len(run.metrics) for run in runs)
    with pytest.raises(UsageError, match="None of these runs has events"):
        _ = runs.events
    with pytest.raises(
        UsageError, match=r"events\.jsonl is missing or broken; tracking\.events=all keeps it"
    ):
        _ = runs[1].events
    assert runs.answer(target=0.1).startswith("asp leads: time to 10.0 % accuracy")
    assert [run.folder for run in ashl.load(runs[0].folder.parent)] == [run.folder for run in runs]
    (runs[1].folder / "metrics.jsonl").unlink()
    again = ashl.load("runs")
    with pytest.warns(UserWarning, match=r"left out .*metrics\.jsonl is missing or broken"):
        assert len(again.metrics) == len(runs[0].metrics)


def test_load_gives_a_run_and_its_model_the_weights(workplace: Path) -> None:
    run = ashl.load(ashl.train("sync=bsp", *SMALL).folder)
    test = conf_option("dataset", "digits").load().test
    for which in ("final", "best"):
        model = run.model(which)
        right = model(test.inputs).argmax(dim=1) == test.targets
        assert (float(right.double().mean()), model.training) == (
            run[which]["test_accuracy"],
            False,
        )
    best = run.folder / "best.pt"
    torch.save(nn.Linear(3, 3).state_dict(), best)
    with pytest.raises(UsageError, match="does not fit the model"):
        run.model("best")
    best.unlink()
    with pytest.raises(UsageError, match=r"has no best\.pt"):
        run.model("best")
    with pytest.raises(
        UsageError, match="weights=bset: no run writes such weights; name final or best"
    ):
        run.model("bset")  # ty: ignore[invalid-argument-type]
    with pytest.raises(UsageError, match="nowhere is no folder"):
        ashl.load("nowhere")
    with pytest.raises(UsageError, match="3 is no path; name the folder of a run"):
        ashl.load(3)  # ty: ignore[invalid-argument-type]
    (run.folder / "summary.json").unlink()
    closed = ashl.load(run.folder)
    assert closed.summary["status"] == "interrupted"
    assert closed.summary["final"]["test_accuracy"] == run.summary["final"]["test_accuracy"]


@pytest.mark.parametrize("jobs", [0, -1, "2"])
def test_a_number_of_jobs_that_nothing_could_run_in_is_refused(jobs: object) -> None:
    with pytest.raises(UsageError, match="is no number of runs at a time; give 1 or more"):
        ashl.sweep("sync=asp,bsp", *SMALL, jobs=jobs)  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("entry", [ashl.train, ashl.sweep])
def test_a_list_of_settings_in_one_piece_is_refused(entry: Callable) -> None:
    with pytest.raises(UsageError, match=r"is no text of the form KEY=VALUE; .* as \*settings"):
        entry(["sync=asp", *SMALL])


def test_importing_is_light_and_a_script_needs_no_guard(workplace: Path) -> None:
    """Python would run the script again in each process that a run starts."""
    Path("script.py").write_text(
        "import sys, ashl\nassert not {'torch', 'hydra', 'mlflow'} & sys.modules.keys()\nown ="
        " ['cluster=homogeneous', 'cluster.compute=[1]', 'cluster.step_s=0.0001', 'tracking=none',"
        " 'sync=bsp']\nprint(ashl.train('runtime=local', 'topology=all_reduce', 'stop.steps=3',"
        " *own)['status'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.returncode) == ("finished\n", 0), ended.stderr
