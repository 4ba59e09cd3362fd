"""Golden curves: what some runs learn on their way, by evaluation. `runs.py` says how to change
them.
"""

from pathlib import Path

import pytest

from ashl.tracking import jsonl
from tests.conf_option import conf_option
from tests.conformance.test_kernels import trained
from tests.golden.facts import CURVES, arithmetic, recorded, rounded, write

ALWAYS = (
    "runtime=sim",
    "dataset=digits",
    "model=mlp",
    "model.hidden=[32]",
    "stop.steps=null",
    "stop.epochs=4",
)
EAGER = "optimizer.momentum=0 optimizer.lr=0.3 eval.every_commits=32"
LINES = {
    "ashl": "schedule=ashl schedule.loss_switch=0.6 optimizer.lr=0.05 eval.every_s=0.5",
    "bsp": "sync=bsp eval.every_commits=32",
    "d-psgd": "topology=gossip sync=d_psgd eval.every_commits=32",
    "local-sgd": "topology=all_reduce sync=local_sgd sync.local_steps=4 eval.every_commits=8",
    "qsgd": f"sync=asp compression=qsgd {EAGER}",
    "ripples-smart": (
        "topology=partial_all_reduce sync=ripples_smart topology.workers_per_node=2"
        " eval.every_commits=32"
    ),
    "topk": f"sync=asp compression=topk compression.ratio=0.1 {EAGER}",
}
KEYS = ("time_s", "test/acc", "test/loss", "train/loss")
LOSS = 1e-3  # how far losses may be apart where the arithmetic differs
IMAGES = 2  # how many test images may be judged otherwise there

Curve = list[list[float | None]]


def curve_of(name: str, folder: Path) -> Curve:
    """One row for each evaluation."""
    trained(folder, *ALWAYS, *LINES[name].split())
    return [
        [rounded(line[key], 4) for key in KEYS] for line in jsonl.read(folder / "metrics.jsonl")
    ]


def near(was: float, now: float, key: str, image: float) -> bool:
    """Times have to be equal: only ASHL's hang on a loss, and none of its commits comes close to
    the switch.
    """
    bound = {"time_s": 0.0, "test/acc": IMAGES * image + 1e-4}.get(key, LOSS)
    return abs(was - now) <= bound


@pytest.mark.parametrize("name", LINES)
def test_a_curve_is_what_it_was(name: str, tmp_path: Path) -> None:
    record = recorded(CURVES)
    was, now = record["curves"][name], curve_of(name, tmp_path / "run")
    assert len(now) == len(was), (
        f"{name}: {len(was)} evaluations were recorded, and now there are {len(now)}"
    )
    same, image = (
        record["arithmetic"] == arithmetic(),
        1 / len(conf_option("dataset", "digits").load().test),
    )
    found = [
        f"{name}, evaluation {index + 1}: {key} was {a} and is {b}"
        for index, rows in enumerate(zip(was, now, strict=True))
        for key, a, b in zip(KEYS, *rows, strict=True)
        if (a != b if same else not near(a, b, key, image))
    ]
    assert not found, "\n".join(found)


def test_the_record_is_of_these_curves() -> None:
    assert list(recorded(CURVES)["curves"]) == sorted(LINES)


@pytest.mark.timeout(900)
def test_rewrite_curves(tmp_path: Path) -> None:
    """No test: what `--rewrite-golden` runs."""
    write(CURVES, "curves", {name: curve_of(name, tmp_path / name) for name in LINES})
