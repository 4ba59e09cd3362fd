"""`ashl advise`: candidates by rules, the race's arithmetic on made-up courses and clusters, and
one small race.
"""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ashl.advice import advise, candidates, contest, leave_out
from ashl.advice.answer import NextCommands, rates_notes, server_link_notes
from ashl.advice.candidates import (
    BSP,
    Candidate,
    Selection,
    origins,
    remove_inferior,
    select_candidates,
)
from ashl.advice.contest import (
    TunedCandidate,
    find_slow,
    front_runners,
    rank_tuned,
    steadier_rate,
)
from ashl.advice.leave_out import Racer, leave_out_of, without_worker, workers_to_consider
from ashl.advice.rules import RULES, Rule, Situation
from ashl.advice.scale import RATES, Load, Scale, load_of, scale_of
from ashl.cli.app import main
from ashl.config.catalog import catalog, parameters
from ashl.config.override import CommandLine
from ashl.errors import UsageError
from ashl.planning.compile_plan import compile_plan
from ashl.run.host_time import START_S, Costs
from ashl.study import sweep
from ashl.study.grid import Setting
from ashl.study.jobs import Job
from ashl.study.race import LearningCurve
from ashl.tracking import jsonl
from tests.run_folders import write_run
from tests.test_profile import profile

EQUAL = Situation(
    num_workers=4,
    fast_step_s=0.02,
    slow_step_s=0.02,
    second_step_s=0.02,
    slow_exchange_s=0.01,
    server=0.5,
    ring=0.375,
    layers=4,
    skewed=False,
    first_loss=2.3,
)
PAPER = replace(
    EQUAL,
    num_workers=3,
    fast_step_s=0.04,
    slow_step_s=0.08,
    second_step_s=0.06,
    slow_exchange_s=0.16,
    server=2.0,
    ring=1.33,
)


def test_who_competes_follows_from_the_cluster() -> None:
    equal, unequal = ({rule.name for rule in RULES if rule.applies(s)} for s in (EQUAL, PAPER))
    assert "D-PSGD" in equal - unequal
    assert {"ADSP Top-K", "ASHL+"} <= unequal - equal
    assert all(rule.reason(s).endswith(".") for rule in RULES for s in (EQUAL, PAPER))


def test_different_classes_leave_out_who_meets_rarely() -> None:
    taken = {rule.name for rule in RULES if rule.applies(replace(PAPER, skewed=True))}
    assert "local SGD planned H=4 FedNova" in taken
    assert not {"local SGD H=16 ring", "SSP planned H=4", "SSP planned H=4 delayed"} & taken


def test_rules_name_options_keys_and_each_other() -> None:
    known, by_name = catalog(), {rule.name: rule for rule in RULES}
    assert len(by_name) == len(RULES)
    for rule in RULES:
        assert {rule.same, rule.departs} - {""} <= by_name.keys()
        assert bool(rule.departs) == bool(rule.gives_up)
        overrides = dict(
            text.split("=", 1) for text in rule.overrides.format(**PAPER.values).split()
        )
        groups = {key: value for key, value in overrides.items() if key in known}
        for key, value in overrides.items():
            group, _, name = key.partition(".")
            option = groups.get(
                group, {"topology": "parameter_server", "schedule": "single"}.get(group)
            )
            assert option in known[group], f"{rule.name}: {key}={value}"
            assert not name or name in {
                parameter.key for parameter in parameters(known[group][option])
            }, rule.name


def made(name: str, rate: float, **more: Any) -> Candidate:
    plan: Any = SimpleNamespace(
        stages=[SimpleNamespace(predicted_steps_per_s=rate)], predicted_s=10.0, limits=None
    )
    rule = next(
        (rule for rule in RULES if rule.name == name), Rule(name=name, overrides="", why="")
    )
    return Candidate(
        rule, (), {"what": name, "seed": 0, "optimizer": {"lr": 0.1}, **more}, plan, ""
    )


def test_only_what_cannot_be_the_best_is_dropped_before_the_race() -> None:
    field = [
        made("BSP", 30),
        made("BSP ring", 40),  # the same updates, and faster
        made("BSP ring delayed", 40.3),  # gives something up for less than 1 %
        made("local SGD H=4", 39),  # slower than BSP, and another algorithm
        made("local SGD H=16 ring", 60),
        made("SSP", 20),
        made("ASP", 50),
    ]
    kept, left_out = remove_inferior(field)
    assert [own.name for own in kept] == [
        "BSP ring",
        "local SGD H=16 ring",
        "ASP",
        "local SGD H=4",
        "SSP",
    ]
    reasons = {out.name: out.reason for out in left_out}
    assert (
        reasons["BSP"]
        == "it makes the same updates as BSP ring, and 30 steps/s are predicted, against 40."
    )
    assert reasons["BSP ring delayed"].startswith(
        "it gives up gradients of the latest model against BSP ring for no "
    )
    assert origins(next(rule for rule in RULES if rule.name == "SSP planned H=4 delayed")) == [
        "SSP planned H=4",
        "SSP planned H=2",
    ]


