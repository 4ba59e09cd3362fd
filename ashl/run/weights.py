"""The weights of a run as plain tensors, name by name as the model has them: for torch alone, and
back.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ashl.config.construct import own_faults
from ashl.errors import AshlError, UsageError
from ashl.learn.making import make_module
from ashl.plan.files import read_plan
from ashl.plan.plan import Plan
from ashl.planning.instantiate import OptionFactory
from ashl.runtime.plain_state import save


def write(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Replace the file in one step. Raises AshlError where it cannot be written."""
    try:
        save(path, dict(weights))
    except (OSError, RuntimeError) as error:
        text = (
            f"cannot write the weights {path}; free some space, choose another run.dir, or"
            " run.save_weights=false"
        )
        raise AshlError(text) from error


def load(run_dir: Path, weights: str, allow: Sequence[str]) -> nn.Module:
    """The module that the run's plan describes, with the tensors of `final.pt` or `best.pt`, in
    evaluation mode.

    The plan's own permission is enough for a class that this process has imported already.
    Raises UsageError where the run or its weights are not there, or do not fit each other.
    """
    plan, file = read_plan(str(run_dir / "plan.json")), run_dir / f"{weights}.pt"
    if weights not in ("final", "best"):
        raise UsageError(f"no run leaves weights called {weights!r}; name final or best")
    if not file.is_file():
        raise UsageError(
            f"{run_dir} has no {file.name}; a run of a sweep leaves them with run.save_weights=true"
        )
    allow = (*allow, *at_hand(plan))
    with own_faults(allow):
        option = OptionFactory(allow).of("model", plan.model)
        return make_module(option, plan.sample_shape, plan.num_classes, plan.seed, str(file)).eval()


def at_hand(plan: Plan) -> tuple[str, ...]:
    """Return the package of the model, if the plan allows it and its class is one of `nn.Module`
    that this process has imported already. A record alone imports nothing, and it calls no
    function.
    """
    home, _, name = plan.model["_target_"].rpartition(".")
    cls = getattr(sys.modules.get(home), name, None)
    known = isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == home
    package = home.partition(".")[0]
    return (package,) if known and package in plan.allow_targets else ()
