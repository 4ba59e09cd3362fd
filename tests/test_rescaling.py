"""`ashl train --resume RUN cluster.num_workers=M`: a run goes on with other workers, in a folder of
its own.
"""

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ashl.cli.app import main
from ashl.config.recorded import config_of
from ashl.run import rescaling
from ashl.run.checkpoints import find_newest
from ashl.run.train import identity
from ashl.topology.halos import RegionState
from ashl.topology.rescaling import rescale_states
from tests.every_key import BESIDE
from tests.run_folders import adds_up

SHORT = ("cluster=homogeneous", "tracking=none", "tracking.events=all", "model.hidden=[8]", "-q")
HALF = ("runtime=sim", *SHORT, "run.dir=four", "run.checkpoint_s=0.1", "cluster.num_workers=4")
OTHER = ("cluster.num_workers=2", "run.dir=two")
# Of n workers the i-th has every n-th sample, in their order, so that a round of 4 batches of 16 is
# one of 2 of 32
DEALT = ("dataset.partition=interleaved", "eval.every_commits=8", "stop.epochs=0.8")
NICS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=50 cluster.latency_s=0.001"
MODES = {
    "momentum at the server": "sync=bsp optimizer.lr=0.2 optimizer.momentum=0.9",
    "momentum alike at all, a rate that falls": (
        "topology=all_reduce sync=bsp optimizer.lr=0.2 optimizer.momentum=0.9 "
        "optimizer.schedule=cosine"
    ),
    "moments and their count": "sync=bsp optimizer=adam optimizer.lr=0.01",
    "an outer optimizer": (
        "sync=local_sgd sync.local_steps=1 outer=nesterov optimizer.lr=0.1 optimizer.momentum=0"
    ),
    "shards": (
        "topology=sharded_server topology.servers=2 sync=bsp optimizer.lr=0.2"
        f" optimizer.momentum=0.9 {NICS}"
    ),
    "means of models": (
        f"topology=gossip sync=gossip_pga sync.period=1 optimizer.lr=0.2 optimizer.momentum=0 {NICS}"
    ),
}
SLOW = pytest.mark.slow
FIRST = ("momentum at the server", "momentum alike at all, a rate that falls")


def model(run: str) -> Tensor:
    return torch.cat(
        [tensor.flatten() for tensor in torch.load(f"{run}/final.pt", weights_only=True).values()]
    )


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def train(*line: str) -> None:
    assert main(["train", *line, "-q"]) == 0


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(["train", *line, "-q"]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def four(workplace: Path) -> Path:
    """A run of four workers, in rounds."""
    train(*HALF, "sync=bsp", "stop.steps=120", "eval.every_commits=20")
    return workplace / "four"


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[SLOW] * (m not in FIRST)) for m in MODES])
def test_rounds_of_the_same_samples_make_one_trajectory_whatever_the_workers(
    mode: str, workplace: Path
) -> None:
    own = [*DEALT, *MODES[mode].split()]
    train(
        "runtime=sim",
        *SHORT,
        *own,
        "cluster.num_workers=2",
        "dataset.batch_size=32",
        "run.dir=whole",
    )
    train(*HALF, *own, "dataset.batch_size=16")
    assert (model("four") - model("whole")).abs().max() < 2e-6
    train("--resume", "four", *OTHER, "dataset.batch_size=32")
    assert (model("two") - model("whole")).abs().max() < 2e-6
    assert summary("two")["samples"] == summary("whole")["samples"]


def test_work_that_was_not_exchanged_is_computed_again(workplace: Path) -> None:
    """Every step is counted once, and the end is that of the limit."""
    own = ("topology=all_reduce", "sync=bsp", "overlap=delayed", *NICS.split())
    train(*HALF, *own, "stop.steps=240")
    train("--resume", "four", *OTHER, "stop.steps=480")
    found = summary("two")
    assert found["steps"] == sum(worker["steps"] for worker in found["workers"])
    assert 480 <= found["steps"] < 480 + 2 * 16