def test_a_candidate_that_comes_to_the_same_is_none_of_its_own() -> None:
    kept, left_out = remove_inferior(
        [made("BSP", 30), made("SSP", 20, what="same"), made("ASP", 20, what="same")]
    )
    assert ([own.name for own in kept], [out.name for out in left_out]) == (["BSP", "SSP"], ["ASP"])


# --- the race
# --------------------------------------------------------------------------------------------------


def course(
    *losses: float, reached_s: float | None = None, ended: bool = True, failed: bool = False
) -> LearningCurve:
    return LearningCurve(
        [float(k + 1) for k in range(len(losses))], losses, reached_s, ended, failed
    )


def test_the_best_rate_reaches_the_target_first_or_else_has_the_lowest_loss_at_the_same_moment() -> (
    None
):
    own = made("BSP", 1)
    late, early = (
        TunedCandidate(own, 0.1, course(1, 1, reached_s=2.0)),
        TunedCandidate(own, 0.2, course(1, reached_s=1.0)),
    )
    low, high = (
        TunedCandidate(own, 0.3, course(0.5, ended=False)),
        TunedCandidate(own, 0.4, course(0.6, 0.1, ended=False)),
    )
    unseen, broken = (
        TunedCandidate(own, 0.5, None),
        TunedCandidate(own, 0.6, course(9, failed=True)),
    )
    assert rank_tuned([unseen, broken, high, low, late, early]) == [
        early,
        late,
        low,
        high,
        broken,
        unseen,
    ]


def test_the_rate_that_is_fast_with_two_seeds_is_kept() -> None:
    own = made("BSP", 1)
    lucky, steady = (
        TunedCandidate(own, rate, course(1, reached_s=s)) for rate, s in ((0.1, 1.0), (0.2, 1.2))
    )
    for later, expected in [
        ((3.0, 1.2), steady),
        ((1.3, 1.2), lucky),
        ((None, 2.0), steady),
        ((None, None), lucky),
    ]:
        pairs = [
            (two, course(1, reached_s=s)) for two, s in zip((lucky, steady), later, strict=True)
        ]
        assert steadier_rate(lucky, pairs) is expected
    assert (
        steadier_rate(lucky, [(lucky, None), (steady, course(1, reached_s=1.0))]) is lucky
    )  # the budget was over
    assert steadier_rate(lucky, []) is lucky


def test_candidates_that_are_predicted_to_be_far_too_slow_do_not_run() -> None:
    """One that needs half the steps of the most sparing one would be as fast as the best."""
    fast, sparing, twice, slow = (made(name, 1) for name in ("fast", "sparing", "twice", "slow"))
    predicted = {fast: 100.0, sparing: 150.0, twice: 200.0, slow: 201.0}
    times = {fast: 10.0, sparing: 15.0}
    assert find_slow(predicted, {}, ()) == {}
    (found,) = find_slow(predicted, times, (fast, sparing)).values()
    assert (found.name, found.reason) == (
        "slow",
        "it would need 20.1 s even with as few steps as fast; the fastest so far, fast, took 10 s.",
    )
    times = {fast: 10.0, sparing: 10.5}  # after 7 % of its run
    assert not find_slow(predicted, times, (fast, sparing))
    assert not find_slow(predicted, {fast: 10.0}, (slow,))


def test_which_workers_proceed() -> None:
    base = made("BSP", 1)
    tries = [TunedCandidate(made(str(k), 1), 0.1, course(1, reached_s=k + 1.0)) for k in range(6)]
    last = TunedCandidate(base, 0.1, course(3, ended=False))
    assert [own.candidate.name for own in front_runners([*tries, last], base, 4)] == [
        "BSP",
        "0",
        "1",
        "2",
        "3",
    ]
    behind = [TunedCandidate(made(str(k), 1), 0.1, course(k + 1, ended=False)) for k in range(3)]
    assert [own.candidate.name for own in front_runners([tries[0], *behind, last], base, 4)] == [
        "BSP",
        "0",
        "0",
    ]


def field_with(predicted_s: float, every_s: float | None = None) -> Selection:
    limits = SimpleNamespace(seconds=None, eval_every_s=every_s, eval_every_commits=None)
    workers = [SimpleNamespace(batch=10, local_steps=1)]
    plan: Any = SimpleNamespace(
        stages=[SimpleNamespace(predicted_steps_per_s=10.0, workers=workers)],
        num_workers=1,
        limits=limits,
        predicted_s=predicted_s,
        num_steps=lambda epoch: 1000,
    )
    config = {"stop": {"target_accuracy": 0.9}, "eval": {"every_s": every_s}}
    own = replace(made("BSP", 1), plan=plan, config=config)
    return Selection((own,) * 9, (), Costs(0.01, 0.001, 2.3, epoch_samples=100))


