"""Laws of every overlap that partitions a gradient: one table, under all-reduce and with a server.

The model equals that without overlap, to the bit; a step takes less time, and as long as planned.
"""

from dataclasses import replace

import pytest

from tests.support import Ran, planned, run, simulated, slow_unless

# overlap, topology; the slices are shorter than a layer group
TABLE = {
    "wfbp": ("overlap=wfbp", "all_reduce"),
    "merged": ("overlap=merged overlap.plan=[2,1]", "all_reduce"),
    "priority": ("overlap=priority overlap.slice=500 overlap.credit=2", "all_reduce"),
    "dear": ("overlap=dear overlap.plan=layers", "all_reduce"),
    "server-wfbp": ("overlap=wfbp", "parameter_server"),
    "server-merged": ("overlap=merged overlap.plan=[2,1]", "parameter_server"),
    "tictac": ("overlap=tictac overlap.plan=layers", "parameter_server"),
    "slices": ("overlap=slices overlap.slice=500", "parameter_server"),
    "server-priority": ("overlap=priority overlap.slice=500 overlap.credit=2", "parameter_server"),
}
BASE = (
    "sync=bsp",
    "dataset=digits",
    "model=mlp",
    "model.hidden=[24,16]",
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=2",
    "cluster.latency_s=0.0002",
    "cluster.step_s=0.03",
)
UNEQUAL = ("cluster.compute=[1,1,3]", "cluster.link=[1,2,1]")
PAIR = ("cluster.compute=[1,2]", "cluster.link=null")
law = pytest.mark.parametrize("name", TABLE)


def both(name: str, *overrides: str) -> tuple[Ran, Ran]:
    """Return the runs without and with this overlap."""
    line, topology = TABLE[name]
    common = (*BASE, f"topology={topology}", *overrides)
    return simulated(*common), simulated(*common, *line.split())


@law
@pytest.mark.parametrize(
    "optimizer", ["optimizer.momentum=0.9", "optimizer=adamw"], ids=["momentum", "adamw"]
)
def test_the_model_is_the_same_and_sooner_there(name: str, optimizer: str) -> None:
    """Unequal workers, weight decay, and a step count that ends within a round."""
    serial, own = both(name, *UNEQUAL, optimizer, "optimizer.weight_decay=0.01", "stop.steps=29")
    assert own.sha256 == serial.sha256
    assert own.end["steps_by"] == serial.end["steps_by"]
    assert own.end["reason"] == "steps"
    assert own.time_ns < serial.time_ns
    assert {sum(totals.values()) for totals in own.ledgers} == {own.time_ns}
    merges, (sent, whole) = (
        serial.end["merges"],
        [ran.of("TimeTotals")[0]["bytes_up"] for ran in (own, serial)],
    )
    # a ring divides each message by the workers, which rounds
    assert abs(sent - whole) <= 24 * merges


@law
@pytest.mark.parametrize(
    "end",
    slow_unless(["stop.seconds=1.1"], ["stop.epochs=1.3", "stop.seconds=1.1", "optimizer.lr=1e30"]),
)
def test_every_end_has_the_steps_that_counted(name: str, end: str) -> None:
    """A budget drops what has not arrived by then, and a run that diverges ends at once."""
    reasons = {"stop.epochs": "epochs", "stop.seconds": "seconds"}
    _, own = both(name, *PAIR, "stop.steps=600", end)
    assert own.end["reason"] == reasons.get(end.split("=")[0], "diverged")
    assert {sum(totals.values()) for totals in own.ledgers} == {own.time_ns}
    if own.end["reason"] == "seconds":
        assert own.time_ns == 1_100_000_000
    again = [f"stop.steps={max(2, own.end['steps'])}", *([end] if "lr" in end else [])]
    counted, _ = both(name, *PAIR, *again)
    assert own.sha256 == counted.sha256


@law
def test_evaluated_models_are_those_without_overlap(name: str) -> None:
    serial, own = both(name, *PAIR, "stop.steps=40", "eval.every_commits=6")
    assert [record["merges"] for record, _ in own.snapshots] == [
        record["merges"] for record, _ in serial.snapshots
    ]
    pairs = zip(own.snapshots, serial.snapshots, strict=True)
    assert all((a == b).all() for (_, a), (_, b) in pairs)


@law
def test_a_stage_that_follows_begins_with_the_whole_model(name: str) -> None:
    line, topology = TABLE[name]
    runs = []
    for overlap in ((), line.split()):
        plan = planned(*BASE, *UNEQUAL, f"topology={topology}", "stop.steps=15", *overlap)
        stage = plan.stages[0]
        stages = (replace(stage, until={"commits": 9}), replace(stage, name="then"))
        runs.append(run(replace(plan, stages=stages)))
    serial, own = runs
    assert own.sha256 == serial.sha256
    assert [end["steps"] for end in own.of("StageEnd")] == [
        end["steps"] for end in serial.of("StageEnd")
    ]


@pytest.mark.limit("overlap=wfbp", "overlap=slices", "overlap=tictac")
@pytest.mark.parametrize("name", sorted({*TABLE} - {"dear"}))  # its halves have padded chunks
def test_one_layer_group_is_no_overlap(name: str) -> None:
    """A model of one layer group is one message, if a slice is as long."""
    line, topology = TABLE[name]
    at = (*BASE, *UNEQUAL, f"topology={topology}", "model=linear", "stop.steps=9")
    at = tuple(text for text in at if not text.startswith("model.hidden"))
    words = [text for text in line.split() if not text.startswith("overlap.")]
    words += ["overlap.slice=1000000"] if "slice" in line else []
    words += ["overlap.plan=[1]"] if "merged" in line else []
    own, none = simulated(*at, *words), simulated(*at)
    assert (own.sha256, own.time_ns) == (none.sha256, none.time_ns)


@law
def test_a_step_takes_the_planned_time(name: str) -> None:
    line, topology = TABLE[name]
    at = (*BASE, "cluster.compute=[1,1]", "cluster.link=null", f"topology={topology}")
    at = (*at, "runtime.gradients=false", *line.split())
    few, many = simulated(*at, "stop.steps=20"), simulated(*at, "stop.steps=60")
    step_ns = (many.time_ns - few.time_ns) / 20
    assert step_ns / 1e9 == pytest.approx(2 / many.plan.stages[0].predicted_steps_per_s, rel=1e-3)
