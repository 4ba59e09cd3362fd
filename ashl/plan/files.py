"""Readers of plan and profile files that a user passes by `plan=FILE` or `profile=FILE`.

All values are checked.
"""

import math
from collections.abc import Callable
from functools import cache
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from ashl.config.construct import explain
from ashl.errors import UsageError
from ashl.plan.checks import check_names, is_count, is_number
from ashl.plan.plan import Plan, StagePlan, WorkerPlan
from ashl.plan.profile import Profile

T = TypeVar("T")
RULES = ("loss", "evaluated_loss", "accuracy", "rises", "plateau", "epochs", "commits", "seconds")
HANDOVERS = {"momentum": ("keep", "reset"), "residual": ("keep", "drop")}  # at a stage boundary
EXACT = ConfigDict(strict=True, allow_inf_nan=False)


def read(path: str, key: str, parse: Callable[[str], T]) -> T:
    """Return the parsed content of a file.

    Raises: UsageError, naming the key and the file.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except IsADirectoryError as error:
        raise UsageError(
            f"{key}={path} is a folder; name the file: {key}={Path(path, key)}.json"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{key}={path} cannot be read: {reason}") from error
    except JSONDecodeError as error:
        raise UsageError(
            f"{key}={path} is no usable {key}: line {error.lineno} is not JSON"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{key}={path} is no usable {key}: {reason}") from error


def read_profile(path: str) -> Profile:
    return read(path, "profile", Profile.from_json)


def read_plan(path: str) -> Plan:
    return read(path, "plan", lambda text: checked(Plan.from_json(text)))


def checked(plan: Plan) -> Plan:
    """Return the plan if its values are valid.

    Raises: ValueError, one sentence.
    """
    if not is_count(plan.num_workers) or not plan.stages:
        raise ValueError("it needs workers and at least one stage")
    for stage in plan.stages:
        check_stage(stage, plan.num_workers)
    check_types(plan, "")
    if plan.seed < 0:
        raise ValueError(f"seed is {plan.seed}, where a whole number from 0 up is expected")
    return plan


def check_types(made: Any, where: str) -> None:
    """Check that each value has the type that its dataclass declares.

    Raises: ValueError.
    """
    try:
        exact(type(made))(**vars(made))
    except ValidationError as error:
        raise ValueError(explain(error, where, type(made))) from error


@cache
def exact(cls: type) -> Callable[..., Any]:
    """Return a strict constructor of such a dataclass, which checks the types of its values."""
    return dataclass(config=EXACT, frozen=True, kw_only=True)(cls)


def check_stage(stage: StagePlan, num_workers: int) -> None:
    """Check the values of one stage. Raises: ValueError."""
    check_names(stage.name)
    where = f"stage {stage.name}"
    if len(stage.workers) != num_workers:
        raise ValueError(
            f"{where} has {len(stage.workers)} workers where the plan has {num_workers}"
        )
    check_rules(stage, where)
    if stage.h_preset is not None and not is_count(stage.h_preset):
        raise ValueError(
            f"{where}: h_preset is {stage.h_preset!r}, where a whole number from 1 up is expected"
        )
    if stage.r_preset is not None:
        check_share(stage.r_preset, f"{where}: r_preset")
    check_types(stage, where)
    for rank, worker in enumerate(stage.workers):
        check_worker(worker, f"{where}, worker {rank}")
    total = math.fsum(worker.data_share for worker in stage.workers)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"{where}: the data shares add up to {total:g}, not to 1")


def check_rules(stage: StagePlan, where: str) -> None:
    """Check the rules by which a stage ends and takes over state. Raises: ValueError."""
    for rule, bound in stage.until.items():
        if rule not in RULES or not is_number(bound):
            raise ValueError(
                f"{where}: until.{rule}={bound!r} is not a rule; take one of: {', '.join(RULES)},"
                " each with a number"
            )
    for state, value in stage.handover.items():
        if value not in HANDOVERS.get(state, ()):
            known = " and ".join(
                f"{name} ({' or '.join(values)})" for name, values in HANDOVERS.items()
            )
            raise ValueError(
                f"{where}: handover.{state}={value!r} is not possible; take one of: {known}"
            )


def check_worker(worker: WorkerPlan, where: str) -> None:
    """Check the values of one worker. Raises: ValueError."""
    for name in ("local_steps", "batch"):
        if not is_count(getattr(worker, name)):
            raise ValueError(
                f"{where}: {name} is {getattr(worker, name)!r}, where a whole number from 1 up is"
                " expected"
            )
    check_share(worker.data_share, f"{where}: data_share")
    check_share(worker.compression_ratio, f"{where}: compression_ratio")
    check_types(worker, where)


def check_share(value: Any, what: str) -> None:
    """Check that a value is a share above 0 and at most 1. Raises: ValueError."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{what} is {value!r}, where a share above 0 and at most 1 is expected")