def test_the_race_is_as_large_as_the_budget() -> None:
    load = load_of(field_with(100.0), slots=2, began_s=1.0)
    scales = [
        scale_of(load, tunes=True, left_s=left, budget_s=left) for left in (1000.0, 60.0, 30.0)
    ]
    assert [scale.length for scale in scales] == [1.0, 0.25, 0.125]
    assert scales[0].rates == RATES
    assert scales[0].every_s == 0.5  # 200 readings of the whole run
    evaluated = load_of(field_with(100.0, every_s=1.0), slots=2, began_s=1.0)
    typed = scale_of(evaluated, tunes=False, left_s=1000.0, budget_s=1000.0)
    assert (typed.rates, typed.every_s) == ((1.0,), None)
    often = load_of(field_with(100.0, every_s=0.01), slots=2, began_s=1.0)
    # 10,000 evaluations instead of 100, of a millisecond each
    assert often.whole_s - evaluated.whole_s == pytest.approx(9.9)
    with pytest.raises(
        UsageError, match=r"--budget 1 is too small: a single run of a sixteenth .*; give --budget"
    ):
        scale_of(load, tunes=True, left_s=0.5, budget_s=1.0)


def test_a_resumed_race_keeps_its_size_unless_the_budget_allows_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(candidates=9, whole_s=1.0, every_s=None, slots=2, ends_early=True, began_s=1.0)
    deadline = SimpleNamespace(budget_s=9.0, spent_s=1.0)
    context: Any = SimpleNamespace(folder=tmp_path, deadline=deadline, tunes=True)
    sizes = iter([Scale(0.25, RATES, 0.1), Scale(0.125, RATES, 0.2), Scale(1.0, RATES, 0.3)])
    monkeypatch.setattr(advise, "scale_of", lambda *args, **more: next(sizes))
    assert [advise.choose_and_save_scale(load, context).length for _ in range(3)] == [
        0.25,
        0.25,
        1.0,
    ]


def test_the_answer_says_which_candidates_ran_at_several_rates() -> None:
    """It announced three rates each, and the budget had ended after the first."""
    own, other = made("BSP", 1), made("ASP", 1)
    once = [TunedCandidate(known, 0.1, None, 1) for known in (own, other)]
    assert rates_notes(once, Scale(1.0, (1.0,), None)) == []
    (none,) = rates_notes(once, Scale(1.0, RATES, None))
    assert none.startswith("No learning rate was tuned, because the budget ended before: ")
    several = [once[0]._replace(tried=2), once[1]]
    assert rates_notes(several, Scale(1.0, RATES, None)) == [
        "Up to 2 learning rates ran for 1 of 2 candidates (BSP); the others have the configured one."
    ]


def test_a_server_without_a_limit_is_said_if_workers_have_one() -> None:
    links = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0")

    def notes(*texts: str) -> list[str]:
        fixed = ("runtime=sim", "cluster=homogeneous", *texts)
        _, config, plan = candidates.with_effect(fixed, None)
        return server_link_notes(
            Candidate(Rule(name="", overrides="", why=""), (), config, plan, "")
        )

    (note,) = notes("sync=asp", *links)
    assert note.endswith("add cluster.server_bandwidth_mbit_s=100.")
    assert not notes("sync=asp")
    assert not notes("sync=asp", *links, "cluster.server_bandwidth_mbit_s=100")
    assert not notes("sync=bsp", "topology=all_reduce", *links)


@pytest.mark.parametrize(
    ("typed", "places"),
    [
        (["cluster=one_slow"], ["here, in virtual time", "here, emulated"]),
        (["cluster=one_slow", "runtime=sim"], ["here, in virtual time"]),
        (["cluster=one_slow", "runtime=local"], ["here, emulated"]),
        (["cluster=real"], ["here"]),
    ],
)
def test_a_declared_cluster_runs_in_virtual_time_unless_a_runtime_was_typed(
    typed: list[str], places: list[str]
) -> None:
    virtual = [*(text for text in typed if not text.startswith("runtime")), "runtime=sim"]
    follows = NextCommands(CommandLine(("advise",)), virtual, typed, Path("hosts"))
    found = follows.commands_here(["sync=asp"])
    assert [where for where, _ in found] == places
    for where, command in found:
        assert ("runtime=sim" in command) == ("virtual" in where)


# --- leaving a worker out
# ---------------------------------------------------------------------------------------------

