"""Run `ashl replay`: repeat a recorded real run in virtual time, as it was or with changes.

Rule: the record becomes a profile: quantiles of each worker's step times, the mean times of its
transfers and encodings, and how long the server was busy with a push.
Limits: a run has transfers of one size only, so a change of topology or compression is refused.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ashl.config.compose import compose
from ashl.config.override import key_of
from ashl.config.recorded import config_of, typed_of
from ashl.errors import AshlError, UsageError
from ashl.plan.alpha_beta import AlphaBeta
from ashl.plan.confidence import quantiles, trimmed_deviation
from ashl.plan.files import read_plan
from ashl.plan.plan import Plan
from ashl.plan.profile import SCHEMA, TICK_S, Profile, WorkerProfile
from ashl.planning.instantiate import OptionFactory
from ashl.run.train import run
from ashl.tracking import jsonl
from ashl.tracking.console import number, percent, seconds
from ashl.tracking.recorder import EVENTS, SUMMARY

TOPOLOGIES = ("parameter_server", "all_reduce")  # topologies whose transfers are all of one kind
CHANGES = ("sync", "aggregate", "outer", "optimizer", "seed")
# Typed keys that do not apply to the replay.
NOT_REPEATED = (
    "runtime",
    "cluster",
    "profile",
    "plan",
    "run",
    "tracking",
    "stop",
    "eval",
    "name",
)
Rounds = Sequence[Mapping[str, Any]]  # the rounds of one worker, from events.jsonl


class Replayed(NamedTuple):
    """A run, its replay and the replay with the changes, as summaries by name.

    `typed` is the settings of the real run, with the changes.
    """

    folder: Path
    run: Path
    changes: Sequence[str]
    rows: Mapping[str, Mapping[str, Any]]
    typed: Sequence[str]

    def document(self) -> dict[str, Any]:
        """Return the record that replay.json holds."""
        return {"run": str(self.run), "changes": list(self.changes), "runs": self.rows}


def replay(folder: Path, changes: Sequence[str], config_dir: Path | None) -> Replayed:
    """Run a recorded run again in virtual time, as it was and with `changes`.

    Raises: UsageError if it cannot be replayed.
    """
    for text in changes:
        if key_of(text).partition(".")[0] not in CHANGES:
            raise UsageError(
                f"{text} is not replayed: a run measured its own model, messages and cluster; it"
                f" can be replayed with another {', '.join(CHANGES)}; for the rest take runtime=sim"
                " cluster=profile with `ashl profile`"
            )
    config, typed, summary = config_of(folder), typed_of(folder), finished(folder)
    place = folder / "replay"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    path = place / "profile.json"
    path.write_text(profile_of(folder, config, summary).to_json(), encoding="utf-8")
    own = [text for text in typed if key_of(text).partition(".")[0] not in NOT_REPEATED]
    own += [
        "runtime=sim",
        "runtime.gradients=false",
        "tracking=none",
        "cluster=profile",
        f"profile={path}",
    ]
    own += ["eval.every_commits=1000000000", f"stop.steps={summary['steps']}"]
    rows = {"as it was": summary, "replayed": played(own, config_dir, place / "replayed")}
    if changes:
        chosen = [key_of(text) for text in changes]
        kept = [
            text for text in own if not any(key_of(text).startswith(f"{key}.") for key in chosen)
        ]
        by_key = {key_of(text): text for text in (*kept, *changes)}
        rows[" ".join(changes)] = played([*by_key.values()], config_dir, place / "changed")
    real = {key_of(text): text for text in (*typed, *changes) if key_of(text) != "run.dir"}
    found = Replayed(place, folder, changes, rows, [*real.values()])
    jsonl.write_json(place / "replay.json", found.document())
    return found


def finished(folder: Path) -> dict[str, Any]:
    """Return the summary of a real run that finished.

    Raises: UsageError for any other run.
    """
    summary = jsonl.whole(folder / SUMMARY)
    if (
        summary is None
        or summary.get("status") != "finished"
        or summary["exit_reason"] == "profiled"
    ):
        how = (
            "has not ended"
            if summary is None
            else f"ended as {summary['status']} ({summary['exit_reason']})"
        )
        raise UsageError(f"the run in {folder} {how}; replay a run that has trained to its end")
    if summary["runtime"] == "sim":
        raise UsageError(
            f"the run in {folder} was in virtual time; run it with the change, by `ashl train`"
        )
    return summary


def profile_of(folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> Profile:
    """Return the profile that the records of a run give.

    Raises: UsageError if the records are not enough.
    """
    plan, topology = read_plan(str(folder / "plan.json")), config["choices"]["topology"]
    if len(plan.stages) > 1 or topology not in TOPOLOGIES:
        what = f"{len(plan.stages)} stages" if len(plan.stages) > 1 else f"topology={topology}"
        raise UsageError(
            f"the run in {folder} has {what}; replay a run of one stage, by a server or all-reduce"
        )
    rounds = [recorded_rounds(folder, config, rank) for rank in range(plan.num_workers)]
    has_server = plan.num_ranks > plan.num_workers
    return Profile(
        schema=SCHEMA,
        model=config["choices"]["model"],
        num_params=plan.num_params,
        dense_bytes=4 * plan.num_params,
        device="cpu",
        source="measured",
        server_step_s=min_wait_s(rounds, ("wait_s",)) if has_server else 0.0,
        server_bytes_s=None,
        ports=True,
        workers=tuple(worker_profile(own, plan.stages[0].workers[0].batch) for own in rounds),
        all_reduce=None if has_server else all_reduce_line(rounds, config, plan),
    )


def recorded_rounds(folder: Path, config: Mapping[str, Any], rank: int) -> Rounds:
    """Return the rounds of one worker that have steps.

    Raises: UsageError if no round has its spans.
    """
    try:
        events = list(jsonl.read(folder / EVENTS)) if (folder / EVENTS).exists() else []
        found = [
            e
            for e in events
            if e.get("kind") == "round" and e["rank"] == rank and e["steps"] and e["spans"]
        ]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder / EVENTS} is damaged; repeat the run to replay it") from error
    if not found:
        said = config["tracking"]["events"]
        raise UsageError(
            f"{folder} has no spans of worker {rank} (tracking.events={said}); run it with all"
            " events"
        )
    return found


def worker_profile(rounds: Rounds, batch: int) -> WorkerProfile:
    steps_s = step_times(rounds)
    push_s = max(TICK_S, fmean(each["push_s"] for each in rounds))
    pull_s = max(TICK_S, fmean(each["pull_s"] for each in rounds))
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
        compress_s=fmean(each["compress_s"] for each in rounds),
        push_line=AlphaBeta(push_s, 0.0),
        pull_line=AlphaBeta(pull_s, 0.0),
        step_times_s=quantiles(steps_s),
    )


def step_times(rounds: Rounds) -> list[float]:
    """Return the seconds of each step; steps that share one span are counted as equally long."""
    found: list[float] = []
    for each in rounds:
        spans = [end - start for kind, start, end in each["spans"] if kind == "compute"]
        own = spans if len(spans) == each["steps"] else [sum(spans) / each["steps"]] * each["steps"]
        found += [max(TICK_S, time_s) for time_s in own]
    return found


def min_wait_s(rounds: Sequence[Rounds], kinds: Sequence[str]) -> float:
    """Return the mean over rounds of the least seconds that a worker spent on `kinds`."""
    return fmean(
        min(sum(each[kind] for kind in kinds) for each in together)
        for together in zip(*rounds, strict=False)
    )


def all_reduce_line(rounds: Sequence[Rounds], config: Mapping[str, Any], plan: Plan) -> AlphaBeta:
    """Return the cost of an all-reduce after its last member has arrived.

    An all-gather of the same bytes costs half as much.
    """
    codec = OptionFactory(plan.allow_targets).of("compression", config["compression"])
    gathers = not (codec.traits.lossless or codec.traits.linear)
    return AlphaBeta(
        min_wait_s(rounds, ("wait_s", "push_s", "pull_s")) * (2 if gathers else 1), 0.0
    )


def played(texts: Sequence[str], config_dir: Path | None, folder: Path) -> dict[str, Any]:
    """Run these overrides in virtual time and return the summary."""
    config = compose(list(texts), config_dir)
    ran = run({**config, "run": {**config["run"], "dir": str(folder)}}, [], quiet=True, silent=True)
    if ran.summary is None:
        raise AshlError("a replay cannot run inside a job; start it without torchrun")
    return ran.summary


def show(console: Console, rows: Mapping[str, Mapping[str, Any]], place: Path) -> None:
    """Print the run, its replay, and the replay with the change."""
    table = Table("", "time", "steps/s", "waiting", box=None, padding=(0, 2, 0, 0))
    for name, row in rows.items():
        table.add_row(
            name, seconds(row["time_s"]), number(row["steps_per_s"]), percent(row["wait_share"])
        )
    console.print(table)
    was, replayed, *changed = rows.values()
    off = replayed["time_s"] / was["time_s"] - 1
    console.print(f"The replay differs from the run by {off:+.1%} in time.", soft_wrap=True)
    for row in changed:
        share = row["time_s"] / replayed["time_s"] - 1
        console.print(
            f"On the same steps and transfers the change alters the time by {share:+.1%}.",
            soft_wrap=True,
        )
    console.print(f"folder  {place}", soft_wrap=True, markup=False)
