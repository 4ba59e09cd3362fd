"""`ashl profile`: measure a cluster, or take what it declares, and plan from it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ashl.config.override import CommandLine, command_line, key_of
from ashl.errors import AshlError, UsageError
from ashl.learn.learner import Learner
from ashl.plan.files import read_profile
from ashl.plan.plan import Plan, Spec
from ashl.plan.profile import Profile
from ashl.planning.compile_plan import prepare_plan
from ashl.planning.instantiate import declared_profile
from ashl.planning.layer_group_costs import with_layer_group_costs
from ashl.run.rank import step_here_s
from ashl.run.train import detect_job, is_virtual, make_run_folder, run
from ashl.tracking import jsonl
from ashl.tracking.console import print_unwrapped
from ashl.tracking.forecast import print_forecast, print_profile
from ashl.tracking.recorder import METRICS, Recorder, writing


class Measured(NamedTuple):
    """A profile and the plan made from it, their run folder, and the command that trains by it."""

    folder: Path
    profile: Profile
    plan: Plan
    next: str

    def document(self) -> dict[str, Any]:
        """Return the profile and the plan as in their files."""
        found = {"profile": self.profile.to_json(), "plan": self.plan.to_json()}
        return {"folder": str(self.folder), **{key: json.loads(own) for key, own in found.items()}}


def profile(
    config: dict[str, Any],
    overrides: list[str],
    *,
    quiet: bool = False,
    codecs: Sequence[Spec] = (),
    command: CommandLine | None = None,
) -> "Measured | int":
    """Measure the cluster (in virtual time: take what it declares), plan from it, and print both.

    Returns: what was measured; in a process of a job that has no records, the exit code.

    Writes `profile.json` and `plan.json` into the run folder.
    Args: codecs, measured beside the configured one; command, the typed command, from which the
    next one is advised.
    Raises: AshlError if the run ends before everything is measured.
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
        ran = run({**measuring_config(config, codecs=codecs), **quick}, [], quiet=True, silent=True)
        if ran.run_dir is None:  # the process of rank 0 of the job writes the profile
            return ran.code
        run_dir = ran.run_dir
        if not run_dir.joinpath("profile.json").exists():
            raise AshlError(
                "the run ended before everything was measured, so there is no profile; raise"
                " stop.seconds"
            )
        found = read_profile(str(run_dir / "profile.json"))
    plan, parts, data = prepare_plan(config, world_size(config), overrides, found)
    with writing(run_dir):
        jsonl.write_bytes(run_dir / "plan.json", plan.to_json().encode())
    if not quiet:
        console = Console(highlight=False)
        print_profile(console, found)
        if parts.runtime.name == "sim" and parts.runtime.gradients:
            declared, here = 1e3 * parts.cluster.step_s, 1e3 * step_here_s(plan, parts, data)
            console.print(
                f"a step at factor 1 takes {declared:.3g} ms as declared, {here:.3g} ms on this"
                " machine"
            )
        print_forecast(console, plan, len(data.train), found)
        from_plan = command_with(command, overrides, "plan", run_dir)
        print_unwrapped(console, f"run folder  {run_dir}", f"the plan    {from_plan}")
    return Measured(run_dir, found, plan, command_with(command, overrides, "profile", run_dir))


def profile_once(
    config: dict[str, Any], overrides: list[str], folder: Path, codecs: Sequence[Spec] = ()
) -> Path:
    """Return the profile in this folder, which is measured unless an earlier call has done so.

    Args: overrides and codecs, as in `profile`.
    Raises: as `profile`; AshlError while another process measures into this folder.
    """
    path = folder / "profile.json"
    if not path.exists():
        with writing(folder), jsonl.hold_lock(folder / METRICS):
            shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted call
        own = {**config, "run": {**config["run"], "dir": str(folder)}}
        profile(own, overrides, quiet=True, codecs=codecs)
    return path


def command_with(
    command: CommandLine | None, overrides: Sequence[str], key: str, run_dir: Path
) -> str:
    """Return the command that trains from the profile or the plan (`key`) in the run folder."""
    own = [text for text in overrides if key_of(text) not in ("profile", "plan", "run.dir", "name")]
    return (command or command_line("profile", overrides)).follow_up(
        "train", *own, f"{key}={run_dir / key}.json"
    )


def measuring_config(
    config: dict[str, Any], in_job: bool = False, codecs: Sequence[Spec] = ()
) -> dict[str, Any]:
    """Return the configuration of the measuring run, which always has a parameter server.

    Raises: UsageError in a job of another launcher without a process for a server.
    """
    topology = config["choices"]["topology"]
    if topology != "parameter_server" and (in_job or detect_job(config)[1]):
        raise UsageError(
            f"topology={topology}: `ashl profile` measures links to a server, for which this job"
            " has no process; profile with topology=parameter_server and one more process, and"
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
    """Return the number of processes of the job of another launcher; None without one."""
    job = detect_job(config)[1]
    return job.world_size if job else None
