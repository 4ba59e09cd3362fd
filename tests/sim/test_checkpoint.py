"""A run that resumes from a checkpoint has the messages and models of one without interruption, bit
for bit.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ashl.cli.app import main
from ashl.cluster.network import make_network
from ashl.cluster.speed import speed_of
from ashl.config.construct import construct
from ashl.device import HOST
from ashl.errors import UsageError
from ashl.planning.instantiate import assemble_job
from ashl.run.evaluation import make_model_set
from ashl.runtime.churn import Churn
from ashl.runtime.contended_sim import simulator
from ashl.runtime.effects import Save
from ashl.runtime.plain_state import decode, encode, encode_tensors
from ashl.runtime.rank_checkpoint import ABSENT, capture_rank, next_due_ns
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import restore_ranks
from ashl.stage.program import peers_of, run_stages
from tests.golden.runs import RUNS
from tests.support import Ran, planned, simulated, slow_unless

EVERY_S = 0.15
SHORT = ("stop.epochs=3", "cluster.jitter=0.2", "eval.every_s=0.4")
QUICK = (  # rows of the golden set with all kinds of states; `-m slow` tries every row
    "bsp", "topk-both-ways", "diana", "asylpg", "spy", "local-sgd", "ring-late", "ring-streaming", "power-sgd",
    "adsp", "ring-adacomm", "ad-psgd", "hop", "ripples-smart", "sharded-server", "halos", "ashl",
)  # fmt: skip


def row(name: str) -> tuple[str, ...]:
    """Return the overrides of a row of the golden set, for a run of a few seconds."""
    return (*RUNS[name].overrides, "stop.steps=null", *SHORT)


class Kept(NamedTuple):
    """A checkpoint, with what had been said by then."""

    content: bytes
    time_ns: int
    records: int
    snapshots: int
    parts: Any
    faults: bytes


def run(ran: Ran, saved: Kept | None = None, device: str = HOST) -> list[Kept]:
    """Run to the end with checkpoints, from one of them or from the beginning; returns them."""
    job = assemble_job(ran.plan, device)
    cluster, stage, kept = construct(ran.plan.cluster, "cluster"), job.stages[0], list[Kept]()
    speed = speed_of(cluster, stage.plan.workers[0].batch, ran.plan.seed)
    costs = make_network(cluster, stage.trainer.dense_bytes, stage.topology.algorithm)
    sim = simulator(
        ran.plan.num_ranks, speed, costs, ran, overlaps=stage.computes_during_collectives
    )
    sim.worker_states = job.learner
    start, peers = partial(run_stages, stages=job.stages), partial(peers_of, job.stages)
    churn = Churn(sim, cluster, ran.plan.seed, 1, peers, start, stage.topology.regroups)

    def keep(saves: Mapping[int, Save]) -> float:
        ranks = [capture_rank(ctx, saves.get(ctx.rank), speed) for ctx in sim.contexts]
        said = len(ran.records), len(ran.snapshots), encode(ran.parts)
        faults = encode(churn.save_state())
        kept.append(Kept(encode(ranks), sim.now_ns, *said, faults))
        return next_due_ns(sim.now_ns, EVERY_S)

    sim.save = keep
    sim.checkpoint_due_ns = next_due_ns(saved.time_ns if saved else 0, EVERY_S)
    begin = None
    if saved is not None:
        ranks = decode(saved.content, ("ashl",), device)
        epoch = churn.restore(decode(saved.faults))
        begin = partial(restore_ranks, ranks=ranks, time_ns=saved.time_ns, epoch=epoch)
    sim.run(start, tick=lambda: None, begin=begin)
    return kept


def check_resumes(overrides: Sequence[str], device: str = HOST) -> Ran:
    """Check that a run that is stopped at a checkpoint and resumed equals the never-stopped run;
    return that.
    """
    plan = planned(*overrides)
    learner, stage = assemble_job(plan, device).learner, assemble_job(plan, device).stages[0]
    whole = Ran(plan, parts=make_model_set(stage), learner=learner)
    kept = run(whole, device=device)
    assert kept
    for one in kept[:: max(1, len(kept) // 2)]:
        said = whole.records[: one.records], whole.snapshots[: one.snapshots]
        again = Ran(plan, records=said[0], snapshots=said[1], learner=learner)
        again.parts = decode(one.parts)
        later = [found.content for found in kept if found.time_ns > one.time_ns]
        assert [found.content for found in run(again, one, device)] == later
        assert again.records == whole.records
        assert again.sha256 == whole.sha256
        assert [record for record, _ in again.snapshots] == [
            record for record, _ in whole.snapshots
        ]
    return whole


@pytest.mark.parametrize(
    "name",
    # a profiling stage has no safe point
    slow_unless(QUICK, (name for name in RUNS if RUNS[name].learns and name != "profile")),
)
def test_a_resumed_run_equals_the_whole_one(name: str) -> None:
    check_resumes(row(name))


FAIL = "{time_s: 0.31, worker: 0, fail: true}, {time_s: 1.3, worker: 2, fail: true}"
REJOIN = "{time_s: 0.8, worker: 0, rejoin: true}, {time_s: 1.38, worker: 2, rejoin: true}"


@pytest.mark.parametrize(
    "name",
    slow_unless(
        ("bsp", "ring-late", "ad-psgd", "ripples-smart", "sharded-server"),
        [
            "topk-both-ways",
            "bsp",
            "ring-late",
            "ring-wfbp",
            "outer-nesterov-ring",
            "choco-topk",
            "ad-psgd",
            "ripples-smart",
            "sharded-server",
            "halos",
        ],
    ),
)
def test_a_run_whose_workers_fail_and_rejoin_resumes(name: str) -> None:
    ran = check_resumes((*row(name), f"cluster.events=[{FAIL}, {REJOIN}]"))
    assert len(ran.of("WorkerFailed")) == len(ran.of("WorkerRejoined")) == 2


@pytest.mark.parametrize(
    ("worker", "rejoin_s"), [(0, 0.5), (0, 0.56), (2, 0.41), (2, 0.44), (2, 0.73), (2, 0.76)]
)
def test_a_region_that_is_ready_to_pause_admits_nobody(worker: int, rejoin_s: float) -> None:
    """Otherwise it pauses while the admitted worker computes: on processes, the push of that worker
    was dropped as one of before the pause, and the worker waited forever for the reply.
    """
    events = (
        f"cluster.events=[{{time_s: 0.11, worker: {worker}, fail: true}},"
        f" {{time_s: {rejoin_s}, worker: {worker}, rejoin: true}}]"
    )
    plan = planned(*row("halos"), "cluster.latency_s=0.03", events)
    stage, waiting = assemble_job(plan, HOST).stages[0], list[Kept]()
    kept = run(Ran(plan))
    for one in kept:
        ranks, faults = decode(one.content, ("ashl",)), decode(one.faults, ("ashl",))
        server = ranks[stage.topology.server_of(stage, worker)].state
        if ranks[worker].stage == ABSENT:
            waiting += [one] * (worker not in faults.failed_ranks)
            assert worker in faults.failed_ranks or worker in server.progress.failed
        else:
            assert worker not in server.progress.failed
    assert waiting  # a join request arrived in a pause
    for one in waiting:  # the answer to that request is not received after a resume, either
        later = [found.content for found in kept if found.time_ns > one.time_ns]
        assert [found.content for found in run(Ran(plan), one)] == later


def test_the_command_resumes_a_run_whose_workers_fail(workplace: Path) -> None:
    events = f"cluster.events=[{FAIL}, {REJOIN}]"
    line = ["-q", "runtime=sim", "tracking=none", "topology=all_reduce", "sync=bsp", events]
    assert main(["train", *line, "run.dir=whole", "stop.steps=600", "run.checkpoint_s=0.25"]) == 0
    assert main(["train", *line, "run.dir=run", "stop.steps=150", "run.checkpoint_s=0.25"]) == 0
    assert main(["train", "--resume", "run", "stop.steps=600", "-q"]) == 0
    whole, run = (json.loads(Path(name, "summary.json").read_text()) for name in ("whole", "run"))
    assert len(run["failed_workers"]) == 2
    for key in ("params_sha256", "steps", "time_s", "failed_workers"):
        assert run[key] == whole[key]


def test_a_donor_sends_as_many_bytes_after_a_resume(workplace: Path) -> None:
    """A worker fails and rejoins in the first round after the checkpoint, with a lower stop limit
    than in the whole run.
    """
    mode = "topology=all_reduce sync=local_sgd sync.local_steps=4 cluster=homogeneous"
    events = "[{time_s: 0.20, worker: 1, fail: true}, {time_s: 0.21, worker: 1, rejoin: true}]"
    line = ["-q", "runtime=sim", "tracking=none", *mode.split(), f"cluster.events={events}"]
    often = "run.checkpoint_s=0.16"
    assert main(["train", *line, "run.dir=whole", "stop.steps=250", often]) == 0
    assert main(["train", *line, "run.dir=run", "stop.steps=95", often]) == 0
    assert main(["train", "--resume", "run", "stop.steps=250", "-q"]) == 0
    whole, run = (json.loads(Path(name, "summary.json").read_text()) for name in ("whole", "run"))
    for key in ("params_sha256", "time_s", "bytes_up", "bytes_down"):
        assert run[key] == whole[key]


@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_no_pause_precedes_a_round_that_a_limit_truncates(topology: str, workplace: Path) -> None:
    """A sync mode sets H: 22 of 32 steps remained of a round that was planned as 4 steps."""
    mode = "sync=qsr sync.local_steps=1 sync.h_max=8 sync.alpha=1 optimizer.lr=0.02"
    line = ["-q", "runtime=sim", "tracking=none", f"topology={topology}", *mode.split()]
    often = "run.checkpoint_s=0.01"
    assert main(["train", *line, "run.dir=whole", "stop.steps=200", often]) == 0
    assert main(["train", *line, "run.dir=run", "stop.steps=90", often]) == 0
    assert main(["train", "--resume", "run", "stop.steps=200", "-q"]) == 0
    whole, run = (json.loads(Path(name, "summary.json").read_text()) for name in ("whole", "run"))
    for key in ("params_sha256", "steps", "time_s"):
        assert run[key] == whole[key]


@pytest.mark.parametrize(
    "name", ["bsp", "ring-wfbp", "ring-late", "ring-streaming", "d-psgd", "sgp-overlap"]
)
def test_a_pause_changes_nothing_of_what_is_learned(name: str) -> None:
    """Workers in synchronous rounds learn the same with checkpoints and without."""
    ran = Ran(planned(*row(name)))
    ran.parts = make_model_set(assemble_job(ran.plan, HOST).stages[0])
    assert run(ran)
    assert ran.sha256 == simulated(*row(name)).sha256


@pytest.mark.parametrize(
    "chosen",
    [
        "overlap=priority",
        "overlap=dear",
        "topology=parameter_server overlap=tictac model.hidden=[32,32]",
        "topology=parameter_server overlap=slices overlap.slice=900",
        "topology=parameter_server overlap=priority overlap.slice=900 overlap.credit=2",
    ],
)
def test_what_comes_under_the_next_forward_pass_is_drained_before_a_pause(chosen: str) -> None:
    """A pause takes a moment of the run's time, and changes nothing of what it learns."""
    overrides = (*row("ring-wfbp"), *chosen.split())
    whole, ran = simulated(*overrides), check_resumes(overrides)
    assert ran.sha256 == whole.sha256
    assert whole.time_ns <= ran.time_ns <= 2 * whole.time_ns
    assert {sum(totals.values()) for totals in ran.ledgers} == {ran.time_ns}


