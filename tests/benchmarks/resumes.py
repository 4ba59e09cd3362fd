"""Whole runs that are killed and resumed: `python -m tests.benchmarks.resumes`.

`--trials N --seed S` makes N real runs of random modes. Every process gets SIGKILL at a random
moment after the first checkpoint, then `ashl train --resume` continues. In synchronous rounds the
parameters at the end must be those of an uninterrupted run in virtual time, bit for bit. Other runs
must end by their count, with consistent accounting and a training loss of at most 1.25 times that
of the whole run plus 0.05. All other outcomes are WRONG.

With `--failures` a drawn worker gets SIGKILL first, and everything up to a second later. Such a run
is judged by its loss, and the worker must have rejoined if it failed before the checkpoint.

`--cost` measures the cost of checkpoints every 10 s, in a run of real processes without declared
costs. The first figure is the number of rounds missing in the 2 s after each checkpoint,
as a share of the run. The comparison is an equally long time between checkpoints. The second is the CPU time to write a
rank's part, as a share of 10 s, which other load does not blur. Both are measured in a run of its
own processes, and in a job of torchrun, where a part goes through the job's store.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ashl.run.authenticated_store import StoreServer, new_secret
from ashl.runtime import rank_checkpoint
from ashl.runtime.plain_state import decode, encode
from ashl.tracking import jsonl
from tests.benchmarks.table import show
from tests.disturbed import ranks_of
from tests.run_folders import adds_up
from tests.support import simulated

RUN = [
    "cluster.compute=[1,1.5,2]",
    "cluster.link=null",
    "cluster.step_s=0.008",
    "cluster.exchange_s=0.002",
    "tracking.events=all",
    "eval.every_commits=300",
]
PIECES = (
    "topology=sharded_server topology.servers=2 cluster.exchange_s=null"
    " cluster.bandwidth_mbit_s=200 cluster.latency_s=0.0005"
)
ROUNDS = {
    "bsp, Top-K": "sync=bsp compression=topk compression.ratio=0.2 optimizer.momentum=0.9",
    "bsp by all-reduce, QSGD, Adam": (
        "topology=all_reduce sync=bsp compression=qsgd optimizer=adam optimizer.lr=0.001"
    ),
    "local SGD, Nesterov outside": (
        "sync=local_sgd sync.local_steps=2 outer=nesterov optimizer.lr=0.02"
    ),
    "local SGD by all-reduce": "topology=all_reduce sync=local_sgd sync.local_steps=3",
    "bsp by all-reduce, one exchange late": (
        "topology=all_reduce sync=bsp overlap=delayed optimizer.momentum=0.9"
    ),
    "fragments by all-reduce": (
        "topology=all_reduce sync=local_sgd sync.local_steps=2 overlap=streaming outer=nesterov"
    ),
    "local SGD, one exchange late": "sync=local_sgd sync.local_steps=2 overlap=delayed",
    "SGP, two rounds late": "topology=gossip sync=sgp sync.overlap=2 topology.graph=ring",
    "D-PSGD": "topology=gossip sync=d_psgd topology.graph=ring",
    "bsp on two servers, Top-K": f"sync=bsp compression=topk compression.ratio=0.2 {PIECES}",
    "CHOCO, Top-K": (
        "topology=gossip sync=choco topology.graph=ring compression=topk compression.ratio=0.2"
    ),
}
OWN_PACE = {
    "ssp, Top-K": "sync=ssp compression=topk compression.ratio=0.2",
    "ssp, one exchange late": "sync=ssp overlap=delayed",
    "asp, QSGD": "sync=asp compression=qsgd optimizer.lr=0.02",
    "FedBuff": "sync=fedbuff",
    "a quorum and a grace window": "sync=decoupled sync.grace_s=0.01",
    "ashl": "schedule=ashl",
    "averages in groups": "topology=partial_all_reduce sync=ripples_random sync.group_size=2",
    "AD-PSGD": "topology=gossip sync=ad_psgd topology.graph=ring",
    "SwarmSGD": (
        "topology=gossip sync=swarm topology.graph=complete sync.local_steps=2 sync.overlap=false"
    ),
    "Hop": "topology=gossip sync=hop topology.graph=ring sync.staleness=1 sync.local_steps=2",
    "D-ADMM": "topology=gossip sync=d_admm topology.graph=ring sync.rho=0.1 optimizer.momentum=0",
    "HALoS": "topology=halos topology.regions=[0,0,1] topology.updates=4 sync=asp optimizer.lr=0.02",
    "ssp on two servers": f"sync=ssp compression=topk compression.ratio=0.2 {PIECES}",
}
STEPS, FIRST_S, LAST_S = 900, 0.0, 3.0
AFTER_S, EVERY_S, LONG_S, PARTS = 2.0, 10.0, 75.0, 20


class Failure(NamedTuple):
    """The failure of one worker, so many seconds before everything is killed."""

    worker: int
    before_s: float


class Whole(NamedTuple):
    """A run in virtual time that was never stopped."""

    sha256: str
    loss: float


def whole(line: list[str]) -> Whole:
    ran = simulated(*line)
    assert ran.learner is not None
    return Whole(ran.sha256, float(ran.learner.evaluate(ran.params)["train_loss"] or 0.0))


def started(argv: list[str], folder: str, by: Sequence[str] = ()) -> subprocess.Popen:
    command = [
        sys.executable,
        *by,
        "-m",
        "ashl.cli",
        "train",
        *argv,
        f"run.dir={folder}",
        "tracking=none",
        "-q",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # which torchrun would say that it sets
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, env=env)


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint/*/manifest.json"), key=lambda path: int(path.parent.name))


def killed(line: list[str], folder: str, after_s: float, first: Failure | None) -> str:
    """A run of which every process is killed so long after its first checkpoint, or after the
    failure of one worker then.
    """
    process = started([*line, "runtime=local", "run.checkpoint_s=0.5"], folder)
    try:
        while not checkpoints(Path(folder)) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(after_s)
        if first is not None and process.poll() is None:
            with suppress(KeyError, ProcessLookupError):
                os.kill(ranks_of(Path(folder))[first.worker], signal.SIGKILL)
            time.sleep(first.before_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    while ranks_of(Path(folder)):
        time.sleep(0.02)
    summary = Path(folder, "summary.json")
    if summary.exists():
        return (
            "was over" if json.loads(summary.read_text())["status"] == "finished" else "has failed"
        )
    manifest = newest(folder)
    absent = manifest["absent"]
    return (
        f"killed {after_s:.2f} s after its first checkpoint"
        + (f", {first.before_s:.2f} s after worker {first.worker}" if first else "")
        + f", goes on from {manifest['time_ns'] / 1e9:.2f} s"
        + (f" without a part of worker {absent}" if absent else "")
    )


def newest(folder: str) -> dict:
    """Return the manifest of the newest checkpoint."""
    return json.loads(checkpoints(Path(folder))[-1].read_text())


def judged(line: list[str], folder: str, in_rounds: bool, expected: Whole) -> tuple[bool, str]:
    """Return True if a resumed run ends correctly, with a description of its end."""
    command = [sys.executable, "-m", "ashl.cli", "train", "--resume", folder, "-q"]
    since_s = newest(folder)["time_ns"] / 1e9
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    path = Path(folder, "summary.json")
    if ended.returncode or ended.stderr or not path.exists() or ranks_of(Path(folder)):
        return False, f"exit code {ended.returncode}: {ended.stderr}"
    summary = json.loads(path.read_text())
    events = jsonl.read(Path(folder, "events.jsonl"))
    fails = any(e["kind"] == "worker_failed" for e in events)
    rounds = [  # rounds that a failure has interrupted are recorded twice
        (e["rank"], e["round"])
        for e in events
        if e["kind"] == "round" and (not fails or e["start_s"] >= since_s)
    ]
    balanced = (
        summary["steps"] == sum(worker["steps"] for worker in summary["workers"]) >= STEPS
        and len(rounds) == len(set(rounds))
        and adds_up(summary)
        and all(failed["rejoined_s"] for failed in summary["failed_workers"])
    )
    if in_rounds and not fails:
        same = summary["params_sha256"] == expected.sha256
        return balanced and same, "the same bits" if same else "other bits"
    loss = summary["final"]["train_loss"]
    return (
        balanced and loss < 1.25 * expected.loss + 0.05,
        f"loss {loss:.3f}, whole {expected.loss:.3f}",
    )


def trials(count: int, seed: int, only: str, failures: bool) -> None:
    rng, wrong, known = random.Random(seed), list[str](), dict[str, Whole]()
    for number in range(count):
        modes = ROUNDS if number % 2 else OWN_PACE
        name = rng.choice([name for name in modes if only in name] or list(modes))
        after_s = rng.uniform(FIRST_S, LAST_S)
        first = Failure(rng.randrange(3), rng.uniform(0.0, 1.0)) if failures else None
        line = [*RUN, *modes[name].split(), f"stop.steps={STEPS}"]
        known[name] = known.get(name) or whole(line)
        how = killed(line, f"run-{number}", after_s, first)
        ok, what = (
            (True, "")
            if how == "was over"
            else judged(line, f"run-{number}", modes is ROUNDS, known[name])
        )
        print(f"{number + 1}/{count} {name}: {how}; {what}{'' if ok else ': WRONG'}", flush=True)
        wrong += [] if ok else [f"run-{number} {name}: {how}; {what}"]
    print(f"{count - len(wrong)} of {count} as they should, seed {seed}", *wrong, sep="\n")


def seen(process: subprocess.Popen, folder: Path, of: Callable[[dict], float]) -> list[float]:
    """The moments of all checkpoints that a run makes until it has ended."""
    found = dict[str, float]()
    while process.poll() is None:
        for path in checkpoints(folder):
            with suppress(OSError, ValueError):
                found[path.parent.name] = of(json.loads(path.read_text()))
        time.sleep(0.2)
    return list(found.values())


def cost(folder: str, *by: str) -> list[str]:
    """Rounds that end shortly after a checkpoint against those of all other times, in one run; a
    row.
    """
    mode = (
        "cluster=real cluster.num_workers=2 topology=all_reduce sync=bsp model.hidden=[512,512]"
        " optimizer=adam"
    )
    line = [
        *mode.split(),
        f"runtime={'torchrun' if by else 'local'}",
        f"stop.seconds={LONG_S}",
        f"run.checkpoint_s={EVERY_S}",
    ]
    run = Path(folder)
    process = started([*line, "tracking.events=all", "eval.every_s=1000"], folder, by)
    moments = seen(process, run, lambda manifest: max(manifest["ranks_ns"]) / 1e9)
    ends = [
        e["end_s"]
        for e in jsonl.read(run / "events.jsonl")
        if e["kind"] == "round" and e["rank"] == 0
    ]
    near = [
        sum(at <= end < at + AFTER_S for end in ends) for at in moments if at + AFTER_S < LONG_S
    ]
    between = [at + AFTER_S * k for at in moments for k in (-2, -1, 1, 2, 3)]
    far = [
        sum(at <= end < at + AFTER_S for end in ends)
        for at in between
        if AFTER_S < at < LONG_S - AFTER_S
    ]
    usual = statistics.median(far)
    shares = sorted((1 - count / usual) * AFTER_S / EVERY_S for count in near)
    newest = checkpoints(run)[-1].parent
    size = sum(file.stat().st_size for file in newest.iterdir())
    file, store = newest / "rank0.safetensors", StoreServer(new_secret())
    document = decode(file.read_bytes())
    began = time.process_time()
    for number in range(PARTS):
        content = encode(document)
        if by:
            store.call("set", f"part/{number}", content)
            content = store.call("get", f"part/{number}")
            store.call("delete_key", f"part/{number}")
        rank_checkpoint.write(run / "again.safetensors", content)
    wrote = f"{(time.process_time() - began) / PARTS / EVERY_S:.2%}"
    row = [
        f"{len(near)}",
        f"{size / 1e6:.1f} MB",
        f"{usual / AFTER_S:.0f}",
        wrote,
        f"{statistics.median(shares):+.2%}",
    ]
    return [*row, f"{shares[0]:+.2%} to {shares[-1]:+.2%}"]


def costs() -> None:
    job = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    rows = [["its own processes", *cost("own")], ["a job of torchrun", *cost("job", *job)]]
    columns = ["", "checkpoints", "size", "rounds/s", "CPU to write", "fewer rounds", "from, to"]
    note = (
        "mlp with 2 x 512 hidden units, Adam, bsp by all-reduce, two processes; rounds in the "
        f"{AFTER_S:g} s after each and between them"
    )
    show("what a checkpoint every 10 s costs", columns, rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="of modes with this in their name, where there are some"
    )
    parser.add_argument("--failures", action="store_true", help="a worker is killed first")
    parser.add_argument("--cost", action="store_true", help="what checkpoints cost, and no trials")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as runs have it: with more, sums have other last bits
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        costs() if asked.cost else trials(asked.trials, asked.seed, asked.only, asked.failures)


if __name__ == "__main__":
    main()
