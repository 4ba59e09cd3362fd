"""Build the codec of a link from the option.

Wrappers from the inside out: separate layers, error feedback or momentum correction, running mean,
density schedule, clipping.
"""

from ashl.compression.contract import Codec, Layout, State
from ashl.compression.wrappers.clip import Clipped
from ashl.compression.wrappers.feedback import Feedback, Residual
from ashl.compression.wrappers.layers import Layerwise
from ashl.compression.wrappers.momentum import MomentumCorrection, Velocity
from ashl.compression.wrappers.ratio import Accordion, Regime, WarmUp
from ashl.compression.wrappers.running_mean import Average, RunningMean
from ashl.errors import UsageError


def wrap_codec(option: Codec, layout: Layout) -> Codec:
    """Return the codec of a worker's link: `codec_for_layers` inside the wrappers of the option.

    Raises: UsageError if error feedback or momentum correction is not supported for the codec.
    """
    codec = codec_for_layers(option, layout)
    if option.momentum is not None:
        codec = MomentumCorrection(codec, option.momentum, option.masking)
    elif option.error_feedback:
        codec = Feedback(codec, option.feedback_gain, option.feedback_decay)
    keeps = isinstance(codec, Feedback | MomentumCorrection)
    if keeps and not (codec.traits.contraction or codec.traits.drains):
        key, fix = ("error_feedback=true", "set compression.error_feedback=false")
        if isinstance(codec, MomentumCorrection):
            key, fix = (
                f"momentum={option.momentum:g}",
                "set compression.momentum=null, and optimizer.momentum instead",
            )
        raise UsageError(
            f"compression.{key}: needs a codec whose error never exceeds the update, and the error"
            f" of compression={type(option).__module__.rpartition('.')[2]} may exceed it with"
            f" these settings; {fix}"
        )
    if option.beta is not None:
        codec = RunningMean(codec, option.beta)
    if option.warmup_epochs:
        codec = WarmUp(codec, option.warmup_epochs)
    if option.critical_ratio is not None:
        codec = Accordion(codec, option.critical_ratio)
    if option.clip_norm is not None:
        codec = Clipped(codec, option.clip_norm)
    return codec


def codec_for_layers(option: Codec, layout: Layout) -> Codec:
    """Return the codec without wrappers, as pulls and gossip use it, for the layers of a model."""
    codec = option.for_layout(layout)
    return Layerwise(codec, tuple(layer.size for layer in layout)) if codec.per_layer else codec


def convert_sender(sender: State, codec: Codec) -> State:
    """Return the sender's state with which a stage with another codec begins.

    It is the residual or the velocity, if that codec can use it, else None.
    """
    while isinstance(sender, Regime | Average):
        sender = sender.inner
    if isinstance(sender, Residual | Velocity):
        return codec.import_state(sender._replace(inner=None))
    return None
