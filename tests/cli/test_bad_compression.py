"""Compression asked for wrongly: one sentence with the way out, exit code 2, before anything
starts.
"""

import shlex

import pytest

from ashl.cli.app import main
from ashl.compression import laws
from ashl.compression.contract import Traits
from ashl.config.catalog import catalog


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


@pytest.mark.parametrize("kept", [True, False])
def test_the_doctor_has_a_line_for_each_codec(kept: bool, workplace, capsys, monkeypatch) -> None:
    """A line counts the laws that pass; the command fails if one does not."""
    held = [
        laws.Law("bits an element", "at most 3", "2", True),
        laws.Law("bias on a normal vector", "0", "9", kept),
    ]
    monkeypatch.setattr(laws, "laws", lambda option: held)
    assert main(["doctor", "compression"]) == (not kept)
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    codecs = len(catalog()["compression"])
    assert ["topk", f"{1 + kept}", "of", "2", "2", "(≤", "3)"] in lines
    assert ("FAIL" in out.splitlines()[1]) is not kept
    assert f"{codecs * (1 + kept)} of {2 * codecs} laws pass for {codecs} codecs" in (
        out if kept else err
    )


def test_every_flag_is_explained() -> None:
    assert set(laws.MEANT) == set(Traits._fields)
