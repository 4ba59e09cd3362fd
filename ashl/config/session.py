"""Objects that a Python session passes to `ashl.train` in place of options: model, data, loss,
optimizer.

An object becomes an option file of its group, in a folder that exists during the run. Its arguments
are keys there, so that the run is composed, checked and recorded as any other. A class or function
of an imported file is named by its module, and any process can import it. Any other object, for
example a class of a notebook cell, is an attribute of a stand-in module (`SESSION`). That module
exists only in this process and during the run.
"""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import yaml

from ashl.config.catalog import CONF, catalog, is_option_name, values
from ashl.config.construct import SESSION
from ashl.config.override import key_of
from ashl.errors import UsageError

# keyword → group
GROUPS = {"model": "model", "dataset": "dataset", "loss": "task", "optimizer": "optimizer"}
WITH_OWN_DEFAULTS = ("dataset", "optimizer")  # groups whose options start from `_own`
SPECIAL = re.compile(r"[<>&#!;%^~|]")  # characters that Hydra reads only in quotes
# arguments that ashl itself passes
PASSED_BY_ASHL = ("params", "train", "sample_shape", "num_classes", "self", "outputs", "targets")


@dataclass(frozen=True)
class Session:
    """Objects of one call, by keyword.

    Args: `overrides` choose their options, which are in `folder`; `local` has the names that exist
    only in this process, by keyword.
    """

    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    local: Mapping[str, str] | None = None
    module: ModuleType | None = None

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse objects that exist only in this process if other processes would have to import
        them.

        Raises: UsageError.
        """
        if not self.local or config["runtime"]["_target_"].endswith("SimRuntime"):
            return
        keyword, name = next(iter(self.local.items()))
        raise UsageError(
            f"{keyword}={name} is an object of this Python session, which the processes of"
            f" runtime={config['choices']['runtime']} cannot import; move it into a file, as"
            " mine.py, and import it from there (data: a function that returns them), or take"
            " runtime=sim."
        )

    @contextmanager
    def expose_objects(self) -> Generator[None]:
        """Make the objects of this process available to `_target_`."""
        if self.module is None:
            yield
            return
        before = sys.modules.get(SESSION)
        sys.modules[SESSION] = self.module
        try:
            yield
        finally:
            del sys.modules[SESSION]
            if before is not None:
                sys.modules[SESSION] = before


class NamedObject(NamedTuple):
    """An object in the form that a `_target_` names: a class or function, its name, and its bound
    keys.
    """

    part: Any
    name: str
    keys: dict[str, Any]
    alone: bool  # True if it exists only in this process


def keyword_overrides(keywords: Mapping[str, Any]) -> list[str]:
    """Return keywords as settings: sync="asp" becomes sync=asp. Raises: UsageError."""
    return [f"{key}={hydra_text(key, value)}" for key, value in keywords.items()]


def hydra_text(key: str, value: Any) -> str:
    """Return a value in Hydra's grammar; text is unchanged, or quoted if it has special
    characters.
    """
    text = str(value)
    special = SPECIAL.search(text) and text[0] not in "'\"[{"
    return text if isinstance(value, str | Path) and not special else nested_text(key, value)


def nested_text(key: str, value: Any) -> str:
    """Return a value as it is written in a list or a mapping."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if hasattr(value, "item") and not getattr(value, "ndim", 0):  # a number of numpy or torch
        return nested_text(key, value.item())
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return (
            "{" + ",".join(f"{name}:{nested_text(key, one)}" for name, one in value.items()) + "}"
        )
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(nested_text(key, one) for one in value) + "]"
    raise UsageError(
        f"{key}={type(value).__name__}: a setting is a text, a number, a list or a mapping; objects"
        f" are taken by ashl.train alone, as {', '.join(GROUPS)}; a sweep takes the name of an"
        " option, for example of a file that names your class."
    )


@contextmanager
def session_of(
    objects: Mapping[str, Any], overrides: Sequence[str], config_dir: Path | None
) -> Generator[tuple[list[str], Session]]:
    """Yield the overrides with those that choose the objects' options, and the session.

    Its folder is deleted at the end.
    Raises: UsageError for an object that cannot be an option.
    """
    if not objects:
        yield list(overrides), Session(folder=config_dir)
        return
    with tempfile.TemporaryDirectory(prefix="ashl-") as place:
        folder = Path(place)
        if config_dir is not None:
            catalog(config_dir)  # raises UsageError if it is not a folder
            shutil.copytree(config_dir, folder, dirs_exist_ok=True)
        yield write_options(objects, list(overrides), folder)


