"""`ashl train`: compose, plan, train, write the run folder, and show the outcome."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ashl.config.catalog import CONFIG_DIR
from ashl.config.override import command_text, key_of
from ashl.config.settings_file import with_settings
from ashl.errors import UsageError

from .answer import Answer, Json
from .typed import CONFIG_FILE, typed_command

if TYPE_CHECKING:
    from ashl.run.train import DryRun as Planned


def with_file(ctx: typer.Context, overrides: list[str] | None) -> list[str] | None:
    """Return the typed settings after those of `--config FILE`, which count as typed, too."""
    if ctx.resilient_parsing:  # a completion
        return overrides
    return with_settings(ctx.params.get(CONFIG_FILE), overrides or [])


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings, for example sync=bsp optimizer.lr=0.05.",
        callback=with_file,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        help="A YAML file of KEY: VALUE; typed settings override it.",
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar=CONFIG_DIR,
        help="A folder with your own options, for example sync/mine.yaml.",
    ),
]
Cfg = Annotated[bool, typer.Option("--cfg", help="Print the resolved configuration and stop.")]
WORKER_KEYS = (
    "cluster.num_workers",
    "cluster.compute",
    "cluster.link",
    "cluster.node",
    "cluster.hosts",
)
# keys that may change together with OF_WORKERS
CHANGE_WITH_WORKERS = ("run.dir", "dataset.batch_size", "topology.regions", "cluster.events")
GROUPS_OF_WORKERS = ("cluster", "dataset", "topology")  # groups of these keys
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan and estimate; run nothing.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def train(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    cfg: Cfg = False,
    dry_run: DryRun = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Resume this run; stop.* may change, or cluster.num_workers."
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> Answer | int:
    """Train a model on the chosen cluster, in virtual time (runtime=sim) or for real, and show the
    results.

    `ashl list` shows what can be set.
    """
    from ashl.config.compose import compose

    config = (
        compose(overrides or [], config_dir)
        if resume is None
        else resumed_config(resume, overrides or [], config_dir)
    )
    if cfg:
        return config_answer(config)
    with show_starting(quiet):
        from ashl.run import train as run

    if dry_run:
        return plan_answer(run.dry_run(config, overrides or []), str(typed_command(ctx)))
    ran = run.run(
        config,
        overrides or [],
        quiet=quiet,
        silent=json,
        resume=resume,
        command=str(typed_command(ctx)),
    )
    if ran.run_dir is None or ran.summary is None:  # not rank 0 of a job
        return ran.code
    document = {"folder": str(ran.run_dir), **ran.summary}
    return Answer(document, next=command_text("compare", ran.run_dir), code=ran.code)


def config_answer(config: dict) -> Answer:
    """Return the answer of `--cfg`."""
    return Answer(without_unused(config), show=lambda: print(as_yaml(config), end=""))


def plan_answer(dry: "Planned", command: str) -> Answer | int:
    """Return the answer of `--dry-run`; the next command is the same without it."""
    return Answer(dry.document(), show=dry.show, next=command) if dry.leads else 0


@contextmanager
def show_starting(quiet: bool = False) -> Generator[None]:
    """Show that ashl starts, on a terminal, while torch is imported, which takes seconds."""
    shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
    if shown:
        print("ashl: starting ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def resumed_config(run_dir: Path, overrides: list[str], config_dir: Path | None) -> dict:
    """Return the configuration of an earlier run, with typed stop limits, runtime or workers.

    With another number of workers it is that of a new run, which is resumed from the earlier one.
    Raises: UsageError for other typed keys.
    """
    from ashl.config.compose import compose, fix_for_allow_targets
    from ashl.config.recorded import config_of

    config = config_of(run_dir)
    keys = [key_of(text) for text in overrides]
    others = (
        [key for key in keys if key in (*WORKER_KEYS, *CHANGE_WITH_WORKERS)]
        if {*keys} & {*WORKER_KEYS}
        else []
    )
    own = [f"{group}={config['choices'][group]}" for group in GROUPS_OF_WORKERS if others]
    asked = compose([*own, *overrides], config_dir)
    if not set(config["allow_targets"]) <= set(asked["allow_targets"]):
        raise UsageError(
            f"--resume {run_dir}: the run imports code of your own; {fix_for_allow_targets(config)}"
        )
    for key in keys:
        if key == "allow_targets" or key in others:
            continue
        if key == "runtime":
            config = with_runtime(config, asked)
            continue
        group, _, name = key.partition(".")
        if group != "stop" or name not in config["stop"]:
            raise UsageError(
                f"{key}: only stop.*, runtime and the number of workers (cluster.num_workers) may"
                " change when a run is resumed; start a new one from its weights:"
                f" run.start_from={run_dir}"
            )
        config["stop"][name] = asked["stop"][name]
    if (new := with_workers(config, asked, others)) != config:
        return {
            **new,
            "run": {**config["run"], "dir": asked["run"]["dir"]},
            "resumed": str(run_dir.resolve()),
        }
    return {**config, "run": {**config["run"], "dir": str(run_dir)}}


def with_workers(config: dict, asked: dict, keys: list[str]) -> dict:
    """Return the configuration with the typed values of `keys`, which describe the workers."""
    from ashl.config.workers import resize_cluster

    new = {**config, **{group: {**config[group]} for group in GROUPS_OF_WORKERS}}
    for group, _, name in (key.partition(".") for key in keys if key != "run.dir"):
        new[group][name] = asked[group][name]
    return (
        {
            **new,
            "cluster": resize_cluster(new["cluster"], ([key.partition(".")[2] for key in keys],)),
        }
        if keys
        else config
    )


def with_runtime(config: dict, asked: dict) -> dict:
    """Return the configuration with another runtime, which keeps the values of common keys."""
    both = {
        key: value
        for key, value in config["runtime"].items()
        if key in asked["runtime"] and key != "_target_"
    }
    choices = {**config["choices"], "runtime": asked["choices"]["runtime"]}
    return {**config, "choices": choices, "runtime": {**asked["runtime"], **both}}


def as_yaml(config: dict) -> str:
    """Return the configuration as YAML, each list on one line, without groups that have no
    effect.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(
        list,
        lambda dumper, v: dumper.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=True),
    )
    resolved = without_unused(config)
    return yaml.dump(resolved, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def without_unused(config: dict) -> dict:
    """Return the configuration without groups that have no effect."""
    return {
        key: value for key, value in config.items() if key != "sync" or key in config["choices"]
    }
