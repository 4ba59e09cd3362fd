"""Checked values of a configuration that belong to no group."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ashl.config.construct import construct, explain_error
from ashl.errors import UsageError
from ashl.option import Count, Natural, NonNegative, Number, Positive, Ratio, Span, option
from ashl.plan.plan import Limits

STAGE_GROUPS = ("sync", "topology", "aggregate", "outer", "compression", "overlap", "optimizer")
GROUPS = ("model", "dataset", "task", "cluster", "schedule", "planner", "runtime", *STAGE_GROUPS)


@option
class Stop:
    """Limits and targets of a run; the first that is reached ends it."""

    epochs: Positive | None
    steps: Count | None
    seconds: Span | None
    target_accuracy: Ratio | None
    target_loss: NonNegative | None
    target_metric: Annotated[float, Number, Field(allow_inf_nan=False)] | None
    target_consecutive_evals: Count
    patience: Count | None


@option
class Evaluation:
    """Times of evaluations; both null = once per epoch of the training set."""

    every_s: Span | None
    every_commits: Count | None


@option
class Run:
    """Folder, initial weights, statistics of compression and checkpoints of a run."""

    dir: str | None
    save_weights: bool | None
    start_from: str | None
    compression_stats_every: Count | None
    checkpoint_s: Span | None


@option
class Settings:
    """All values that belong to no group."""

    seed: Natural
    name: str | None
    plan: str | None
    profile: str | None
    allow_targets: tuple[str, ...]
    run: Run
    stop: Stop
    eval: Evaluation


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return the checked values outside of the groups.

    Raises: UsageError, also for a key that nothing reads.
    """
    parts: dict[str, Any] = {}
    beside = {"choices", "resumed", "sweep", "tracking"}
    extra = set(config) - set(GROUPS) - set(Settings.__dataclass_fields__) - beside  # type: ignore[attr-defined]
    if extra:
        raise UsageError(
            f"{sorted(extra)[0]}: not a key of the configuration; `ashl train --cfg` shows all keys"
        )
    if isinstance(config["name"], str) and (
        set(config["name"]) & {"/", "\\"} or not config["name"].isprintable()
    ):
        raise UsageError(
            f"name={config['name']}: a part of a folder's name cannot contain /, \\ or unprintable"
            " characters; set the path of the run folder with run.dir"
        )
    for key, cls in (("run", Run), ("stop", Stop), ("eval", Evaluation)):
        parts[key] = construct(
            {"_target_": f"ashl.planning.settings.{cls.__name__}", **config[key]}, key
        )
    try:
        return Settings(
            **parts,
            **{key: config[key] for key in ("seed", "name", "plan", "profile", "allow_targets")},
        )
    except ValidationError as error:
        raise UsageError(explain_error(error, "", Settings)) from error


def limits_of(settings: Settings, dataset: Any) -> Limits:
    """Return the stop rule.

    Without a limit, even if there is a target, the data set's own number of epochs is the limit.
    """
    stop = settings.stop
    unbounded = stop.epochs is None and stop.steps is None and stop.seconds is None
    return Limits(
        epochs=dataset.epochs if unbounded else stop.epochs,
        steps=stop.steps,
        seconds=stop.seconds,
        target_accuracy=stop.target_accuracy,
        target_loss=stop.target_loss,
        target_metric=stop.target_metric,
        target_consecutive_evals=stop.target_consecutive_evals,
        patience=stop.patience,
        eval_every_s=settings.eval.every_s,
        eval_every_commits=settings.eval.every_commits,
    )
