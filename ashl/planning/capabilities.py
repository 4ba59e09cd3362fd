"""Find options that do not work together, and name the alternatives.

An option declares in `needs` what it needs from the other options of its stage. A row of
`CAPABILITIES` tells which options give it. `find_conflicts` compares the two. An alternative is
another option with which `find_conflicts` finds less.

Source: Xu et al., "GRACE", ICDCS 2021, and the papers of the methods name the incompatibilities of
compression.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from ashl.aggregate.fednova import FedNova
from ashl.aggregate.weighted import Weighted
from ashl.cluster.spec import Cluster
from ashl.compression.contract import Codec, Collective, Layout, size_of
from ashl.compression.wrappers import Layerwise, inner_codec, wrap_codec
from ashl.config.catalog import catalog, defaults, values
from ashl.config.construct import as_typed
from ashl.errors import UsageError
from ashl.model.mlp import MLP
from ashl.optimizer.adam import Adam
from ashl.optimizer.contract import Optimizer
from ashl.optimizer.sgd import SGD
from ashl.outer.average import Average
from ashl.outer.contract import Outer
from ashl.overlap.contract import Overlap
from ashl.plan.plan import WorkerPlan
from ashl.planner.assignment import Planner
from ashl.planning.instantiate import OptionFactory
from ashl.stage.contract import (
    CODEC,
    DELAY,
    OUTER,
    OVERLAP,
    PULLS,
    STATISTICS,
    WEIGHTS,
    Rule,
    Topology,
)
from ashl.task.classification import Classification
from ashl.task.regression import Regression
from ashl.topology.all_reduce import AllReduce, StepRule
from ashl.topology.halos import Halos
from ashl.topology.parameter_server import ServerRule
from ashl.topology.sharded_server import ShardedServer

# alternatives that a message names before others
COMMON_OPTIONS = (
    "bsp",
    "local_sgd",
    "asp",
    "parameter_server",
    "all_reduce",
    "d_psgd",
    "ripples_smart",
    "none",
    "topk",
    "sgd",
    "mean",
    "samples",
)
# groups of which a run may take the default instead
OPTIONAL = ("topology", "aggregate", "outer", "compression", "overlap")
MAX_ALTERNATIVES = 2  # alternatives of one group in a message


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options that have to work together: those of one stage, and those of the run.

    `sync` is None before a schedule has set the sync mode of each stage. `planner` is None in a
    stage without a planned H. `num_workers` and `layout` are None before they are known.
    """

    sync: Rule | None
    topology: Topology
    aggregate: Weighted
    outer: Outer
    compression: Codec
    overlap: Overlap
    optimizer: Optimizer
    planner: Planner | None
    model: Any
    task: Any
    cluster: Any
    gradients: bool
    num_workers: int | None
    layout: Layout | None
    names: Mapping[str, str]  # names of the options, by group
    scheduled: bool  # True if a schedule sets the sync mode

    def name(self, group: str) -> str:
        return f"{group}={self.names[group]}"


class Capability(NamedTuple):
    """A need of an option: a noun, the groups whose options provide it, and a condition.

    `fix` has settings that give it.
    """

    noun: str
    groups: tuple[str, ...]
    is_given: Callable[[Any], bool]  # takes a Choice
    fix: str = ""


class Conflict(NamedTuple):
    """An option that needs a capability which the others do not give, or a key of this option."""

    group: str
    key: str  # "" = the option itself
    capability: str


def supports(choice: Choice, capability: str) -> bool:
    """Return True if the exchange of this topology and sync mode has a capability."""
    return capability in capabilities_of(choice.topology, choice.sync)


def capabilities_of(topology: Topology, sync: Rule | None) -> frozenset[str]:
    """Return the capabilities of the sync mode if it defines some, as one with its own messages
    does; else those of the topology.
    """
    return topology.supports if sync is None or sync.supports is None else sync.supports


def has_plain_messages(sync: Any) -> bool:
    """Return True if workers send updates and receive the model, if they exchange with a server."""
    return not isinstance(sync, ServerRule) or not sync.own_messages


