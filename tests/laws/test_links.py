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
    Keeps,
    Linear,
    OuterCodec,
    Traits,
)
from ashl.compression.fetch_sgd import Sketches
from ashl.compression.payload import HEADER, Parts
from ashl.compression.wrappers import (
    ErrorFeedback,
    Residual,
    Sender,
    WrappedCodec,
    with_steps,
    wrap_codec,
)
from ashl.errors import UsageError
from ashl.option import option, refuse_unasked
from ashl.planning.compatibility import check_codec_roles
from ashl.runtime.plain_state import from_plain, to_plain
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.laws.codecs import codec, vector

D = 200
# what a wrapper has not: fields of the option, which `wrap_codec` reads, and the option's other
# forms
OWN = {
    "needs",  # planning asks the option
    "beta", "clip_norm", "code", "critical_ratio", "decodes_alone", "error_feedback", "feedback_decay", "feedback_gain",
    "for_layout", "for_pulls", "masking", "momentum", "pack", "parts", "per_layer", "unpack", "warmup_epochs",
}  # fmt: skip


def test_a_link_resumes_from_a_checkpoint() -> None:
    link = CompressionPipeline(
        wrap_codec(codec("topk", ratio=0.1, momentum=0.9, critical_ratio=0.5), ()), D
    )
    ends = CodecState()
    for k in range(4):
        link.decode(
            ends, k % 2, link.encode(ends, vector("normal", D, k), EncodeContext(round=k, epoch=k))
        )
        link.encode_pull(ends, k % 2, vector("normal", D, k), EncodeContext(0.1))
    again = from_plain(to_plain(ends))
    x, context = vector("normal", D, 9), EncodeContext(round=9, epoch=9)
    assert torch.equal(link.encode(ends, x, context), link.encode(again, x, context))
    assert torch.equal(
        link.encode_pull(ends, 1, x, EncodeContext(0.1)),
        link.encode_pull(again, 1, x, EncodeContext(0.1)),
    )
    assert torch.equal(link.residual(ends), link.residual(again))


def test_a_dropped_message_leaves_nothing_behind() -> None:
    link, ends, x = (
        CompressionPipeline(wrap_codec(codec("topk", ratio=0.1), ()), D),
        CodecState(),
        vector("normal", D),
    )
    link.restore_dropped(ends, link.encode(ends, x, EncodeContext()))
    assert torch.equal(link.residual(ends), x)


def test_what_a_stage_takes_over() -> None:
    """The residual where it is kept, and what workers hold, always."""
    held, residual = {0: torch.ones(D)}, Residual(torch.ones(D))
    ends = CodecState(sender=residual, receivers={0: "state"}, memory="state", held=held)
    plain, feedback = (
        CompressionPipeline(wrap_codec(codec("topk", error_feedback=on), ()), D)
        for on in (False, True)
    )
    keeps, drops = Keeps(), Keeps(residual=False)
    after = CodecState(sender=Sender((residual,)), held=held)
    assert feedback.carry_over(ends, keeps, False, 0.1) == after
    assert (
        plain.carry_over(ends, keeps, False, 0.1)
        == feedback.carry_over(ends, drops, False, 0.1)
        == CodecState(held=held)
    )


def test_what_is_kept_of_a_sum_is_taken_over_in_the_units_of_the_stage() -> None:
    """Residuals of gradients become those of differences by a step at the boundary's rate, and vice
    versa.
    """
    gtopk, fetch = (
        CompressionPipeline(wrap_codec(codec(name), ()), D) for name in ("gtopk", "fetch_sgd")
    )
    left, sketches = (
        torch.full((D,), 2.0),
        Sketches(torch.full((9,), 4.0), torch.full((9,), 2.0), 3),
    )
    of_gradients, of_models = (CodecState(memory=left, gradients=on) for on in (True, False))
    assert torch.equal(gtopk.carry_over(of_models, Keeps(), False, 0.5).memory, left)
    assert torch.equal(gtopk.carry_over(of_gradients, Keeps(), False, 0.5).memory, -0.5 * left)
    assert torch.equal(gtopk.carry_over(of_models, Keeps(), True, 0.5).memory, -2 * left)
    assert gtopk.carry_over(of_models, Keeps(residual=False), False, 0.5).memory is None
    again = from_plain(
        to_plain(fetch.carry_over(CodecState(memory=sketches), Keeps(momentum=False), False, 0.5))
    )
    assert (again.memory.momentum.tolist(), again.memory.error.tolist(), again.memory.seed) == (
        [0.0] * 9,
        [2.0] * 9,
        3,
    )
    assert fetch.carry_over(of_models, Keeps(), False, 0.5).memory is None


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
class Reducing(Codec):
    """A codec that defines how payloads add up."""

    summd: ClassVar[Any] = None


@option
class AllReduceCosts(Linear):
    """Says it in another word."""

    summd: ClassVar[Any] = None


@pytest.mark.parametrize(
    ("cls", "why"), [(Misspelt, "did you mean 'traits'"), (AllReduceCosts, "did you mean 'summed'")]
)
def test_a_misspelt_hook_is_an_error(cls: type[Codec], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        refuse_unasked(cls, "compression")


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


def test_what_is_near_to_nothing_is_a_codecs_own() -> None:
    refuse_unasked(Reducing, "compression")
