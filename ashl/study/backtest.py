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

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pandas import DataFrame, notna
from pydantic import Field, TypeAdapter, ValidationError
from rich.console import Console

from ashl.config.catalog import CONF, load_yaml
from ashl.config.compose import compose
from ashl.config.override import index_by_key
from ashl.device import HOST
from ashl.errors import UsageError, unwritable_path_error
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
    points: Annotated[tuple[PublishedPoint, ...], Field(min_length=1)]


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
    content = load_yaml(file)
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
        if found["type"] == "missing":
            raise UsageError(
                f"{file} is no table of published figures: it lacks {where}"
            ) from error
        raise UsageError(f"{file}: {where}: {found['msg'].lower()}; correct it") from error


def predict(tables: Iterable[PublishedTable]) -> DataFrame:
    """Predict the points of sources; those of odd number in a source, from 0, are kept back.

    Returns: a row for each point, with the errors of the prediction and of the source's formula.
    """
    rows = [
        {
            "source": table.source,
            "name": point.name,
            "unit": point.unit,
            "published": point.published,
            "predicted": predict_point(table, point),
            "formula": point.formula,
            "kept_back": number % 2 == 1,
            "measured": table.measured,
        }
        for table in tables
        for number, point in enumerate(table.points)
    ]
    points = DataFrame(rows).astype({"formula": float})
    points["error"] = points["predicted"] / points["published"] - 1
    points["formula_error"] = points["formula"] / points["published"] - 1
    return points


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
    config = compose([*index_by_key(settings).values()])
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


def as_documents(points: DataFrame) -> list[dict[str, Any]]:
    """Return the points as JSON values."""
    return points.astype(object).where(points.notna(), None).to_dict("records")


def as_text(points: DataFrame) -> DataFrame:
    """Return the points as a table of text."""
    formula = [f"{error:+.0%}" if notna(error) else "" for error in points["formula_error"]]
    return DataFrame(
        {
            "source": points["source"],
            "point": points["name"],
            "unit": points["unit"],
            "published": points["published"].map("{:.3g}".format),
            "predicted": points["predicted"].map("{:.3g}".format),
            "error": points["error"].map("{:+.0%}".format),
            "formula": formula,
            "kept back": points["kept_back"].map({True: "yes", False: ""}),
        }
    )


def as_csv(points: DataFrame) -> str:
    return as_text(points).to_csv(index=False, lineterminator="\n")


def show(points: DataFrame, console: Console) -> None:
    """Print all points, and the errors by source."""
    text = as_text(points)
    console.print(plain_table([*text], text.itertuples(index=False, name=None), left=[*text]))
    console.print()
    kept_back = points[points["kept_back"]]
    groups = {
        "all points": points,
        "kept back": kept_back,
        "kept back, measured": kept_back[kept_back["measured"]],
    }
    if points["source"].nunique() > 1:
        groups |= {str(name): own for name, own in points.groupby("source", sort=False)}
    titles = ("", "points", "median error", f"within {NEAR:.0%}", "formula")
    rows = [(name, *summary_of(group)) for name, group in groups.items() if len(group)]
    console.print(plain_table(titles, rows, left=titles))


def summary_of(points: DataFrame) -> tuple[str, ...]:
    """Return number, median error and share of near points, and the formula's median error."""
    errors, formula = points["error"].abs(), points["formula_error"].abs().median()
    return (
        str(len(points)),
        f"{errors.median():.1%}",
        f"{(errors <= NEAR).mean():.0%}",
        f"{formula:.0%}" if notna(formula) else "",
    )


def save(points: DataFrame, folder: Path) -> None:
    """Write backtest.csv and backtest.svg into a folder."""
    figure = draw_predictions(points, NEAR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "backtest.csv").write_text(as_csv(points), encoding="utf-8")
        (folder / "backtest.svg").write_bytes(figure.to_bytes("svg"))
    except OSError as error:
        fix = "name another one with --save FOLDER"
        raise unwritable_path_error(f"cannot write to the folder {folder}", error, fix) from error
