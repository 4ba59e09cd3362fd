"""Start a job by its engine, or say what would start it."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from shlex import join

from ashl.config.signals import handle_signals
from ashl.errors import UsageError
from ashl.launch import kubernetes, mpirun, ray, slurm, ssh, torchrun
from ashl.launch.job import Launch

ENGINES = ("ssh", "slurm", "mpirun", "torchrun", "ray", "kubernetes")
LOOPS = {"ssh": ssh.tasks, "torchrun": torchrun.tasks}  # the tasks of a loop over the hosts


def describe(launch: Launch) -> str:
    """Return the commands or the script that would start the job."""
    if launch.engine in LOOPS:
        commands = [ssh.task_command(launch, task) for task in LOOPS[launch.engine](launch)]
        return "".join(f"{join(command)}\n" for command in commands)
    command, _, text = command_of(launch)
    return f"{join(command)}\n" if text is None else text


def start(launch: Launch) -> int:
    """Start the job, wait for its end and return the exit code; a job of Slurm is submitted only.

    Raises: UsageError if the engine is missing here.
    """
    if launch.engine in LOOPS:
        return asyncio.run(ssh.run(launch, LOOPS[launch.engine](launch)))
    if launch.engine == "kubernetes":
        raise UsageError(
            "--on kubernetes: ashl starts nothing there; pass the manifest of `--dry-run` to"
            " `kubectl apply -f -`"
        )
    command, env, text = command_of(launch)
    return run_command([find_program(command[0]), *command[1:]], env, text)


def command_of(launch: Launch) -> tuple[list[str], Mapping[str, str], str | None]:
    """Return (command of an engine, its variables, its standard input or None)."""
    if launch.engine == "slurm":
        return ["sbatch", *slurm.SUBMIT], launch.env, slurm.script(launch)
    if launch.engine == "ray":
        return [launch.python, "-P", "-"], launch.env, ray.script(launch)
    if launch.engine == "kubernetes":
        return ["kubectl", "apply", "-f", "-"], {}, kubernetes.manifest(launch)
    return mpirun.command(launch, find_mpirun()), mpirun.environment(launch), None


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
    with handle_signals(lambda number, _: process.send_signal(number)):
        process.communicate(text)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
