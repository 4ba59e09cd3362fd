"""Specs become options, each made once; plans with stages that do not fit together are an error."""

import json
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.planning import instantiate
from ashl.planning.compile_plan import compile_plan, prepare_plan
from ashl.planning.instantiate import assemble_job
from ashl.stage.contract import PULLS
from ashl.sync.bsp import BSP
from ashl.sync.rennala import Rennala
from ashl.topology.parameter_server import ParameterServer
from tests.conf_option import values
from tests.support import planned


def overrides(*more: str) -> list[str]:
    return [
        "runtime=sim",
        "tracking=none",
        "dataset=digits",
        "model=mlp",
        "model.hidden=[8]",
        *more,
    ]


def made(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts what is made from now on, by group and spec."""
    counts: Counter = Counter()
    construct = instantiate.construct

    def counting(spec: Any, where: str, *rest: Any) -> Any:
        counts[where, json.dumps(spec, sort_keys=True)] += 1
        return construct(spec, where, *rest)

    monkeypatch.setattr(instantiate, "construct", counting)
    return counts


@pytest.mark.parametrize(
    "line", ["", "sync=bsp topology=all_reduce", "schedule=ashl_plus schedule.shl_scale=1"]
)
def test_a_run_makes_each_option_once(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = made(monkeypatch)
    plan, parts, data = prepare_plan(compose(overrides(*line.split())))
    assert counts["cluster", json.dumps(plan.cluster, sort_keys=True)] == 1
    assert set(counts.values()) == {1}, "planning"
    before = dict(counts)
    job = assemble_job(plan, "cpu", parts, data)
    assert counts == before, "what is planned is what runs"
    assert job.parts is parts
    assert len({id(stage.aggregate) for stage in job.stages}) == 1, "equal specs share an option"


def test_true_is_not_one() -> None:
    options = instantiate.OptionFactory(())
    spec = {
        "_target_": "ashl.sync.ripples_smart.RipplesSmart",
        "local_steps": 1,
        "group_size": 2,
        "threshold": 1,
    }
    assert options.get_option("sync", {**spec, "inter_intra": True}) is options.get_option(
        "sync", {**spec, "inter_intra": True}
    )
    with pytest.raises(UsageError, match="threshold=true is not possible"):
        options.get_option("sync", {**spec, "inter_intra": True, "threshold": True})


LOCAL = "topology=all_reduce optimizer.momentum=0.9 sync=local_sgd"


def given(folder: Path, *lines: str) -> str:
    """A plan of several runs' stages, one after the other."""
    plans = [planned(*overrides(*line.split())) for line in lines]
    stages = [stage for plan in plans for stage in asdict(plan)["stages"]]
    stages[:-1] = [{**stage, "until": {"epochs": 1}} for stage in stages[:-1]]
    path = folder / "plan.json"
    path.write_text(json.dumps({**asdict(plans[0]), "stages": stages}))
    return f"plan={path}"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ("sync=bsp", "sync=bsp topology=all_reduce"),
            (
                "stage bsp: the topology, or a key of it, differs from that of stage bsp, and a"
                " worker's state cannot be converted; take one topology for the whole run"
            ),
        ),
        (
            ("topology=gossip sync=d_psgd", "topology=gossip sync=ad_psgd"),
            "some stages need a coordinator",
        ),
        ((LOCAL, f"{LOCAL} sync=bsp"), "stage bsp: cannot keep .* differs between workers"),
        (
            ("sync=bsp optimizer.momentum=0", "sync=bsp optimizer.momentum=0.9"),
            "stage bsp: cannot keep .* has 1 moments",
        ),
    ],
)
def test_stages_that_no_rank_can_go_through_are_refused(
    lines: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        planned(*overrides(*lines[0].split(), given(tmp_path, *lines)))


@pytest.mark.parametrize(
    ("line", "change", "says"),
    [
        (
            "topology=gossip sync=d_psgd",
            {"compression": "topk"},
            "stage d_psgd: compression=topk: needs compressed updates",
        ),
        (
            "sync=bsp",
            {"sync": "asylpg", "compression": "topk"},
            "stage bsp: sync=asylpg: needs an unbiased codec",
        ),
    ],
)
def test_what_a_given_plan_says_is_checked_as_well(
    line: str, change: dict, says: str, tmp_path: Path
) -> None:
    """A stage of a plan that compressed whole models compressed nothing, and ended well."""
    plan = planned(*overrides(*line.split()))
    specs = {group: values(group, name) for group, name in change.items()}
    path = tmp_path / "plan.json"
    path.write_text(replace(plan, stages=(replace(plan.stages[0], **specs),)).to_json())
    with pytest.raises(UsageError, match=says):
        planned(*overrides(*line.split(), f"plan={path}"))


def test_a_topology_that_carries_no_pulls_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterServer, "supports", ParameterServer.supports - {PULLS})
    with pytest.raises(
        UsageError, match="needs compressed pulls, and topology=parameter_server does not"
    ):
        planned(*overrides("compression=topk", "topology.pull_ratio=0.1"))


