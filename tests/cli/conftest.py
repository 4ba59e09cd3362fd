"""Helpers of the tests of wrong inputs, and the runs that several files of this folder disturb."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ashl.cli.app import main
from tests.disturbed import LONG, ranks_of, under_way, wait_for

SIM = ["-q", "runtime=sim", "tracking=none"]


@pytest.fixture
def own_module(workplace):
    """Write modules of the user's own; no other test sees them."""
    written = []

    def write(name: str, code: str) -> None:
        (workplace / f"{name}.py").write_text(code)
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def gloo():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def said(workplace, capsys):
    """Train with these overrides; returns the exit code and the one sentence on standard error."""

    def train(*overrides: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["train", *SIM, *overrides])
        _, err = capsys.readouterr()
        assert err.count("\n") == (1 if code else 0), err
        assert not code or err.startswith("ashl: ")
        assert "bug in ashl" not in err
        return code, err.removeprefix("ashl: ").strip()

    return train


@pytest.fixture
def train(workplace, capsys):
    """Disturb a long run of this process after its start; return its exit code and last lines."""

    def during(act: Callable[[Path], None], *overrides: str) -> tuple[int, str]:
        run = workplace / "run"
        failed: list[BaseException] = []
        ended = threading.Event()

        def disturb() -> None:
            try:
                wait_for(lambda: under_way(run) and len(ranks_of(run)) >= 3)
                act(run)
            except BaseException as error:
                failed.append(error)
                if not ended.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        mode = (
            []
            if any(override.startswith(("sync=", "schedule=")) for override in overrides)
            else ["sync=ssp"]
        )
        code = main(["train", *LONG, *mode, *overrides])
        ended.set()
        thread.join()
        assert not failed
        assert not ranks_of(run), "no process is left"
        assert not list(run.glob(".snapshot*"))
        return code, capsys.readouterr().err

    return during
