"""Real engines on this one machine: Slurm with three nodes, and an sshd on loopback.

Needs root and the packages of Debian that `INSTALL` names.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

INSTALL = "apt-get install slurm-wlm munge openmpi-bin mpich openssh-server"
NODES = ("ashl-fast1", "ashl-fast2", "ashl-slow")
SLURM_CONF = """ClusterName=ashl
SlurmctldHost=localhost
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=ashl-fast1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=16818 CPUs=4 Feature=fast
NodeName=ashl-fast2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=16819 CPUs=4 Feature=fast
NodeName=ashl-slow NodeHostname=localhost NodeAddr=127.0.0.1 Port=16820 CPUs=4 Feature=slow
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing(*programs: str) -> str | None:
    """Return why a test with these programs cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "real engines need root"
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in programs if shutil.which(name, path=path) is None]
    return f"there is no {', '.join(absent)}: run `{INSTALL}`" if absent else None


@contextmanager
def slurm(folder: Path) -> Generator[dict[str, str]]:
    """Run munge, Slurm's controller and three of its nodes; yield the environment of its clients."""
    folder.chmod(0o755)  # munge's socket has to be in a folder that all can enter
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(folder=folder))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    started = [start(["munged", "-F", "--force", f"--socket={folder}/munge.socket", *files])]
    env = os.environ | {"SLURM_CONF": str(conf)}
    try:
        wait_for((folder / "munge.socket").exists)
        started.append(start(["slurmctld", "-D", "-i", "-f", str(conf)], env))
        started += [start(["slurmd", "-D", "-N", node, "-f", str(conf)], env) for node in NODES]
        wait_for(lambda: output(["sinfo", "-h", "-t", "idle", "-o", "%D"], env).strip() == "3")
        yield env
    finally:
        subprocess.run(["scancel", "--user=root"], env=env, capture_output=True, check=False)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen:
    path = f"{os.environ['PATH']}:/usr/sbin"
    program = shutil.which(command[0], path=path)
    assert program is not None
    null = subprocess.DEVNULL
    return subprocess.Popen([program, *command[1:]], env=env, stdout=null, stderr=null)


def output(command: Sequence[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout


def wait_for(what, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.1)


@contextmanager
def sshd(folder: Path, port: int) -> Generator[str]:
    """Run an sshd on loopback for a key that is made in this folder; yield the ssh command."""
    for key in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    public = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.*]:{port} {public}")
    (folder / "sshd").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "client").write_text(
        f"Host *\n  Port {port}\n  IdentityFile {folder}/user\n  UserKnownHostsFile {folder}/known\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = start(["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd")])
    try:
        yield f"ssh -F {folder}/client"
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
