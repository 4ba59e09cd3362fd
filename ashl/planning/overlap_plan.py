"""The messages of a plan's gradients, planned from what its cluster declares or what was measured
of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ashl.aggregate.weighted import Weighted
from ashl.cluster.spec import Cluster
from ashl.compression.common.code import Code
from ashl.compression.contract import Codec, Collective, Layout
from ashl.compression.wrappers.compose import wrap_codec
from ashl.compression.wrappers.layers import Layerwise
from ashl.compression.wrappers.wrapper import innermost
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
    merge_buckets,
    untimed_timeline,
)
from ashl.overlap.wfbp import WFBP
from ashl.plan.plan import Plan, Spec, StagePlan
from ashl.plan.profile import Profile
from ashl.planning.compatibility import capabilities_of
from ashl.planning.instantiate import Parts, StageParts, balanced, layer_groups, layout_of, link_of
from ashl.planning.layer_group_costs import with_measured_readiness
from ashl.planning.step_timelines import make_timeline
from ashl.stage.stage import DELAY, OVERLAP, Rule, Topology
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import UPDATES, ServerRule


def plan_overlap(
    plan: Plan, parts: Parts, learner: Learner, known: Profile | None, clock: Any
) -> Plan:
    """The plan with the messages of each stage that overlaps, and what they bring as a note;
    `known` is the profile and `clock` the cluster that say what they cost. Raises UsageError.
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
                " as the longer of its steps and its exchange, and what is exchanged lands one"
                " round late"
            )
            if own.overlap.fragments:
                text = describe_fragments(plan, stage, own.overlap)
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, text))))
    groups, layout = layer_groups(plan), layout_of(plan.layers)
    stages, notes = list(plan.stages), list(plan.notes)
    for index, own in enumerate(parts.stages):
        if own.overlap.serial:
            continue
        check_buckets(plan.stages[index], own, plan.choices, layout)
        link = None
        if own.overlap.compresses and not own.compression.traits.lossless:
            link = partial(link_of, own.compression, layout)
        if own.topology.has_server and isinstance(clock, Cluster) and clock.exchange_s is not None:
            raise UsageError(
                f"overlap={plan.choices['overlap']} lets the slices of a push queue at the worker's"
                " port, and with cluster.exchange_s no port is ever busy; give"
                " cluster.exchange_s=null with cluster.bandwidth_mbit_s and cluster.latency_s"
            )
        timeline = make_timeline(
            plan.stages[index], clock, groups, link, own.topology.has_server, own.topology.algorithm
        )
        if timeline is None and own.overlap.timed:
            raise UsageError(
                f"overlap={plan.choices['overlap']} as it is set weighs the cost of a message"
                " against that of a step, and the cluster does not declare them; take profile=FILE"
                " of `ashl profile`, declare cluster.step_s, cluster.bandwidth_mbit_s and"
                f" cluster.latency_s, or take overlap.{own.overlap.untimed}"
            )
        if own.overlap.timed and known is not None and not known.group_bytes:
            raise UsageError(
                f"overlap={plan.choices['overlap']} as it is set needs costs by layer group, and"
                " this profile, which a run has measured for itself, has none; profile again with"
                f" `ashl profile`, or take overlap.{own.overlap.untimed}"
            )
        planned = own.overlap.with_plan(timeline or untimed_timeline(groups))
        stages[index] = replace(stages[index], overlap=overlap_spec(stages[index].overlap, planned))
        if timeline is not None:
            notes.append(describe_step_times(timeline, planned, own.topology, groups, clock))
    return replace(plan, stages=tuple(stages), notes=tuple(dict.fromkeys(notes)))


def why_whole_update(option: Codec, layout: Layout) -> tuple[str, str] | None:
    """Why a codec needs an update in one piece, and what to take instead; None where it
    does not.
    """
    codec = innermost(wrap_codec(option, layout))
    codec = codec.codec if isinstance(codec, Layerwise) else codec
    if isinstance(codec, Collective):
        return "has a protocol over all workers' whole updates", "compression=topk"
    if codec.traits.reduces:
        return "merges the bodies of whole updates at once", "compression=topk"
    if not isinstance(codec, Code) or type(codec).encode is not Code.encode:
        return "keeps a state of its own for the whole update", "compression=topk"
    if option.clip_norm is not None:
        return "clips, which takes the norm of the whole gradient", "compression.clip_norm=null"
    if option.critical_ratio is not None:
        return (
            "judges by the whole update how fast gradients change",
            "compression.critical_ratio=null",
        )
    return None


def overlap_spec(spec: Spec, option: Overlap) -> Spec:
    """The option as a plan has it."""
    return {"_target_": spec["_target_"], **asdict(option)}  # ty: ignore[invalid-argument-type]


