"""Slurm: a batch script with one job step, and what Slurm tells each task.

Unequal machines are heterogeneous components: one for each line of the hosts file.
"""

import re
import subprocess
from collections.abc import Mapping
from shlex import join, quote

from ashl.errors import UsageError
from ashl.launch.job import PORTS, Launch
from ashl.launch.membership import (
    JobMembership,
    read_local_rank,
    read_natural,
    read_place,
    read_port,
)

SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", *SIZES)
# The command that submits the script on its standard input, and prints the job's number.
SUBMIT = ("--parsable", "--export=ALL")
SCONTROL_S = 10.0  # longest wait in seconds for Slurm's controller


def script(launch: Launch) -> str:
    """Return the batch script of a job.

    A hosts file gives one component per line: `node1` asks for this node, `constraint=fast` (or
    another option of sbatch) for nodes of a kind. With `--no-kill` and `-K0` a failed node or task
    does not end the others: the run decides. The environment travels with the job, and so does the
    job's secret.
    """
    lines = ["#!/bin/sh", "#SBATCH --job-name=ashl", "#SBATCH --output=ashl-%j.out"]
    lines += [
        f"#SBATCH --chdir={quote(launch.folder)}",
        "#SBATCH --no-kill",
    ]
    lines += [f"#SBATCH {option}" for option in launch.options]
    if not launch.machines:
        lines += [f"#SBATCH --ntasks={launch.size}"]
    for number, share in enumerate(launch.shares):
        key, value = share.machine.kind or ("nodelist", share.machine.name)
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH --ntasks={len(share.ranks)}", f"#SBATCH --{key}={quote(value)}"]
    components = len(launch.shares)
    group = [f"--het-group=0-{components - 1}"] if components > 1 else []
    step = ["exec", "srun", *group, "--no-kill", "--kill-on-bad-exit=0"]
    return "\n".join([*lines, "", join([*step, *launch.rank_command]), ""])


def read(env: Mapping[str, str]) -> JobMembership | None:
    """Return the job of srun; None outside a job step, or if it has one process.

    Raises: UsageError if the variables contradict each other.
    """
    size = next((name for name in SIZES if name in env), None)
    # the script that sbatch runs is no task of a job step
    is_script = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    if "SLURM_PROCID" not in env or size is None or is_script:
        return None
    rank, count = read_place(env, "srun", "SLURM_PROCID", size)
    if count == 1:
        return None
    host = env.get("MASTER_ADDR") or first_host(env)
    port = read_port(env) if "MASTER_PORT" in env else step_port(env)
    return JobMembership(rank, count, host, port, read_local_rank(env, "SLURM_LOCALID"))


def step_port(env: Mapping[str, str]) -> int:
    """Return a port from the number of the job and its step, so that two of them do not share it.

    Raises: UsageError without SLURM_JOB_ID.
    """
    if "SLURM_JOB_ID" not in env:
        raise UsageError("srun does not say SLURM_JOB_ID, which decides the port; set MASTER_PORT")
    step = env.get("SLURM_STEP_ID", "0")
    # a component of a heterogeneous job has a number of its own
    number = read_natural(env, "SLURM_HET_JOB_ID" if "SLURM_HET_JOB_ID" in env else "SLURM_JOB_ID")
    return PORTS[(number + 7 * int(step if step.isdecimal() else 0)) % len(PORTS)]


def node_list(env: Mapping[str, str]) -> str:
    """Return the name of the variable with the job's nodes; "" if there is none."""
    return next((name for name in LISTS if env.get(name)), "")


def first_host(env: Mapping[str, str]) -> str:
    """Return the node of rank 0. Raises UsageError if the list of nodes is missing or invalid.

    In Slurm's list `a[07-09,12]b,c` the first one is a07b.
    """
    name = node_list(env)
    if not name:
        raise UsageError(
            "srun does not say SLURM_JOB_NODELIST, in which the master is first; set MASTER_ADDR"
        )
    found = re.fullmatch(r"([\w.-]+(?:\[\d[\d,-]*\][\w.-]*)*)(?:,.*)?", env[name])
    if not found:
        raise UsageError(
            f"{name}={env[name]!r} is no list of nodes: names and ranges in brackets are expected;"
            " set MASTER_ADDR"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def node_address(name: str) -> str | None:
    """Return the address of a node by Slurm's configuration; None without Slurm or such a node."""
    ask = ["scontrol", "show", "node", name, "--oneliner"]
    try:
        answer = subprocess.run(
            ask, capture_output=True, text=True, timeout=SCONTROL_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", answer)
    return found[1] if found else None
