"""Start a job by its engine, or say what would start it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import join

from ashl.errors import UsageError
from ashl.launch import kubernetes, mpirun, ray, slurm, ssh, torchrun
from ashl.launch.job import LOCAL, Launch, Machine

ENGINES = ("ssh", "slurm", "mpirun", "torchrun", "ray", "kubernetes")


def describe(launch: Launch) -> str:
    """Return the commands or the script that would start the job."""
    launch = with_hosts(launch)
    if launch.engine == "slurm":
        return slurm.script(launch)
    if launch.engine == "kubernetes":
        return kubernetes.manifest(launch)
    if launch.engine == "ray":
        return ray.script(launch)
    if launch.engine == "mpirun":
        return join(mpirun.command(launch, find_mpirun())) + "\n"
    tasks = torchrun.tasks(launch) if launch.engine == "torchrun" else ssh.tasks(launch)
    return "".join(f"{join(ssh.task_command(launch, task))}\n" for task in tasks)


def start(launch: Launch) -> int:
    """Start the job, wait for its end and return the exit code; a job of Slurm is submitted only.

    Raises: UsageError if the engine is missing here.
    """
    launch = with_hosts(launch)
    if launch.engine == "ssh":
        return ssh.run(launch, ssh.tasks(launch))
    if launch.engine == "torchrun":
        return ssh.run(launch, torchrun.tasks(launch))
    if launch.engine == "slurm":
        command = [find_program("sbatch"), *slurm.SUBMIT]
        return run_command(command, launch.env, slurm.script(launch))
    if launch.engine == "ray":
        return run_command([launch.python, "-P", "-"], launch.env, ray.script(launch))
    if launch.engine == "kubernetes":
        raise UsageError(
            "--on kubernetes: ashl starts nothing there; pass the manifest of `--dry-run` to"
            " `kubectl apply -f -`"
        )
    return run_command(mpirun.command(launch, find_mpirun()), mpirun.environment(launch))


def with_hosts(launch: Launch) -> Launch:
    """Return the job with this machine as its host, if torchrun has no other."""
    if launch.machines or launch.engine != "torchrun":
        return launch
    return replace(launch, machines=(Machine(LOCAL, launch.size),))


def find_mpirun() -> str:
    """Return the implementation of the mpirun of this machine. Raises UsageError without one."""
    asked = [find_program("mpirun"), "--version"]
    return mpirun.flavor_of(subprocess.run(asked, capture_output=True, text=True).stdout)


def find_program(name: str) -> str:
    """Return the path of a program. Raises UsageError if this machine has none of this name."""
    if (found := shutil.which(name)) is None:
        raise UsageError(f"--on: this machine has no {name}; install it, or choose another engine")
    return found


def run_command(command: Sequence[str], env: Mapping[str, str], text: str | None = None) -> int:
    """Run the command of an engine with these variables, and return its exit code.

    Interrupts are passed on to the engine, which ends the ranks.
    Args: text, its standard input, or None.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    before = {
        number: signal.signal(number, lambda number, _: process.send_signal(number))
        for number in ssh.INTERRUPTS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        process.communicate(text)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
