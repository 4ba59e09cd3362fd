"""Weights as plain tensors, name by name as the model has them, from files of which nothing is
unpickled.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ashl.errors import UsageError

FINAL, BEST = "final.pt", "best.pt"
EXTRA = "_extra_state"  # how torch ends the names of what `get_extra_state` returns


def put_into(module: nn.Module, file: Path) -> nn.Module:
    """The module with the file's tensors. Raises UsageError where it cannot be read, or does not
    fit.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of an older format
            weights = torch.load(file, map_location="cpu", weights_only=True)
        for name, tensor in weights.items() if isinstance(weights, dict) else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_complex():
                raise ValueError(f"{name} has complex numbers")
        load(module, weights)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read on this machine ({error.strerror or error})"
        ) from error
    except Exception as error:  # of many kinds, by what is broken
        raise UsageError(
            f"{file} does not fit the model: {' '.join(str(error).split()) or 'it is empty'}"
        ) from error
    return module


def load(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load a state of tensors; a module's own extra state, which no file of weights has, stays.
    Raises RuntimeError.
    """
    own = module.state_dict()
    extra = {name: own[name] for name in own if name.endswith(EXTRA) and name not in weights}
    module.load_state_dict({**weights, **extra})


def start_of(start: str | None) -> str | None:
    """The file that `run.start_from` names: itself, or what the run of this folder has left.
    Raises UsageError.
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
