"""`ashl profile`: a cluster measured, or as it is declared, and the plan that follows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ashl.config.override import CommandLine, command_line, key_of
from ashl.errors import AshlError, UsageError
from ashl.learn.learner import Learner
from ashl.plan.files import read_profile
from ashl.plan.plan import Spec
from ashl.planning.compile_plan import prepare_plan
from ashl.planning.instantiate import declared_profile
from ashl.planning.layer_group_costs import with_layer_group_costs
from ashl.run.rank import step_here_s
from ashl.run.train import detect_job, is_virtual, make_run_folder, run
from ashl.tracking.forecast import forecast, show_profile
from ashl.tracking.recorder import Recorder


def profile(
    config: dict[str, Any],
    overrides: list[str],
    *,
    quiet: bool = False,
    codecs: Sequence[Spec] = (),
    command: CommandLine | None = None,
) -> int:
    """Measure the cluster (in virtual time: take what it declares), plan from it, print both;
    returns the exit code.

    Writes `profile.json` and the `plan.json` that follows from it into the run folder. The costs
    of `codecs` are measured beside those of the chosen one.
    """
    config = {**config, "tracking": {**config["tracking"], "sink": "none"}}
    if is_virtual(config):
        plan, parts, data = prepare_plan(config, None, overrides)
        found = declared_profile(
            parts.cluster, plan.choices["model"], plan.num_params, plan.stages[0].workers[0].batch
        )
        assert found is not None
        known = read_profile(config["profile"]) if config["profile"] else None
        learner = Learner(parts.model, data, parts.task, seed=plan.seed)
        found = with_layer_group_costs(found, plan, learner, parts.cluster, known)
        run_dir = make_run_folder({**config, "name": "profile"}, plan)
        recorder = Recorder(run_dir, "none")
        recorder.document("profile.json", found.to_json())
        recorder.leave()
    else:
        quick = {
            "run": {**config["run"], "save_weights": False},
            "name": "profile",
            "profile": None,
        }
        ran = run({**through_server(config, codecs=codecs), **quick}, [], quiet=True, silent=True)
        if ran.run_dir is None:  # another process of the job is the one that writes
            return ran.code
        run_dir = ran.run_dir
        if not run_dir.joinpath("profile.json").exists():
            raise AshlError(
                "the run ended before all was measured, so there is no profile; give stop.seconds"
                " more"
            )
        found = read_profile(str(run_dir / "profile.json"))
    plan, parts, data = prepare_plan(config, world_size(config), overrides, found)
    run_dir.joinpath("plan.json").write_text(plan.to_json(), encoding="utf-8")
    if not quiet:
        console = Console(highlight=False)
        show_profile(console, found)
        if parts.runtime.name == "sim" and parts.runtime.gradients:
            declared, here = 1e3 * parts.cluster.step_s, 1e3 * step_here_s(plan, parts, data)
            console.print(
                f"a step at factor 1 takes {declared:.3g} ms as declared, {here:.3g} ms on this"
                " machine"
            )
        forecast(console, plan, len(data.train), found)
        console.print(f"run folder  {run_dir}", soft_wrap=True, markup=False)
        console.print(
            f"use it with `{uses(command, overrides, 'profile', run_dir)}`\n"
            f"or with     `{uses(command, overrides, 'plan', run_dir)}`",
            soft_wrap=True,
            markup=False,
        )
    return 0


def uses(command: CommandLine | None, overrides: Sequence[str], key: str, run_dir: Path) -> str:
    """The command that trains what was profiled, from the profile or from the plan (`key`) that
    lies there.
    """
    own = [text for text in overrides if key_of(text) not in ("profile", "plan", "run.dir", "name")]
    return (command or command_line("profile", overrides)).followed_by(
        "train", *own, f"{key}={run_dir / key}.json"
    )


def through_server(
    config: dict[str, Any], in_job: bool = False, codecs: Sequence[Spec] = ()
) -> dict[str, Any]:
    """The configuration of a run that measures: its links lead to a server, whatever the topology
    is. Raises UsageError where others have started the processes, and none for a server.
    """
    topology = config["choices"]["topology"]
    if topology != "parameter_server" and (in_job or detect_job(config)[1]):
        raise UsageError(
            f"`ashl profile` measures links to a server, for which a job with topology={topology}"
            " has no process; profile with topology=parameter_server and one process more, and"
            " train with profile=FILE"
        )
    measuring = {
        "schedule": {
            "_target_": "ashl.schedule.profile_only.ProfileOnly",
            "profile_steps": 20,
            "per_layer_group": True,
            "codecs": list(codecs),
        },
        "overlap": {"_target_": "ashl.overlap.none.Serial"},
    }
    if topology != "parameter_server":
        measuring["topology"] = {
            "_target_": "ashl.topology.parameter_server.ParameterServer",
            "pull_ratio": None,
        }
    choices = {"schedule": "profile_only", "overlap": "none", "topology": "parameter_server"}
    return {**config, **measuring, "choices": {**config["choices"], **choices}}


def world_size(config: dict[str, Any]) -> int | None:
    job = detect_job(config)[1]
    return job.world_size if job else None
