"""Records: what a rank reports of its run, a named tuple for each kind, with one JSON form for all
of them.

In virtual time the monitor receives the tuple itself. A process sends it as one line of JSON, in
which `kind` names the type; a field with its default value is left out. Nothing is unpickled: every
field is validated, and text for a terminal loses control characters. `is_recorded` says which
rounds are recorded at all. Messages from the controller to the ranks are in
`ashl.runtime.control_messages`.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

from ashl.errors import AshlError, plain
from ashl.runtime.time_accounting import KINDS as TIMES
from ashl.runtime.time_accounting import Span

T = TypeVar("T")
Text = Annotated[str, AfterValidator(plain)]


def check_kinds(totals: dict[str, int]) -> dict[str, int]:
    if totals.keys() != set(TIMES):
        raise ValueError(f"times are by {', '.join(TIMES)}")
    return totals


Totals = Annotated[dict[str, int], AfterValidator(check_kinds)]


class Counts(NamedTuple):
    """A run's progress, as whoever judges it has counted so far. Lists are by worker, and
    copies.
    """

    steps: int
    samples: int
    merges: int
    commits: list[int]
    steps_by: list[int]
    dropped_by: list[int]
    stale_sum: list[int]
    stale_max: list[int]
    max_lead: int
    groups: list[int] | None  # how many each worker has averaged in, where workers meet in groups
    conflicts: int | None  # groups that had to wait for another one
    loss: float  # running mean of the workers' minibatch losses
    diverged: Text | None
    dropped_for: dict[Text, int] | None = (
        None  # steps by the reason why they are part of no model, as far as known
    )


class Measured(NamedTuple):
    """A rank's values under one name so far."""

    last: float
    total: float
    count: int


Measures = Mapping[Text, Measured]


class Round(NamedTuple):
    """A worker's way from its last merge to this one."""

    rank: int
    stage: int
    round: int
    steps: int
    staleness: int
    dropped: bool
    loss: float | None
    start_ns: int
    end_ns: int
    spans_ns: list[Span]
    group: list[int] | None = None  # whom it merged with, where workers meet in groups
    parts_ns: list[int] | None = (
        None  # when the parts of its steps were there, where messages are made of them
    )
    messages_ns: list[tuple[int, int]] | None = (
        None  # from when to when sums went that overlapped with other work
    )


class StageEnd(NamedTuple):
    """A stage is over."""

    rank: int
    stage: int
    name: Text
    reason: Text | None
    end_ns: int
    counts: Counts


class StageBoundary(NamedTuple):
    """What a worker's time had gone into when a stage gave way to the next one."""

    rank: int
    stage: int
    totals_ns: Totals


class Lost(NamedTuple):
    """A worker is gone, and why."""

    rank: int
    time_ns: int
    why: Text


class PeerUnreachable(NamedTuple):
    """The link from here to a peer, in this life of the peer, is broken; where it is not `alone`,
    or that to another of its team.
    """

    rank: int
    peer: int
    incarnation: int
    alone: bool = True


class Joined(NamedTuple):
    """A worker that was gone is back."""

    rank: int
    time_ns: int


class TimeTotals(NamedTuple):
    """What a rank's time went into and what it sent and measured, once it has ended."""

    rank: int
    totals_ns: Totals
    bytes_up: int
    bytes_down: int
    measures: Measures
    collective_ns: int = 0  # how long collectives were under way, whatever else went on meanwhile


class Heartbeat(NamedTuple):
    """How a rank stands. On processes: what its main task is blocked in, and since when nothing has
    moved.
    """

    rank: int
    time_ns: int
    steps: int
    staleness: int | None
    loss: float | None
    totals_ns: Totals
    bytes_up: int
    bytes_down: int
    measures: Measures
    counts: Counts | None = None  # at the home rank
    waiting: Text | None = None
    idle_s: float = 0.0
    collective_ns: int = 0  # as of `TimeTotals`


class Alive(NamedTuple):
    """A process that has not begun yet."""

    rank: int


class Ready(NamedTuple):
    """A worker that comes while the others run can be let in."""

    rank: int


class Placed(NamedTuple):
    """Where a process runs."""

    rank: int
    host: Text
    device: Text
    cores: int  # that it may use there


Loss = dict[
    str, float | None
]  # relative error, residual and cosine, see `ashl.compression.wrappers.error_metrics`


class CompressionReport(NamedTuple):
    """What compression made of one message."""

    rank: int
    round: int
    time_ns: int
    relative_error: float | None
    residual: float | None
    cosine: float | None
    split: tuple[int, int, int, int]  # bytes of headers, scales, values and indices
    nbytes: int
    unbiased: bool
    layers: dict[Text, Loss] | None = None


class NotFinite(NamedTuple):
    """An update that is no number, in the round that it was made in."""

    rank: int
    where: Text
    round: int


class ProfileMeasured(NamedTuple):
    """The profile that a profiling stage has measured, as JSON text."""

    rank: int
    profile: str


class PlanMade(NamedTuple):
    """What the workers do from stage `first` on, planned during the run: by stage and worker the
    numbers of an `ashl.planner.assignment.Assignment`.
    """

    rank: int
    first: int
    stages: list[list[list[float]]]


class Replan(NamedTuple):
    """An online planner has changed what the workers do."""

    rank: int
    stage: int
    ratios: list[float]
    local_steps: list[int]
    time_ns: int


class Lateness(NamedTuple):
    """How often something took longer than declared, and by how much."""

    count: int
    late: int
    late_s: float
    declared_s: float


