"""Which combinations of compression make sense: the others are refused, or noted, in words.

Source: what is refused are the traps that Xu et al., "GRACE", ICDCS 2021, and the papers of the methods name.
"""

from collections.abc import Mapping
from typing import Any

from ashl.aggregate.fednova import FedNova
from ashl.aggregate.weighted import Weighted
from ashl.compression.around.wrapped import wrapped
from ashl.compression.around.wrapper import innermost
from ashl.compression.around.wrappers import Wrappers
from ashl.compression.base.code import Code
from ashl.compression.base.count_sketch import CountSketch
from ashl.compression.contract import Codec, Collective, Layout, Linear, Reduces, size_of
from ashl.compression.fetch_sgd import FetchSGD
from ashl.compression.sign import Sign
from ashl.compression.terngrad import TernGrad
from ashl.compression.wire.entropy_code import check_code
from ashl.errors import UsageError
from ashl.optimizer.contract import Optimizer
from ashl.optimizer.sgd import SGD
from ashl.plan.plan import Plan
from ashl.planning.build import Parts
from ashl.stage.stage import PULLS, Rule, Topology
from ashl.topology.parameter_server import UPDATES, ServerRule

OWN_CODES = range(128, 256)  # on the wire: those of codecs that are not of this package
MUCH, MOST = 0.8, 0.7  # momentum, and a lost share of an update, that together overshoot


def check_compression(
    parts: Mapping[str, Any],
    choices: Mapping[str, str],
    layout: Layout,
    num_workers: int,
) -> list[str]:
    """What is legal and worth knowing, a sentence each. Raises UsageError for what makes no sense."""
    option, topology, sync = parts["compression"], parts["topology"], parts["sync"]
    name = f"compression={choices['compression']}"
    check_signs(name, option, parts["optimizer"])
    codec = wrapped(option, layout)
    if codec.flags.lossless:
        return []
    check_roles(name, innermost(codec))
    check_wrappers(name, option, parts["optimizer"], layout)
    check_code(option.entropy)
    if sync is not None:
        check_exchange(name, option, sync, choices["sync"], parts["optimizer"])
    elif codec.estimator != "minibatch" or codec.flags.full_gradient:
        raise UsageError(
            f"{name} is about gradients at one model, and the stages of schedule={choices['schedule']} exchange "
            "differences between models; take schedule=single sync=bsp"
        )
    if codec.flags.reduces:
        check_aggregate(name, parts["aggregate"], choices["aggregate"])
    if isinstance(option, CountSketch):
        check_sketch(name, option, topology, parts["optimizer"])
    if isinstance(option, TernGrad) and option.shared_scale and choices["topology"] != "all_reduce":
        raise UsageError(
            f"{name} with compression.shared_scale=true is an agreement of all workers before each sum; take "
            "topology=all_reduce, or compression.shared_scale=false"
        )
    pulled = option.pulled()
    if (
        topology.has_server
        and topology.pull_ratio is not None
        and not (isinstance(pulled, Code) and pulled.flags.contraction and not pulled.flags.reduces)
    ):
        raise UsageError(
            f"topology.pull_ratio makes no sense with {name}: a pull needs a codec without memory that never enlarges "
            "what it is given, as compression=topk; drop topology.pull_ratio, or take another compression"
        )
    d = size_of(layout)
    if topology.has_server and topology.pull_ratio is not None:
        check_share("topology.pull_ratio", topology.pull_ratio, d)
    if topology.replicas and not (isinstance(option, Code) and tends_to_nothing(option, d)):
        raise UsageError(
            f"{name} makes no sense with topology={choices['topology']}: replicas of neighbours need a codec without "
            "memory that never enlarges what it is given; take one, as compression=topk"
        )
    alone = option.critical_ratio is not None  # each worker decides how much it sends
    if alone and codec.flags.linear and choices["topology"] == "all_reduce":
        raise UsageError(
            f"{name} is summed on its way, for which all must send as much, and with compression.critical_ratio each "
            "worker decides for itself; drop it, or take topology=parameter_server"
        )
    return notes(name, option, codec, parts, d, num_workers)


