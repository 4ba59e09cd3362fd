"""What a worker that was lost and is back has done in all its lives: each process counts from nothing."""

from ashl.runtime.records import Heartbeat, Measured, Measures, StageBoundary, TimeTotals
from ashl.runtime.time_accounting import KINDS


def empty_totals(rank: int) -> Heartbeat:
    """How a worker stands of which nothing has been heard."""
    return Heartbeat(rank, 0, 0, None, None, dict.fromkeys(KINDS, 0), 0, 0, {})


def outage_until(before: Heartbeat, time_ns: int) -> Heartbeat:
    """How a worker stood that was lost, when it is back at that moment: what is missing up to there it was down."""
    down = before.totals_ns["down"] + max(0, time_ns - sum(before.totals_ns.values()))
    return before._replace(totals_ns=before.totals_ns | {"down": down})


def add_prior_totals(
    before: Heartbeat, record: Heartbeat | TimeTotals | StageBoundary
) -> Heartbeat | TimeTotals | StageBoundary:
    """What a worker says of its present life, and what it had done before."""
    totals = {kind: before.totals_ns[kind] + ns for kind, ns in record.totals_ns.items()}
    if isinstance(record, StageBoundary):
        return record._replace(totals_ns=totals)
    record = record._replace(
        totals_ns=totals,
        bytes_up=before.bytes_up + record.bytes_up,
        bytes_down=before.bytes_down + record.bytes_down,
        collective_ns=before.collective_ns + record.collective_ns,
        measures=measured(before.measures, record.measures),
    )
    return record._replace(steps=before.steps + record.steps) if isinstance(record, Heartbeat) else record


def measured(before: Measures, now: Measures) -> dict[str, Measured]:
    """The values under each name, those before and those since."""
    found = dict(before)
    for name, (last, total, count) in now.items():
        _, so_far, times = before.get(name, (0.0, 0.0, 0))
        found[name] = Measured(last, so_far + total, times + count)
    return found