SPEC = {
    "compute": [1.0, 1.0, 4.0],
    "link": [1.0, 1.0, 2.0],
    "node": [0, 0, 1],
    "exchange_s": 0.1,
    "events": [],
}
SPEC |= {"bandwidth_mbit_s": 10.0, "server_bandwidth_mbit_s": None, "num_workers": 3}


def racer(sync: str, compute: str, time_s: float) -> Racer:
    """A candidate on a cluster without links to wait for."""
    texts = (f"sync={sync}", f"cluster.compute={compute}", "cluster.exchange_s=0", "runtime=sim")
    _, config, plan = candidates.with_effect((*texts, "cluster=homogeneous"), None)
    rule = candidates.Rule(name=sync, overrides="", why="typed")
    return Racer(
        candidates.Candidate(rule, (), config, plan, ""),
        time_s,
        (1.0,),
        0.1,
        (1, 2, 3),
    )


def test_a_worker_is_left_out_if_a_barrier_without_it_is_faster() -> None:
    """Five workers behind a barrier take 5/c steps per step time, four without the slowest take 4:
    it pays if c < 5/4.
    """
    racers = [racer("bsp", "[1,1,1,1,5]", 40.0)]
    found = leave_out_of(racers, lambda: False, lambda racers, cluster: 10.0, 0.1)
    assert found is not None
    assert (found.worker, found.with_s, found.is_advised) == (4, 40.0, True)
    assert found.pays_from == pytest.approx(0.8, rel=0.04)
    said = found.sentence()
    assert said.startswith(
        "leave out worker 4: with it 40 s, without it 10 s in 3 runs; keeping it is faster if its speed is at least 0.8"
    )


def test_a_worker_is_not_left_out_for_a_prediction_or_for_one_evaluation() -> None:
    racers = [racer("bsp", "[1,1,1,1,5]", 40.0)]
    found = leave_out_of(racers, lambda: False, not_run, 0.1)
    assert found is not None
    assert found.without_s == pytest.approx(10.0, rel=0.01)
    assert not found.is_advised
    said = found.sentence()
    assert said.startswith("undecided about worker 4: with it 40 s, without it 10 s as predicted; ")
    assert said.endswith("; no time was left for runs without it")
    for without_s, is_advised in ((39.9, False), (39.8, True)):
        found = leave_out_of(racers, lambda: False, lambda *args, own=without_s: own, 0.1)
        assert found is not None
        assert found.is_advised == is_advised
        assert ("within one evaluation interval, 0.1 s" in found.sentence()) != is_advised


def not_run(racers: Sequence[Racer], cluster: dict) -> None:
    """There is no time for runs without the worker."""


def test_runs_without_a_worker_count_more_than_the_prediction() -> None:
    """Learning needs fewer steps with fewer workers, which no prediction knows."""
    asked: list[tuple[list[Racer], dict]] = []

    def race_on(racers: Sequence[Racer], cluster: dict) -> float:
        asked.append((list(racers), cluster))
        return 15.0

    asp, bsp = racer("asp", "[1,1,1,1,5]", 20.0), racer("bsp", "[1,1,1,1,5]", 40.0)
    found = leave_out_of([asp], lambda: False, race_on, 0.1)
    assert found is not None
    assert (found.is_advised, found.without_s, found.runs) == (True, 15.0, 3)
    assert found.sentence().startswith(
        "leave out worker 4: with it 20 s, without it 15 s in 3 runs"
    )
    leave_out_of([asp, bsp], lambda: False, race_on, 0.1)
    assert [racers for racers, _ in asked] == [[asp], [asp, bsp]]
    assert all(cluster["compute"] == [1, 1, 1, 1] for _, cluster in asked)