def test_records_continue_in_a_folder_that_names_the_run(four: Path, workplace: Path) -> None:
    before = {path: path.read_bytes() for path in four.rglob("*") if path.is_file()}
    train("--resume", "four", *OTHER, "stop.steps=200")
    assert {path: path.read_bytes() for path in four.rglob("*") if path.is_file()} == before
    assert f"resumed: {four}" in Path("two/config.yaml").read_text()
    assert (
        "resumes from four, which had 4 workers"
        in json.loads(Path("two/plan.json").read_text())["notes"][-1]
    )
    ours, theirs, found = lines("two/metrics.jsonl"), lines("four/metrics.jsonl"), summary("two")
    common = [line for line in ours if line in theirs]
    assert ours[: len(common)] == common == theirs[: len(common)] != []
    for key in ("time_s", "step", "commits", "samples", "bytes_up"):
        assert [line[key] for line in ours] == sorted(line[key] for line in ours)
    assert (found["num_workers"], found["steps"], found["commits"]) == (2, 200, 200)
    assert [sum(worker[key] for worker in found["workers"]) for key in ("steps", "commits")] == [
        200,
        200,
    ]
    assert adds_up(found)
    assert found["bytes_up"] == pytest.approx(200 * summary("four")["bytes_up"] / 120, abs=4)
    rounds = [
        (event["rank"], event["round"])
        for event in lines("two/events.jsonl")
        if event["kind"] == "round"
    ]
    assert len(rounds) == len(set(rounds)) == 2 * len({k for _, k in rounds})


def test_a_resumed_run_resumes_again_bit_for_bit(four: Path) -> None:
    train("--resume", "four", *OTHER, "stop.steps=400")
    train("--resume", "four", "cluster.num_workers=2", "run.dir=again", "stop.steps=300")
    train("--resume", "again", "stop.steps=400", "cluster.num_workers=2")  # as many as it has
    assert summary("again")["params_sha256"] == summary("two")["params_sha256"]
    assert summary("again")["steps"] == 400
    train("--resume", "again", "cluster.compute=[1,1,1,2,2]", "run.dir=five", "stop.steps=500")
    assert summary("five")["num_workers"] == 5
    assert 500 <= summary("five")["steps"] < 505


def modes_of_sync() -> dict[str, str]:
    """Return for each sync mode the settings of its run, on its own topology."""
    words = {key: text.split() for key, text in BESIDE.items() if key.startswith("sync=")}
    skipped = ("cluster", "stop.", "optimizer.schedule")
    return {
        key.removeprefix("sync="): " ".join(
            [key, *(word for word in text if not word.startswith(skipped))]
        )
        for key, text in words.items()
        if key not in ("sync=profiling", "sync=one_bit_adam")
    }


