"""Define the option of group tracking: what a run records, and where the records go."""

from typing import Annotated, Literal

from pydantic import Field

from ashl.option import option
from ashl.runtime.records import Rounds


@option
class Tracking:
    """Choice of the record files and of their copy in MLflow.

    `sink`: `mlflow` copies metrics, summary and artifacts to MLflow, `none` writes the run folder
    only. `events`: `all` rounds, a `sampled` part of them (see `ashl.runtime.records`) or `none`;
    they make the trace. `experiment`: name of the MLflow experiment.
    """

    sink: Literal["mlflow", "none"]
    events: Rounds
    experiment: Annotated[str, Field(min_length=1)]