def write_options(
    objects: Mapping[str, Any], overrides: list[str], folder: Path
) -> tuple[list[str], Session]:
    """Write the option files of these objects; see `session_of`."""
    module, local, chosen, allow = ModuleType(SESSION), {}, [], []
    typed_keys = [key_of(text) for text in overrides]
    task = next(
        (text.partition("=")[2] for text in reversed(overrides) if key_of(text) == "task"), None
    )
    if task is None:
        task = task_for(objects.get("dataset"))
        overrides += [f"task={task}"] if "loss" not in objects else []
    for keyword, value in objects.items():
        group = GROUPS[keyword]
        if keyword != "loss" and group in typed_keys:
            raise UsageError(
                f"{group} is given twice, as an object and as a setting; drop one of them."
            )
        made = named_object(keyword, value)
        if made.alone:
            local[keyword] = made.name
            setattr(module, made.name, made.part)
        home = SESSION if made.alone else made.part.__module__
        allow.append(home.partition(".")[0])
        option = re.sub(r"[^A-Za-z0-9_]", "_", made.name)
        if (CONF / group / f"{option}.yaml").exists() or not is_option_name(option):
            option = f"my_{option}"
        spec: dict[str, Any] = {"defaults": ["_own"]} if group in WITH_OWN_DEFAULTS else {}
        spec |= {"_target_": f"{home}.{made.name}", **defaults_of(made.part), **made.keys}
        if keyword == "loss":
            if not (CONF / "task" / f"{task}.yaml").exists():
                raise UsageError(
                    f"task={task} beside a loss has to be one of: {', '.join(catalog()['task'])}."
                )
            overrides = [text for text in overrides if key_of(text) != "task"]
            spec["judged"] = values(CONF / "task" / f"{task}.yaml")
        (folder / group).mkdir(exist_ok=True)
        (folder / group / f"{option}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
        chosen.append(f"{group}={option}")
    return with_allowed([*chosen, *overrides], allow), Session(tuple(chosen), folder, local, module)


def with_allowed(overrides: list[str], allow: Sequence[str]) -> list[str]:
    """Return the overrides with these packages added to `allow_targets`."""
    given = [
        text.partition("=")[2].strip("[] ") for text in overrides if key_of(text) == "allow_targets"
    ]
    packages = [name.strip(" '\"") for name in ",".join(given[-1:]).split(",")]
    rest = [text for text in overrides if key_of(text) != "allow_targets"]
    return [*rest, f"allow_targets=[{','.join(dict.fromkeys(filter(None, (*packages, *allow))))}]"]


def task_for(dataset: Any) -> str:
    """Return the task of these data by their first target, if they are a pair (train, test)."""
    import torch

    if not isinstance(dataset, tuple | list):
        return "classification"
    try:
        target = torch.as_tensor(dataset[0][0][1])
    except Exception:  # reading the data set later reports the error
        return "classification"
    if target.is_floating_point():
        return "regression"
    return "language_model" if target.ndim else "classification"


def named_object(keyword: str, value: Any) -> NamedObject:
    """Return an object in the form that a `_target_` names.

    Raises: UsageError for an object that cannot be an option.
    """
    keys: dict[str, Any] = {}
    while isinstance(value, functools.partial):
        if value.args:
            raise UsageError(
                f"{keyword}: name the arguments of functools.partial, as in partial(Net, width=8)."
            )
        value, keys = value.func, {**value.keywords, **keys}
    if isinstance(value, type | FunctionType):
        if is_importable(value):
            return NamedObject(value, value.__name__, keys, alone=False)
        return NamedObject(
            value, re.sub(r"\W", "_", value.__name__).strip("_") or keyword, keys, alone=True
        )
    return NamedObject(wrap_object(keyword, value), object_name(keyword, value), keys, alone=True)


def object_name(keyword: str, value: Any) -> str:
    """Return a name for an object without one."""
    return keyword if isinstance(value, tuple | list) else type(value).__name__


def wrap_object(keyword: str, value: Any) -> FunctionType:
    """Return a function that returns an object which is neither class nor function."""
    from copy import deepcopy

    from torch import nn

    if keyword == "model" and isinstance(value, nn.Module):
        return lambda: deepcopy(value)  # with its weights
    if keyword == "dataset" and isinstance(value, tuple | list) and len(value) == 2:
        return lambda: tuple(value)
    if keyword == "loss" and callable(value):
        return lambda outputs, targets: value(outputs, targets)
    wanted = {
        "model": "a torch.nn.Module, or a class or function that makes one",
        "dataset": "a pair (train, test), or a class or function that makes it",
        "loss": "a function of outputs and targets, or a module as torch.nn.CrossEntropyLoss()",
        "optimizer": "the name of an option, or a class as torch.optim.AdamW",
    }
    raise UsageError(f"{keyword} is {type(value).__name__}; give {wanted[keyword]}.")


def is_importable(part: Any) -> bool:
    """Return True if another process finds the same class or function by its name."""
    module = sys.modules.get(part.__module__)
    if module is None or part.__module__ == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    return (
        bool(getattr(module, "__file__", None)) and getattr(module, part.__qualname__, None) is part
    )


def defaults_of(part: Any) -> dict[str, Any]:
    """Return the arguments with a default that YAML can express; they become keys."""
    try:
        known = inspect.signature(part).parameters.values()
    except (TypeError, ValueError):
        return {}
    plain = (bool, int, float, str, type(None))
    found: dict[str, Any] = {}
    for one in known:
        value = list(one.default) if isinstance(one.default, tuple) else one.default
        single = isinstance(value, plain) or (
            isinstance(value, list) and all(isinstance(x, plain) for x in value)
        )
        if one.name not in PASSED_BY_ASHL and single:
            found[one.name] = value
    return found


def call_text(objects: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return the text of the call of `ashl.train` with these objects, by name, and settings."""
    named_objects = [
        f"{keyword}={named_object(keyword, value).name}" for keyword, value in objects.items()
    ]
    return f"ashl.train({', '.join([*map(repr, lines), *named_objects])})"
