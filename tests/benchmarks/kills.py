"""The outcome of runs with one killed worker: `python -m tests.benchmarks.kills`.

Every sync mode on every topology that supports it, four workers, two stages of the same kind.
Worker and moment are drawn from a run without failures. The five moments are: while the worker
computes, pushes, or pulls (or is in a collective), within 20 ms of the stage boundary, and in the
last tenth. In virtual time all five are tried for each mode. On processes the worker gets SIGKILL
when the run's clock shows that moment, as the controller sees it; `--sample N --seed S` draws N of
them.

`--moments` tries all five for each mode on processes, and prints one row a mode as Markdown.

A run may continue (exit code 0, and the summary names the failed worker, or the run was over by
then). It may also end in one sentence (exit code 1), or be an error before it begins (exit code 2).
All other outcomes are WRONG: another exit code, no summary, a failure that is not in it, a
remaining process, more than one line, or 20 s after the kill.

On processes the last line has the median time from a kill to the survivors' next merge. With
`--rejoin` killed workers are restarted and rejoin. With `--overlaps` each sync mode is tried with
each overlap, behind NICs.
"""

import argparse
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ashl.cli.app import main as ashl
from ashl.config.catalog import catalog
from ashl.config.compose import compose
from ashl.errors import AshlError
from ashl.planning.compile_plan import compile_plan
from ashl.run.monitor import Monitor
from ashl.runtime.records import Heartbeat, Record
from ashl.tracking import jsonl
from tests.benchmarks.table import show
from tests.disturbed import ranks_of

WORKERS, BOUND_S = 4, 20.0
SETTING = (
    "-q",
    "tracking=none",
    "tracking.events=all",
    "run.save_weights=false",
    "model.hidden=[8]",
    "cluster.compute=[1,1.5,2,1]",
    "cluster.link=null",
    "cluster.step_s=0.01",
    "cluster.exchange_s=0.01",
    "stop.seconds=1.5",
    "eval.every_s=0.5",
)
NICS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=20",
    "cluster.latency_s=0.001",
)
TOPOLOGIES = ("parameter_server", "all_reduce", "partial_all_reduce", "gossip")
MOMENTS = (
    "compute",
    "push",
    "pull",
    "border",
    "end",
)  # where workers sum, push and pull are its two halves
ON, OVER, ENDS, REFUSED, WRONG = "goes on", "was over", "ends", "refused", "WRONG"


class Kill(NamedTuple):
    """A worker of a mode, the time of its kill, and its activity then."""

    topology: str
    sync: str
    plan: str  # the file
    moment: str
    worker: int
    time_s: float


class Outcome(NamedTuple):
    what: str
    took_s: float = 0.0  # from the kill on
    why: str = ""
    merge_s: float | None = None  # from the kill to the survivors' next merge

    @property
    def label(self) -> str:
        return f"{self.what} (within {self.took_s:.1f} s)" if self.what == ENDS else self.what


def words_of(topology: str, sync: str) -> list[str]:
    """The settings of a mode; an overlap, if it has one, needs NICs."""
    nics = NICS if "overlap=" in sync else ()
    return [f"topology={topology}", *f"sync={sync}".split(), *nics]


def modes(topologies: Sequence[str], overlaps: bool = False) -> Iterator[tuple[str, str, str]]:
    """(topology, sync, file of a plan of two stages) of all that can be planned; with `overlaps`,
    each sync mode with each overlap.
    """
    known = catalog(None)
    choices = [f" overlap={name}" for name in known["overlap"]] if overlaps else [""]
    for topology in topologies:
        for sync in [sync + overlap for sync in known["sync"] for overlap in choices]:
            own = [word for word in SETTING if word != "-q"] + [
                *words_of(topology, sync),
                "runtime=sim",
            ]
            try:
                plan = compile_plan(compose(own, None), None, own)
            except AshlError:
                continue
            (stage,) = plan.stages
            path = Path(f"{topology}-{sync.replace(' overlap=', '-')}.json")
            path.write_text(
                replace(plan, stages=(replace(stage, until={"seconds": 0.7}), stage)).to_json()
            )
            yield topology, sync, str(path)


def command(topology: str, sync: str, plan: str, runtime: str, folder: str) -> list[str]:
    mode = [
        *words_of(topology, sync),
        f"plan={plan}",
        f"runtime={runtime}",
        f"run.dir={folder}",
    ]
    return ["train", *SETTING, *mode]


