"""How well real processes kept the declared pace, worker by worker, as the summary tells it."""

from collections.abc import Sequence
from typing import Any

from ashl.runtime.records import Lateness, PacingStats


def pacing_summary(reports: Sequence[PacingStats], num_workers: int) -> dict:
    """Where the machine was too slow to keep the declared pace: by worker, with the pushes that a server took in for
    it, which share of its steps and transfers was late and how much longer than declared they took; by how much of all
    that is declared its encoding took longer than declared (often nothing is); and the worst."""
    steps: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    transfers: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    encodings: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    for report in reports:
        worker = report.rank < num_workers
        if worker:
            encodings[report.rank].append(report.encodings)
            steps[report.rank].append(report.steps)
        for src, counts in report.transfers:
            if worker or src < num_workers:  # what servers send to each other is nobody's
                transfers[report.rank if worker else src].append(counts)
    workers = [pacing_of(rank, steps[rank], transfers[rank], encodings[rank]) for rank in range(num_workers)]
    if not any(counts.count for rank in range(num_workers) for counts in steps[rank] + transfers[rank]):
        return {}
    worst = ("steps_slower_by", "transfers_slower_by", "encodings_slower_by", "slower_by")
    return {"workers": workers, **{key: max(worker[key] for worker in workers) for key in worst}}


def pacing_of(
    rank: int, steps: Sequence[Lateness], transfers: Sequence[Lateness], encodings: Sequence[Lateness]
) -> dict[str, Any]:
    everything = [*steps, *transfers, *encodings]
    return {
        "rank": rank,
        "late_steps_share": share_late(steps),
        "late_transfers_share": share_late(transfers),
        "steps_slower_by": slower_by(steps),
        "transfers_slower_by": slower_by(transfers),
        "encodings_slower_by": slower_by(everything, encodings),
        "slower_by": slower_by(everything),
    }


def share_late(counts: Sequence[Lateness]) -> float:
    total = sum(row.count for row in counts)
    return sum(row.late for row in counts) / total if total else 0.0


def slower_by(counts: Sequence[Lateness], late: Sequence[Lateness] | None = None) -> float:
    """How much later these (or those among them) were than declared, as a share of what is declared of all of them."""
    total = sum(row.declared_s for row in counts)
    return sum(row.late_s for row in (counts if late is None else late)) / total if total else 0.0
