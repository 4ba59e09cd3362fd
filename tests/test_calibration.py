"""`ashl calibrate`: the interval's arithmetic, what a difference is of, what later predictions carry, and one whole."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from ashl.calibration import calibrate
from ashl.calibration.combinations import COMBINATIONS, TASKS, chosen
from ashl.calibration.compared import Compared, Found, component, found_in, verdict
from ashl.calibration.page import page
from ashl.calibration.sentences import sentences
from ashl.cli.app import main
from ashl.config.compose import compose
from ashl.config.identity import config_hash
from ashl.errors import UsageError
from ashl.plan.calibration import Calibration, bound, errors, held_back
from ashl.plan.files import read_profile
from ashl.plan.profile import Profile
from ashl.run.train import train
from ashl.study.slots import Job
from ashl.tracking.forecast import forecast
from tests.cli.test_profile_clock import profiled
from tests.sim.test_full_profile import of_one, steps
from tests.support import planned
from tests.test_profile import profile

PACED = [
    "cluster=mixed",
    "cluster.num_workers=2",
    "model=mlp",
    "dataset=digits",
    "tracking=none",
    "sync=bsp",
    "compression=none",
]


def row(name: str = "BSP", measured: float = 100.0, model: str = "mlp", wait_s: float = 0.1) -> Compared:
    booked = {"compute": 0.5, "encoding": 0.0, "link": 0.2, "port": 0.1}
    predicted = Found(100.0, 0.1, 1e4, 0.04, booked)
    own = Found(measured, 0.2, 1e4, 0.05, {**booked, "port": wait_s})
    return Compared(name, model, 1000, predicted, own, 100.0 / measured, component(predicted, own, profile(), True))


def alone(*ratios: float) -> list[tuple[float, ...]]:
    return [(ratio,) for ratio in ratios]


def test_the_interval_keeps_its_promise() -> None:
    """9 of 10 of what comes next, of whatever distribution and whatever all have in common, from 9 combinations on."""
    rng = np.random.Generator(np.random.Philox(1))
    for count in (9, 14, 28):
        ratios = np.exp(0.3 + rng.standard_t(3, size=(2000, count + 1)) * 0.1)
        inside = []
        for *seen, following in ratios:
            known = errors(alone(*seen))
            inside.append(abs(math.log(following / known.common)) <= known.bound)
        assert 0.89 <= np.mean(inside) < 0.97


def test_what_is_in_common_is_taken_off() -> None:
    found = errors(alone(1.1, 1.21, 1.331, 1.21))
    assert (found.common, found.quantiles[3]) == (1.21, 1.21)
    assert found.bound == pytest.approx(math.log(1.1))
    few = errors(alone(1.1, 0.5, 1.1))
    assert (few.common, few.bound) == (1.0, pytest.approx(math.log(2)))
    both = errors(alone(2.0, 2.0, 2.0, 2.1), alone(0.5, 0.5, 0.5, 0.5))
    assert (both.common, both.count) == (1.0, 8)
    assert both.bound == pytest.approx(math.log(1.05))
    assert bound([[(1.0, 1.2), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]]) == pytest.approx(math.log(1.2)), "of the plan's"


def test_half_of_the_combinations_foretells_the_other() -> None:
    held = held_back([alone(*[1.1, 2.2] * 3, 1.21, 2.42)])
    assert held.off == pytest.approx((*(0.5,) * 3, 0.45, *(1.0,) * 3, 1.2))
    assert held.inside == 0
    both = alone(*[1.1, 1.0] * 4), alone(*[2.1, 2.0] * 3, 2.1, 2.6)
    assert held_back(both).inside == 8, "of those that the half with 2.6 foretells"
    assert held_back([alone(1.0)]) == (0, ())


def test_all_takes_so_many_times_as_long(workplace) -> None:
    """To the rounding of a clock, whatever is shared."""
    from tests.sim.test_contention import crowded, seconds

    own = {"alone": steps([1.0] * 9 + [16.0]), "together_s": 1.0, "used": 0.6, "halt_s": 12.5}
    for known in (crowded(), crowded(8, **own), profiled("cluster=homogeneous", "cluster.num_workers=2")):
        longer = calibrated(known, common=1.5)
        assert seconds(longer) == pytest.approx(1.5 * seconds(known), rel=1e-6)


def test_a_difference_is_named() -> None:
    same = {"compute": 1.0, "encoding": 0.1, "link": 0.2, "port": 0.3}
    predicted = Found(100.0, 0.1, 1e4, 0.04, same)
    busy = of_one(steps([1.0, 2.0]))
    assert busy.full is not None
    own = replace(busy.full.workers[0], alone_s=1.0)
    busy, alone = (SimpleNamespace(full=replace(busy.full, workers=(own,) * count)) for count in (2, 1))
    for changed, server, known, named in [
        ({"compute": 1.5}, True, profile(), "compute"),
        ({"compute": 1.5}, True, busy, "host contention"),
        ({"compute": 0.5}, True, busy, "compute"),
        ({"compute": 1.5}, True, alone, "compute"),
        ({"port": 0.6, "link": 0.1}, True, profile(), "port"),
        ({"port": 0.6, "link": 0.1}, False, profile(), "link"),
        ({"encoding": 0.9}, True, profile(), "encoding"),
    ]:
        assert component(predicted, replace(predicted, booked_s=same | changed), known, server) == named


def test_what_all_combinations_of_a_model_have_in_common_is_said_apart() -> None:
    """A machine that has become slower since is none whose parts are modelled badly."""
    rows = [row("BSP", 70.0), row("SSP", 72.0), row("ASP", 69.3), row("ring", 70.0)]
    rows += [row("BSP", 85.0, "lenet"), row("SSP", 115.0, "lenet")]
    result = verdict(rows)
    assert result.models["mlp"].common == pytest.approx(1 / 0.7)
    assert result.apart("mlp") == pytest.approx((0.7 / 0.693 - 1) / 2)
    assert not any("lenet" in text for text in sentences(result, 6)[2:]), "of two combinations"
    said = [text for text in sentences(result, 6) if " mlp " in text]
    assert said[0].startswith("All of mlp took 1.43 times as long as predicted, in the median, which predictions from")
    assert said[0].endswith("apart from that they are off by 0.5 % in the median.")
    assert said[1].startswith("The machine has another speed with mlp than when it was profiled, or the profile is off")


def test_rows_become_a_verdict_and_a_page() -> None:
    result = verdict(
        [row(measured=100.0), row("ASP", 80.0, wait_s=0.4), row("SSP", 98.0, "lenet"), row("ring <b>", 101.0)]
    )
    assert (result.worst.name, result.weakest) == ("ASP", "port")
    assert result.median_error == pytest.approx((1 / 0.98 - 1 + 1 - 1 / 1.01) / 2)
    assert result.spread("steps_per_s")["0"] == pytest.approx(0.8)
    assert result.models["mlp"].count == 3
    assert len(result.held_back.off) == 4
    record = {"made": "2026-11-22", "versions": {"ashl": "0"}}
    html = page(result, [], record, "ashl calibrate")
    assert "ASP (port)" in html
    assert "<b>" not in html
    assert html.count("<tr>") == 5
    failed = {"status": "failed", "steps": 0, "time_s": 0.0}
    assert found_in(failed) is None


def test_the_preset_is_wide_enough_and_what_is_typed_holds() -> None:
    assert len(TASKS) * len(COMBINATIONS) >= 24
    keys = {word.partition("=")[0] for line in COMBINATIONS.values() for word in line.split()}
    assert keys == {"sync", "sync.local_steps", "topology", "compression"}
    assert list(chosen(["sync=bsp", "compression=none"])) == ["BSP", "BSP ring"]
    with pytest.raises(UsageError, match="only BSP QSGD of what is calibrated goes with sync=bsp compression=qsgd"):
        chosen(["sync=bsp", "compression=qsgd"])


def calibrated(known: Profile, q: float = 0.06, common: float = 1.0) -> Profile:
    own = replace(errors(alone(*[common] * 9)), bound=q)
    return replace(
        known, calibration=Calibration(made="", of=known.digest, model=own, overall=own, inside=9, held_back=9)
    )


def test_later_predictions_carry_the_error(workplace, capsys) -> None:
    Path("p.json").write_text(calibrated(profiled("cluster=homogeneous", "cluster.num_workers=2")).to_json())
    on = ["runtime=sim", "cluster=profile", "profile=p.json", "tracking=none", "schedule=single", "stop.steps=40"]
    plan = planned(*on)
    assert plan.predicted_error == pytest.approx(math.expm1(0.06))
    forecast(Console(width=200), plan, 1437)
    said = capsys.readouterr().out
    assert "steps/s ± 6.2 %, workers wait" in said
    assert "± 6.2 % for 40 steps" in said
    assert main(["sweep", "--dry-run", *on, "seed=0,1"]) == 0
    assert capsys.readouterr().out.count("± 6.2 %") == 3
    changed = json.loads(Path("p.json").read_text())
    changed["workers"][0]["step_s"] = 0.5
    Path("p.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match="its calibration is older than the profile"):
        read_profile("p.json")


def test_what_declares_a_calibrated_profile_is_foretold_by_it(workplace) -> None:
    """In virtual time and paced; what another cluster takes, it does not say."""
    on = ["cluster=mixed", "sync=bsp", "schedule=single", "stop.steps=60", "tracking=none"]
    known, plain = profiled("cluster=mixed"), planned(*on, "runtime=sim").predicted_s
    assert plain is not None
    virtual = compose(["runtime=sim", "cluster=profile", "profile=profile.json"], None)
    names = [config_hash(virtual)]
    Path("profile.json").write_text(calibrated(known, common=1.5).to_json())
    for runtime in ("sim", "local"):
        found = planned(*on, f"runtime={runtime}", "profile=profile.json")
        assert found.predicted_s == pytest.approx(1.5 * plain)
        assert found.predicted_error == pytest.approx(math.expm1(0.06))
    other = planned(*on, "runtime=local", "cluster.compute=[1,1,2,9]", "profile=profile.json")
    assert other.predicted_s is not None
    assert other.predicted_error is None
    names.append(config_hash(virtual))
    Path("profile.json").unlink()
    names.append(config_hash(virtual))
    assert names[0] != names[1] != names[2] == names[0], "of runs that take as long, or longer"


def in_this_process(
    slots: int, jobs: Sequence[Job], show: Callable[[list[Job]], None], unwanted: Callable[[Job], bool], **_: object
) -> Iterator[Job]:
    """The runs, real ones in virtual time on the cluster that they declare."""
    for job in jobs:
        if not unwanted(job):
            config = job.config
            runtime = compose([*PACED, "runtime=sim", "runtime.gradients=false", "schedule=single"], None)["runtime"]
            train({**config, "runtime": runtime}, list(job.overrides), quiet=True, silent=True)
            yield job


@pytest.mark.slow
def test_a_calibration_on_declared_costs_is_exact(workplace, capsys, monkeypatch) -> None:
    """The cluster is what the profile says, so that nothing is off; what has ended is not run again."""
    monkeypatch.setattr(calibrate, "run_all", in_this_process)
    command = ["calibrate", "-q", *PACED, "--seconds", "1", "run.dir=here"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "times are off by 0.0 % in the median, 0.0 % at worst" in said
    found = json.loads(Path("here/calibration.json").read_text())
    assert (found["status"], len(found["combinations"]), found["held_back"]["of"]) == ("whole", 2, 2)
    assert found["combinations"][0]["predicted"] == found["combinations"][0]["measured"]
    assert found["load"]["after"]["cores"] >= 1
    assert "</svg>" in Path("here/calibration.html").read_text()
    assert read_profile("here/profile-mlp/profile.json").error == pytest.approx(0.0, abs=0.2)  # of its plan
    other = json.loads(Path("here/profile-mlp/profile.json").read_text()) | {"calibration": None}
    other["workers"][0]["step_s"] = 0.5
    Path("here/profile-mlp/profile.json").write_text(json.dumps(other))
    assert main(command) == 2
    assert "which was measured anew since; delete that folder, or give another run.dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("runtime=sim", "take runtime=local"),
        ("seed=0,1", "give one"),
        ("stop.steps=5", "how long runs are follows from --seconds; drop it"),
        ("sync=qsr", "nothing of what is calibrated goes with sync=qsr"),
        ("profile=none.json", "cannot be read: No such file"),
        ("profile=.", "profile=. is a folder; name the file: profile=profile.json"),
        ("profile=cnn.json", "profile=cnn.json is of the model cnn, and what is calibrated is mlp and lenet"),
        ("profile=broken.json", "profile=broken.json is no usable profile: line 1 is not JSON"),
        ("profile=older.json", "profile=older.json is no usable profile: its calibration is older than the profile"),
        (
            "model=mlp dataset=digits cluster=real cluster.num_workers=3 profile=mlp.json",
            "2 workers and the cluster has 3",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused_with_the_fix(overrides: str, words: str, workplace, capsys) -> None:
    Path("broken.json").write_text('{"schema": 4,')
    Path("cnn.json").write_text(replace(profile(), model="cnn").to_json())
    Path("mlp.json").write_text(replace(profile(), model="mlp", num_params=9610, dense_bytes=38440).to_json())
    Path("older.json").write_text(json.dumps(json.loads(calibrated(profile()).to_json()) | {"num_params": 7}))
    assert main(["calibrate", "-q", *overrides.split()]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_paced_processes_take_what_was_predicted(workplace, capsys) -> None:
    slow = ["cluster.step_s=0.05", "cluster.exchange_s=0.04"]
    assert main(["calibrate", *PACED, *slow, "--seconds", "2", "run.dir=here"]) == 0
    found = json.loads(Path("here/calibration.json").read_text())
    assert len(found["combinations"]) == 2
    assert found["median_error"] < 0.15
    assert "predictions for mlp are ±" in capsys.readouterr().out
    again = time.monotonic()
    assert main(["calibrate", *PACED, *slow, "--seconds", "2", "run.dir=here"]) == 0
    assert "[1/" not in capsys.readouterr().out, f"what has ended is kept ({time.monotonic() - again:.1f} s)"
