"""A metric of one's own is one line, `ctx.measure(name, value)`, and stands wherever a run's
metrics stand.
"""

import json
import math

import pytest

from ashl.cli.app import main
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import Counts, Heartbeat, Measured, Round, as_fields, record_of
from ashl.runtime.time_accounting import KINDS as TIMES
from ashl.tracking.copying import metric_points, summary_numbers

PACKAGE = '''
"""Sync modes of one's own: they do what those of the package do, and measure the length of every local step."""

from dataclasses import replace

from ashl.option import option
from ashl.sync.bsp import BSP
from ashl.sync.d_psgd import DPSGD
from ashl.sync.ripples_first_come import RipplesFirstCome


class Trainer:
    def __init__(self, trainer, node):
        self.trainer, self.node = trainer, node

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def local_step(self, params, *rest):
        loss, moments, local = self.trainer.local_step(params, *rest)
        self.node.measure("step_norm", (local - params).norm())
        return loss, moments, local


class Measuring:
    def loop(self, stage, rank):
        loop = super().loop(stage, rank) or stage.topology.role(stage, rank)

        async def measured(node, stage, state):
            return await loop(node, replace(stage, trainer=Trainer(stage.trainer, node)), state)

        return measured


@option
class OwnBSP(Measuring, BSP): ...


@option
class OwnDPSGD(Measuring, DPSGD): ...


@option
class OwnGroups(Measuring, RipplesFirstCome): ...
'''
TWO = [
    "cluster.compute=[1,1]",
    "cluster.link=null",
    "cluster.step_s=0.001",
    "cluster.exchange_s=0.001",
]
SMALL = [
    *TWO,
    "tracking=none",
    "allow_targets=[measuring]",
    "stop.steps=80",
    "eval.every_commits=40",
]
MODES = {
    "parameter_server": ["sync=bsp", "sync._target_=measuring.OwnBSP", "sync.exchange=difference"],
    "all_reduce": ["sync=bsp", "sync._target_=measuring.OwnBSP", "sync.exchange=difference"],
    "gossip": ["sync=d_psgd", "sync._target_=measuring.OwnDPSGD", "topology.graph=ring"],
    "partial_all_reduce": [
        "sync=ripples_first_come",
        "sync._target_=measuring.OwnGroups",
        "sync.group_size=2",
    ],
}


@pytest.fixture
def package(workplace, monkeypatch):
    (workplace / "measuring.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(workplace)
    return workplace


@pytest.mark.parametrize(
    ("topology", "runtime"),
    [
        *((topology, "sim") for topology in MODES),
        *(pytest.param(topology, "local", marks=pytest.mark.slow) for topology in [*MODES][1:]),
        ("parameter_server", "local"),
    ],
)
def test_a_measure_is_wherever_metrics_are(topology: str, runtime: str, package, capsys) -> None:
    chosen = [f"runtime={runtime}", f"topology={topology}", *MODES[topology], *SMALL, "run.dir=run"]
    assert main(["train", "-q", *chosen]) == 0
    lines = [json.loads(line) for line in (package / "run/metrics.jsonl").read_text().splitlines()]
    summary = json.loads((package / "run/summary.json").read_text())
    found = summary["measures"]["step_norm"]
    assert lines[-1]["measure/step_norm"] == found["last"] > 0
    assert math.isfinite(found["mean"])
    assert found["mean"] != found["last"]
    if runtime == "sim":
        assert all(line["measure/step_norm"] > 0 for line in lines)
    assert ("measure/step_norm", found["last"]) in [point[:2] for point in metric_points(lines[-1])]
    assert dict(summary_numbers(summary))["measure/step_norm"] == found["last"]
    capsys.readouterr()
    assert main(["compare", "run"]) == 0
    assert "step_norm" in capsys.readouterr().out
    assert "step_norm" in (package / "report.html").read_text()
    assert main(["export", "run"]) == 0
    assert "measures_step_norm_last" in capsys.readouterr().out


class Silent:
    """A kernel that nobody watches."""

    stop_reason = scores = None
    rounds = "none"


def test_a_measure_keeps_its_last_value_and_its_mean() -> None:
    ctx = RankContext(Silent(), 0)  # ty: ignore[invalid-argument-type]
    for value in (1.0, 2.0, 6.0):
        ctx.measure("a/b", value)
    assert ctx.measures == {"a/b": Measured(6.0, 9.0, 3)}
    for name in ("", "a b", "a//b", "/a", "ü"):
        with pytest.raises(ValueError, match="invalid name; use letters"):
            ctx.measure(name, 1.0)


COUNTS = Counts(2, 64, 1, [1, 0], [2, 0], [0, 0], [0, 0], [0, 0], 1, None, None, 0.5, None)


@pytest.mark.parametrize(
    "record",
    [
        Round(1, 0, 7, 2, 0, False, None, 10, 30, [("compute", 10, 30)], group=[0, 1]),
        Heartbeat(
            0,
            5,
            2,
            None,
            None,
            dict.fromkeys(TIMES, 1),
            0,
            0,
            {"x": Measured(1.0, 3.0, 2)},
            COUNTS,
            "waits",
            0.5,
        ),
    ],
)
def test_a_record_travels_as_json(record) -> None:
    found = record_of(json.loads(json.dumps(as_fields(record))))
    assert found == record
    assert type(found) is type(record)