def test_a_run_is_named_by_its_given_plan(tmp_path: Path) -> None:
    """The name does not come from the schedule that the run would have without the plan."""
    plan = planned("sync=bsp")
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert planned(f"plan={tmp_path / 'plan.json'}").name == plan.name == "bsp-mlp-digits"
    assert planned(f"plan={tmp_path / 'plan.json'}", "name=mine").name == "mine"


def test_a_drawn_cluster_is_the_stated_distribution_drawn_with_the_seed() -> None:
    wide = overrides("sync=asp", "cluster=random", "runtime.gradients=false", "stop.steps=1")
    many = compile_plan(compose([*wide, "cluster.num_workers=400"])).cluster
    logs = [math.log(factor) for factor in many["compute"]]
    assert fmean(logs) == pytest.approx(0.0, abs=0.075)  # three standard errors
    assert stdev(logs) == pytest.approx(0.5, abs=0.055)
    few = compile_plan(compose([*wide, "cluster.num_workers=3"])).cluster
    assert few["compute"] == many["compute"][:3]
    assert (
        few["compute"]
        != compile_plan(compose([*wide, "cluster.num_workers=3", "seed=1"])).cluster["compute"]
    )
    scaled = compile_plan(compose([*wide, "cluster.compute=[2,2,2]"])).cluster
    assert scaled["compute"] == pytest.approx([2 * factor for factor in few["compute"]])
    assert {**many, "compute": 0, "num_workers": 0} == {**few, "compute": 0, "num_workers": 0}


def test_a_given_plan_brings_the_cluster_that_its_seed_draws(tmp_path: Path) -> None:
    wide = overrides("sync=asp", "cluster=random", "cluster.num_workers=2", "stop.steps=1")
    plan = compile_plan(compose([*wide, "seed=5"]))
    (tmp_path / "plan.json").write_text(plan.to_json())
    given = compile_plan(compose([*wide, f"plan={tmp_path}/plan.json"]))
    assert (given.seed, given.cluster) == (5, plan.cluster)


@pytest.mark.parametrize(
    ("rule", "quorum", "says"),
    [
        (Rennala, 0, "is 0; return the number of pushes in a merge"),
        (Rennala, True, "is True; return"),
        (
            BSP,
            5,
            (
                "the quorum of 'ashl.sync.bsp.BSP' is 5; return the number of pushes in a merge, a"
                " whole number from 1, at most the 4 workers"
            ),
        ),
    ],
)
def test_a_quorum_that_cannot_be_is_refused(
    rule, quorum, says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "quorum", lambda self, num_workers: quorum, raising=False)
    with pytest.raises(UsageError, match=says):
        planned(*overrides(f"sync={rule.__name__.lower()}"))


def test_a_quorum_may_take_several_pushes_of_a_worker_where_nobody_waits() -> None:
    assert planned(*overrides("sync=rennala", "sync.batch=9")).stages


@pytest.mark.parametrize("topology", ["all_reduce", "parameter_server"])
def test_a_round_longer_than_the_run_is_predicted_as_it_is_cut(topology: str) -> None:
    long = [
        "cluster=homogeneous",
        f"topology={topology}",
        "sync=local_sgd",
        "stop.steps=40",
        "cluster.jitter=0",
    ]
    cut, whole = (planned(*long, f"sync.local_steps={steps}") for steps in (10**7, 10))
    assert cut.predicted_s == whole.predicted_s
    assert cut.stages[0].workers[0].local_steps == 10**7


def test_unpaced_ranks_beyond_the_cores_are_noted_once(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    of = ["cluster=real", "runtime=local", "sync=bsp"]
    (note,) = [note for note in planned(*of, "cluster.num_workers=2").notes if "share" in note]
    assert note.startswith(
        "3 ranks share 2 cores of this host: times measured here are not those of a cluster"
    )
    for other in (
        ["topology=all_reduce", "cluster.num_workers=2"],
        ["cluster=mixed"],
        ["cluster=mixed", "runtime=sim"],
    ):
        assert not [note for note in planned(*of, *other).notes if "share" in note], other


def test_ringleader_says_that_a_round_has_n_whole_steps() -> None:
    of = ["runtime=sim", "schedule=single"]
    (note,) = [note for note in planned(*of, "sync=ringleader").notes if "whole steps" in note]
    assert "sync=ringleader takes 4 whole steps in a round" in note
    assert not [note for note in planned(*of, "sync=asp").notes if "whole steps" in note]


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ("sync=bsp compression=topk", "topology.pull_ratio=0.1"),
        ("sync=asp compression=qsgd", None),  # a pull cannot go by this codec
        ("schedule=ashl", "topology.pull_ratio=0.1"),
        ("schedule=ashl_plus", None),  # it brings the ratio of pulls
        ("sync=bsp", None),
        ("sync=bsp compression=topk topology=all_reduce", None),
        ("sync=bsp compression=topk compression.ratio=0.9", None),  # pushes are as long as without
        ("schedule=ashl compression=none", None),
    ],
)
def test_dense_pulls_beside_compressed_pushes_are_said(overrides: str, fix: str | None) -> None:
    def said(*more: str) -> list[str]:
        return [
            note
            for note in planned(*overrides.split(), *more).notes
            if "topology.pull_ratio" in note
        ]

    notes = said()
    assert len(notes) == (fix is not None)
    if fix is not None:
        assert fix in notes[0]
        assert not said(fix)
