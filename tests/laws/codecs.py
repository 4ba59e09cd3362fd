"""The table of codecs without state: a new one is a row here, and its laws are those of its flags
and of `bound`.
"""

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
    **{
        f"topk-{code}": codec("topk", indices=code)
        for code in ("int32", "packed", "bitmap", "golomb")
    },
    **{
        f"topk-{code}": codec("topk", values=code)
        for code in ("fp16", "bf16", "int8", "int4", "int2", "mean")
    },
    # quantizers with a threshold, of atoms, and with an entropy code
    "strom": codec("strom", threshold=1.5),
    "strom-dense": codec("strom", threshold=0.01),
    "atomo": codec("atomo"),
    "atomo-singular": codec("atomo", atoms="singular"),
    "dryden": codec("dryden", indices="bitmap"),
    "dryden-lloyd": codec("dryden", levels="lloyd"),
    "qsgd-elias": codec("qsgd", entropy="elias"),
    "uniform-pco": codec("uniform", entropy="pco"),
    "terngrad-pco": codec("terngrad", entropy="pco"),
    # sparsifiers
    "random_mask": codec("random_mask"),
    **{f"random_k-{code}": codec("random_k", indices=code) for code in ("seed", "golomb")},
    **{f"subsampling-{shared}": codec("subsampling", shared=shared) for shared in (True, False)},
    "stc": codec("stc"),
    "sbc": codec("sbc"),
    "threshold": codec("threshold", threshold=1.0),
    "single_threshold": codec("single_threshold", indices="golomb"),
    "random_dropping": codec("random_dropping"),
    "sparse_loco": codec("sparse_loco"),
    "sparse_loco-16": codec("sparse_loco", values="fp32", chunk=16),
    "demo": codec("demo"),
    "demo-int8": codec("demo", values="int8"),
    "adacomp": codec("adacomp"),
    "block_coordinate": codec("block_coordinate"),
    "block_coordinate-random": codec("block_coordinate", blocks=100, order="random", scaled=True),
    # value codes
    "topk-natural": codec("topk", values="natural"),
    # quantizers
    **{f"uniform-{k}": codec("uniform", levels=k) for k in (2, 256)},
    **{f"rotated-{k}": codec("rotated", levels=k) for k in (2, 16)},
    **{f"qsgd-{norm}": codec("qsgd", norm=norm, bucket=60) for norm in ("l2", "max")},
    "qsgd-127": codec("qsgd", levels=127),
    "natural": codec("natural"),
    **{f"cast-{dtype}": codec("cast", dtype=dtype) for dtype in ("fp16", "bf16")},
    "sign": codec("sign"),
    "sign-majority": codec("sign", scale="none", vote="majority"),
    "one_bit": codec("one_bit"),
    "terngrad": codec("terngrad"),
    "terngrad-clipped": codec("terngrad", clip_sigmas=1.0),
    # reducers, as they are on a link
    "gtopk": codec("gtopk"),
    "sketch_sgd": codec("sketch_sgd"),
    "fetch_sgd": codec("fetch_sgd", recovered_fraction=0.1),
    # of other gradients, and a grid
    **{f"grid-{bits}": codec("grid", bits=bits) for bits in (2, 8, 11)},
    **{
        f"laq-{bits}": codec("laq", bits=bits) for bits in (1, 4, None)
    },  # first messages: later ones need the first
    "variance": codec("variance"),
}
EXACT = {
    "none",
    "topk-int32",
    "topk-packed",
    "topk-bitmap",
    "topk-golomb",
}  # what they send, they send as it is
# Those that draw and are not unbiased.
RANDOM = {"random_mask", "random_k-seed", "random_k-golomb", "terngrad-clipped", "topk-natural"}
LARGEST = {
    "cast-fp16": 65504.0
}  # of those whose numbers end before those of float32: infinity is beyond

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
