"""Records of a run agree: names are those of the chosen options, and every record ends with the
run.
"""

import gzip
import json

import pytest
import yaml
from rich.console import Console

from ashl.config.compose import compose
from ashl.config.identity import config_hash
from ashl.data.digits import Digits
from ashl.errors import UsageError
from ashl.planning.compile_plan import compile_plan, prepare_plan
from ashl.run import train as run
from ashl.run.profile import profile as measure
from ashl.tracking import forecast as forecasts
from ashl.tracking.copying import params_of
from ashl.tracking.forecast import describe_duration, print_forecast
from tests.support import planned


@pytest.fixture(autouse=True)
def _forecasts() -> None:
    """Forecasts have their full length here: their sentences have numbers."""


SMALL = ["runtime=sim", "tracking=none", "tracking.events=all", "run.dir=run"]


def trained(*overrides: str) -> None:
    chosen = [*SMALL, *overrides]
    assert run.run(compose(chosen), chosen, quiet=True).code == 0


def test_names_are_those_of_the_options() -> None:
    """Two depths of one class are two models, and no hash knows what an option is called."""
    config = compose(
        [*SMALL, "sync=bsp", "model=resnet20", "dataset=synthetic", "runtime.gradients=false"]
    )
    plan = compile_plan(config)
    assert plan.name == "bsp-resnet20-synthetic"
    assert (plan.choices["model"], plan.stages[0].name) == ("resnet20", "bsp")
    assert params_of(config)["model"] == "resnet20"
    assert "sync" not in planned("schedule=ashl").choices, "each of its stages has one"
    assert config_hash(config) == config_hash(
        {**config, "choices": {**config["choices"], "model": "mine"}}
    )


def test_a_profile_is_of_the_model_that_was_chosen(workplace) -> None:
    measure(compose([*SMALL, "sync=ssp"]), [], quiet=True)
    profile = json.loads((workplace / "run/profile.json").read_text())
    assert profile["model"] == "mlp"
    given = compose([*SMALL, "sync=ssp", "profile=profile.json"])
    (workplace / "profile.json").write_text(json.dumps(profile))
    assert compile_plan(given)
    (workplace / "profile.json").write_text(json.dumps(profile | {"model": "cnn"}))
    with pytest.raises(UsageError, match="the model cnn and this one is mlp"):
        compile_plan(given)


@pytest.mark.parametrize("mode", ["sync=asp", "sync=bsp topology=all_reduce"])
def test_all_records_end_where_the_run_ends(mode: str, workplace) -> None:
    """Workers learn of the end late; what they did past it is in no record."""
    trained(*mode.split(), "stop.steps=150")
    folder = workplace / "run"
    summary = json.loads((folder / "summary.json").read_text())
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert {key: last[key] for key in ("bytes_up", "bytes_down", "time_s")} == {
        key: summary[key] for key in ("bytes_up", "bytes_down", "time_s")
    }
    assert last["perf/wait_share"] == summary["wait_share"]
    waits = [worker["wait_s"] / summary["time_s"] for worker in summary["workers"]]
    assert [last[f"wait/w{rank}"] for rank in range(4)] == waits
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    ends = [entry["ts"] + entry.get("dur", 0) for entry in trace if "ts" in entry]
    assert max(ends) <= 1e6 * summary["time_s"] + 1e-3
    assert yaml.safe_load((folder / "config.yaml").read_text())["choices"]["model"] == "mlp"
    assert not (folder / "report.html").exists(), "ashl compare draws it"


def test_the_data_set_is_loaded_once(workplace, monkeypatch) -> None:
    loads, load = [], Digits.load
    monkeypatch.setattr(Digits, "load", lambda self: loads.append(self) or load(self))
    trained("sync=bsp", "stop.steps=8")
    assert len(loads) == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("sync=ssp stop.epochs=5", "predicted 4.5 s for 225 steps"),
        (
            "sync=ssp stop.steps=100 stop.epochs=5 stop.seconds=30",
            "predicted 2 s for 100 steps; stops after 30 s at",
        ),
        ("sync=ssp stop.seconds=30", "stops after 30 s"),
        ("schedule=ashl", "predicted 22.1 s to 23.4 s for 2,695 steps, after profiling"),
    ],
)
def test_a_forecast_says_how_long(overrides: str, says: str) -> None:
    assert describe_duration(planned(*overrides.split()), 1437).startswith(says)


def test_a_forecast_of_many_workers_fits_a_screen(monkeypatch) -> None:
    monkeypatch.setattr(forecasts, "MAX_ROWS", 3)
    plan, _, data = prepare_plan(compose(SMALL))
    console = Console(width=120)
    with console.capture() as shown:
        print_forecast(console, plan, len(data.train))
    assert shown.get().count("and 1 more workers") == 2
    assert "5 %" not in shown.get(), "a stage that profiles keeps nothing"
