"""Convert records to lines of events.jsonl: times in seconds, and for a round the time of each
kind.
"""

from typing import Any

from ashl.runtime.records import Replan, Round, StageEnd, WorkerFailed, WorkerRejoined
from ashl.runtime.time_accounting import KINDS

EVENTS: dict[type, str] = {
    Round: "round",
    StageEnd: "stage",
    Replan: "replan",
    WorkerFailed: "worker_failed",
    WorkerRejoined: "worker_rejoined",
}


def as_event(record: Round | StageEnd | Replan | WorkerFailed | WorkerRejoined) -> dict[str, Any]:
    """Return the line of a record."""
    head = {"kind": EVENTS[type(record)], "rank": record.rank}
    match record:
        case WorkerFailed():
            return head | {"reason": record.why, "time_s": record.time_ns / 1e9}
        case WorkerRejoined():
            return head | {"time_s": record.time_ns / 1e9}
        case Round():
            return head | round_fields(record)
        case StageEnd():
            own = {"stage": record.stage, "name": record.name, "reason": record.reason}
            return head | own | record.counts._asdict() | {"end_s": record.end_ns / 1e9}
        case Replan():
            return head | {
                "stage": record.stage,
                "ratios": record.ratios,
                "local_steps": record.local_steps,
                "time_s": record.time_ns / 1e9,
            }


def round_fields(record: Round) -> dict[str, Any]:
    totals = dict.fromkeys(KINDS, 0)
    for kind, start, end in record.spans_ns:
        totals[kind] += end - start
    return {
        "stage": record.stage,
        "round": record.round,
        **({} if record.group is None else {"group": record.group}),
        "steps": record.steps,
        "staleness": record.staleness,
        "dropped": record.dropped,
        "loss": record.loss,
        "start_s": record.start_ns / 1e9,
        "end_s": record.end_ns / 1e9,
        **{f"{kind}_s": total / 1e9 for kind, total in totals.items()},
        "spans": [[kind, start / 1e9, end / 1e9] for kind, start, end in record.spans_ns],
        **({"parts": [ready / 1e9 for ready in record.parts_ns]} if record.parts_ns else {}),
        **(
            {"messages": [[a / 1e9, b / 1e9] for a, b in record.messages_ns]}
            if record.messages_ns
            else {}
        ),
    }
