"""Plan the messages of gradients from the costs that the cluster declares or a profile has
measured.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ashl.cluster.spec import Cluster
from ashl.errors import UsageError
from ashl.learn.learner import Learner
from ashl.overlap.contract import Delayed, Overlap
from ashl.overlap.streaming import Fragmented
from ashl.overlap.timeline import (
    StepTimeline,
    untimed_timeline,
)
from ashl.plan.plan import Plan, StagePlan
from ashl.plan.profile import Profile
from ashl.planning.instantiate import (
    Parts,
    StageParts,
    buckets_of,
    layer_groups,
    layout_of,
    link_of,
)
from ashl.planning.layer_group_costs import with_measured_readiness
from ashl.planning.step_timelines import make_timeline
from ashl.stage.contract import Topology


def plan_overlap(
    plan: Plan, parts: Parts, learner: Learner, known: Profile | None, cost_cluster: Any
) -> Plan:
    """Return the plan with the messages of each stage that overlaps, and notes on their effect.

    Args: `known` is the profile or None; `cost_cluster` is the cluster whose costs are used.
    Raises: UsageError.
    """
    if any(
        own.sync.per_layer_group or not own.overlap.serial or own.overlap.fragments > 1
        for own in parts.stages
    ):
        plan = with_measured_readiness(replace(plan, work=plan.work or learner.work()), known)
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        if isinstance(own.overlap, Delayed):
            if own.overlap.fragments:
                text = describe_fragments(plan, stage, own.overlap)
            else:
                text = (
                    f"overlap={plan.choices['overlap']} changes what is learned: a round takes as"
                    " long as the longer of its steps and its exchange, and an update is applied"
                    " one round late"
                )
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, text))))
    stages = list(plan.stages)
    notes = list(plan.notes)
    for index, own in enumerate(parts.stages):
        if not own.overlap.serial:
            stages[index], text = plan_buckets(plan, plan.stages[index], own, known, cost_cluster)
            notes += text
    return replace(plan, stages=tuple(stages), notes=tuple(dict.fromkeys(notes)))


def plan_buckets(
    plan: Plan, stage: StagePlan, own: StageParts, known: Profile | None, cost_cluster: Any
) -> tuple[StagePlan, list[str]]:
    """Return a stage with the messages of its gradients, and a note on the duration of its steps.

    Raises: UsageError.
    """
    groups, layout = layer_groups(plan), layout_of(plan.layers)
    link = None
    if own.overlap.compresses and not own.compression.traits.lossless:
        link = partial(link_of, own.compression, layout)
    if (
        own.topology.has_server
        and isinstance(cost_cluster, Cluster)
        and cost_cluster.exchange_s is not None
    ):
        raise UsageError(
            f"overlap={plan.choices['overlap']}: no effect with cluster.exchange_s, where no NIC is"
            " ever busy; set cluster.exchange_s=null with cluster.bandwidth_mbit_s and"
            " cluster.latency_s"
        )
    timeline = make_timeline(
        stage, cost_cluster, groups, link, own.topology.has_server, own.topology.algorithm
    )
    check_timing(plan.choices["overlap"], own.overlap, timeline, known)
    planned = own.overlap.with_plan(timeline or untimed_timeline(groups))
    keys = asdict(planned)  # ty: ignore[invalid-argument-type]
    stage = replace(stage, overlap={"_target_": stage.overlap["_target_"], **keys})
    if timeline is None:
        return stage, []
    return stage, [describe_step_times(timeline, planned, own.topology, cost_cluster)]


def check_timing(
    name: str, overlap: Overlap, timeline: StepTimeline | None, known: Profile | None
) -> None:
    """Refuse an overlap that is planned by costs which are not known.

    Raises: UsageError.
    """
    if not overlap.needs_costs:
        return
    if timeline is None:
        raise UsageError(
            f"overlap={name}: compares the costs of messages and steps, and the cluster does not"
            " declare them; take profile=FILE of `ashl profile`, declare cluster.step_s,"
            " cluster.bandwidth_mbit_s and cluster.latency_s, or take"
            f" overlap.{overlap.costless_choice}"
        )
    if known is not None and not known.group_bytes:
        raise UsageError(
            f"overlap={name}: needs costs by layer group, and a profile that a run has measured for"
            " itself has none; profile again with `ashl profile`, or take"
            f" overlap.{overlap.costless_choice}"
        )


def describe_step_times(
    timeline: StepTimeline, chosen: Overlap, topology: Topology, cluster: Cluster
) -> str:
    """Return a note on the duration of a step and its exchange."""
    buckets = chosen.plan_buckets(timeline)
    count = len(buckets)
    what = "a step, its push and its pull" if topology.has_server else "a step and its all-reduce"
    sent = f"{count} message{'s' * (count > 1)}"
    least = "at least " * (chosen.overlaps_next_forward and timeline.has_contention)
    text = f"{what} take {least}{chosen.step_ns(timeline) / 1e6:.4g} ms in {sent}"
    densities = [f"{100 * bucket.ratio:.3g}" for bucket in buckets if bucket.ratio is not None]
    if densities:
        text += f", with densities of {', '.join(densities)} %"
    if timeline.pace_reduction or timeline.collective_slowdown > 1:
        slower = f"{100 * timeline.pace_reduction:.2g} % slower"
        text += f"; during an all-reduce a worker computes {slower}, as measured"
    if cluster.exchange_s is not None:
        text += (
            "; with cluster.exchange_s a message has no latency, so fewer messages are no faster:"
            " to compare overlaps, set cluster.exchange_s=null, cluster.bandwidth_mbit_s and"
            " cluster.latency_s"
        )
    return text


def describe_fragments(plan: Plan, stage: StagePlan, overlap: Delayed) -> str:
    """Return a note on the size of fragments and on the steps between their exchanges.

    Raises: UsageError if the plan does not support them.
    """
    count, groups, name = overlap.fragments, layer_groups(plan), plan.choices["overlap"]
    if count > len(groups):
        raise UsageError(
            f"overlap.fragments={count}: the model has {len(groups)} layer groups; take at most"
            f" {len(groups)}"
        )
    if len(plan.stages) > 1:
        raise UsageError(
            f"overlap={name}: not supported with several stages, updates in flight at the end of"
            f" stage {stage.name} would be lost; take schedule=single"
        )
    steps = [worker.local_steps for worker in stage.workers]
    if isinstance(overlap, Fragmented) and overlap.delay >= min(steps):
        raise UsageError(
            f"overlap.delay={overlap.delay}: leaves none of the {min(steps)} steps between two"
            f" exchanges after an exchange is applied; take overlap.delay={min(steps) - 1}, or more"
            " sync.local_steps"
        )
    if overlap.share is not None:
        return (
            f"overlap={name} changes what is learned: a random share of {overlap.share:.3g} of the"
            " elements is averaged during the steps of each round"
        )
    sizes = [
        4e-6 * sum(stop - start for start, stop in bucket.runs)
        for bucket in buckets_of(plan, overlap)
    ]
    every = " to ".join(map(str, sorted({count * h for h in (min(steps), max(steps))})))
    return (
        f"overlap={name} changes what is learned: of {count} fragments ({min(sizes):.3g} to"
        f" {max(sizes):.3g} MB) one is exchanged at a time, each every {every} steps"
    )
