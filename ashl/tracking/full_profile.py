"""What a full profile says: how step times lie, links and ports by their lines, and how sure each figure is."""

from rich.console import Console
from rich.table import Table

from ashl.plan.full import Cost, Full
from ashl.tracking.console import MAX_ROWS, milliseconds, percent


def show_full(console: Console, full: Full, dense_bytes: int) -> None:
    """Print it, in ms and ms for each MB, each with half of its 95 % interval."""
    versions = "".join(f", {name} {version}" for name, version in full.versions.items())
    console.print(f"measured in full on {full.made or 'no known date'}{versions}", soft_wrap=True, markup=False)
    table = Table("worker", "batch", "steps", "median ms", "5 %", "95 %", "mean", "drift", box=None)
    for rank, worker in enumerate(full.workers[:MAX_ROWS]):
        for own in worker.steps:
            times = [milliseconds(time_s) for time_s in (own.at(0.05), own.at(0.95), own.mean_s)]
            median = sure(own.median_s, own.noise_s)
            table.add_row(str(rank), str(own.batch), f"{own.count:,}", median, *times, percent(own.drift))
    console.print(table)
    table = Table("what", "ms", "ms for each MB", "the model", box=None)
    for what, cost in costs_of(full, dense_bytes):
        slope = sure(1e6 * cost.s_per_byte, 1e6 * cost.s_per_byte_noise)
        whole = milliseconds(cost.seconds(dense_bytes))
        table.add_row(what, sure(cost.latency_s, cost.latency_noise_s), slope, whole)
    console.print(table)
    if full.server is not None:
        console.print(f"applying a push takes {sure(full.server.apply_s, full.server.apply_noise_s)} ms")
    if full.contended:
        console.print("steps take longer while others compute: workers share a machine with too few cores for them")


def costs_of(full: Full, dense_bytes: int) -> list[tuple[str, Cost]]:
    """What goes by bytes, with its name."""
    found = [
        (f"worker {rank} {way}", cost)
        for rank, worker in enumerate(full.workers[:MAX_ROWS])
        for way, cost in (("up", worker.push), ("down", worker.pull))
    ]
    if full.server is not None:
        found += [("port, in", full.server.into), ("port, out", full.server.out)]
    if full.handling is not None:
        ends = ("worker", full.handling.worker), ("server", full.handling.server)
        found += [(f"core time of a message, {name}", cost) for name, cost in ends]
    found += [(f"sum of {own.group}", own.cost) for own in full.sums]
    for coding in full.codings:
        name = coding.codec.rpartition(".")[2]
        slowest = max(coding.encode, key=lambda cost: cost.seconds(dense_bytes))
        found += [(f"{name} encodes", slowest), (f"{name} decodes", coding.decode)]
    return found


def sure(seconds: float, noise_s: float) -> str:
    return f"{milliseconds(seconds)} ± {milliseconds(noise_s)}"
