"""From the option to the codec of a link: its layers, its schedule, its memory, its clipping, from the inside out."""

from __future__ import annotations

from typing import Any

from ashl.compression.adacomp import AdaComp
from ashl.compression.around.clip import Clipped
from ashl.compression.around.feedback import Feedback, Residual
from ashl.compression.around.layers import Layerwise, Layout
from ashl.compression.around.momentum import MomentumCorrection, Velocity
from ashl.compression.around.ratio import Accordion, Regime, WarmUp
from ashl.compression.around.running_mean import Average, RunningMean
from ashl.compression.around.wrapper import Wrapper, inwards
from ashl.errors import UsageError


def wrapped(option: Any, layout: Layout) -> Any:
    """The codec as a worker's link uses it: `for_layers` with the aids that the option asks for. Raises UsageError."""
    codec = for_layers(option, layout)
    if getattr(option, "momentum", None) is not None:
        codec = MomentumCorrection(codec, option.momentum, option.masking)
    elif getattr(option, "feedback", False):
        codec = Feedback(codec, option.feedback_gain, option.feedback_decay)
    keeps = isinstance(codec, Feedback | MomentumCorrection)
    if keeps and not (codec.flags.contraction or codec.flags.drains):
        key, fix = ("feedback=true", "set compression.feedback=false")
        if isinstance(codec, MomentumCorrection):
            key, fix = f"momentum={option.momentum:g}", "set compression.momentum=null, and optimizer.momentum instead"
        raise UsageError(
            f"compression.{key} keeps what is not sent for later, which needs a codec that never enlarges an update, "
            f"and compression={type(option).__module__.rpartition('.')[2]} as it is set here may; {fix}"
        )
    if getattr(option, "beta", None) is not None:
        codec = RunningMean(codec, option.beta)
    if getattr(option, "warmup_epochs", 0):
        codec = WarmUp(codec, option.warmup_epochs)
    if getattr(option, "critical_ratio", None) is not None:
        codec = Accordion(codec, option.critical_ratio)
    if getattr(option, "clip_norm", None) is not None:
        codec = Clipped(codec, option.clip_norm)
    return codec


def for_layers(option: Any, layout: Layout) -> Any:
    """The codec alone, as a pull and gossip use it: for the model's layers where it treats them as such."""
    codec = option.shaped(layout) if hasattr(option, "shaped") else option
    return Layerwise(codec, tuple(layer.size for layer in layout)) if getattr(codec, "layers", False) else codec


def handed_over(sender: Any, codec: Any) -> Any:
    """What a sender keeps when a stage with another codec begins: its residual, where that codec takes it up."""
    rest = sender
    while rest is not None and not isinstance(rest, Residual | Velocity):
        rest = getattr(rest, "inner", None)
    kinds = {Feedback: Residual, MomentumCorrection: Velocity, AdaComp: Residual}
    keeper = next((kinds[type(part)] for part in inwards(codec) if type(part) in kinds), None)
    if rest is None or type(rest) is not keeper:
        return None
    return within_schedules(rest._replace(inner=None), codec)


def within_schedules(sender: Any, codec: Any) -> Any:
    """A residual as the state of the codec that has been put around its keeper."""
    while isinstance(codec, Wrapper) and not isinstance(codec, Feedback | MomentumCorrection):
        if isinstance(codec, Accordion):
            return Regime(inner=within_schedules(sender, codec.codec))
        if isinstance(codec, RunningMean):
            return Average(inner=sender)
        codec = codec.codec
    return sender
