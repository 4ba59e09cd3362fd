"""Print what is known before a run: the workers' costs, their assignments, and the predictions."""

from collections.abc import Sequence
from statistics import median

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ashl.cluster.speed import LEVELS
from ashl.plan.confidence import group_equal_workers
from ashl.plan.plan import Plan, StagePlan
from ashl.plan.profile import NOISES, Profile
from ashl.tracking.console import MAX_ROWS, milliseconds, number, percent, seconds

SHOWN_LEVELS = (0.05, 0.5, 0.95, 1.0)  # quantiles of step times that are printed
PROFILING = "ashl.sync.profiling.Profiling"  # a stage that has no H and no density


def show_profile(console: Console, profile: Profile) -> None:
    """Print the cost of a step, a push, a pull and an encoding for each worker."""
    console.print(
        f"[bold]profile[/] {profile.source}, {escape(profile.model)} with {profile.num_params:,}"
        " parameters"
    )
    table = Table(box=None, padding=(0, 1, 0, 0))  # within 80 columns
    for title in (
        "worker",
        "step ms",
        "± ms",
        "push ms",
        "pull ms",
        "latency ms",
        "up MB/s",
        "down MB/s",
        "encode ms",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for rank, worker in enumerate(profile.workers[:MAX_ROWS]):
        costs = (
            worker.step_s,
            worker.step_spread_s,
            worker.push_s,
            worker.pull_s,
            worker.latency_s,
        )
        rates = (
            "-" if rate is None else f"{rate / 1e6:.3g}"
            for rate in (worker.push_bytes_s, worker.pull_bytes_s)
        )
        table.add_row(str(rank), *map(milliseconds, costs), *rates, milliseconds(worker.compress_s))
    console.print(table)
    show_hosts(console, profile)
    show_parts(console, profile)
    for way in ("push", "pull"):
        if loaded := [
            getattr(worker, f"{way}_loaded_s") or 0.0
            for worker in profile.workers
            if worker.push_loaded_s
        ]:
            console.print(f"all at once: a {way} takes {spanned(loaded)} ms")
    for cost, noise in NOISES.items():
        for ranks in group_equal_workers(profile.workers, cost, noise):
            listed = ", ".join(map(str, ranks[:MAX_ROWS])) + (
                ", …" if len(ranks) > MAX_ROWS else ""
            )
            console.print(
                f"equal within their noise: {cost.removesuffix('_s')} of workers {listed}"
            )
    show_distributions(console, profile)
    if profile.num_workers > MAX_ROWS:
        console.print(f"and {profile.num_workers - MAX_ROWS:,} more workers")


def show_distributions(console: Console, profile: Profile) -> None:
    """Print quantiles of each worker's step times, and the cost of codecs for the whole model."""
    timed = [
        (rank, worker.step_times_s)
        for rank, worker in enumerate(profile.workers)
        if worker.step_times_s
    ]
    if timed:
        table = Table(
            "worker",
            *(f"step {level:.0%}" for level in SHOWN_LEVELS),
            "ms",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for rank, times in timed[:MAX_ROWS]:
            table.add_row(
                str(rank),
                *(milliseconds(float(np.interp(own, LEVELS, times))) for own in SHOWN_LEVELS),
            )
        console.print(table)
    for cost in profile.codecs:
        name = cost.codec.rpartition(".")[2]
        decoding = milliseconds(cost.decode_s)
        console.print(
            f"{name} encodes the model in {spanned(cost.encode_s)} ms and decodes it in"
            f" {decoding} ms"
        )


def show_hosts(console: Console, profile: Profile) -> None:
    """Print where a profile of several nodes was measured, and whether the server may have a
    better node.
    """
    hosts = [worker.host for worker in profile.workers]
    if len({*hosts, profile.server_host} - {None}) < 2:
        return
    workers = ", ".join(f"worker {rank} on {host}" for rank, host in enumerate(hosts[:MAX_ROWS]))
    more = ", …" if len(hosts) > MAX_ROWS else ""
    console.print(f"{workers}{more}; the server on {profile.server_host}", markup=False)
    if better := profile.better_host:
        console.print(
            f"all traffic that the server's NIC can take comes from {better}: its link is no"
            f" worse, perhaps better; to find out, set cluster.server_host={better}",
            markup=False,
        )


def show_parts(console: Console, profile: Profile) -> None:
    """Print the cost of both passes by layer group, and of messages by their bytes."""
    if groups := profile.group_bytes:
        console.print("layer groups, the last layers first: medians over the workers")
        table = Table("group", "kB", "forward ms", "backward ms", box=None, padding=(0, 2, 0, 0))
        forward, backward = (
            [milliseconds(median(costs)) for costs in zip(*by_worker, strict=True)]
            for by_worker in (
                [w.forward_s for w in profile.workers],
                [w.backward_s for w in profile.workers],
            )
        )
        for k, nbytes in enumerate(groups[:MAX_ROWS]):
            table.add_row(str(k), number(nbytes / 1e3), forward[k], backward[k])
        console.print(table)
        if len(groups) > MAX_ROWS:
            console.print(f"and {len(groups) - MAX_ROWS} more layer groups")
    links = [
        line
        for worker in profile.workers
        for line in (worker.push_line, worker.pull_line)
        if line is not None
    ]
    sums = [] if profile.all_reduce is None else [profile.all_reduce]
    for what, lines in (
        ("a message to or from the server", links),
        ("an all-reduce over all workers", sums),
    ):
        if lines:
            latencies, rates = (
                [line.latency_s for line in lines],
                [1e6 * line.s_per_byte for line in lines],
            )
            console.print(f"{what}: {spanned(latencies)} ms, and {spanned(rates)} ms per MB")
    if (beside := profile.contention) is not None:
        less, longer = f"{100 * beside.pace_reduction:.2g} %", f"{beside.collective_slowdown:.3g}"
        console.print(
            f"while a collective is active, computing is {less} slower, and the collective takes"
            f" {longer} times as long"
        )
        if (parts := beside.parts) is not None:
            step, part, start = (
                milliseconds(cost) for cost in (parts.step_s, parts.part_s, parts.sum_s)
            )
            console.print(
                f"a gradient in parts takes {step} ms more, {part} ms per part, and {start} ms per"
                " all-reduce"
            )
    if links and not sums:
        console.print("all-reduce is not measured: there is one worker")


def spanned(costs: Sequence[float]) -> str:
    """Return the smallest and the largest of these seconds in ms; one number if both are equal."""
    low, high = milliseconds(min(costs)), milliseconds(max(costs))
    return low if low == high else f"{low} to {high}"


def forecast(
    console: Console, plan: Plan, epoch_samples: int, profile: Profile | None = None
) -> None:
    """Print each stage with its workers, the predicted rates, and the longest predicted time of the
    run.

    Args: profile adds a column with the cycle at the same H for all workers.
    """
    crowd = f"{plan.num_workers} workers, {plan.num_params:,} parameters, seed {plan.seed}"
    console.print(f"[bold]{escape(plan.name)}[/] {crowd}")
    for stage in plan.stages:
        if stage.sync["_target_"] == PROFILING:
            console.print(f"stage {stage.name}: measures steps and exchanges, without training")
            continue
        console.print(stage_table(stage, profile))
        if len(stage.workers) > MAX_ROWS:
            console.print(f"and {len(stage.workers) - MAX_ROWS:,} more workers")
        if stage.predicted_steps_per_s is None:
            console.print("steps/s and waiting are not predicted: the cluster declares no costs")
            continue
        rate, waiting = number(stage.predicted_steps_per_s), percent(stage.predicted_wait_share)
        about = f"{rate} steps/s"
        console.print(f"predicted {about}, workers wait {waiting} of their time")
    console.print(duration(plan, epoch_samples))
    notes(console, plan)


def notes(console: Console, plan: Plan) -> None:
    """Print the notes of a plan."""
    for note in plan.notes:
        console.print(
            f"note: {note}", soft_wrap=not console.is_terminal, highlight=False, markup=False
        )


def duration(plan: Plan, epoch_samples: int) -> str:
    """Return the number of steps and their predicted time; a target may end the run earlier."""
    limits, steps = plan.limits, plan.num_steps(epoch_samples)
    rates = [stage.predicted_steps_per_s for stage in plan.stages if stage.predicted_steps_per_s]
    ends = "" if limits.seconds is None else f"stops after {seconds(limits.seconds)}"
    if steps is None:
        return ends
    ends = f"; {ends} at the latest" if ends else ""
    if not rates:
        return f"{steps:,} steps{ends}"
    times = dict.fromkeys(seconds(steps / rate) for rate in (max(rates), min(rates)))
    after = ", after profiling" if plan.stages[0].sync["_target_"] == PROFILING else ""
    about = " to ".join(times)
    return f"predicted {about} for {steps:,} steps{after}{ends}"


def stage_table(stage: StagePlan, profile: Profile | None) -> Table:
    until = ", ".join(f"{rule.replace('_', ' ')} {bound:g}" for rule, bound in stage.until.items())
    title = f"stage {escape(stage.name)}" + (f", until {until}" if until else "")
    columns = ["worker", "H", "batch", "data share", "density", "message", "cycle"]
    before = profile if stage.h_preset is not None else None
    if before:
        columns.append(f"cycle at H {stage.h_preset}")
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for rank, worker in enumerate(stage.workers[:MAX_ROWS]):
        shares = percent(worker.data_share), percent(worker.compression_ratio, 0)
        size = "-" if worker.message_bytes is None else f"{worker.message_bytes / 1e3:,.3g} kB"
        row = [
            str(rank),
            str(worker.local_steps),
            str(worker.batch),
            *shares,
            size,
            seconds(worker.predicted_cycle_s),
        ]
        if before:
            costs = before.workers[rank]
            row.append(seconds((stage.h_preset or 0) * costs.step_s + costs.push_s + costs.pull_s))
        table.add_row(*row)
    return table