def test_a_worker_is_kept_where_another_method_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous workers take 4 + 1/5 steps per step time together, and four take 4."""
    monkeypatch.setattr("ashl.planning.predict.CYCLES", 128)  # a forecast in full length
    bsp, asp = racer("bsp", "[1,1,1,1,5]", 40.0), racer("asp", "[1,1,1,1,5]", 20.0)
    found = leave_out_of([asp, bsp], lambda: False, not_run, 0.1)
    assert found is not None
    assert found.without_s == pytest.approx(10.0, rel=0.01)
    alone = leave_out_of([asp], lambda: False, not_run, 0.1)
    assert alone is not None
    assert (alone.is_advised, alone.pays_from) == (False, None)
    assert alone.without_s == pytest.approx(21.0, rel=0.02)
    assert "worker 4: with it 20 s, without it 21" in alone.sentence()
    assert leave_out_of([asp], lambda: True, not_run, 0.1) is None


def test_on_a_profiled_cluster_a_worker_is_left_out_too(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile of all workers stayed in the runs without one of them, which failed. The plan
    without a profile begins with a stage that measures one.
    """
    sim = ("runtime=sim", "tracking=none")
    assert main(["profile", "-q", *sim, "cluster=one_slow", "run.dir=measured"]) == 0
    typed = (*sim, "cluster=profile", "profile=measured/profile.json")
    _, config, plan = candidates.with_effect((*typed, "schedule=ashl"), None)
    own = Candidate(Rule(name="ASHL", overrides="schedule=ashl", why=""), (), config, plan, "")
    context: Any = SimpleNamespace(folder=Path("study"), fixed=typed)
    context._replace = lambda **changes: SimpleNamespace(**{**vars(context), **changes})
    settings = list[Setting]()
    monkeypatch.setattr(
        contest, "run_grid", lambda grid, *rest, **more: settings.extend(grid.settings)
    )

    def race_on(racers: Sequence[Racer], cluster: dict) -> None:
        contest.time_on_cluster(racers, cluster, Scale(1.0, (1.0,), None), context)

    shares = (1.0, *(0.0 for _ in plan.stages[1:]))
    found = leave_out_of([Racer(own, 40.0, shares, 0.1, (1,))], lambda: False, race_on, 0.1)
    assert found is not None
    assert found.worker == 3
    assert found.without_s is not None
    (setting,) = settings
    assert compile_plan(setting.config, None, []).num_workers == 3
    assert not any(text.startswith("profile=") for text in setting.overrides)


def test_the_cluster_without_a_worker_has_its_lists_shortened() -> None:
    measured = {**SPEC, "up_bytes_s": [3.0, 1.0, 2.0], "all_reduce": {"latency_s": 1.0}}
    fewer = without_worker(measured, 1)
    assert (fewer["compute"], fewer["up_bytes_s"], fewer["num_workers"]) == (
        [1.0, 4.0],
        [3.0, 2.0],
        2,
    )
    assert fewer["all_reduce"] is None
    assert workers_to_consider(measured) == [2, 1]


# --- from the command line
# --------------------------------------------------------------------------------------------

TINY = [
    "cluster=one_slow",
    "model.hidden=[8]",
    "tracking=none",
    "run.dir=study",
    "runtime=sim",
    "stop.epochs=8",
]


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (
            ["--target", "1.5"],
            2,
            "--target 1.5 is not an accuracy; give a share from 0 to 1, for example --target 0.9",
        ),
        (["sync=bsp,asp"], 2, "sync=bsp,asp gives several values"),
        (
            ["profile=broken.json"],
            2,
            "profile=broken.json is no usable profile: line 1 is not JSON",
        ),
        (
            ["runtime=sim", "profile=other.json"],
            2,
            "2 workers and the cluster has 4; set cluster.num_workers=2",
        ),
        (
            ["runtime=sim", "cluster=profile", "profile=other.json"],
            2,
            "the model cnn and this one is mlp",
        ),
        (
            ["runtime=sim", "runtime.gradients=false"],
            2,
            "runtime.gradients=false: no model is trained",
        ),
        (
            ["cluster=real", "runtime=sim"],
            2,
            "cluster=real: declares no costs, which runtime=sim needs",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    args: list[str], code: int, sentence: str, workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    Path("broken.json").write_text("{")
    Path("other.json").write_text(replace(profile(), model="cnn").to_json())
    assert main(["advise", *args]) == code
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
    assert "bug in ashl" not in err


def test_nothing_is_left_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "RULES", RULES[:1])
    with pytest.raises(
        UsageError,
        match=(
            r"nothing is left to compare: only as typed is possible with .*sync=rennala \(BSP: the command"
            r" line has"
        ),
    ):
        select_candidates((*TINY, "sync=rennala"), None, lambda done, size, name: None)


def written(
    slots: int, jobs: Sequence[Job], show: Any, unwanted: Callable[[Job], bool]
) -> Iterator[Job]:
    """Runs that are made up: ASP takes 1 s and BSP 2 s at a rate of 0.1, both longer at others, and
    a bit by seed.
    """
    for job in jobs:
        if unwanted(job):
            continue
        choices = job.config["choices"]
        sync, rate, seed = (
            choices.get("sync", "bsp"),
            job.config["optimizer"]["lr"],
            job.config["seed"],
        )
        reach_s = (
            {"asp": 1.0, "bsp": 2.0}[sync] * (1 + abs(math.log(rate / 0.1))) * (1 + 0.01 * seed)
        )
        stages = [{"name": sync, "start_s": 0.0, "end_s": reach_s, "steps": 100}]
        values, target = {"optimizer.lr": rate}, job.config["stop"]["target_accuracy"]
        run = {
            "reach_s": reach_s,
            "target": target,
            "choices": {"sync": sync},
            "values": values,
            "every_s": 0.01,
        }
        write_run(job.folder, seed=seed, stages=stages, **run)
        yield job