ON_TIME = Lateness(0, 0, 0.0, 0.0)


class PacingStats(NamedTuple):
    """How well a process kept the declared pace: of its steps, of the transfers that came to it, by
    sender, and of what it encoded.
    """

    rank: int
    steps: Lateness
    transfers: list[tuple[int, Lateness]]
    encodings: Lateness = ON_TIME


class Left(NamedTuple):
    """A process has said all and ends."""

    rank: int


class StopAsked(NamedTuple):
    """Somebody has asked a process to stop, by Ctrl-C say."""

    rank: int
    reason: Text


class RankError(NamedTuple):
    """A process has failed, by itself or as a consequence of another's failure; then perhaps it
    knows of whose.
    """

    rank: int
    error: Text
    consequence: bool
    blames: int | None = None


class CheckpointPartSaved(NamedTuple):
    """A rank has written its part of a checkpoint, or could not: its state at the top of
    its loop.
    """

    rank: int
    number: int  # of the checkpoint
    stage: int
    version: int  # of the model
    time_ns: int
    sha256: Text = ""
    nbytes: int = 0  # that home has to put there; 0 = the rank has written its file itself
    error: Text | None = None
    rounds: list[int] | None = None  # of each worker, as a rank counts that counts them


class ModuleState(NamedTuple):
    """What forward passes have changed of a worker's module beside its parameters, for evaluations;
    it travels beside the record.
    """

    rank: int
    nbytes: int
    last: bool = False  # whether the worker computes no more


class Snapshot(NamedTuple):
    """A model for the evaluator, or the counts that belong to it. Where every worker has its own
    model, those with the same tick make one evaluation (None = at the end).
    """

    rank: int
    time_ns: int
    tick: int | None = None
    final: bool = False
    counts: Counts | None = None
    nbytes: int | None = None  # of the model, where it travels beside the record
    without: tuple[int, ...] = ()  # with the counts: the workers of whom no model belongs to them


class UpdateShown(NamedTuple):
    """An update before compression, or (`of` None) what the merge made of all of them."""

    rank: int
    of: int | None
    tick: int
    weight: float = 1.0
    nbytes: int | None = None


Record = (
    Round
    | StageEnd
    | StageBoundary
    | Lost
    | PeerUnreachable
    | Joined
    | TimeTotals
    | Heartbeat
    | Alive
    | Ready
    | Placed
    | CompressionReport
    | NotFinite
    | ProfileMeasured
    | PlanMade
    | Replan
    | PacingStats
    | Left
    | StopAsked
    | RankError
    | CheckpointPartSaved
    | ModuleState
    | Snapshot
    | UpdateShown
)
KINDS: dict[str, type[Record]] = {
    "round": Round,
    "stage": StageEnd,
    "border": StageBoundary,
    "worker_failed": Lost,
    "missed": PeerUnreachable,
    "worker_rejoined": Joined,
    "ledger": TimeTotals,
    "beat": Heartbeat,
    "alive": Alive,
    "ready": Ready,
    "placed": Placed,
    "health": CompressionReport,
    "not_finite": NotFinite,
    "profile": ProfileMeasured,
    "plan": PlanMade,
    "replan": Replan,
    "pace": PacingStats,
    "left": Left,
    "stop_asked": StopAsked,
    "error": RankError,
    "kept": CheckpointPartSaved,
    "module_state": ModuleState,
    "snapshot": Snapshot,
    "update": UpdateShown,
}
NAMES: dict[type[Record], str] = {of: kind for kind, of in KINDS.items()}


def as_fields(record: Record) -> dict[str, Any]:
    """A record as plain values, its kind first."""
    usual = record._field_defaults
    fields = {
        name: value
        for name, value in record._asdict().items()
        if name not in usual or value != usual[name]
    }
    if isinstance(counts := fields.get("counts"), Counts):
        fields["counts"] = counts._asdict()
    return {"kind": NAMES[type(record)], **fields}


def dumps(record: Record) -> str:
    """A record as one line of JSON; numbers that are not finite have JavaScript's names."""
    return json.dumps(as_fields(record))


def loads(line: str | bytes) -> Record:
    """The record of a line. Raises AshlError for anything that none of ours would send, and says
    what is wrong.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        kind = plain(repr(kind))[:40]
        raise AshlError(
            f"a record came that is none (kind {kind}); is another program using the job's port?"
        )
    return validate(KINDS[kind], fields, f"a record of kind {kind!r}")


def validate(of: type[T], fields: object, what: str) -> T:
    try:
        return make_validator(of).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise AshlError(plain(f"{what} came that is broken: {where}: {first['msg']}")) from None


@cache
def make_validator(of: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(of)


# --- which rounds are recorded

Rounds = Literal["all", "sampled", "none"]
# rounds that are kept or left out together, so that a thinned trace still shows how workers
# interact
BLOCK = 16
WHOLE_BLOCKS = 64  # blocks at the start that are all kept: the first 1024 rounds of every worker


def is_recorded(rounds: Rounds, number: int) -> bool:
    """Whether the round of this number is. Of a sample a worker's kept rounds grow with the
    logarithm of its rounds.

    Rounds come in blocks of 16. All of the first 64 blocks are kept, of the next 64 every second
    one, of the next 128 every fourth one and so on.
    """
    if rounds != "sampled":
        return rounds == "all"
    block = number // BLOCK
    return block % (1 << (block // WHOLE_BLOCKS).bit_length()) == 0
