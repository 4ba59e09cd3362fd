"""Checks of `ashl launch` before it starts a process: hosts, shares, environments, addresses,
sizes.
"""

from pathlib import Path

import pytest

from ashl.cli.launch import implied
from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.run.multi_node import (
    Host,
    Launch,
    Report,
    assign_slots,
    command,
    copied_environment,
    describe_idle_slots,
    job_size,
    master_address,
    printable,
    ranks_environment,
    read_hosts,
)

THREE = (Host("a", 2), Host("me@b.example.org", 1), Host("fe80::1", 2))


def written(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text, encoding="utf-8")
    return folder / "hosts"


def test_a_hostfile(tmp_path: Path) -> None:
    text = "# ours\na slots=2\n\n  me@b.example.org   # the slow one\nfe80::1 slots=2"
    for mark in ("", "\ufeff"):  # which some editors begin a file with
        assert read_hosts(written(tmp_path, mark + text)) == THREE
    assert [host.name for host in THREE] == ["a", "b.example.org", "fe80::1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("# nobody\n", "names no host"),
        ("a\nb slots=two", "line 2: 'b slots=two' is no host"),
        ("a slots=0", "line 1: 'a slots=0' is no host"),
        ("a slots=-1", "is no host"),
        ("a slots=2 max_slots=4", "is no host"),
        ("a b", "line 1: 'a b' is no host"),
        ("a:2", "write `host`, or `host slots=2`"),
        ("-oProxyCommand=evil", "is no host"),
        ("me@-oProxyCommand=evil", "is no host"),
        ("$(evil)", "is no host"),
        ("a\nme@a slots=2", "line 2: a is there in line 1 already"),
    ],
)
def test_nonsense_in_a_hostfile(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"[^.]$") as error:
        read_hosts(written(tmp_path, text))
    assert said in str(error.value)


def test_a_hostfile_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (
        ("none", "No such file"),
        (".", "Is a directory"),
        ("binary", "it is no text"),
    ):
        with pytest.raises(UsageError, match=why):
            read_hosts(tmp_path / name)


def test_ranks_on_slots() -> None:
    assert [share.ranks for share in assign_slots(THREE, 5)] == [range(2), range(2, 3), range(3, 5)]
    assert [share.host.name for share in assign_slots(THREE, 2)] == ["a"]
    assert describe_idle_slots(THREE, 5) == ""
    assert describe_idle_slots(THREE, 1) == "a (1 of 2 slots), b.example.org, fe80::1"
    last = assign_slots(THREE, 4)[2]
    (env,) = ranks_environment(last, 2, 4, ("10.0.0.1", 29500)).values()
    assert env == {
        "RANK": "3",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_what_is_copied() -> None:
    ours = {
        "ASHL_DATA": "/d",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    env = {**ours, "HOME": "/", "X": ""}
    found = copied_environment(env, ["X", "Y=a=b"])
    assert found == {**ours, "X": "", "Y": "a=b"}
    for text in ("Z", "", "=1"):
        with pytest.raises(UsageError, match="--env"):
            copied_environment(env, [text])


@pytest.mark.parametrize(
    ("first", "reached_at", "seen_from", "address"),
    [
        ("a", "10.0.0.1", ["10.0.0.9"], "10.0.0.1"),
        ("a", None, [None], "a"),  # what stands in for ssh does not tell
        (
            "a",
            "127.0.1.1",
            ["10.0.0.1", "10.0.0.1"],
            "10.0.0.1",
        ),  # we are on it: as the others see us
        ("localhost", None, [None, "10.0.0.1"], "10.0.0.1"),
        ("localhost", None, ["127.0.0.1"], "127.0.0.1"),
        ("::1", "::1", ["::1"], "127.0.0.1"),
    ],
)
def test_the_address_to_meet_at(
    first: str, reached_at: str | None, seen_from: list[str | None], address: str
) -> None:
    assert master_address(Host(first, 1), reached_at, seen_from) == address


def test_the_command_line_of_ssh() -> None:
    where = Launch(THREE, ("ssh", "-p", "2222"), "/opt/py thon", "/w", {})
    words = command(where, THREE[1], [where.python, "-m", "agent"])
    assert words[:3] == ["ssh", "-p", "2222"]
    assert words[-2:] == ["me@b.example.org", "exec '/opt/py thon' -m agent"]
    assert {"BatchMode=yes", "ConnectTimeout=10"} < set(words)
    assert command(where, Host("localhost", 1), ["x"]) == ["x"]


def test_what_is_understood() -> None:
    assert implied("train", ["sync=bsp", "cluster.num_workers=2"], None) == [
        "runtime=torchrun",
        "cluster=real",
    ]
    assert implied("train", ["cluster.compute=[1,2]", "runtime=local"], None) == []
    with pytest.raises(UsageError, match=r"Give cluster.num_workers, as all runs"):
        implied("sweep", ["sync=bsp,ssp"], None)
    assert implied("train", ["cluster=mixed"], None) == ["runtime=torchrun"]


def test_how_many_it_takes() -> None:
    config = compose(["cluster=real", "runtime=torchrun"])
    two, five = ({**config, "cluster": {**config["cluster"], "num_workers": n}} for n in (2, 5))
    without_server = {**two, "topology": {"_target_": "ashl.topology.all_reduce.AllReduce"}}

    def size(config: dict, asked: int | None = None) -> int:
        return job_size(config, Launch(THREE, ("ssh",), "python", "/w", {}, size=asked))

    assert (size(config), size(config, 4), size(two), size(two, 3), size(without_server)) == (
        5,
        4,
        3,
        3,
        2,
    )
    with pytest.raises(UsageError, match="2 workers and a server are 3 processes"):
        size(two, 4)
    with pytest.raises(
        UsageError, match="5 workers and a server need 6 slots, and the hosts have 5"
    ):
        size(five)
    with pytest.raises(UsageError, match="--np 6 need 6 slots"):
        size(config, 6)
    with pytest.raises(
        UsageError, match="cluster=profile is in virtual time, which needs no hosts"
    ):
        size(compose(["cluster=profile", "runtime=torchrun"]))


def test_what_the_user_sees(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(verbose=False)
    report.show("b", 1, "not of interest", error=False)
    for rank in (1, 2):
        report.show("b", rank, "careful", error=True)
        report.show("b", rank, "ashl: it is over", error=True)
    report.show("a", 0, "the outcome", error=False)
    assert report.close()
    out, err = capsys.readouterr()
    assert (out, err) == ("the outcome\n", "b r1 | careful\nb r1 | ashl: it is over\n")
    report.show("a", 0, "ashl: it is over", error=True)
    for number in range(100):
        report.show("b", 1, f"frame {number}", error=True)
    report.close()
    first, *others, last = capsys.readouterr().err.splitlines()
    assert (first, len(others), last) == ("ashl: it is over", 8, "b r1 | ... (--verbose shows all)")


def test_no_command_for_the_terminal() -> None:
    assert printable("\x1b[2Jé\tnull\0\x9b1m\u202e ok") == "[2Jé\tnull1m ok"
