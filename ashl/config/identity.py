"""Hash that identifies a configuration."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

WHERE = ("choices", "run", "name", "sweep", "tracking")


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of the values that decide the result.

    The run folder, the tracking and the names of options are not part of it.
    """
    chosen = {key: value for key, value in config.items() if key not in WHERE}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