def test_the_answer_of_a_race_and_the_same_command_again(
    workplace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in (BSP, "ASP", "BSP Top-K"))
    )
    monkeypatch.setattr(sweep, "run_all", written)
    monkeypatch.setattr(leave_out, "predicted_s", lambda own, spec: own.time_s)  # anywhere
    command = ["advise", *TINY, "--target", "0.9", "-q"]
    assert main(command) == 0
    out = capsys.readouterr().out
    record = jsonl.read_json(Path("study/advice.json"))
    assert record is not None
    assert out.startswith("ASP is first: time to 90.0 % accuracy 1.02 s (median of 3 seeds")
    assert (
        record["winner"]["name"],
        record["winner"]["optimizer.lr"],
        record["winner"]["seeds"],
    ) == ("ASP", 0.1, 3)
    assert (record["runner_up"]["name"], record["baseline"]["name"], record["separated"]) == (
        "BSP",
        "BSP",
        True,
    )
    assert record["probability"] > 0.99
    assert record["leave_out"]["worker"] == 3
    assert "worker 3: with it 1.02 s, without it 1.02 s in 3 runs" in out
    assert {own["name"] for own in record["candidates"]} == {"BSP", "ASP"}
    assert [out["name"] for out in record["left_out"]] == ["BSP Top-K"]
    end = (
        r"stop.target_accuracy=0.9 stop.target_consecutive_evals=2 eval.every_s=[0-9.]+ sync=asp"
        r" optimizer.lr=0.1$"
    )
    assert re.search(end, record["command"])
    assert json.loads(Path("study/plan.json").read_text())["stages"][0]["name"] == "asp"
    before = {path: path.stat().st_mtime_ns for path in Path("study").rglob("summary.json")}
    assert (
        len(before) == 2 * 3 + 3 + 2 * 3 + 3
    )  # rates in the tuning, again with another seed except one, seeds after it, without a worker
    assert main([*command, "--budget", "200"]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("study").rglob("summary.json")} == before
    said, labelled = capsys.readouterr().out.split("\n\n")[:2]
    report = re.sub("</?code>", "", unescape(Path("study/report.html").read_text()))
    texts = [line[8:] for line in labelled.splitlines() if not line.startswith(("plan", "report"))]
    assert len(texts) >= 5
    for text in [*said.splitlines(), *texts]:
        assert text in report
    assert "this pays from 0.3 on" in report  # and with it the omitted candidates


def test_a_dry_run_says_what_the_race_takes_here(
    workplace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run listed candidates alone. Its figures bound the runs of the race that the same
    command then runs.
    """
    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in (BSP, "ASP"))
    )
    monkeypatch.setattr(sweep, "run_all", written)
    monkeypatch.setattr(leave_out, "predicted_s", lambda own, spec: own.time_s)
    command = ["advise", *TINY, "--target", "0.9", "-q", "--jobs", "2"]
    assert main([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert not Path("study").exists()
    took = re.search(
        r"About ([0-9.]+) s on this machine, 2 runs at a time; a run takes up to ([0-9.]+) s", out
    )
    assert took is not None
    race_s, run_s = map(float, took.groups())
    assert START_S <= run_s < race_s < 26 * run_s / 2  # 26 runs of the race at most
    assert "The race ends with --budget 300 s at the latest" in out
    assert main(command) == 0
    runs = len(list(Path("study").rglob("summary.json")))
    assert 10 < runs <= 26 + 8
    capsys.readouterr()
    assert main([*command, "--dry-run"]) == 0
    assert f"{runs} runs have already ended, in study." in capsys.readouterr().out


def test_a_key_without_effect_in_a_candidate_is_dropped_there_and_said(
    workplace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ashl train` refuses such a key; a candidate ran with it, or was left out for it."""
    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in (BSP, "ASP", "BSP Top-K"))
    )
    monkeypatch.setattr(sweep, "run_all", written)
    monkeypatch.setattr(leave_out, "predicted_s", lambda own, spec: own.time_s)
    stale, nowhere = "aggregate.staleness_discount=0.5", "cluster.bandwidth_mbit_s=20"
    command = ["advise", *TINY, "--target", "0.9", stale, nowhere]
    assert main(command) == 0
    captured = capsys.readouterr()
    record = jsonl.read_json(Path("study/advice.json"))
    assert record is not None
    for note in (
        f"{stale} was removed from BSP: it needs pushes that may be stale, for example with sync=asp.",
        f"{nowhere} was removed from every candidate: it needs cluster.exchange_s=null",
    ):
        assert note in captured.out + captured.err
        assert any(said.startswith(note) for said in record["notes"])
        assert note in unescape(Path("study/report.html").read_text())
    sweep_of = jsonl.read_json(Path("study/sweep.json"))
    assert sweep_of is not None
    for setting in sweep_of["settings"]:
        assert nowhere not in setting["overrides"]
        assert (stale in setting["overrides"]) == (setting["label"] in ("ASP", "as typed"))
    assert nowhere not in record["command"]
    assert stale in record["command"]  # ASP leads
    assert (
        main([*command, "--dry-run"]) == 0
    )  # planned candidates are kept with what was dropped of them
    assert f"{stale} was removed from BSP" in capsys.readouterr().out