PORTS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=20",
    "cluster.latency_s=0.001",
    "cluster.compress_s=0.001",
)
NODES = (
    "cluster.node=[0,1,0,1]",
    "cluster.intra_node_bandwidth_mbit_s=100",
    "cluster.intra_node_latency_s=0",
)
OPTIONS = Path(__file__).parents[2] / "conf/overlap"
CODECS = {  # without loss, sparse with a residual, with state of its own at both ends
    "none": "compression=none",
    "topk": "compression=topk compression.ratio=0.2",
    "diana": "compression=diana optimizer.momentum=0",
    "power_sgd": "compression=power_sgd",
}
TOPOLOGIES = {  # sync modes of each, and the number of its combinations that are legal
    "parameter_server": (("bsp", "local_sgd", "ssp"), 40),
    "all_reduce": (("bsp", "local_sgd"), 35),
    "sharded_server": (("bsp", "ssp"), 4),
    "halos": (("asp",), 2),
    "gossip": (("d_psgd", "choco", "hop"), 3),
    "partial_all_reduce": (("ripples_random",), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_overlap_and_codec_of_a_topology_resumes(topology: str) -> None:
    modes, least = TOPOLOGIES[topology]
    overlaps = sorted(path.stem for path in OPTIONS.glob("*.yaml"))
    checked = 0
    for sync, overlap, codec in product(modes, overlaps, CODECS.values()):
        own = f"topology={topology} sync={sync} overlap={overlap} {codec} model.hidden=[16,16]"
        overrides = (*SHORT, *PORTS, *own.split(), *(NODES if topology == "halos" else ()))
        try:
            planned(*overrides)
        except UsageError:
            continue
        check_resumes(overrides)
        checked += 1
    assert checked >= least


def test_measures_continue_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    close = RankContext.record_round

    def measuring(ctx: RankContext, *args: int, **what: Any) -> None:
        ctx.measure("loss", what["loss"])
        close(ctx, *args, **what)

    monkeypatch.setattr(RankContext, "record_round", measuring)
    assert simulated(*row("bsp")).of("TimeTotals")[0]["measures"]["loss"].count > 10
    test_a_resumed_run_equals_the_whole_one("bsp")


def test_a_checkpoint_names_no_foreign_code() -> None:
    state = {"a": (1, [2.0, None]), ("k", True): {3}}
    assert decode(encode(state)) == state
    for name in ("os:system", "ashl.runtime.sim:Sim", "ashl.run.train:run"):
        text = json.dumps({"kind": "dataclass", "name": name, "items": {}})
        with pytest.raises(ValueError, match="checkpoint names"):
            decode(encode_tensors([torch.tensor([*text.encode()], dtype=torch.uint8)]))


@pytest.mark.parametrize("local_steps", [7, 10, 20])
@pytest.mark.parametrize(
    "mode", ["gossip topology.graph=ring sync=d_psgd", "all_reduce sync=local_sgd"]
)
def test_a_run_near_its_end_is_resumed(mode: str, local_steps: int, workplace) -> None:
    """Some ranks were saved in the last round, or past it: with another end that was another round,
    or never came.
    """
    how = [
        *f"topology={mode}".split(),
        f"sync.local_steps={local_steps}",
        "runtime.gradients=false",
        "-q",
    ]
    often = [
        "runtime=sim",
        "tracking=none",
        "run.dir=run",
        "run.checkpoint_s=0.4",
        "stop.steps=450",
    ]
    assert main(["train", *how, *often]) == 0
    assert main(["train", "--resume", "run", "stop.steps=900", "-q"]) == 0
