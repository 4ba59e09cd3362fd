"""`ashl advise --probe`: H, utilisation and bytes from the links of hosts."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ashl.cli.app import main

CLUSTER = (
    "cluster=homogeneous",
    "cluster.step_s=0.01",
    "cluster.exchange_s=null",
    "cluster.latency_s=0",
)


@pytest.fixture(autouse=True)
def hosts(workplace: Path) -> Path:
    """A hosts file; the jobs here are stand-ins."""
    file = workplace / "hosts"
    file.write_text("node1 slots=3")
    return file


def job(code: int, *cluster: str) -> Any:
    """Stand in for the job on the hosts: profile a declared cluster, in virtual time."""

    def run(command: list[str], **how: Any) -> Any:
        if cluster:
            own = ("tracking=none", "runtime=sim", *cluster)
            assert main(["profile", "-q", *own, command[-1]]) == 0
        return SimpleNamespace(returncode=code)

    return run


def test_h_is_the_smallest_at_which_the_links_suffice(
    workplace: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of four sends 1.5 times 38,440 bytes at 12.5 MB/s, 4.6 ms beside steps of 10 ms."""
    monkeypatch.setattr(subprocess, "run", job(0, *CLUSTER, "cluster.bandwidth_mbit_s=100"))
    assert main(["advise", "--probe", "hosts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ring_s = 1.5 * 38_440 / 12.5e6
    assert (found["workers"], found["local_steps"], found["warnings"]) == (4, 8, [])
    assert found["link_mbit_s"] == pytest.approx(100, rel=0.01)
    for own in found["choices"]:
        computed_s = own["local_steps"] * 0.01
        round_s = computed_s + ring_s
        assert own["utilisation"] == pytest.approx(computed_s / round_s, rel=0.01)
        sent = 1.5 * 38_440 * 3600 / round_s
        assert own["bytes_per_hour"] == pytest.approx(sent, rel=0.01)


def test_links_outside_the_tested_range_are_named(
    workplace: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", job(0, *CLUSTER, "cluster.bandwidth_mbit_s=1"))
    assert main(["advise", "--probe", "hosts"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("H = 512: the utilisation of 4 workers is 9")
    assert "warning: predictions were compared with measurements at 50 to 5000 Mbit/s" in out


@pytest.mark.parametrize(
    ("code", "exit_code", "sentence"),
    [(1, 1, "ended with code 1"), (0, 3, "the profile is on the first host")],
)
def test_a_job_without_a_profile_is_one_sentence(
    workplace: Path,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    exit_code: int,
    sentence: str,
) -> None:
    monkeypatch.setattr(subprocess, "run", job(code))
    assert main(["advise", "--probe", "hosts"]) == exit_code
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "sync: bsp"])
def test_a_wrong_hosts_file_is_one_sentence_before_any_job(
    text: str | None, hosts: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    hosts.unlink() if text is None else hosts.write_text(text)
    assert main(["advise", "--probe", "hosts"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ashl: ")
    assert err.count("\n") == 1
    assert "hosts" in err


def test_links_without_a_cost_per_byte_have_no_rate(
    workplace: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence said: over links of inf Mbit/s."""
    declared = (*CLUSTER[:2], "cluster.exchange_s=0")
    monkeypatch.setattr(subprocess, "run", job(0, *declared))
    assert main(["advise", "--probe", "hosts"]) == 0
    out = capsys.readouterr().out
    assert "an hour over links without a measurable limit" in out
    assert not {"inf", "warning"} & set(out.split())
