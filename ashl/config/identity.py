"""The name of a configuration."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WHERE = ("choices", "run", "name", "sweep", "tracking")


def config_hash(config: Mapping[str, Any]) -> str:
    """Of what decides the result: not of where it is written to, nor of what the options are called. In virtual time
    that is also by how much a calibration makes its profile's cluster slower."""
    chosen = {key: value for key, value in config.items() if key not in WHERE}
    if config.get("profile") and str(config["runtime"].get("_target_")).endswith("SimRuntime"):
        chosen |= slower_by(Path(config["profile"]).expanduser())
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]


def slower_by(profile: Path) -> dict[str, float]:
    """Nothing where it is not calibrated, or no file that can be read: others say so."""
    try:
        common = json.loads(profile.read_text())["calibration"]["model"]["common"]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {} if common == 1 else {"slower_by": common}
