"""The name of a configuration."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

WHERE = ("choices", "run", "name", "sweep", "tracking")


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of what decides the result: not of where it is written to, nor of what the
    options are called.
    """
    chosen = {key: value for key, value in config.items() if key not in WHERE}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
