"""A failure storm, `ashl` beside torchft: `python -m tests.benchmarks.storm`.

Needs root, for network namespaces. torchft is optional: `pip install torchft==0.2.0`.

Two replicas train the same model on the same data with paced steps, each in a network namespace.
The first one also has the controller of `ashl` and its server, or the lighthouse of torchft. A
strike kills a replica (SIGKILL), stops it (SIGSTOP), or cuts the second namespace off. The gaps
between strikes are exponential with the given mean, and at least 30 s. They are drawn with the seed,
so all systems get the same storm. An outage lasts 15 s: then a killed replica is started again, a
stopped one continues, a cut link is mended. A replica whose process ends by itself is started again
after 1 s, as a supervisor of services does.

Reported per system: the committed steps, relative to a run of the same system without strikes. The
survivor's gap is the time from a strike to its next commit, except one that was in flight. Further
the time until the victim commits again, and the final training loss. Systems with `-tuned` have
failure timeouts of 2 s, those with `-quick` of 0.8 s.
"""

import argparse
import csv
import importlib.util
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from ashl.planning.instantiate import assemble_job
from ashl.tracking import jsonl
from tests.benchmarks.table import show, write_csv
from tests.disturbed import ranks_of
from tests.engines import free_port
from tests.namespaces import HOSTS, address, cut, inside, machines, missing
from tests.support import planned

REPLICAS, LOCAL_STEPS, STEP_S, LR, BATCH = 2, 20, 0.025, 0.0003, 32
OUTAGE_S, APART_S = 15.0, 30.0
RESTART_S = 1.0  # from the end of a process that was not killed to its restart
# failure timeouts of systems by the end of their name; None = the system's default
TIMEOUTS_S = {"": None, "-tuned": 2.0, "-quick": 0.8}
WAIT_S = 30.0  # `ashl` waits so long for processes of the job, if its failure timeout is set
IN_FLIGHT_S = 0.1  # a commit so soon after a strike was in flight
START_LIMIT_S, END_LIMIT_S = 60.0, 60.0
POLL_S = 0.02
SCAN_S = 0.3  # between two searches for the process of a worker
KINDS = ("kill", "stop", "cut")
WORKLOAD = (
    "model.hidden=[128]",
    f"optimizer.lr={LR}",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    f"dataset.batch_size={BATCH}",
)
METHODS = {
    "local_sgd": ("topology=all_reduce", "sync=local_sgd"),
    "diloco": ("topology=all_reduce", "sync=local_sgd", "outer=nesterov"),
    "asp": ("topology=parameter_server", "sync=asp"),
}
INSTALL = "pip install torchft==0.2.0"


@dataclass(frozen=True)
class System:
    """A system of the comparison."""

    stack: str  # ashl or torchft
    method: str  # a key of METHODS
    limits: str  # a key of TIMEOUTS_S

    @property
    def name(self) -> str:
        return f"{self.stack}-{self.method}{self.limits}"

    @property
    def timeout_s(self) -> float | None:
        return TIMEOUTS_S[self.limits]


SYSTEMS = {
    system.name: system
    for limits in TIMEOUTS_S
    for system in (
        System("torchft", "local_sgd", limits),
        System("torchft", "diloco", limits),
        System("ashl", "local_sgd", limits),
        System("ashl", "diloco", limits),
        System("ashl", "asp", limits),
    )
}


@dataclass(frozen=True)
class Strike:
    """A failure of a replica, at a time in seconds since all replicas had committed."""

    time_s: float
    replica: int
    kind: str


@dataclass(frozen=True)
class Commit:
    """A commit of a replica, at a time of the run's clock."""

    time_s: float
    replica: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """The times after a strike, in seconds from it; None if there was no commit until the end."""

    system: str
    mean_s: float
    seed: int
    time_s: float
    kind: str
    replica: int
    gap_s: float | None
    back_s: float | None


