"""Which combinations of compression make sense: the others are refused, or noted, in words.

Source: what is refused are the traps that Xu et al., "GRACE", ICDCS 2021, and the papers of the methods name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ashl.compression.code import Code
from ashl.compression.layers import Layout
from ashl.compression.link import linked
from ashl.errors import UsageError


def check_compression(
    parts: Mapping[str, Any], choices: Mapping[str, str], layout: Layout, num_workers: int
) -> list[str]:
    """What is legal and worth knowing, a sentence each. Raises UsageError for what makes no sense."""
    option, topology, sync = parts["compression"], parts["topology"], parts["sync"]
    name = f"compression={choices['compression']}"
    codec = linked(option, layout)
    if codec.flags.lossless:
        return []
    check_aids(name, option, parts["optimizer"], layout)
    if sync is not None:
        check_exchange(name, codec, sync, choices["sync"])
    if codec.flags.reduces:
        check_aggregate(name, parts["aggregate"], choices["aggregate"])
    if (
        topology.has_server
        and topology.pull_ratio is not None
        and not (isinstance(option, Code) and option.flags.contraction and not option.flags.reduces)
    ):
        raise UsageError(
            f"topology.pull_ratio makes no sense with {name}: a pull needs a codec without memory that never enlarges "
            "what it is given, as compression=topk; drop topology.pull_ratio, or take another compression"
        )
    if getattr(topology, "replicas", False) and not (isinstance(option, Code) and not option.flags.scale_free):
        raise UsageError(
            f"{name} makes no sense with topology={choices['topology']}: replicas of neighbours need a codec without "
            "memory that keeps lengths, as compression=topk"
        )
    return notes(name, option, codec, topology, layout, num_workers)


def check_aids(name: str, option: Any, optimizer: Any, layout: Layout) -> None:
    """Momentum in two places, and shares of less than one element."""
    if getattr(option, "momentum", None) is not None:
        if getattr(optimizer, "momentum", 0):
            raise UsageError(
                f"compression.momentum={option.momentum:g} is momentum correction, and optimizer.momentum="
                f"{optimizer.momentum:g} would count every velocity twice; set optimizer.momentum=0"
            )
        if option.feedback and not option.flags.contraction:
            raise UsageError(f"{name} enlarges what it is given, so nothing may be kept; drop compression.momentum")
    d = sum(layer.size for layer in layout)
    for key in ("ratio", "critical_ratio"):
        share = getattr(option, key, None)
        if share is not None and share * d < 1:
            raise UsageError(
                f"compression.{key}={share:g} keeps less than one of the model's {d} elements; take at least "
                f"{1 / d:.2g}"
            )


def check_exchange(name: str, codec: Any, sync: Any, sync_name: str) -> None:
    """Whether what this sync mode exchanges is what the codec is for."""
    gradients = "sync=bsp" + (", or compression.scale=mean" if hasattr(codec, "scale") else "")
    if codec.flags.scale_free and sync.exchange != "gradient":
        raise UsageError(
            f"{name} forgets how long an update is, so that it is for gradients, and sync={sync_name} exchanges "
            f"differences between models; take {gradients}"
        )
    if codec.flags.full_gradient and sync.exchange != "gradient":
        raise UsageError(
            f"{name} is about gradients over all of a worker's samples, and sync={sync_name} exchanges differences "
            "between models; take sync=bsp"
        )


def check_aggregate(name: str, aggregate: Any, aggregate_name: str) -> None:
    """Bodies that are merged together leave nothing to do to each of them."""
    for key in ("discount", "clip_norm"):
        if getattr(aggregate, key, None) is not None:
            raise UsageError(f"{name} merges all bodies at once, so aggregate.{key} has none to act on; drop it")
    if not hasattr(aggregate, "outer") or aggregate_name == "fednova":
        raise UsageError(
            f"{name} merges all bodies at once, and aggregate={aggregate_name} weighs each by itself; take "
            "aggregate=mean"
        )


def notes(name: str, option: Any, codec: Any, topology: Any, layout: Layout, num_workers: int) -> list[str]:
    """What is legal and worth knowing."""
    found = []
    keeps = getattr(option, "feedback", False) or getattr(option, "momentum", None) is not None
    if isinstance(option, Code) and not option.flags.unbiased and not keeps and not option.flags.reduces:
        found.append(
            f"{name} without compression.feedback=true is biased: what it leaves out is lost, and training may stand "
            "still"
        )
    d = sum(layer.size for layer in layout)
    if not topology.has_server and not codec.flags.linear and not hasattr(codec, "collective"):
        each = codec.payload(getattr(option, "ratio", None), d) * (num_workers - 1)
        ring = 2 * (num_workers - 1) / num_workers * 4 * d
        if each >= ring:
            found.append(
                f"{name} does not add up on its way, so its bodies are gathered: {each / 1e6:.3g} MB a round, where "
                f"summing without compression moves {ring / 1e6:.3g} MB"
            )
    return found
