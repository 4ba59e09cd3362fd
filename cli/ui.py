"""`ashl ui`: serve MLflow's page on the records of `runs/`."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ashl.errors import UsageError

from .train import Debug, show_starting


def ui(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="RUN_OR_SWEEP", help="Open on this one; default: the latest."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    store: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder that holds mlflow.db.")
    ] = Path("runs"),
    debug: Debug = False,
) -> None:
    """Serve MLflow's page on the records of runs/ until Ctrl-C, and print a link to it."""
    if not (store / "mlflow.db").is_file() and "MLFLOW_TRACKING_URI" not in os.environ:
        raise UsageError(
            f"There is no mlflow.db in {store.absolute()}; run `ashl train` first, or name its"
            " folder: --store DIR."
        )
    with ExitStack() as stack:
        with show_starting():  # MLflow takes seconds to import
            from ashl.tracking.ui import serve

            link, server = stack.enter_context(serve(store, port, host, folder))
        print(f"{link}\nCtrl-C ends it.")
        server.wait()
