"""Print what is known before a run: the workers' costs, their assignments, and the predictions."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ashl.plan.confidence import group_equal_workers
from ashl.plan.plan import Plan, StagePlan
from ashl.plan.profile import NOISES, Profile
from ashl.tracking.console import (
    MAX_ROWS,
    milliseconds,
    number,
    percent,
    plain_table,
    print_line,
    seconds,
)

# Columns of a profile in ms, by title.
COSTS = {
    "step ms": "step_s",
    "± ms": "step_spread_s",
    "push ms": "push_s",
    "pull ms": "pull_s",
    "latency ms": "latency_s",
}


def print_profile(console: Console, profile: Profile) -> None:
    """Print the cost of a step, a push, a pull and an encoding for each worker.

    Costs by layer group, quantiles of step times, loaded exchanges, lines over message sizes and
    contention are in profile.json alone.
    """
    size = f"{escape(profile.model)} with {profile.num_params:,} parameters"
    console.print(f"[bold]profile[/] {profile.source}, {size}")
    titles = ("worker", *COSTS, "up MB/s", "down MB/s", "encode ms")
    rows = []
    for rank, worker in enumerate(profile.workers[:MAX_ROWS]):
        costs = [milliseconds(getattr(worker, name)) for name in COSTS.values()]
        rates = [
            "-" if rate is None else f"{rate / 1e6:.3g}"
            for rate in (worker.push_bytes_s, worker.pull_bytes_s)
        ]
        rows.append((str(rank), *costs, *rates, milliseconds(worker.compress_s)))
    console.print(plain_table(titles, rows, left=(), gap=1))
    print_rest(console, profile.num_workers)
    hosts = [worker.host for worker in profile.workers]
    if len({*hosts, profile.server_host} - {None}) > 1:
        workers = join_items(f"worker {rank} on {host}" for rank, host in enumerate(hosts))
        console.print(f"{workers}; the server on {profile.server_host}", markup=False)
    for cost, noise in NOISES.items():
        for ranks in group_equal_workers(profile.workers, cost, noise):
            listed = join_items(map(str, ranks))
            what = cost.removesuffix("_s")
            console.print(f"equal within their noise: {what} of workers {listed}")
    for codec in profile.codecs:
        name = codec.codec.rpartition(".")[2]
        encode, decode = format_range(codec.encode_s), milliseconds(codec.decode_s)
        console.print(f"{name} encodes the model in {encode} ms and decodes it in {decode} ms")


def print_rest(console: Console, count: int) -> None:
    """Print how many workers a table has left out."""
    if count > MAX_ROWS:
        console.print(f"and {count - MAX_ROWS:,} more workers")


def join_items(items: Iterable[str]) -> str:
    """Join the first items by commas; an ellipsis stands for the rest."""
    found = list(items)
    return ", ".join(found[:MAX_ROWS] + ["…"] * (len(found) > MAX_ROWS))


def format_range(costs: Sequence[float]) -> str:
    """Format the smallest and the largest of these seconds in ms; one number if both are equal."""
    low, high = milliseconds(min(costs)), milliseconds(max(costs))
    return low if low == high else f"{low} to {high}"


def print_forecast(
    console: Console, plan: Plan, epoch_samples: int, profile: Profile | None = None
) -> None:
    """Print each stage with its workers and rates, and the longest predicted time of the run.

    Args: profile adds a column with the cycle at the same H for all workers.
    """
    crowd = f"{plan.num_workers} workers, {plan.num_params:,} parameters, seed {plan.seed}"
    console.print(f"[bold]{escape(plan.name)}[/] {crowd}")
    for stage in plan.stages:
        if stage.is_profiling:
            console.print(f"stage {stage.name}: measures steps and exchanges, without training")
            continue
        console.print(stage_table(stage, profile))
        print_rest(console, len(stage.workers))
        if stage.predicted_steps_per_s is None:
            console.print("steps/s and waiting are not predicted: the cluster declares no costs")
            continue
        rate, waiting = number(stage.predicted_steps_per_s), percent(stage.predicted_wait_share)
        console.print(f"predicted {rate} steps/s, workers wait {waiting} of their time")
    console.print(describe_duration(plan, epoch_samples))
    print_notes(console, plan)


def print_notes(console: Console, plan: Plan) -> None:
    """Print the notes of a plan."""
    for note in plan.notes:
        print_line(console, f"note: {note}")


def describe_duration(plan: Plan, epoch_samples: int) -> str:
    """Describe the number of steps and their predicted time; a target may end the run earlier."""
    limits, steps = plan.limits, plan.num_steps(epoch_samples)
    rates = [stage.predicted_steps_per_s for stage in plan.stages if stage.predicted_steps_per_s]
    ends = "" if limits.seconds is None else f"stops after {seconds(limits.seconds)}"
    if steps is None:
        return ends
    ends = f"; {ends} at the latest" if ends else ""
    if not rates:
        return f"{steps:,} steps{ends}"
    times = dict.fromkeys(seconds(steps / rate) for rate in (max(rates), min(rates)))
    after = ", after profiling" if plan.stages[0].is_profiling else ""
    about = " to ".join(times)
    return f"predicted {about} for {steps:,} steps{after}{ends}"


def stage_table(stage: StagePlan, profile: Profile | None) -> Table:
    """Return a table of the workers' assignments and predicted cycles in a stage."""
    until = ", ".join(f"{rule.replace('_', ' ')} {bound:g}" for rule, bound in stage.until.items())
    columns = ["worker", "H", "batch", "data share", "density", "message", "cycle"]
    before = profile if stage.h_preset is not None else None
    if before:
        columns.append(f"cycle at H {stage.h_preset}")
    title = f"stage {escape(stage.name)}" + (f", until {until}" if until else "")
    rows = []
    for rank, worker in enumerate(stage.workers[:MAX_ROWS]):
        size = "-" if worker.message_bytes is None else f"{worker.message_bytes / 1e3:,.3g} kB"
        row = [str(rank), str(worker.local_steps), str(worker.batch)]
        row += [percent(worker.data_share), percent(worker.compression_ratio, 0), size]
        row += [seconds(worker.predicted_cycle_s)]
        if before:
            costs = before.workers[rank]
            row.append(seconds((stage.h_preset or 0) * costs.step_s + costs.push_s + costs.pull_s))
        rows.append(row)
    return plain_table(columns, rows, left=columns, title=title)
