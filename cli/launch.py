"""`ashl launch`: run a command of ashl on several machines, by an engine."""

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ashl.config.catalog import catalog, parameters, suggestion_text
from ashl.config.override import key_of
from ashl.errors import UsageError

from .answer import Answer, Json
from .train import Debug, DryRun, resumed_config, show_starting
from .typed import TYPED_LAUNCH, launch_words, typed_command

if TYPE_CHECKING:
    from ashl.launch.job import Launch

LAUNCHED = ("train", "profile", "sweep")


def launch(
    ctx: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="train, profile or sweep, with its arguments."),
    ],
    on: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            help="ssh, slurm, mpirun, torchrun, ray, or kubernetes (a manifest).",
        ),
    ] = "ssh",
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One host a line: `node1`, or `node1 slots=2`; `KEY=VALUE` is a kind of machine.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Option of the engine, as in --option=--partition=cpu."),
    ] = None,
    ssh: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="Command to connect, for example --ssh 'ssh -p 2222'."
        ),
    ] = "ssh",
    python: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Python with ashl on the hosts; default: the path of this one.",
            show_default=False,
        ),
    ] = sys.executable,
    folder: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Working directory on the hosts; default: as here."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Copy this variable, beside ASHL_*, NCCL_*, GLOO_* and OMP_*."
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Start a killed rank again, N times; its worker rejoins."
        ),
    ] = 0,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
) -> Answer | int:
    """Run train, profile or sweep on several machines, by an engine that you have.

    runtime=torchrun and cluster=real are added. Rank 0 prints and writes the records. `--dry-run`
    prints the commands or the script of the engine.
    """
    name, *args = command
    if name not in LAUNCHED:
        hint = "; write `-- train`, `-- profile` or `-- sweep` behind its options."
        raise UsageError(f"`ashl launch` cannot run {name}{suggestion_text(name, LAUNCHED, hint)}")
    with show_starting(quiet="-q" in args or "--quiet" in args):
        from ashl.launch.environment import SECRET
        from ashl.launch.job import Launch, copied_environment, read_machines
        from ashl.launch.start import ENGINES

    if on not in ENGINES:
        known = f"; take one of {', '.join(ENGINES)}"
        raise UsageError(f"--on {on}: unknown engine{suggestion_text(on, ENGINES, known)}")
    if on == "ssh" and hosts is None:
        raise UsageError("give the hosts by --hosts FILE, or another engine by --on")
    machines = () if hosts is None else read_machines(hosts)
    copied = copied_environment(os.environ, env or [])
    assert ctx.parent is not None
    group = ctx.parent.command
    assert isinstance(group, TyperGroup)
    known = group.get_command(ctx.parent, name)
    assert known is not None
    inner: Any = known.make_context(name, [*args], parent=ctx)  # a copy: the list is emptied
    params = inner.params
    typed_line = str(typed_command(inner))
    params["dry_run"] = dry_run or params["dry_run"]
    own = implied_settings(name, params["overrides"] or [], params["config_dir"])
    if params.get("resume"):  # the run that is resumed has its cluster
        own = [text for text in own if text != "cluster=real"]
    params["overrides"] = [*(params["overrides"] or []), *own]
    if params.get("cfg"):
        return inner.command.invoke(inner)
    columns = str(shutil.get_terminal_size().columns)
    job = Launch(
        engine=on,
        argv=(name, *args, *own),
        size=0,
        machines=machines,
        python=python,
        folder=folder or os.getcwd(),
        env={
            SECRET: secrets.token_hex(32),
            "COLUMNS": columns,
            **copied,
            TYPED_LAUNCH: shlex.join(launch_words(ctx)),
        },
        options=tuple(option or ()),
        ssh=split_ssh(ssh),
        restarts=restarts,
    )
    if restarts and on in ("torchrun", "kubernetes"):
        raise UsageError(
            f"--restarts {restarts}: {on} restarts processes itself; take --option=--max-restarts=N"
            " of torchrun, or the backoffLimit of the manifest"
        )
    if name == "sweep":
        for refused in [text for text in ("launcher", "search", "jobs") if params.get(text)]:
            raise UsageError(
                f"`ashl launch` brings the runs to its hosts, one at a time; drop --{refused}."
            )
        inner.obj = job
        return inner.command.invoke(inner)
    return start(job, name, params, typed_line)


def start(job: "Launch", name: str, params: dict[str, Any], command: str) -> Answer | int:
    """Run `ashl train` or `ashl profile` by the engine, and return the exit code.

    A dry run returns what the engine would get, and the plan.
    """
    from ashl.config.compose import compose
    from ashl.launch import start as engines
    from ashl.launch.job import job_size
    from ashl.run.profile import measuring_config
    from ashl.run.train import dry_run, is_virtual

    if params.get("resume"):
        config = resumed_config(params["resume"], params["overrides"], params["config_dir"])
    else:
        config = compose(params["overrides"], params["config_dir"])
    if is_virtual(config):
        raise UsageError(
            "runtime=sim is virtual time, which needs no hosts; drop it, or `ashl launch`."
        )
    if name == "profile":
        config = measuring_config(config, in_job=True)
    job = replace(job, size=job_size(config, job))
    if params["dry_run"]:
        dry = dry_run(config, params["overrides"] if name == "train" else [], job.size)
        shares = {share.machine.name: list(share.ranks) for share in job.shares}
        described = engines.describe(job)

        def print_tables() -> None:
            for host, ranks in shares.items():
                print(f"{host}  {', '.join(f'rank {rank}' for rank in ranks)}")
            print(described, end="")
            dry.show()

        document = {"engine": job.engine, "hosts": shares, "starts": described, **dry.document()}
        if job.engine == "kubernetes":  # kubectl reads standard output, and ashl starts nothing
            return Answer(document, lambda: print(described, end=""))
        return Answer(document, print_tables, command)
    return engines.start(job)


def implied_settings(name: str, overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """Return the settings that need not be typed: real processes, and a real cluster if the user
    declares none.

    Raises: UsageError for a sweep without a number of workers.
    """
    keys = {key_of(text) for text in overrides}
    known = {
        f"cluster.{parameter.key}"
        for parameter in parameters(catalog(config_dir)["cluster"]["real"])
    }
    declared = any(
        key == "cluster" or (key.startswith("cluster.") and key not in known) for key in keys
    )
    if name == "sweep" and not declared and not keys & {"cluster.num_workers", "cluster.hosts"}:
        raise UsageError(
            "Give cluster.num_workers, as all runs of `ashl sweep` need equally many workers."
        )
    return [
        *([] if "runtime" in keys else ["runtime=torchrun"]),
        *([] if declared else ["cluster=real"]),
    ]


def split_ssh(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--ssh {command}: {str(error).lower()}.") from error
    if not words:
        raise UsageError("--ssh is empty; give a command, as in --ssh 'ssh -p 2222'.")
    return words
