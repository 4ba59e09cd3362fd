"""Readers of plan and profile files that a user passes by `plan=FILE` or `profile=FILE`.

All values are checked.
"""

import math
from collections.abc import Callable
from json import JSONDecodeError
from pathlib import Path
from typing import TypeVar

from ashl.errors import UsageError
from ashl.plan.plan import Plan
from ashl.plan.profile import Profile

T = TypeVar("T")


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
    except ValueError as error:
        raise UsageError(f"{key}={path} is no usable {key}: {error}") from error


def read_profile(path: str) -> Profile:
    return read(path, "profile", Profile.from_json)


def read_plan(path: str) -> Plan:
    return read(path, "plan", lambda text: check_shares(Plan.from_json(text)))


def check_shares(plan: Plan) -> Plan:
    """Return the plan if its workers and their shares add up.

    Raises: ValueError, one sentence.
    """
    for stage in plan.stages:
        where, found = f"stage {stage.name}", len(stage.workers)
        if found != plan.num_workers:
            raise ValueError(f"{where} has {found} workers where the plan has {plan.num_workers}")
        total = math.fsum(worker.data_share for worker in stage.workers)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"{where}: the data shares add up to {total:g}, not to 1")
    return plan
