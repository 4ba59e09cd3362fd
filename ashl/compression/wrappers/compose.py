"""From the option to the codec of a link: its layers, its schedule, its memory, its clipping, from
the inside out.
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
    """The codec as a worker's link uses it: `codec_for_layers` with the wrappers that the option
    asks for. Raises UsageError.
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
            f"compression.{key} adds the compression error to the next update, which needs a codec"
            " whose error never exceeds the update, and"
            f" compression={type(option).__module__.rpartition('.')[2]} as it is set here may;"
            f" {fix}"
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
    """The codec alone, as a pull and gossip use it: for the model's layers where it treats them as
    such.
    """
    codec = option.for_layout(layout)
    return Layerwise(codec, tuple(layer.size for layer in layout)) if codec.per_layer else codec


def convert_sender(sender: State, codec: Codec) -> State:
    """What a sender keeps when a stage with another codec begins: its residual, where that codec
    takes it up.
    """
    while isinstance(sender, Regime | Average):
        sender = sender.inner
    return (
        codec.import_state(sender._replace(inner=None))
        if isinstance(sender, Residual | Velocity)
        else None
    )
