"""The one door to torchvision, which needs a hand beside a CPU build of torch."""

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
LIBRARY = torch.library.Library(
    "torchvision", "FRAGMENT"
)  # what it declares lasts as long as it does


@cache
def load_torchvision() -> ModuleType:
    """torchvision, also where its wheel was built for CUDA and torch is a CPU build (the pair that
    pip installs).

    There the extension with torchvision's own operators cannot be loaded and the import dies
    describing the first of them. None of them is used here (they serve detection and native
    decoding), so that it is enough to declare them.

    Raises AshlError when torchvision cannot be imported all the same.
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


def native_operators() -> bool:
    """Whether torchvision's own compiled operators are at hand."""
    return load_torchvision().extension._has_ops()


def _declare_operators(complaint: str) -> None:
    """Declares the operators that torchvision describes to torch without having loaded them.

    The complaint names the first only, and an operator can be described only once in a process, so
    a second failure could not be mended: the others are read from the package's text.
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
