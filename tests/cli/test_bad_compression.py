"""Compression asked for wrongly: one sentence with the way out, exit code 2, before anything starts."""

import shlex

import pytest

from ashl.cli.app import main


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("compression.ratio=0", "compression.ratio=0 is not possible"),
        ("compression.ratio=1.5", "compression.ratio=1.5 is not possible"),
        ("compression.ratio=1e-7", "keeps less than one of the model's 9610 elements; take more than 1/9610"),
        ("compression.critical_ratio=1e-7", "compression.critical_ratio=1e-07 keeps less than one"),
        ("compression.momentum=0.9 optimizer.momentum=0.9", "set optimizer.momentum=0"),
        ("compression.values=fp8", "compression.values=fp8 is not possible"),
        ("topology=gossip sync=d_psgd", "take compression=none, or sync=choco"),
        ("topology=partial_all_reduce sync=ripples_static", "whole models travel"),
        ("compression=none topology.pull_ratio=0.1", "needs a compression to pull with"),
    ],
)
def test_one_sentence(overrides: str, says: str, workplace, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "-q", "runtime=sim", "tracking=none", "compression=topk", *shlex.split(overrides)])
    out, err = capsys.readouterr()
    assert code == 2
    assert not out
    assert err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("compression.feedback=false", "what it leaves out is lost"),
        ("topology=all_reduce sync=bsp compression.ratio=0.9", "so its bodies are gathered"),
    ],
)
def test_what_is_legal_and_worth_knowing(overrides: str, says: str, workplace, capsys) -> None:
    """... is said in the forecast."""
    command = ["train", "--dry-run", "runtime=sim", "compression=topk", *shlex.split(overrides)]
    assert main(command) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert says in notes[0]
