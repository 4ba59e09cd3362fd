"""Records: the reports of a rank on its run, a named tuple for each kind.

In virtual time the monitor receives the tuple itself. A process sends its fields, with `kind` as
the name of the type; a field with its default value is omitted. Nothing is unpickled: every
field is validated, and control characters are removed from text for a terminal. `is_recorded`
decides which rounds are recorded at all. The counterpart of records is `ControlUpdate`, the message
from the controller to every rank.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import AfterValidator, TypeAdapter, ValidationError

from ashl.errors import AshlError, to_one_line
from ashl.runtime.effects import Epoch
from ashl.runtime.time_accounting import KINDS as TIMES
from ashl.runtime.time_accounting import Span

T = TypeVar("T")
Text = Annotated[str, AfterValidator(to_one_line)]


def check_kinds(totals: dict[str, int]) -> dict[str, int]:
    """Return the totals. Raises ValueError unless their keys are the classes of time."""
    if totals.keys() != set(TIMES):
        raise ValueError(f"totals need exactly the classes {', '.join(TIMES)}")
    return totals


Totals = Annotated[dict[str, int], AfterValidator(check_kinds)]


class Counts(NamedTuple):
    """A run's progress, as counted so far by the rank that decides when it ends. Lists are by
    worker, and copies.
    """

    steps: int  # steps of all workers that are part of the model
    samples: int  # samples of these steps
    merges: int  # changes of the model
    # pushes that became part of the model; without a server, rounds
    commits: list[int]
    steps_by: list[int]  # steps that are part of the model
    dropped_by: list[int]  # steps that are part of no model
    stale_sum: list[int]  # sum over its pushes of their staleness, in merges
    stale_max: list[int]  # largest staleness of its pushes, in merges
    max_lead: int  # largest lead, in commits, at which a worker was allowed to proceed
    # groups that each worker has averaged in, where workers meet in groups; else None
    groups: list[int] | None
    conflicts: int | None  # groups that had to wait for another group
    loss: float  # running mean of the workers' minibatch losses
    diverged: Text | None
    # steps that are part of no model, by reason, as far as known
    dropped_for: dict[Text, int] | None = None

    def count_commits(self, has_server: bool) -> int:
        """Return the commits of the run: pushes that became part of the model. Without a server
        there are no pushes, and merges are counted.
        """
        return sum(self.commits) if has_server else self.merges


class Measured(NamedTuple):
    """A rank's values of one measure so far: last value, sum and count."""

    last: float
    total: float
    count: int


Measures = Mapping[Text, Measured]


class Round(NamedTuple):
    """One round of a worker: from its last merge to this one."""

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
    group: list[int] | None = None  # ranks that merged in this round, where workers meet in groups
    # instants when parts of its steps were ready, if messages are made of parts
    parts_ns: list[int] | None = None
    # (begin, end) of collectives that overlapped with other work
    messages_ns: list[tuple[int, int]] | None = None


class StageEnd(NamedTuple):
    """The end of a stage."""

    rank: int
    stage: int
    name: Text
    reason: Text | None
    end_ns: int
    counts: Counts


class StageBoundary(NamedTuple):
    """A worker's time by class when a stage ended and the next one began."""

    rank: int
    stage: int
    totals_ns: Totals


class RunEnding(NamedTuple):
    """The decision of a coordinator that the run ends, while other ranks may still send models."""

    rank: int
    time_ns: int


class WorkerFailed(NamedTuple):
    """The failure of a worker, and its reason."""

    rank: int
    time_ns: int
    why: Text


class WorkerRejoined(NamedTuple):
    """The rejoin of a failed worker."""

    rank: int
    time_ns: int


class TimeTotals(NamedTuple):
    """A rank's time by class, and its bytes and measures, once it has ended."""

    rank: int
    totals_ns: Totals
    bytes_up: int
    bytes_down: int
    measures: Measures
    # nanoseconds with a collective in flight, also while the main task did other work
    collective_ns: int = 0


