"""Import torchvision, also next to a CPU build of torch, where its own import fails."""

import importlib
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from ashl.errors import AshlError

PLACEHOLDER = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# The declared operators exist as long as this object.
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


@cache
def load_torchvision() -> ModuleType:
    """Return torchvision, also if its wheel was built for CUDA and torch is a CPU build.

    Pip installs this pair. The extension with torchvision's own operators cannot be loaded then,
    and the import fails at the first of them. These operators serve detection and native decoding
    and are not used here, so that declaring them is enough.

    Raises: AshlError if torchvision cannot be imported.
    """
    try:
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            _declare_operators(str(error))
            return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise AshlError(
            f"torchvision cannot be imported beside torch {torch.__version__} ({error}); "
            "install the pair that belongs together with `pip install --upgrade torch torchvision`."
        ) from error


def _declare_operators(complaint: str) -> None:
    """Declare the operators that torchvision describes to torch without having loaded them.

    The error names only the first one, and an operator can be described only once in a process. So
    a second failure could not be repaired, and the other names are read from the package's source.
    """
    names = set(re.findall(r"torchvision::(\w+)", complaint))
    package = find_spec("torchvision")
    folders = package.submodule_search_locations if package else None
    for folder in folders or []:
        for file in Path(folder).rglob("*.py"):
            names.update(
                re.findall(
                    r"register_fake\(\s*[\"']torchvision::(\w+)", file.read_text(encoding="utf-8")
                )
            )
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in sorted(names):
        if not hasattr(torch.ops.torchvision, name):
            LIBRARY.define(f"{name}{PLACEHOLDER}")
