"""The table of codecs without state: a new one is a row here, and its laws are those of its flags and of `bound`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conf_option import conf_option


def codec(name: str, /, **fields: Any) -> Any:
    return conf_option("compression", name, **fields)


ROWS: dict[str, Any] = {
    "none": codec("none"),
    **{f"topk-{code}": codec("topk", indices=code) for code in ("int32", "packed", "bitmap")},
    **{f"topk-{code}": codec("topk", values=code) for code in ("fp16", "bf16")},
}
EXACT = {"none", "topk-int32", "topk-packed", "topk-bitmap"}  # what they send, they send as it is
RANDOM: set[str] = set()  # those that draw and are not unbiased, or not for every ratio

VECTORS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, d: rng.standard_normal(d),
    "heavy": lambda rng, d: rng.standard_cauchy(d),
    "layered": lambda rng, d: rng.standard_normal(d) * 10.0 ** (np.arange(d) * 9 // d - 6),
    "ties": lambda rng, d: rng.integers(-2, 3, d),
    "constant": lambda rng, d: np.full(d, -0.5),
    "zero": lambda rng, d: np.zeros(d),
    "mostly zero": lambda rng, d: rng.standard_normal(d) * (rng.random(d) < 0.01),
    "tiny": lambda rng, d: rng.standard_normal(d) * 1e-42,  # subnormal
    "huge": lambda rng, d: rng.uniform(-3e38, 3e38, d),
}
SIZES = (1, 2, 3, 31, 1000, 70_001)
RATIOS = (None, 1e-4, 0.01, 0.1, 0.4, 0.9, 1.0)
CASES = [(kind, d) for kind in VECTORS for d in SIZES]

every_codec = pytest.mark.parametrize("name", ROWS)


def vector(kind: str, d: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(VECTORS[kind](np.random.default_rng(seed), d).astype(np.float32))


def decoded(codec: Any, body: Any, d: int) -> Tensor:
    return codec.decode(None, body, d)[1]


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def length(x: Tensor) -> float:
    """‖x‖² in float64."""
    return float((x.double() ** 2).sum())