def is_adam(optimizer: Optimizer) -> bool:
    """Return True if the optimizer applies Adam to every parameter."""
    return isinstance(optimizer, Adam) and optimizer.elementwise


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return True if a step is lr · gradient, except for weight decay."""
    return isinstance(optimizer, SGD) and not optimizer.momentum


def weighs_by_samples(aggregate: Weighted) -> bool:
    """Return True if the weight of a worker is in proportion to its samples."""
    one = WorkerPlan(
        local_steps=1, batch=1, data_share=0.5, compression_ratio=1.0, predicted_cycle_s=None
    )
    few, many = aggregate.weigh([one, replace(one, batch=3)])
    return many == 3 * few


def merges_all_workers(choice: Any) -> bool:
    """Return True if a merge has all workers."""
    n = choice.num_workers
    return choice.sync.in_rounds and (n is None or choice.sync.quorum(n) == n)


def merges_slices(choice: Any) -> bool:
    """Return True if a merge of all workers is one sum and one step, element by element."""
    plain = type(choice.sync).step is Rule.step and type(choice.aggregate).fold is Weighted.fold
    return merges_all_workers(choice) and plain


def decides_next_round(choice: Any) -> bool:
    """Return True if under all-reduce a merge decides the next round."""
    sync = choice.sync
    return not choice.topology.has_server and isinstance(sync, StepRule) and sync.changes


def has_one_server(choice: Any) -> bool:
    """Return True if one server receives all pushes; a single region has one."""
    topology = choice.topology
    if isinstance(topology, Halos):
        return len(topology.members(choice.cluster.node)) == 1
    return not isinstance(topology, ShardedServer)


def merges_by_region(choice: Any) -> bool:
    """Return True if the server of each region can merge updates as they arrive."""
    sync = choice.sync
    if not isinstance(sync, ServerRule) or has_one_server(choice):
        return True
    waits = sync.in_rounds or type(sync).closes_s is not ServerRule.closes_s
    return not waits and type(sync).loop is Rule.loop and not sync.own_messages


def merges_by_shard(choice: Any) -> bool:
    """Return True if a server can merge the updates of its shard by itself."""
    sync = choice.sync
    own = type(sync).loop is Rule.loop and type(sync).step is Rule.step
    plain = isinstance(sync, ServerRule) and has_plain_messages(sync) and not sync.takes_all
    return own and plain


def counts_shards_alike(choice: Any) -> bool:
    """Return True if no worker waits for another one to make pushes that a server may drop.

    Each server of a sharded model drops pushes by its own order of merges. With a bound on leads,
    workers that one server counts as slow would then wait for workers that another one does.
    """
    sync = choice.sync
    if choice.topology.servers == 1 or not isinstance(sync, ServerRule) or sync.in_rounds:
        return True
    return type(sync).may_proceed is ServerRule.may_proceed


def shrinks_differences(codec: Codec, layout: Layout | None) -> bool:
    """Return True if repeated encoding of the remaining difference makes it tend to zero."""
    traits = codec.traits
    if traits.lossless:
        return True
    if not codec.decodes_alone or traits.scale_free:
        return False
    if traits.contraction or traits.drains or layout is None:
        return True
    return codec.bound(None, size_of(layout)) < 1


def encodes_by_message(choice: Any) -> bool:
    """Return True if the codec can encode a part of an update by itself."""
    option = choice.compression
    if option.traits.lossless or choice.layout is None:
        return True
    codec = inner_codec(wrap_codec(option, choice.layout))
    codec = codec.codec if isinstance(codec, Layerwise) else codec
    stateless = codec.decodes_alone and type(codec).encode is Codec.encode
    whole = isinstance(codec, Collective) or codec.traits.reduces or option.clip_norm is not None
    return stateless and not whole and option.critical_ratio is None


def pushes_single_updates(choice: Any) -> bool:
    """Return True if a server receives whole updates of single workers."""
    received = choice.topology.has_server and not isinstance(choice.topology, Halos)
    whole = not choice.compression.traits.reduces and not choice.overlap.fragments
    plain = isinstance(choice.sync, ServerRule) and has_plain_messages(choice.sync)
    updates = choice.sync.exchange == "difference" and not choice.sync.momentum_travels
    return received and whole and plain and updates and choice.gradients


# groups that give what depends on the exchange
EXCHANGE = ("sync", "topology")

CAPABILITIES: dict[str, Capability] = {
    "loop": Capability(
        "its pattern of messages",
        ("topology",),
        lambda c: isinstance(c.sync, c.topology.policy_type),
    ),
    CODEC: Capability("compressed updates", EXCHANGE, lambda c: supports(c, CODEC)),
    WEIGHTS: Capability(
        "a weighted merge of updates",
        EXCHANGE,
        lambda c: supports(c, WEIGHTS),
    ),
    PULLS: Capability("compressed pulls", ("topology",), lambda c: PULLS in c.topology.supports),
    OUTER: Capability(
        "merged updates, not gradients",
        EXCHANGE,
        lambda c: supports(c, OUTER) and c.sync.exchange == "difference",
    ),
    STATISTICS: Capability(
        "an all-reduce over all workers at every step",
        EXCHANGE,
        lambda c: (
            supports(c, STATISTICS)
            and isinstance(c.sync, StepRule)
            and c.sync.exchange == "gradient"
        ),
        "sync=bsp topology=all_reduce",
    ),
    OVERLAP: Capability(
        "gradients in several messages",
        EXCHANGE,
        lambda c: supports(c, OVERLAP) and c.sync.estimator is None,
    ),
    DELAY: Capability(
        "exchanges that are applied one round late",
        EXCHANGE,
        lambda c: supports(c, DELAY),
    ),
    "gradients": Capability(
        "an exchange of gradients", ("sync",), lambda c: c.sync.exchange == "gradient"
    ),
    "differences": Capability(
        "an exchange of updates of the model, not of gradients",
        ("sync",),
        lambda c: c.sync.exchange == "difference",
    ),
    "own_loop": Capability(
        "an exchange of updates, not only of measurements",
        ("sync",),
        lambda c: type(c.sync).loop is Rule.loop,
    ),
    "plain_messages": Capability(
        "messages that are plain updates and models",
        ("sync",),
        lambda c: not c.topology.has_server or has_plain_messages(c.sync),
    ),
    "rounds": Capability("synchronous rounds", ("sync",), lambda c: c.sync.in_rounds),
    "fixed_rounds": Capability(
        "rounds that no merge decides, as the next round begins before the merge",
        EXCHANGE,
        lambda c: not decides_next_round(c),
    ),
    "fixed_batches": Capability("constant batch sizes", ("sync",), lambda c: not c.sync.resizes),
    "merges_of_slices": Capability(
        "a server that merges all workers by one sum and one step",
        ("sync", "aggregate"),
        lambda c: not c.topology.has_server or merges_slices(c),
    ),
    "merges_of_fragments": Capability(
        "merges of all workers at the server",
        ("sync",),
        lambda c: not c.topology.has_server or merges_all_workers(c),
    ),
    "merges_by_region": Capability(
        "a sync mode that merges plain updates as they arrive", ("sync",), merges_by_region
    ),
    "merges_by_shard": Capability(
        "a sync mode without a loop, messages or a step of its own", ("sync",), merges_by_shard
    ),
    "common_drops": Capability(
        "a sync mode without a bound on leads, as each server drops stale pushes by itself",
        EXCHANGE,
        counts_shards_alike,
    ),
    "single_updates": Capability(
        "whole updates of single workers at one server",
        ("sync", "topology", "compression", "overlap"),
        pushes_single_updates,
    ),
    "server": Capability("a server", ("topology",), lambda c: c.topology.has_server),
    "no_server": Capability(
        "sums without a server", ("topology",), lambda c: not c.topology.has_server
    ),
    "all_reduce": Capability(
        "an all-reduce", ("topology",), lambda c: isinstance(c.topology, AllReduce)
    ),
    "own_densities": Capability(
        "an exchange where each worker may choose its density",
        ("topology",),
        lambda c: not (c.compression.traits.linear and isinstance(c.topology, AllReduce)),
    ),
    "one_model": Capability(
        "one model of all workers", ("topology",), lambda c: not c.topology.replicas
    ),
    "lossless": Capability(
        "uncompressed updates", ("compression",), lambda c: c.compression.traits.lossless
    ),
    "unbiased": Capability(
        "an unbiased codec", ("compression",), lambda c: c.compression.traits.unbiased
    ),
    "shrinking_codec": Capability(
        "a codec that is a contraction without state",
        ("compression",),
        lambda c: shrinks_differences(c.compression, c.layout),
    ),
    "pull_codec": Capability(
        "a codec that is a contraction without state",
        ("compression",),
        lambda c: c.compression.traits.lossless or can_encode_pulls(c.compression),
    ),
    "codec_by_message": Capability(
        "a codec that encodes each message by itself, without state, clipping or changing density",
        ("compression",),
        encodes_by_message,
    ),
    "density": Capability(
        "a density of the codec", ("compression",), lambda c: c.compression.ratio is not None
    ),
    "no_scale": Capability(
        "signs without a scale",
        ("compression",),
        lambda c: c.compression.scale == "none",
        "compression.scale=none compression.error_feedback=false",
    ),
    "scale": Capability(
        "a scale per layer",
        ("compression",),
        lambda c: c.compression.scale != "none",
        "compression.scale=mean",
    ),
    "no_codec_momentum": Capability(
        "a codec without momentum, as momentum would be applied twice",
        ("compression",),
        lambda c: not c.compression.momentum,
        "compression.momentum=null",
    ),
    "no_momentum": Capability(
        "an optimizer without momentum, as momentum would be applied twice",
        ("optimizer",),
        lambda c: not c.optimizer.momentum,
        "optimizer.momentum=0",
    ),
    "momentum": Capability(
        "SGD with momentum",
        ("optimizer",),
        lambda c: isinstance(c.optimizer, SGD) and c.optimizer.momentum,
        "optimizer=sgd optimizer.momentum=0.9",
    ),
    "steps_of_sgd": Capability(
        "steps of SGD without momentum",
        ("optimizer",),
        lambda c: is_plain_sgd(c.optimizer),
        "optimizer=sgd optimizer.momentum=0",
    ),
    "plain_steps": Capability(
        "steps of SGD without momentum and weight decay",
        ("optimizer",),
        lambda c: is_plain_sgd(c.optimizer) and not c.optimizer.weight_decay,
        "optimizer=sgd optimizer.momentum=0 optimizer.weight_decay=0",
    ),
    "adam": Capability("Adam", ("optimizer",), lambda c: is_adam(c.optimizer)),
    "gradient_steps": Capability(
        "an optimizer that steps on gradients",
        ("optimizer",),
        lambda c: type(c.optimizer).statistics is Optimizer.statistics,
    ),
    "elementwise": Capability(
        "an optimizer that steps element by element",
        ("optimizer", "sync"),
        lambda c: c.sync.exchange != "gradient" or c.optimizer.elementwise,
    ),
    "elementwise_outer": Capability(
        "an outer optimizer that steps element by element",
        ("outer",),
        lambda c: type(c.outer).for_layers is Outer.for_layers,
    ),
    "linear_outer": Capability(
        "an outer optimizer whose steps on parts of an update add up",
        ("outer",),
        lambda c: c.outer.linear,
    ),
    "average": Capability(
        "an outer optimizer without momentum", ("outer",), lambda c: isinstance(c.outer, Average)
    ),
    "sample_weights": Capability(
        "weights in proportion to the samples",
        ("aggregate",),
        lambda c: weighs_by_samples(c.aggregate),
    ),
    "plain_mean": Capability(
        "the plain mean over samples",
        ("aggregate",),
        lambda c: not c.aggregate.needs and weighs_by_samples(c.aggregate),
        "aggregate=mean with its defaults",
    ),
    "joint_weights": Capability(
        "weights that do not differ by payload, as all payloads are decoded together",
        ("aggregate",),
        lambda c: not isinstance(c.aggregate, FedNova) and c.aggregate.staleness_discount is None,
        "aggregate=mean aggregate.staleness_discount=null",
    ),
    "even_staleness": Capability(
        "weights without a staleness discount, as all updates have the same staleness",
        ("aggregate",),
        lambda c: (
            c.aggregate.staleness_discount is None
            or (c.topology.has_server and "linear_outer" not in c.overlap.needs)
        ),
        "aggregate.staleness_discount=null",
    ),
    "no_clipping": Capability(
        "updates without clipping, which needs the norm of the whole gradient",
        ("aggregate",),
        lambda c: c.aggregate.clip_norm is None,
        "aggregate.clip_norm=null",
    ),
    "mlp": Capability(
        "a multi-layer perceptron", ("model",), lambda c: isinstance(c.model, MLP), "model=mlp"
    ),
    "closed_form": Capability(
        "classification or regression",
        ("task",),
        lambda c: isinstance(c.task, Classification | Regression),
        "task=classification",
    ),
    "fixed_plan": Capability(
        "a planner that does not replan, as no server receives whole pushes",
        ("planner",),
        lambda c: not (c.planner and c.planner.replans) or has_one_server(c),
    ),
    "nics": Capability(
        "NICs that can be busy",
        ("cluster",),
        lambda c: not isinstance(c.cluster, Cluster) or c.cluster.exchange_s is None,
        "cluster.exchange_s=null with cluster.bandwidth_mbit_s and cluster.latency_s",
    ),
    "no_nodes": Capability(
        "workers without a placement on nodes",
        ("cluster",),
        lambda c: not isinstance(c.cluster, Cluster) or c.cluster.node is None,
        "cluster.node=null",
    ),
}
# groups of the options that find_conflicts asks, in this order
ASKING_GROUPS = (
    "sync",
    "topology",
    "optimizer",
    "aggregate",
    "outer",
    "compression",
    "overlap",
    "planner",
)


def can_encode_pulls(option: Codec) -> bool:
    """Return True if the codec of pulls is a contraction without state."""
    pulled = option.for_pulls()
    traits = pulled.traits
    return pulled.decodes_alone and traits.contraction and not (traits.reduces or traits.lossless)


def find_conflicts(choice: Choice) -> list[Conflict]:
    """Return what the options need from each other and do not get.

    Capabilities that depend on the sync mode are not judged before it is known.
    """
    found = list[Conflict]()
    for group in ASKING_GROUPS:
        option = getattr(choice, group)
        for name, key in option.needs.items() if option is not None else ():
            capability = CAPABILITIES.get(name)
            if capability is None:
                raise UsageError(
                    f"{choice.name(group)}: its `needs` has {name!r}, which is no capability; take"
                    f" one of {', '.join(CAPABILITIES)}"
                )
            unknown = choice.sync is None and "sync" in capability.groups
            if not unknown and not capability.is_given(choice):
                found.append(Conflict(group, key, name))
    return found


def check_choice(choice: Choice, stage: str = "") -> None:
    """Refuse options that do not work together.

    Raises: UsageError, which names the stage if there are several.
    """
    if found := find_conflicts(choice):
        raise UsageError(f"{f'stage {stage}: ' if stage else ''}{explain(choice, found[0])}")


def explain(choice: Choice, conflict: Conflict) -> str:
    """Return a conflict as a sentence with the alternatives."""
    group, key, name = conflict
    capability, asking = CAPABILITIES[name], choice.name(group)
    if key:
        asking = f"{group}.{key}={as_typed(getattr(getattr(choice, group), key))}"
    by_group = {
        provider: alternatives(choice, conflict, provider) for provider in capability.groups
    }
    provider = next(
        (provider for provider, named in by_group.items() if named), capability.groups[0]
    )
    fixes = [capability.fix] if capability.fix else by_group[provider][:MAX_ALTERNATIVES]
    if not key and group in OPTIONAL and works_with(choice, group, defaults()[group]):
        fixes.append(f"{group}={defaults()[group]}")
    if choice.scheduled and provider == "sync":
        fixes = [f"schedule=single {fix}" if fix.startswith("sync=") else fix for fix in fixes]
    if not key:
        fixes = fixes or [f"another {provider} or {group}"]
    *others, last = fixes or [""]
    do = [f"take {', '.join(others)} or {last}" if others else f"take {last}"] if fixes else []
    do += [f"remove {group}.{key}"] if key else []
    return (
        f"{asking}: needs {capability.noun}, and {choice.name(provider)} does not provide it;"
        f" {', or '.join(do)}"
    )


def alternatives(choice: Choice, conflict: Conflict, group: str) -> list[str]:
    """Return the options of a group with which nothing conflicts: the usual ones, else all."""
    if group == "cluster" or (group == conflict.group and not conflict.key):
        return []
    names = [name for name in catalog().get(group, ()) if works_with(choice, group, name)]
    usual = sorted((name for name in names if name in COMMON_OPTIONS), key=COMMON_OPTIONS.index)
    with_defaults = " with its defaults"
    return [
        f"{group}={name}{with_defaults if name == choice.names[group] else ''}"
        for name in usual or names
    ]


def works_with(choice: Choice, group: str, name: str) -> bool:
    """Return True if no options conflict once the group has this option, with its defaults."""
    option = option_of(group, name)
    if option is None:
        return False
    try:
        return not find_conflicts(replace(choice, **{group: option}))
    except UsageError:  # it also needs a key that has no value here
        return False


@cache
def option_of(group: str, name: str) -> Any:
    """Return an option with its defaults; None if one of its values has no default."""
    try:
        return OptionFactory(()).get_option(group, values(catalog()[group][name]))
    except UsageError:
        return None
