"""The table in docs/reference/codecs.md of which compression runs where is what the checks say;
`python -m tests.pages` writes it.
"""

from dataclasses import replace
from typing import Any

import pytest

from ashl.compression.contract import Collective, Layer
from ashl.compression.wrappers import inner_codec, wrap_codec
from ashl.config.catalog import catalog
from ashl.errors import UsageError
from ashl.planning.capabilities import check_choice
from ashl.planning.compatibility import check_compression
from ashl.planning.compile_plan import run_choice
from tests.conf_option import conf_option
from tests.pages import DOCS

PAGE = DOCS / "reference" / "codecs.md"
HEAD = (
    "| compression | server: bsp | asp, local SGD | pulls | all-reduce | gossip (choco) | device |"
)
LAYOUT = (Layer("0.weight", (64, 64)), Layer("0.bias", (64,)))
CODECS = sorted(set(catalog()["compression"]) - {"none"})
COMMON = {
    "optimizer": conf_option("optimizer", "sgd", momentum=0.0),
    "aggregate": conf_option("aggregate", "mean"),
    "outer": conf_option("outer", "average"),
    "overlap": conf_option("overlap", "none"),
    "model": conf_option("model", "mlp"),
    "task": conf_option("task", "classification"),
    "runtime": conf_option("runtime", "sim"),
    "cluster": conf_option("cluster", "homogeneous"),
}


def allowed(name: str, topology: str, sync: str, **fields: Any) -> bool:
    """Return True if the checks accept this."""
    chosen = {"compression": name, "topology": topology, "sync": sync}
    parts = COMMON | {group: conf_option(group, option) for group, option in chosen.items()}
    parts["topology"] = conf_option("topology", topology, **fields)
    choices = chosen | {"aggregate": "mean", "optimizer": "sgd", "schedule": "single"}
    try:
        check_choice(replace(run_choice(parts, choices), num_workers=4, layout=LAYOUT))
        check_compression(parts, choices, LAYOUT, 4)
    except UsageError:
        return False
    return True


def way(name: str) -> str:
    """Return the form of an all-reduce with this codec."""
    codec = wrap_codec(conf_option("compression", name), LAYOUT)
    if isinstance(inner_codec(codec), Collective):
        return "own protocol"
    return "summed" if codec.traits.linear else "gathered"


def row(name: str) -> str:
    server = [allowed(name, "parameter_server", sync) for sync in ("bsp", "asp", "local_sgd")]
    assert server[1] == server[2]
    cells = [
        *("yes" if run else "no" for run in server[:2]),
        "yes" if allowed(name, "parameter_server", "bsp", pull_ratio=0.1) else "no",
        way(name) if allowed(name, "all_reduce", "bsp") else "no",
        "yes" if allowed(name, "gossip", "choco") else "no",
        "no" if wrap_codec(conf_option("compression", name), LAYOUT).on_host else "yes",
    ]
    return f"| `{name}` | {' | '.join(cells)} |"


def table() -> str:
    return "\n".join([HEAD, "| --- " * (HEAD.count("|") - 1) + "|", *map(row, CODECS)])


@pytest.mark.parametrize("name", CODECS)
def test_the_page_says_where_it_runs(name: str) -> None:
    assert row(name) in PAGE.read_text(encoding="utf-8").splitlines()
