"""Compression metrics of a run: compression error, residual, direction, and bytes by purpose.

Measures: p is the vector that was encoded, C(p) the decoded vector, and x the update.
`relative_error` = ‖p − C(p)‖²/‖p‖²; it exceeds 1 if the codec is not a contraction here. `residual`
= ‖p − C(p)‖/‖x‖ if the sender keeps the difference. `cosine` is the cosine between C(p) and x. The
monitor computes the workers' mean, see `ashl.run.metrics`.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019 (the contraction, measured
during training).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ashl.compression.contract import Codec
from ashl.compression.payload import HEADER, Split, header_of
from ashl.compression.wrappers import Layerwise, vector_norm


def measure_compression_error(
    pieces: Sequence[tuple[Codec, int, Tensor]],
    kept_back: Tensor | None,
    x: Tensor,
) -> dict[str, Any]:
    """Return the metrics of one update as plain values; None if a norm in a denominator is 0.

    Args: pieces has a (codec, elements, payload) for each message of x; each codec decodes without
    state. kept_back is the sender's residual, None if it keeps none.
    """
    sent = torch.cat([codec.decode(None, payload, d)[1] for codec, d, payload in pieces])
    error = x - sent if kept_back is None else kept_back
    encoded_norm, error_norm, update_norm = (
        vector_norm(sent + error),
        vector_norm(error),
        vector_norm(x),
    )
    kept = kept_back is not None and update_norm
    return payload_sizes([payload for _, _, payload in pieces]) | {
        "relative_error": (error_norm / encoded_norm) ** 2 if encoded_norm else None,
        "residual": error_norm / update_norm if kept else None,
        "cosine": cosine(sent, x),
        # The error of an unbiased codec averages out, and may exceed the vector.
        "unbiased": pieces[0][0].traits.unbiased,
    }


def payload_sizes(payloads: Sequence[Tensor]) -> dict[str, Any]:
    """Return the metrics that any messages have: their sizes; all others are None."""
    unknown = dict.fromkeys(("relative_error", "residual", "cosine"))
    together = Split(*map(sum, zip(*map(split_bytes, payloads), strict=True)))
    return {
        **unknown,
        "split": together,
        "nbytes": sum(payload.nbytes for payload in payloads),
        "unbiased": True,
    }


def cosine(a: Tensor, b: Tensor) -> float | None:
    lengths = vector_norm(a) * vector_norm(b)
    if lengths and math.isfinite(lengths):
        return float(torch.dot(a.double(), b.double())) / lengths
    return None


def split_bytes(payload: Tensor) -> Split:
    """Return the bytes of a payload by purpose."""
    if not payload.numel():
        return Split(0, 0, 0, 0)  # an empty message
    _, code, *_, scales, values = header_of(payload)
    start = HEADER.size + scales
    if code != Layerwise.code:
        return Split(HEADER.size, scales, values, len(payload) - start - values)
    lengths = payload[HEADER.size : start].numpy().view("<u4").tolist()
    pieces = payload[start : start + values].split(lengths)
    sums = [sum(column) for column in zip(*map(split_bytes, pieces), strict=True)]
    return Split(start + sums[0], *sums[1:])
