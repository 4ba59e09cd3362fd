"""Plan the messages of gradients from the costs that the cluster declares or a profile has
measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ashl.aggregate.weighted import Weighted
from ashl.cluster.spec import Cluster
from ashl.compression.contract import Codec, Collective, Layout
from ashl.compression.wrappers import Layerwise, innermost, wrap_codec
from ashl.errors import UsageError
from ashl.learn.learner import Learner
from ashl.optimizer.contract import Optimizer
from ashl.outer.average import Average
from ashl.overlap.contract import Delayed, Overlap
from ashl.overlap.dear import DeAR
from ashl.overlap.merged import Merged
from ashl.overlap.none import Serial
from ashl.overlap.priority import Priority
from ashl.overlap.slices import Slices
from ashl.overlap.streaming import Fragmented
from ashl.overlap.tictac import TicTac
from ashl.overlap.timeline import (
    Bucket,
    CompressedTimeline,
    StepTimeline,
    untimed_timeline,
)
from ashl.overlap.wfbp import WFBP
from ashl.plan.plan import Plan, Spec, StagePlan
from ashl.plan.profile import Profile
from ashl.planning.compatibility import capabilities_of
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
from ashl.stage.contract import DELAY, OVERLAP, Rule, Topology
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import UPDATES, ServerRule


def plan_overlap(
    plan: Plan, parts: Parts, learner: Learner, known: Profile | None, clock: Any
) -> Plan:
    """Return the plan with the messages of each stage that overlaps, and notes on their effect.

    Args: `known` is the profile or None; `clock` is the cluster whose costs are used.
    Raises: UsageError.
    """
    if any(
        own.sync.per_layer_group or not own.overlap.serial or own.overlap.fragments > 1
        for own in parts.stages
    ):
        plan = with_measured_readiness(replace(plan, work=plan.work or learner.work()), known)
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        if isinstance(own.overlap, Delayed):
            check_delayed(stage, own, own.overlap, plan.choices)
            text = (
                f"overlap={plan.choices['overlap']} changes what is learned: a round takes as long"
                " as the longer of its steps and its exchange, and an update is applied one round"
                " late"
            )
            if own.overlap.fragments:
                text = describe_fragments(plan, stage, own.overlap)
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, text))))
    stages = list(plan.stages)
    notes = list(plan.notes)
    for index, own in enumerate(parts.stages):
        if not own.overlap.serial:
            stages[index], text = plan_buckets(plan, plan.stages[index], own, known, clock)
            notes += text
    return replace(plan, stages=tuple(stages), notes=tuple(dict.fromkeys(notes)))


def plan_buckets(
    plan: Plan, stage: StagePlan, own: StageParts, known: Profile | None, clock: Any
) -> tuple[StagePlan, list[str]]:
    """Return a stage with the messages of its gradients, and a note on the duration of its steps.

    Raises: UsageError.
    """
    groups, layout = layer_groups(plan), layout_of(plan.layers)
    check_buckets(stage, own, plan.choices, layout)
    link = None
    if own.overlap.compresses and not own.compression.traits.lossless:
        link = partial(link_of, own.compression, layout)
    if own.topology.has_server and isinstance(clock, Cluster) and clock.exchange_s is not None:
        raise UsageError(
            f"overlap={plan.choices['overlap']}: no effect with cluster.exchange_s, where no NIC is"
            " ever busy; set cluster.exchange_s=null with cluster.bandwidth_mbit_s and"
            " cluster.latency_s"
        )
    timeline = make_timeline(
        stage, clock, groups, link, own.topology.has_server, own.topology.algorithm
    )
    check_timing(plan.choices["overlap"], own.overlap, timeline, known)
    planned = own.overlap.with_plan(timeline or untimed_timeline(groups))
    stage = replace(stage, overlap=overlap_spec(stage.overlap, planned))
    if timeline is None:
        return stage, []
    return stage, [describe_step_times(timeline, planned, own.topology, groups, clock)]


def check_timing(
    name: str, overlap: Overlap, timeline: StepTimeline | None, known: Profile | None
) -> None:
    """Refuse an overlap that is planned by costs which are not known.

    Raises: UsageError.
    """
    if not overlap.timed:
        return
    if timeline is None:
        raise UsageError(
            f"overlap={name}: compares the costs of messages and steps, and the cluster does not"
            " declare them; take profile=FILE of `ashl profile`, declare cluster.step_s,"
            f" cluster.bandwidth_mbit_s and cluster.latency_s, or take overlap.{overlap.untimed}"
        )
    if known is not None and not known.group_bytes:
        raise UsageError(
            f"overlap={name}: needs costs by layer group, and a profile that a run has measured for"
            " itself has none; profile again with `ashl profile`, or take"
            f" overlap.{overlap.untimed}"
        )


def why_whole_update(option: Codec, layout: Layout) -> tuple[str, str] | None:
    """Return why a codec needs an update in one message, and an alternative; None if it does
    not.
    """
    codec = innermost(wrap_codec(option, layout))
    codec = codec.codec if isinstance(codec, Layerwise) else codec
    if isinstance(codec, Collective):
        return "has a protocol over all workers' whole updates", "compression=topk"
    if codec.traits.reduces:
        return "merges the payloads of whole updates at once", "compression=topk"
    if not codec.decodes_alone or type(codec).encode is not Codec.encode:
        return "keeps state for the whole update", "compression=topk"
    if option.clip_norm is not None:
        return "clips by the norm of the whole gradient", "compression.clip_norm=null"
    if option.critical_ratio is not None:
        return (
            "measures the change of gradients on the whole update",
            "compression.critical_ratio=null",
        )
    return None


def overlap_spec(spec: Spec, option: Overlap) -> Spec:
    """Return the spec of an overlap option with its planned messages."""
    return {"_target_": spec["_target_"], **asdict(option)}  # ty: ignore[invalid-argument-type]


def describe_step_times(
    timeline: StepTimeline,
    chosen: Overlap,
    topology: Topology,
    groups: Sequence[Bucket],
    cluster: Cluster,
) -> str:
    """Return a note on the duration of a step and its exchange, by this overlap and by others."""
    names = ("none", "wfbp", "merged greedy", "merged optimal")
    if isinstance(timeline, CompressedTimeline):
        names = ("in one", "plan=none", "greedy", "optimal")
    plans = (Serial(), WFBP(), Merged(plan="greedy"), Merged(plan="optimal"))
    options: dict[str, Overlap] = dict(zip(names, plans, strict=True))
    if topology.has_server:
        options["tictac"] = TicTac(plan="tuned")
        options["slices"] = Slices(slice="auto").with_plan(timeline)
    elif timeline.needed_ns and not timeline.slows:
        options["dear"] = DeAR(plan="tuned")
    if topology.has_server or "dear" in options:
        options["priority"] = Priority(plan="tuned", slice="auto", credit="auto").with_plan(
            timeline
        )
    times = ", ".join(
        f"{name} {option.step_ns(timeline) / 1e6:.4g}" for name, option in options.items()
    )
    buckets = chosen.plan_buckets(timeline)
    count = len(buckets)
    what = "a step, its push and its pull" if topology.has_server else "a step and its all-reduce"
    sent = f"{count} message{'s' * (count > 1)}"
    least = "at least " * (chosen.overlaps_next_forward and timeline.slows)
    text = f"{what} take {least}{chosen.step_ns(timeline) / 1e6:.4g} ms in {sent} (ms: {times})"
    densities = [f"{100 * bucket.ratio:.3g}" for bucket in buckets if bucket.ratio is not None]
    if densities:
        text += f", with densities of {', '.join(densities)} %"
    if timeline.lost or timeline.slowed > 1:
        slower = f"{100 * timeline.lost:.2g} % slower"
        text += f"; during an all-reduce a worker computes {slower}, as measured"
    if timeline.in_parts:
        more = (
            f"{timeline.split_ns / 1e6:.3g} + {(timeline.part_ns + timeline.start_ns) / 1e6:.3g}"
            " for each message"
        )
        text += f"; several messages cost {more} ms more, as measured"
    if cluster.exchange_s is not None:
        text += (
            "; cluster.exchange_s has no latency, so merging gains nothing: set bandwidth and"
            " latency to compare"
        )
    return text


# A flat list of cases, each with its reason and alternative, reads better in one piece.
def check_delayed(  # noqa: C901
    stage: StagePlan, own: StageParts, overlap: Delayed, choices: Mapping[str, str]
) -> None:
    """Refuse a delayed exchange that the stage does not support.

    Raises: UsageError.
    """
    n = len(stage.workers)
    if DELAY not in own.topology.supports:
        why, instead = (
            "the topology has no delayed exchange",
            "topology=all_reduce or topology=parameter_server",
        )
    elif type(own.sync).loop is not Rule.loop:
        why, instead = "a profiling stage exchanges no updates", "another sync mode"
    elif isinstance(own.sync, ServerRule) and own.sync.messages() is not UPDATES:
        why, instead = (
            "each of its messages depends on the reply to the one before",
            "sync=bsp",
        )
    elif DELAY not in capabilities_of(own.topology, own.sync):
        why, instead = "its messages cannot be applied one round late", "sync=local_sgd"
    elif round_depends_on_merge(own):
        why, instead = (
            "a merge decides the length of the next round, which has begun by then",
            "topology=parameter_server",
        )
    elif type(own.optimizer).statistics is not Optimizer.statistics:
        why, instead = (
            "each sweep of the optimizer needs the model of the one before",
            "optimizer=sgd",
        )
    elif overlap.needs_steps and own.sync.exchange != "difference":
        why, instead = (
            "it needs local steps, and gradients are exchanged",
            "sync=local_sgd, or overlap=delayed",
        )
    elif overlap.steps_ahead and not own.sync.in_rounds:
        why, instead = (
            "it needs the updates of all workers in one merge",
            "sync=local_sgd, or overlap=delayed",
        )
    elif overlap.steps_ahead and not own.outer.linear:
        why, instead = (
            f"outer={choices['outer']} is not linear, so its steps on parts of an update do not add"
            " up",
            "outer=nesterov",
        )
    elif own.aggregate.staleness_discount is not None and (
        overlap.steps_ahead or not own.topology.has_server
    ):
        why, instead = (
            "all updates have the same staleness, and aggregate.staleness_discount needs"
            " differences",
            "aggregate.scale instead",
        )
    elif (
        overlap.fragments
        and own.topology.has_server
        and not (own.sync.in_rounds and own.sync.quorum(n) == n)
    ):
        why, instead = (
            "a server steps on a fragment after all workers have pushed it",
            "sync=local_sgd, or overlap=delayed",
        )
    elif overlap.share is not None and not own.compression.traits.lossless:
        why, instead = "its random elements are a compression already", "compression=none"
    elif overlap.share is not None and not isinstance(own.outer, Average):
        why, instead = (
            "momentum does not fit elements that change with each exchange",
            "outer=average",
        )
    else:
        return
    raise UsageError(
        f"overlap={choices['overlap']}: not supported in stage {stage.name}, {why}; take {instead}"
    )


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


def merges_slices(own: StageParts) -> bool:
    """Return True if a server merges each slice by itself."""
    return own.overlap.by_slice or (own.topology.has_server and isinstance(own.overlap, Priority))


def round_depends_on_merge(own: StageParts) -> bool:
    """Return True if under all-reduce a merge decides the next round."""
    return not own.topology.has_server and isinstance(own.sync, StepRule) and own.sync.changes


def merges_all_workers(own: StageParts, workers: int) -> bool:
    """Return True if a merge has all workers, and its sum and step work element by element."""
    whole = own.sync.in_rounds and own.sync.quorum(workers) == workers
    return whole and type(own.sync).step is Rule.step and type(own.aggregate).fold is Weighted.fold


# A flat list of cases, each with its reason and alternative, reads better in one piece.
def check_buckets(  # noqa: C901
    stage: StagePlan, own: StageParts, choices: Mapping[str, str], layout: Layout
) -> None:
    """Refuse bucketed gradients that the stage does not support.

    Raises: UsageError.
    """
    name = f"overlap={choices['overlap']}"
    if OVERLAP not in own.topology.supports:
        why, instead = (
            "its workers exchange no gradients",
            "topology=all_reduce or parameter_server, and sync=bsp",
        )
    elif type(own.sync).loop is not Rule.loop:
        why, instead = "a profiling stage exchanges no updates", "another sync mode"
    elif own.sync.exchange != "gradient":
        why, instead = (
            "local steps give one update, after the last step",
            "sync=bsp",
        )
    elif own.topology.has_server and (
        own.overlap.compresses or own.overlap.reduce_scatter_all_gather
    ):
        why, instead = (
            "a server merges whole pushes",
            "topology=all_reduce, or overlap=priority",
        )
    elif own.overlap.pulls and not own.topology.has_server:
        why, instead = (
            "there is no server to pull from",
            "topology=parameter_server, or overlap=priority",
        )
    elif merges_slices(own) and not merges_all_workers(own, len(stage.workers)):
        why, instead = (
            "a slice is merged after all workers have pushed it, by one sum and one step",
            "sync=bsp",
        )
    elif (
        isinstance(own.sync, ServerRule)
        and own.topology.has_server
        and own.sync.messages() is not UPDATES
    ):
        why, instead = "it has its own messages", "sync=bsp"
    elif OVERLAP not in capabilities_of(own.topology, own.sync):
        why, instead = "it does not exchange the plain gradient", "sync=bsp"
    elif not own.compression.traits.lossless and not own.overlap.compresses:
        why, instead = "the codec encodes the whole update", "compression=none, overlap=layerwise"
    elif not own.compression.traits.lossless and (
        found := why_whole_update(own.compression, layout)
    ):
        why, instead = f"compression={choices['compression']} {found[0]}", found[1]
    elif own.sync.estimator or type(own.optimizer).statistics is not Optimizer.statistics:
        why, instead = (
            "it does not exchange the gradient of one backward pass",
            "sync=bsp optimizer=sgd",
        )
    elif own.overlap.overlaps_next_forward and round_depends_on_merge(own):
        why, instead = (
            "a merge decides the next batch sizes, and the next step has begun by then",
            "overlap=wfbp",
        )
    elif own.aggregate.clip_norm is not None:
        why, instead = "clipping needs the norm of the whole gradient", "aggregate.clip_norm=null"
    elif (
        merges_slices(own) or (own.overlap.overlaps_next_forward and not own.overlap.pulls)
    ) and not own.optimizer.elementwise:
        why, instead = (
            "it needs an optimizer that steps element by element",
            "optimizer=sgd",
        )
    elif own.overlap.ratio is not None and own.compression.ratio is None:
        why, instead = (
            "overlap.ratio is a density, and this compression has none",
            "overlap.ratio=null",
        )
    else:
        return
    raise UsageError(
        f"{name}: not supported in stage {stage.name}, {why}; take {instead}, or overlap=none"
    )