@dataclass(frozen=True)
class Row:
    """A run in a storm."""

    system: str
    mean_s: float
    seed: int
    minutes: float
    strikes: int
    skipped: int  # strikes while a replica was not running
    committed_steps: int
    fault_free_steps: float  # expected in the same time without strikes
    share: float
    gap_median_s: float | None
    gap_worst_s: float | None
    back_median_s: float | None
    back_worst_s: float | None
    final_loss: float | None
    end: str


def draw_strikes(seconds: float, mean_s: float, kinds: Sequence[str], seed: int) -> list[Strike]:
    """Draw a storm; each kind is equally frequent, and the last outage ends before the run."""
    rng = random.Random(f"{seed} {mean_s}")
    strikes, order, time_s = list[Strike](), list[str](), 0.0
    while True:
        time_s += max(APART_S, rng.expovariate(1 / mean_s))
        if time_s + 2 * OUTAGE_S > seconds:
            return strikes
        if not order:
            order = rng.sample(kinds, len(kinds))
        kind = order.pop()
        victim = rng.randrange(REPLICAS)
        strikes.append(Strike(time_s, REPLICAS - 1 if kind == "cut" else victim, kind))


@dataclass
class Processes:
    """The processes of a run in its namespaces, each with a log in the run's folder."""

    names: list[str]
    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, machine: int, log: str, command: Sequence[str], **env: str) -> subprocess.Popen:
        """Start a command in a namespace. The process id is that of the command itself."""
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        with (self.folder / log).open("a") as out:
            process = subprocess.Popen(
                [*inside(self.names[machine]), sys.executable, *command],
                env=os.environ | own | env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kill every process of these namespaces."""
        for name in self.names:
            for pid in processes_in(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.wait()


def introduce(names: Sequence[str]) -> None:
    """Let every machine know the host names of the others, which torchft's transport uses."""
    for name in names:
        with (HOSTS / name / "hosts").open("a") as hosts:
            hosts.writelines(f"{address(other)} {other}\n" for other in names if other != name)


def processes_in(namespace: str) -> list[int]:
    found = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


@dataclass
class TorchftRun:
    """A lighthouse and its replicas."""

    system: System
    processes: Processes
    seconds: float
    replicas: dict[int, subprocess.Popen] = field(default_factory=dict)
    read_bytes: int = 0
    zero_s: float = 0.0  # monotonic time at the zero of the commits' clock

    def begin(self) -> None:
        self.port = free_port()
        command = ["-m", "tests.benchmarks.storm_torchft", "lighthouse", f"--port={self.port}"]
        self.processes.start(0, "lighthouse.log", [*command, *self.tuning()])
        for replica in range(REPLICAS):
            self.restart(replica)

    def tuning(self) -> list[str]:
        limit_s = self.system.timeout_s
        return [] if limit_s is None else [f"--timeout-s={limit_s}"]

    def restart(self, replica: int) -> None:
        names = self.processes.names
        command = [
            *("-m", "tests.benchmarks.storm_torchft", "replica", *self.tuning()),
            f"--lighthouse=http://{address(names[0])}:{self.port}",
            f"--host={address(names[replica])}",
            f"--replica={replica}",
            f"--replicas={REPLICAS}",
            f"--method={self.system.method}",
            f"--local-steps={LOCAL_STEPS}",
            f"--step-s={STEP_S}",
            f"--lr={LR}",
            f"--batch={BATCH}",
            f"--folder={self.processes.folder}",
            "--setting",
            *WORKLOAD,
        ]
        self.replicas[replica] = self.processes.start(replica, f"replica{replica}.log", command)

    def pid(self, replica: int) -> int | None:
        """Return the process of a replica, None if there is none."""
        process = self.replicas[replica]
        return process.pid if process.poll() is None else None

    def new_commits(self) -> list[Commit]:
        path = self.processes.folder / "commits.jsonl"
        lines, self.read_bytes = jsonl.tail(path, self.read_bytes)
        return [Commit(line["time_s"], line["replica"], line["steps"]) for line in lines]

    def finish(self) -> tuple[float | None, str]:
        """End the run; return its final training loss and how it ended."""
        (self.processes.folder / "stop").touch()
        end = "in order"
        for replica, process in self.replicas.items():
            try:
                if code := process.wait(END_LIMIT_S):
                    end = f"replica {replica} ended with exit code {code}"
            except subprocess.TimeoutExpired:
                end = f"replica {replica} hung"
        finals = [torch.load(path) for path in self.processes.folder.glob("final-*.pt")]
        if not finals:
            return None, end
        newest = max(finals, key=lambda final: final["step"])
        learner = assemble_job(planned(*WORKLOAD), "cpu").learner
        return learner.evaluate(newest["parameters"])["train_loss"], end


@dataclass
class AshlRun:
    """A controller with its workers, of which worker 0 is its child."""

    system: System
    processes: Processes
    seconds: float
    trains: dict[int, subprocess.Popen] = field(default_factory=dict)
    joined: dict[int, subprocess.Popen] = field(default_factory=dict)
    child: int | None = None
    scanned_s: float = 0.0
    read_bytes: int = 0
    zero_s: float = float("inf")  # monotonic time at the zero of the commits' clock

    @property
    def run_dir(self) -> Path:
        return self.processes.folder / "run"

    def tuning(self) -> list[str]:
        limit_s = self.system.timeout_s
        if limit_s is None:
            return []
        return [f"runtime.heartbeat_timeout_s={limit_s}", f"runtime.wait_timeout_s={WAIT_S}"]

    def begin(self) -> None:
        setting = [
            "runtime=torchrun",
            "schedule=single",
            "cluster=homogeneous",
            f"cluster.num_workers={REPLICAS}",
            f"cluster.step_s={STEP_S}",
            "cluster.exchange_s=null",
            "tracking=none",
            "tracking.events=all",
            "eval.every_s=1000000",
            f"run.dir={self.run_dir}",
            f"stop.seconds={self.seconds + 5}",
            *METHODS[self.system.method],
            f"sync.local_steps={LOCAL_STEPS}",
            *self.tuning(),
            *WORKLOAD,
        ]
        replicas = [*range(REPLICAS)]
        if "topology=parameter_server" in METHODS[self.system.method]:
            replicas.append(0)  # the server is beside the first worker
        world = {
            "WORLD_SIZE": str(len(replicas)),
            "MASTER_ADDR": address(self.processes.names[0]),
            "MASTER_PORT": str(free_port()),
            "ASHL_LOG": "info",
        }
        for rank, replica in enumerate(replicas):
            self.trains[rank] = self.processes.start(
                replica,
                f"process{rank}.log",
                ["-m", "ashl.cli", "train", *setting],
                RANK=str(rank),
                **world,
            )

    def restart(self, replica: int) -> None:
        command = ["-m", "ashl.cli", "join", str(self.run_dir), "--worker", str(replica)]
        self.joined[replica] = self.processes.start(replica, f"join{replica}.log", command)

    def pid(self, replica: int) -> int | None:
        """Return the process of a worker, None if there is none."""
        child = self.pid_of_child() if replica == 0 else None
        process = self.joined.get(replica, self.trains[replica] if replica > 0 else None)
        if child is not None or process is None or process.poll() is not None:
            return child
        return process.pid

    def pid_of_child(self) -> int | None:
        """Return the process of worker 0 if the controller started it, None if there is none."""
        if self.child is not None and is_running(self.child):
            return self.child
        self.child = None
        if time.monotonic() - self.scanned_s > SCAN_S:
            self.scanned_s = time.monotonic()
            self.child = ranks_of(self.run_dir).get(0)
        return self.child

    def new_commits(self) -> list[Commit]:
        path = self.run_dir / "events.jsonl"
        lines, self.read_bytes = jsonl.tail(path, self.read_bytes)
        rounds = [line for line in lines if line["kind"] == "round" and not line["dropped"]]
        now_s = time.monotonic()
        self.zero_s = min([self.zero_s, *(now_s - line["end_s"] for line in rounds)])
        return [Commit(line["end_s"], line["rank"], line["steps"]) for line in rounds]

    def finish(self) -> tuple[float | None, str]:
        """Wait for the end of the run; return its final training loss and how it ended."""
        controller = self.trains[0]
        try:
            code = controller.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None, "hung"
        summary = jsonl.read_json(self.run_dir / "summary.json") or {}
        loss = (summary.get("final") or {}).get("train_loss")
        return loss, f"exit code {code}" if code else "in order"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


# --- a run


@dataclass
class Storm:
    """The state of a run in a storm; times are monotonic."""

    run: TorchftRun | AshlRun
    commits: list[Commit] = field(default_factory=list)
    outages: list[tuple[float, Strike]] = field(default_factory=list)  # with their ends
    done: list[Strike] = field(default_factory=list)
    skipped: int = 0
    ended_s: dict[int, float] = field(default_factory=dict)  # when a process was found missing

    def read(self) -> None:
        self.commits += self.run.new_commits()

    def strike(self, strike: Strike) -> None:
        """Begin an outage, unless a replica is not running."""
        pids = [self.run.pid(replica) for replica in range(REPLICAS)]
        victim = pids[strike.replica]
        if self.outages or victim is None or None in pids:
            self.skipped += 1
            return
        print(f"  {strike.time_s:6.1f} s: {strike.kind} replica {strike.replica}", flush=True)
        self.done.append(strike)
        if strike.kind == "cut":
            cut(self.run.processes.names[strike.replica])
        else:
            os.kill(victim, signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP)
        self.outages.append((time.monotonic() + OUTAGE_S, strike))

    def end_outages(self, now_s: float) -> None:
        for ends_s, strike in [*self.outages]:
            if now_s >= ends_s:
                self.outages.remove((ends_s, strike))
                self.end_outage(strike)

    def end_outage(self, strike: Strike) -> None:
        if strike.kind == "cut":
            cut(self.run.processes.names[strike.replica], down=False)
        elif strike.kind == "stop" and (pid := self.run.pid(strike.replica)) is not None:
            os.kill(pid, signal.SIGCONT)

    def restart_ended(self, now_s: float) -> None:
        """Start replicas again: a killed one at the end of its outage, others after `RESTART_S`."""
        killed = [strike.replica for _, strike in self.outages if strike.kind == "kill"]
        for replica in range(REPLICAS):
            if self.run.pid(replica) is not None:
                self.ended_s.pop(replica, None)
            elif (
                now_s - self.ended_s.setdefault(replica, now_s) >= RESTART_S
                and replica not in killed
            ):
                self.run.restart(replica)
                print(f"          starts replica {replica}", flush=True)


def await_start(storm: Storm) -> float:
    """Return the monotonic time at which all replicas have committed.

    Raises: RuntimeError after `START_LIMIT_S`.
    """
    limit_s = time.monotonic() + START_LIMIT_S
    while len({commit.replica for commit in storm.commits}) < REPLICAS:
        if time.monotonic() > limit_s:
            raise RuntimeError(f"no first commit within {START_LIMIT_S:g} s")
        time.sleep(POLL_S)
        storm.read()
    return time.monotonic()


def go_through(
    system: System, folder: Path, strikes: Sequence[Strike], seconds: float
) -> tuple[Storm, float, float | None, str]:
    """Run a system in a storm; return its state, the monotonic time of its first commits, its final
    loss, and how it ended.
    """
    folder.mkdir()
    with machines(*[1000] * REPLICAS) as names:
        introduce(names)
        processes = Processes(names, folder)
        make = TorchftRun if system.stack == "torchft" else AshlRun
        storm = Storm(make(system, processes, seconds))
        try:
            storm.run.begin()
            zero_s = await_start(storm)
            waiting = [*strikes]
            while (now_s := time.monotonic()) < zero_s + seconds:
                if waiting and now_s >= zero_s + waiting[0].time_s:
                    storm.strike(waiting.pop(0))
                storm.end_outages(now_s)
                storm.restart_ended(now_s)
                storm.read()
                time.sleep(POLL_S)
            loss, end = storm.run.finish()
            storm.read()
        finally:
            processes.end()
    return storm, zero_s, loss, end


def steps_within(storm: Storm, zero_s: float, seconds: float) -> int:
    """Return the steps committed in this time from `zero_s` on."""
    times = ((commit.time_s + storm.run.zero_s - zero_s, commit.steps) for commit in storm.commits)
    return sum(steps for time_s, steps in times if 0 < time_s <= seconds)


def judge(
    storm: Storm, zero_s: float, seconds: float, mean_s: float, seed: int
) -> Iterator[Outcome]:
    """Yield the outcome of each strike."""
    shift_s = storm.run.zero_s - zero_s
    commits = [(commit.time_s + shift_s, commit.replica) for commit in storm.commits]
    for strike in storm.done:
        next_s = min(
            (
                time_s
                for time_s, replica in commits
                if replica != strike.replica and strike.time_s + IN_FLIGHT_S < time_s <= seconds
            ),
            default=None,
        )
        back_s = min(
            (
                time_s
                for time_s, replica in commits
                if replica == strike.replica and strike.time_s + OUTAGE_S < time_s <= seconds
            ),
            default=None,
        )
        yield Outcome(
            storm.run.system.name,
            mean_s,
            seed,
            round(strike.time_s, 2),
            strike.kind,
            strike.replica,
            None if next_s is None else round(next_s - strike.time_s, 3),
            None if back_s is None else round(back_s - strike.time_s, 3),
        )


def summarise(
    storm: Storm,
    outcomes: Sequence[Outcome],
    committed: int,
    fault_free: float,
    minutes: float,
    mean_s: float,
    seed: int,
    loss: float | None,
    end: str,
) -> Row:
    gaps = [outcome.gap_s for outcome in outcomes if outcome.gap_s is not None]
    backs = [outcome.back_s for outcome in outcomes if outcome.back_s is not None]
    return Row(
        storm.run.system.name,
        mean_s,
        seed,
        minutes,
        len(storm.done),
        storm.skipped,
        committed,
        round(fault_free),
        round(committed / fault_free, 4),
        statistics.median(gaps) if gaps else None,
        max(gaps, default=None),
        statistics.median(backs) if backs else None,
        max(backs, default=None),
        loss,
        end,
    )


def measure(
    system: System,
    asked: argparse.Namespace,
    place: Path,
) -> Iterator[tuple[Row, list[Outcome]]]:
    """Yield each run of a system in a storm, after one without strikes."""
    calm_s = 60 * asked.fault_free_minutes
    print(f"{system.name}: {calm_s:g} s without strikes", flush=True)
    storm, zero_s, _, _ = go_through(system, place / f"{system.name}-calm", (), calm_s)
    rate = steps_within(storm, zero_s, calm_s) / calm_s
    seconds = 60 * asked.minutes
    for mean_s in asked.mean_s:
        for seed in asked.seeds:
            print(f"{system.name}: mean {mean_s:g} s, seed {seed}, {rate:.1f} steps/s", flush=True)
            strikes = draw_strikes(seconds, mean_s, asked.kinds, seed)
            folder = place / f"{system.name}-{mean_s:g}-{seed}"
            storm, zero_s, loss, end = go_through(system, folder, strikes, seconds)
            committed = steps_within(storm, zero_s, seconds)
            outcomes = [*judge(storm, zero_s, seconds, mean_s, seed)]
            row = summarise(
                storm,
                outcomes,
                committed,
                rate * seconds,
                asked.minutes,
                mean_s,
                seed,
                loss,
                end,
            )
            yield row, outcomes


# --- the report


def append(file: Path, found: Sequence[Row] | Sequence[Outcome]) -> None:
    """Append to a CSV file, with a header if it is new."""
    if not found:
        return
    is_new = not file.exists()
    with file.open("a", newline="") as out:
        table = csv.DictWriter(out, [column.name for column in fields(found[0])])
        if is_new:
            table.writeheader()
        table.writerows(asdict(one) for one in found)


# times are median and worst
COLUMNS = (
    "system",
    "mean between strikes",
    "runs",
    "strikes",
    "steps/s without strikes",
    "steps/s in the storm",
    "share",
    "gap after a kill",
    "gap after a stop or cut",
    "victim commits again",
    "final loss",
)


def read(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(newline="") as text:
        return [*csv.DictReader(text)]


def table_of(rows: Sequence[dict[str, str]], strikes: Sequence[dict[str, str]]) -> list[list[str]]:
    """Return a line per system and mean, over all seeds."""
    lines = []
    for mean_s in sorted({float(row["mean_s"]) for row in rows}):
        for name in SYSTEMS:
            key = {"system": name, "mean_s": str(mean_s)}
            runs = [row for row in rows if row | key == row]
            found = [strike for strike in strikes if strike | key == strike]
            if not runs:
                continue
            kills = [one["gap_s"] for one in found if one["kind"] == "kill"]
            others = [one["gap_s"] for one in found if one["kind"] != "kill"]
            seconds = sum(60 * float(row["minutes"]) for row in runs)
            calm = sum(float(row["fault_free_steps"]) for row in runs) / seconds
            rate = sum(float(row["committed_steps"]) for row in runs) / seconds
            losses = [float(row["final_loss"]) for row in runs if row["final_loss"]]
            lines.append(
                [
                    name,
                    f"{mean_s:g} s",
                    str(len(runs)),
                    str(len(found)),
                    f"{calm:.1f}",
                    f"{rate:.1f}",
                    f"{rate / calm:.3f}",
                    middle_and_worst(kills),
                    middle_and_worst(others),
                    middle_and_worst([one["back_s"] for one in found]),
                    f"{statistics.mean(losses):.3f}" if losses else "-",
                ]
            )
    return lines


def middle_and_worst(times: Sequence[str]) -> str:
    """Return median and maximum in seconds; times until the end of the run are counted apart."""
    known = [float(time_s) for time_s in times if time_s]
    if not known:
        return "-"
    never = f", {len(times) - len(known)} not" if len(known) < len(times) else ""
    return f"{statistics.median(known):.2f}, {max(known):.2f} s{never}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8, help="of each run in a storm")
    parser.add_argument("--fault-free-minutes", type=float, default=1)
    parser.add_argument("--mean-s", type=float, nargs="+", default=[120, 60])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--runs-csv", type=Path, help="file to which the runs are appended")
    parser.add_argument("--strikes-csv", type=Path, help="file to which the strikes are appended")
    parser.add_argument("--csv", type=Path, help="file to write the table of both files to")
    parser.add_argument("--folder", type=Path, help="new folder for logs, which is kept")
    asked = parser.parse_args()
    if why := missing():
        sys.exit(f"not run: {why}")
    systems = [SYSTEMS[name] for name in asked.systems]
    if importlib.util.find_spec("torchft") is None:
        absent = [system.name for system in systems if system.stack == "torchft"]
        systems = [system for system in systems if system.stack != "torchft"]
        if absent:
            print(f"NOT RUN, torchft is missing ({INSTALL}): {', '.join(absent)}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    place = Path(tempfile.mkdtemp()) if asked.folder is None else asked.folder
    place.mkdir(exist_ok=True)
    runs_csv = asked.runs_csv or place / "runs.csv"
    strikes_csv = asked.strikes_csv or place / "strikes.csv"
    try:
        for system in systems:
            for row, outcomes in measure(system, asked, place.absolute()):
                print(row, *outcomes, sep="\n  ", flush=True)
                append(runs_csv, [row])
                append(strikes_csv, outcomes)
        lines = table_of(read(runs_csv), read(strikes_csv))
    finally:
        if asked.folder is None:
            shutil.rmtree(place, ignore_errors=True)
    note = f"H = {LOCAL_STEPS}, steps of {1000 * STEP_S:g} ms, outages of {OUTAGE_S:g} s"
    show("failure storm", COLUMNS, lines, note)
    if asked.csv:
        write_csv(asked.csv, COLUMNS, lines)


if __name__ == "__main__":
    main()