def describe_step_times(
    timeline: StepTimeline,
    chosen: Overlap,
    topology: Topology,
    groups: Sequence[Bucket],
    cluster: Cluster,
) -> str:
    """How long a step and its exchange take, in words."""
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
    count = sum(
        len(chosen.cuts(message)) for message in merge_buckets(groups, chosen.messages(timeline))
    )
    what = "a step, its push and its pull" if topology.has_server else "a step and its sum"
    sent = f"{count} message{'s' * (count > 1)}"
    least = "at least " * (chosen.overlaps_next_forward and timeline.slows)
    text = f"{what} take {least}{chosen.step_ns(timeline) / 1e6:.4g} ms in {sent} (ms: {times})"
    if chosen.shares:
        text += (
            f", of which {', '.join(f'{100 * share:.3g}' for share in chosen.shares)} % are kept"
        )
    if timeline.lost or timeline.slowed > 1:
        text += f"; while it sums a worker computes {100 * timeline.lost:.2g} % slower, as measured"
    if timeline.in_parts:
        more = (
            f"{timeline.split_ns / 1e6:.3g} + {(timeline.part_ns + timeline.start_ns) / 1e6:.3g}"
            " for each message"
        )
        text += f"; a gradient in parts costs {more} ms more, as measured"
    if cluster.exchange_s is not None:
        text += (
            "; cluster.exchange_s has no latency, so merging gains nothing: give bandwidth and"
            " latency to compare"
        )
    return text


def check_delayed(
    stage: StagePlan, own: StageParts, overlap: Delayed, choices: Mapping[str, str]
) -> None:
    """Refuse what leaves nothing to compute while something is exchanged. Raises UsageError."""
    n = len(stage.workers)
    if DELAY not in own.topology.supports:
        why, instead = (
            "its workers meet in another way",
            "topology=all_reduce or topology=parameter_server",
        )
    elif type(own.sync).loop is not Rule.loop:
        why, instead = "it measures, and exchanges nothing to learn from", "another sync mode"
    elif isinstance(own.sync, ServerRule) and own.sync.messages() is not UPDATES:
        why, instead = (
            "it has messages of its own, which need the answer to the last ones",
            "sync=bsp",
        )
    elif DELAY not in capabilities_of(own.topology, own.sync):
        why, instead = "what it exchanges is no update that could land later", "sync=local_sgd"
    elif round_depends_on_merge(own):
        why, instead = (
            "its rounds change, and the next one is begun before",
            "topology=parameter_server",
        )
    elif type(own.optimizer).statistics is not Optimizer.statistics:
        why, instead = "its sweeps need the model that the last one made", "optimizer=sgd"
    elif overlap.needs_steps and own.sync.exchange != "difference":
        why, instead = (
            "it is made for local steps, and gradients are exchanged",
            "sync=local_sgd, or overlap=delayed",
        )
    elif overlap.steps_ahead and not own.sync.in_rounds:
        why, instead = (
            "updates that come one at a time are no parts of one step",
            "sync=local_sgd, or overlap=delayed",
        )
    elif overlap.steps_ahead and not own.outer.linear:
        why, instead = (
            f"steps of outer={choices['outer']} on parts of an update do not add up",
            "outer=nesterov",
        )
    elif own.aggregate.staleness_discount is not None and (
        overlap.steps_ahead or not own.topology.has_server
    ):
        why, instead = (
            "all are equally late, and aggregate.staleness_discount needs differences",
            "aggregate.scale instead",
        )
    elif (
        overlap.fragments
        and own.topology.has_server
        and not (own.sync.in_rounds and own.sync.quorum(n) == n)
    ):
        why, instead = (
            "a server steps on a fragment once it has come from all",
            "sync=local_sgd, or overlap=delayed",
        )
    elif overlap.share is not None and not own.compression.traits.lossless:
        why, instead = "the elements that it draws are its compression", "compression=none"
    elif overlap.share is not None and not isinstance(own.outer, Average):
        why, instead = (
            "elements are drawn anew each time, and momentum would be of others",
            "outer=average",
        )
    else:
        return
    raise UsageError(
        f"overlap={choices['overlap']} is not supported in stage {stage.name}: {why}; take"
        f" {instead}"
    )