class Heartbeat(NamedTuple):
    """The current state of a rank. On processes it says what the main task is blocked in, and for
    how long no task has run.
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
    counts: Counts | None = None  # at the lead rank only
    waiting: Text | None = None
    idle_s: float = 0.0
    collective_ns: int = 0  # as in `TimeTotals`
    # number of the first pause for a checkpoint in which a joining worker takes part; None if it
    # has not joined, or does not know it yet
    first_pause: int | None = None


class Ready(NamedTuple):
    """A joining worker that is ready to be admitted while the others run."""

    rank: int


class Placed(NamedTuple):
    """The node and device of a process."""

    rank: int
    host: Text
    device: Text
    cores: int  # cores that it may use there


class CompressionReport(NamedTuple):
    """Compression metrics of one message, see `ashl.compression.error_metrics`."""

    rank: int
    round: int
    time_ns: int
    relative_error: float | None
    residual: float | None
    cosine: float | None
    split: tuple[int, int, int, int]  # bytes of headers, scales, values and indices
    nbytes: int
    unbiased: bool


class NotFinite(NamedTuple):
    """An update that is not finite, and the round in which it was computed."""

    rank: int
    where: Text
    round: int


class ProfileMeasured(NamedTuple):
    """The profile that a profiling stage has measured, as JSON text."""

    rank: int
    profile: str


class PlanMade(NamedTuple):
    """The assignments of all workers from stage `first` on, planned during the run: by stage and
    worker the numbers of an `ashl.planner.assignment.Assignment`.
    """

    rank: int
    first: int
    stages: list[list[list[float]]]


class Replan(NamedTuple):
    """New assignments of an online planner within a stage."""

    rank: int
    stage: int
    ratios: list[float]
    local_steps: list[int]
    time_ns: int


class PacingStats(NamedTuple):
    """Lateness of a process against the declared costs: of its own steps and encodings, and of the
    transfers that it received, by sender.
    """

    rank: int
    late: list[tuple[int, float, float]]  # rank, seconds late, declared seconds


class ProcessExited(NamedTuple):
    """The exit of a process after its last record."""

    rank: int


class StopAsked(NamedTuple):
    """A process received an interrupt, for example by Ctrl-C, which asks the run to stop."""

    rank: int


class RankError(NamedTuple):
    """The failure of a process; `consequence` is True if another process failed first."""

    rank: int
    error: Text
    consequence: bool


class CheckpointPartSaved(NamedTuple):
    """A rank has written its part of a checkpoint, or could not write it."""

    rank: int
    number: int  # of the checkpoint
    time_ns: int
    sha256: Text = ""
    # bytes that the controller has to write; 0 = the rank has written its file itself
    nbytes: int = 0
    error: Text | None = None


class ModuleState(NamedTuple):
    """The state that forward passes have changed in a worker's module beside its parameters, for
    evaluations. It travels beside the record.
    """

    rank: int
    nbytes: int
    last: bool = False  # True if the worker computes no more


class Snapshot(NamedTuple):
    """A model for the evaluator, or the counts that belong to it. If every worker has its own
    model, those with the same tick form one evaluation (None = at the end).
    """

    rank: int
    time_ns: int
    tick: int | None = None
    final: bool = False
    counts: Counts | None = None
    nbytes: int | None = None  # bytes of the model, if it travels beside the record
    without: tuple[int, ...] = ()  # with the counts: workers without a model in this evaluation


Record = (
    Round
    | StageEnd
    | StageBoundary
    | RunEnding
    | WorkerFailed
    | WorkerRejoined
    | TimeTotals
    | Heartbeat
    | Ready
    | Placed
    | CompressionReport
    | NotFinite
    | ProfileMeasured
    | PlanMade
    | Replan
    | PacingStats
    | ProcessExited
    | StopAsked
    | RankError
    | CheckpointPartSaved
    | ModuleState
    | Snapshot
)
KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in get_args(Record)}


def as_fields(record: Record) -> dict[str, Any]:
    """Return a record as plain values, its kind first."""
    usual = record._field_defaults
    fields = {
        name: value
        for name, value in record._asdict().items()
        if name not in usual or value != usual[name]
    }
    if isinstance(counts := fields.get("counts"), Counts):
        fields["counts"] = counts._asdict()
    return {"kind": type(record).__name__, **fields}


def record_of(fields: object) -> Record:
    """Return the record with these fields. Raises AshlError if it is not one of this program."""
    known = dict(fields) if isinstance(fields, dict) else {}
    kind = str(known.pop("kind", None))
    if kind not in KINDS:
        raise AshlError(f"received a record of an unknown kind ({to_one_line(kind)[:40]})")
    return validate(KINDS[kind], known, f"a record of kind {kind!r}")


def validate(of: type[T], fields: object, what: str) -> T:
    """Return a value of type `of` made of `fields`. Raises AshlError if a field is invalid; `what`
    names the value in the message.
    """
    try:
        return make_validator(of).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise AshlError(to_one_line(f"{what} is invalid: {where}: {first['msg']}")) from None


@cache
def make_validator(of: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(of)


class End(NamedTuple):
    """The end of the run: exit code, and the message to print (empty = none)."""

    code: int
    why: Text = ""


class ControlUpdate(NamedTuple):
    """The state that the controller tells every rank."""

    stop_reason: Text | None = None
    scores: dict[str, float | None] | None = None  # of the latest evaluation
    end: End | None = None
    # models, updates and states of this rank that the controller has used, by kind of record
    taken: dict[str, int] | None = None
    # failed workers that the run tolerates, each with its incarnation that ended
    failed: tuple[tuple[int, int], ...] = ()
    # joining workers to connect to, each with its incarnation
    ready: tuple[tuple[int, int], ...] = ()
    # the members of a run whose workers regroup after a failure or a rejoin
    epoch: Epoch = Epoch(0, ())
    # seconds for which the controller has looked for failures, without its evaluations
    supervised_s: float = 0.0


# --- which rounds are recorded

Rounds = Literal["all", "sampled", "none"]
# rounds that are recorded or omitted together, so that a sampled trace still shows how workers
# interact
BLOCK = 16
# blocks at the start that are all recorded: the first 1024 rounds of every worker
WHOLE_BLOCKS = 64


def is_recorded(rounds: Rounds, number: int) -> bool:
    """Return True if the round of this number is recorded. In a sample the number of recorded
    rounds of a worker grows with the logarithm of its rounds.

    Rounds form blocks of 16. All of the first 64 blocks are recorded, of the next 64 every second
    one, of the next 128 every fourth one and so on.
    """
    if rounds != "sampled":
        return rounds == "all"
    block = number // BLOCK
    return block % (1 << (block // WHOLE_BLOCKS).bit_length()) == 0