def check_roles(name: str, codec: Codec) -> None:
    """What comes with methods of its own is asked of those alone that derive from its class."""
    if isinstance(codec, Code) and not type(codec).__module__.startswith("ashl.") and codec.code not in OWN_CODES:
        raise UsageError(
            f"{name} writes bodies with code = {codec.code}; give {type(codec).__name__} a `code: ClassVar[int]` from "
            f"{OWN_CODES[0]} to {OWN_CODES[-1]}, its number on the wire"
        )
    for role, promised in {Reduces: codec.flags.reduces, Linear: codec.flags.linear, Collective: False}.items():
        asked = {key for key in vars(role) if not key.startswith("_")}
        if not isinstance(codec, role) and (promised or asked & set(dir(codec))):
            raise UsageError(
                f"{name} does what a {role.__name__} does, and is none; derive {type(codec).__name__} from "
                f"ashl.compression.contract.{role.__name__}"
            )


def tends_to_nothing(option: Codec, d: int) -> bool:
    """Whether differences that are sent again and again shrink."""
    flags = option.flags
    return not flags.scale_free and (flags.contraction or flags.drains or option.bound(None, d) < 1)


def check_wrappers(name: str, option: Codec, optimizer: Optimizer, layout: Layout) -> None:
    """Momentum in two places, and shares of less than one element."""
    if option.momentum is not None:
        if momentum := optimizer.momentum:
            raise UsageError(
                f"compression.momentum={option.momentum:g} is momentum correction, and optimizer.momentum="
                f"{momentum:g} would count every velocity twice; set optimizer.momentum=0"
            )
        if option.feedback and not (option.flags.contraction or option.flags.drains):
            raise UsageError(f"{name} enlarges what it is given, so nothing may be kept; drop compression.momentum")
    d = size_of(layout)
    ratio, critical = option.ratio, option.critical_ratio
    for key, share in {"ratio": ratio, "critical_ratio": critical}.items():
        if share is not None:
            check_share(f"compression.{key}", share, d)
    if critical is not None and ratio is not None and critical < ratio:
        raise UsageError(
            f"compression.critical_ratio={critical:g} is what is kept while gradients change fast, and must be no less "
            f"than compression.ratio={ratio:g}, which is kept while they do not; take the one for the other"
        )


def check_share(key: str, share: float, d: int) -> None:
    if share * d < 1:
        raise UsageError(f"{key}={share:g} keeps less than one of the model's {d} elements; take at least 1/{d}")


def plain(optimizer: Optimizer) -> bool:
    """Whether a step is lr · gradient, but for weight decay."""
    return isinstance(optimizer, SGD) and not optimizer.momentum


def check_exchange(name: str, codec: Codec, sync: Rule, sync_name: str, optimizer: Optimizer) -> None:
    """Whether what this sync mode exchanges is what the codec is for."""
    gradients = "sync=bsp" + (", or compression.scale=mean" if isinstance(codec, Sign) else "")
    if codec.flags.scale_free and sync.exchange != "gradient":
        raise UsageError(
            f"{name} forgets how long an update is, so that it is for gradients, and sync={sync_name} exchanges "
            f"differences between models; take {gradients}"
        )
    estimator = codec.estimator
    curved = codec.flags.full_gradient and not plain(optimizer)
    if (codec.flags.full_gradient or estimator != "minibatch") and sync.exchange != "gradient":
        raise UsageError(
            f"{name} is about gradients at one model, and sync={sync_name} exchanges differences between models; take "
            f"sync=bsp{' optimizer=sgd optimizer.momentum=0' if curved else ''}"
        )
    if curved:
        raise UsageError(
            f"{name} compares what has changed with how far plain gradient descent has moved the model; take "
            "optimizer=sgd optimizer.momentum=0"
        )
    if estimator == "full" and sync.resizes:
        raise UsageError(
            f"{name} with compression.estimator=full takes all samples of a worker at once, which leaves sync="
            f"{sync_name} no batches to size; take sync=bsp, or compression.estimator=minibatch"
        )


def check_signs(name: str, option: Codec, optimizer: Optimizer) -> None:
    """Signs without a scale have none to keep apart, and a vote has no use for one."""
    if isinstance(option, Sign) and option.vote == "majority" and option.scale != "none":
        fix = "compression.scale=none" + (" compression.feedback=false" if option.feedback else "")
        raise UsageError(f"{name} with compression.vote=majority applies a sign; set {fix}")
    if isinstance(option, Sign) and option.scale == "none" and option.layers:
        raise UsageError(
            f"{name} with compression.scale=none is the same for each layer and for all; drop compression.layers"
        )
    if option.beta is not None:
        for key, momentum in (("compression", option.momentum), ("optimizer", optimizer.momentum)):
            if momentum:
                raise UsageError(
                    f"{name} with compression.beta={option.beta:g} sends a momentum, and {key}.momentum="
                    f"{momentum:g} would count every velocity twice; take one of them"
                )