def describe_fragments(plan: Plan, stage: StagePlan, overlap: Delayed) -> str:
    """How large fragments are and how often each is exchanged, in words. Raises UsageError."""
    count, groups, name = overlap.fragments, layer_groups(plan), plan.choices["overlap"]
    if count > len(groups):
        raise UsageError(
            f"overlap.fragments={count} is more than the {len(groups)} layer groups that the model"
            f" has; take at most {len(groups)}"
        )
    if len(plan.stages) > 1:
        raise UsageError(
            f"overlap={name} would lose at the end of stage {stage.name} what workers have not"
            " exchanged yet; take schedule=single"
        )
    steps = [worker.local_steps for worker in stage.workers]
    if isinstance(overlap, Fragmented) and overlap.delay >= min(steps):
        raise UsageError(
            f"overlap.delay={overlap.delay} leaves no step after an exchange has landed, of"
            f" {min(steps)} from one to the next; take overlap.delay={min(steps) - 1}, or more"
            " sync.local_steps"
        )
    if overlap.share is not None:
        return (
            f"overlap={name} changes what is learned: {overlap.share:.3g} of the elements, drawn"
            " anew each time, are averaged beside the steps"
        )
    sizes = [4e-6 * sum(stop - start for start, stop in runs) for runs in balanced(groups, count)]
    every = " to ".join(map(str, sorted({count * h for h in (min(steps), max(steps))})))
    return (
        f"overlap={name} changes what is learned: of {count} fragments ({min(sizes):.3g} to"
        f" {max(sizes):.3g} MB) one is exchanged at a time, each every {every} steps"
    )


def merges_slices(own: StageParts) -> bool:
    """Whether a server merges each slice by itself."""
    return own.overlap.by_slice or (own.topology.has_server and isinstance(own.overlap, Priority))


def round_depends_on_merge(own: StageParts) -> bool:
    """Whether under all-reduce a merge says what the next round is."""
    return not own.topology.has_server and isinstance(own.sync, StepRule) and own.sync.changes


def merges_all_workers(own: StageParts, workers: int) -> bool:
    """Whether a merge is of all workers, by a sum and a step that go element by element."""
    whole = own.sync.in_rounds and own.sync.quorum(workers) == workers
    return whole and type(own.sync).step is Rule.step and type(own.aggregate).fold is Weighted.fold


def check_buckets(
    stage: StagePlan, own: StageParts, choices: Mapping[str, str], layout: Layout
) -> None:
    """Refuse what leaves no gradient to send in parts. Raises UsageError."""
    name = f"overlap={choices['overlap']}"
    if OVERLAP not in own.topology.supports:
        why, instead = (
            "its workers exchange no gradients",
            "topology=all_reduce or parameter_server, and sync=bsp",
        )
    elif type(own.sync).loop is not Rule.loop:
        why, instead = "it measures, and exchanges nothing to learn from", "another sync mode"
    elif own.sync.exchange != "gradient":
        why, instead = (
            "local steps make one update, and only after the last is there anything to send",
            "sync=bsp",
        )
    elif own.topology.has_server and (
        own.overlap.compresses or own.overlap.reduce_scatter_all_gather
    ):
        why, instead = (
            "a server takes and merges a push as a whole",
            "topology=all_reduce, or overlap=priority",
        )
    elif own.overlap.pulls and not own.topology.has_server:
        why, instead = (
            "there is no server to pull from",
            "topology=parameter_server, or overlap=priority",
        )
    elif merges_slices(own) and not merges_all_workers(own, len(stage.workers)):
        why, instead = (
            "a slice is merged once it has come from all, by a sum and one step",
            "sync=bsp",
        )
    elif (
        isinstance(own.sync, ServerRule)
        and own.topology.has_server
        and own.sync.messages() is not UPDATES
    ):
        why, instead = "it has messages of its own", "sync=bsp"
    elif OVERLAP not in capabilities_of(own.topology, own.sync):
        why, instead = "what it exchanges is not the gradient as it is", "sync=bsp"
    elif not own.compression.traits.lossless and not own.overlap.compresses:
        why, instead = "a codec sees the whole update", "compression=none, overlap=layerwise"
    elif not own.compression.traits.lossless and (
        found := why_whole_update(own.compression, layout)
    ):
        why, instead = f"compression={choices['compression']} {found[0]}", found[1]
    elif own.sync.estimator or type(own.optimizer).statistics is not Optimizer.statistics:
        why, instead = (
            "what is exchanged there is no gradient of one backward pass",
            "sync=bsp optimizer=sgd",
        )
    elif own.overlap.overlaps_next_forward and round_depends_on_merge(own):
        why, instead = "its batches change, and the next step is begun before", "overlap=wfbp"
    elif own.aggregate.clip_norm is not None:
        why, instead = "clipping needs the norm of the whole gradient", "aggregate.clip_norm=null"
    elif (
        merges_slices(own) or (own.overlap.overlaps_next_forward and not own.overlap.pulls)
    ) and not own.optimizer.elementwise:
        why, instead = (
            "the optimizer steps on one layer group at a time, and does not say elementwise",
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
        f"{name} is not supported in stage {stage.name}: {why}; take {instead}, or overlap=none"
    )
