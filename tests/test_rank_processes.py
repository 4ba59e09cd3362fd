"""Processes of ranks, as the controller starts them."""

import signal
import sys
from typing import Any, cast

import pytest

from ashl.config.signals import INTERRUPTS
from ashl.run import launch
from ashl.run.rank import RankSettings
from tests.support import planned


def check_signals(*_: object) -> None:
    """Take the place of a rank: exit with 0 if the process began with interrupts blocked."""
    sys.exit(0 if signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= INTERRUPTS else 1)


@pytest.mark.parametrize("has_cuda", [False, True])
def test_an_interrupt_does_not_end_a_rank_that_is_starting(
    has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another way than the fork server, which blocks these signals, makes them with CUDA."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: has_cuda)
    monkeypatch.setattr(launch, "run_rank_in_child", check_signals)
    plan = planned("cluster=homogeneous", "sync=asp", "runtime=local")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with launch.rank_processes(plan, [RankSettings(0, "all")], cast("Any", None)) as (found, _):
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        found[0].join(60.0)
        assert found[0].exitcode == 0