def raced(reach_s: dict[str, float | None], only: Callable[[Job], bool] = lambda job: True) -> Any:
    """Runs that are made up, of which those that are not `only` were cut off by the budget. Without
    a time to the target, a run comes to 80 %.
    """

    def run_all(
        slots: int, jobs: Sequence[Job], show: Any, unwanted: Callable[[Job], bool]
    ) -> Iterator[Job]:
        for job in jobs:
            if unwanted(job) or not only(job):
                continue
            sync, target = job.config["choices"]["sync"], job.config["stop"]["target_accuracy"]
            stages = [{"name": sync, "start_s": 0.0, "end_s": reach_s[sync] or 2.0, "steps": 100}]
            run = {
                "reach_s": reach_s[sync],
                "target": target,
                "choices": {"sync": sync},
                "stages": stages,
            }
            rate = {"optimizer.lr": job.config["optimizer"]["lr"]}
            write_run(job.folder, seed=job.config["seed"], values=rate, every_s=0.1, **run)
            yield job

    return run_all


def advised(
    monkeypatch: pytest.MonkeyPatch, rules: str, scale: Scale, run_all: Any, *args: str
) -> dict[str, Any]:
    """The record of a race of these rules at a scale."""
    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in rules.split(", "))
    )
    monkeypatch.setattr(advise, "scale_of", lambda *args, **more: scale)
    monkeypatch.setattr(sweep, "run_all", run_all)
    monkeypatch.setattr(leave_out, "predicted_s", lambda own, spec: own.time_s)
    assert main(["advise", *TINY, *args, "-q", "--debug"]) == 0
    record = jsonl.read_json(Path("study/advice.json"))
    assert record is not None
    return record


