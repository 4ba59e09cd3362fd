"""Load the script of `ashl export RUN --to ...` as a module."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.utils import vector_to_parameters

from ashl.cli.app import main
from ashl.plan.files import read_plan
from ashl.planning.instantiate import assemble_job


def exported(run: Path, to: str) -> Any:
    file = f"train_{to}.py"
    assert main(["export", str(run), "--to", to, "--out", file]) == 0
    module: Any = ModuleType("exported")
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return module


def on_the_batches_of(run: Path, written: Any, steps: int) -> Any:
    """The same script with the run's first model and the batches that its workers saw."""
    trainer: Any = assemble_job(read_plan(str(run / "plan.json")), "cpu").stages[0].trainer
    made = written.model

    def model() -> torch.nn.Module:
        net = made()
        vector_to_parameters(trainer.init()[0].clone(), net.parameters())
        return net

    def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(steps):
            yield trainer.learner._batch(
                trainer.learner._train, trainer.batches[rank].indices(step)
            )

    written.model, written.batches = model, batches
    return written
