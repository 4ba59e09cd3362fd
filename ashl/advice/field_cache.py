"""Cache the planned candidates of a command, so that the same command does not plan them again.

The name of a cache file depends on everything that planning depends on: the program's own files,
the typed overrides, the files that these name, the data and the model. Nothing is cached for
options or code of the user's own, because they may change at any time.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ashl.config.catalog import CONF
from ashl.config.override import key_of
from ashl.planning.compile_plan import PreparedPlan
from ashl.tracking import jsonl

FOLDER = Path("runs/advice/candidates")
PACKAGE = Path(__file__).parents[1]
FILES = ("profile", "plan")  # keys whose value names a file


def place_of(
    wanted: Sequence[Any], fixed: Sequence[str], host: PreparedPlan, config_dir: Path | None
) -> Path | None:
    """Return the cache file of these candidates, existing or not; None if they must be planned each
    time.
    """
    if config_dir is not None or host.plan.allow_targets:
        return None
    named = [text.partition("=")[2] for text in fixed if key_of(text) in FILES]
    try:
        contents = [
            hashlib.sha256(Path(name).expanduser().read_bytes()).hexdigest() for name in named
        ]
    except OSError:
        return None
    data = [len(host.data.train), len(host.data.test), host.plan.num_params, host.plan.to_json()]
    known = json.dumps([own_files(), wanted, contents, data], default=str)
    return FOLDER / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


def own_files() -> str:
    """Return a digest of the names, sizes and modification times of the program's files."""
    files = sorted(
        path
        for root in (PACKAGE, CONF)
        for path in root.rglob("*")
        if path.suffix in (".py", ".yaml")
    )
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def read(place: Path | None) -> dict[str, Any] | None:
    return None if place is None else jsonl.whole(place)


def write(place: Path | None, kept: dict[str, Any]) -> None:
    """Write the planned candidates, unless they cannot be written."""
    if place is not None:
        with suppress(OSError, TypeError):
            place.parent.mkdir(parents=True, exist_ok=True)
            jsonl.write_json(place, kept)