@pytest.mark.parametrize("target", [0.9, 0.6, 0.5])
def test_short_runs_are_judged_by_the_target_that_was_asked_for(
    target: float, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all = raced({"bsp": 2.0, "asp": 1.0})
    record = advised(
        monkeypatch, "BSP, ASP", Scale(0.125, (1.0,), 0.1), run_all, "--target", f"{target:g}"
    )
    assert record["measure"] == f"time to {100 * target:.1f} % accuracy"
    assert (record["missing"], record["separated"], record["needed_budget_s"]) == ([], True, None)
    assert "stop.target_accuracy" not in " ".join(record["notes"])


def test_a_target_that_short_runs_do_not_reach_is_no_answer(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, run_all = Scale(0.125, (1.0,), 0.1), raced({"bsp": None, "asp": None})
    record = advised(monkeypatch, "BSP, ASP", scale, run_all, "--target", "0.9", "--budget", "40")
    assert record["headline"].startswith("not enough budget for an answer; so far ")
    assert " leads" not in record["headline"]
    assert (
        "none reached 90.0 % accuracy in 12 % of the steps, so the ranking is"
        in record["missing"][0]
    )
    assert record["needed_budget_s"] >= 60
    said = f"--budget {record['needed_budget_s']:.0f} should be enough."
    assert said in unescape(Path("study/report.html").read_text())


def test_a_budget_for_one_run_and_for_none(
    workplace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = Scale(1.0, (1.0,), 0.1)

    def only(job: Job) -> bool:
        return job.config["seed"] == 1 and job.config["choices"]["sync"] == "bsp"

    record = advised(monkeypatch, "BSP, ASP", scale, raced({"bsp": 2.0}, only), "--target", "0.9")
    assert record["headline"].startswith(
        "not enough budget for an answer; so far BSP: time to 90.0 % accuracy 2 s"
    )
    assert record["missing"][0] == "only one candidate has finished"
    monkeypatch.setattr(sweep, "run_all", raced({}, only=lambda job: False))
    assert main(["advise", *TINY, "run.dir=other", "--target", "0.9", "--budget", "40", "-q"]) == 1
    problem = (
        r"ashl: not enough budget for an answer: no run ended in 40 s; give --budget [0-9]+"
        r": the same command continues"
    )
    assert re.match(problem, capsys.readouterr().err)


def test_a_budget_that_is_used_up_leaves_time_to_copy_to_mlflow(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow takes seconds to start; one second left the runs out."""
    waits: list[float] = []
    monkeypatch.setattr(advise.Deadline, "left_s", 0.0)
    copier = SimpleNamespace(finish=lambda wait_s: waits.append(wait_s) or (None, None))
    monkeypatch.setattr(sweep, "Copier", lambda *_: copier)
    monkeypatch.setattr(sweep, "run_all", raced({}, only=lambda job: False))
    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in (BSP, "ASP"))
    )
    assert (
        main(["advise", *TINY, "tracking=mlflow", "--target", "0.9", "--budget", "40", "-q"]) == 1
    )
    assert waits
    assert min(waits) >= 30


@pytest.mark.parametrize("seeds", [1, 2])
def test_less_than_three_seeds_of_the_first_two_are_no_answer(
    seeds: int,
    workplace: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_all = raced({"bsp": 2.0, "asp": 1.0}, only=lambda job: job.config["seed"] <= seeds)
    record = advised(monkeypatch, "BSP, ASP", Scale(1.0, (1.0,), 0.1), run_all, "--target", "0.9")
    assert record["headline"].startswith(
        "not enough budget for an answer; so far ASP: time to 90.0 % accuracy"
    )
    assert record["missing"] == [f"the first two have {seeds} and {seeds} of at least 3 seeds"]
    assert not record["separated"]
    out = capsys.readouterr().out
    assert "workers undecided whether to leave one out, as long as there is no answer" in out
    more = f"next: ashl advise --budget {record['needed_budget_s']:.0f} --target 0.9 cluster="
    assert more in out


def test_candidates_that_never_ran_are_counted_and_named(
    workplace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only(job: Job) -> bool:
        return job.config["choices"]["sync"] in ("bsp", "asp")

    rules, scale = "BSP, ASP, SSP, FedBuff, Rennala", Scale(1.0, (1.0,), 0.1)
    record = advised(
        monkeypatch, rules, scale, raced({"bsp": 2.0, "asp": 1.0}, only), "--target", "0.9"
    )
    assert set(record["never_ran"]) == {"SSP", "FedBuff", "Rennala"}
    assert record["missing"] == ["2 of 5 candidates ran, of at least 3"]
    note = "3 of 5 candidates never ran, because the budget ended before: "
    assert note in capsys.readouterr().out
    assert note in unescape(Path("study/report.html").read_text())
    record = advised(
        monkeypatch,
        "BSP, ASP, SSP",
        scale,
        raced({"bsp": 2.0, "asp": 1.0}, only),
        "--target",
        "0.9",
    )
    assert (record["never_ran"], record["missing"]) == (
        ["SSP"],
        [],
    )  # enough for an answer, and said all the same
    assert any(note.startswith("1 of 3 candidates never ran") for note in record["notes"])


def test_a_target_that_nobody_reaches_names_who_came_closest(
    workplace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(
        slots: int, jobs: Sequence[Job], show: Any, unwanted: Callable[[Job], bool]
    ) -> Iterator[Job]:
        for job in jobs:
            sync = job.config["choices"]["sync"]
            best = {"test_accuracy": {"asp": 0.8, "bsp": 0.7}[sync], "time_s": 1.0}
            run = {
                "reach_s": None,
                "choices": {"sync": sync},
                "values": {"optimizer.lr": 0.1},
                "best": best,
            }
            write_run(job.folder, seed=job.config["seed"], **run)
            yield job

    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in (BSP, "ASP"))
    )
    monkeypatch.setattr(sweep, "run_all", never)
    assert main(["advise", *TINY, "optimizer.lr=0.1", "--target", "0.9", "-q"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ashl: no candidate reached 90.0 % accuracy in ")
    assert "; ASP came closest, with 80.0 %; lower the target, allow longer runs" in err
    assert err.count("\n") == 1


@pytest.mark.slow  # a minute on a busy machine
def test_a_real_race_and_a_target_that_nobody_reaches(
    workplace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in (BSP, "ASP"))
    )
    assert main(["advise", *TINY, "--target", "0.8", "--budget", "90"]) == 0
    record = jsonl.read_json(Path("study/advice.json"))
    assert record is not None
    assert record["winner"]["seeds"] >= 3
    assert record["expected"]["bytes_up"] > 0
    assert record["command"] in capsys.readouterr().out
    assert main([*shlex.split(record["command"])[1:], "--dry-run"]) == 0
    capsys.readouterr()
    unreached = [
        "--target",
        "0.999",
        "--budget",
        "90",
        "-q",
        "optimizer.lr=0.1",
        "stop.epochs=1",
        "run.dir=other",
    ]
    assert main(["advise", *TINY, *unreached]) == 1
    err = capsys.readouterr().err
    assert "no candidate reached 99.9 % accuracy" in err
    assert "came closest, with" in err
