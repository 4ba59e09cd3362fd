"""Stages in their order: where they give way, what goes over a border, and that nothing is lost
there.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from ashl.compression.gtopk import GTopK
from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.plan.plan import Plan
from ashl.run import train as run
from ashl.run.monitor import Monitor
from ashl.runtime.records import StageEnd
from tests.conf_option import conf_option
from tests.support import planned, simulated

BASE = ("model.hidden=[16]", "cluster=ashl_paper", "optimizer.lr=0.05", "stop.epochs=10")
COSINE = ("optimizer.schedule=cosine",)
ORDER = {
    "ashl": ["profile", "ahl", "shl"],
    "ashl_reversed": ["profile", "shl", "ahl"],
    "sync_first": ["profile", "bsp", "ahl", "shl"],
    "qsr_tail": ["profile", "ahl", "shl", "qsr"],
    "post_local": ["bsp", "local_sgd"],
}
MORE = {  # so that every stage is reached in ten epochs
    "ashl": ("schedule.loss_switch=1.0",),
    "ashl_reversed": ("schedule.loss_switch=1.0",),
    "sync_first": ("schedule.loss_switch=1.0",),
    "qsr_tail": ("schedule.loss_switch=1.0", "schedule.shl_epochs=1.5"),
    "post_local": ("schedule.switch_epochs=2",),
}


def scheduled(name, *overrides):
    return simulated(*BASE, f"schedule={name}", *MORE[name], *overrides)


@pytest.fixture(scope="module", params=ORDER)
def ran(request):
    return request.param, scheduled(request.param, *COSINE, "eval.every_commits=1")


def test_stages_come_in_their_order(ran):
    name, run = ran
    stages = run.of("StageEnd")
    assert [s["name"] for s in stages] == ORDER[name]
    assert [s["stage"] for s in stages] == list(range(len(stages)))
    ends = [s["end_ns"] for s in stages]
    assert ends == sorted(set(ends))
    assert stages[-1]["reason"] == "epochs"


def test_they_give_way_where_their_rule_says(ran):
    """A stage ends at the first merge that meets its condition; then at most one push in flight of
    each other worker is merged.
    """
    _, run = ran
    begun = {"samples": 0, "end_ns": 0}
    for record, plan in zip(run.of("StageEnd")[:-1], run.plan.stages, strict=False):
        if plan.until:
            ((rule, bound),) = plan.until.items()
            assert record["reason"] == rule
            merges = [
                m for m, _ in run.snapshots if begun["end_ns"] < m["time_ns"] <= record["end_ns"]
            ]
            if rule == "epochs":
                holds = [(m["samples"] - begun["samples"]) / 1437 >= bound for m in merges]
            else:  # the fixture evaluates each merge
                models = [
                    model
                    for m, model in run.snapshots
                    if begun["end_ns"] < m["time_ns"] <= record["end_ns"]
                ]
                holds = [run.learner.evaluate(model)["train_loss"] <= bound for model in models]
            assert len(merges) - run.plan.num_workers <= holds.index(True) < len(merges)
        begun = record


@pytest.mark.parametrize("more", [(), ("eval.every_commits=1",)], ids=["each-epoch", "each-commit"])
def test_the_switch_follows_the_loss_of_the_global_model(more):
    """The running mean of minibatch losses came to the bound seconds after the model had."""
    ends = []
    for loss in ("evaluated", "running"):
        ran = simulated(
            *BASE, "schedule=ashl", "schedule.loss_switch=0.6", f"schedule.loss={loss}", *more
        )
        ends.append(ran.of("StageEnd")[1])
        low = [ran.learner.evaluate(model)["train_loss"] <= 0.6 for _, model in ran.snapshots]
        first_ns = ran.snapshots[low.index(True)][0]["time_ns"]
    evaluated, running = ends
    assert (evaluated["reason"], running["reason"]) == ("evaluated_loss", "loss")
    assert first_ns <= evaluated["end_ns"] < first_ns + 1e9  # work in flight still counts
    assert running["end_ns"] > evaluated["end_ns"]


def test_nothing_is_lost_at_a_stage_boundary(ran):
    _, run = ran
    borders = run.of("StageEnd")[:-1]
    assert all(sum(s["dropped_by"]) == 0 for s in borders)
    for border in borders:
        taken = sum(r["steps"] for r in run.of("Round") if r["stage"] <= border["stage"])
        assert border["steps"] == taken == sum(border["steps_by"])
    assert (
        sum(r["steps"] for r in run.of("Round") if not r["dropped"])
        == run.end["steps"]
        == sum(run.end["steps_by"])
    )


def test_a_stage_whose_end_nobody_has_heard_of_does_not_give_its_name_to_the_next_one(
    tmp_path, monkeypatch
):
    """Its home rank may be lost just then; what the summary has of later stages is theirs."""
    emit = Monitor.emit

    def heard(self, record):
        if not (isinstance(record, StageEnd) and record.name == "bsp"):
            emit(self, record)

    monkeypatch.setattr(Monitor, "emit", heard)
    chosen = [
        *BASE,
        *MORE["sync_first"],
        "schedule=sync_first",
        "runtime=sim",
        "tracking=none",
        f"run.dir={tmp_path}",
    ]
    assert run.run(compose(chosen, None), chosen, quiet=True).code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    stages = summary["stages"]
    assert [s["name"] for s in stages] == ["profile", "ahl", "shl"]
    assert sum(s["steps"] for s in stages) == summary["steps"]
    waits = [s["wait_share"] * (s["end_s"] - s["start_s"]) for s in stages]
    assert sum(waits) == pytest.approx(summary["wait_share"] * summary["time_s"], rel=1e-9)


# --- the hand-over
# --------------------------------------------------------------------------------------------------

LOCAL = (
    "schedule=post_local",
    "schedule.local_steps=1",
    "stop.epochs=4",
    "schedule.switch_epochs=2",
)


@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_momentum_is_handed_over_as_declared(topology):
    kept, reset = (
        simulated(*BASE, *LOCAL, f"topology={topology}", f"schedule.momentum={m}")
        for m in ("keep", "reset")
    )
    assert kept.sha256 != reset.sha256
    plain = "optimizer.momentum=0"
    a, b = (simulated(*BASE, *LOCAL, plain, f"schedule.momentum={m}") for m in ("keep", "reset"))
    assert a.sha256 == b.sha256  # there is none


KEEPING = {
    "topk": ("compression=topk", "compression.ratio=0.1"),
    "gtopk": ("compression=gtopk", "compression.ratio=0.02"),
    "fetch_sgd": (
        "compression=fetch_sgd",
        "compression.recovered_fraction=0.02",
        "compression.error=subtract",
    ),
    "fetch_sgd without a server": (
        "compression=fetch_sgd",
        "compression.recovered_fraction=0.02",
        "topology=all_reduce",
    ),
}


@pytest.mark.limit("schedule=post_local")
@pytest.mark.parametrize("codec", KEEPING)
def test_a_boundary_between_equal_stages_changes_nothing(codec: str) -> None:
    """Residuals of summed payloads were lost there, and 8 % of the workers' pushes with them."""
    same = (
        "model.hidden=[16]",
        "cluster=ashl_paper",
        "stop.steps=60",
        "optimizer.momentum=0",
        *KEEPING[codec],
    )
    border = ("schedule=post_local", "schedule.switch_epochs=0.5", "schedule.local_steps=1")
    kept, dropped = simulated(*same, *border), simulated(*same, *border, "schedule.residual=drop")
    whole = simulated(*same, "schedule=single", "sync=local_sgd", "sync.local_steps=1")
    assert [stage["merges"] > 5 for stage in kept.of("StageEnd")] == [True, True]
    assert kept.sha256 == whole.sha256 != dropped.sha256


