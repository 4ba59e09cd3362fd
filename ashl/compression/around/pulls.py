"""Compressed pull: a server sends each worker the difference to the model that this worker holds.

Rule: with h_i what worker i holds, send C(w − h_i); both ends add it, h_i ← h_i + C(w − h_i). What was left out is
still in w − h_i at the next pull: h_i carries the residual, so C goes without error feedback. The first pull, and one
that would be no shorter, is the model itself, hence a ratio of 1 is the plain pull, bit for bit.

A server keeps one vector per worker for it. C is a contraction without state of its own, and both ends do the same
arithmetic, so that their copies are equal bit for bit.

Source: EF21-P of Gruntkowska, Tyurin and Richtárik, "EF21-P and Friends", ICML 2023, with one copy per worker because
workers pull at different times.
"""

from __future__ import annotations

from typing import Any

import torch

from ashl.compression.contract import Codec, Turn
from ashl.size_only import SizeOnly


def pull(codec: Codec, held: Any, model: Any, turn: Turn) -> tuple[Any, Any]:
    """At the server: (what the worker will hold, the body to send it). `held` is None at the first pull."""
    if held is None or codec.payload(turn.ratio, model.nbytes // 4) >= model.nbytes:
        return model, model
    _, body = codec.encode(None, model - held, turn)
    return advance(codec, held, body), body


def advance(codec: Codec, held: Any, body: Any) -> Any:
    """At the worker: the model after a pull. Nothing is changed in place. Raises BodyError."""
    if held is None:
        return body
    if isinstance(body, SizeOnly):
        return held
    if body.dtype == torch.float32 and body.shape == held.shape:
        return body
    params = held.clone()
    codec.add(params, body)
    return params
