"""Predict published results in virtual time, and compare them with the published figures.

Rule: a file declares a published cluster, its workload, its figures and the assumptions about what
the source does not give. Each figure is predicted by a run in virtual time without gradients. The
error is predicted / published − 1. Every second point of a file is kept back: assumptions are read
off the other points only.

The run exchanges a small model. Its links are slower than the published ones by the ratio of the
models' bytes, so that a transfer takes as long as the published one.
Limits: a prediction is a rate, a share of time or the duration of an exchange. A published ratio of
times to a loss is compared with a ratio of rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from pandas import DataFrame
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from ashl.config.catalog import CONF, load
from ashl.config.compose import compose
from ashl.config.override import key_of
from ashl.device import HOST
from ashl.errors import UsageError, unwritable
from ashl.option import Count, Natural, Positive, option
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import assemble_job
from ashl.report.figures import draw_predictions
from ashl.run.virtual import observe
from ashl.runtime.records import Record, Round, Rounds, Snapshot, StageEnd
from ashl.size_only import Vector
from ashl.tracking.console import plain_table

FOLDER = CONF / "backtest"
MODEL_BYTES = 1024  # dense bytes of the model of WORKLOAD
WORKLOAD = (
    "runtime=sim",
    "runtime.gradients=false",
    "tracking=none",
    "model=linear",
    "dataset=quadratic",
    "dataset.num_features=255",
)
LINK_RATES = ("bandwidth_mbit_s", "server_bandwidth_mbit_s", "intra_node_bandwidth_mbit_s")
NEAR = 0.25  # bound of the error that counts as near
HEAD = ("source", "point", "unit", "published", "predicted", "error", "formula", "kept back")


@option
class PublishedPoint:
    """A published figure, and the settings of its run.

    Fields of a file that are not among those of `PublishedTable` are defaults of all its points.
    """

    name: str
    published: Positive
    quantity: Literal["compute_share", "steps_per_s", "exchange_s"]
    unit: str
    scale: Positive = 1.0  # published units per unit of the prediction
    settings: tuple[str, ...] = ()  # in addition to those of the file
    method: tuple[str, ...] = ()  # further settings, of the predicted method only
    against: tuple[str, ...] = ()  # settings of the run by whose rate the prediction is divided
    # The source measured from this step of a worker, exclusive, to that one. None = the whole run.
    window: tuple[Natural, Count] | None = None
    formula: Positive | None = None  # the figure by the source's formula of the literature
    repeats: tuple[Positive, ...] = ()  # published figures of single runs


@option
class PublishedTable:
    """The points of one source, in the order in which it gives them."""

    source: str
    about: str  # where the figures are, and the published set-up
    measured: bool  # False if the source simulated its figures
    assumptions: tuple[str, ...]
    settings: tuple[str, ...]
    # bytes of one exchanged model; None = exchange_s is declared
    model_bytes: Positive | None = None
    points: tuple[PublishedPoint, ...]


@dataclass(frozen=True)
class Prediction:
    """A published figure beside the predicted one."""

    source: str
    name: str
    unit: str
    published: float
    predicted: float
    formula: float | None
    kept_back: bool
    measured: bool

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def formula_error(self) -> float | None:
        return None if self.formula is None else self.formula / self.published - 1

    def document(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        return {**vars(self), "error": self.error, "formula_error": self.formula_error}


class RoundObserver:
    """Observer that keeps the rounds of worker 0 and the end of the run."""

    rounds: Rounds = "all"

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.own: list[Round] = []
        self.steps_per_s = 0.0

    def emit(self, record: Record) -> None:
        match record:
            case Round(rank=0):
                self.own.append(record)
            case StageEnd():
                self.steps_per_s = record.counts.steps / record.end_ns * 1e9

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None:
        """Ignore a model: it has no values."""


def published_files(files: Sequence[Path]) -> list[Path]:
    """Return the given files, or all files of `conf/backtest`."""
    return [*files] or sorted(FOLDER.glob("*.yaml"))


def read_table(file: Path) -> PublishedTable:
    """Read a file of published figures.

    Raises: UsageError that names the first wrong field.
    """
    content = load(file)
    own = {field.name for field in fields(PublishedTable)}
    shared = {key: value for key, value in content.items() if key not in own}
    points = content.get("points")
    if isinstance(points, list):
        points = [{**shared, **point} if isinstance(point, dict) else point for point in points]
    kept = {key: value for key, value in content.items() if key in own}
    try:
        return TypeAdapter(PublishedTable).validate_python({**kept, "points": points})
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"])) or "the file"
        raise UsageError(f"{file}: {where}: {found['msg'].lower()}; correct it") from error


def predict_table(table: PublishedTable) -> list[Prediction]:
    """Predict the points of a source; those of odd number, counted from 0, are kept back."""
    return [
        Prediction(
            table.source,
            point.name,
            point.unit,
            point.published,
            predict_point(table, point),
            point.formula,
            kept_back=number % 2 == 1,
            measured=table.measured,
        )
        for number, point in enumerate(table.points)
    ]


def predict_point(table: PublishedTable, point: PublishedPoint) -> float:
    """Return the prediction of a point in the published unit."""
    common = (*WORKLOAD, *table.settings, *point.settings)
    observed = simulate((*common, *point.method), table.model_bytes)
    match point.quantity:
        case "compute_share":
            value = compute_share(observed.own, point.window)
        case "exchange_s":
            value = fmean(exchange_ns(round) for round in observed.own) / 1e9
        case "steps_per_s":
            value = observed.steps_per_s
    if point.against:
        value /= simulate((*common, *point.against), table.model_bytes).steps_per_s
    return value * point.scale


@cache
def simulate(settings: tuple[str, ...], model_bytes: float | None) -> RoundObserver:
    """Run settings in virtual time; of two settings of one key the last one holds."""
    config = compose([*{key_of(text): text for text in settings}.values()])
    if model_bytes is not None:
        cluster = config["cluster"]
        slower = {
            name: cluster[name] * MODEL_BYTES / model_bytes
            for name in LINK_RATES
            if cluster[name] is not None
        }
        config = {**config, "cluster": {**cluster, **slower}}
    plan, observer = compile_plan(config), RoundObserver()
    assert 4 * plan.num_params == MODEL_BYTES
    observe(plan, assemble_job(plan, HOST), observer)
    return observer


def compute_ns(own: Round) -> int:
    """Return the nanoseconds that a worker computed in a round."""
    return sum(end - start for kind, start, end in own.spans_ns if kind == "compute")


def exchange_ns(own: Round) -> int:
    """Return the nanoseconds of a round in which a worker did not compute."""
    return own.end_ns - own.start_ns - compute_ns(own)


def compute_share(rounds: Sequence[Round], window: tuple[int, int] | None) -> float:
    """Return the share of time in which a worker computed, over a window of its steps.

    The exchange of a round counts if the round's last step is in the window.
    """
    first, last = window or (0, sum(own.steps for own in rounds))
    steps = exchanged_ns = 0
    for own in rounds:
        steps += own.steps
        if first < steps <= last:
            exchanged_ns += exchange_ns(own)
    mean_step_ns = sum(map(compute_ns, rounds)) / steps
    computed_ns = (last - first) * mean_step_ns
    return computed_ns / (computed_ns + exchanged_ns)


def median_error(points: Sequence[Prediction]) -> float:
    return median(abs(point.error) for point in points)


def near_share(points: Sequence[Prediction]) -> float:
    """Return the share of points whose error is within NEAR."""
    return fmean(abs(point.error) <= NEAR for point in points)


def as_row(point: Prediction) -> tuple[str, ...]:
    """Return a prediction as the cells of `HEAD`."""
    return (
        point.source,
        point.name,
        point.unit,
        f"{point.published:.3g}",
        f"{point.predicted:.3g}",
        f"{point.error:+.0%}",
        "" if point.formula_error is None else f"{point.formula_error:+.0%}",
        "yes" if point.kept_back else "",
    )


def show(points: Sequence[Prediction], console: Console) -> None:
    """Print all points, and the errors by source."""
    console.print(plain_table(HEAD, map(as_row, points), left=HEAD))
    console.print()
    lines = {
        "all points": points,
        "kept back": [point for point in points if point.kept_back],
        "kept back, measured": [point for point in points if point.kept_back and point.measured],
    }
    sources = dict.fromkeys(point.source for point in points)
    if len(sources) > 1:
        lines |= {name: [point for point in points if point.source == name] for name in sources}
    titles = ("", "points", "median error", f"within {NEAR:.0%}", "formula")
    rows = [(name, *summary_of(found)) for name, found in lines.items() if found]
    console.print(plain_table(titles, rows, left=titles))


def summary_of(points: Sequence[Prediction]) -> tuple[str, ...]:
    """Return number, median error and share of near points, and the formula's median error."""
    formula = [abs(point.formula_error) for point in points if point.formula_error is not None]
    return (
        str(len(points)),
        f"{median_error(points):.1%}",
        f"{near_share(points):.0%}",
        f"{median(formula):.0%}" if formula else "",
    )


def save(points: Sequence[Prediction], folder: Path) -> None:
    """Write backtest.csv and backtest.svg into a folder."""
    series: dict[str, list[tuple[float, float, bool]]] = {}
    for point in points:
        values = (point.published, point.predicted, point.kept_back)
        series.setdefault(point.source, []).append(values)
    figure = draw_predictions(series, NEAR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "backtest.csv").write_text(as_csv(points), encoding="utf-8")
        (folder / "backtest.svg").write_bytes(figure.to_bytes("svg"))
    except OSError as error:
        fix = "name another one with --save FOLDER"
        raise unwritable(f"cannot write to the folder {folder}", error, fix) from error


def as_csv(points: Sequence[Prediction]) -> str:
    return DataFrame(map(as_row, points), columns=HEAD).to_csv(index=False, lineterminator="\n")
