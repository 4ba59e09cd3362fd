"""What a real run measured of its cluster while it ran, as a profile: each worker's steps in order, what its transfers
and encodings took, and how long the server was busy with a push.

Steps are taken one by one; of all else the mean counts, by which the run as it was takes as long as it did. Of
transfers a run knows one size. A profile of the same cluster says how they go by the bytes: its lines are scaled to
what the run saw. Without one they last as long as they did, whatever is sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ashl.config.recorded import config_of, typed_of
from ashl.errors import UsageError
from ashl.plan.files import read_plan
from ashl.plan.full import Coding, Cost, Full, ServerCosts, StepTimes, Sum, WorkerCosts
from ashl.plan.plan import Plan
from ashl.plan.profile import SCHEMA, Profile, WorkerProfile
from ashl.planning.build import Options
from ashl.tracking import jsonl
from ashl.tracking.recorder import EVENTS, SUMMARY

KNOWN = ("parameter_server", "all_reduce")  # topologies whose transfers are of one kind
TICK_S = 1e-9


@dataclass(frozen=True)
class Record:
    """A run folder, as far as it says what time went into."""

    folder: Path
    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    summary: Mapping[str, Any]
    plan: Plan
    rounds: tuple[tuple[Mapping[str, Any], ...], ...]  # by worker, as many as were kept

    @property
    def server(self) -> bool:
        return self.plan.num_ranks > self.plan.num_workers

    @property
    def kept(self) -> int:
        """Steps whose times are known."""
        return sum(each["steps"] for own in self.rounds for each in own)


def read_run(folder: Path) -> Record:
    """Raises UsageError for what cannot be replayed."""
    config, overrides, plan = config_of(folder), typed_of(folder), read_plan(str(folder / "plan.json"))
    summary = jsonl.whole(folder / SUMMARY)
    if summary is None or summary.get("status") != "finished":
        how = "has not ended" if summary is None else f"ended as {summary.get('status')}"
        raise UsageError(f"the run in {folder} {how}; a replay needs one that came to its end")
    if summary["runtime"] == "sim":
        raise UsageError(
            f"the run in {folder} was in virtual time, which needs no replay; run it with the change, by `ashl train`"
        )
    if summary["exit_reason"] == "profiled":
        raise UsageError(f"{folder} is a profile, in which nothing was learned; name the folder of a run")
    topology = config["choices"]["topology"]
    if len(plan.stages) > 1 or topology not in KNOWN:
        what = f"{len(plan.stages)} stages" if len(plan.stages) > 1 else f"topology={topology}"
        raise UsageError(f"the run in {folder} has {what}, and replayed is one stage with a server or by all-reduce")
    try:
        events = list(jsonl.read(folder / EVENTS)) if (folder / EVENTS).exists() else []
        rounds = tuple(
            tuple(e for e in events if e.get("kind") == "round" and e["rank"] == rank and e["steps"] and e["spans"])
            for rank in range(plan.num_workers)
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder / EVENTS} is damaged, so that the run cannot be replayed; run it anew") from error
    if not all(rounds):
        raise UsageError(
            f"the run in {folder} kept no spans of its workers; run it anew with tracking.events=all (it said "
            f"tracking.events={config['tracking']['events']})"
        )
    return Record(folder, config, tuple(overrides), summary, plan, rounds)


def steps_of(rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of each step, in order; where a round does not tell them apart, they were equally long."""
    found: list[float] = []
    for each in rounds:
        spans = [end - start for kind, start, end in each["spans"] if kind == "compute"]
        whole = spans if len(spans) == each["steps"] else [sum(spans) / each["steps"]] * each["steps"]
        found += [max(TICK_S, time_s) for time_s in whole]
    return found


def flat(seconds: float) -> Cost:
    """So long, whatever the bytes."""
    return Cost(latency_s=max(0.0, seconds), s_per_byte=0.0, latency_noise_s=0.0, s_per_byte_noise=0.0)


def scaled(cost: Cost, nbytes: float, seconds: float) -> Cost:
    """The line of a profile, through what the run saw."""
    factor = seconds / cost.seconds(nbytes) if cost.seconds(nbytes) else 1.0
    least_s = None if cost.least_s is None else factor * cost.least_s
    return replace(cost, latency_s=factor * cost.latency_s, s_per_byte=factor * cost.s_per_byte, least_s=least_s)