def said(argv: list[str]) -> tuple[int, str]:
    """Exit code and last words of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = ashl(argv)
    return code, err.getvalue()


def kills(mode: tuple[str, str, str], rng: random.Random) -> list[Kill]:
    """One for each moment that a run without failures has."""
    plan = mode[2]
    folder = Path(f"whole-{Path(plan).stem}")
    if not folder.exists() and said(command(*mode, "sim", str(folder)))[0] != 0:
        return []
    events = [*jsonl.read(folder / "events.jsonl")]
    summary = json.loads((folder / "summary.json").read_text())
    found, end_s = [], summary["time_s"]
    for moment in MOMENTS:
        worker = rng.randrange(WORKERS)
        if moment == "end":
            spans = [(0.9 * end_s, end_s)]
        elif moment == "border":
            border_s = summary["stages"][0]["end_s"]
            spans = [(border_s - 0.02, border_s + 0.02)] if len(summary["stages"]) > 1 else []
        else:
            rounds = [
                event for event in events if event["kind"] == "round" and event["rank"] == worker
            ]
            spans = [span[1:] for event in rounds for span in event["spans"] if span[0] == moment]
            spans = [
                span for span in spans if 0.2 < span[0] < 0.9 * end_s
            ]  # once it is known that it has begun
        if spans:
            found.append(Kill(*mode, moment, worker, rng.uniform(*rng.choice(spans))))
    return found


def in_virtual_time(kill: Kill, folder: str) -> Outcome:
    event = f"cluster.events=[{{time_s: {kill.time_s:.9f}, worker: {kill.worker}, fail: true}}]"
    began = time.monotonic()
    code, err = said([*command(kill.topology, kill.sync, kill.plan, "sim", folder), event])
    return judged(kill, Path(folder), code, err, time.monotonic() - began)


def at_once(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def on_processes(kill: Kill, folder: str, own: Sequence[str] = ()) -> Outcome:
    code, err, took_s = struck(kill, folder, own)
    if left := ranks_of(Path(folder)):
        return Outcome(WRONG, took_s, f"ranks {sorted(left)} are left")
    found = judged(kill, Path(folder), code, err, took_s)
    return found._replace(merge_s=next_merge_s(kill, Path(folder))) if found.what == ON else found


def next_merge_s(kill: Kill, folder: Path) -> float | None:
    """Seconds from the kill to the end of the survivors' first round after the failure was
    noticed; None without such a round.
    """
    (lost,) = json.loads((folder / "summary.json").read_text())["failed_workers"]
    ends = [
        event["end_s"]
        for event in jsonl.read(folder / "events.jsonl")
        if event["kind"] == "round" and event["rank"] != kill.worker and not event["dropped"]
    ]
    return min((end_s - kill.time_s for end_s in ends if end_s > lost["time_s"]), default=None)


def struck(
    kill: Kill, folder: str, own: Sequence[str] = (), strike: Callable[[int], None] = at_once
) -> tuple[int, str, float]:
    """The run in this process, and a thread that strikes one of its children by the run's clock:
    exit code, last words, and the seconds since then.
    """
    zeros, killed, over, emit = list[float](), list[float](), threading.Event(), Monitor.emit

    def listening(monitor: Monitor, record: Record) -> None:
        if isinstance(record, Heartbeat) and record.time_ns > 0:
            zeros.append(time.monotonic() - record.time_ns / 1e9)
        emit(monitor, record)

    def act() -> None:
        while not over.wait(0.002):
            if not killed and zeros and time.monotonic() - min(zeros) >= kill.time_s:
                if (pid := ranks_of(Path(folder)).get(kill.worker)) is not None:
                    strike(pid)
                killed.append(time.monotonic())
            if killed and time.monotonic() - killed[0] > BOUND_S:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=act, daemon=True)
    Monitor.emit = listening  # type: ignore[method-assign]
    thread.start()
    try:
        code, err = said([*command(kill.topology, kill.sync, kill.plan, "local", folder), *own])
    finally:
        Monitor.emit = emit  # type: ignore[method-assign]
        over.set()
        thread.join()
    return code, err, time.monotonic() - killed[0] if killed else 0.0


def judged(kill: Kill, folder: Path, code: int, err: str, took_s: float) -> Outcome:
    lines, path = err.splitlines(), folder / "summary.json"
    if code == 2:
        return Outcome(REFUSED, 0.0, err)
    if took_s > BOUND_S or not path.exists() or len(lines) > 1:
        return Outcome(WRONG, took_s, f"exit code {code} after {took_s:.1f} s: {err}")
    lost = [of["worker"] for of in json.loads(path.read_text())["failed_workers"]]
    if code == 0 and lost in ([], [kill.worker]) and not lines:
        return Outcome(ON if lost else OVER, took_s)
    if code == 1 and lines and lines[0].startswith("ashl: "):
        return Outcome(ENDS, took_s, err)
    return Outcome(WRONG, took_s, f"exit code {code}, lost {lost}: {err}")


def each_moment(topologies: Sequence[str], sample: int | None, seed: int) -> str:
    """Return the table of one kill at each moment of each mode on processes; each mode has its own
    draws.
    """
    found = dict[tuple[str, ...], Outcome]()
    of = {mode: random.Random(f"{seed} {mode}") for mode in modes(topologies)}
    drawn = [kill for mode, rng in of.items() for kill in kills(mode, rng)]
    if sample is not None:
        drawn = random.Random(seed).sample(drawn, sample)
    for number, kill in enumerate(drawn, 1):
        key = (kill.topology, kill.sync, kill.moment)
        outcome = on_processes(kill, f"real-{Path(kill.plan).stem}-{kill.moment}")
        found[key] = outcome
        print(f"{number} {' '.join(key)}: {outcome.what} {outcome.why}".strip(), flush=True)
    rows = [
        f"| topology | sync | {' | '.join(MOMENTS)} |",
        f"| --- | --- {'| --- ' * len(MOMENTS)}|",
    ]
    for topology, sync, _ in of:
        outcomes = [found.get((topology, sync, moment)) for moment in MOMENTS]
        if any(outcomes):
            cells = [outcome.label if outcome else "-" for outcome in outcomes]
            rows.append(f"| `{topology}` | `{sync}` | {' | '.join(cells)} |")
    counts = Counter(outcome.what for outcome in found.values())
    return "\n".join(
        [*rows, "", ", ".join(f"{what}: {count}" for what, count in counts.most_common())]
    )


def cell(outcomes: list[Outcome]) -> str:
    """Return the number of each outcome, and the longest time to the end."""
    counts = Counter(of.what for of in outcomes)
    slowest = max((of.took_s for of in outcomes if of.what == ENDS), default=0.0)
    text = {what: f"{what} {count}" for what, count in counts.most_common()}
    if slowest:
        text[ENDS] += f" (within {slowest:.1f} s)"
    return ", ".join(text.values()) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sample", type=int, help="so many drawn kills on processes; default: five for each mode"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default=",".join(TOPOLOGIES), help="of these topologies, separated by commas"
    )
    parser.add_argument("--processes", action="store_true", help="on processes alone")
    parser.add_argument("--overlaps", action="store_true", help="each sync mode with each overlap")
    parser.add_argument("--rejoin", action="store_true", help="restart killed workers")
    parser.add_argument(
        "--moments", action="store_true", help="each moment of each mode, on processes, as Markdown"
    )
    asked = parser.parse_args()
    if asked.moments:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            table = each_moment(asked.only.split(","), asked.sample, asked.seed)
        print(table)
        sys.exit(WRONG in table)
    rng, wrong = random.Random(asked.seed), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        drawn = {mode: kills(mode, rng) for mode in modes(asked.only.split(","), asked.overlaps)}
        everything = [kill for found in drawn.values() for kill in found]
        real = everything if asked.sample is None else rng.choices(everything, k=asked.sample)
        virtual, processes = defaultdict(list), defaultdict(list)
        for number, kill in enumerate([] if asked.processes else everything):
            virtual[kill[:3]].append(found := in_virtual_time(kill, f"sim-{number}"))
            if found.what == WRONG:
                wrong.append(f"{kill}: {found.why}")
        for number, kill in enumerate(real):
            own = ("runtime.max_restarts=1", "stop.seconds=4") if asked.rejoin else ()
            processes[kill[:3]].append(found := on_processes(kill, f"real-{number}", own))
            line = (
                f"{number + 1}/{len(real)} {kill.topology} {kill.sync} {kill.moment}: {found.what}"
                f" {found.why}"
            )
            print(line.strip(), flush=True)
            if found.what == WRONG:
                wrong.append(f"{kill}: {found.why}")
        rows = [[mode[0], mode[1], cell(virtual[mode]), cell(processes[mode])] for mode in drawn]
    show(
        "one worker killed",
        ["topology", "sync", "virtual time", "processes"],
        rows,
        f"seed {asked.seed}",
    )
    print(f"processes: {cell([found for row in processes.values() for found in row])}")
    times = [of.merge_s for row in processes.values() for of in row if of.merge_s is not None]
    if times:
        slowest = max(times)
        print(
            f"next merge of the survivors: median {median(times):.2f} s after the kill, at most"
            f" {slowest:.2f} s, {len(times)} kills"
        )
    print("\n".join(wrong))


if __name__ == "__main__":
    main()