def test_no_push_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a border from gradients to differences between models, at one rate: the sum of what came
    is what was applied and what is kept, in units of the model.
    """
    reduce, rate, run_state = GTopK.reduce, 0.05, []

    def noted(self, memory, bodies, weights, d):
        left, x = reduce(self, memory, bodies, weights, d)
        came = sum(
            self.decode(None, body, d)[1] * weight
            for body, weight in zip(bodies, weights, strict=True)
        )
        run_state.append((came, x, left))
        return left, x

    monkeypatch.setattr(GTopK, "reduce", noted)
    first = {"_target_": "ashl.sync.bsp.BSP", "exchange": "gradient"}
    monkeypatch.setattr(
        "ashl.schedule.post_local.bsp_stage",
        lambda choices, until: choices.stage("bsp", sync=first, until=until),
    )
    border = ("schedule=post_local", "schedule.switch_epochs=0.5", "schedule.local_steps=3")
    plain = (
        "optimizer.momentum=0",
        f"optimizer.lr={rate}",
        "compression=gtopk",
        "compression.ratio=0.02",
    )
    ran = simulated("model.hidden=[16]", "cluster=ashl_paper", "stop.steps=100", *border, *plain)
    merges = ran.of("StageEnd")[0]["merges"]
    assert 5 < merges < len(run_state) - 5
    units = [-rate if k < merges else 1.0 for k in range(len(run_state))]
    came, applied = (
        sum(unit * book[i] for unit, book in zip(units, run_state, strict=True)) for i in (0, 1)
    )
    torch.testing.assert_close(came, applied + run_state[-1][2], rtol=1e-4, atol=1e-5)
    assert float(run_state[merges - 1][2].norm()) * rate > 1e-3


def test_a_buffer_is_merged_at_a_stage_boundary(monkeypatch):
    """FedBuff as a first stage: three of a hundred may be left when its rule says so, and go in as
    a smaller merge.
    """
    bsp = {"_target_": "ashl.sync.fedbuff.FedBuff", "buffer": 100, "local_steps": 1}
    monkeypatch.setattr(
        "ashl.schedule.post_local.bsp_stage",
        lambda choices, until: choices.stage(
            "fedbuff", sync=bsp, local_steps=1, until={"seconds": 2.0}
        ),
    )
    ran = simulated(*BASE, *LOCAL)
    first = ran.of("StageEnd")[0]
    assert (first["name"], first["merges"], first["dropped_by"]) == ("fedbuff", 1, [0, 0, 0])
    assert first["steps"] == sum(r["steps"] for r in ran.of("Round") if r["stage"] == 0) > 3


# --- QSR
# --------------------------------------------------------------------------------------------------


def test_qsr_follows_the_rate():
    """H = max(H_base, ⌊(α/η)²⌋) at the last average's rate, and never more than h_max."""
    rule = conf_option("sync", "qsr", alpha=0.1, h_max=64)
    rates = (1.0, 0.1, 0.05, 0.03, 0.0125, 0.001, 1e-300, 0.0)
    assert [rule._steps_at_rate(4, lr) for lr in rates] == [4, 4, 4, 11, 64, 64, 64, 4]
    assert rule._steps_at_rate(100, 1e-3) == 100


