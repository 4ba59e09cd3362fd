"""The messages of a plan's gradients, planned from what its cluster declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Speed
from ashl.errors import UsageError
from ashl.learn.learner import Learner
from ashl.optimizer.contract import Optimizer
from ashl.overlap.chain import Chain, Part, bare
from ashl.overlap.contract import Delayed, Overlap
from ashl.overlap.merged import greedy, optimal
from ashl.plan.plan import Plan, Spec, StagePlan
from ashl.planning.build import Parts, StageParts, layer_groups
from ashl.planning.predict import Uncontended
from ashl.stage.rule import DELAY, OVERLAP, Rule
from ashl.topology.parameter_server import UPDATES, ServerRule


def overlapped(plan: Plan, parts: Parts, learner: Learner) -> Plan:
    """The plan with the messages of each stage that overlaps, and what they bring as a note. Raises UsageError."""
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        if isinstance(own.overlap, Delayed):
            check_delayed(stage, own, own.overlap, plan.choices)
            said = (
                f"overlap={plan.choices['overlap']} changes what is learned: a round takes as long as the longer of "
                "its steps and its exchange, and what is exchanged lands one round late"
            )
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, said))))
    if all(own.overlap.serial for own in parts.stages):
        return plan
    plan = replace(plan, work=plan.work or learner.work())
    groups = layer_groups(plan)
    stages, notes = list(plan.stages), list(plan.notes)
    for index, own in enumerate(parts.stages):
        if own.overlap.serial:
            continue
        check(plan.stages[index], own, plan.choices)
        chain = chain_of(plan.stages[index], parts.cluster, groups)
        if chain is None and own.overlap.timed:
            raise UsageError(
                "overlap.plan=greedy and optimal weigh the cost of a message against that of a step, and the cluster "
                "does not declare them; give cluster.step_s, cluster.bandwidth_mbit_s and cluster.latency_s, or take "
                "overlap.plan=bytes"
            )
        planned = own.overlap.planned(chain or bare(groups))
        stages[index] = replace(stages[index], overlap=spec_of(stages[index].overlap, planned))
        if chain is not None:
            notes.append(worth(chain, planned, parts.cluster))
    return replace(plan, stages=tuple(stages), notes=tuple(dict.fromkeys(notes)))


def spec_of(spec: Spec, option: Overlap) -> Spec:
    """The option as a plan has it."""
    return {"_target_": spec["_target_"], **asdict(option)}  # ty: ignore[invalid-argument-type]


def chain_of(stage: StagePlan, cluster: Any, groups: Sequence[Part]) -> Chain | None:
    """A step of the slowest worker, and what sums over all cost; None where that is not declared."""
    if not isinstance(cluster, Cluster) or cluster.missing():
        return None
    steady = replace(cluster, jitter=0.0, events=())
    batch, team = stage.workers[0].batch, tuple(range(len(stage.workers)))
    speed = Speed(steady, batch, seed=0)
    step_ns = max(speed.cost_ns(rank, "compute", stage.workers[rank].batch, 0) or 0 for rank in team)
    costs = Uncontended(network(steady, 4 * groups[0].stop))
    return Chain(
        ready_ns=tuple(round(step_ns * group.ready) for group in groups),
        nbytes=bare(groups).nbytes,
        cost_ns=lambda nbytes: costs.all_reduce_ns(team, nbytes, 0),
    )


def worth(chain: Chain, chosen: Overlap, cluster: Cluster) -> str:
    """How long a step and its exchange take, in words."""
    n = len(chain.ready_ns)
    plans = {"none": (n,), "wfbp": (1,) * n, "merged greedy": greedy(chain), "merged optimal": optimal(chain)}
    times = ", ".join(f"{name} {chain.end_ns(plan) / 1e6:.4g}" for name, plan in plans.items())
    own = chosen.messages(chain)
    said = f"a step and its sum take {chain.end_ns(own) / 1e6:.4g} ms in {len(own)} messages (ms: {times})"
    if cluster.exchange_s is not None:
        said += "; cluster.exchange_s has no latency, so merging gains nothing: give bandwidth and latency to compare"
    return said


def check_delayed(stage: StagePlan, own: StageParts, overlap: Delayed, choices: Mapping[str, str]) -> None:
    """Refuse what leaves nothing to compute while something is exchanged. Raises UsageError."""
    if DELAY not in own.topology.carries:
        why, instead = "its workers meet in another way", "topology=all_reduce or topology=parameter_server"
    elif type(own.sync).loop is not Rule.loop:
        why, instead = "it has a loop of its own", "schedule=single"
    elif isinstance(own.sync, ServerRule) and own.sync.messages() is not UPDATES:
        why, instead = "it has messages of its own, which need the answer to the last ones", "sync=bsp"
    elif type(own.optimizer).statistics is not Optimizer.statistics:
        why, instead = "its sweeps need the model that the last one made", "optimizer=sgd"
    elif overlap.needs_steps and own.sync.exchange != "difference":
        why, instead = "it is made for local steps, and gradients are exchanged", "sync=local_sgd, or overlap=late"
    else:
        return
    raise UsageError(f"overlap={choices['overlap']} makes no sense in stage {stage.name}: {why}; take {instead}")


def check(stage: StagePlan, own: StageParts, choices: Mapping[str, str]) -> None:
    """Refuse what leaves no gradient to send in parts. Raises UsageError."""
    name = f"overlap={choices['overlap']}"
    if OVERLAP not in own.topology.carries:
        why, instead = "its workers do not sum gradients on their way", "topology=all_reduce sync=bsp"
    elif type(own.sync).loop is not Rule.loop:
        why, instead = "it has a loop of its own", "schedule=single"
    elif own.sync.exchange != "gradient":
        why, instead = "local steps make one update, and only after the last is there anything to send", "sync=bsp"
    elif not own.compression.flags.lossless:
        why, instead = "a codec sees the whole update", "compression=none"
    elif own.sync.estimator or type(own.optimizer).statistics is not Optimizer.statistics:
        why, instead = "what is exchanged there is no gradient of one backward pass", "sync=bsp optimizer=sgd"
    elif own.aggregate.clip_norm is not None:
        why, instead = "clipping needs the norm of the whole gradient", "aggregate.clip_norm=null"
    else:
        return
    raise UsageError(f"{name} makes no sense in stage {stage.name}: {why}; take {instead}, or overlap=none")
