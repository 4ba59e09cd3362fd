"""A host's part of `ashl launch`, and the launcher's, with ranks that are a line of Python each."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ashl.errors import AshlError, UsageError
from ashl.run import multi_node
from ashl.run.multi_node import Host, Launch, run_job
from ashl.run.node_agent import PULSE, SILENCE_S, CommandReader

SSH = """#!/bin/sh
# Stands in for ssh: drops options and the host, and runs the command here.
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift 2 ;; *) shift ;; esac; done
case $1 in dead*) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255 ;; esac
case $* in *node_agent*) echo "welcome to $1" ;; esac  # as a shell may that takes this for a login
shift
exec sh -c "$*"
"""
LINGERING = """
import os, signal, subprocess, sys, time
def leave(*_):
    print("leaving in order", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, leave)
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
print("here", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


@contextmanager
def agent(*ranks: str) -> Generator[tuple[subprocess.Popen[str], dict, Iterator[dict]]]:
    """One that has been told to start these; its greeting, and what it says then."""
    argv = [sys.executable, "-P", "-m", "ashl.run.node_agent"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        greeting = json.loads(process.stdout.readline())
        envs = [[rank, {"RANK": str(rank), "CODE": code}] for rank, code in enumerate(ranks)]
        argv = ["-c", "import os; exec(os.environ['CODE'])"]
        process.stdin.write(
            json.dumps({"argv": argv, "folder": "/", "env": {"A": "1"}, "ranks": envs}) + "\n"
        )
        process.stdin.flush()
        yield process, greeting, map(json.loads, process.stdout)


def gone(*pids: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(
            psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids
        ):
            return True
        time.sleep(0.02)
    return False


def test_an_agent_passes_on_what_ranks_say_and_how_they_end() -> None:
    loud = "import os, sys; print(os.environ['A'], os.getcwd()); print('\\x1b[2J', file=sys.stderr)"
    with agent(loud, "import time; time.sleep(0.2); raise SystemExit(3)") as (
        process,
        greeting,
        heard,
    ):
        found = list(heard)
        assert process.wait(5) == 3
    assert greeting["port"] > 0
    assert {"rank": 0, "out": "1 /"} in found
    assert [line for line in found if "code" in line] == [
        {"rank": 0, "code": 0},
        {"rank": 1, "code": 3},
    ]
    assert found.index({"rank": 0, "err": "\x1b[2J"}) < found.index({"rank": 0, "code": 0})


def test_an_agent_ends_all_in_order_when_the_launcher_has_failed() -> None:
    with agent(LINGERING) as (process, _, heard):
        _, *pids = next(heard)["out"].split()
        process.stdin.close()
        assert list(heard) == [{"rank": 0, "out": "leaving in order"}, {"rank": 0, "code": 130}]
        assert process.wait(5) == 130
    assert gone(*map(int, pids)), "what a rank has started goes with it"


def test_an_agent_that_is_ended_takes_its_ranks_along() -> None:
    with agent(LINGERING) as (process, _, heard):
        _, *pids = next(heard)["out"].split()
        process.terminate()
        assert process.wait(5) == 128 + signal.SIGTERM
    assert gone(*map(int, pids))


def test_a_launcher_without_messages_for_long_has_failed() -> None:
    reading, writing = os.pipe()
    reader = CommandReader(reading)
    reader.heard_at -= SILENCE_S + 1
    assert reader.launcher_gone()
    os.write(writing, PULSE + b"\n")
    assert (reader.lines(1.0), reader.launcher_gone()) == ([PULSE], False)
    os.close(writing)
    assert (reader.lines(1.0), reader.launcher_gone()) == ([], True)
    os.close(reading)


@pytest.fixture
def where(tmp_path: Path) -> Launch:
    """This machine as two hosts."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IEXEC)
    return Launch(
        (Host("localhost", 1), Host("me@127.0.0.2", 2)),
        (str(ssh),),
        sys.executable,
        str(tmp_path),
        {"A": "1"},
    )


def run(where: Launch, code: str, monkeypatch: pytest.MonkeyPatch, size: int = 3) -> int:
    monkeypatch.setattr(multi_node, "RANK", ("-c",))
    return run_job(where, size, ["import os, sys; r = int(os.environ['RANK'])\n" + code])


def test_a_job_on_two_hosts(
    where: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
print(r, os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], os.environ["A"], os.getcwd())
if r == 2: print("careful", file=sys.stderr)
"""
    assert run(where, code, monkeypatch) == 0
    out, err = capfd.readouterr()
    assert out == f"0 0 127.0.0.1 1 {where.folder}\n"
    assert err == "127.0.0.2 r2 | careful\n"
    assert run(replace(where, verbose=True), code, monkeypatch) == 0
    assert f"127.0.0.2 r2 | 2 1 127.0.0.1 1 {where.folder}\n" in capfd.readouterr().err


def test_the_first_failure_ends_the_job(
    where: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multi_node, "SETTLE_S", 0.1)
    wait = "import time; time.sleep(60)"
    assert run(where, f"if r == 1: sys.exit('ashl: no data')\n{wait}", monkeypatch) == 1
    assert capfd.readouterr().err == "127.0.0.2 r1 | ashl: no data\n"
    with pytest.raises(AshlError, match=r"rank 2 on 127.0.0.2 was killed by SIGKILL"):
        run(where, f"if r == 2: os.kill(os.getpid(), 9)\n{wait}", monkeypatch)
    with pytest.raises(UsageError, match=r"No such file or directory: /nowhere; .* --folder"):
        run(replace(where, folder="/nowhere"), wait, monkeypatch)


def test_an_interrupt_ends_all_hosts_in_order(
    where: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert run(where, LINGERING, monkeypatch) == 130
    here, *pids = capfd.readouterr().out.split()[:3]
    assert here == "here"
    assert gone(*map(int, pids))


@pytest.mark.parametrize(
    ("hosts", "python", "said"),
    [
        (
            ["127.0.0.1", "dead1", "dead2"],
            sys.executable,
            "dead1 does not answer (ssh: connect to host dead1 ",
        ),
        (["127.0.0.1", "dead1", "dead2"], sys.executable, "; dead2 does not answer"),
        (
            ["127.0.0.1", "127.0.0.2"],
            "/no/python",
            "127.0.0.1, 127.0.0.2 has no /no/python; name the Python that",
        ),
        (
            ["127.0.0.1"],
            "/bin/false",
            "127.0.0.1 cannot start its ranks: /bin/false ended with exit code 1",
        ),
        (["localhost"], "/no/python", "--python /no/python: No such file or directory"),
    ],
)
def test_a_host_that_cannot_take_part(
    hosts: list[str], python: str, said: str, where: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = replace(where, hosts=tuple(Host(name, 1) for name in hosts), python=python)
    with pytest.raises(AshlError) as error:
        run(there, "open('started', 'w')", monkeypatch, len(hosts))
    assert said in str(error.value)
    assert not Path(where.folder, "started").exists()


def test_a_port_that_is_taken_and_another_version(
    where: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    with (
        socket.create_server(("", 0)) as taken,
        pytest.raises(UsageError, match="is taken on localhost"),
    ):
        run(replace(where, port=taken.getsockname()[1]), "", monkeypatch)
    monkeypatch.setattr(multi_node, "__version__", "0.0.7")
    with pytest.raises(
        AshlError, match=r"localhost, 127.0.0.2 has ashl 0.1.0, and this machine 0.0.7; "
    ):
        run(where, "", monkeypatch)
