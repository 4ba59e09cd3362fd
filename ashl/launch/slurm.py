"""Slurm: a batch script with one job step.

Unequal machines are heterogeneous components: one for each line of the hosts file.
"""

from shlex import join, quote

from ashl.launch.job import Launch

# The command that submits the script on its standard input, and prints the job's number.
SUBMIT = ("--parsable", "--export=ALL")


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
