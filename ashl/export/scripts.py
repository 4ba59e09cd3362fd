"""Write a run as a training script for another tool.

The tool's limits are checked first, then a template is filled. Each file in `templates/` reads as
the script that it becomes; `base.py.jinja` has the common part. A script draws its own samples, so
its losses agree with the run's within the variation between seeds, not bit for bit.

Limits: one stage, synchronous rounds, one model, equal batches. A run that was only timed can be
exported, too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ashl.compression.sparse import SPARSE
from ashl.compression.topk import TopK
from ashl.config.construct import bind_arguments
from ashl.device import HOST
from ashl.errors import UsageError, load_json
from ashl.model.plain import PlainModel
from ashl.optimizer.schedule import Scheduled, with_horizon
from ashl.overlap.timeline import merge_buckets, untimed_timeline
from ashl.plan.files import read_plan
from ashl.plan.plan import Plan
from ashl.planning.instantiate import Job, assemble_job, layer_groups
from ashl.stage.members import members_of

# Options that all scripts can express; below, the differences by target.
COMMON = {
    "topology": ("all_reduce", "parameter_server"),
    "sync": ("bsp", "local_sgd"),
    "optimizer": ("sgd", "adam"),
    "overlap": ("none", "wfbp", "merged", "priority", "tictac", "dear"),
    "compression": ("none",),
    "outer": ("average", "heavy_ball", "nesterov"),
}
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "ddp": {"sync": ("bsp",), "outer": ("average",)},
    "torchft": {},
    "script": {"compression": ("none", "topk")},
}
# Parameters of these options that a script can express at one value only.
FIXED = """
topology.pull_ratio=null aggregate.clip_norm=null dataset.augment=none dataset.alpha=null
runtime.precision=fp32 compression.values=fp32 compression.per_layer=false
compression.error_feedback=true compression.feedback_gain=1.0 compression.feedback_decay=1.0
compression.clip_norm=null compression.warmup_epochs=0 compression.critical_ratio=null
"""
# Factors of the learning rate after the warm-up; both lengths are in samples of all workers.
DECAYS = {
    "constant": "",
    "linear": " * (1 - min((samples - {warmup}) / ({horizon} - {warmup}), 1.0))",
    "cosine": (
        " * (1 + math.cos(math.pi * min((samples - {warmup}) / ({horizon} - {warmup}), 1.0))) / 2"
    ),
    "step": " * 0.1 ** ((samples >= {horizon} / 2) + (samples >= {horizon} * 3 / 4))",
}


def render_script(folder: Path, to: str, name: str) -> str:
    """Return the script `name` of a run for the tool `to`. Raises UsageError if there is none."""
    if not (folder / "plan.json").is_file():
        raise UsageError(
            f"{folder} is no folder of a run (it has no plan.json); name one, for"
            " example runs/2026-01-31/12-00-00-NAME."
        )
    plan = read_plan(str(folder / "plan.json"))
    job = assemble_job(plan, HOST)
    if obstacle := find_obstacle(plan, job, to):
        able = " and ".join(
            f"--to {other}" for other in TARGETS if not find_obstacle(plan, job, other)
        )
        hint = f"; this run can be exported with {able}" if able else ""
        raise UsageError(f"{folder} cannot be exported with --to {to}: {obstacle}{hint}.")
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    templates = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    values = {**template_values(plan, job), "rounds": count_rounds(folder, plan, job)}
    return templates.get_template(f"{to}.py.jinja").render(values, folder=folder, name=name, to=to)


def find_obstacle(plan: Plan, job: Job, to: str) -> str | None:
    """Return what a tool cannot express of a run and what to use instead; None if it can express
    all.
    """
    stage = job.stages[0]
    if len(plan.stages) > 1:
        return (
            f"schedule={plan.choices['schedule']} has {len(plan.stages)} stages; take"
            " schedule=single"
        )
    specs = {**vars(plan), **vars(plan.stages[0])}
    for group, names in {**COMMON, **TARGETS[to]}.items():
        module = specs[group]["_target_"].rpartition(".")[0]
        if module not in [f"ashl.{group}.{name}" for name in names]:
            return (
                f"such a script has no {group}={plan.choices[group]}; take"
                f" {group}={' or '.join(names)}"
            )
    for setting in FIXED.split():
        key, _, fixed = setting.partition("=")
        group, _, parameter = key.partition(".")
        value = json.dumps(specs[group].get(parameter)).strip('"')
        if parameter in specs[group] and value != fixed:
            return f"such a script has no {key}={value}; take {setting}"
    if len({worker.batch for worker in stage.plan.workers}) > 1:
        return (
            "its workers have batches of different sizes; take one dataset.batch_size for all of"
            " them"
        )
    if to == "ddp" and stage.sync.exchange == "difference" and plan.choices["optimizer"] != "sgd":
        return "such a script averages gradients; take sync.exchange=gradient"
    equal = all(
        abs(plan.num_workers * weight - 1) < 1e-6 for weight in members_of(stage).planned.weights
    )
    if to != "script" and not (equal and len(set(steps_in_round(job))) == 1):
        return (
            "its workers differ in weight or steps; take aggregate=uniform and a number as"
            " sync.local_steps"
        )
    return None


def steps_in_round(job: Job) -> list[int]:
    """Return the optimizer steps of each worker between two exchanges."""
    stage = job.stages[0]
    return [
        worker.local_steps if stage.sync.exchange == "difference" else 1
        for worker in stage.plan.workers
    ]


def count_rounds(folder: Path, plan: Plan, job: Job) -> int:
    """Return the rounds of a run, or the planned ones if it has not ended.

    Raises: UsageError if neither is known.
    """
    outcome = folder / "summary.json"
    steps: Any = plan.num_steps(job.stages[0].epoch_samples)
    try:
        if outcome.exists():
            steps = load_json(outcome.read_text(encoding="utf-8"))["stages"][0]["steps"]
        return max(1, round(steps / sum(steps_in_round(job))))
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = (
            "is damaged" if outcome.exists() else "is missing, and its plan has no number of steps"
        )
        raise UsageError(f"{outcome} {reason}; name a run that has ended.") from error


def template_values(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the values that the templates use."""
    stage = job.stages[0]
    own = job.parts.stages[0]
    sizes = {"sample_shape": plan.sample_shape, "num_classes": plan.num_classes}
    if isinstance(job.parts.model, PlainModel):
        model = call_of(
            plan.model | bind_arguments(job.parts.model.make, job.parts.model.keys, "model", sizes)
        )
    else:
        model = f"{call_of(plan.model)}.build(**{sizes})"
    inner = with_horizon(own.optimizer, plan.limits.epochs)
    assert isinstance(inner, Scheduled)
    warmup, horizon = (
        stage.epoch_samples * (epochs or 0)
        for epochs in (inner.warmup_epochs, inner.horizon_epochs)
    )
    groups = layer_groups(plan)
    counts = (
        (len(groups),) if own.overlap.serial else own.overlap.messages(untimed_timeline(groups))
    )
    sent: list[int] = []
    if isinstance(own.compression, TopK):
        # A worker sends its whole update if values and indices would take no fewer bytes.
        kept = [
            own.compression.num_selected(worker.compression_ratio, plan.num_params)
            for worker in stage.plan.workers
        ]
        sent = [
            k if own.compression.format.form(k, plan.num_params) == SPARSE else plan.num_params
            for k in kept
        ]
    return {
        "plan": plan,
        "stage": stage,
        "outer": own.outer,
        "inner": inner,
        "warmup": warmup,
        "decay": DECAYS[inner.schedule].format(warmup=warmup, horizon=horizon),
        "model": model,
        "call_of": call_of,
        "steps": steps_in_round(job),
        "weights": [round(weight, 9) for weight in members_of(stage).planned.weights],
        "messages": [
            4 * (part.stop - part.start) for part in reversed(merge_buckets(groups, counts))
        ],
        "sent": sent,
        "differences": stage.sync.exchange == "difference",
    }


def call_of(spec: Mapping[str, Any]) -> str:
    """Return the call that makes the object of a spec, as source text."""
    keys = ", ".join(f"{key}={value!r}" for key, value in spec.items() if key != "_target_")
    return f"{spec['_target_']}({keys})"