def profile_of(record: Record, known: Profile | None) -> Profile:
    """The run's own. Raises UsageError where `known` is of another model or crowd."""
    plan, full = record.plan, known.full if known else None
    batch = plan.stages[0].workers[0].batch
    if known is not None:
        known.check(plan.num_workers, record.config["choices"]["model"], plan.num_params, batch)
    tables, workers = [steps_of(own) for own in record.rounds], list[WorkerProfile]()
    costs, codec = list[WorkerCosts](), record.config["compression"]["_target_"]
    for rank, times in enumerate(tables):
        own, ways = record.summary["workers"][rank], {}
        middle, mean = median(times), fmean(times)
        for way, key in (("push", "bytes_up"), ("pull", "bytes_down")):
            seconds = fmean(each[f"{way}_s"] for each in record.rounds[rank])
            nbytes = own[key] / max(1, own["commits"])
            line = None if full is None or not record.server else getattr(full.workers[rank], way)
            ways[way] = flat(seconds) if line is None else scaled(line, nbytes, seconds)
        shared = {"count": len(times), "noise_s": 0.0, "drift": 0.0, "in_order": True}
        step = StepTimes(batch=batch, median_s=middle, mean_s=mean, times_s=tuple(times), **shared)
        costs.append(WorkerCosts(steps=(step,), alone_s=None, **ways))
        workers.append(in_short(step, ways["push"], ways["pull"], encoding_s(record, rank), 4 * plan.num_params))
    server = served(record) if record.server else None
    return Profile(
        schema=SCHEMA,
        model=record.config["choices"]["model"],
        num_params=plan.num_params,
        dense_bytes=4 * plan.num_params,
        device="cpu",
        source="measured",
        server_step_s=server.apply_s if server else 0.0,
        server_bytes_s=None,
        ports=True,
        workers=tuple(workers),
        full=Full(
            made=full.made if full else "",
            versions=full.versions if full else {},
            workers=tuple(costs),
            server=server,
            sums=summed(record, full),
            codings=(
                Coding(codec=codec, encode=tuple(flat(worker.compress_s) for worker in workers), decode=flat(0.0)),
                *(own for own in (full.codings if full else ()) if own.codec != codec),
            ),
        ),
    )


def in_short(step: StepTimes, push: Cost, pull: Cost, encode_s: float, dense_bytes: int) -> WorkerProfile:
    """A worker's medians, where lines and distributions are not asked for."""
    ways = {"push": push.seconds(dense_bytes), "pull": pull.seconds(dense_bytes)}
    return WorkerProfile(
        step_s=step.median_s,
        step_spread_s=0.0,
        step_noise_s=0.0,
        batch=step.batch,
        push_s=max(TICK_S, ways["push"]),
        push_noise_s=0.0,
        push_loaded_s=None,
        pull_s=max(TICK_S, ways["pull"]),
        pull_noise_s=0.0,
        pull_loaded_s=None,
        latency_s=min(push.latency_s, pull.latency_s),
        push_bytes_s=None,
        pull_bytes_s=None,
        compress_s=encode_s,
    )


def encoding_s(record: Record, rank: int) -> float:
    return fmean(each["compress_s"] for each in record.rounds[rank])


def served(record: Record) -> ServerCosts:
    """How long the server was busy with a push: what the worker that waited least in a round waited."""
    waits = [min(each["wait_s"] for each in together) for together in zip(*record.rounds, strict=False)]
    return ServerCosts(apply_s=fmean(waits), apply_noise_s=0.0, into=flat(0.0), out=flat(0.0))


def summed(record: Record, full: Full | None) -> tuple[Sum, ...]:
    """What exchanges of all took from when the last one had come, as of a sum."""
    known = full.sums if full else ()
    if record.server:
        return known
    n = record.plan.num_workers
    took_s = [
        min(each["wait_s"] + each["push_s"] + each["pull_s"] for each in together)
        for together in zip(*record.rounds, strict=False)
    ]
    codec = Options(record.config["allow_targets"]).of("compression", record.config["compression"])
    gathers = not (codec.flags.lossless or codec.flags.linear)  # which costs half of a sum of as many bytes
    own = flat(fmean(took_s) * (2 if gathers else 1))
    line = next((each.cost for each in known if each.group == n), None)
    if line is not None and not gathers:
        own = scaled(line, 4 * record.plan.num_params, fmean(took_s))
    return (*(each for each in known if each.group != n), Sum(group=n, cost=own))
