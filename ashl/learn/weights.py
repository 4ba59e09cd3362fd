"""Load weights as plain tensors, by the model's names, without unpickling."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ashl.config.override import path_of
from ashl.errors import UsageError

FINAL, BEST = "final.pt", "best.pt"
EXTRA = "_extra_state"  # suffix of the names of the values that `get_extra_state` returns


def load_file(module: nn.Module, file: Path) -> nn.Module:
    """Load a file's tensors into a module and return it.

    Raises: UsageError if the file cannot be read or does not fit.
    """
    weights = read_weights(file)
    try:
        for name, tensor in weights.items() if isinstance(weights, dict) else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_complex():
                raise ValueError(f"{name} has complex numbers")
        load(module, weights)
    except Exception as error:  # its class depends on what does not fit
        reason = " ".join(str(error).split())
        raise UsageError(f"{file} does not fit the model: {reason}") from error
    return module


def read_weights(file: Path) -> Any:
    """Return what a file of torch contains, without running code that it may name.

    Raises: UsageError if it cannot be read, or if torch did not write it.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about an older format
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read on this machine ({error.strerror or error})"
        ) from error
    except Exception as error:  # its class depends on the damage; the text may advise to trust it
        raise UsageError(
            f"{file} is damaged or no state dict of torch; name a file that"
            " torch.save(model.state_dict(), FILE) has written, or a run folder"
        ) from error


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
    # not Path.resolve, which raises RuntimeError for a link to itself
    path = Path(os.path.realpath(path_of(start)))
    found = [file for file in (path, path / FINAL, path / BEST) if file.is_file()]
    if not found:
        raise UsageError(
            f"run.start_from={start} is neither a file of weights nor a run folder with {FINAL}"
            f" or {BEST}; a run of a sweep leaves them with run.save_weights=true"
        )
    return str(found[0])
