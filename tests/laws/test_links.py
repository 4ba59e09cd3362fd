"""A link keeps what its codec keeps, and nothing else does; what a codec may say is declared,
misspelt or not.
"""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ashl.compression.contract import (
    Codec,
    EncodeContext,
    Linear,
    OuterCodec,
    Traits,
)
from ashl.compression.payload import HEADER, Parts
from ashl.compression.wrappers import (
    ErrorFeedback,
    WrappedCodec,
    with_steps,
    wrap_codec,
)
from ashl.errors import UsageError
from ashl.option import option, refuse_wrong_hooks
from ashl.planning.compatibility import check_codec_roles
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.laws.codecs import codec, vector

D = 200
# what a wrapper has not: fields of the option, which `wrap_codec` reads, and the option's other
# forms
OWN = {
    "needs",  # planning asks the option
    "add", "decode",  # by `content`
    "beta", "clip_norm", "code", "critical_ratio", "error_feedback", "feedback_decay", "feedback_gain",
    "for_layout", "for_pulls", "masking", "momentum", "pack", "parts", "per_layer", "unpack", "warmup_epochs",
}  # fmt: skip


def test_a_dropped_message_leaves_nothing_behind() -> None:
    link, ends, x = (
        CompressionPipeline(wrap_codec(codec("topk", ratio=0.1), ()), D),
        CodecState(),
        vector("normal", D),
    )
    link.restore_dropped(ends, link.encode(ends, x, EncodeContext()))
    assert torch.equal(link.residual(ends), x)


def test_wrappers_delegate_all_of_the_contract() -> None:
    public = {name for name in dir(Codec) if not name.startswith("_")}
    overridden = {name for base in (OuterCodec, WrappedCodec) for name in vars(base)}
    assert public - overridden == OWN
    inner = codec("diana", estimator="svrg")
    assert with_steps(inner, ErrorFeedback()).estimator == "svrg"
    assert with_steps(codec("topk", ratio=0.3), ErrorFeedback()).ratio == 0.3


@option
class Misspelt(Codec):
    """Undoes nothing."""

    trait: ClassVar[Any] = None
    code: ClassVar[int] = 201


@option
class MisspeltSum(Linear):
    """Misspells a hook of a base class of its own kind."""

    with_sumand: ClassVar[Any] = None


@pytest.mark.parametrize(
    ("cls", "why"),
    [(Misspelt, "did you mean 'traits'"), (MisspeltSum, "did you mean 'with_summand'")],
)
def test_a_misspelt_hook_is_an_error(cls: type[Codec], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        refuse_wrong_hooks(cls, "compression")


class Promising(Codec):
    """Promises what it has no methods for."""

    traits = Traits(reduces=True)


class Hiding(Codec):
    """Has a method that nobody would ask it for."""

    def summand(self, body: Tensor) -> Tensor:
        return body


@pytest.mark.parametrize(("own", "role"), [(Promising(), "Reduces"), (Hiding(), "Linear")])
def test_what_comes_with_methods_derives_from_its_class(own: Codec, role: str) -> None:
    with pytest.raises(UsageError, match=f"derive {type(own).__name__} from .*{role}"):
        check_codec_roles("compression=mine", own)


class Half(Codec):
    """Two bytes an element."""

    code: ClassVar[int] = 200
    said = 2

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        return Parts(len(x), x.half())

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + self.said * d


@pytest.mark.parametrize("code", [0, 127, 256])
def test_a_codec_of_ones_own_has_a_number_of_its_own(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads of a codec without a code, or with one of ashl's, were taken for another codec's."""
    check_codec_roles("compression=mine", Half())
    monkeypatch.setattr(Half, "code", code)
    with pytest.raises(UsageError, match=f"wire code is {code}, .* give Half a .* from 128 to 255"):
        check_codec_roles("compression=mine", Half())


def test_a_codec_writes_as_many_bytes_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    link = CompressionPipeline(Half(), D)
    assert link.encode(CodecState(), torch.ones(D), EncodeContext()).nbytes == 20 + 2 * D
    monkeypatch.setattr(Half, "said", 3)
    with pytest.raises(
        UsageError, match=f"Half wrote 420 bytes for {D} elements, but encoded_nbytes says 620;"
    ):
        link.encode(CodecState(), torch.ones(D), EncodeContext())
    monkeypatch.setattr(Half, "traits", Traits(variable=True))
    link = CompressionPipeline(Half(), D)
    assert link.encode(CodecState(), torch.ones(D), EncodeContext()).nbytes == 420
    monkeypatch.setattr(Half, "said", 1)
    with pytest.raises(UsageError, match="encoded_nbytes says at most 220"):
        link.encode(CodecState(), torch.ones(D), EncodeContext())
