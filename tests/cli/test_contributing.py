"""The examples of CONTRIBUTING.md are true: its methods run as options of a user's own package."""

import json
import re
import sys

import pytest

from ashl.cli.app import main
from ashl.config.catalog import CONF

PAGE = (CONF.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
SMALL = [
    "runtime=sim",
    "tracking=none",
    "stop.steps=40",
    "eval.every_s=null",
    "eval.every_commits=40",
    "-q",
]


@pytest.fixture
def package(workplace, monkeypatch):
    """A package `mine` with the page's modules, and a folder of their options."""
    sync, codec, overlap = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    options, half, two = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    for path, text in {
        "mine/__init__.py": "",
        "mine/k_async.py": sync,
        "mine/half.py": codec,
        "mine/two.py": overlap,
        "options/overlap/two.yaml": two.replace("ashl.overlap", "mine"),
        "options/sync/k_async.yaml": options.replace("ashl.sync", "mine"),
        "options/compression/half.yaml": half.replace("ashl.compression", "mine"),
    }.items():
        (workplace / path).parent.mkdir(parents=True, exist_ok=True)
        (workplace / path).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(workplace)
    yield workplace
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def summary(package, name: str, *overrides: str) -> dict:
    own = ["--config-dir", str(package / "options"), "allow_targets=[mine]"]
    assert main(["train", f"run.dir={package / name}", *own, *SMALL, *overrides]) == 0
    return json.loads((package / name / "summary.json").read_text())


def test_the_methods_of_the_page(package, capsys) -> None:
    assert main(["list", "sync", "k_async", "--config-dir", str(package / "options")]) == 0
    assert "Dutta et al." in capsys.readouterr().out
    textbook = summary(package, "asp", "sync=asp")
    limit = summary(package, "limit", "sync=k_async", "sync.pushes=1")
    halved = summary(package, "halved", "sync=k_async", "compression=half")
    own = ["--config-dir", str(package / "options"), "allow_targets=[mine]"]
    assert main(["train", *own, *SMALL[:-1], "sync=asp", "compression=half", "--dry-run"]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert (
        "compression=half, which does not support error feedback, is biased" in said
    )  # feedback would be refused
    assert limit["params_sha256"] == textbook["params_sha256"]
    assert halved["bytes_up"] / halved["commits"] < 0.6 * textbook["bytes_up"] / textbook["commits"]


@pytest.mark.parametrize("topology", ["all_reduce", "parameter_server"])
def test_the_overlap_of_the_page(package, topology) -> None:
    same = ("sync=bsp", f"topology={topology}", "model.hidden=[16,16]")
    links = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=2", "cluster.latency_s=0.001")
    plain = summary(package, "plain", *same, *links)
    two = summary(package, "two", *same, *links, "overlap=two")
    assert two["params_sha256"] == plain["params_sha256"]
    assert two["time_s"] < plain["time_s"]