def test_qsr_takes_the_rate_after_the_warm_up_for_that_in_it():
    """A tenth of the rate at first made H a hundred times as long, before anything was learned."""
    warm = ("optimizer.lr=0.1", "optimizer.warmup_epochs=1", "stop.steps=null", "stop.epochs=1.5")
    ran = simulated(*BASE, "sync=qsr", "sync.local_steps=2", "sync.alpha=0.2", *warm)
    assert {r["steps"] for r in ran.of("Round")} <= {2, 4, 1, 3}
    assert [r["steps"] for r in ran.of("Round") if r["rank"] == 0][:3] == [2, 4, 4]


def test_the_tail_grows_with_equal_cycles():
    """Workers with planned H = (H_1, …) all grow by the same factor, so that a barrier still finds
    them together.
    """
    ran = scheduled(
        "qsr_tail", *COSINE, "schedule.alpha=0.2", "planner=balanced", "schedule.h_max=32"
    )
    tail = [r for r in ran.of("Round") if r["stage"] == 3]
    by_rank = [
        [r["steps"] for r in tail if r["rank"] == rank and r["end_ns"] < ran.time_ns]
        for rank in range(3)
    ]
    slowest = by_rank[2]
    assert slowest[0] == 2
    assert slowest[1:] == sorted(slowest[1:])
    assert slowest[-1] > 4
    for other in by_rank[:2]:
        assert all(abs(a / b - other[0] / 2) < 1 for a, b in zip(other, slowest, strict=True))


OVERLAPS = sorted({path.stem for path in Path("conf/overlap").glob("*.yaml")} - {"none"})
LINK = (
    "cluster=homogeneous",
    "cluster.num_workers=2",
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=50",
    "cluster.latency_s=0.001",
    "model.hidden=[16]",
    "stop.steps=24",
)


def single_stage(*overrides: str) -> Plan | None:
    """Return the plan of one stage, or None if its options do not work together."""
    try:
        return planned(*LINK, *overrides)
    except UsageError:
        return None


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_stages_may_overlap_differently(overlap: str, tmp_path: Path) -> None:
    """A plan whose stages have different overlaps reaches its last stage, or is refused."""
    tried = 0
    for topology, sync in product(
        ("all_reduce", "parameter_server"), ("bsp", "local_sgd sync.local_steps=2")
    ):
        own = f"topology={topology}", *f"sync={sync}".split()
        plain, chosen = (single_stage(*own, f"overlap={name}") for name in ("none", overlap))
        if plain is None or chosen is None:
            continue
        for first, second in ((plain, chosen), (chosen, plain), (chosen, chosen)):
            stages = replace(first.stages[0], until={"commits": 2.0}), second.stages[0]
            path = tmp_path / "plan.json"
            path.write_text(replace(first, stages=stages).to_json())
            tried += 1
            if overlap in ("streaming", "loscar"):
                with pytest.raises(UsageError, match="not supported with several stages"):
                    simulated(*LINK, *own, f"plan={path}")
            else:
                ends = simulated(*LINK, *own, f"plan={path}").of("StageEnd")
                assert [end["stage"] for end in ends] == [0, 1]
    assert tried
