"""Compression asked for wrongly: one sentence with the way out, exit code 2, before anything
starts.
"""

import shlex

import pytest

from ashl.cli.app import main
from ashl.compression import guarantees
from ashl.compression.contract import Traits


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("compression.ratio=0", "compression.ratio=0 is not possible"),
        ("compression.ratio=1.5", "compression.ratio=1.5 is not possible"),
        (
            "compression.ratio=1e-7",
            "sends less than one of the model's 9610 elements; take at least 1/9610",
        ),
        (
            "compression.critical_ratio=1e-7",
            "compression.critical_ratio=1e-07: sends less than one",
        ),
        ("compression.critical_ratio=0.01", "is less than compression.ratio=0.05"),
        ("topology.pull_ratio=1e-7 sync=bsp", "topology.pull_ratio=1e-07: sends less than one"),
        (
            "compression=qsgd compression.error_feedback=true",
            "compression=qsgd may exceed it with these settings; set compression.error_feedback=",
        ),
        (
            "compression=qsgd compression.momentum=0.9 optimizer.momentum=0",
            "set compression.momentum=null",
        ),
        (
            "compression=sign compression.vote=majority sync=bsp",
            "compression.scale=none compression.error_feedback=false",
        ),
        ("compression.values=fp8", "compression.values=fp8 is not possible"),
        ("compression=none topology.pull_ratio=0.1", "no effect here, it needs a compression"),
    ],
)
def test_one_sentence(
    overrides: str, says: str, workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["train", "-q", "runtime=sim", "tracking=none", "compression=topk", *shlex.split(overrides)]
    )
    out, err = capsys.readouterr()
    assert code == 2
    assert not out
    assert err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("compression.error_feedback=false", "is biased: elements are lost"),
        ("topology=all_reduce sync=bsp compression.ratio=0.9", "so its payloads are gathered"),
        (
            "sync=bsp compression.ratio=0.9 optimizer.momentum=0",
            "0.0385 MB a push, as much as without compression",
        ),
        ("sync=bsp compression=power_sgd", "optimizer.momentum=0.9 repeats it"),
    ],
)
def test_what_is_legal_and_worth_knowing(overrides: str, says: str, workplace, capsys) -> None:
    """A supported but unusual setting has one note in the forecast."""
    command = ["train", "--dry-run", "runtime=sim", "compression=topk", *shlex.split(overrides)]
    assert main(command) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    notes = [note for note in notes if "topology.pull_ratio" not in note]
    assert len(notes) == 1
    assert says in notes[0]


def test_every_flag_is_explained() -> None:
    assert set(guarantees.MEANT) == set(Traits._fields)
