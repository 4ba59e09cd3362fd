"""Run `ashl replay`: repeat a recorded real run in virtual time, as it was or with changes.

Rule: the record becomes a profile: quantiles of each worker's step times, the mean times of its
transfers and encodings, and how long the server was busy with a push.
Limits: a run has transfers of one size only, so a change of topology or compression is refused.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rich.console import Console

from ashl.config.compose import compose
from ashl.config.override import group_of, index_by_key, key_of
from ashl.config.recorded import config_of, typed_settings
from ashl.errors import AshlError, UsageError
from ashl.plan.alpha_beta import AlphaBeta
from ashl.plan.confidence import quantiles, trimmed_deviation
from ashl.plan.files import read_plan
from ashl.plan.profile import SCHEMA, TICK_S, Profile, WorkerProfile
from ashl.planning.instantiate import OptionFactory
from ashl.run.train import run
from ashl.tracking import jsonl
from ashl.tracking.console import number, percent, plain_table, print_unwrapped, seconds
from ashl.tracking.recorder import EVENTS, SUMMARY

TOPOLOGIES = ("parameter_server", "all_reduce")  # topologies whose transfers are all of one kind
CHANGES = ("sync", "aggregate", "outer", "optimizer", "seed")
# Typed keys that do not apply to the replay.
NOT_REPEATED = ("runtime", "cluster", "profile", "plan", "run", "tracking", "stop", "eval", "name")
NO_EVALUATION = "eval.every_commits=1000000000"
Rounds = Sequence[Mapping[str, Any]]  # the rounds of one worker, from events.jsonl


class Replayed(NamedTuple):
    """The outcome of a replay.

    `record` is the content of replay.json: the run, the changes, and the summaries by name. `typed`
    is the settings of the real run, with the changes.
    """

    folder: Path
    record: dict[str, Any]
    typed: Sequence[str]

    def show(self, console: Console) -> None:
        """Print the run, its replay, and the replay with the change, each beside the one before."""
        cells, before_s = list[tuple[str, ...]](), None
        for name, row in self.record["runs"].items():
            change = "" if before_s is None else f"{row['time_s'] / before_s - 1:+.1%}"
            rate, wait = number(row["steps_per_s"]), percent(row["wait_share"])
            cells.append((name, seconds(row["time_s"]), change, rate, wait))
            before_s = row["time_s"]
        titles = ("run", "time", "change", "steps/s", "waiting")
        console.print(plain_table(titles, cells, left=titles))
        print_unwrapped(console, f"folder  {self.folder}")


def replay(folder: Path, changes: Sequence[str], config_dir: Path | None) -> Replayed:
    """Run a recorded run again in virtual time, as it was and with `changes`.

    Raises: UsageError if it cannot be replayed.
    """
    if wrong := [text for text in changes if group_of(text) not in CHANGES]:
        raise UsageError(
            f"{wrong[0]} is not replayed: a run measured its own model, messages and cluster;"
            f" change {', '.join(CHANGES)}, or take runtime=sim cluster=profile with `ashl profile`"
        )
    config, typed = config_of(folder), typed_settings(folder)
    summary = jsonl.read_json(folder / SUMMARY)
    if summary is None or summary["status"] != "finished" or summary["runtime"] == "sim":
        raise UsageError(
            f"the run in {folder} has not finished on processes; replay one that has, and change a"
            " run in virtual time by `ashl train`"
        )
    replay_dir = folder / "replay"
    shutil.rmtree(replay_dir, ignore_errors=True)
    replay_dir.mkdir()
    path = replay_dir / "profile.json"
    path.write_text(profile_of(folder, config).to_json(), encoding="utf-8")
    sim = ["runtime=sim", "runtime.gradients=false", "tracking=none", "cluster=profile"]
    fixed = (*sim, f"profile={path}", f"stop.steps={summary['steps']}", NO_EVALUATION)
    own = [text for text in typed if group_of(text) not in NOT_REPEATED]
    changed = index_by_key(changes).keys()
    kept = [text for text in own if not {key_of(text), group_of(text)} & changed]
    played = {"replayed": own} | ({" ".join(changes): [*kept, *changes]} if changes else {})
    rows = {"as it was": summary}
    for name, texts in played.items():
        config = compose([*texts, *fixed], config_dir)
        run_dir = str(replay_dir / ("replayed" if name == "replayed" else "changed"))
        ran = run({**config, "run": {**config["run"], "dir": run_dir}}, [], quiet=True, silent=True)
        if ran.summary is None:
            raise AshlError("a replay cannot run inside a job; start it without torchrun")
        rows[name] = ran.summary
    real = index_by_key(text for text in (*typed, *changes) if key_of(text) != "run.dir")
    record = {"run": str(folder), "changes": list(changes), "runs": rows}
    jsonl.write_json(replay_dir / "replay.json", record)
    return Replayed(replay_dir, record, [*real.values()])


def profile_of(folder: Path, config: Mapping[str, Any]) -> Profile:
    """Return the profile that the records of a run give.

    Raises: UsageError if the records are not enough.
    """
    plan, topology = read_plan(str(folder / "plan.json")), config["choices"]["topology"]
    if len(plan.stages) > 1 or topology not in TOPOLOGIES:
        raise UsageError(
            f"the run in {folder} has {len(plan.stages)} stages and topology={topology}; replay a"
            " run of one stage, by a server or all-reduce"
        )
    rounds = rounds_of(folder, plan.num_workers)
    codec = OptionFactory(plan.allow_targets).get_option("compression", config["compression"])
    # An all-gather of the same bytes costs half as much as a sum.
    gathers = not (codec.traits.lossless or codec.traits.linear)
    sum_s = least_s(rounds, ("wait_s", "push_s", "pull_s")) * (2 if gathers else 1)
    has_server = topology == "parameter_server"
    return Profile(
        schema=SCHEMA,
        model=config["choices"]["model"],
        num_params=plan.num_params,
        dense_bytes=4 * plan.num_params,
        device="cpu",
        source="measured",
        server_step_s=least_s(rounds, ("wait_s",)) if has_server else 0.0,
        server_bytes_s=None,
        ports=True,
        workers=tuple(worker_profile(own, plan.stages[0].workers[0].batch) for own in rounds),
        all_reduce=None if has_server else AlphaBeta(sum_s, 0.0),
    )


def rounds_of(folder: Path, num_workers: int) -> Sequence[Rounds]:
    """Return the rounds of each worker that have steps and spans.

    Raises: UsageError if a worker has none.
    """
    found = [list[Mapping[str, Any]]() for _ in range(num_workers)]
    with suppress(OSError, ValueError, KeyError):
        for event in jsonl.read(folder / EVENTS):
            ours = event.get("kind") == "round" and event["rank"] < num_workers
            if ours and event["steps"] and event["spans"]:
                found[event["rank"]].append(event)
    for rank, rounds in enumerate(found):
        if not rounds:
            raise UsageError(
                f"{folder / EVENTS} has no spans of worker {rank}; repeat the run with"
                " tracking.events=all to replay it"
            )
    return found


def worker_profile(rounds: Rounds, batch: int) -> WorkerProfile:
    steps_s = list[float]()
    for own in rounds:
        # Steps that share one span count as equally long.
        spans = [end - start for kind, start, end in own["spans"] if kind == "compute"]
        shared = [sum(spans) / own["steps"]] * own["steps"]
        times = spans if len(spans) == own["steps"] else shared
        steps_s += [max(TICK_S, time_s) for time_s in times]
    push_s = max(TICK_S, fmean(own["push_s"] for own in rounds))
    pull_s = max(TICK_S, fmean(own["pull_s"] for own in rounds))
    return WorkerProfile(
        step_s=median(steps_s),
        step_spread_s=trimmed_deviation(steps_s),
        step_noise_s=0.0,
        batch=batch,
        push_s=push_s,
        push_noise_s=0.0,
        push_loaded_s=None,
        pull_s=pull_s,
        pull_noise_s=0.0,
        pull_loaded_s=None,
        latency_s=0.0,
        push_bytes_s=None,
        pull_bytes_s=None,
        compress_s=fmean(own["compress_s"] for own in rounds),
        push_line=AlphaBeta(push_s, 0.0),
        pull_line=AlphaBeta(pull_s, 0.0),
        step_times_s=quantiles(steps_s),
    )


def least_s(rounds: Sequence[Rounds], kinds: Sequence[str]) -> float:
    """Return the mean over rounds of the least seconds that a worker spent on `kinds`."""
    together = zip(*rounds, strict=False)
    return fmean(min(sum(own[kind] for kind in kinds) for own in row) for row in together)
