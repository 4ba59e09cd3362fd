"""The weights of a run as plain tensors by parameter name: written for torch alone, and loaded."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ashl.config.construct import report_own_faults
from ashl.errors import AshlError, UsageError
from ashl.learn.making import make_module
from ashl.plan.files import read_plan
from ashl.plan.plan import Plan
from ashl.planning.instantiate import OptionFactory
from ashl.runtime.plain_state import replace_file


def write(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights, atomically. Raises AshlError if that fails."""
    try:
        replace_file(path, partial(torch.save, dict(weights)))
    except (OSError, RuntimeError) as error:
        text = (
            f"cannot write the weights {path}; free some space, choose another run.dir, or"
            " run.save_weights=false"
        )
        raise AshlError(text) from error


def load(run_dir: Path, weights: str, allow: Sequence[str]) -> nn.Module:
    """Return the module of the run's plan, with the tensors of `final.pt` or `best.pt`, in
    evaluation mode.

    Args: weights, `final` or `best`; allow, packages of which classes may be imported. The plan's
    own allow_targets suffice for a class that this process has imported already.
    Raises: UsageError if the run or its weights are missing or do not fit each other.
    """
    if weights not in ("final", "best"):
        raise UsageError(f"weights={weights}: no run writes such weights; name final or best")
    plan = read_plan(str(run_dir / "plan.json"))
    file = run_dir / f"{weights}.pt"
    if not file.is_file():
        raise UsageError(
            f"{run_dir} has no {file.name}; a run of a sweep writes it with run.save_weights=true"
        )
    allow = (*allow, *imported_package(plan))
    with report_own_faults(allow):
        option = OptionFactory(allow).get_option("model", plan.model)
        return make_module(option, plan.sample_shape, plan.num_classes, plan.seed, str(file)).eval()


def imported_package(plan: Plan) -> tuple[str, ...]:
    """Return the package of the model, if the plan allows it and its class is an `nn.Module` that
    this process has imported already, else ().

    Limits: a plan alone imports no package and calls no function.
    """
    module_name, _, name = plan.model["_target_"].rpartition(".")
    cls = getattr(sys.modules.get(module_name), name, None)
    known = isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module_name
    package = module_name.partition(".")[0]
    return (package,) if known and package in plan.allow_targets else ()
