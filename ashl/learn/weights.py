"""Load weights as plain tensors, by the model's names, without unpickling."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ashl.errors import UsageError

FINAL, BEST = "final.pt", "best.pt"
EXTRA = "_extra_state"  # suffix of the names of the values that `get_extra_state` returns


def load_file(module: nn.Module, file: Path) -> nn.Module:
    """Load a file's tensors into a module and return it.

    Raises: UsageError if the file cannot be read or does not fit.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about an older format
            weights = torch.load(file, map_location="cpu", weights_only=True)
        for name, tensor in weights.items() if isinstance(weights, dict) else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_complex():
                raise ValueError(f"{name} has complex numbers")
        load(module, weights)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read on this machine ({error.strerror or error})"
        ) from error
    except Exception as error:  # its class depends on the damage
        raise UsageError(
            f"{file} does not fit the model: {' '.join(str(error).split()) or 'it is empty'}"
        ) from error
    return module


def load(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load a state of tensors; a module's own extra state, which no weight file has, stays.

    Raises: RuntimeError.
    """
    own = module.state_dict()
    extra = {name: own[name] for name in own if name.endswith(EXTRA) and name not in weights}
    module.load_state_dict({**weights, **extra})


def start_of(start: str | None) -> str | None:
    """Return the file that `run.start_from` names: itself, or that of a run folder.

    Raises: UsageError if there is none.
    """
    if start is None:
        return None
    path = Path(start).expanduser().resolve()
    found = [file for file in (path, path / FINAL, path / BEST) if file.is_file()]
    if not found:
        raise UsageError(
            f"run.start_from={start} is neither a file of weights nor a run folder with {FINAL}"
            f" or {BEST}; a run of a sweep leaves them with run.save_weights=true"
        )
    return str(found[0])
