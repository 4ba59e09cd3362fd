"""Define the option of group tracking: what a run records, and where the records go."""

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from ashl.errors import UsageError
from ashl.option import option
from ashl.runtime.records import Rounds

TITLES = {"mlflow": "MLflow", "tensorboard": "TensorBoard", "wandb": "W&B"}


@option
class Tracking:
    """Choice of the record files and of their copy in a tracker.

    `sink`: tracker that receives a copy of metrics, summary and artifacts; `none` writes the run
    folder only. `events`: `all` rounds, a `sampled` part of them (see `ashl.runtime.records`) or
    `none`; they make the trace. `experiment`: name of the experiment that lists the run.
    """

    sink: Literal["mlflow", "tensorboard", "wandb", "none"]
    events: Rounds
    experiment: Annotated[str, Field(min_length=1)]

    def __post_init__(self) -> None:
        if self.sink != "none" and find_spec(self.sink) is None:
            raise UsageError(
                f"tracking={self.sink}: needs the library {self.sink}; run pip install"
                f' "ashl[{self.sink}]", or set tracking=none'
            )
