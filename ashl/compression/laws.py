"""Measure the guarantees of a codec on this machine, in about a second.

Measures: vectors with standard normal and with heavy-tailed elements, d elements in a matrix and a
bias. *Relative error* is the mean of ‖C(x) − x‖²/‖x‖², stated as `bound`. *Bias* is the norm of
mean C(x) − x relative to ‖x‖; chance alone explains √(relative error/draws) of it. *Bits* are bits
per element on the wire, declared and sent. A codec with memory encodes the same vector repeatedly,
and *relative error* is that of its last message.

Source: the laws are those of Beznosikov et al., "On Biased Compression for Distributed Learning",
JMLR 2023.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import Codec, EncodeContext, Layer, Linear, size_of
from ashl.compression.wrappers import codec_for_layers

LAYOUT = (Layer("weight", (64, 48)), Layer("bias", (64,)))
D = size_of(LAYOUT)
DRAWS = 200
CHANCE = 4.0  # standard errors within which a deviation counts as chance


class Law(NamedTuple):
    """One guarantee: stated value, measured value, and whether they agree (None: nothing is
    stated).
    """

    name: str
    stated: str
    measured: str
    passes: bool | None

    @property
    def verdict(self) -> str:
        return "" if self.passes is None else "pass" if self.passes else "FAIL"


def laws(option: Codec) -> list[Law]:
    """Measure and return the laws of an option."""
    codec = codec_for_layers(option, LAYOUT)
    rng = np.random.default_rng(0)
    vectors = {
        "normal": to_vector(rng.standard_normal(D)),
        "heavy": to_vector(rng.standard_cauchy(D)),
    }
    found = [size_law(codec, vectors["normal"])]
    found += [law for name, x in vectors.items() for law in error_laws(codec, name, x)]
    if codec.traits.linear and isinstance(codec, Linear):
        found.append(linearity_law(codec, *vectors.values()))
    return [*found, determinism_law(codec, vectors["normal"])]


MEANT = {
    "unbiased": "E C(x) = x: errors average out",
    "contraction": "E‖C(x) − x‖² < ‖x‖²: error feedback is allowed",
    "drains": "‖C(x) − x‖ ≤ ‖x‖: the residual of error feedback stays bounded, so it is allowed",
    "linear": "the sum of payloads decodes to the sum: an all-reduce adds them in flight",
    "lossless": "C(x) = x",
    "variable": "the size of a payload depends on x",
    "full_gradient": "needs the gradient over all samples",
    "reduces": "all payloads of a merge are decoded together",
    "scale_free": "does not preserve the norm of x: for gradients, not for model differences",
}


def list_guarantees(option: Codec) -> list[tuple[str, str]]:
    """Return the traits of an option that are on, each with its meaning."""
    traits = codec_for_layers(option, LAYOUT).traits._asdict()
    return [(name.replace("_", " "), MEANT[name]) for name, on in traits.items() if on] or [
        ("none", "")
    ]


def to_vector(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.float32))


def size_law(codec: Codec, x: Tensor) -> Law:
    """Compare bytes sent with bytes declared."""
    sent, declared = codec.encode(None, x, EncodeContext())[1].nbytes, codec.encoded_nbytes(None, D)
    kept = sent <= declared if codec.traits.variable else sent == declared
    most = "at most " if codec.traits.variable else ""
    return Law("bits an element", f"{most}{8 * declared / D:.3g}", f"{8 * sent / D:.3g}", kept)


def error_laws(codec: Codec, name: str, x: Tensor) -> list[Law]:
    """Measure relative error and, for unbiased codecs, bias."""
    sender = receiver = None
    total, draws = torch.zeros(D, dtype=torch.float64), []
    squared_norm = float((x.double() ** 2).sum())
    for k in range(DRAWS):
        sender, payload = codec.encode(sender, x, EncodeContext(round=k))
        receiver, decoded = codec.decode(receiver, payload, D)
        total += decoded
        draws.append(float(((decoded.double() - x) ** 2).sum()) / squared_norm)
    memory = sender is not None or receiver is not None
    errors = draws[-1:] if memory else draws
    mean = float(np.mean(errors))
    standard_error = float(np.std(errors)) / len(errors) ** 0.5
    bound = codec.bound(None, D)
    stated, kept = "-", None
    if np.isfinite(bound):
        stated = f"at most {bound:.3g}"
        kept = mean - CHANCE * standard_error <= bound * (1 + 1e-6)
    rows = [
        Law(
            f"relative error on a {name} vector{', in the end' if memory else ''}",
            stated,
            f"{mean:.3g}",
            kept,
        )
    ]
    if codec.traits.unbiased and not codec.traits.lossless and not memory:
        bias = float(torch.linalg.vector_norm(total / DRAWS - x)) / squared_norm**0.5
        chance = (mean / DRAWS) ** 0.5
        rows.append(
            Law(
                f"bias on a {name} vector",
                "0",
                f"{bias:.2g} (chance: {chance:.2g})",
                bias <= CHANCE * chance,
            )
        )
    return rows


def linearity_law(codec: Linear, x: Tensor, y: Tensor) -> Law:
    """Measure whether the sum of two payloads decodes to the sum."""
    one, other = (
        codec.encode(None, v, EncodeContext(worker=rank))[1] for rank, v in enumerate((x, y))
    )
    sums = codec.summand(one) + codec.summand(other)
    if codec.traits.reduces:  # it does not decode a sum to a sum: compare the summands
        found = sums
        expected = codec.summand(codec.encode(None, x + y, EncodeContext())[1])
    else:
        found = codec.decode(None, codec.summed(one, sums), D)[1]
        expected = codec.decode(None, one, D)[1] + codec.decode(None, other, D)[1]
    off = float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
    return Law("sum of payloads is the payload of the sum", "yes", f"off by {off:.1g}", off < 0.02)


def determinism_law(codec: Codec, x: Tensor) -> Law:
    """Measure whether the same message is encoded to the same bytes."""
    one, other = (codec.encode(None, x, EncodeContext(seed=1))[1] for _ in range(2))
    return Law(
        "same message, same bytes",
        "yes",
        "yes" if torch.equal(one, other) else "no",
        torch.equal(one, other),
    )
