"""Numbers that no clock, float32 or memory can hold, and what no terminal should be told."""

import pytest

from ashl.cli.app import main
from ashl.data.synthetic import Synthetic

ADAM = "sync=local_sgd outer=adam"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "cluster.compute=[1e300,1]",
            "cluster.compute.0=1e+300 is not possible: should be less than or equal to",
        ),
        (
            "cluster.events=[{time_s: 1, worker: 0, compute: 1e308}]",
            "cluster.events.0.compute=1e+308 is not possible",
        ),
        (
            "stop.target_metric=nan",
            "stop.target_metric=nan is not possible: should be a finite number",
        ),
        (
            "run.checkpoint_s=1e300",
            "run.checkpoint_s=1e+300 is not possible: should be less than or equal to",
        ),
        ("sync=decoupled sync.grace_s=1e300", "sync.grace_s=1e+300 is not possible"),
        ("sync=adsp sync.gamma_s=1e300", "sync.gamma_s=1e+300 is not possible"),
        ("sync=dssp sync.s_high=1000000000", "sync.s_high=1000000000 is not possible"),
        ("optimizer.weight_decay=1e300", "optimizer.weight_decay=1e+300 is not possible"),
        (f"{ADAM} outer.tau=1e300", "outer.tau=1e+300 is not possible"),
        ("sync=local_sgd outer=co2 outer.clip=1e300", "outer.clip=1e+300 is not possible"),
        (
            "dataset=synthetic dataset.num_train=10000000000",
            "should be less than or equal to 1000000000",
        ),
        (
            "name='\x1b2J'",
            ("name= 2J: a part of a folder's name cannot contain /, \\ or unprintable characters"),
        ),
    ],
)
def test_a_number_beyond_all_bounds(override: str, says: str, said) -> None:
    code, sentence = said(*([override] if "{" in override else override.split(" ")))
    assert code == 2
    assert says in sentence


def test_a_data_set_that_does_not_fit(said, monkeypatch) -> None:
    def load(self: Synthetic) -> None:
        raise MemoryError("Unable to allocate 72.8 TiB")

    monkeypatch.setattr(Synthetic, "load", load)
    says = "the data set does not fit into this machine's memory; make dataset.* smaller"
    assert said("dataset=synthetic") == (2, says)


@pytest.mark.parametrize("command", ["advise --budget inf", "calibrate --seconds inf"])
def test_no_end_of_seconds(command: str, capsys) -> None:
    assert main(command.split()) == 2
    assert "should be less than or equal to 10000000" in capsys.readouterr().err
