"""`ashl launch --on ssh`, with ranks that are a line of Python each, and a stand-in for ssh."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ashl.errors import AshlError, UsageError
from ashl.launch import ssh
from ashl.launch.job import Launch, Machine

SSH = """#!/bin/sh
# Stands in for ssh: drops options and the host, and runs the command here.
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift 2 ;; *) shift ;; esac; done
case $1 in dead*) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255 ;; esac
case $* in *cli*) echo "welcome to $1" ;; esac  # as a shell may that takes this for a login
shift
exec sh -c "$*"
"""
LINGERING = """
import signal, subprocess, time
def leave(*_):
    print("leaving in order", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, leave)
print("here", os.getpid(), flush=True)
time.sleep(60)
"""
WAIT = "import time; time.sleep(60)"


def gone(*pids: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(
            psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids
        ):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def where(tmp_path: Path) -> Launch:
    """This machine as two hosts."""
    stand_in = tmp_path / "ssh"
    stand_in.write_text(SSH)
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IEXEC)
    machines = (Machine("localhost", 1), Machine("me@127.0.0.2", 2))
    folder = str(tmp_path)
    return Launch(
        "ssh", (), 3, machines, sys.executable, folder, {"A": "it's 1"}, ssh=(str(stand_in),)
    )


def run(where: Launch, code: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("ashl.launch.job.RANK", ("-c",))
    job = replace(where, argv=("import os, sys; r = int(os.environ['RANK'])\n" + code,))
    return asyncio.run(ssh.run(job, ssh.tasks(job)))


def test_a_job_on_two_hosts(
    where: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
print(r, os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], os.environ["A"], os.getcwd())
if r == 2: print("careful\\x1b[2J", file=sys.stderr)
"""
    assert run(where, code, monkeypatch) == 0
    out, err = capfd.readouterr()
    assert out == f"0 0 127.0.0.1 it's 1 {where.folder}\n"
    assert err == "127.0.0.2 r2 | careful[2J\n"


def test_the_first_failure_ends_the_job(
    where: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssh, "SETTLE_S", 0.1)
    assert run(where, f"if r == 1: sys.exit('ashl: no data')\n{WAIT}", monkeypatch) == 1
    assert capfd.readouterr().err == "127.0.0.2 r1 | ashl: no data\n"
    kill = "if r == 2: os.kill(os.getpid(), 9)\n"
    with pytest.raises(AshlError, match=r"rank \d on \S+ ended with exit code 2"):
        run(replace(where, folder="/nowhere"), WAIT, monkeypatch)
    capfd.readouterr()
    assert run(where, kill, monkeypatch) == 0
    assert capfd.readouterr().err == "ashl: rank 2 on 127.0.0.2 was killed by SIGKILL\n"


def test_a_rank_that_hangs_after_the_run(
    where: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssh, "LAST_S", 0.1)
    assert run(where, f"if r == 2:\n    {WAIT}", monkeypatch) == 0
    assert capfd.readouterr().err == "ashl: rank 2 on 127.0.0.2 was killed by SIGTERM\n"


def test_an_interrupt_ends_all_hosts_in_order(
    where: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssh, "GRACE_S", 7919)  # seconds, a number that no other process sleeps
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert run(where, LINGERING, monkeypatch) == 130
    out, err = capfd.readouterr()
    here, pid, *said = out.split()
    assert (here, said) == ("here", ["leaving", "in", "order"])
    assert err == "ashl: interrupted\n"
    sleeping = [
        p.pid for p in psutil.process_iter(["cmdline"]) if "7919" in (p.info["cmdline"] or ())
    ]
    assert gone(int(pid), *sleeping, within_s=2)


@pytest.mark.parametrize("how", ["end of input", "SIGTERM"])
def test_a_process_ends_with_its_connection(how: str, where: Launch) -> None:
    """If the launcher is killed, the input of each connection ends."""
    job = replace(where, size=1)
    task = ssh.tasks(job)[0]._replace(argv=(job.python, "-c", "import os, sys\n" + LINGERING))
    with subprocess.Popen(
        ssh.task_command(job, task), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(ssh.environment_line(job, ["127.0.0.1"]))
        process.stdin.flush()
        assert process.stdout.readline() == b"ashl is there \n"
        pid = int(process.stdout.readline().split()[1])
        process.terminate() if how == "SIGTERM" else process.stdin.close()
        assert gone(pid)


@pytest.mark.parametrize(
    ("hosts", "python", "said"),
    [
        (
            ["127.0.0.1", "dead1", "dead2"],
            sys.executable,
            "dead1 does not answer (ssh: connect to host dead1 ",
        ),
        (["127.0.0.1", "dead1", "dead2"], sys.executable, ", dead2 does not answer"),
        (["127.0.0.2"], "/no/python", "127.0.0.2 does not answer (sh: "),
        (["localhost"], "/bin/false", "localhost does not answer (no error); `ssh HOST /bin/false"),
    ],
)
def test_a_host_that_cannot_take_part(
    hosts: list[str], python: str, said: str, where: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = tuple(Machine(name, 1) for name in hosts)
    job = replace(where, machines=machines, python=python, size=len(hosts))
    with pytest.raises(AshlError) as error:
        run(job, "open('started', 'w')", monkeypatch)
    assert said in str(error.value)
    assert not Path(where.folder, "started").exists()


def test_values_that_ssh_cannot_bring(where: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--env X: ssh brings"):
        run(replace(where, env={"X": "a\nb"}), "", monkeypatch)
    with pytest.raises(UsageError, match="--ssh /no/ssh: No such file"):
        run(replace(where, ssh=("/no/ssh",)), "", monkeypatch)
