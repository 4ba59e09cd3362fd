"""One stage from start to stop, with the sync mode, topology and compression that were chosen."""

from __future__ import annotations

from ashl.errors import UsageError
from ashl.option import option
from ashl.plan.plan import Spec, StagePlan, WorkerPlan


@option
class Single:
    """No switch: the run is one stage."""

    def stages(self, specs: dict[str, Spec], local_steps: int | str, batch: int, num_workers: int) -> list[StagePlan]:
        """Every worker takes the same H and an equal share of the data."""
        if local_steps == "plan":
            raise UsageError("sync.local_steps=plan needs a schedule that plans H per worker; give a number")
        worker = WorkerPlan(
            local_steps=int(local_steps),
            batch=batch,
            data_share=1 / num_workers,
            compression_ratio=1.0,
            predicted_cycle_s=None,
        )
        name = specs["sync"]["_target_"].rsplit(".", 2)[-2]
        return [
            StagePlan(
                name=name,
                sync=specs["sync"],
                topology=specs["topology"],
                aggregate=specs["aggregate"],
                compression=specs["compression"],
                optimizer=specs["optimizer"],
                until={},
                workers=(worker,) * num_workers,
            )
        ]