def check_sketch(name: str, option: CountSketch, topology: Topology, optimizer: Optimizer) -> None:
    """What is recovered of a sum of sketches, only those know who have the sum."""
    if topology.has_server and (option.feedback or option.momentum is not None):
        raise UsageError(
            f"{name} keeps at a worker what was not recovered, and a parameter server does not tell what that was; "
            "take topology=all_reduce, compression=fetch_sgd, or compression.feedback=false and no compression.momentum"
        )
    if topology.replicas:
        raise UsageError(
            f"{name} makes no sense with replicas of neighbours: what it recovers of one vector may be larger than the "
            "vector; take compression=topk, or topology=all_reduce"
        )
    momentum = optimizer.momentum
    if isinstance(option, FetchSGD) and option.decay and momentum:
        raise UsageError(
            f"{name} keeps the momentum in the sketch (compression.decay={option.decay:g}), and optimizer.momentum="
            f"{momentum:g} would count every velocity twice; set optimizer.momentum=0"
        )


def check_aggregate(name: str, aggregate: Weighted, aggregate_name: str) -> None:
    """Bodies that are merged together leave nothing to do to each of them."""
    if isinstance(aggregate, FedNova):
        raise UsageError(
            f"{name} merges all bodies at once, and aggregate={aggregate_name} weighs each by itself; take "
            "aggregate=mean"
        )
    if aggregate.discount is not None:
        raise UsageError(f"{name} merges all bodies at once, so aggregate.discount has none to act on; drop it")


def dense_pulls(plan: Plan, parts: Parts) -> tuple[str, ...]:
    """Name `topology.pull_ratio` where pushes are compressed and pulls, which could be, are not."""
    d = plan.num_params
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        topology, codec, sync = own.topology, own.compression, own.sync
        plain = isinstance(sync, ServerRule) and sync.messages() is UPDATES
        if not plain or codec.flags.lossless or PULLS not in topology.carries or topology.pull_ratio is not None:
            continue
        sent = max(worker.message_bytes or 0 for worker in stage.workers)
        pulled = codec.pulled()
        if sent < 4 * d and isinstance(pulled, Code) and pulled.flags.contraction and not pulled.flags.reduces:
            return (
                f"pushes are compressed and pulls are not ({4 * d / 1e6:.3g} MB each); topology.pull_ratio=0.1 "
                "compresses pulls, too",
            )
    return ()


def notes(name: str, option: Codec, codec: Codec, parts: Mapping[str, Any], d: int, num_workers: int) -> list[str]:
    """What is legal and worth knowing."""
    found = []
    topology, sync, momentum = parts["topology"], parts["sync"], parts["optimizer"].momentum
    keeps = not isinstance(option, Wrappers) or option.feedback or option.momentum is not None
    if isinstance(option, Code) and not option.flags.unbiased and not keeps and not option.flags.reduces:
        found.append(
            f"{name} without compression.feedback=true is biased: what it leaves out is lost, and training may stand "
            "still"
        )
    if codec.flags.full_gradient and codec.estimator == "minibatch":
        found.append(
            f"{name} with compression.estimator=minibatch takes the noise of gradients for change: hardly anything is "
            "ever left out"
        )
    ratio, after = option.ratio, sync is not None and sync.exchange == "gradient"
    if after and option.feedback and momentum >= MUCH and codec.bound(ratio, d) > MOST:
        found.append(
            f"{name} keeps most of an update for later, which optimizer.momentum={momentum:g} carries on once more: "
            "training may overshoot; optimizer.momentum=0 with a larger optimizer.lr, or compression.momentum, may help"
        )
    if topology.has_server and not codec.flags.variable and codec.payload(ratio, d) >= 4 * d:
        found.append(
            f"{name} shortens nothing here: {codec.payload(ratio, d) / 1e6:.3g} MB a push, as without compression"
        )
    if not topology.has_server and not codec.flags.linear and not isinstance(innermost(codec), Collective):
        each = codec.payload(ratio, d) * (num_workers - 1)
        ring = 2 * (num_workers - 1) / num_workers * 4 * d
        if each >= ring:
            most = "up to " if codec.flags.variable else ""
            found.append(
                f"{name} does not add up on its way, so its bodies are gathered: {most}{each / 1e6:.3g} MB a round, "
                f"where summing without compression moves {ring / 1e6:.3g} MB"
            )
    return found