HALOS = "topology=halos topology.updates=4"
NODES = "cluster.node=[0,0,1,1] cluster.intra_node_bandwidth_mbit_s=200"
SHARDS = "topology=sharded_server topology.servers=2"
ALL_MODES = {
    **modes_of_sync(),
    "hop": "sync=hop topology=gossip sync.backups=1 topology.graph=complete",
    "ahl": "sync=ahl schedule.h_preset=[2]",
    "qsr": "sync=qsr optimizer.schedule=cosine optimizer.horizon_epochs=20",
    "regions, one of them new": f"sync=asp {HALOS} {NODES} outer=nesterov",
    "regions by a key": f"sync=fedbuff {HALOS} topology.regions=[0,0,1,1]",
    "compressed pulls": "sync=asp topology.pull_ratio=0.1 compression=topk",
    "shards, a barrier": f"sync=bsp {SHARDS} optimizer.momentum=0.9",
    "shards, a bound": f"sync=ssp {SHARDS} compression=topk",
    "push-sum, two rounds late": "sync=sgp topology=gossip topology.graph=ring sync.overlap=2",
    "all-reduce of momenta": "sync=pr_sgd_momentum topology=all_reduce",
}
QUICK = ("sgp", "swarm", "ripples_random", "regions, one of them new", "shards, a barrier")


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=[SLOW] * (m not in QUICK)) for m in ALL_MODES]
)
def test_the_new_workers_begin_at_the_mean_of_the_models_with_all_counts(
    mode: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (*NICS.split(), "optimizer.lr=0.01", *ALL_MODES[mode].split())
    train(*HALF, *own, "stop.steps=480")
    found = list[tuple[dict[int, Any], Any, list[Any]]]()

    def rescale(stage: Any, before: dict[int, Any], lead: Any, now_s: float) -> list[Any]:
        states = rescale_states(stage, before, lead, now_s)
        found.append((before, lead, states))
        return states

    monkeypatch.setattr(rescaling, "rescale_states", rescale)
    others = ["topology.regions=[0,0,1,1,2,2]"] if "regions=" in ALL_MODES[mode] else []
    six = ("cluster.num_workers=6", *others, "run.dir=six", "stop.steps=640")
    train("--resume", "four", *six)
    ((before, lead, states),) = found
    check_model(before, states)
    check_counts(lead, states)
    ended = summary("six")
    assert ended["status"] == "finished"
    assert ended["steps"] == sum(worker["steps"] for worker in ended["workers"]) >= 640
    assert adds_up(ended)


def check_model(before: Mapping[int, Any], states: Sequence[Any]) -> None:
    """Check that the model of the run, the mean of all models, is that of the new workers."""
    old, new = [before[rank] for rank in range(4)], states[:6]
    shards = [before[rank].params for rank in sorted(before) if rank > 3]
    if any(isinstance(state, RegionState) for state in states):
        del shards[1:]  # all regions begin at the global model
    if shards and shards[0] is not None:
        expected = torch.cat(shards)
    else:
        expected = sum(one.params for one in old) / len(old)
    for state in new:
        assert torch.allclose(state.params, expected, rtol=0, atol=1e-6)


def check_counts(lead: Any, states: Sequence[Any]) -> None:
    """Check that the rank that counts has all counts, and the workers the same ones."""
    before = lead.progress
    after = next(one.progress for one in states if type(one) is type(lead))
    for name in ("version", "steps", "dropped_for", "loss", "max_lead", "conflicts"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("commits", "steps_by", "dropped_by", "drops", "stale_sum", "groups"):
        assert sum(getattr(after, name) or ()) == sum(getattr(before, name) or ())
    in_stage, expected = (
        (one.total_commits - one.started.commits) / one.num_workers for one in (after, before)
    )
    assert in_stage == pytest.approx(expected, abs=1)  # limits of a stage are by worker


@pytest.mark.slow
def test_a_stage_is_where_it_was(workplace: Path) -> None:
    """H and shares are planned again for the new workers, by the declared costs."""
    train(*HALF, "schedule=ashl", "schedule.loss_switch=1.5", "stop.epochs=8")
    train("--resume", "four", "cluster.compute=[1,3]", "run.dir=two", "stop.epochs=10")
    before, after = summary("four")["stages"], summary("two")["stages"]
    assert (
        [stage["name"] for stage in after]
        == ["profile", "ahl", "shl"]
        == [stage["name"] for stage in before]
    )
    assert [stage["end_s"] for stage in after[:2]] == [stage["end_s"] for stage in before[:2]]
    slow, fast = sorted(after[2]["local_steps"])
    assert (len(after[2]["local_steps"]), fast > slow) == (2, True)


REFUSED = {
    "cluster.num_workers=200": "shard holds 7 samples, fewer than its batch of 32",
    "cluster.num_workers=2 optimizer.lr=1": (
        "optimizer.lr: only stop.*, runtime and the number of workers"
    ),
    "dataset.batch_size=8": "dataset.batch_size: only stop.*, runtime and the number of workers",
    "run.dir=elsewhere": "run.dir: only stop.*",
    "cluster.num_workers=4 dataset.batch_size=8": "the run in four has 4 workers already",
    "cluster.num_workers=2 run.dir=four": "four already holds a run; choose another run.dir",
}


def test_what_cannot_be_is_refused(four: Path, capsys) -> None:
    for line, sentence in REFUSED.items():
        assert sentence in refused(capsys, "--resume", "four", *line.split())
    assert not Path("elsewhere").exists()
    assert not Path("runs").exists()
    with open(four / "metrics.jsonl", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["train", "--resume", "four", *OTHER]) == 1
    assert (
        capsys.readouterr().err
        == "ashl: another process is writing the run in four; wait for it to end.\n"
    )


FAULTS = (
    "cluster.events=[{time_s: 0.2, worker: 1, fail: true}, {time_s: 0.9, worker: 1, rejoin: true},"
    " {time_s: 1.2, worker: 1, fail: true}, {time_s: 1.4, worker: 1, rejoin: true}]"
)


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        ("topology=gossip sync=d_psgd topology.graph=ring", FAULTS),
        pytest.param("sync=asp", "cluster.churn={mtbf_s: 0.5, mttr_s: 0.2}", marks=SLOW),
    ],
)
def test_all_new_workers_take_part_and_later_faults_remain(
    mode: str, faults: str, workplace: Path
) -> None:
    """The checkpoint is of a moment at which a declared failure has taken worker 1."""
    own = (*NICS.split(), *mode.split(), "optimizer.lr=0.02", faults)
    train(*HALF, *own, "stop.seconds=0.8")
    saved_s = find_newest(Path("four"), identity(config_of(Path("four")))).time_ns / 1e9
    train("--resume", "four", *OTHER, "stop.seconds=2.5")
    found = summary("two")
    assert (found["status"], found["num_workers"]) == ("finished", 2)
    assert found["steps"] == sum(worker["steps"] for worker in found["workers"])
    times = [failure["time_s"] for failure in found["failed_workers"]]
    assert times == [1.2] if faults == FAULTS else min(times) > saved_s
    assert adds_up(found)
