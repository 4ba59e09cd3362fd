"""Checks of values in plan and profile files; each raises ValueError with one sentence."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ashl.plan.alpha_beta import AlphaBeta

LARGEST = sys.float_info.max  # a whole number may be larger
LONGEST_S = 1e9  # about 30 years, which a clock of nanoseconds can hold


def check_names(*names: object) -> None:
    for name in names:
        if name is not None and not (isinstance(name, str) and name.isprintable()):
            raise ValueError(f"{name!r} is not a name; give printable text")


def check_line(line: AlphaBeta | None, what: str) -> None:
    if line is not None and not all(map(is_seconds, (line.latency_s, line.s_per_byte))):
        raise ValueError(f"{what} is {asdict(line)}, where seconds from 0 up are expected")


def require_keys(data: Any, names: Sequence[str], what: str) -> None:
    """Check that `data` is a mapping with exactly these keys. Raises: ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} is not a mapping; it needs {', '.join(names)}")
    for name in names:
        if name not in data:
            raise ValueError(
                f"{what} lacks {name}; profile again, or add it (a missing cost is not zero)"
            )
    for name in data:
        if name not in names:
            raise ValueError(
                f"{what} has {name!r}, which is not a key; the keys are: {', '.join(names)}"
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value <= LONGEST_S


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63
