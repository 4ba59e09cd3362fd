"""Notes of the forecast on compression."""

import shlex

import pytest

from ashl.cli.app import main
from ashl.compression import guarantees
from ashl.compression.contract import Traits


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("compression.error_feedback=false", "is biased: elements are lost"),
        ("topology=all_reduce sync=bsp compression.ratio=0.9", "so its payloads are gathered"),
        (
            "sync=bsp compression.ratio=0.9 optimizer.momentum=0",
            "0.0385 MB a push, as much as without compression",
        ),
    ],
)
def test_what_is_legal_and_worth_knowing(overrides: str, says: str, workplace, capsys) -> None:
    """A supported but unusual setting has one note in the forecast."""
    command = ["train", "--dry-run", "runtime=sim", "compression=topk", *shlex.split(overrides)]
    assert main(command) == 0
    assert not list(workplace.iterdir())
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    notes = [note for note in notes if "topology.pull_ratio" not in note]
    assert len(notes) == 1
    assert says in notes[0]


def test_every_flag_is_explained() -> None:
    assert set(guarantees.MEANT) == set(Traits._fields)
